// An input plane's way to the products of the portable window kernel
// (conv_activation_moments_window.cuh): staged, or straight from the ring it was loaded into.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/conv_activation_moments_window_loads.cuh"
#include "cuda/conv_activation_moments_window_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace convnormpool {

namespace window {

// One unit as the products take it, from four rows of a column. `largest` as in round_pair.
template <class Config>
__device__ __forceinline__ void make_unit(const typename Config::Raw (&v)[4], float scale,
                                          uint32_t (&unit)[Config::kUnitRegisters],
                                          __half2& largest) {
  if constexpr (Config::kScaled) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t parts[Config::kParts];
      round_pair(v[2 * pair] * scale, v[2 * pair + 1] * scale, parts, largest);
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

// The power of two for a plane whose largest magnitude is given: 2^12 at first, and left as it is
// until a plane would pass 2^15.
__device__ __forceinline__ int plane_exponent(uint32_t largest, bool first, int exponent) {
  const int field = exponent_field(largest);
  return first || field - 127 + exponent > 14 ? min(139 - field, 127) : exponent;
}

// While a plane is multiplied the next one is staged: scaled, rounded and put into the units that
// the products read. Those after it are on their way, into the ring or, one, into registers.
template <class Config>
struct StagedPlanes : LoadedPlanes<Config> {
  using Base = LoadedPlanes<Config>;
  using Raw = typename Config::Raw;
  using Base::lane, Base::shared, Base::raw, Base::slot;

  const unsigned char* column;  // the lane's, of the plane that is multiplied
  int exponent;                 // by which the plane staged last is scaled
  int target;                   // the bytes before the buffer that is staged next
  __half2 largest;              // magnitudes of what is staged, as in round_pair

  // Stages the first plane.
  __device__ __forceinline__ StagedPlanes(const WindowParameters& parameters,
                                          const WindowCursor& first, int lane_index,
                                          unsigned char* memory)
      : Base(parameters, first, lane_index, memory), exponent(0), target(0) {
    if constexpr (Config::kRing) {
      for (uint32_t i = 0; i < Config::kRingPlanes; ++i) this->template load<false>(i);
      cp_async_wait<Config::kRingPlanes - 1>();
      __syncwarp();
    } else {
      this->template load<false>(0);
    }
    choose_exponent(true);
    stage();
    finish_preparing();
    if constexpr (!Config::kRing) this->template load<false>(0);
  }

  // Four rows of the lane's column of the plane that is staged next.
  __device__ __forceinline__ void rows(int u, Raw (&v)[4]) const {
    const unsigned char* const from = this->in_ring(slot) + lane * sizeof(Raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * u + i;
      if (row >= Config::kRows) {
        v[i] = Raw(0);
      } else if constexpr (Config::kRing) {
        v[i] = *reinterpret_cast<const Raw*>(from + row * Config::kRowBytes);
      } else {
        v[i] = raw.row[row];
      }
    }
  }

  // Of the plane that is staged next, which begins a piece or not.
  __device__ __forceinline__ void choose_exponent(bool first) {
    if constexpr (Config::kScaled) {
      float most = 0.0f;  // NaN counts as nothing
#pragma unroll
      for (int u = 0; u < Config::kUnits; ++u) {
        Raw v[4];
        rows(u, v);
#pragma unroll
        for (const float x : v) most = fmaxf(most, fabsf(x));
      }
#pragma unroll
      for (int i = 0; i < Config::kExtras; ++i) most = fmaxf(most, fabsf(raw.extra[i]));
      const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most));
      exponent = plane_exponent(bits, first, exponent);
    }
  }

  // On to the plane that was staged last. `last` of its piece: the next one begins another.
  template <bool Inside>
  __device__ __forceinline__ void begin(bool last) {
    // All lanes have staged this plane and are done with the one before.
    if constexpr (Config::kRing) {
      this->template turn_ring<Inside>();
    } else {
      __syncwarp();
    }
    column = shared + (Config::kPlaneBytes - target) + (lane / 4 + lane % 4) * Config::kUnitBytes;
    if (last) choose_exponent(true);
    if constexpr (!Config::kRing) {
      stage();
      finish_preparing();
      this->template load<false>(0);
    }
  }

  __device__ __forceinline__ void operand(int u, int group, int tile,
                                          uint32_t (&b)[Config::kUnitRegisters]) const {
    const int unit = window_unit(4 * u, 8 * tile + 4 * group, Config::kColumns);
    load_unit<Config>(column + unit * Config::kUnitBytes, b);
  }

