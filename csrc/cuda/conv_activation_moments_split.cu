// The window kernels with operands of kind split.
#include "cuda/conv_activation_moments_launch.cuh"

namespace convnormpool {

template void launch_window<WindowOperand::kSplit>(const WindowLaunch&);

}  // namespace convnormpool
