// The fused forward for small filters, stride 1 and few input channels, by mma.sync: moments of
// a(conv3d(x, w, b)) for each piece of a sample; compute capability 8.0 and later.
//
// A warp works alone, on one output row of one sample and 16 output channels (a piece, see
// conv_activation_moments_window_map.h). It sweeps the depth: the input rows of one plane are
// staged in its own part of shared memory, one plane ahead, and add to T output planes at once,
// whose accumulators roll: the first product of a plane writes output plane z's sum where T planes
// of outputs are counted from this input plane and reads it where it stood for the last one, so
// nothing is moved or reset. The bias is what the first product of all reads.
//
//   A  16 output channels x taps: the weights, in registers for the kernel's life
//   B  taps x 8 outputs (a tile): lane % 4 stands for kw, the register for the row (channel, kh),
//      lane / 4 for the output; so a lane's operand is one column of four rows, one load
//   D  16 output channels x 8 outputs
//
// The tiles are worked on in two halves, and the activation and sums of a finished half are dealt
// out between the products of the other, so that the tensor cores need not wait for them.
//
// float32: x and w are scaled by powers of two, w per output channel, x so that the planes met so
// far fit fp16 (the accumulators are rescaled when a much larger plane comes), and rounded to fp16,
// which has tf32's 11 bits, or for "ieee" split into two halves of 11 bits each; then three
// products are summed, the small ones first.
//
// Launch conv_window_kernel<Config> with Config::kThreads threads, Config::kSharedBytes of dynamic
// shared memory and a grid of (blocks, ceil(K / 16)), any number of blocks (warps take pieces in
// turn; kBlocksPerSm of them run at once on an SM), then a merge of WindowPieces
// (conv_activation_moments_merge.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_window_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"
#include "cuda/conv_activation_moments_window_pieces.cuh"

namespace convnormpool {

namespace window {

// Product number `product` of a unit: of low and high, high and low, and both high halves.
template <class Config>
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t (&a)[Config::kParts][4],
                                         const uint32_t (&b)[Config::kUnitRegisters], int product,
                                         const float (&c)[4]) {
  if constexpr (Config::kSplit) {
    const int low = product == 1 ? 2 : 0;
    mma_m16n8k16_f16(d, a[product == 0 ? 1 : 0], b[low], b[low + 1], c);
  } else if constexpr (Config::kOperand == WindowOperand::kBFloat16) {
    mma_m16n8k16_bf16(d, a[0], b[0], b[1], c);
  } else {
    mma_m16n8k16_f16(d, a[0], b[0], b[1], c);
  }
}

// The exponents of the weights of the lane's channels: of the first, and eight on of the second.
template <class Config>
__device__ __forceinline__ int* weight_exponents() {
  unsigned char* const after = dynamic_shared_memory() + Config::kExponentOffset;
  return reinterpret_cast<int*>(after) + threadIdx.x / 4;
}

// A lane's accumulators and sums. Index 0 of a pair is output channel lane / 4, 1 is lane / 4 + 8.
template <class Config>
struct Lane {
  static constexpr int T = Config::T, kHalfTiles = Config::kHalfTiles;
  static constexpr int kValues = 4 * kHalfTiles;  // of a half of an output plane
  static constexpr bool kFast = std::is_same_v<typename Config::ActivationType, HardswishFn>;

  Weights<Config> a;
  // [half][depth tap][tile][register]: output plane z = piece.z + step - tap.
  float acc[2][T][kHalfTiles][4];
  float bias[2];
  float start[4];  // what the first products read: the bias, or zero when scaled
  typename Config::ActivationType activation;

  // Of float32: y = accumulator * inverse + bias; scaled by 2^exponent, and the weights by their
  // channel's, which waits in shared memory.
  float inverse[2];
  int exponent;

  // Sums about the first value of the piece.
  float pivot[2], sum[2], square[2];
  bool started;
  int live;

  __device__ __forceinline__ float value(int half, int tap, int tile, int i) const {
    const float y = acc[half][tap][tile][i];
    return Config::kScaled ? fmaf(y, inverse[i / 2], bias[i / 2]) : y;
  }

