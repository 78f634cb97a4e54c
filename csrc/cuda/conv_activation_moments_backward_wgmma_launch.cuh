// The launches of the Hopper kernels of the gradients for one kind of operand. Each kind has a file
// of its own for each, so that they compile side by side, and only where the build is for 9.0a.
#pragma once

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter_alone.cuh"
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

// Extents of a compiled filter as a type.
template <int kC_, int kExtent_>
struct WgmmaFilterExtents {
  static constexpr int kC = kC_, kExtent = kExtent_;
};

// f(WgmmaFilterExtents) of the problem's filter.
template <class F>
auto dispatch_wgmma_filter(const Problem& p, F&& f) {
  if (has_filter(p, 4, 3)) return f(WgmmaFilterExtents<3, 4>{});
  if (has_filter(p, 3, 1)) return f(WgmmaFilterExtents<1, 3>{});
  STD_TORCH_CHECK(has_filter(p, 3, 3), "no gradient by wgmma takes this problem");
  return f(WgmmaFilterExtents<3, 3>{});
}

// What was fastest on an H200 for hardswish and a 4x4x4 filter (benchmarks/NOTES.md), which
// operands of one part now leave to another kernel; the others follow it, not timed.
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
int64_t launch_wgmma_filter_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
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
  return int64_t{blocks} * Config::kWarpgroups;
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
template <class Config, class Kernel, class Params, class... Act>
void launch_wgmma_input_tiles(Kernel kernel, const char* name, Params& p, int blocks,
                              const WgmmaBackwardLaunch& launch, const Act&... activation) {
  uint32_t box[5];
  wgmma_input_box<Config>(box);
  const TensorMap map = tensor_map(launch.problem, p.x, box);
  const int tiles = (p.K + 15) / 16;
  for (int tile = 0; tile < tiles; ++tile) {
    p.first_tile = tile, p.add_to_sum = tile > 0, p.write_dx = tile + 1 == tiles;
    launch_dependent(kernel, unsigned(blocks), Config::kThreads,
                     wgmma_input_shared_bytes<Config>(p), launch.stream, p, map, activation...);
    check_launch(name, {p.N, Config::kC, p.D, p.H, p.W, p.K});
  }
}

// The gradient of the filter and the bias alone, where operands have one part and the activation is
// hardswish. Returns the number of partial sums for each tile of output channels.
template <class Config>
int64_t launch_wgmma_filter_alone_kernel(const WgmmaBackwardLaunch& launch) {
  constexpr const char* kName = "conv_activation_moments_backward_wgmma_filter_alone";
  const auto kernel = conv_activation_moments_backward_wgmma_filter_alone<Config>;
  allow_shared_bytes(kernel, kName, Config::kMostSharedBytes);
  WgmmaBothParams p{};
  static_cast<WgmmaInputParams&>(p) = wgmma_filter_alone_params<Config>(launch.problem);
  set_wgmma_backward_pointers(p, launch);
  p.filter_partial = launch.filter_partial, p.bias_partial = launch.bias_partial;
  const int blocks = int(wgmma_filter_alone_blocks(launch.problem, launch.sm_count));
  launch_wgmma_input_tiles<Config>(kernel, kName, p, blocks, launch);
  return int64_t{blocks} * Config::kWarpgroups;
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
  launch_wgmma_input_tiles<Config>(kernel, kName, p, wgmma_input_blocks<Config>(p, launch.sm_count),
                                   launch, activation);
}

// Whether slabs that are shorter than those of the input's gradient alone, and so have more in
// common that is computed twice, make both gradients at once a quarter longer: then the other two
// kernels are faster.
template <class Config>
bool wgmma_both_is_longer(const WgmmaInputParams& p, const Problem& problem) {
  const WgmmaInputParams alone = wgmma_input_params<typename Config::Input>(problem);
  return int64_t{4} * p.slabs * p.planes > int64_t{5} * alone.slabs * alone.planes;
}

// Both gradients from one recomputation, by one of the kernels for that, whose blocks leave kSums
// partial sums each. Returns their number for each tile of output channels.
template <class Config, int kSums, class Kernel, class... Act>
int64_t launch_wgmma_both_tiles(Kernel kernel, const char* name, const WgmmaBackwardLaunch& launch,
                                const Act&... activation) {
  WgmmaBothParams p{};
  set_wgmma_input_params<Config>(p, launch);
  p.filter_partial = launch.filter_partial, p.bias_partial = launch.bias_partial;
  allow_shared_bytes(kernel, name, Config::kMostSharedBytes);
  const int blocks = wgmma_input_blocks<Config>(p, launch.sm_count);
  launch_wgmma_input_tiles<Config>(kernel, name, p, blocks, launch, activation...);
  return int64_t{blocks} * kSums;
}

