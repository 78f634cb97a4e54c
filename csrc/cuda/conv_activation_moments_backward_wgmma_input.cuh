// The fused backward on Hopper, its part for x: the gradient of x from those of the moments of
// a(conv3d(x, w, b)), for small filters over few input channels, stride 1; neither the
// convolution's output nor its gradient is ever in memory.
//
// A warpgroup takes a sample, or a slab of planes and a segment of 32 columns of it, and sweeps it
// four output rows (a quad) at a time through the depth.
//
// Recomputation, as conv_activation_moments_wgmma.cuh: M is 64 output positions, N the 16 T pairs
// of (slot, output channel), the depth the taps (ci, kh, kw) of one input plane. Output plane z
// rolls in slot z mod T. Warp q owns a row of 32 columns as two tiles of 16: rows g and g + 8 of
// tile t stand for columns 4 block(g) + t and + t + 2. So a lane has the outputs of four
// neighbouring columns and four channels.
//
// dy = (grad_mean / positions + 2 grad_m2 (a(y) - mean)) a'(y), scaled by a power of two for each
// sample and tile of 16 channels, is rounded into registers, where D's fragment of y is A's of dy.
//
// dx[ci, z + kd, p + kh, q + kw] += sum over channels of dy[k, z, p, q] w[k, ci, kd, kh, kw]. M is
// 64 positions (row p, column q + kw), N the pairs of (slot, ci, kh), the depth 16 output channels.
// Plane d of dx rolls in slot d mod T as well; for each phase of the slots the weights stand in
// shared memory once. kw shifts by columns: it is the choice of A's registers, those before the
// lane's own four coming from the lane before. kh is lane % 4 in D: a finished plane's sums meet in
// shared memory, where each row of dx adds up its four output rows; what a quad gives to the three
// rows below it waits there, for all planes, for the next quad.
//
// A step of the pipeline is an input plane: dy of the output plane that the step before finished is
// formed, then its products and the plane's recomputation are issued together. While the latter
// runs, the plane of dx that the former finished is added up and written. The tensor cores get the
// rest of their work from the other warpgroup.
//
// Segments and slabs overlap by S - 1 columns and T - 1 planes; each element of dx is written once,
// by the one that has all of its terms. Segments begin where tensor copies may.
//
// float32: x and w are scaled by powers of two into float16, x for each block of four columns plane
// by plane, w by channel for the recomputation and by one for dx. kSplit adds the low halves, with
// three products, and adds up planes outside the tensor cores, which round towards zero.
//
// Launch: conv_activation_moments_backward_wgmma_input with wgmma_input_blocks blocks of
// Config::kThreads threads, one on an SM, and wgmma_input_shared_bytes<Config>(params) bytes of
// dynamic shared memory; with more than 16 output channels a launch for each tile, in order. Any
// grid gives the same bits.
#pragma once

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_sweep.cuh"

namespace convnormpool {

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_backward_wgmma_input(const WgmmaInputParams p,
                                                 const __grid_constant__ TensorMap map,
                                                 const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  wgmma_input_begin<Config>(shared);
  const WgmmaWeights<Config> weights(p, 16 * p.first_tile);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  WgmmaInputRing<Config> ring(p, &map, group);
  wgmma_input_stage<Config>(p, weights, shared);

  WgmmaInputSweep<Config, Act> sweep(ring, act);
  sweep.run();
}

}  // namespace convnormpool
