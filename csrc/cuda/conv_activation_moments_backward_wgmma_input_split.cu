// The Hopper kernels of the input gradient with operands of kind split.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template void launch_wgmma_input<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