// 0 where it was not launched, as the next one.
template <class Config, class Act>
int64_t launch_wgmma_both_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
  const WgmmaInputParams p = wgmma_input_params<Config>(launch.problem);
  if (wgmma_both_is_longer<Config>(p, launch.problem)) return 0;
  return launch_wgmma_both_tiles<Config, Config::kWarpgroups>(
      conv_activation_moments_backward_wgmma_both<Config, Act>,
      "conv_activation_moments_backward_wgmma_both", launch, activation);
}

template <int C, int kExtent, class Act>
int64_t launch_wgmma_both_split_kernel(const WgmmaBackwardLaunch& launch, const Act& activation) {
  const auto with = [&](auto whole) {
    using Config = WgmmaBothSplitConfig<C, kExtent, kExtent, kExtent, decltype(whole)::value>;
    return launch_wgmma_both_tiles<Config, Config::kTiles>(
        conv_activation_moments_backward_wgmma_both_split<Config, Act>,
        "conv_activation_moments_backward_wgmma_both_split", launch, activation);
  };
  using Config = WgmmaBothSplitConfig<C, kExtent, kExtent, kExtent>;
  const WgmmaInputParams p = wgmma_input_params<Config>(launch.problem);
  if (wgmma_both_is_longer<Config>(p, launch.problem)) return 0;
  return p.slabs * p.segments == 1 ? with(std::true_type{}) : with(std::false_type{});
}

inline bool is_hardswish(const WgmmaBackwardLaunch& launch) {
  return launch.activation == static_cast<int64_t>(Activation::kHardswish);
}

// For operands of one part and hardswish.
template <WgmmaOperand kOperand>
int64_t launch_wgmma_filter_alone(const WgmmaBackwardLaunch& launch) {
  return dispatch_wgmma_filter(launch.problem, [&](auto filter) {
    constexpr int kC = decltype(filter)::kC, kExtent = decltype(filter)::kExtent;
    using Config = WgmmaFilterAloneConfig<kOperand, kC, kExtent, kExtent, kExtent>;
    return launch_wgmma_filter_alone_kernel<Config>(launch);
  });
}

// The kernel that transposes dy, whose windows are copies of each other: for split operands, which
// have no room for both in shared memory, and other activations.
template <WgmmaOperand kOperand>
int64_t launch_wgmma_filter(const WgmmaBackwardLaunch& launch) {
  const auto with = [&](const auto& activation) {
    return dispatch_wgmma_filter(launch.problem, [&](auto filter) {
      using Config = WgmmaFilterChoice<kOperand, decltype(filter)::kC, decltype(filter)::kExtent>;
      return launch_wgmma_filter_kernel<Config>(launch, activation);
    });
  };
  if constexpr (kOperand == WgmmaOperand::kSplit) {
    return dispatch_activation(launch.activation, with);
  } else {
    if (is_hardswish(launch)) return launch_wgmma_filter_alone<kOperand>(launch);
    return with(ActivationFn{static_cast<Activation>(launch.activation)});
  }
}

template <WgmmaOperand kOperand>
void launch_wgmma_input(const WgmmaBackwardLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& activation) {
    dispatch_wgmma_filter(launch.problem, [&](auto filter) {
      using Config = WgmmaInputChoice<kOperand, decltype(filter)::kC, decltype(filter)::kExtent>;
      launch_wgmma_input_kernel<Config>(launch, activation);
    });
  });
}

// For hardswish; 0 where it does not take the problem.
template <WgmmaOperand kOperand>
int64_t launch_wgmma_both(const WgmmaBackwardLaunch& launch) {
  if (!is_hardswish(launch)) return 0;
  return dispatch_wgmma_filter(launch.problem, [&](auto filter) {
    constexpr int kC = decltype(filter)::kC, kExtent = decltype(filter)::kExtent;
    if constexpr (kOperand == WgmmaOperand::kSplit) {
      return launch_wgmma_both_split_kernel<kC, kExtent>(launch, HardswishFn{});
    } else {
      using Config = WgmmaBothConfig<kOperand, kC, kExtent, kExtent, kExtent>;
      return launch_wgmma_both_kernel<Config>(launch, HardswishFn{});
    }
  });
}

extern template int64_t launch_wgmma_filter<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter_alone<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter_alone<WgmmaOperand::kFloat16>(
    const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_filter_alone<WgmmaOperand::kBFloat16>(
    const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template void launch_wgmma_input<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_both<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_both<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_both<WgmmaOperand::kFloat16>(const WgmmaBackwardLaunch&);
extern template int64_t launch_wgmma_both<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
