// Host side of _conv_act_moments_out and _conv_norm_pool_out: the fused direct convolution with
// statistics, alone or with the normalisation of their groups.
#include <vector>

#include "cuda/conv_activation_moments_host.cuh"
#include "cuda/conv_activation_moments_launch.cuh"
#include "cuda/conv_activation_moments_merge.cuh"
#include "cuda/conv_activation_moments_taps_launch.cuh"
#include "cuda/conv_activation_moments_wgmma_pieces.cuh"
#include "cuda/group_norm_pool_host.cuh"
#ifdef CONVNORMPOOL_SM_90A
#include "cuda/conv_activation_moments_wgmma_launch.cuh"
#endif

namespace convnormpool {
namespace {

// Merges what the convolution has left; `norm`, or null, follows.
template <class Pieces>
void launch_merge(const Pieces& pieces, float* mean, float* m2, const NormPool* norm, int sm_count,
                  cudaStream_t stream) {
  const int64_t N = pieces.samples(), K = pieces.channels();
  const int tiles = merge_tiles(pieces.channels());
  // In one launch, unless a sample has too many tiles for a block.
  if (norm != nullptr && tiles <= kMergeMostRounds * kMergeMostUnits) {
    const MergeBlock block = merge_block(N, pieces.channels(), sm_count);
    launch_dependent(merge_norm_pool_kernel<Pieces>,
                     linear_grid((N + block.samples - 1) / block.samples),
                     block.units * kMergeThreads, 0, stream, pieces, block.samples, *norm);
    return check_launch("merge_norm_pool_kernel", {N, K});
  }
  launch_dependent(merge_pieces_kernel<Pieces>,
                   linear_grid((N * tiles + kMergeLeastUnits - 1) / kMergeLeastUnits),
                   kMergeLeastUnits * kMergeThreads, 0, stream, pieces, mean, m2);
  check_launch("merge_pieces_kernel", {N, K});
  if (norm != nullptr) launch_group_norm_pool(*norm, stream);
}

// What both operators do; `norm`, or null, is of mean and m2.
void convolve(const Problem& p, const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
              int64_t activation, bool wgmma, const Tensor& mean, const Tensor& m2,
              const std::optional<Tensor>& workspace, const NormPool* norm) {
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
  const void* const bias = b ? b->data_ptr() : nullptr;
  const auto merge = [&](const auto& pieces) {
    launch_merge(pieces, static_cast<float*>(mean.data_ptr()), static_cast<float*>(m2.data_ptr()),
                 norm, facts.sm_count, scope.stream());
  };
#ifdef CONVNORMPOOL_SM_90A
  if (wgmma) {
    const WgmmaLaunch launch{p,        x.data_ptr(), w.data_ptr(),   bias,
                             partials, activation,   facts.sm_count, scope.stream()};
    dispatch_operand<WgmmaOperand>(
        p, [&](auto operand) { launch_wgmma<decltype(operand)::value>(launch); });
    return merge(wgmma_pieces_of(p, partials));
  }
#endif

  const int32_t samples = static_cast<int32_t>(p.N);
  const WindowGeometry geometry = window_geometry_of(p);
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
  merge(WindowPieces{geometry, partials, samples});
}

void conv_act_moments_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation,
                          int64_t groups, int64_t activation, int64_t precision, bool wgmma,
                          Tensor mean, Tensor m2, std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  convolve(p, x, w, b, activation, wgmma, mean, m2, workspace, nullptr);
}

void conv_norm_pool_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                        std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                        int64_t activation, int64_t precision, bool wgmma,
                        std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                        int64_t num_groups, double eps, Tensor out, Tensor mean, Tensor m2,
                        std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  const GroupNormPool moments =
      group_norm_pool_of(mean, m2, norm_weight, p.positions(), num_groups, eps);
  STD_TORCH_CHECK(moments.samples == p.N && moments.channels == p.K, "mean must be (", p.N, ", ",
                  p.K, ")");
  const NormPool norm = norm_pool_of(moments, norm_bias, out, mean);
  convolve(p, x, w, b, activation, wgmma, mean, m2, workspace, &norm);
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_conv_act_moments_out", TORCH_BOX(&convnormpool::conv_act_moments_out));
  m.impl("_conv_norm_pool_out", TORCH_BOX(&convnormpool::conv_norm_pool_out));
}
