// The Hopper window kernels with operands of kind float16.
#include "cuda/conv_activation_moments_wgmma_launch.cuh"

namespace convnormpool {

template void launch_wgmma<WgmmaOperand::kFloat16>(const WgmmaLaunch&);

}  // namespace convnormpool
