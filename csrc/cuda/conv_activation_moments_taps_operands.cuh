// The operands of the taps kernel (conv_activation_moments_taps.cuh): its configuration, and the
// weights', the table's and the input planes' way into shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_taps_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace convnormpool {

template <WindowOperand Operand, class Activation_, int ChannelTiles>
struct TapsConfig {
  static constexpr WindowOperand kOperand = Operand;
  using ActivationType = Activation_;
  static constexpr int kTiles = ChannelTiles;
  static constexpr bool kSplit = Operand == WindowOperand::kSplit;
  static constexpr bool kScaled = kSplit || Operand == WindowOperand::kTf32;
  static constexpr int kParts = kSplit ? 2 : 1;
  using Raw = std::conditional_t<kScaled, float, uint16_t>;
};

struct TapsParameters {
  const void* x;     // (N, C, D, H, W) contiguous
  const void* w;     // (K, C, T, R, S) contiguous
  const void* bias;  // (K,) or null; all three of one dtype
  float2* partial;   // (N, pieces, K): mean and M2 of each piece
  int32_t N;
  TapsFilter filter;
  WindowGeometry geometry;  // of segments of kTapsTiles tiles
};

namespace taps {

// A block's shared memory: the weights and the table, written once, and the ring of input planes.
template <class Config>
struct Operands {
  static constexpr int kTiles = Config::kTiles, kParts = Config::kParts;
  using Raw = typename Config::Raw;

  const TapsParameters& p;
  const TapsFilter f;
  const TapsMemory memory;
  unsigned char* const shared;
  const int warp, lane, first_channel;

  __device__ __forceinline__ explicit Operands(const TapsParameters& parameters)
      : p(parameters),
        f(parameters.filter),
        memory(taps_memory(parameters.filter, Config::kParts, Config::kTiles)),
        shared(dynamic_shared_memory()),
        warp(uniform_value(static_cast<int>(threadIdx.x) / 32)),
        lane(static_cast<int>(threadIdx.x) % 32),
        first_channel(16 * kTiles * static_cast<int>(blockIdx.y)) {}

  __device__ __forceinline__ int* weight_exponents() const {
    return reinterpret_cast<int*>(shared + memory.exponents);
  }
  __device__ __forceinline__ int* plane_exponents() const {
    return weight_exponents() + 16 * kTiles;
  }
  // The warps' largest magnitudes in a plane; planes take turns with two rows of them.
  __device__ __forceinline__ uint32_t* largest_magnitudes(int plane) const {
    return reinterpret_cast<uint32_t*>(plane_exponents() + kTapsMostExtent + 1) +
           kTapsRows * (plane & 1);
  }
  __device__ __forceinline__ unsigned char* plane(int slot) const {
    return shared + memory.planes + slot * kParts * f.plane_bytes();
  }

  // ---- once

  __device__ __forceinline__ Raw weight(int k, int ci, int kd, int kh, int kw) const {
    const int64_t filter = static_cast<int64_t>(k) * f.C + ci;
    return window::load_if(k < p.geometry.K, static_cast<const Raw*>(p.w) +
                                                 ((filter * f.T + kd) * f.R + kh) * f.S + kw);
  }

  __device__ void find_weight_exponents() const {
    const int taps = f.C * f.T * f.R * f.S;
    for (int i = warp; i < 16 * kTiles; i += kTapsRows) {
      const int k = first_channel + i;
      float largest = 0.0f;
      for (int tap = lane; tap < taps && k < p.geometry.K; tap += 32) {
        largest = fmaxf(
            largest, fabsf(static_cast<const float*>(p.w)[static_cast<int64_t>(k) * taps + tap]));
      }
      const uint32_t most = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
      if (lane == 0) weight_exponents()[i] = min(141 - window::exponent_field(most), 127);
    }
  }

