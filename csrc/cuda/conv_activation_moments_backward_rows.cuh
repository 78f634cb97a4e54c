// The row warps of the backward window kernel (conv_activation_moments_backward_window.cuh): the
// outputs of one row again, their gradient, and what it gives the input.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_backward_operands.cuh"

namespace convnormpool {

namespace window {

template <class Config>
__device__ __forceinline__ float load_bias_of(const BackwardParameters& p, int k) {
  if (p.bias == nullptr || k >= p.geometry.K) return 0.0f;
  if constexpr (Config::kOperand == WindowOperand::kFloat16) {
    return __half2float(static_cast<const __half*>(p.bias)[k]);
  } else if constexpr (Config::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[k]);
  } else {
    return static_cast<const float*>(p.bias)[k];
  }
}

// The power of two for a plane whose largest magnitude is given as bits: to 2^12 at first, and left
// as it is until a plane would pass 2^15. It never grows within a strip.
__device__ __forceinline__ int next_exponent(uint32_t largest, bool first, int exponent) {
  const int field = exponent_field(largest);
  return first || field - 127 + exponent > 14 ? min(139 - field, 127) : exponent;
}

// Where a lane finds the x operands of tiles 0, 1 and of tiles 2, 3 in a unit: row lane % 8 of the
// matrices (tile, taps of kw 0, 1), (tile, kw 2, 3), (tile + 1, kw 0, 1), (tile + 1, kw 2, 3).
__device__ __forceinline__ uint32_t operand_offset(int lane, int tile) {
  return 16 * backward_slot(4 * (lane % 8) + tile + lane / 16 + 2 * (lane / 8 % 2));
}

// 2^change for a change of at most 0.
__device__ __forceinline__ float falling_power(int change) {
  return change < -126 ? 0.0f : power_of_two(change);
}

// Index 0 of a pair is output channel lane / 4 of the tile of 16, 1 is lane / 4 + 8.
template <class Config>
struct RowWarp {
  static constexpr int T = Config::T, S = Config::S, kTiles = kBackwardTiles;
  static constexpr int kParts = Config::kParts;

  BackwardWeights<Config> a;
  // [depth tap][tile][register]: output plane step - tap.
  float acc[T][kTiles][4];
  float4* terms;     // of the lane's channels, in shared memory: bias, mean, grad_mean, slope
  float inverse[2];  // y = accumulator * inverse + bias
  float bias_gradient[2];
  int weight_exponents[2];
  int exponent;           // of the input planes in the accumulators
  int gradient_exponent;  // of the strip's last output plane
  typename Config::ActivationType activation;

  __device__ __forceinline__ void begin(const BackwardParameters& p, int first_channel, int lane,
                                        unsigned char* terms_of_warp) {
    terms = reinterpret_cast<float4*>(terms_of_warp) + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = first_channel + lane / 4 + 8 * i;
      weight_exponents[i] =
          Config::kFloat32 ? exponent_of_weights(largest_weight<Config>(p, k, 1, 0, 1)) : 0;
      inverse[i] = 1.0f;
      bias_gradient[i] = 0.0f;
    }
    load_weights<Config>(p, first_channel, lane, weight_exponents, a);
#pragma unroll
    for (int i = 0; i < T * kTiles * 4; ++i) acc[i / (4 * kTiles)][i / 4 % kTiles][i % 4] = 0.0f;
    exponent = gradient_exponent = 0;
  }

