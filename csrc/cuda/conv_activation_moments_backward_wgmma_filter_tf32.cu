// The Hopper kernels of the filter and bias gradients with operands of kind tf32.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template int64_t launch_wgmma_filter<WgmmaOperand::kTf32>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
