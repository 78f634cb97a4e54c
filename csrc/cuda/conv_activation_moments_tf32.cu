// The window kernels and the taps kernel with operands of kind tf32.
#include "cuda/conv_activation_moments_launch.cuh"
#include "cuda/conv_activation_moments_taps_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kTf32>(const WindowLaunch&);
template void launch_taps<WindowOperand::kTf32>(const TapsLaunch&);

}  // namespace convnormpool
