// The window kernels and the taps kernel with operands of kind bfloat16.
#include "cuda/conv_activation_moments_launch.cuh"
#include "cuda/conv_activation_moments_taps_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kBFloat16>(const WindowLaunch&);
template void launch_taps<WindowOperand::kBFloat16>(const TapsLaunch&);

}  // namespace convnormpool