  __device__ __forceinline__ unsigned char* unit_at(int row, int column_index) const {
    return shared + target + window_unit(row, column_index, Config::kColumns) * Config::kUnitBytes;
  }

  __device__ __forceinline__ void stage(int u) {
    const float scale = Config::kScaled ? power_of_two(exponent) : 1.0f;
    if (u == 0) largest = __floats2half2_rn(0.0f, 0.0f);
    if (Config::kRing || Config::kColumns >= 32 || lane < Config::kColumns) {
      Raw v[4];
      rows(u, v);
      uint32_t unit[Config::kUnitRegisters];
      make_unit<Config>(v, scale, unit, largest);
      store_unit<Config>(unit_at(4 * u, lane), unit);
    }
    if (u < Config::kUnits - 1) return;
#pragma unroll
    for (int i = 0; i < Config::kExtras; ++i) {
      const int e = lane + 32 * i, row = e / Config::kExtraDivisor;
      if (row >= Config::kRows) continue;
      const Raw v[4] = {raw.extra[i], Raw(0), Raw(0), Raw(0)};
      uint32_t unit[Config::kUnitRegisters];
      make_unit<Config>(v, scale, unit, largest);
      uint16_t* const at =
          reinterpret_cast<uint16_t*>(unit_at(row, 32 + e % Config::kExtraDivisor)) + row % 4;
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        at[4 * part] = static_cast<uint16_t>(unit[2 * part]);
      }
    }
  }

  __device__ __forceinline__ void stage() {
#pragma unroll
    for (int u = 0; u < Config::kUnits; ++u) stage(u);
  }

  // With a ring, beside the products of the first half: one unit of the next plane.
  __device__ __forceinline__ void prepare(int u) {
    if constexpr (Config::kRing) stage(u);
  }
  __device__ __forceinline__ void prepared() {
    if constexpr (Config::kRing) finish_preparing();
  }

  // Stages the plane once more where it does not fit the scale.
  __device__ __forceinline__ void finish_preparing() {
    if constexpr (Config::kScaled) {
      // 2^15 has the bits 0x7800 in fp16.
      const uint32_t reached = (pack(largest) + 0x08000800u) & 0x80008000u;
      if (__any_sync(0xFFFFFFFFu, reached != 0)) {
        choose_exponent(false);
        stage();
      }
    }
    target = Config::kPlaneBytes - target;
    ++slot;
  }
};

// 16-bit operands straight from the ring: eight columns from 4 (lane / 4) on of row lane % 4 of
// each channel.
template <class Config>
struct DirectPlanes : LoadedPlanes<Config> {
  using Base = LoadedPlanes<Config>;
  using Base::lane, Base::shared, Base::slot;

  static constexpr int exponent = 0;
  int later;  // the bytes of two columns, of which the compiler knows nothing

  __device__ __forceinline__ DirectPlanes(const WindowParameters& parameters,
                                          const WindowCursor& first, int lane_index,
                                          unsigned char* memory)
      : Base(parameters, first, lane_index, memory) {
    for (uint32_t i = 0; i < Config::kRingPlanes - 1; ++i) this->template load<false>(i);
    slot = Config::kRingPlanes - 1;
    // By way of the slot that is not loaded yet.
    int* const pass = reinterpret_cast<int*>(this->in_ring(slot)) + lane;
    *pass = 4;
    __syncwarp();
    later = *pass;
    __syncwarp();
  }

  template <bool Inside>
  __device__ __forceinline__ void begin(bool) {
    ++slot;
    this->template turn_ring<Inside>();
  }

  __device__ __forceinline__ void operand(int u, int, int tile, uint32_t (&b)[2]) const {
    // Loaded anew for tile 2, whose registers stand in another order than those of tile 0: moves
    // would cost more.
    const unsigned char* const window = this->in_ring(slot) +
                                        (4 * u + lane % 4) * Config::kRowBytes + lane / 4 * 8 +
                                        (tile < 2 ? 0 : later);
    const uint32_t* const w = reinterpret_cast<const uint32_t*>(window);
    uint32_t w0, w1;
    if (tile < 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(w);
      w0 = pair.x, w1 = pair.y;
    } else {
      w0 = w[0], w1 = w[1];
    }
    b[0] = tile % 2 == 0 ? w0 : __byte_perm(w0, w1, 0x5432);
    b[1] = tile % 2 == 0 ? w1 : __byte_perm(w1, w[2], 0x5432);
  }

  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void prepared() {}
};

template <class Config>
using Planes = std::conditional_t<Config::kDirect, DirectPlanes<Config>, StagedPlanes<Config>>;

}  // namespace window

}  // namespace convnormpool
