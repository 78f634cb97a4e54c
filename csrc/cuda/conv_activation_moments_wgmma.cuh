// The window kernel of the fused forward on Hopper: small filters over few input channels,
// stride 1.
//
// What it computes: (mean, M2) of a(conv3d(x, w, b)) per (sample, piece, channel), a piece being
// one output row (all Z depths of it) within one tile of 32 columns.
//
// Mapping. An input plane adds to the T output planes that it overlaps, all from one window. So a
// wgmma has the rows of M as output positions, N as the 16 T pairs of (kd, channel) and the depth
// as the plane's taps (ci, kh, kw). D holds T slots of 16 columns; output plane z rolls in slot z
// mod T and is finished T - 1 planes after it began.
//   M: warp q of a warpgroup owns one output row and 32 columns of it, as two tiles of 16 rows;
//      rows g of tile t stand for columns 4 block(g) + kTileColumns t, rows g + 8 for those
//      kHalfColumns on.
//   A: lane (g, c) holds the window x[.., h + c, 4 block(g) ..+ 7]: c = kh. One step of a
//      channel covers kw = 0..3: register i is the pair of neighbouring columns that begins at
//      kTileColumns t + kHalfColumns (i % 2) + 2 (i / 2).
//   B: shared memory, blocks of 16 columns in the order kd = 0, T - 1, .., 1, 0, T - 1, .., 1: for
//      plane p, slot j needs kd = (p - j) mod T, so the operand begins at block (-p) mod T.
// A warpgroup works on 4 rows at a time (an item): of one sample, or where P is no multiple of 4
// the P mod 4 last rows of several samples. Its input planes flow through a ring of stages, one
// tensor copy a plane; the rows of x must be a multiple of 16 bytes long and its base aligned to
// 16. Tiles of columns begin where their boxes begin at a multiple of 16 bytes, so the first may
// begin before the outputs do.
//
// float32: the windows of each block of four columns are scaled by a power of two, plane by plane,
// and rounded to float16 ("tf32") or split into two float16 halves ("split"); where a plane needs
// another scale the accumulators follow.
//
// Launch: after wgmma_deal(params, blocks), with blocks at most params.items,
// conv_activation_moments_wgmma with grid (blocks, channel tiles of 16), block
// Config::kThreads, dynamic shared memory wgmma_shared_bytes<Config>(params), one block per SM, so
// blocks = number of SMs is best; then a merge of WgmmaPieces (conv_activation_moments_merge.cuh).
// Any grid gives the same bits: items are independent, and what they are depends on the problem
// alone. At 168 registers three warpgroups, 12 warps, fill an SM.
#pragma once

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"
#include "cuda/conv_activation_moments_wgmma_sweep.cuh"

namespace convnormpool {

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_wgmma(const WgmmaParams p, const __grid_constant__ TensorMap quad_map,
                                  const __grid_constant__ TensorMap rest_map, const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  const int first_channel = int(blockIdx.y) * 16;
  grid_dependency_wait();
  grid_dependency_launch();
  const WgmmaWeights<Config> weights(p, first_channel);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  if (thread_index_anew() % 128 == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(base + uint32_t(Config::kBarrierOffset + 8 * (group * Config::kStages + i)), 1);
    }
  }
  fence_proxy_async();
  __syncwarp();
  WgmmaRing<Config> ring(p, &quad_map, &rest_map, group);

  if (threadIdx.x < 64) {
    reinterpret_cast<uint32_t*>(shared + Config::kZeroOffset)[threadIdx.x] = 0u;
  }
  wgmma_stage_resets<Config>(p, first_channel, shared);
  wgmma_stage_weights<Config>(weights, shared);
  fence_proxy_async();
  __syncthreads();

  WgmmaSweep<Config, Act> sweep(ring, act);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i / 2 * 8 + sweep.lane() % 4 * 2 + i % 2;
    const bool given = p.b != nullptr && first_channel + k < p.K;
    sweep.bias[i] = given ? wgmma_weight<Config>(p.b, size_t(first_channel + k)) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < 8 * Config::kT; ++i) sweep.acc[0][i] = sweep.acc[1][i] = 0.f;
  constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;
  if (kOrdered && group == Config::kWarpgroups - 1) sweep.pass_turn();
  for (; ring.exists(ring.item); ++ring.item) {
    sweep.begin();
    sweep.sweep();
    sweep.keep();
  }
  // One item fewer than the first warpgroup: let the others have their turns.
  if (kOrdered && ring.item * Config::kWarpgroups < ring.block_items()) {
    for (int i = 0; i < p.planes; ++i) {
      sweep.take_turn();
      sweep.pass_turn();
    }
  }
  if (ring.item > 0) sweep.write(ring.item - 1);
}

}  // namespace convnormpool
