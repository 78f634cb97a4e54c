// The operands of the portable window kernel (conv_activation_moments_window.cuh): its
// configuration, roundings and scales, and the weights in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_window_map.h"

namespace convnormpool {

// How the operands of the products are formed. kSplit and kTf32 read float32, scaled by powers of
// two and rounded to two float16 halves of 11 bits, or to one: tf32's 11 bits, and half the
// products that operands of that type would take.
enum class WindowOperand { kTf32, kFloat16, kBFloat16, kSplit };

struct WindowParameters {
  const void* x;     // (N, C, D, H, W) contiguous
  const void* w;     // (K, C, T, R, S) contiguous
  const void* bias;  // (K,) or null; all three of one dtype
  float2* partial;   // (N, pieces, K): mean and M2 of each piece
  int32_t N;
  WindowGeometry geometry;
};

// General: any padding, row length and alignment. Without it pad_h = pad_w = 0, W is kShortRow, x
// is aligned to 16 bytes, and no load is masked. Tiles: tiles of 8 outputs of a segment, even, 4 at
// most. Blocks: resident on an SM at once, 0 for a guess. Narrow, without General: W is even, from
// kNarrowRow to kShortRow, and x aligned to two elements.
template <int T_, int R_, int S_, int C_, WindowOperand Operand, class Activation_, bool General,
          int Tiles = 4, int Blocks = 0, bool Narrow = false>
struct WindowConfig {
  static_assert(!(General && Narrow), "rows are short or of any length");
  static constexpr int T = T_, R = R_, S = S_, C = C_;
  static constexpr WindowOperand kOperand = Operand;
  static constexpr bool kGeneral = General;
  static constexpr int kTiles = Tiles;
  using ActivationType = Activation_;

  static constexpr bool kSplit = Operand == WindowOperand::kSplit;
  static constexpr bool kScaled = kSplit || Operand == WindowOperand::kTf32;
  static constexpr int kParts = kSplit ? 2 : 1;              // halves of an operand
  using Raw = std::conditional_t<kScaled, float, uint16_t>;  // an element as it is loaded
  static constexpr int kRows = C * R;
  static constexpr int kUnits = (kRows + 3) / 4;
  static constexpr int kGroups = (S + 3) / 4;
  // Registers of a unit: four rows, or four high and four low halves.
  static constexpr int kUnitRegisters = 2 * kParts;
  static constexpr int kUnitBytes = 4 * kUnitRegisters;
  static constexpr int kProducts = kSplit ? 3 : 1;  // with a unit

  static constexpr int kHalfTiles = kTiles / 2;
  static constexpr int kColumns = 8 * kTiles + 4 * kGroups - 1;
  static constexpr int kPlaneBytes = (kUnits * kColumns * kUnitBytes + 15) / 16 * 16;

  // Without General planes come by way of a ring in shared memory, rows of kShortRow columns,
  // copied in chunks of 16 bytes, the rows of a channel from one place.
  static constexpr bool kRing = !General;
  static constexpr uint32_t kRingPlanes = 4;
  // 16-bit operands are then taken straight from the ring, as windows of eight columns: output
  // 4 n + tile of column n of a tile, so that neighbouring tiles need neighbouring elements. Rows
  // are padded so that the windows of four rows meet no bank twice.
  static constexpr bool kDirect = kRing && !kScaled;
  static constexpr int kRowBytes = kDirect ? 96 : kShortRow * static_cast<int>(sizeof(Raw));
  static constexpr int kRawBytes = kRows * kRowBytes;
  static constexpr int kRowChunks = kShortRow * static_cast<int>(sizeof(Raw)) / 16;
  // Narrow rows are copied two at a time, each by 16 lanes, an aligned pair of elements a lane.
  static constexpr bool kNarrow = Narrow;
  static constexpr int kPairBytes = 2 * static_cast<int>(sizeof(Raw));
  static constexpr int kLeastOutputs = (kNarrow ? kNarrowRow : kShortRow) - S + 1;
  static_assert(General || (R == 4 && S == 4 && Tiles == 4), "short rows are for one filter");
  // The planes loaded ahead are of this piece and the next one.
  static_assert(T >= (kRing ? 4 : 2), "a piece has as many planes as are loaded ahead");

  // With General a lane loads its column of every row and its share of the columns from the 32nd
  // on.
  static constexpr int kStagedColumns = 8 * kTiles + S - 1;
  static constexpr int kExtraColumns = kGeneral && kStagedColumns > 32 ? kStagedColumns - 32 : 0;
  static constexpr int kExtraDivisor = kExtraColumns > 0 ? kExtraColumns : 1;
  static constexpr int kExtras = (kRows * kExtraColumns + 31) / 32;

  // One warp: what is the same for all its lanes then comes from blockIdx, and the compiler knows.
  static constexpr int kThreads = 32;
  static constexpr int kRingOffset = kDirect ? 0 : 2 * kPlaneBytes;
  static constexpr int kPlanesBytes =
      kRingOffset + (kRing ? static_cast<int>(kRingPlanes) * kRawBytes : 0);
  static constexpr int kExponentOffset = kPlanesBytes > 32 * 16 ? kPlanesBytes : 32 * 16;
  static constexpr int kSharedBytes = kExponentOffset + (kScaled ? 64 : 0);