  // d is the activated value less the pivot.
  __device__ __forceinline__ void add(int tile, int i, float d) {
    if (tile < Config::kFullTiles || window_position(tile, i) < live) {
      sum[i / 2] += d;
      square[i / 2] = fmaf(d, d, square[i / 2]);
    }
  }

  // One value of a finished half, hardswish.
  __device__ __forceinline__ void take(int half, int v) {
    const float y = value(half, T - 1, v / 4, v % 4);
    const float s = __saturatef(fmaf(y, 1.0f / 6.0f, 0.5f));
    add(half * kHalfTiles + v / 4, v % 4, fmaf(y, s, -pivot[v % 4 / 2]));
  }

  // All values of a finished half at once; the same bits as take().
  __device__ __forceinline__ void take_half(int half, int tap) {
    float y[kValues], s[kValues];
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      y[v] = value(half, tap, v / 4, v % 4);
      s[v] = kFast ? __saturatef(fmaf(y[v], 1.0f / 6.0f, 0.5f)) : 1.0f;
    }
    if constexpr (!kFast) {
      transform(activation, y,
                [](const auto& function, float x, int) { return function.value(x); });
    }
    if (!started) {
      pivot[0] = __fmul_rn(y[0], s[0]);
      pivot[1] = __fmul_rn(y[2], s[2]);
      started = true;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      add(half * kHalfTiles + v / 4, v % 4, fmaf(y[v], s[v], -pivot[v % 4 / 2]));
    }
  }

