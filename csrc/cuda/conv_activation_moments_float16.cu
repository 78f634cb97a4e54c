// The window kernels with operands of kind float16.
#include "cuda/conv_activation_moments_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kFloat16>(const WindowLaunch&);

}  // namespace convnormpool
