// Host side of _conv_act_moments_out: the fused direct convolution with statistics.
#include <vector>

#include "cuda/conv_activation_moments_launch.cuh"

namespace convnormpool {
namespace {

constexpr int kMergeThreads = 64;

Problem problem_of(const Tensor& x, const Tensor& w, const std::vector<int64_t>& stride,
                   const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
                   int64_t groups, int64_t precision) {
  STD_TORCH_CHECK(x.dim() == 5 && w.dim() == 5, "x and w must be 5-D");
  STD_TORCH_CHECK(stride.size() == 3 && padding.size() == 3 && dilation.size() == 3,
                  "stride, padding and dilation must have three elements");
  Problem p{};
  p.N = x.size(0), p.C = x.size(1), p.D = x.size(2), p.H = x.size(3), p.W = x.size(4);
  p.K = w.size(0), p.T = w.size(2), p.R = w.size(3), p.S = w.size(4);
  std::copy(stride.begin(), stride.end(), p.stride);
  std::copy(padding.begin(), padding.end(), p.padding);
  std::copy(dilation.begin(), dilation.end(), p.dilation);
  p.groups = groups;
  p.dtype = dtype_of(x, "x");
  p.precision = static_cast<Precision>(precision);
  return p;
}

void conv_act_moments_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation,
                          int64_t groups, int64_t activation, int64_t precision, Tensor mean,
                          Tensor m2, std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  check_activation(activation);
  const DeviceScope scope(x);
  int device = 0, major = 0, sm_count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  const std::string refusal = window_refusal(p, major);
  STD_TORCH_CHECK(refusal.empty(), refusal);
  check_dense(x, "x", p.N * p.C * p.D * p.H * p.W, x);
  check_dense(w, "w", p.K * p.C * p.T * p.R * p.S, x);
  STD_TORCH_CHECK(dtype_of(w, "w") == p.dtype, "w must have the dtype of x");
  if (b) {
    check_dense(*b, "b", p.K, x);
    STD_TORCH_CHECK(dtype_of(*b, "b") == p.dtype, "b must have the dtype of x");
  }
  check_statistics(mean, "mean", p.N * p.K, DType::kFloat32, x);
  check_statistics(m2, "m2", p.N * p.K, DType::kFloat32, x);
  const WindowKernel kernel = window_kernel(p);
  STD_TORCH_CHECK(kernel != WindowKernel::k4x4x4Channels3ShortRows ||
                      aligned_to(x.data_ptr(), kWindowAlignment * x.element_size()),
                  "x must be aligned to ", kWindowAlignment, " elements");
  if (p.N == 0 || p.K == 0) return;
  STD_TORCH_CHECK(workspace.has_value(), "workspace is missing");
  STD_TORCH_CHECK(workspace->numel() >= conv_act_moments_workspace(p), "workspace must have ",
                  conv_act_moments_workspace(p), " elements, not ", workspace->numel());
  check_statistics(*workspace, "workspace", workspace->numel(), DType::kFloat32, x);

  WindowLaunch launch{kernel, {}, activation, sm_count, scope.stream()};
  WindowParameters& parameters = launch.parameters;
  parameters.x = x.data_ptr();
  parameters.w = w.data_ptr();
  parameters.bias = b ? b->data_ptr() : nullptr;
  parameters.partial = static_cast<float2*>(workspace->data_ptr());
  parameters.N = static_cast<int32_t>(p.N);
  parameters.geometry = window_geometry_of(p);
  switch (p.dtype) {
    case DType::kFloat16:
      launch_window<WindowOperand::kFloat16>(launch);
      break;
    case DType::kBFloat16:
      launch_window<WindowOperand::kBFloat16>(launch);
      break;
    default:
      if (p.precision == Precision::kTf32) {
        launch_window<WindowOperand::kTf32>(launch);
      } else {
        launch_window<WindowOperand::kSplit>(launch);
      }
  }
  merge_window_kernel<<<linear_grid((p.N * p.K + kMergeThreads - 1) / kMergeThreads), kMergeThreads,
                        0, launch.stream>>>(parameters.geometry, parameters.N, parameters.partial,
                                            static_cast<float*>(mean.data_ptr()),
                                            static_cast<float*>(m2.data_ptr()));
  check_launch("merge_window_kernel", {p.N, p.K});
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_conv_act_moments_out", TORCH_BOX(&convnormpool::conv_act_moments_out));
}
