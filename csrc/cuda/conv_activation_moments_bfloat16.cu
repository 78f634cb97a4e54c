// The window kernels with operands of kind bfloat16.
#include "cuda/conv_activation_moments_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kBFloat16>(const WindowLaunch&);

}  // namespace convnormpool
