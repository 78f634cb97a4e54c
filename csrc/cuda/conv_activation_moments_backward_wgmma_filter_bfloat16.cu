// The Hopper kernels of the filter and bias gradients with operands of kind bfloat16.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template int64_t launch_wgmma_filter<WgmmaOperand::kBFloat16>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
