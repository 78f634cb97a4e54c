// The operands of the portable window kernel (conv_activation_moments_window.cuh): its
// configuration, the weights in registers, and an input plane's way into shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
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

// General: any padding, row length and alignment. Without it pad_h = pad_w = 0, W is even and at
// most 8 Tiles, x is aligned to two elements, and no load is masked. Tiles: tiles of 8 outputs of a
// segment, even, 4 at most. FullTiles: so many tiles of every segment are known to be live
// throughout, which saves their masks. Blocks: resident on an SM at once, 0 for a guess.
template <int T_, int R_, int S_, int C_, WindowOperand Operand, class Activation_, bool General,
          int Tiles = 4, int FullTiles = 0, int Blocks = 0>
struct WindowConfig {
  static constexpr int T = T_, R = R_, S = S_, C = C_;
  static constexpr WindowOperand kOperand = Operand;
  static constexpr bool kGeneral = General;
  static constexpr int kTiles = Tiles, kFullTiles = FullTiles;
  using ActivationType = Activation_;

  static constexpr bool kSplit = Operand == WindowOperand::kSplit;
  static constexpr bool kScaled = kSplit || Operand == WindowOperand::kTf32;
  static constexpr int kParts = kSplit ? 2 : 1;              // halves of an operand
  using Raw = std::conditional_t<kScaled, float, uint16_t>;  // an element as it is loaded
  using RawPair = std::conditional_t<kScaled, float2, uint32_t>;
  // A lane loads pairs of columns, of rows 2 (lane % 2) and the next of each unit, instead of a
  // column of all rows. Those rows must not depend on the lane but by their distance.
  static constexpr bool kPaired = !General && (R == 2 || R == 4);

  static constexpr int kRows = C * R;
  static constexpr int kUnits = (kRows + 3) / 4;
  static constexpr int kGroups = (S + 3) / 4;
  // Registers of a unit: four rows, or four high and four low halves.
  static constexpr int kUnitRegisters = 2 * kParts;
  static constexpr int kUnitBytes = 4 * kUnitRegisters;
  static constexpr int kProducts = kSplit ? 3 : 1;  // with a unit

  static constexpr int kHalfTiles = kTiles / 2;
  static constexpr int kColumns = 8 * kTiles + 4 * kGroups - 1;
  static constexpr int kStagedColumns = 8 * kTiles + S - 1;
  static constexpr int kExtraColumns = kGeneral && kStagedColumns > 32 ? kStagedColumns - 32 : 0;
  static constexpr int kExtraDivisor = kExtraColumns > 0 ? kExtraColumns : 1;
  static constexpr int kExtras = (kRows * kExtraColumns + 31) / 32;
  static constexpr int kPlaneBytes = (kUnits * kColumns * kUnitBytes + 15) / 16 * 16;
  // One warp: what is the same for all its lanes then comes from blockIdx, and the compiler knows.
  static constexpr int kThreads = 32;
  static constexpr int kExponentOffset = 2 * kPlaneBytes > 32 * 16 ? 2 * kPlaneBytes : 32 * 16;
  static constexpr int kSharedBytes = kExponentOffset + (kScaled ? 64 : 0);

  static constexpr bool kStaticEdges = T <= 4;
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
  return pack(__half_as_ushort(__low2half(pair)), __half_as_ushort(__high2half(pair)));
}

// (a, b) as fp16, to 11 bits, or as the sum of two of them, to 22.
template <int Parts>
__device__ __forceinline__ void round_pair(float a, float b, uint32_t (&parts)[Parts]) {
  const __half2 pair = __floats2half2_rn(a, b);
  parts[0] = pack(pair);
  if constexpr (Parts == 2) {
    parts[1] = pack(__floats2half2_rn(a - __low2float(pair), b - __high2float(pair)));
  }
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<uint32_t>(e + 127) << 23);
}

// The exponent field of a magnitude's bits; Inf and NaN count as the largest numbers.
__device__ __forceinline__ int exponent_field(uint32_t magnitude) {
  return min(static_cast<int>(magnitude >> 23), 254);
}

// An element that may not be there.
template <class Raw>
__device__ __forceinline__ Raw load_if(bool exists, const Raw* p) {
  return exists ? __ldg(p) : Raw(0);
}

// ---- weights

