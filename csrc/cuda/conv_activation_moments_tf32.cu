// The window kernels with operands of kind tf32.
#include "cuda/conv_activation_moments_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kTf32>(const WindowLaunch&);

}  // namespace convnormpool
