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
// shared memory and a grid of (blocks, ceil(K / (16 tiles))), any number of blocks, then
// merge_window_kernel with a block for each 16 channels of a sample.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/moments.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_taps_map.h"
#include "cuda/conv_activation_moments_window.cuh"

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

template <class Config>
struct Block {
  static constexpr int kTiles = Config::kTiles, kParts = Config::kParts;
  static constexpr int kValues = 4 * kTapsTiles;
  using Raw = typename Config::Raw;

  const TapsParameters& p;
  const TapsFilter f;
  const TapsMemory memory;
  unsigned char* const shared;
  const int warp, lane, first_channel;

  __device__ __forceinline__ explicit Block(const TapsParameters& parameters)
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
      visit_plane(sample, d, h, w, [&](float x, int, int) { largest = fmaxf(largest, fabsf(x)); });
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

  // ---- products

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
  static constexpr bool kFast = std::is_same_v<typename Config::ActivationType, HardswishFn>;

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

  // The piece's moments, joined across the four lanes that share a channel.
  __device__ __forceinline__ float2 finish(const WindowPiece& piece, int tile, int i) const {
    const int count = piece.planes * (((live + 7) >> 3) + ((live + 6) >> 3));
    const float inverse_count = count > 0 ? 1.0f / static_cast<float>(count) : 0.0f;
    const float mean = __fmul_rn(sum[tile][i], inverse_count);
    const float m2 = fmaf(-mean, sum[tile][i], square[tile][i]);
    Moments<float> moments{count > 0 ? pivot[tile][i] : 0.0f, static_cast<float>(count), mean,
                           m2 < 0.0f ? 0.0f : m2};
    lanes_join(moments, 4);
    return make_float2(moments.pivot + moments.mean, moments.m2);
  }
};

}  // namespace taps

template <class Config>
__global__ void __launch_bounds__(kTapsThreads, 2)
    conv_taps_kernel(const TapsParameters p, typename Config::ActivationType activation) {
  using namespace taps;
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
