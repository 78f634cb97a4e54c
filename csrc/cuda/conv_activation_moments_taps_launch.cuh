// The launch of the taps kernel for one kind of operand.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/conv_activation_moments_plan.h"
#include "cuda/conv_activation_moments_taps.cuh"

namespace convnormpool {

// Everything that crosses to a launch.
struct TapsLaunch {
  TapsParameters parameters;
  int32_t channel_tiles;  // of a block, 1 or 2
  int64_t activation;
  int32_t sm_count;
  cudaStream_t stream;
};

template <class Config>
void launch_taps_kernel(const TapsLaunch& launch,
                        const typename Config::ActivationType& activation) {
  const TapsParameters& p = launch.parameters;
  const WindowGeometry& s = p.geometry;
  const auto kernel = conv_taps_kernel<Config>;
  // The same for all launches: they may come from several threads.
  int device = 0, most = 0, of_sm = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  const int64_t bytes = taps_memory(p.filter, Config::kParts, Config::kTiles).total;
  STD_TORCH_CHECK(error == cudaSuccess && bytes <= most, "conv_taps_kernel needs ", bytes,
                  " bytes of shared memory, and a block may have ", most, ": ",
                  cudaGetErrorString(error));
  const int64_t rows = (s.P + kTapsRows - 1) / kTapsRows;
  const int64_t items = int64_t{p.N} * s.slabs * rows * s.segments;
  const int64_t tiles = (s.K + 16 * Config::kTiles - 1) / (16 * Config::kTiles);
  // Blocks take items in turn, so no more run than find room at once, beside what the system keeps.
  constexpr int64_t kReserved = 1024;
  const int64_t side_by_side = of_sm >= 2 * (bytes + kReserved) ? 2 : 1;
  const int64_t room = std::max<int64_t>(1, launch.sm_count * side_by_side / tiles);
  const dim3 grid(static_cast<unsigned>(std::min(items, room)), static_cast<unsigned>(tiles));
  launch_dependent(kernel, grid, kTapsThreads, static_cast<size_t>(bytes), launch.stream, p,
                   activation);
  check_launch("conv_taps_kernel", {p.N, p.filter.C, s.D, s.H, s.W, s.K});
}

template <WindowOperand kOperand>
void launch_taps(const TapsLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    using Fn = std::decay_t<decltype(fn)>;
    if (launch.channel_tiles == 1) {
      return launch_taps_kernel<TapsConfig<kOperand, Fn, 1>>(launch, fn);
    }
    return launch_taps_kernel<TapsConfig<kOperand, Fn, 2>>(launch, fn);
  });
}

extern template void launch_taps<WindowOperand::kTf32>(const TapsLaunch&);
extern template void launch_taps<WindowOperand::kSplit>(const TapsLaunch&);
extern template void launch_taps<WindowOperand::kFloat16>(const TapsLaunch&);
extern template void launch_taps<WindowOperand::kBFloat16>(const TapsLaunch&);

}  // namespace convnormpool
