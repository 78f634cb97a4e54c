// The fused forward for small filters of any extents, stride 1, by mma.sync: moments of
// a(conv3d(x, w, b)) for each piece of a sample; compute capability 8.0 and later. For what the
// window kernels, which are compiled for their filters, don't take.
//
// A block works on eight output rows of a segment of 32 columns, a warp on one of them (a piece,
// see conv_activation_moments_window_map.h), and sweeps the depth. The rows of T input planes, of
// all channels, and of the next one stand in shared memory.
//
//   A  16 output channels x taps: the weights, as fragments in shared memory
//   B  taps x 8 outputs: lane % 4 and the register stand for a pair of kw, lane / 4 for the output;
//      where the pair stands comes from a table (conv_activation_moments_taps_map.h)
//   D  16 output channels x 8 outputs; four tiles of outputs, one or two of channels
//
// float32: scaled by powers of two, w per output channel, x per block and plane, and rounded to
// fp16, which has tf32's 11 bits, or for "ieee" split into two halves of 11 bits each; then three
// products are summed, the small ones first. Each kd has fresh accumulators, which are added to the
// output's in the units of the largest plane.
//
// Launch conv_taps_kernel<Config> with kTapsThreads threads, taps_memory().total bytes of dynamic
// shared memory and a grid of (blocks, ceil(K / (16 tiles))), any number of blocks, then a merge of
// WindowPieces (conv_activation_moments_merge.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/conv_activation_moments_taps_operands.cuh"
#include "cuda/conv_activation_moments_window_pieces.cuh"

namespace convnormpool {

namespace taps {

// A warp's products with the planes in shared memory.
template <class Config>
struct Block : Operands<Config> {
  using Base = Operands<Config>;
  using Base::f, Base::lane, Base::memory, Base::plane, Base::shared, Base::warp;
  static constexpr int kTiles = Config::kTiles, kParts = Config::kParts;

  using Base::Base;

  using Accumulators = float[kTiles][kTapsTiles][4];

  template <bool kMasked>
  __device__ __forceinline__ void multiply_step(Accumulators& d, const unsigned char* column,
                                                int kd, int step) const {
    const int4 entry = reinterpret_cast<const int4*>(shared + memory.table)[4 * step + lane % 4];
    const uint4* const fragment =
        reinterpret_cast<const uint4*>(shared) +
        static_cast<int64_t>((kd * f.steps() + step) * kTiles) * (kParts * 32) + lane;
    uint32_t a[kTiles][kParts][4];
#pragma unroll
    for (int i = 0; i < kTiles * kParts; ++i) {
      const uint4 v = fragment[32 * i];
      auto& to = a[i / kParts][i % kParts];
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
#pragma unroll
    for (int tile = 0; tile < kTapsTiles; ++tile) {
      uint32_t b[kParts][2];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const unsigned char* const at = column + part * f.plane_bytes() + 16 * tile;
        b[part][0] = *reinterpret_cast<const uint32_t*>(at + entry.x);
        b[part][1] = *reinterpret_cast<const uint32_t*>(at + entry.y);
        if constexpr (kMasked) {
          b[part][0] &= static_cast<uint32_t>(entry.z);
          b[part][1] &= static_cast<uint32_t>(entry.w);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        auto& c = d[i][tile];
        if constexpr (Config::kSplit) {
          mma_m16n8k16_f16(c, a[i][0], b[1][0], b[1][1], c);
          mma_m16n8k16_f16(c, a[i][1], b[0][0], b[0][1], c);
          mma_m16n8k16_f16(c, a[i][0], b[0][0], b[0][1], c);
        } else if constexpr (Config::kOperand == WindowOperand::kBFloat16) {
          mma_m16n8k16_bf16(c, a[i][0], b[0][0], b[0][1], c);
        } else {
          mma_m16n8k16_f16(c, a[i][0], b[0][0], b[0][1], c);
        }
      }
    }
  }

  // Adds the products of one kd with the plane in `slot`.
  __device__ __forceinline__ void multiply(Accumulators& d, int slot, int kd) const {
    // The lane's output in the copy where its pairs are aligned.
    const int g = lane / 4;
    const unsigned char* const column =
        plane(slot) + (g % 2 == 0 ? 0 : f.copy_bytes()) + (warp * kTapsPitch + g / 2 * 2) * 2;
    const int full = f.full_steps(), steps = f.steps();
#pragma unroll 2
    for (int step = 0; step < full; ++step) multiply_step<false>(d, column, kd, step);
    for (int step = full; step < steps; ++step) multiply_step<true>(d, column, kd, step);
  }
};

// A warp's sums of a piece, about its first values. Index 0 of a pair is output channel lane / 4 of
// a tile, 1 is lane / 4 + 8.
template <class Config>
struct Sums {
  static constexpr int kTiles = Config::kTiles;

  typename Config::ActivationType activation;
  float pivot[kTiles][2], sum[kTiles][2], square[kTiles][2];
  bool started;
  int live;

  __device__ __forceinline__ void begin(const WindowPiece& piece, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      pivot[i / 2][i % 2] = sum[i / 2][i % 2] = square[i / 2][i % 2] = 0.0f;
    }
    started = false;
    live = window_live(piece, lane);
  }

