// The Hopper window kernels with operands of kind tf32.
#include "cuda/conv_activation_moments_wgmma_launch.cuh"

namespace convnormpool {

template void launch_wgmma<WgmmaOperand::kTf32>(const WgmmaLaunch&);

}  // namespace convnormpool
