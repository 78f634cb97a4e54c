// The backward window kernels with operands of kind bfloat16.
#include "cuda/conv_activation_moments_backward_launch.cuh"

namespace convnormpool {

template void launch_backward<WindowOperand::kBFloat16>(const BackwardLaunch&);

}  // namespace convnormpool
