// The operands of the backward window kernel (conv_activation_moments_backward_window.cuh): its
// configuration, the weights in their two forms, and an input plane's way into shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/conv_activation_moments_backward_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace convnormpool {

struct BackwardParameters {
  const void* x;      // (N, C, D, H, W) contiguous
  const void* w;      // (K, C, T, R, S) contiguous
  const void* bias;   // (K,) or null; all three of one dtype
  const float* mean;  // (N, K), as grad_mean and grad_m2
  const float* grad_mean;
  const float* grad_m2;
  void* dx;               // (N, C, D, H, W) of x's dtype, or null
  float* dx_sum;          // the same in float, read and written instead where dx is the sum over
                          // several launches; null elsewhere
  float* filter_partial;  // (channel tiles, blocks, filter warps, 16, C T R S)
  float* bias_partial;    // (channel tiles, blocks, row warps, 16)
  int32_t N;
  int32_t first_tile;  // of 16 output channels
  bool add_to_sum;     // dx_sum holds what earlier tiles gave
  bool write_dx;       // this launch's sums are complete
  BackwardGeometry geometry;
};

// RowWarps: rows of a strip. FilterWarps: warps that form the filter's gradient; with none the
// kernel is that of the input's. Blocks: resident on an SM at once.
//
// float32 operands are scaled by powers of two into fp16, whose 11 bits are tf32's: one half of
// each for kTf32, two for kSplit.
template <int T_, int R_, int S_, int C_, WindowOperand Operand, class Activation_, int RowWarps,
          int FilterWarps, int Blocks>
struct BackwardConfig {
  static constexpr int T = T_, R = R_, S = S_, C = C_;
  static constexpr WindowOperand kOperand = Operand;
  using ActivationType = Activation_;
  static constexpr bool kInputGradient = FilterWarps == 0, kFilterGradient = !kInputGradient;
  static constexpr int kRowWarps = RowWarps, kFilterWarps = FilterWarps;
  static constexpr int kThreads = 32 * (kRowWarps + kFilterWarps), kBlocksPerSm = Blocks;

  static constexpr bool kSplit = Operand == WindowOperand::kSplit;
  static constexpr bool kFloat32 = kSplit || Operand == WindowOperand::kTf32;
  static constexpr bool kBFloat16 = Operand == WindowOperand::kBFloat16;
  static constexpr bool kScaled = !kBFloat16;  // whether dy carries a power of two
  static constexpr int kParts = kSplit ? 2 : 1, kProducts = kSplit ? 3 : 1;
  using Raw = std::conditional_t<kFloat32, float, uint16_t>;  // an element as it is loaded

  static constexpr int kTaps = C * T * R * S;
  static constexpr int kRows = C * R, kUnits = (kRows + 3) / 4;
  static constexpr int kExtraColumns = S - 1;  // staged columns from the 32nd on
  static constexpr int kExtras = (kRows * kExtraColumns + 31) / 32;
  static constexpr int kShifted = kBackwardTiles + S - 1;  // tiles of the input gradient's columns

  // Planes kept: the one staged, the one multiplied, and what the filter's gradient, T steps late,
  // still needs.
  static constexpr int kInputSlots = kFilterGradient ? T + 2 : 2;
  static constexpr int kGradientSlots = kFilterGradient ? T + 1 : T;
  static constexpr int kUnitBytes = 16 * kBackwardSlots;
  static constexpr int kInputPartBytes = kUnits * kUnitBytes;
  static constexpr int kInputBytes = kParts * kInputPartBytes;
  static constexpr int kGradientPartBytes = kBackwardTiles * kBackwardTileBytes;
  static constexpr int kGradientBytes = kParts * kGradientPartBytes;
  static constexpr int kFragmentBytes = 512;
  static constexpr int kWeightBytes = kInputGradient ? T * S * kParts * kFragmentBytes : 0;
  // Rows of 36 floats: their 16-byte stores then meet no bank twice.
  static constexpr int kSumStride = 36;
  static constexpr int kSumBytes = kInputGradient ? kRows * kSumStride * 4 : 0;
  static constexpr int kExponentBytes = 2 * 8 * 4;
  static constexpr int kTermBytes =
      16 * 16;  // of a row warp's channels: bias and what dy is made of