  // Outputs of one tile of channels before the activation.
  __device__ __forceinline__ void add(int tile, float (&y)[4 * kTapsTiles]) {
    transform(activation, y, [](const auto& function, float v, int) { return function.value(v); });
    if (!started) pivot[tile][0] = y[0], pivot[tile][1] = y[2];
#pragma unroll
    for (int v = 0; v < 4 * kTapsTiles; ++v) {
      const int i = v % 4 / 2;
      const float shifted = y[v] - pivot[tile][i];
      if (window_position(v / 4, v % 4) < live) {
        sum[tile][i] += shifted;
        square[tile][i] = fmaf(shifted, shifted, square[tile][i]);
      }
    }
  }

  __device__ __forceinline__ float2 finish(const WindowPiece& piece, int tile, int i) const {
    return window::piece_moments(piece, live, pivot[tile][i], sum[tile][i], square[tile][i]);
  }
};

}  // namespace taps

template <class Config>
__global__ void __launch_bounds__(kTapsThreads, 2)
    conv_taps_kernel(const TapsParameters p, typename Config::ActivationType activation) {
  using namespace taps;
  grid_dependency_wait();
  grid_dependency_launch();
  constexpr int kTiles = Config::kTiles;
  const WindowGeometry& s = p.geometry;
  const Block<Config> block(p);
  const TapsFilter& f = block.f;
  const int lane = block.lane, first = block.first_channel + lane / 4;
  if constexpr (Config::kScaled) {
    block.find_weight_exponents();
    __syncthreads();
  }
  block.write_weights();
  block.write_table();

  Sums<Config> sums;
  sums.activation = activation;
  float bias[kTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    bias[i / 2][i % 2] = window::load_bias<Config>(p.bias, s.K, first + 8 * i);
  }

  const int row_groups = (s.P + kTapsRows - 1) / kTapsRows;
  const int64_t sample_items = static_cast<int64_t>(s.slabs) * row_groups * s.segments;
  for (int64_t item = blockIdx.x; item < p.N * sample_items; item += gridDim.x) {
    const int sample = static_cast<int>(item / sample_items);
    int rest = static_cast<int>(item % sample_items);
    const int segment = rest % s.segments;
    rest /= s.segments;
    const int first_row = rest % row_groups * kTapsRows, row = first_row + block.warp;
    const int index = (rest / row_groups * s.P + min(row, s.P - 1)) * s.segments + segment;
    const WindowPiece piece = window::uniform_piece(s, index);
    const int h = first_row - s.pad_h, w = piece.q - s.pad_w;
    // Input plane d of the item stands in slot d mod (T + 1), counted from its first.
    const int first_plane = piece.z - s.pad_d;
    const auto exists = [&](int i) { return first_plane + i >= 0 && first_plane + i < s.D; };
    sums.begin(piece, lane);
    for (int i = 0; i < f.T; ++i) {
      if (exists(i)) block.find_largest(sample, first_plane + i, h, w);
      __syncthreads();
      if (exists(i)) block.stage(sample, first_plane + i, h, w, i);
    }
    for (int z = 0; z < piece.planes; ++z) {
      const int next = z + f.T;
      const bool more = z + 1 < piece.planes && exists(next);
      if (more) block.find_largest(sample, first_plane + next, h, w);
      // All warps have staged this output's planes and are done with the one before.
      __syncthreads();
      if (more) block.stage(sample, first_plane + next, h, w, next % f.planes());
      if (row >= s.P) continue;
      float total[kTiles][kTapsTiles][4];
      int exponent = 127;
      if constexpr (Config::kScaled) {
        for (int kd = 0; kd < f.T; ++kd) {
          const int slot = (z + kd) % f.planes();
          if (exists(z + kd)) exponent = min(exponent, block.plane_exponents()[slot]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kTiles * kTapsTiles; ++i) {
        const int tile = i / (4 * kTapsTiles);
        total[tile][i / 4 % kTapsTiles][i % 4] = Config::kScaled ? 0.0f : bias[tile][i % 4 / 2];
      }
      for (int kd = 0; kd < f.T; ++kd) {
        if (!exists(z + kd)) continue;
        const int slot = (z + kd) % f.planes();
        if constexpr (Config::kScaled) {
          float products[kTiles][kTapsTiles][4] = {};
          block.multiply(products, slot, kd);
          const int change = exponent - block.plane_exponents()[slot];
          const float factor = change < -126 ? 0.0f : window::power_of_two(change);
#pragma unroll
          for (int i = 0; i < 4 * kTiles * kTapsTiles; ++i) {
            float& to = total[i / (4 * kTapsTiles)][i / 4 % kTapsTiles][i % 4];
            to = fmaf(products[i / (4 * kTapsTiles)][i / 4 % kTapsTiles][i % 4], factor, to);
          }
        } else {
          block.multiply(total, slot, kd);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float y[4 * kTapsTiles];
#pragma unroll
        for (int v = 0; v < 4 * kTapsTiles; ++v) {
          const int i = v % 4 / 2;
          y[v] = total[tile][v / 4][v % 4];
          if constexpr (Config::kScaled) {
            const int of_weights = block.weight_exponents()[16 * tile + lane / 4 + 8 * i];
            y[v] =
                fmaf(y[v], window::power_of_two_or_limit(-(exponent + of_weights)), bias[tile][i]);
          }
        }
        sums.add(tile, y);
      }
      sums.started = true;
    }
    // The next item's planes take these' place.
    __syncthreads();
    if (row >= s.P) continue;
    const int64_t at = (static_cast<int64_t>(sample) * window_pieces(s) + index) * s.K;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const float2 moments = sums.finish(piece, i / 2, i % 2);
      const int k = first + 8 * i;
      if (lane % 4 == 0 && k < s.K) p.partial[at + k] = moments;
    }
  }
}

}  // namespace convnormpool