  __device__ void write_weights() const {
    const int fragments = f.T * f.steps() * kTiles;
    for (int i = warp; i < fragments; i += kTapsRows) {
      const int tile = i % kTiles, step = i / kTiles % f.steps(), kd = i / (kTiles * f.steps());
      uint32_t registers[kParts][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int channel = 16 * tile + lane / 4 + r % 2 * 8;
        const TapsPair pair = taps_pair(f, 8 * step + lane % 4 + r / 2 * 4);
        Raw v[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (j < pair.taps) {
            v[j] = weight(first_channel + channel, pair.ci, kd, pair.kh, pair.kw + j);
          }
        }
        if constexpr (Config::kScaled) {
          const float scale = window::power_of_two(weight_exponents()[channel]);
          uint32_t parts[kParts];
          window::round_pair(v[0] * scale, v[1] * scale, parts);
#pragma unroll
          for (int part = 0; part < kParts; ++part) registers[part][r] = parts[part];
        } else {
          registers[0][r] = window::pack(v[0], v[1]);
        }
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const auto& a = registers[part];
        reinterpret_cast<uint4*>(shared)[(i * kParts + part) * 32 + lane] =
            make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }

  // Of each step and lane % 4 its two pairs: where they stand after the output's own element, in
  // bytes, and the bits of them that are taps.
  __device__ void write_table() const {
    for (int i = static_cast<int>(threadIdx.x); i < 4 * f.steps(); i += kTapsThreads) {
      int entry[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const TapsPair pair = taps_pair(f, i / 4 * 8 + i % 4 + 4 * j);
        entry[j] = ((pair.ci * f.rows() + pair.kh) * kTapsPitch + pair.kw) * 2;
        entry[2 + j] = pair.taps == 2 ? -1 : pair.taps == 1 ? 0xFFFF : 0;
      }
      reinterpret_cast<int4*>(shared + memory.table)[i] =
          make_int4(entry[0], entry[1], entry[2], entry[3]);
    }
  }

  // ---- input planes

  // Calls visit(x0, x1, row) for the elements of columns 2 lane and 2 lane + 1 of input plane d:
  // rows of all channels from h on, columns from w on; zeros where there are none. All lanes take
  // part.
  template <class F>
  __device__ __forceinline__ void visit_plane(int sample, int d, int h, int w,
                                              const F& visit) const {
    const WindowGeometry& s = p.geometry;
    const int column = w + 2 * lane, channel_rows = f.rows(), rows = f.C * channel_rows;
    const bool wanted = 2 * lane < kTapsPitch;
    const bool first = wanted && column >= 0 && column < s.W;
    const bool second = wanted && column + 1 >= 0 && column + 1 < s.W;
    const int64_t channel_stride = static_cast<int64_t>(s.D) * s.H * s.W;
    int row = warp;  // there are at least as many rows of a channel as warps
    const Raw* from = static_cast<const Raw*>(p.x) +
                      static_cast<int64_t>(sample) * f.C * channel_stride +
                      (static_cast<int64_t>(d) * s.H + h + row) * s.W + column;
#pragma unroll 4
    for (int i = warp; i < rows; i += kTapsRows) {
      const bool inside = h + row >= 0 && h + row < s.H;
      visit(window::load_if(inside && first, from), window::load_if(inside && second, from + 1), i);
      row += kTapsRows;
      from += static_cast<int64_t>(kTapsRows) * s.W;
      if (row >= channel_rows) {
        row -= channel_rows;
        from += channel_stride - static_cast<int64_t>(channel_rows) * s.W;
      }
    }
  }

  // kScaled: before the barrier that precedes stage().
  __device__ __forceinline__ void find_largest(int sample, int d, int h, int w) const {
    if constexpr (Config::kScaled) {
      float largest = 0.0f;
      visit_plane(sample, d, h, w, [&](float x0, float x1, int) {
        largest = fmaxf(largest, fmaxf(fabsf(x0), fabsf(x1)));
      });
      const uint32_t most = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
      if (lane == 0) largest_magnitudes(d)[warp] = most;
    }
  }

  __device__ __forceinline__ void stage(int sample, int d, int h, int w, int slot) const {
    unsigned char* const to = plane(slot);
    float scale = 1.0f;
    if constexpr (Config::kScaled) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kTapsRows; ++i) most = max(most, largest_magnitudes(d)[i]);
      const int exponent = min(139 - window::exponent_field(most), 127);
      if (threadIdx.x == 0) plane_exponents()[slot] = exponent;
      scale = window::power_of_two(exponent);
    }
    visit_plane(sample, d, h, w, [&](Raw x0, Raw x1, int row) {
      uint32_t pair[kParts];
      if constexpr (Config::kScaled) {
        window::round_pair(x0 * scale, x1 * scale, pair);
      } else {
        pair[0] = window::pack(x0, x1);
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        // One column on: the second half of this pair and the first of the next.
        const uint32_t moved =
            __byte_perm(pair[i], __shfl_down_sync(kFullWarp, pair[i], 1), 0x5432);
        uint32_t* const copy = reinterpret_cast<uint32_t*>(to + i * f.plane_bytes());
        if (2 * lane < kTapsPitch) {
          copy[row * (kTapsPitch / 2) + lane] = pair[i];
          copy[f.copy_bytes() / 4 + row * (kTapsPitch / 2) + lane] = moved;
        }
      }
    });
  }
};

}  // namespace taps

}  // namespace convnormpool
