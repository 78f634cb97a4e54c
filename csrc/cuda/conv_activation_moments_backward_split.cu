// The backward window kernels with operands of kind split.
#include "cuda/conv_activation_moments_backward_launch.cuh"

namespace convnormpool {

template void launch_backward<WindowOperand::kSplit>(const BackwardLaunch&);

}  // namespace convnormpool