  static constexpr int kWeightRegisters = 4 * T * kGroups * kUnits * kParts;
  static constexpr int kAccumulators = 4 * T * kTiles;
  static constexpr int kBlocksPerSm = Blocks > 0                                       ? Blocks
                                      : kWeightRegisters + kAccumulators + kRows > 125 ? 8
                                                                                       : 12;
  static_assert(kTiles % 2 == 0, "the tiles are worked on in two halves");
  static_assert(S <= 8, "there are at most two groups of four columns");
  static_assert(kWeightRegisters + kAccumulators + kRows <= 215, "the registers must hold it all");
};

namespace window {

template <class Config>
using Weights = uint32_t[Config::T][Config::kUnits][Config::kGroups][Config::kParts][4];

__device__ __forceinline__ uint32_t pack(uint16_t low, uint16_t high) {
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ uint32_t pack(__half2 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// (a, b) as fp16, to 11 bits, or as the sum of two of them, to 22. `largest` becomes the larger of
// itself and the magnitudes of the rounded values, each half for itself; NaN counts as nothing.
template <int Parts>
__device__ __forceinline__ void round_pair(float a, float b, uint32_t (&parts)[Parts],
                                           __half2& largest) {
  const __half2 pair = __floats2half2_rn(a, b);
  largest = __hmax2(largest, __habs2(pair));
  parts[0] = pack(pair);
  if constexpr (Parts == 2) {
    parts[1] = pack(__floats2half2_rn(a - __low2float(pair), b - __high2float(pair)));
  }
}

template <int Parts>
__device__ __forceinline__ void round_pair(float a, float b, uint32_t (&parts)[Parts]) {
  __half2 largest = __floats2half2_rn(0.0f, 0.0f);
  round_pair(a, b, parts, largest);
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<uint32_t>(e + 127) << 23);
}

// The exponent field of a magnitude's bits; Inf and NaN count as the largest numbers.
__device__ __forceinline__ int exponent_field(uint32_t magnitude) {
  return min(static_cast<int>(magnitude >> 23), 254);
}

// A piece whose numbers the compiler knows to be the same for the warp.
__device__ __forceinline__ WindowPiece uniform_piece(const WindowGeometry& s, int32_t index) {
  const WindowPiece piece = window_piece(s, index);
  return {uniform_value(piece.z), uniform_value(piece.planes), uniform_value(piece.p),
          uniform_value(piece.q), uniform_value(piece.columns)};
}

// An element that may not be there.
template <class Raw>
__device__ __forceinline__ Raw load_if(bool exists, const Raw* p) {
  return exists ? __ldg(p) : Raw(0);
}

// ---- weights

// The exponent by which a channel's weights are scaled: the largest comes to [2^14, 2^15). The four
// lanes that have the channel look for it together.
template <class Config>
__device__ __forceinline__ int weight_exponent(const WindowParameters& p, int k, int lane) {
  constexpr int kTaps = Config::C * Config::T * Config::R * Config::S;
  const float* w = static_cast<const float*>(p.w) + static_cast<int64_t>(k) * kTaps;
  uint32_t largest = 0;
  if (k < p.geometry.K) {
    for (int i = lane % 4; i < kTaps; i += 4) {
      largest = max(largest, __float_as_uint(w[i]) & 0x7FFFFFFFu);
    }
  }
  return min(141 - exponent_field(lanes_max(largest, 4)), 127);
}

template <class Config>
__device__ __forceinline__ typename Config::Raw load_weight(const WindowParameters& p, int k,
                                                            int kd, int row, int kw) {
  const int64_t filter = static_cast<int64_t>(k) * Config::C + row / Config::R;
  const int64_t index = ((filter * Config::T + kd) * Config::R + row % Config::R) * Config::S + kw;
  return load_if(k < p.geometry.K && row < Config::kRows && kw < Config::S,
                 static_cast<const typename Config::Raw*>(p.w) + index);
}

// The A fragments of output channels first .. first + 15; lane % 4 is kw.
template <class Config>
__device__ __forceinline__ void load_weights(const WindowParameters& p, int first, int lane,
                                             const int (&exponent)[2], Weights<Config>& a) {
#pragma unroll
  for (int i = 0; i < Config::T * Config::kUnits * Config::kGroups * 2; ++i) {
    const int half = i % 2, group = i / 2 % Config::kGroups;
    const int unit = i / (2 * Config::kGroups) % Config::kUnits;
    const int kd = i / (2 * Config::kGroups * Config::kUnits);
    typename Config::Raw v[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      // Four rows of a column, or four columns of a row.
      const int i = Config::kDirect ? lane % 4 : row, j = Config::kDirect ? row : lane % 4;
      v[row] = load_weight<Config>(p, first + lane / 4 + 8 * half, kd, 4 * unit + i, 4 * group + j);
    }
    auto& out = a[kd][unit][group];
    if constexpr (Config::kScaled) {
      const float scale = power_of_two(exponent[half]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t parts[Config::kParts];
        round_pair(v[2 * pair] * scale, v[2 * pair + 1] * scale, parts);
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) out[part][half + 2 * pair] = parts[part];
      }
    } else {
      out[0][half] = pack(v[0], v[1]);
      out[0][half + 2] = pack(v[2], v[3]);
    }
  }
}

}  // namespace window

}  // namespace convnormpool