  static constexpr int kInputOffset = 0;
  static constexpr int kGradientOffset = kInputOffset + kRowWarps * kInputSlots * kInputBytes;
  static constexpr int kWeightOffset =
      kGradientOffset + kRowWarps * kGradientSlots * kGradientBytes;
  static constexpr int kSumOffset = kWeightOffset + kWeightBytes;
  static constexpr int kExponentOffset = kSumOffset + 2 * kRowWarps * kSumBytes;
  static constexpr int kTermOffset = kExponentOffset + kRowWarps * kExponentBytes;
  static constexpr int kCarryOffset = kTermOffset + kRowWarps * kTermBytes;
  // What a strip adds to the R - 1 rows below it, for each input plane of a slab.
  static CONVNORMPOOL_HOST_DEVICE constexpr int shared_bytes(int32_t slab_planes) {
    const int planes = kInputGradient ? slab_planes + T - 1 : 0;
    return kCarryOffset + (R - 1) * planes * C * kBackwardColumns * 4;
  }

  static_assert(S == 3 || S == 4, "eight taps are two columns of four rows");
  static_assert(kInputSlots <= 8 && kGradientSlots <= 8, "exponents are kept for eight planes");
  static_assert(kRows <= 16, "rows (channel, kh) of the input's gradient are one tile of 16");
  static_assert(kFilterGradient || RowWarps >= R - 1, "a strip reaches into the next one alone");
};