  // What the gradient of a sample's outputs is made of.
  __device__ __forceinline__ void begin_sample(const BackwardParameters& p, int32_t sample,
                                               int first_channel, int lane) {
    const float positions =
        static_cast<float>(static_cast<int64_t>(p.geometry.Z) * p.geometry.P * p.geometry.Q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = first_channel + lane / 4 + 8 * i;
      const int64_t at = static_cast<int64_t>(sample) * p.geometry.K + k;
      const bool exists = k < p.geometry.K;
      const float4 value = make_float4(load_bias_of<Config>(p, k), load_if(exists, p.mean + at),
                                       load_if(exists, p.grad_mean + at) / positions,
                                       2.0f * load_if(exists, p.grad_m2 + at));
      if (lane % 4 == 0) terms[8 * i] = value;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void set_exponent(int e) {
    exponent = e;
#pragma unroll
    for (int i = 0; i < 2; ++i) inverse[i] = any_power_of_two(-(e + weight_exponents[i]));
  }

  // The staged plane is scaled by another power than the accumulators: follow it.
  __device__ __forceinline__ void follow(int staged, bool first) {
    if (!first) {
      const float factor = falling_power(staged - exponent);
#pragma unroll
      for (int i = 0; i < T * kTiles * 4; ++i) {
        acc[i / (4 * kTiles)][i / 4 % kTiles][i % 4] *= factor;
      }
    }
    set_exponent(staged);
  }

  __device__ __forceinline__ void load_operands(uint32_t unit, int lane,
                                                uint32_t (&b)[kTiles][2][kParts]) const {
#pragma unroll
    for (int i = 0; i < kTiles / 2 * kParts; ++i) {
      const int part = i % kParts, tile = i / kParts * 2;
      uint32_t r[4];
      ldmatrix_x4(r, unit + part * Config::kInputPartBytes + operand_offset(lane, tile));
#pragma unroll
      for (int j = 0; j < 4; ++j) b[tile + j / 2][j % 2][part] = r[j];
    }
  }

  // The products of depth tap `tap` with a unit; the first ones read what the last plane left in
  // the accumulators of the tap before, so nothing is moved. The tensor cores cut off what falls
  // out of an accumulator, always downwards: split operands, which are to be exact, meet in fresh
  // ones, the small products first, and are added up outside.
  __device__ __forceinline__ void multiply_unit(int tap, int u,
                                                const uint32_t (&b)[kTiles][2][kParts]) {
    float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float fresh[kTiles][4];
#pragma unroll
    for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float (&d)[4] = Config::kSplit ? fresh[tile] : acc[tap][tile];
        const auto& c = Config::kSplit ? (product == 0 ? zero : fresh[tile])
                        : u > 0        ? acc[tap][tile]
                        : tap > 0      ? acc[tap > 0 ? tap - 1 : 0][tile]
                                       : zero;
        multiply_parts<Config>(d, a[tap][u], b[tile][0], b[tile][1], product, c);
      }
    }
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        const float before = u > 0     ? acc[tap][i / 4][i % 4]
                             : tap > 0 ? acc[tap > 0 ? tap - 1 : 0][i / 4][i % 4]
                                       : 0.0f;
        acc[tap][i / 4][i % 4] = before + fresh[i / 4][i % 4];
      }
    }
  }

  // Adds the staged plane to the output planes of depth taps low to high. Taps outside are known
  // at run time only; their products are branched around in groups.
  __device__ __forceinline__ void recompute(uint32_t slot, int lane, int low, int high) {
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int u = 0; u < Config::kUnits; ++u) {
        uint32_t b[kTiles][2][kParts];
        load_operands(slot + u * Config::kUnitBytes, lane, b);
#pragma unroll
        for (int tap = T - 1; tap >= 0; --tap) {
          if (low <= tap && tap <= high) multiply_unit(tap, u, b);
        }
      }
    } else {
      uint32_t b[Config::kUnits][kTiles][2][kParts];
#pragma unroll
      for (int u = 0; u < Config::kUnits; ++u) {
        load_operands(slot + u * Config::kUnitBytes, lane, b[u]);
      }
#pragma unroll
      for (int tap = T - 1; tap >= 0; --tap) {
        if (low <= tap && tap <= high) {
#pragma unroll
          for (int u = 0; u < Config::kUnits; ++u) multiply_unit(tap, u, b[u]);
        }
      }
    }
  }

  // The gradient of the plane that is complete, and its place among the operands; the exponent.
  __device__ __forceinline__ int form_gradient(const BackwardParameters& p,
                                               const BackwardCursor& at, int lane,
                                               unsigned char* target) {
    const float4 term[2] = {terms[0], terms[8]};
    float v[4 * kTiles];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const float y = acc[T - 1][i / 4][i % 4];
      v[i] =
          Config::kFloat32 ? fmaf(y, inverse[i % 4 / 2], term[i % 4 / 2].x) : y + term[i % 4 / 2].x;
    }
    // Outputs 4n + t of tile t; n is 2 (lane % 4) and the next. There are none past the row's end.
    const int first = 8 * (lane % 4), live = p.geometry.Q - at.piece.q - first;
    if constexpr (std::is_same_v<typename Config::ActivationType, HardswishFn>) {
      // One choice for both kinds of zero. PyTorch's derivative at most -3 is zero for any
      // gradient.
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const float4& t = term[i % 4 / 2];
        const float y = v[i], d = fmaf(y, __saturatef(fmaf(y, 1.0f / 6.0f, 0.5f)), -t.y);
        const float slope = y >= 3.0f ? 1.0f : fmaf(y, 1.0f / 3.0f, 0.5f);
        const bool zero = y <= -3.0f || i / 4 + i % 2 * 4 >= live;
        v[i] = zero ? 0.0f : fmaf(t.w, d, t.z) * slope;
      }
    } else {
      transform(activation, v, [&](const auto& function, float y, int i) {
        const float d = function.value(y) - term[i / 2].y;
        return fmaf(term[i / 2].w, d, term[i / 2].z) * function.derivative(y);
      });
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) v[i] = i / 4 + i % 2 * 4 < live ? v[i] : 0.0f;
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      if constexpr (Config::kScaled) largest = fmaxf(largest, fabsf(v[i]));
    }
    if constexpr (Config::kFilterGradient) {
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) sum[i % 4 / 2] += v[i];
      bias_gradient[0] += sum[0];
      bias_gradient[1] += sum[1];
    }
    float scale = 1.0f;
    if constexpr (Config::kScaled) {
      uint32_t bits = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
      if (bits >= 0x7F800000u) {
        // Other channels are finite: an infinite value must not decide their scale.
        largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kTiles; ++i) {
          largest = fmaxf(largest, isfinite(v[i]) ? fabsf(v[i]) : 0.0f);
        }
        bits = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
      }
      gradient_exponent = next_exponent(bits, at.first(), gradient_exponent);
      scale = power_of_two(gradient_exponent);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      uint32_t parts[kParts];
      make_operands<Config>(v[2 * i], v[2 * i + 1], scale, parts);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned char* const tile =
            target + part * Config::kGradientPartBytes + i / 2 * kBackwardTileBytes;
        *reinterpret_cast<uint32_t*>(tile + (lane / 4 + 8 * (i % 2)) * 16 + lane % 4 * 4) =
            parts[part];
      }
    }
    return gradient_exponent;
  }
};

