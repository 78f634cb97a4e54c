// The Hopper window kernels with operands of kind split.
#include "cuda/conv_activation_moments_wgmma_launch.cuh"

namespace convnormpool {

template void launch_wgmma<WgmmaOperand::kSplit>(const WgmmaLaunch&);

}  // namespace convnormpool
