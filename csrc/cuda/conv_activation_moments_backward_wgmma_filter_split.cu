// The Hopper kernels of the filter and bias gradients with operands of kind split.
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"

namespace convnormpool {

template int64_t launch_wgmma_filter<WgmmaOperand::kSplit>(const WgmmaBackwardLaunch&);

}  // namespace convnormpool
