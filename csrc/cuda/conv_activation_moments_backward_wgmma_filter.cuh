// The gradients of filter and bias on Hopper: small filters over few input channels, stride 1.
//
// What it computes: dw and db of moments(a(conv3d(x, w, b))) from the moments' gradients, as sums
// of each warpgroup's share. The outputs come from
// conv_activation_moments_backward_wgmma_filter_outputs.
//
// Mapping: dw[k, ci, kd, kh, kw] is the sum over positions of dy[k, z, h, q] x[ci, z + kd, h + kh,
// q + kw]. For one input plane a wgmma has M as the 64 pairs (kd, k), N as (kh, ci, kw), 16 to a
// channel, and the depth as 16 positions of an output row: a tile of the outputs.
//   A: registers. Warp q supplies kd = q: dy of the output plane q before the newest of the input
//      plane. Each warp stores the dy of its row as they leave its registers, positions by
//      channels, and all four are read back transposed.
//   B: shared memory. The windows of a plane are in registers as pairs of neighbours, lane (g, c)
//      with row c and columns from 4 block(g) on: stored transposed, they give for each of the four
//      columns j of a block (a chunk of depth 8) and each tap the 16 bytes x[.., 4 block(g) + j +
//      kw], g = 0 .. 7, in the order [chunk][input row][ci][kw], so that the taps of output row h
//      are N = 16 C neighbours from input row h on. Nothing is loaded for it.
//   D: all of dw in 8 C registers, for the life of the block.
// dy of plane z is complete T - 1 planes after input plane z, so both operands wait in rings of
// T + 1 steps. A step's products follow in the next one, when all warps have stored.
//
// Range. The products' exponent, x's and dy's together, must be the same for all that a warpgroup
// sums. x's follows the largest value of a plane where it must; dy's is what then remains, at most
// what its sample allows; and where a sample brings larger products than those before, the sums'
// exponent is lowered. Planes that were stored before an exponent changed are scaled down to it.
//
// float32 ("split"): the tensor cores cut off what falls out of an accumulator, so the products of
// one plane meet in fresh ones and are added up outside.
//
// Launch: after wgmma_deal(params, blocks), with blocks at most params.items,
// conv_activation_moments_backward_wgmma_filter with grid (blocks, channel tiles of 16), block
// Config::kThreads, dynamic shared memory Config::kSharedBytes, one block per SM, so blocks =
// number of SMs / channel tiles is best; then sum_backward_kernel for dw, with a count of blocks
// kWarpgroups, and for db with four times that.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_filter_sweep.cuh"

namespace convnormpool {

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_backward_wgmma_filter(const WgmmaFilterParams p,
                                                  const __grid_constant__ TensorMap map,
                                                  const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  const int first_channel = int(blockIdx.y) * 16;
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kWarpgroups * Config::kStages; ++i) {
      mbarrier_init(base + uint32_t(Config::kBarrierOffset + 8 * i), 1);
    }
  }
  fence_proxy_async();
  __syncthreads();
  grid_dependency_wait();

  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  WgmmaRing<Config> ring(p, &map, &map, group);
  wgmma_backward_stage_weights<Config>(p, first_channel, shared);
  wgmma_backward_stage_terms<Config>(p, first_channel, shared);
  fence_proxy_async();
  WgmmaFilter<Config, Act> filter(p, ring, act, first_channel);
  filter.clear();
  __syncthreads();

  if (Config::kOverlap == WgmmaOverlap::kOrdered && group == Config::kWarpgroups - 1) {
    filter.pass_turn();
  }
  filter.run();
  if (ring.item > 0) filter.drain();
  const int64_t blocks = gridDim.x, block = int64_t(blockIdx.y) * blocks + blockIdx.x;
  filter.store(p, block * Config::kWarpgroups + group);
}

}  // namespace convnormpool
