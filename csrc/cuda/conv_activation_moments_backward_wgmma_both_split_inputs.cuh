// The weights and the planes of x in the Hopper kernel of all gradients with split operands. See
// conv_activation_moments_backward_wgmma_both_split.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

// Writes the B operands from weights that are stored, and their exponents; zeros where there is no
// tap.
template <class Config>
__device__ __forceinline__ void wgmma_both_split_operands(unsigned char* shared) {
  constexpr int kC = Config::kC, kT = Config::kT, kR = Config::kR, kS = Config::kS;
  constexpr int kPairs = kC * kT * 8 * 16, kTurnedPairs = kS * Config::kN * 8;
  const int* const exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
  const auto tap_of = [](int ci, int kd, int kh, int kw) {
    return ((ci * kT + kd) * kR + kh) * kS + kw;
  };
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kPairs; i += Config::kThreads) {
    const int k = i % 16, depth = i / 16 % 8 * 2, kd = i / 128 % kT, ci = i / (128 * kT);
    const int kh = depth / 8 * 2, kw = depth % 8 / 2;
    const float scale = wgmma_power_of_two(exponents[k]);
    const float* const of = WgmmaWeights<Config>::channel(shared, k);
    float w[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      w[j] = kh + j < kR && kw < kS ? of[tap_of(ci, kd, kh + j, kw)] * scale : 0.f;
    }
    unsigned char* const to = shared + Config::kWeightOffset + ci * Config::kStepBytes +
                              depth / 8 * Config::kDepthBytes + kd * 256 + k / 8 * 128 +
                              k % 8 * 16 + depth % 8 * 2;
    wgmma_store_weights<Config>(to, w[0], w[1], kC * Config::kStepBytes);
  }
  const float scale = wgmma_power_of_two(exponents[16]);
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kTurnedPairs; i += Config::kThreads) {
    const int k = i % 8 * 2, n = i / 8 % Config::kN, kw = i / (8 * Config::kN);
    const int column = n / 8 * 2 + n % 2, kd = column / kC, ci = column % kC, kh = n % 8 / 2;
    float w[2] = {0.f, 0.f};
    if (kd < kT && kh < kR) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        w[j] = WgmmaWeights<Config>::channel(shared, k + j)[tap_of(ci, kd, kh, kw)] * scale;
      }
    }
    unsigned char* const to = shared + Config::kTurnedOffset +
                              kw * Config::kParts * Config::kTapBytes +
                              k / 8 * (Config::kTapBytes / 2) + n * 16 + k % 8 * 2;
    wgmma_store_weights<Config>(to, w[0], w[1], Config::kTapBytes);
  }
}

// One thread's part in the way of x from the ring's stages to operands: of a plane a warp takes
// four rows, those of its warpgroup, in one channel, and a lane seven columns of one of them.
//
// A plane has one exponent for all. The largest magnitude comes to 2^12 at first; the exponent
// stays until a plane would pass 2^15 or stay below 2^6. Up it goes by no more than 24 a plane:
// sums of y with a plane that much larger are complete before they could overflow.
template <class Config>
struct WgmmaBothSplitInputs {
  static constexpr int kC = Config::kC;
  static constexpr int kMostStep = 24;

  WgmmaInputRing<Config>& ring;
  const int tile;

  uint32_t window[8];  // of the plane that was loaded last
  int channel = 0;     // and its channel, none of x's from kC on
  int exponent = 0;    // of the plane that was stored last
  int calm = 0;        // planes since it changed
  uint32_t stages;     // this lane's row of a channel in stage 0
  // This lane's row of four matrices in slot 0, with the pair of rows that begins with an even one
  // and with the other. Rows and columns that are not in it repeat one that is.
  uint32_t even_to, odd_to;

  __device__ __forceinline__ WgmmaBothSplitInputs(WgmmaInputRing<Config>& r, int t)
      : ring(r), tile(t) {
    const int lane = int(threadIdx.x) % 32;
    const int from = min(4 * tile + lane % 4, 4 + Config::kR - 2);
    stages = ring.stage_address(0) + uint32_t(from * Config::kPitch) +
             uint32_t(wgmma_block<Config>(lane / 4) * 4 * Config::kElementBytes);
    const int row = min(4 * tile + lane % 8 / 2, 6), column = min(lane / 8 * 2 + lane % 2, 6);
    const int even = row / 2 * Config::kPairBytes + row % 2 * 16;
    const int odd = (row - 1) / 2 * Config::kPairBytes + Config::kSpanBytes + (row - 1) % 2 * 16;
    const uint32_t to =
        ring.base() + uint32_t(Config::kPlaneOffset + column * Config::kColumnBytes);
    even_to = to + uint32_t(row == 6 ? odd : even);
    odd_to = to + uint32_t(row == 0 ? even : odd);
  }

