// The launches of the Hopper kernels of the gradients for one kind of operand. Each kind has a file
// of its own for each, so that they compile side by side, and only where the build is for 9.0a.
#pragma once

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_plan.h"
#include "cuda/conv_activation_moments_plan.h"

namespace convnormpool {

// Everything that crosses to a launch; of the results only those of its gradient.
struct WgmmaBackwardLaunch {
  Problem problem;
  const void* x;
  const void* w;
  const void* bias;  // or null
  const float *mean, *m2, *grad_mean, *grad_m2;
  void* dx;
  float* dx_sum;  // for 16-bit dx of more than 16 output channels
  float *filter_partial, *bias_partial;
  int64_t activation;
  int32_t sm_count;
  cudaStream_t stream;
};

// What was fastest on an H200 for hardswish and a 4x4x4 filter (benchmarks/NOTES.md); the others
// follow it, not timed.
template <WgmmaOperand kOperand, int C, int kExtent>
using WgmmaFilterChoice =
    WgmmaFilterConfig<kOperand, C, kExtent, kExtent, kExtent,
                      kOperand == WgmmaOperand::kSplit ? WgmmaOverlap::kOrdered
                                                       : WgmmaOverlap::kFree,
                      int(wgmma_filter_warpgroups(kOperand == WgmmaOperand::kSplit)),
                      kOperand == WgmmaOperand::kSplit ? 3 : 4>;
template <WgmmaOperand kOperand, int C, int kExtent>
using WgmmaInputChoice = WgmmaInputConfig<kOperand, C, kExtent, kExtent, kExtent>;

template <class Params>
void set_wgmma_backward_pointers(Params& p, const WgmmaBackwardLaunch& launch) {
  p.x = launch.x, p.w = launch.w, p.b = launch.bias;
  p.mean = launch.mean, p.m2 = launch.m2;
  p.grad_mean = launch.grad_mean, p.grad_m2 = launch.grad_m2;
}

// The same bytes for all launches of a kernel: they may come from several threads.
template <class Kernel>
void allow_shared_bytes(Kernel kernel, const char* name, size_t bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  STD_TORCH_CHECK(error == cudaSuccess, name, " needs ", bytes,
                  " bytes of shared memory: ", cudaGetErrorString(error));
}

template <class Config, class Act>
void launch_wgmma_filter_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
  constexpr const char* kName = "conv_activation_moments_backward_wgmma_filter";
  const auto kernel = conv_activation_moments_backward_wgmma_filter<Config, Act>;
  allow_shared_bytes(kernel, kName, Config::kSharedBytes);
  WgmmaFilterParams p{};
  static_cast<WgmmaBackwardParams&>(p) = wgmma_backward_params<Config>(launch.problem);
  set_wgmma_backward_pointers(p, launch);
  p.filter_partial = launch.filter_partial, p.bias_partial = launch.bias_partial;
  const int blocks = int(wgmma_filter_blocks(launch.problem, launch.sm_count));
  wgmma_deal(p, blocks);
  uint32_t box[5];
  wgmma_box<Config>(p, false, box);
  launch_dependent(kernel, dim3(unsigned(blocks), unsigned((p.K + 15) / 16)), Config::kThreads,
                   Config::kSharedBytes, launch.stream, p, tensor_map(launch.problem, p.x, box),
                   activation);
  check_launch(kName, {p.N, Config::kC, p.D, p.H, p.W, p.K});
}

// p of a kernel with the input's gradient, and what its launches share.
template <class Config, class Params>
void set_wgmma_input_params(Params& p, const WgmmaBackwardLaunch& launch) {
  constexpr int kMostPlanes = Config::kMostPlanes / Config::kT * Config::kT;
  static_assert(Config::kSegmentStep >= kWgmmaInputLeastColumns &&
                    kMostPlanes - 2 * (Config::kT - 1) >= kWgmmaInputLeastPlanes,
                "the planner's counts");
  static_cast<WgmmaInputParams&>(p) = wgmma_input_params<Config>(launch.problem);
  set_wgmma_backward_pointers(p, launch);
  p.dx = launch.dx;
  if (p.K > 16) p.dx_sum = Config::kFloat ? static_cast<float*>(launch.dx) : launch.dx_sum;
}

// A launch for each tile of output channels, whose results for dx add up.
template <class Config, class Kernel, class Params, class Act>
int launch_wgmma_input_tiles(Kernel kernel, const char* name, Params& p,
                             const WgmmaBackwardLaunch& launch, const Act& activation) {
  uint32_t box[5];
  wgmma_input_box<Config>(box);
  const TensorMap map = tensor_map(launch.problem, p.x, box);
  const int tiles = (p.K + 15) / 16, blocks = wgmma_input_blocks<Config>(p, launch.sm_count);
  for (int tile = 0; tile < tiles; ++tile) {
    p.first_tile = tile, p.add_to_sum = tile > 0, p.write_dx = tile + 1 == tiles;
    launch_dependent(kernel, unsigned(blocks), Config::kThreads,
                     wgmma_input_shared_bytes<Config>(p), launch.stream, p, map, activation);
    check_launch(name, {p.N, Config::kC, p.D, p.H, p.W, p.K});
  }
  return blocks;
}

