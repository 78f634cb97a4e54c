// Host side of _conv_act_moments_out: the fused direct convolution with statistics.
#include <vector>

#include "cuda/conv_activation_moments_host.cuh"
#include "cuda/conv_activation_moments_launch.cuh"
#include "cuda/conv_activation_moments_taps_launch.cuh"
#ifdef CONVNORMPOOL_SM_90A
#include "cuda/conv_activation_moments_wgmma_launch.cuh"
#endif

namespace convnormpool {
namespace {

void conv_act_moments_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation,
                          int64_t groups, int64_t activation, int64_t precision, bool wgmma,
                          Tensor mean, Tensor m2, std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  check_activation(activation);
  const DeviceScope scope(x);
  const DeviceFacts facts;
  std::string refusal = window_refusal(p, facts.major, facts.minor);
  if (refusal.empty() && wgmma) {
    STD_TORCH_CHECK(wgmma_device(facts.major, facts.minor),
                    "the wgmma kernel needs compute capability 9.0, not ", facts.major, '.',
                    facts.minor);
    refusal = wgmma_refusal(p, kWgmmaCompiled);
  }
  STD_TORCH_CHECK(refusal.empty(), refusal);
  check_operands(p, x, w, b);
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
    const WgmmaLaunch launch{p,
                             x.data_ptr(),
                             w.data_ptr(),
                             b ? b->data_ptr() : nullptr,
                             partials,
                             mean_data,
                             m2_data,
                             activation,
                             facts.sm_count,
                             scope.stream()};
    return dispatch_operand<WgmmaOperand>(
        p, [&](auto operand) { launch_wgmma<decltype(operand)::value>(launch); });
  }
#endif

  const int32_t samples = static_cast<int32_t>(p.N);
  const WindowGeometry geometry = window_geometry_of(p);
  const void* const bias = b ? b->data_ptr() : nullptr;
  dispatch_operand<WindowOperand>(p, [&](auto operand) {
    constexpr WindowOperand kOperand = decltype(operand)::value;
    if (window_kernel(p) == WindowKernel::kTaps) {
      const TapsParameters parameters{x.data_ptr(), w.data_ptr(),   bias,    partials,
                                      samples,      taps_filter(p), geometry};
      return launch_taps<kOperand>({parameters, taps_channel_tiles(p, facts.major, facts.minor),
                                    activation, facts.sm_count, scope.stream()});
    }
    const WindowParameters parameters{x.data_ptr(), w.data_ptr(), bias,
                                      partials,     samples,      geometry};
    launch_window<kOperand>(
        {window_kernel(p), parameters, activation, facts.sm_count, scope.stream()});
  });
  const int64_t tiles = (p.K + kMergeChannels - 1) / kMergeChannels;
  merge_window_kernel<<<linear_grid(p.N * tiles), kMergeChannels * kMergeLanes, 0,
                        scope.stream()>>>(geometry, partials, mean_data, m2_data);
  check_launch("merge_window_kernel", {p.N, p.K});
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_conv_act_moments_out", TORCH_BOX(&convnormpool::conv_act_moments_out));
}
