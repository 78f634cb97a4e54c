// The backward window kernels with operands of kind float16.
#include "cuda/conv_activation_moments_backward_launch.cuh"

namespace convnormpool {

template void launch_backward<WindowOperand::kFloat16>(const BackwardLaunch&);

}  // namespace convnormpool
