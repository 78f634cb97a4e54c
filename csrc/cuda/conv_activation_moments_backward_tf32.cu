// The backward window kernels with operands of kind tf32.
#include "cuda/conv_activation_moments_backward_launch.cuh"

namespace convnormpool {

template void launch_backward<WindowOperand::kTf32>(const BackwardLaunch&);

}  // namespace convnormpool