// What one output row adds to the gradient of an input plane: sums (row (channel, kh), column),
// over the tile's channels, kd and kw. `at` is the plane's step, its own output plane in slot
// `newest` and those before it in the slots before. kw shifts by columns: it is the choice of the
// accumulator tile.
template <class Config>
__device__ __forceinline__ void input_gradient(const BackwardCursor& at, uint32_t gradients,
                                               int newest, const int* exponents,
                                               const unsigned char* weights, int weight_exponent,
                                               int lane, float* sums) {
  constexpr int T = Config::T, S = Config::S, kTiles = kBackwardTiles, kParts = Config::kParts;
  float acc[Config::kShifted][4];
#pragma unroll
  for (int i = 0; i < Config::kShifted * 4; ++i) acc[i / 4][i % 4] = 0.0f;
  int exponent = 0;
  bool any = false;
#pragma unroll
  for (int kd = T - 1; kd >= 0; --kd) {
    const int plane = at.step - kd;
    if (plane < 0 || plane >= at.piece.planes) continue;
    const int slot = newest - kd < 0 ? newest - kd + Config::kGradientSlots : newest - kd;
    if constexpr (Config::kScaled) {
      const int next = exponents[slot];
      if (any && next != exponent) {
        const float factor = falling_power(next - exponent);
#pragma unroll
        for (int i = 0; i < Config::kShifted * 4; ++i) acc[i / 4][i % 4] *= factor;
      }
      exponent = next;
      any = true;
    }
    uint32_t b[kTiles][2][kParts];
#pragma unroll
    for (int i = 0; i < kTiles / 2 * kParts; ++i) {
      const int part = i % kParts, tile = i / kParts * 2;
      uint32_t r[4];
      ldmatrix_x4_trans(r, gradients + slot * Config::kGradientBytes +
                               part * Config::kGradientPartBytes + tile * kBackwardTileBytes +
                               16 * lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[tile + j / 2][j % 2][part] = r[j];
    }
#pragma unroll
    for (int kw = 0; kw < S; ++kw) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint4 four = *reinterpret_cast<const uint4*>(
            weights + ((kd * S + kw) * kParts + part) * Config::kFragmentBytes + 16 * lane);
        a[part][0] = four.x, a[part][1] = four.y, a[part][2] = four.z, a[part][3] = four.w;
      }
      float fresh[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) fresh[i / 4][i % 4] = 0.0f;
#pragma unroll
      for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          // Split operands as in RowWarp::multiply_unit.
          float (&d)[4] = Config::kSplit ? fresh[tile] : acc[tile + kw];
          multiply_parts<Config>(d, a, b[tile][0], b[tile][1], product, d);
        }
      }
      if constexpr (Config::kSplit) {
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) acc[i / 4 + kw][i % 4] += fresh[i / 4][i % 4];
      }
    }
  }
  // Column n of tile 4 + t is column n + 1 of tile t. What leaves the segment is the next one's.