// The exponent by which a channel's weights are scaled: the largest comes to [2^14, 2^15).
template <class Config>
__device__ __forceinline__ int weight_exponent(const WindowParameters& p, int k) {
  constexpr int kTaps = Config::C * Config::T * Config::R * Config::S;
  const float* w = static_cast<const float*>(p.w) + static_cast<int64_t>(k) * kTaps;
  uint32_t largest = 0;
  if (k < p.geometry.K) {
    for (int i = 0; i < kTaps; ++i) largest = max(largest, __float_as_uint(w[i]) & 0x7FFFFFFFu);
  }
  return min(141 - exponent_field(largest), 127);
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
      v[row] = load_weight<Config>(p, first + lane / 4 + 8 * half, kd, 4 * unit + row,
                                   4 * group + lane % 4);
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

// ---- input planes

// The elements of a plane that one lane stages: pairs of columns of its rows, or its column of
// every row and its share of the columns from the 32nd on.
template <class Config>
struct RawPlane {
  typename Config::RawPair pair[Config::kPaired ? 2 * Config::kUnits : 1];
  typename Config::Raw row[Config::kPaired ? 1 : Config::kRows];
  typename Config::Raw extra[Config::kExtras > 0 ? Config::kExtras : 1];
};

// A piece whose numbers the compiler knows to be the same for the warp.
__device__ __forceinline__ WindowPiece uniform_piece(const WindowGeometry& s, int32_t index) {
  const WindowPiece piece = window_piece(s, index);
  return {uniform_value(piece.z), uniform_value(piece.planes), uniform_value(piece.p),
          uniform_value(piece.q), uniform_value(piece.columns)};
}

// The planes that a warp loads, in order: those of a piece by depth, then those of its next piece.
template <class Config>
struct Loader {
  using Raw = typename Config::Raw;

  int32_t sample, index;
  int step, last_step;
  const Raw* plane;    // the lane's first element of the plane
  uint32_t live_rows;  // bit kh: that row is inside the input
  int first_column;    // of the staged columns

  __device__ __forceinline__ void place(const WindowParameters& p, int lane) {
    const WindowGeometry& s = p.geometry;
    const WindowPiece piece = uniform_piece(s, index);
    step = window_first_step(s, piece);
    last_step = window_last_step(s, piece, Config::T);
    const int h = piece.p - (Config::kGeneral ? s.pad_h : 0);
    const int d = piece.z - s.pad_d + step;
    live_rows = 0;
    for (int kh = 0; kh < Config::R; ++kh) {
      live_rows |= static_cast<uint32_t>(h + kh >= 0 && h + kh < s.H) << kh;
    }
    first_column = Config::kGeneral ? piece.q - s.pad_w : 0;
    // Without General a column past the row's end feeds masked outputs only: any element will do.
    int64_t column = Config::kGeneral ? first_column + lane : min(lane, s.W - 1);
    if constexpr (Config::kPaired) {
      const int64_t second_pair = Config::R == 2 ? static_cast<int64_t>(s.D) * s.H * s.W : 2 * s.W;
      column = min(lane / 2 * 2, s.W - 2) + lane % 2 * second_pair;
    }
    plane = static_cast<const Raw*>(p.x) +
            ((static_cast<int64_t>(sample) * Config::C * s.D + d) * s.H + h) * s.W + column;
  }

  // On to the next plane; past the last one of all it stays. True where a piece begins.
  __device__ __forceinline__ bool next(const WindowParameters& p, int lane, int64_t plane_stride,
                                       const WindowStride& stride) {
    if (step < last_step) {
      ++step;
      plane += plane_stride;
      return false;
    }
    if (stride.next(sample, index) >= p.N) return true;
    place(p, lane);
    return true;
  }

  __device__ __forceinline__ void load(const WindowGeometry& s, int lane,
                                       RawPlane<Config>& raw) const {
    const int64_t channel_stride = static_cast<int64_t>(s.D) * s.H * s.W;
    if constexpr (Config::kPaired) {
#pragma unroll
      for (int i = 0; i < 2 * Config::kUnits; ++i) {
        const Raw* at = plane + (i / 2 * (4 / Config::R) * channel_stride + i % 2 * s.W);
        raw.pair[i] = __ldg(reinterpret_cast<const typename Config::RawPair*>(at));
      }
      return;
    }
    const int column = first_column + lane;
    const bool live_column = column >= 0 && column < s.W && lane < Config::kStagedColumns;
#pragma unroll
    for (int row = 0; row < (Config::kPaired ? 0 : Config::kRows); ++row) {
      const int kh = row % Config::R;
      const Raw* at = plane + (row / Config::R * channel_stride + kh * s.W);
      raw.row[row] =
          Config::kGeneral ? load_if(live_column && (live_rows >> kh & 1), at) : __ldg(at);
    }
#pragma unroll
    for (int i = 0; i < Config::kExtras; ++i) {
      const int e = lane + 32 * i, row = e / Config::kExtraDivisor;
      const int beyond = 32 + e % Config::kExtraDivisor, kh = row % Config::R;
      const bool live = row < Config::kRows && first_column + beyond < s.W;
      raw.extra[i] = load_if(live && (live_rows >> kh & 1),
                             plane + row / Config::R * channel_stride + kh * s.W + beyond - lane);
    }
  }
};

// The largest magnitude among a plane's elements that are not NaN, as bits; the same in all lanes.
template <class Config>
__device__ __forceinline__ uint32_t largest_magnitude(const RawPlane<Config>& raw) {
  float largest = 0.0f;
  if constexpr (Config::kPaired) {
#pragma unroll
    for (const float2& pair : raw.pair) {
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  } else {
#pragma unroll
    for (const float x : raw.row) largest = fmaxf(largest, fabsf(x));
  }
#pragma unroll
  for (int i = 0; i < Config::kExtras; ++i) largest = fmaxf(largest, fabsf(raw.extra[i]));
  return __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest));
}

