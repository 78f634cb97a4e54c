// Host side of _conv_act_moments_out: the fused direct convolution with statistics.
#include <vector>

#include "cuda/conv_activation_moments_launch.cuh"
#ifdef CONVNORMPOOL_SM_90A
#include "cuda/conv_activation_moments_wgmma_launch.cuh"
#endif

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

#ifdef CONVNORMPOOL_SM_90A
constexpr bool kWgmmaCompiled = true;

void launch_wgmma_of(const WgmmaLaunch& launch) {
  switch (launch.problem.dtype) {
    case DType::kFloat16:
      return launch_wgmma<WgmmaOperand::kFloat16>(launch);
    case DType::kBFloat16:
      return launch_wgmma<WgmmaOperand::kBFloat16>(launch);
    default:
      return launch.problem.precision == Precision::kTf32
                 ? launch_wgmma<WgmmaOperand::kTf32>(launch)
                 : launch_wgmma<WgmmaOperand::kSplit>(launch);
  }
}
#else
constexpr bool kWgmmaCompiled = false;
#endif

void launch_window_of(const Problem& p, const WindowLaunch& launch) {
  switch (p.dtype) {
    case DType::kFloat16:
      return launch_window<WindowOperand::kFloat16>(launch);
    case DType::kBFloat16:
      return launch_window<WindowOperand::kBFloat16>(launch);
    default:
      return p.precision == Precision::kTf32 ? launch_window<WindowOperand::kTf32>(launch)
                                             : launch_window<WindowOperand::kSplit>(launch);
  }
}

void conv_act_moments_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation,
                          int64_t groups, int64_t activation, int64_t precision, bool wgmma,
                          Tensor mean, Tensor m2, std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  check_activation(activation);
  const DeviceScope scope(x);
  int device = 0, major = 0, minor = 0, sm_count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  std::string refusal = window_refusal(p, major);
  if (refusal.empty() && wgmma) {
    STD_TORCH_CHECK(wgmma_device(major, minor),
                    "the wgmma kernel needs compute capability 9.0, not ", major, '.', minor);
    refusal = wgmma_refusal(p, kWgmmaCompiled);
  }
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
  const int64_t alignment = conv_act_moments_alignment(p, wgmma);
  STD_TORCH_CHECK(aligned_to(x.data_ptr(), alignment), "x must be aligned to ", alignment,
                  " bytes");
  if (p.N == 0 || p.K == 0) return;
  STD_TORCH_CHECK(workspace.has_value(), "workspace is missing");
  const int64_t floats = conv_act_moments_workspace(p, wgmma);
  STD_TORCH_CHECK(workspace->numel() >= floats, "workspace must have ", floats, " elements, not ",
                  workspace->numel());
  check_statistics(*workspace, "workspace", workspace->numel(), DType::kFloat32, x);
  float2* const partials = static_cast<float2*>(workspace->data_ptr());
  float* const mean_data = static_cast<float*>(mean.data_ptr());
  float* const m2_data = static_cast<float*>(m2.data_ptr());
#ifdef CONVNORMPOOL_SM_90A
  if (wgmma) {
    return launch_wgmma_of({p, x.data_ptr(), w.data_ptr(), b ? b->data_ptr() : nullptr, partials,
                            mean_data, m2_data, activation, sm_count, scope.stream()});
  }
#endif

  WindowLaunch launch{window_kernel(p), {}, activation, sm_count, scope.stream()};
  WindowParameters& parameters = launch.parameters;
  parameters.x = x.data_ptr();
  parameters.w = w.data_ptr();
  parameters.bias = b ? b->data_ptr() : nullptr;
  parameters.partial = partials;
  parameters.N = static_cast<int32_t>(p.N);
  parameters.geometry = window_geometry_of(p);
  launch_window_of(p, launch);
  merge_window_kernel<<<linear_grid((p.N * p.K + kMergeThreads - 1) / kMergeThreads), kMergeThreads,
                        0, launch.stream>>>(parameters.geometry, parameters.N, partials, mean_data,
                                            m2_data);
  check_launch("merge_window_kernel", {p.N, p.K});
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_conv_act_moments_out", TORCH_BOX(&convnormpool::conv_act_moments_out));
}
