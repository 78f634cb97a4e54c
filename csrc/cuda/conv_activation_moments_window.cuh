// The fused forward for small filters, stride 1 and few input channels, by mma.sync: moments of
// a(conv3d(x, w, b)) for each piece of a sample; compute capability 8.0 and later.
//
// A warp works alone, on one output row of one sample and 16 output channels (a piece, see
// conv_activation_moments_window_map.h). It sweeps the depth: the input rows of one plane add to T
// output planes at once, whose accumulators roll: the first product of a plane writes output plane
// z's sum where T planes of outputs are counted from this input plane and reads it where it stood
// for the last one, so nothing is moved or reset. The bias is what the first product of all reads.
// How a plane comes there is said in conv_activation_moments_window_planes.cuh. All that is done
// beside products takes time from them (benchmarks/NOTES.md), so every instruction counts: the
// sweep is the same for all pieces, planes outside the input are zeros, and a piece's place is
// found without divisions.
//
//   A  16 output channels x taps: the weights, in registers for the kernel's life
//   B  taps x 8 outputs (a tile), lane / 4 the output: of a staged plane lane % 4 stands for kw and
//      the register for the row (channel, kh); straight from the ring lane % 4 stands for kh and
//      the register for kw
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
#include "cuda/conv_activation_moments_window_planes.cuh"

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
  int live;

  __device__ __forceinline__ float value(int half, int tile, int i) const {
    const float y = acc[half][T - 1][tile][i];
    return Config::kScaled ? fmaf(y, inverse[i / 2], bias[i / 2]) : y;
  }

  static __device__ __forceinline__ float slope(float y) {
    return __saturatef(fmaf(y, 1.0f / 6.0f, 0.5f));
  }

  // Whether every lane has an output there, which the length of short rows tells.
  static CONVNORMPOOL_HOST_DEVICE constexpr bool full(int tile, int i) {
    constexpr int kLastLane = Config::kDirect ? 24 : 6;
    return Config::kRing &&
           kLastLane + window_position(tile, i, Config::kDirect) < Config::kLeastOutputs;
  }

  // d is the activated value less the pivot.
  __device__ __forceinline__ void add(int tile, int i, float d) {
    if (full(tile, i) || window_position(tile, i, Config::kDirect) < live) {
      sum[i / 2] += d;
      square[i / 2] = fmaf(d, d, square[i / 2]);
    }
  }

  // One value of a finished half, hardswish.
  __device__ __forceinline__ void take(int half, int v) {
    const float y = value(half, v / 4, v % 4);
    add(half * kHalfTiles + v / 4, v % 4, fmaf(y, slope(y), -pivot[v % 4 / 2]));
  }

  // All values of a finished half at once; First: the piece's first, whose first value becomes the
  // pivot.
  template <bool First = false>
  __device__ __forceinline__ void take_half(int half) {
    if constexpr (kFast) {
      if (First) choose_pivot(value(0, 0, 0), value(0, 0, 2));
#pragma unroll
      for (int v = 0; v < kValues; ++v) take(half, v);
    } else {
      float y[kValues];
#pragma unroll
      for (int v = 0; v < kValues; ++v) y[v] = value(half, v / 4, v % 4);
      transform(activation, y,
                [](const auto& function, float x, int) { return function.value(x); });
      if (First) choose_pivot(y[0], y[2]);
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        add(half * kHalfTiles + v / 4, v % 4, y[v] - pivot[v % 4 / 2]);
      }
    }
  }

  // From the first values of the lane's channels; the same in all lanes that have the channel.
  __device__ __forceinline__ void choose_pivot(float first, float second) {
    pivot[0] = lanes_first(kFast ? __fmul_rn(first, slope(first)) : first, 4);
    pivot[1] = lanes_first(kFast ? __fmul_rn(second, slope(second)) : second, 4);
  }

  // The products of one half with the staged plane, of the depth taps from Low to High. After each
  // group of products between(slot) is called: work that fills the gaps.
  template <int Low, int High, class Between>
  __device__ __forceinline__ void multiply_half(int half, const Planes<Config>& planes,
                                                const Between& between) {
    int slot = 0;
#pragma unroll
    for (int u = 0; u < Config::kUnits; ++u) {
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group) {
        uint32_t b[kHalfTiles][Config::kUnitRegisters];
#pragma unroll
        for (int tile = 0; tile < kHalfTiles; ++tile) {
          planes.operand(u, group, half * kHalfTiles + tile, b[tile]);
        }
#pragma unroll
        for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
          for (int tap = T - 1; tap >= 0; --tap) {
            if (Low <= tap && tap <= High) {
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

  // Both halves of the products with a plane; the next one is prepared meanwhile.
  template <int Low, int High, bool Inside, class Between0, class Middle, class Between1>
  __device__ __forceinline__ void multiply_plane(Planes<Config>& planes, bool last,
                                                 const Between0& between_0, const Middle& middle,
                                                 const Between1& between_1) {
    if constexpr (Config::kScaled) {
      if (planes.exponent != exponent) rescale(planes.exponent);
    }
    planes.template begin<Inside>(last);
    multiply_half<Low, High>(0, planes, [&](int slot) {
      constexpr int kUnitSlots = slots() / Config::kUnits;
      if (slot % kUnitSlots == 0) planes.prepare(slot / kUnitSlots);
      between_0(slot);
    });
    planes.prepared();
    middle();
    multiply_half<Low, High>(1, planes, between_1);
  }

  // The first T - 1 planes of a piece finish no output. A plane's depth taps above Plane would add
  // to outputs before the piece's.
  template <int Plane>
  __device__ __forceinline__ void begin_outputs(Planes<Config>& planes) {
    if constexpr (Plane < T - 1) {
      const auto nothing = [](int) {};
      multiply_plane<0, Plane, false>(planes, false, nothing, [] {}, nothing);
      begin_outputs<Plane + 1>(planes);
    }
  }

  // A plane that finishes an output plane, with the depth taps from Low on. What is finished of the
  // other half is taken between the products: of half 1 that of the plane before, unless this is
  // the piece's first.
  template <int Low, bool First = false, bool Inside = false>
  __device__ __forceinline__ void finish_output(Planes<Config>& planes, bool last) {
    const auto take_between = [&](int half, int slot) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        if (kFast && (v + 1) * slots() / (kValues + 1) == slot) take(half, v);
      }
    };
    if (!kFast && !First) take_half(1);
    multiply_plane<Low, T - 1, Inside>(
        planes, last,
        [&](int slot) {
          if (!First) take_between(1, slot);
        },
        [&] {
          if (kFast && First) choose_pivot(value(0, 0, 0), value(0, 0, 2));
        },
        [&](int slot) { take_between(0, slot); });
    if (!kFast) take_half<First>(0);
  }

  // The last T - 1 planes: depth taps below Low would add to outputs behind the piece's.
  template <int Low>
  __device__ __forceinline__ void end_outputs(Planes<Config>& planes) {
    if constexpr (Low < T) {
      finish_output<Low>(planes, Low == T - 1);
      end_outputs<Low + 1>(planes);
    }
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
    for (int i = 0; i < 2; ++i) sum[i] = square[i] = 0.0f;
    live = window_live(piece, lane, Config::kDirect);
  }

  __device__ __forceinline__ void finish(const WindowPiece& piece, float2 (&result)[2]) const {
    const float count = static_cast<float>(piece.planes * piece.columns);
#pragma unroll
    for (int i = 0; i < 2; ++i) result[i] = joint_moments(count, pivot[i], sum[i], square[i]);
  }
};

// A cursor of which the compiler knows that it is the same for the warp.
__device__ __forceinline__ WindowCursor uniform_cursor(const WindowGeometry& s, int32_t number) {
  const WindowCursor at = window_cursor(s, number);
  return {uniform_value(at.sample), uniform_value(at.slab), uniform_value(at.row),
          uniform_value(at.segment)};
}

}  // namespace window

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    conv_window_kernel(const WindowParameters p, typename Config::ActivationType activation) {
  using namespace window;
  grid_dependency_wait();
  grid_dependency_launch();
  constexpr int T = Config::T;
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t place = window_place(static_cast<int32_t>(blockIdx.x),
                                     static_cast<int32_t>(gridDim.x), Config::kBlocksPerSm);
  const WindowCursor stride = uniform_cursor(p.geometry, static_cast<int32_t>(gridDim.x));
  WindowCursor at = uniform_cursor(p.geometry, place);
  if (at.sample >= p.N) return;

  Lane<Config> state;
  state.activation = activation;
  const int first_channel = 16 * static_cast<int>(blockIdx.y) + lane / 4;
  int exponents[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (Config::kScaled) {
      exponents[i] = weight_exponent<Config>(p, first_channel + 8 * i, lane);
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
  for (int i = lane; i < Config::kPlanesBytes / 16; i += 32) {
    reinterpret_cast<uint4*>(buffers)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
  Planes<Config> planes(p, at, lane, buffers);

  while (at.sample < p.N) {
    const WindowPiece piece = window_piece(p.geometry, at);
    const int64_t number = window_number(p.geometry, at);
    at.advance(p.geometry, stride);
    planes.loader.follows(p, at);
    state.begin(piece, lane, planes.exponent);
    state.template begin_outputs<0>(planes);
    state.template finish_output<0, true>(planes, piece.planes == 1);
    // Of fewer than T output planes each plane would add to some outside the piece; it does, and
    // they are left.
    const bool thin = piece.planes < T;
    int z = thin ? 1 : T;
    const int inside = thin ? 0 : min(piece.planes - z, planes.inside());
    for (int i = inside; i > 0; --i) state.template finish_output<0, false, true>(planes, false);
    planes.skip(inside), z += inside;
    for (; z < piece.planes; ++z) {
      state.template finish_output<0>(planes, thin && z + 1 == piece.planes);
    }
    if (!thin) state.template end_outputs<1>(planes);
    state.take_half(1);
    float2 result[2];
    state.finish(piece, result);
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = first_channel + 8 * i;
        if (k < p.geometry.K) p.partial[number * p.geometry.K + k] = result[i];
      }
    }
  }
}

}  // namespace convnormpool
