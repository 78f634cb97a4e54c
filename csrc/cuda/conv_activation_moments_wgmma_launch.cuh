// The launch of the Hopper window kernel for one kind of operand. Each kind has a file of its own,
// so that they compile side by side, and only where the build is for 9.0a: setup.py then defines
// CONVNORMPOOL_SM_90A for all files.
#pragma once

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/conv_activation_moments_plan.h"
#include "cuda/conv_activation_moments_wgmma.cuh"

namespace convnormpool {

// Everything that crosses to a launch.
struct WgmmaLaunch {
  Problem problem;
  const void* x;
  const void* w;
  const void* bias;  // or null
  float2* partials;
  int64_t activation;
  int32_t sm_count;
  cudaStream_t stream;
};

// For hardswish and a 4x4x4 filter what was fastest on an H200 (benchmarks/NOTES.md); 3x3x3 filters
// follow it, not timed. 16-bit operands leave registers for a fourth warpgroup. General activations
// take what it or, beside the scales of a split 4x4x4 filter, the third one would have, so that
// ptxas spills little; not timed either.
constexpr int wgmma_warpgroups(WgmmaOperand operand, int extent, bool hardswish) {
  const bool split = operand == WgmmaOperand::kSplit;
  if (hardswish) return split || operand == WgmmaOperand::kTf32 ? 3 : 4;
  return split && extent == 4 ? 2 : 3;
}
constexpr WgmmaOverlap wgmma_overlap(WgmmaOperand operand) {
  return operand == WgmmaOperand::kSplit ? WgmmaOverlap::kOrdered : WgmmaOverlap::kFree;
}
template <WgmmaOperand kOperand, int C, int kExtent, class Act>
using WgmmaChoice =
    WgmmaConfig<kOperand, C, kExtent, kExtent, kExtent, wgmma_overlap(kOperand),
                wgmma_warpgroups(kOperand, kExtent, std::is_same_v<Act, HardswishFn>)>;

// The map of x for the boxes of quads or of rests; empty where there are none.
template <class Config>
TensorMap wgmma_tensor_map(const Problem& problem, const WgmmaParams& p, bool rest) {
  if ((rest ? p.rest : p.quads) == 0) return {};
  uint32_t box[5];
  wgmma_box<Config>(p, rest, box);
  return tensor_map(problem, p.x, box);
}

template <class Config, class Act>
void launch_wgmma_kernel(const WgmmaLaunch& launch, const Act& activation) {
  // A rest of one row of four samples has the largest stage.
  constexpr size_t kStageBytes = (4 * Config::kR * Config::kC * Config::kPitch + 127) / 128 * 128;
  constexpr size_t kSharedBytes =
      Config::kStageOffset + Config::kWarpgroups * Config::kStages * kStageBytes;
  static_assert(kSharedBytes <= kHopperSharedBytes, "no problem may need more");
  const auto kernel = conv_activation_moments_wgmma<Config, Act>;
  // The same for all launches: they may come from several threads.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kSharedBytes));
  STD_TORCH_CHECK(error == cudaSuccess, "conv_activation_moments_wgmma needs ", kSharedBytes,
                  " bytes of shared memory: ", cudaGetErrorString(error));

  WgmmaParams p = wgmma_params<Config>(launch.problem);
  p.x = launch.x, p.w = launch.w, p.b = launch.bias, p.partials = launch.partials;
  const int blocks = std::min(p.items, launch.sm_count), tiles = (p.K + 15) / 16;
  wgmma_deal(p, blocks);
  launch_dependent(kernel, dim3(unsigned(blocks), unsigned(tiles)), Config::kThreads,
                   wgmma_shared_bytes<Config>(p), launch.stream, p,
                   wgmma_tensor_map<Config>(launch.problem, p, false),
                   wgmma_tensor_map<Config>(launch.problem, p, true), activation);
  check_launch("conv_activation_moments_wgmma", {p.N, Config::kC, p.D, p.H, p.W, p.K});
}

template <WgmmaOperand kOperand>
void launch_wgmma(const WgmmaLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    using Act = std::decay_t<decltype(fn)>;
    if (has_filter(launch.problem, 4, 3)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 3, 4, Act>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 1)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 1, 3, Act>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 3)) {
      return launch_wgmma_kernel<WgmmaChoice<kOperand, 3, 3, Act>>(launch, fn);
    }
    STD_TORCH_CHECK(false, "no wgmma kernel takes this problem");
  });
}

extern template void launch_wgmma<WgmmaOperand::kTf32>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kSplit>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kFloat16>(const WgmmaLaunch&);
extern template void launch_wgmma<WgmmaOperand::kBFloat16>(const WgmmaLaunch&);

}  // namespace convnormpool
