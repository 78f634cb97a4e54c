// The Hopper kernels of both gradients at once with operands of kind tf32.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template int64_t launch_wgmma_both<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