  static __device__ __forceinline__ int warp() { return int(threadIdx.x) / 32; }
  // Of a plane, two in turn.
  static __device__ __forceinline__ uint32_t* words(uint32_t turn) {
    return reinterpret_cast<uint32_t*>(dynamic_shared_memory() + Config::kWordOffset) + turn * 8;
  }
  static __device__ __forceinline__ int* slot_exponent(int slot) {
    return reinterpret_cast<int*>(dynamic_shared_memory() + Config::kSlotExponentOffset) + slot;
  }

  // Loads this warp's part of the next plane, for which it waits.
  __device__ __forceinline__ void load() {
    ring.next();
    channel = (channel + 1) & 3;
    if (channel < kC) {
      constexpr int kChannelBytes = Config::kPitch * (4 + Config::kR - 1);
      const uint32_t from =
          stages + uint32_t(ring.stage * Config::kStageBytes + channel * kChannelBytes);
      uint32_t low[4], high[4];
      load_shared(low, from);
      load_shared(high, from + 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) window[i] = low[i], window[4 + i] = high[i];
    }
  }

  // Tells its largest magnitude.
  __device__ __forceinline__ void note(uint32_t turn) const {
    uint32_t bits = 0;
    if (channel < kC) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[i])));
      bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    }
    if (threadIdx.x % 32 == 0) words(turn)[warp()] = bits;
    __syncwarp();
  }

  // One of what all warps have told.
  __device__ __forceinline__ uint32_t word(uint32_t turn) const {
    return load_shared(shared_address(words(turn) + threadIdx.x % 8));
  }

  // With that of all lanes, chooses the exponent for the plane, perhaps the first of a quad or
  // item.
  __device__ __forceinline__ void choose_exponent(uint32_t word, bool first_of_quad,
                                                  bool first_of_item) {
    const uint32_t bits = __reduce_max_sync(~0u, word);
    ++calm;
    const int scaled = int(bits >> 23) - 127 + exponent;
    const int lowest = first_of_quad ? 9 : 6;
    if (__builtin_expect(uint32_t(scaled - lowest) >= uint32_t(15 - lowest) || first_of_item, 0)) {
      change_exponent(bits, first_of_quad, first_of_item);
    }
  }
  __device__ __forceinline__ void change_exponent(uint32_t bits, bool first_of_quad,
                                                  bool first_of_item) {
    if (bits == 0 && !first_of_item) return;
    const int most = first_of_quad || first_of_item ? 127 : exponent + kMostStep;
    const int next = min(min(139 - wgmma_exponent_field(bits), 127), most);
    if (next != exponent) calm = 0;
    exponent = next;
  }

  // Stores it, split, in a slot.
  __device__ __forceinline__ void store(int slot) const {
    if (threadIdx.x == 0) *slot_exponent(slot) = exponent;
    __syncwarp();
    if (channel >= kC) return;
    const float scale = wgmma_power_of_two(exponent);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x0 = __uint_as_float(window[2 * i]) * scale;
      const float x1 = i == 3 ? x0 : __uint_as_float(window[2 * i + 1]) * scale;
      const __half2 pair = __floats2half2_rn(x0, x1);
      const float2 back = __half22float2(pair);
      const float rest0 = x0 - back.x, rest1 = i == 3 ? rest0 : x1 - back.y;
      const __half2 rest = __floats2half2_rn(rest0, rest1);
      memcpy(&high[i], &pair, 4);
      memcpy(&low[i], &rest, 4);
    }
    const uint32_t at = uint32_t(slot * Config::kSlotBytes + channel * Config::kSpanStep);
    stmatrix_x4_trans(even_to + at, high);
    stmatrix_x4_trans(odd_to + at, high);
    stmatrix_x4_trans(even_to + at + uint32_t(Config::kPlaneBytes), low);
    stmatrix_x4_trans(odd_to + at + uint32_t(Config::kPlaneBytes), low);
  }
};

}  // namespace convnormpool
