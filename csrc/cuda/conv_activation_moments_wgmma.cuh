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
//      rows g and g + 8 of tile t stand for columns 4 block(g) + 2 t and + 2 t + 1.
//   A: lane (g, c) holds the window x[.., h + c, 4 block(g) ..+ 7]: c = kh. In tf32 step j of a
//      channel covers kw = j (k slot c) and kw = j + 2 (k slot c + 4), so that its four registers
//      are x[2 t + j .. 2 t + j + 3]. In 16 bits one step covers kw = 0..3 and the registers are
//      the pairs that begin at 2 t .. 2 t + 3.
//   B: shared memory, blocks of 16 columns in the order kd = 0, T - 1, .., 1, 0, T - 1, .., 1: for
//      plane p, slot j needs kd = (p - j) mod T, so the operand begins at block (-p) mod T.
// A warpgroup works on 4 rows at a time (an item): of one sample, or where P is no multiple of 4
// the P mod 4 last rows of several samples. Its input planes flow through a ring of stages.
//
// Launch: grid (blocks, channel tiles of 16), block Config::kThreads, dynamic shared memory
// wgmma_shared_bytes<Config>(params); one block per SM, so blocks = number of SMs is best. Any grid
// gives the same bits: items are independent, and what they are depends on the problem alone.
// Before it params.tickets are zero and for kSplit sample_amax has filled params.amax. At 168
// registers three warpgroups, 12 warps, fill an SM.
#pragma once

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"
#include "cuda/conv_activation_moments_wgmma_sweep.cuh"

namespace convnormpool {

// The bits of max |x| of each sample of `count` elements into amax, which is zero before. NaN is
// larger than everything. Grid (N, any), block 256.
__global__ void __launch_bounds__(256) sample_amax(const float* x, int64_t count, uint32_t* amax) {
  const float* sample = x + int64_t(blockIdx.x) * count;
  const int64_t first = int64_t(blockIdx.y) * 256 + threadIdx.x, step = int64_t(gridDim.y) * 256;
  uint32_t most = 0;
  const auto add = [&](float v) { most = max(most, __float_as_uint(fabsf(v))); };
  if (count % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const float4* vectors = reinterpret_cast<const float4*>(sample);
#pragma unroll 8
    for (int64_t i = first; i < count / 4; i += step) {
      const float4 v = __ldg(&vectors[i]);
      add(v.x), add(v.y), add(v.z), add(v.w);
    }
  } else {
    for (int64_t i = first; i < count; i += step) add(sample[i]);
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&amax[blockIdx.x], most);
}

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_wgmma(const WgmmaParams p, const __grid_constant__ TensorMap quad_map,
                                  const __grid_constant__ TensorMap rest_map, const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  const int first_channel = int(blockIdx.y) * 16;
  if (threadIdx.x == 0 && Config::kLoads == WgmmaLoads::kTensor) {
    for (int i = 0; i < Config::kWarpgroups * Config::kStages; ++i) {
      mbarrier_init(base + uint32_t(Config::kBarrierOffset + 8 * i), 1);
    }
  }
  if (threadIdx.x < 64) {
    reinterpret_cast<uint32_t*>(shared + Config::kZeroOffset)[threadIdx.x] = 0u;
  }
  wgmma_stage_weights<Config>(p, first_channel, shared);
  fence_proxy_async();
  __syncthreads();

  const int first = int(int64_t(p.items) * blockIdx.x / gridDim.x);
  const int last = int(int64_t(p.items) * (blockIdx.x + 1) / gridDim.x);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  WgmmaRing<Config> ring(p, &quad_map, &rest_map, group, first + group, last);
  for (int i = 0; i < Config::kStages; ++i) {
    ring.fill();
    ring.advance();
  }

  WgmmaSweep<Config, Act> sweep(ring, act);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i / 2 * 8 + sweep.lane() % 4 * 2 + i % 2;
    const bool given = p.b != nullptr && first_channel + k < p.K;
    sweep.bias[i] = given ? wgmma_weight<Config>(p.b, size_t(first_channel + k)) : 0.f;
    sweep.reset[i] = Config::kSplit ? 0.f : sweep.bias[i];
  }
#pragma unroll
  for (int i = 0; i < 8 * Config::kT; ++i) {
    sweep.acc[0][i] = sweep.acc[1][i] = sweep.reset[i % 8 / 4 * 2 + i % 2];
  }
  constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;
  if (kOrdered && group == Config::kWarpgroups - 1) sweep.pass_turn();
  for (int round = first; round < last; round += Config::kWarpgroups) {
    if (round + group < last) {
      const WgmmaItem item = wgmma_item(p, round + group);
      sweep.begin(item);
      if constexpr (Config::kSplit) {
        const int* exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
        const int in_item = sweep.warp() / item.rows;
        const int n = item.n + (in_item < 4 / item.rows ? in_item : 0);
        const int exponent = wgmma_split_exponent(p.amax[n < p.N ? n : p.N - 1]);
        sweep.scale = wgmma_power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int k = i / 2 * 8 + sweep.lane() % 4 * 2 + i % 2;
          sweep.unscale[i] = wgmma_power_of_two(-exponent - exponents[k]);
        }
      }
      // Kept in shared memory during the sweep: registers are short.
      WgmmaItem* kept =
          reinterpret_cast<WgmmaItem*>(shared + Config::kItemOffset) + threadIdx.x / 32;
      if (sweep.lane() == 0) *kept = item;
      sweep.sweep(p.outputs);
      __syncwarp();
      sweep.write(*kept, first_channel);
      __syncwarp();
    } else if (kOrdered) {
      for (int i = 0; i < p.planes; ++i) {
        sweep.take_turn();
        sweep.pass_turn();
      }
    }
  }
}

}  // namespace convnormpool