  // The products of one half with the staged plane, of the depth taps from Low to High. After each
  // group of products between(slot) is called: work that fills the gaps.
  template <int Low, int High, class Between>
  __device__ __forceinline__ void multiply_half(int half, const unsigned char* column, int low,
                                                int high, const Between& between) {
    int slot = 0;
#pragma unroll
    for (int u = 0; u < Config::kUnits; ++u) {
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group) {
        uint32_t b[kHalfTiles][Config::kUnitRegisters];
#pragma unroll
        for (int tile = 0; tile < kHalfTiles; ++tile) {
          const int from = 8 * (half * kHalfTiles + tile) + 4 * group;
          load_unit<Config>(
              column + window_unit(4 * u, from, Config::kColumns) * Config::kUnitBytes, b[tile]);
        }
#pragma unroll
        for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
          for (int tap = T - 1; tap >= 0; --tap) {
            if (Low <= tap && tap <= High && low <= tap && tap <= high) {
#pragma unroll
              for (int tile = 0; tile < kHalfTiles; ++tile) {
                const bool first = u == 0 && group == 0 && product == 0;
                auto& c = !first    ? acc[half][tap][tile]
                          : tap > 0 ? acc[half][tap > 0 ? tap - 1 : 0][tile]
                                    : start;
                multiply<Config>(acc[half][tap][tile], a[tap][u][group], b[tile], product, c);
              }
            }
            between(slot++);
          }
        }
      }
    }
  }

  // Both halves for a plane to which depth taps from Low to High are known to belong.
  template <int Low, int High>
  __device__ __forceinline__ void multiply_plane(const unsigned char* column) {
    multiply_half<Low, High>(0, column, Low, High, [](int) {});
    multiply_half<Low, High>(1, column, Low, High, [](int) {});
  }

  // The same for taps known at run time only. A product that a predicate turns off costs as much as
  // another, so the planes at a piece's ends, which lack taps on one side, have code of their own.
  template <int Edge = T - 1>
  __device__ __forceinline__ void multiply_edge(const unsigned char* column, int low, int high) {
    if (Config::kStaticEdges && low == 0 && high == Edge) {
      multiply_plane<0, Edge>(column);
    } else if (Config::kStaticEdges && high == T - 1 && low == Edge) {
      multiply_plane<Edge, T - 1>(column);
    } else if constexpr (Edge > 0) {
      multiply_edge<Edge - 1>(column, low, high);
    } else {
      multiply_half<0, T - 1>(0, column, low, high, [](int) {});
      multiply_half<0, T - 1>(1, column, low, high, [](int) {});
    }
  }

  // A plane that every depth tap belongs to: the finished values of the other half are taken
  // between the products, those of half 1 a plane late.
  __device__ __forceinline__ void multiply_interior(const unsigned char* column) {
    const auto take_between = [&](int half, int slot) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        if (kFast && (v + 1) * slots() / (kValues + 1) == slot) take(half, v);
      }
    };
    if (!kFast) take_half(1, T - 1);
    multiply_half<0, T - 1>(0, column, 0, T - 1, [&](int slot) { take_between(1, slot); });
    multiply_half<0, T - 1>(1, column, 0, T - 1, [&](int slot) { take_between(0, slot); });
    if (!kFast) take_half(0, T - 1);
  }

  // Groups of products of a half.
  static CONVNORMPOOL_HOST_DEVICE constexpr int slots() {
    return Config::kUnits * Config::kProducts * Config::kGroups * T;
  }

  // The staged plane is scaled by another power than the accumulators: follow it.
  __device__ __forceinline__ void rescale(int staged_exponent) {
    const int change = staged_exponent - exponent;
    const float factor = change < -126 ? 0.0f : power_of_two(change);
#pragma unroll
    for (int i = 0; i < 2 * T * kHalfTiles * 4; ++i) {
      acc[i / (T * kValues)][i / kValues % T][i / 4 % kHalfTiles][i % 4] *= factor;
    }
    set_exponent(staged_exponent);
  }

  __device__ __forceinline__ void set_exponent(int e) {
    exponent = e;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inverse[i] = power_of_two_or_limit(-(e + weight_exponents<Config>()[8 * i]));
    }
  }

  __device__ __forceinline__ void begin(const WindowPiece& piece, int lane, int staged_exponent) {
    if constexpr (Config::kScaled) set_exponent(staged_exponent);
#pragma unroll
    for (int i = 0; i < 2 * T * kHalfTiles * 4; ++i) {
      acc[i / (T * kValues)][i / kValues % T][i / 4 % kHalfTiles][i % 4] = start[i % 4];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) pivot[i] = sum[i] = square[i] = 0.0f;
    started = false;
    live = window_live(piece, lane);
  }

  __device__ __forceinline__ void finish(const WindowPiece& piece, float2 (&result)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) result[i] = piece_moments(piece, live, pivot[i], sum[i], square[i]);
  }
};