template <class Config, class Act>
void launch_wgmma_input_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
  constexpr const char* kName = "conv_activation_moments_backward_wgmma_input";
  constexpr size_t kSharedBytes = Config::kCarryOffset + size_t(Config::kWarpgroups) *
                                                             Config::kMostPlanes *
                                                             Config::kCarryBytes;
  static_assert(kSharedBytes <= kHopperSharedBytes, "no problem may need more");
  const auto kernel = conv_activation_moments_backward_wgmma_input<Config, Act>;
  allow_shared_bytes(kernel, kName, kSharedBytes);
  WgmmaInputParams p{};
  set_wgmma_input_params<Config>(p, launch);
  launch_wgmma_input_tiles<Config>(kernel, kName, p, launch, activation);
}

// Both gradients from one recomputation. Its slabs are shorter than those of the input's gradient
// alone, and what neighbouring slabs have in common is computed twice: where that makes it a
// quarter longer, the other two kernels are faster. Returns the number of blocks that have left
// partial sums, or 0 where it was not launched.
template <class Config, class Act>
int launch_wgmma_both_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
  constexpr const char* kName = "conv_activation_moments_backward_wgmma_both";
  WgmmaBothParams p{};
  set_wgmma_input_params<Config>(p, launch);
  const WgmmaInputParams alone = wgmma_input_params<typename Config::Input>(launch.problem);
  if (int64_t{4} * p.slabs * p.planes > int64_t{5} * alone.slabs * alone.planes) return 0;
  p.filter_partial = launch.filter_partial, p.bias_partial = launch.bias_partial;
  const auto kernel = conv_activation_moments_backward_wgmma_both<Config, Act>;
  allow_shared_bytes(kernel, kName, Config::kMostSharedBytes);
  return launch_wgmma_input_tiles<Config>(kernel, kName, p, launch, activation);
}

template <WgmmaOperand kOperand>
void launch_wgmma_filter(const WgmmaBackwardLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    if (has_filter(launch.problem, 4, 3)) {
      return launch_wgmma_filter_kernel<WgmmaFilterChoice<kOperand, 3, 4>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 1)) {
      return launch_wgmma_filter_kernel<WgmmaFilterChoice<kOperand, 1, 3>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 3)) {
      return launch_wgmma_filter_kernel<WgmmaFilterChoice<kOperand, 3, 3>>(launch, fn);
    }
    STD_TORCH_CHECK(false, "no filter gradient by wgmma takes this problem");
  });
}

template <WgmmaOperand kOperand>
void launch_wgmma_input(const WgmmaBackwardLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    if (has_filter(launch.problem, 4, 3)) {
      return launch_wgmma_input_kernel<WgmmaInputChoice<kOperand, 3, 4>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 1)) {
      return launch_wgmma_input_kernel<WgmmaInputChoice<kOperand, 1, 3>>(launch, fn);
    }
    if (has_filter(launch.problem, 3, 3)) {
      return launch_wgmma_input_kernel<WgmmaInputChoice<kOperand, 3, 3>>(launch, fn);
    }
    STD_TORCH_CHECK(false, "no input gradient by wgmma takes this problem");
  });
}

// For operands of one part and hardswish; 0 where it does not take the problem.
template <WgmmaOperand kOperand>
int launch_wgmma_both(const WgmmaBackwardLaunch& launch) {
  if (launch.activation != static_cast<int64_t>(Activation::kHardswish)) return 0;
  const HardswishFn fn;
  if (has_filter(launch.problem, 4, 3)) {
    return launch_wgmma_both_kernel<WgmmaBothConfig<kOperand, 3, 4, 4, 4>>(launch, fn);
  }
  if (has_filter(launch.problem, 3, 1)) {
    return launch_wgmma_both_kernel<WgmmaBothConfig<kOperand, 1, 3, 3, 3>>(launch, fn);
  }
  if (has_filter(launch.problem, 3, 3)) {
    return launch_wgmma_both_kernel<WgmmaBothConfig<kOperand, 3, 3, 3, 3>>(launch, fn);
  }
  return 0;
}

extern template void launch_wgmma_filter<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_filter<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_filter<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_filter<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);
extern template int launch_wgmma_both<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template int launch_wgmma_both<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template int launch_wgmma_both<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