namespace window {

template <class Config>
using BackwardWeights = uint32_t[Config::T][Config::kUnits][Config::kParts][4];

// 2^e, infinite or rounded to zero where float ends.
__device__ __forceinline__ float any_power_of_two(int e) {
  const int near = min(max(e, -126), 127);
  return power_of_two(near) * power_of_two(min(max(e - near, -126), 127));
}

template <class Pair>
__device__ __forceinline__ uint32_t bits_of(const Pair& pair) {
  uint32_t bits;
  static_assert(sizeof(pair) == sizeof(bits), "two 16-bit values");
  std::memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// One part after another of a pair of values as operands, scaled.
template <class Config>
__device__ __forceinline__ void make_operands(float a, float b, float scale,
                                              uint32_t (&parts)[Config::kParts]) {
  if constexpr (Config::kBFloat16) {
    parts[0] = bits_of(__floats2bfloat162_rn(a, b));
    return;
  }
  const __half2 pair = __floats2half2_rn(a * scale, b * scale);
  parts[0] = bits_of(pair);
  if constexpr (Config::kSplit) {
    const float rest_a = fmaf(a, scale, -__low2float(pair));
    const float rest_b = fmaf(b, scale, -__high2float(pair));
    parts[1] = bits_of(__floats2half2_rn(rest_a, rest_b));
  }
}

// Elements as they were loaded; 16-bit ones are operands already.
template <class Config>
__device__ __forceinline__ void pack_operands(typename Config::Raw a, typename Config::Raw b,
                                              float scale, uint32_t (&parts)[Config::kParts]) {
  if constexpr (Config::kFloat32) {
    make_operands<Config>(a, b, scale, parts);
  } else {
    parts[0] = pack(a, b);
  }
}

// Product `product` of operands in parts; the small products come first.
template <class Config>
__device__ __forceinline__ void multiply_parts(float (&d)[4],
                                               const uint32_t (&a)[Config::kParts][4],
                                               const uint32_t (&b0)[Config::kParts],
                                               const uint32_t (&b1)[Config::kParts], int product,
                                               const float (&c)[4]) {
  if constexpr (Config::kBFloat16) {
    mma_m16n8k16_bf16(d, a[0], b0[0], b1[0], c);
  } else if constexpr (Config::kSplit) {
    const int of_a = product == 0 ? 1 : 0, of_b = product == 1 ? 1 : 0;
    mma_m16n8k16_f16(d, a[of_a], b0[of_b], b1[of_b], c);
  } else {
    mma_m16n8k16_f16(d, a[0], b0[0], b1[0], c);
  }
}

// ---- weights

template <class Config>
__device__ __forceinline__ typename Config::Raw load_tap(const BackwardParameters& p, int k,
                                                         int row, int kd, int kw) {
  using Raw = typename Config::Raw;
  const int64_t filter = static_cast<int64_t>(k) * Config::C + row / Config::R;
  const int64_t at = ((filter * Config::T + kd) * Config::R + row % Config::R) * Config::S + kw;
  return load_if(k < p.geometry.K && row < Config::kRows && kw < Config::S,
                 static_cast<const Raw*>(p.w) + at);
}

// The largest magnitude, as bits, of the weights of channels k .. k + count - 1 that exist.
template <class Config>
__device__ __forceinline__ uint32_t largest_weight(const BackwardParameters& p, int k, int count,
                                                   int first, int step) {
  uint32_t largest = 0;
  if constexpr (Config::kFloat32) {
    const float* w = static_cast<const float*>(p.w) + static_cast<int64_t>(k) * Config::kTaps;
    const int end = min(count, p.geometry.K - k) * Config::kTaps;
    for (int i = first; i < end; i += step) {
      largest = max(largest, __float_as_uint(__ldg(w + i)) & 0x7FFFFFFFu);
    }
  }
  return largest;
}

// Weights come to [2^14, 2^15) at most.
__device__ __forceinline__ int exponent_of_weights(uint32_t largest) {
  return min(141 - exponent_field(largest), 127);
}

// A fragments of the recomputation: rows are output channels first .. first + 15; along the depth
// eight taps of a unit (two columns kw, four rows), then those of the next two columns.
template <class Config>
__device__ __forceinline__ void load_weights(const BackwardParameters& p, int first, int lane,
                                             const int (&exponent)[2], BackwardWeights<Config>& a) {
#pragma unroll
  for (int i = 0; i < Config::T * Config::kUnits * 4; ++i) {
    const int reg = i % 4, unit = i / 4 % Config::kUnits, kd = i / (4 * Config::kUnits);
    const int k = first + lane / 4 + 8 * (reg % 2);
    const int row = 4 * unit + 2 * (lane % 2), kw = 2 * (reg / 2) + lane % 4 / 2;
    uint32_t parts[Config::kParts];
    pack_operands<Config>(load_tap<Config>(p, k, row, kd, kw),
                          load_tap<Config>(p, k, row + 1, kd, kw),
                          Config::kFloat32 ? power_of_two(exponent[reg % 2]) : 1.0f, parts);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) a[kd][unit][part][reg] = parts[part];
  }
}

// A fragments of the input's gradient: rows (channel, kh), along the depth the tile's 16 output
// channels. Fragment (kd, kw, part) in shared memory, a lane's four registers together.
template <class Config>
__device__ __forceinline__ void stage_weights(const BackwardParameters& p, int first, int exponent,
                                              unsigned char* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < Config::T * Config::S * 32 * 4;
       i += static_cast<int>(blockDim.x)) {
    const int reg = i % 4, lane = i / 4 % 32, tap = i / 128;
    const int row = lane / 4 + 8 * (reg % 2), k = first + lane % 4 * 2 + 8 * (reg / 2);
    const int kd = tap / Config::S, kw = tap % Config::S;
    uint32_t parts[Config::kParts];
    pack_operands<Config>(load_tap<Config>(p, k, row, kd, kw),
                          load_tap<Config>(p, k + 1, row, kd, kw),
                          Config::kFloat32 ? power_of_two(exponent) : 1.0f, parts);
    for (int part = 0; part < Config::kParts; ++part) {
      uint32_t* const at = reinterpret_cast<uint32_t*>(shared + (tap * Config::kParts + part) *
                                                                    Config::kFragmentBytes);
      at[lane * 4 + reg] = parts[part];
    }
  }
}

// ---- input planes

// The elements of a plane that one lane stages: its column of every row, and its share of the
// columns from the 32nd on.
template <class Config>
struct BackwardPlane {
  typename Config::Raw row[Config::kRows];
  typename Config::Raw extra[Config::kExtras];
};

// Loads a warp's planes in the order of the walk.
template <class Config>
struct BackwardLoader {
  using Raw = typename Config::Raw;

  const Raw* plane;    // the lane's first element of the plane
  uint32_t live_rows;  // bit kh: that row is inside the input
  int first_column;    // of the staged columns

