// The launch of the backward window kernels for one kind of operand. Each kind has a file of its
// own, so that they compile side by side.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/conv_activation_moments_backward_plan.h"
#include "cuda/conv_activation_moments_backward_window.cuh"

namespace convnormpool {

// Everything that crosses to a launch. The geometry is that of the gradient.
struct BackwardLaunch {
  WindowKernel kernel;  // the filter's form; the rows' does not matter here
  BackwardParameters parameters;
  bool input_gradient;  // or else the filter's
  int64_t blocks;
  int64_t activation;
  cudaStream_t stream;
};

template <class Config>
void launch_backward_kernel(const BackwardLaunch& launch,
                            const typename Config::ActivationType& activation) {
  BackwardParameters p = launch.parameters;
  const BackwardGeometry& g = p.geometry;
  const int shared = Config::shared_bytes(g.slab_planes);
  const cudaError_t error = cudaFuncSetAttribute(
      backward_window_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  STD_TORCH_CHECK(error == cudaSuccess, "backward_window_kernel needs ", shared,
                  " bytes of shared memory: ", cudaGetErrorString(error));
  const int32_t tiles = (g.K + 15) / 16;
  const unsigned blocks = static_cast<unsigned>(launch.blocks);
  for (int32_t tile = 0; tile < (Config::kInputGradient ? tiles : 1); ++tile) {
    const dim3 grid(blocks, static_cast<unsigned>(Config::kInputGradient ? 1 : tiles));
    p.first_tile = tile;
    p.add_to_sum = tile > 0;
    p.write_dx = tile + 1 == tiles;
    launch_dependent(backward_window_kernel<Config>, grid, Config::kThreads,
                     static_cast<size_t>(shared), launch.stream, p, activation);
    check_launch("backward_window_kernel", {p.N, Config::C, g.D, g.H, g.W, g.K});
  }
}

template <WindowOperand kOperand, int kExtent, int C, class Fn>
void launch_backward_wanted(const BackwardLaunch& launch, const Fn& fn) {
  constexpr bool kSplit = kOperand == WindowOperand::kSplit;
  constexpr BackwardWarps kInput = backward_warps(kSplit, true);
  constexpr BackwardWarps kFilter = backward_warps(kSplit, false);
  if (launch.input_gradient) {
    launch_backward_kernel<BackwardConfig<kExtent, kExtent, kExtent, C, kOperand, Fn, kInput.rows,
                                          kInput.filter, kInput.blocks_per_sm>>(launch, fn);
  } else {
    launch_backward_kernel<BackwardConfig<kExtent, kExtent, kExtent, C, kOperand, Fn, kFilter.rows,
                                          kFilter.filter, kFilter.blocks_per_sm>>(launch, fn);
  }
}

template <WindowOperand kOperand>
void launch_backward(const BackwardLaunch& launch) {
  dispatch_activation(launch.activation, [&](const auto& fn) {
    switch (launch.kernel) {
      case WindowKernel::k4x4x4Channels3ShortRows:
      case WindowKernel::k4x4x4Channels3:
        return launch_backward_wanted<kOperand, 4, 3>(launch, fn);
      case WindowKernel::k3x3x3Channels1:
        return launch_backward_wanted<kOperand, 3, 1>(launch, fn);
      case WindowKernel::k3x3x3Channels3:
        return launch_backward_wanted<kOperand, 3, 3>(launch, fn);
      case WindowKernel::kTaps:
      case WindowKernel::kNone:
        break;
    }
    STD_TORCH_CHECK(false, "no backward window kernel takes this problem");
  });
}

extern template void launch_backward<WindowOperand::kTf32>(const BackwardLaunch&);
extern template void launch_backward<WindowOperand::kSplit>(const BackwardLaunch&);
extern template void launch_backward<WindowOperand::kFloat16>(const BackwardLaunch&);
extern template void launch_backward<WindowOperand::kBFloat16>(const BackwardLaunch&);

}  // namespace convnormpool