// One unit as the products take it, from four rows of a column.
template <class Config>
__device__ __forceinline__ void make_unit(const typename Config::Raw (&v)[4], float scale,
                                          uint32_t (&unit)[Config::kUnitRegisters]) {
  if constexpr (Config::kScaled) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t parts[Config::kParts];
      round_pair(v[2 * pair] * scale, v[2 * pair + 1] * scale, parts);
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) unit[2 * part + pair] = parts[part];
    }
  } else {
    unit[0] = pack(v[0], v[1]);
    unit[1] = pack(v[2], v[3]);
  }
}

template <class Config>
__device__ __forceinline__ void store_unit(unsigned char* at,
                                           const uint32_t (&unit)[Config::kUnitRegisters]) {
  if constexpr (Config::kUnitRegisters == 4) {
    *reinterpret_cast<uint4*>(at) = make_uint4(unit[0], unit[1], unit[2], unit[3]);
  } else {
    *reinterpret_cast<uint2*>(at) = make_uint2(unit[0], unit[1]);
  }
}

template <class Config>
__device__ __forceinline__ void load_unit(const unsigned char* at,
                                          uint32_t (&unit)[Config::kUnitRegisters]) {
  if constexpr (Config::kUnitRegisters == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(at);
    unit[0] = v.x, unit[1] = v.y, unit[2] = v.z, unit[3] = v.w;
  } else {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    unit[0] = v.x, unit[1] = v.y;
  }
}

// float32 rows 2i and 2i + 1 of a unit in one column (i is the lane's), into the unit at `at`.
template <class Config>
__device__ __forceinline__ void store_row_pair(unsigned char* at, int i, float first, float second,
                                               float scale) {
  uint32_t parts[Config::kParts];
  round_pair(first * scale, second * scale, parts);
#pragma unroll
  for (int part = 0; part < Config::kParts; ++part) {
    reinterpret_cast<uint32_t*>(at)[2 * part + i] = parts[part];
  }
}

// A loaded plane, scaled and rounded where it is float32, into the warp's buffer.
template <class Config>
__device__ __forceinline__ void stage_plane(const RawPlane<Config>& raw, float scale, int lane,
                                            unsigned char* buffer) {
  using Raw = typename Config::Raw;
  if constexpr (Config::kPaired) {
    const int column = lane / 2 * 2;
    if (Config::kColumns < 32 && column + 1 >= Config::kColumns) return;
#pragma unroll
    for (int u = 0; u < Config::kUnits; ++u) {
      unsigned char* const at =
          buffer + window_unit(4 * u, column, Config::kColumns) * Config::kUnitBytes;
      const auto first = raw.pair[2 * u], second = raw.pair[2 * u + 1];
      if constexpr (!Config::kScaled) {
        uint32_t* const word = reinterpret_cast<uint32_t*>(at) + lane % 2;
        word[0] = __byte_perm(first, second, 0x5410);
        word[Config::kUnitRegisters] = __byte_perm(first, second, 0x7632);
      } else {
        store_row_pair<Config>(at, lane % 2, first.x, second.x, scale);
        store_row_pair<Config>(at + Config::kUnitBytes, lane % 2, first.y, second.y, scale);
      }
    }
    return;
  }
  if (Config::kColumns >= 32 || lane < Config::kColumns) {
#pragma unroll
    for (int u = 0; u < (Config::kPaired ? 0 : Config::kUnits); ++u) {
      Raw v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = 4 * u + i < Config::kRows ? raw.row[4 * u + i] : Raw(0);
      uint32_t unit[Config::kUnitRegisters];
      make_unit<Config>(v, scale, unit);
      store_unit<Config>(buffer + window_unit(4 * u, lane, Config::kColumns) * Config::kUnitBytes,
                         unit);
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kExtras; ++i) {
    const int e = lane + 32 * i, row = e / Config::kExtraDivisor;
    const int column = 32 + e % Config::kExtraDivisor;
    if (row >= Config::kRows) continue;
    const Raw v[4] = {raw.extra[i], Raw(0), Raw(0), Raw(0)};
    uint32_t unit[Config::kUnitRegisters];
    make_unit<Config>(v, scale, unit);
    unsigned char* at = buffer + window_unit(row, column, Config::kColumns) * Config::kUnitBytes;
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      reinterpret_cast<uint16_t*>(at)[4 * part + row % 4] = static_cast<uint16_t>(unit[2 * part]);
    }
  }
}

}  // namespace window

}  // namespace convnormpool