  // Begins a strip: output row `row`.
  __device__ __forceinline__ void place(const BackwardParameters& p, const BackwardCursor& at,
                                        int row, int lane) {
    const BackwardGeometry& g = p.geometry;
    const int h = row - g.pad_h;
    live_rows = 0;
    for (int kh = 0; kh < Config::R; ++kh) {
      live_rows |= static_cast<uint32_t>(row < g.P && h + kh >= 0 && h + kh < g.H) << kh;
    }
    first_column = at.piece.q - g.pad_w;
    plane = static_cast<const Raw*>(p.x) +
            ((static_cast<int64_t>(at.sample) * Config::C * g.D + at.plane(g)) * g.H + h) * g.W +
            first_column + lane;
  }

  __device__ __forceinline__ void load(const BackwardGeometry& g, bool inside, int lane,
                                       BackwardPlane<Config>& raw) const {
    const int64_t channel_stride = static_cast<int64_t>(g.D) * g.H * g.W;
    const int column = first_column + lane;
    const uint32_t rows = inside ? live_rows : 0;
    const bool live_column = column >= 0 && column < g.W;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      const int kh = row % Config::R;
      raw.row[row] = load_if(live_column && (rows >> kh & 1),
                             plane + row / Config::R * channel_stride + kh * g.W);
    }
    if (first_column + kBackwardColumns >= g.W) {
#pragma unroll
      for (int i = 0; i < Config::kExtras; ++i) raw.extra[i] = Raw(0);
      return;
    }
#pragma unroll
    for (int i = 0; i < Config::kExtras; ++i) {
      const int e = lane + 32 * i, row = e / Config::kExtraColumns, kh = row % Config::R;
      const int beyond = kBackwardColumns + e % Config::kExtraColumns;
      const bool live = row < Config::kRows && first_column + beyond < g.W;
      raw.extra[i] = load_if(live && (rows >> kh & 1),
                             plane + row / Config::R * channel_stride + kh * g.W + beyond - lane);
    }
  }
};

// The largest magnitude among a plane's elements that are not NaN, as bits; the same in all lanes.
template <class Config>
__device__ __forceinline__ uint32_t largest_magnitude(const BackwardPlane<Config>& raw) {
  float largest = 0.0f;
#pragma unroll
  for (const float x : raw.row) largest = fmaxf(largest, fabsf(x));
#pragma unroll
  for (int i = 0; i < Config::kExtras; ++i) largest = fmaxf(largest, fabsf(raw.extra[i]));
  return __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
}

// A loaded plane into its slot, which holds zeros where nothing is ever staged.
template <class Config>
__device__ __forceinline__ void stage_plane(const BackwardPlane<Config>& raw, float scale,
                                            bool extras, int lane, unsigned char* slot) {
  using Raw = typename Config::Raw;
#pragma unroll
  for (int u = 0; u < Config::kUnits; ++u) {
    Raw v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = 4 * u + i < Config::kRows ? raw.row[4 * u + i] : Raw(0);
    uint32_t low[Config::kParts], high[Config::kParts];
    pack_operands<Config>(v[0], v[1], scale, low);
    pack_operands<Config>(v[2], v[3], scale, high);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      unsigned char* const unit = slot + part * Config::kInputPartBytes + u * Config::kUnitBytes;
      const uint2 four = make_uint2(low[part], high[part]);
      *reinterpret_cast<uint2*>(unit + 16 * backward_slot(lane)) = four;
      if (lane > 0) *reinterpret_cast<uint2*>(unit + 16 * backward_slot(lane - 1) + 8) = four;
    }
  }
  if (!extras) return;
#pragma unroll
  for (int i = 0; i < Config::kExtras; ++i) {
    const int e = lane + 32 * i, row = e / Config::kExtraColumns;
    const int column = kBackwardColumns + e % Config::kExtraColumns;
    if (row >= Config::kRows) continue;
    uint32_t parts[Config::kParts];
    pack_operands<Config>(raw.extra[i], Raw(0), scale, parts);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      unsigned char* const unit =
          slot + part * Config::kInputPartBytes + row / 4 * Config::kUnitBytes + row % 4 * 2;
      const uint16_t element = static_cast<uint16_t>(parts[part]);
      *reinterpret_cast<uint16_t*>(unit + 16 * backward_slot(column)) = element;
      *reinterpret_cast<uint16_t*>(unit + 16 * backward_slot(column - 1) + 8) = element;
    }
  }
}

}  // namespace window

}  // namespace convnormpool
