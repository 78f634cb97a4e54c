// The window kernels and the taps kernel with operands of kind split.
#include "cuda/conv_activation_moments_launch.cuh"
#include "cuda/conv_activation_moments_taps_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kSplit>(const WindowLaunch&);
template void launch_taps<WindowOperand::kSplit>(const TapsLaunch&);

}  // namespace convnormpool
