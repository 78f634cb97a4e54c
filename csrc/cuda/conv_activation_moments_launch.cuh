// The launch of the window kernels for one kind of operand. Each kind has a file of its own, so
// that they compile side by side.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/conv_activation_moments_plan.h"
#include "cuda/conv_activation_moments_window.cuh"

namespace convnormpool {

// Everything that crosses to a launch.
struct WindowLaunch {
  WindowKernel kernel;
  WindowParameters parameters;
  int64_t activation;
  int32_t sm_count;
  cudaStream_t stream;
};

template <class Config>
void launch_window_kernel(const WindowLaunch& launch,
                          const typename Config::ActivationType& activation) {
  const WindowParameters& p = launch.parameters;
  const int64_t items = int64_t{p.N} * window_pieces(p.geometry);
  const int32_t channel_tiles = (p.geometry.K + 15) / 16;
  // Workers take pieces in turn, so no more run than find room at once.
  const int64_t room = std::max(1, launch.sm_count * Config::kBlocksPerSm / channel_tiles);
  const dim3 grid(static_cast<unsigned>(std::min(items, room)),
                  static_cast<unsigned>(channel_tiles));
  launch_dependent(conv_window_kernel<Config>, grid, Config::kThreads, Config::kSharedBytes,
                   launch.stream, p, activation);
  check_launch("conv_window_kernel",
               {p.N, Config::C, p.geometry.D, p.geometry.H, p.geometry.W, p.geometry.K});
}

// Blocks on an SM: as many as the registers allow without spills.
template <WindowOperand kOperand>
void launch_window(const WindowLaunch& launch) {
  constexpr bool kFloat32 = kOperand == WindowOperand::kTf32 || kOperand == WindowOperand::kSplit;
  constexpr int kFewBlocks = kFloat32 ? 8 : 0;
  dispatch_activation(launch.activation, [&](const auto& fn) {
    using Fn = std::decay_t<decltype(fn)>;
    constexpr int kShortBlocks = std::is_same_v<Fn, HardswishFn> ? 0 : 8;
    switch (launch.kernel) {
      case WindowKernel::k4x4x4Channels3ShortRows:
        if (launch.parameters.geometry.W < kShortRow) {
          return launch_window_kernel<
              WindowConfig<4, 4, 4, 3, kOperand, Fn, false, kWindowTiles, kShortBlocks, true>>(
              launch, fn);
        }
        return launch_window_kernel<
            WindowConfig<4, 4, 4, 3, kOperand, Fn, false, kWindowTiles, kShortBlocks>>(launch, fn);
      case WindowKernel::k4x4x4Channels3:
        return launch_window_kernel<WindowConfig<4, 4, 4, 3, kOperand, Fn, true, kWindowFewTiles>>(
            launch, fn);
      case WindowKernel::k3x3x3Channels1:
        return launch_window_kernel<WindowConfig<3, 3, 3, 1, kOperand, Fn, true, kWindowTiles>>(
            launch, fn);
      case WindowKernel::k3x3x3Channels3:
        return launch_window_kernel<
            WindowConfig<3, 3, 3, 3, kOperand, Fn, true, kWindowTiles, kFewBlocks>>(launch, fn);
      case WindowKernel::kTaps:
      case WindowKernel::kNone:
        break;
    }
    STD_TORCH_CHECK(false, "no window kernel takes this problem");
  });
}

extern template void launch_window<WindowOperand::kTf32>(const WindowLaunch&);
extern template void launch_window<WindowOperand::kSplit>(const WindowLaunch&);
extern template void launch_window<WindowOperand::kFloat16>(const WindowLaunch&);
extern template void launch_window<WindowOperand::kBFloat16>(const WindowLaunch&);

}  // namespace convnormpool