#pragma unroll
  for (int t = 0; t < S - 1; ++t) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const float before = previous_lane(acc[kTiles + t][half + 1], 4);
      acc[t][half + 1] += acc[kTiles + t][half];
      acc[t][half] += before;
    }
  }
  const float inverse = Config::kOperand == WindowOperand::kBFloat16
                            ? 1.0f
                            : any_power_of_two(-(exponent + weight_exponent));
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const int row = lane / 4 + 4 * half;
    if (row >= Config::kRows) continue;
    float* const to = sums + row * Config::kSumStride + 8 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float4*>(to + 4 * i) =
          make_float4(acc[0][half + i] * inverse, acc[1][half + i] * inverse,
                      acc[2][half + i] * inverse, acc[3][half + i] * inverse);
    }
  }
}

// One row of the gradient of an input plane: the sums of the output rows above it, and what the
// strip before left. The first R - 1 row warps then leave the rows below the strip to the next.
// Rows past the output's last one hold zeros.
template <class Config>
__device__ __forceinline__ void sum_rows(const BackwardParameters& p, const BackwardCursor& at,
                                         int warp, int lane, const float* sums, float* carry) {
  using Raw = typename Config::Raw;
  constexpr int R = Config::R, C = Config::C, kRowWarps = Config::kRowWarps;
  const BackwardGeometry& g = p.geometry;
  float sum[C];
#pragma unroll
  for (int c = 0; c < C; ++c) sum[c] = 0.0f;
  float* const left =
      carry + (warp * (g.slab_planes + Config::T - 1) + at.step) * C * kBackwardColumns + lane;
  if (warp < R - 1 && at.strip > 0) {
#pragma unroll
    for (int c = 0; c < C; ++c) sum[c] = left[c * kBackwardColumns];
  }
  const float* const row_sums = sums + warp * Config::kRows * Config::kSumStride + lane;
  const auto add = [&](float (&to)[C], int kh, int row) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      to[c] += row_sums[(row * Config::kRows + c * R + kh) * Config::kSumStride];
    }
  };
#pragma unroll
  for (int kh = R - 1; kh >= 0; --kh) {
    if (kh <= warp) add(sum, kh, -kh);
  }
  const int h = at.strip * kRowWarps + warp - g.pad_h, w = at.piece.q + lane - g.pad_w;
  if (h >= 0 && h < g.H && w >= 0 && w < g.W && lane >= at.piece.own_column) {
    const int64_t channel_stride = static_cast<int64_t>(g.D) * g.H * g.W;
    int64_t to = static_cast<int64_t>(at.sample) * C * channel_stride +
                 (static_cast<int64_t>(at.plane(g)) * g.H + h) * g.W + w;
#pragma unroll
    for (int c = 0; c < C; ++c, to += channel_stride) {
      if (p.add_to_sum) sum[c] += p.dx_sum[to];
      if (!p.write_dx) {
        p.dx_sum[to] = sum[c];
      } else if constexpr (Config::kFloat32) {
        static_cast<float*>(p.dx)[to] = sum[c];
      } else if constexpr (Config::kBFloat16) {
        static_cast<Raw*>(p.dx)[to] = __bfloat16_as_ushort(__float2bfloat16_rn(sum[c]));
      } else {
        static_cast<Raw*>(p.dx)[to] = __half_as_ushort(__float2half_rn(sum[c]));
      }
    }
  }
  if (warp < R - 1) {
    float below[C];
#pragma unroll
    for (int c = 0; c < C; ++c) below[c] = 0.0f;
#pragma unroll
    for (int kh = R - 1; kh > 0; --kh) {
      if (kh > warp) add(below, kh, kRowWarps - kh);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) left[c * kBackwardColumns] = below[c];
  }
}

}  // namespace window

}  // namespace convnormpool
