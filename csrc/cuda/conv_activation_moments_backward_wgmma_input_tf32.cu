// The Hopper kernels of the input gradient with operands of kind tf32.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template void launch_wgmma_input<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