// The power of two for a plane whose largest magnitude is given: 2^12 at first, and left as it is
// until a plane would pass 2^15.
__device__ __forceinline__ int plane_exponent(uint32_t largest, bool first, int exponent) {
  const int field = exponent_field(largest);
  return first || field - 127 + exponent > 14 ? min(139 - field, 127) : exponent;
}

}  // namespace window

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    conv_window_kernel(const WindowParameters p, typename Config::ActivationType activation) {
  using namespace window;
  grid_dependency_launch();
  constexpr int T = Config::T;
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t pieces = window_pieces(p.geometry);
  WindowStride stride(static_cast<int32_t>(gridDim.x), pieces);
  stride.samples = uniform_value(stride.samples);
  stride.pieces = uniform_value(stride.pieces);
  const int32_t place = window_place(static_cast<int32_t>(blockIdx.x),
                                     static_cast<int32_t>(gridDim.x), Config::kBlocksPerSm);
  int32_t sample = uniform_value(place / pieces), index = uniform_value(place % pieces);
  if (sample >= p.N) return;

  Lane<Config> state;
  state.activation = activation;
  const int first_channel = 16 * static_cast<int>(blockIdx.y) + lane / 4;
  int exponents[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (Config::kScaled) {
      exponents[i] = weight_exponent<Config>(p, first_channel + 8 * i);
      if (lane % 4 == 0) weight_exponents<Config>()[8 * i] = exponents[i];
    }
    state.bias[i] = load_bias<Config>(p.bias, p.geometry.K, first_channel + 8 * i);
  }
  load_weights<Config>(p, 16 * static_cast<int>(blockIdx.y), lane, exponents, state.a);

  // Two planes; columns that are never staged stay zero. Their space first passes the bias through
  // memory: four registers that the compiler does not know to be two, or it would keep two and copy
  // them at every use.
  unsigned char* const buffers = dynamic_shared_memory();
  float* const pass = reinterpret_cast<float*>(buffers) + lane * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) pass[i] = state.bias[i / 2];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) state.start[i] = Config::kScaled ? 0.0f : pass[i];
  __syncwarp();
  for (int i = lane; i < 2 * Config::kPlaneBytes / 16; i += 32) {
    reinterpret_cast<uint4*>(buffers)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
  const int lane_bytes = (lane / 4 + lane % 4) * Config::kUnitBytes;

  // While a plane is multiplied the next one is staged and the one after that is loaded.
  const int64_t plane_stride = static_cast<int64_t>(p.geometry.H) * p.geometry.W;
  Loader<Config> loader{};
  loader.sample = sample;
  loader.index = index;
  RawPlane<Config> raw;
  bool raw_first = true;  // raw is the first plane of its piece
  int staged_exponent = 0;
  unsigned char* target = buffers;
  const auto stage = [&] {
    float scale = 1.0f;
    if constexpr (Config::kScaled) {
      staged_exponent = plane_exponent(largest_magnitude(raw), raw_first, staged_exponent);
      scale = power_of_two(staged_exponent);
    }
    stage_plane(raw, scale, lane, target);
  };
  loader.place(p, lane);
  loader.load(p.geometry, lane, raw);
  stage();
  raw_first = loader.next(p, lane, plane_stride, stride);
  loader.load(p.geometry, lane, raw);

  for (; sample < p.N; stride.next(sample, index)) {
    const WindowPiece piece = uniform_piece(p.geometry, index);
    const int first_step = window_first_step(p.geometry, piece);
    const int last_step = window_last_step(p.geometry, piece, T);
    state.begin(piece, lane, staged_exponent);
    bool pending = false;  // the last step finished an output plane, and half 1 is not taken yet
    const auto begin_step = [&] {
      const unsigned char* const column = target + lane_bytes;
      target = target == buffers ? buffers + Config::kPlaneBytes : buffers;
      if constexpr (Config::kScaled) {
        if (staged_exponent != state.exponent) state.rescale(staged_exponent);
      }
      // All lanes have staged this plane and are done with the one before.
      __syncwarp();
      stage();
      return column;
    };
    for (int step = first_step; step <= last_step; ++step) {
      const unsigned char* const column = begin_step();
      if (step >= T && step < piece.planes && step + 2 <= last_step) {
        raw_first = false;
        ++loader.step;
        loader.plane += plane_stride;
        loader.load(p.geometry, lane, raw);
        state.multiply_interior(column);
        continue;
      }
      raw_first = loader.next(p, lane, plane_stride, stride);
      loader.load(p.geometry, lane, raw);
      const int low = window_low_tap(piece, step), high = window_high_tap(step, T);
      if (pending) state.take_half(1, T - 1);
      state.multiply_edge(column, low, high);
      pending = high == T - 1;
      if (pending) state.take_half(0, T - 1);
    }
    if (pending) state.take_half(1, T - 1);
    // Below the input's last plane there is only padding: what stands in the other accumulators is
    // complete.
    const int low = window_low_tap(piece, last_step), high = window_high_tap(last_step, T);
#pragma unroll
    for (int tap = T - 2; tap >= 0; --tap) {
      if (low <= tap && tap <= high) {
        state.take_half(0, tap);
        state.take_half(1, tap);
      }
    }
    float2 result[2];
    state.finish(piece, result);
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = first_channel + 8 * i;
        if (k < p.geometry.K)
          p.partial[(static_cast<int64_t>(sample) * pieces + index) * p.geometry.K + k] = result[i];
      }
    }
  }
}

}  // namespace convnormpool
