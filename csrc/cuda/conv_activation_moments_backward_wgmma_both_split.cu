// The Hopper kernels of both gradients at once with split operands.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template int64_t launch_wgmma_both<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
