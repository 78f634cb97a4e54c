// The windows of the Hopper kernel of the gradients of filter and bias: one thread's part of an
// input plane from shared memory to fragments, and the scale of split and tf32 operands. See
// conv_activation_moments_backward_wgmma_filter_outputs.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_stage.cuh"
#include "cuda/conv_activation_moments_wgmma_round.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaFilterWindows {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;

  WgmmaRing<Config>& ring;

  float acc[2][8 * kT];
  uint32_t a[2][kParts * kC][4];
  int exponent;      // kFloat: x is scaled by 2^exponent
  uint32_t address;  // of this lane's windows, + stage offset + channel * kChannelBytes
  // Bit j: column j of this lane's four is an output, bit 4 + j: it would be in another row.
  uint32_t live;

  explicit __device__ __forceinline__ WgmmaFilterWindows(WgmmaRing<Config>& r) : ring(r) {}

  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % 32; }
  static __device__ __forceinline__ uint32_t shared() {
    return shared_address(dynamic_shared_memory());
  }

  // A channel's window of the plane that the ring has reached.
  __device__ __forceinline__ void load_window(int ci, uint32_t (&window)[Config::kWindowWords]) {
    const bool tap = Config::kR == 4 || lane() % 4 < Config::kR;
    uint32_t at = address + ring.offset() + uint32_t(ci * Config::kChannelBytes);
    if (!tap) at = shared() + uint32_t(Config::kZeroOffset);
    wgmma_load_window<Config>(window, at);
  }

  // The fragments of a channel from four words that hold x[0 .. 7]: tile t has the pairs that begin
  // at 2 t .. 2 t + 3. Where the filter has no kw the pair's half is zero.
  __device__ __forceinline__ void pairs(int step, const uint32_t (&words)[4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 2 * tile + i;
        uint32_t pair = words[at / 2];
        if (at % 2 == 1) pair = __byte_perm(words[at / 2], words[at / 2 + 1], 0x5432);
        const int taps = kS - i / 2 * 2;
        a[tile][step][i] = taps >= 2 ? pair : taps == 1 ? pair & 0xFFFFu : 0u;
      }
    }
  }

  // kFloat: the eight floats of each window of the ring's plane become fragments, scaled by
  // 2^exponent. Returns the largest magnitude as the bits of a half.
  __device__ __forceinline__ int round_window() {
    const float scale = wgmma_power_of_two(exponent);
    __half2 largest = __floats2half2_rn(0.f, 0.f);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t window[Config::kWindowWords], high[4], low[4];
      load_window(ci, window);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x0 = __uint_as_float(window[2 * i]) * scale;
        const float x1 = i == 3 ? 0.f : __uint_as_float(window[2 * i + 1]) * scale;
        wgmma_operands<Config>(x0, x1, high[i], low[i], i < 3);
        __half2 pair;
        memcpy(&pair, &high[i], 4);
        largest = __hmax2(largest, __habs2(pair));
      }
      pairs(ci, high);
      if constexpr (Config::kSplit) pairs(kC + ci, low);
    }
    return max(int(__half_as_ushort(__low2half(largest))),
               int(__half_as_ushort(__high2half(largest))));
  }

  // The largest magnitude in the windows of the four lanes that share rows of A.
  __device__ __forceinline__ float largest_input() {
    float largest = 0.f;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t window[Config::kWindowWords];
      load_window(ci, window);
#pragma unroll
      for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[i])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // kFloat: the fragments of the ring's plane, scaled as WgmmaSweep does it. Returns the
  // largest magnitude, rounded.
  __device__ __forceinline__ float scale_window(bool first) {
    if (first) {
      const float largest = largest_input();
      exponent = min(139 - wgmma_exponent_field(__float_as_uint(largest)), 126);
      round_window();
      return largest;
    }
    constexpr int kOne = 0x3C00, kMost = 0x7800;  // 1 and 2^15 as halves
    const int largest = round_window();
    const bool small = (__ballot_sync(~0u, largest >= kOne) >> (lane() & 28) & 15u) == 0;
    // Lanes without outputs may see nothing but zeros.
    const bool unfit = largest >= kMost || (small && live != 0);
    if (__builtin_expect(__any_sync(~0u, unfit) != 0, 0)) return follow();
    return __half2float(__ushort_as_half(uint16_t(largest))) * wgmma_power_of_two(-exponent);
  }

  // Chooses the scale anew where the plane needs it. Up it goes by no more than 2^24 a plane: sums
  // of a plane that much larger leave the accumulators before they could overflow.
  __device__ __forceinline__ float follow() {
    const float largest = largest_input();
    const int field =
        largest == 0.f ? 127 - exponent : wgmma_exponent_field(__float_as_uint(largest));
    const bool unfit = uint32_t(field - 127 + exponent) > 14u;
    const int next = unfit ? min(min(139 - field, 126), exponent + 24) : exponent;
    const int change = next - exponent;
    if (__any_sync(~0u, unfit)) {
      wgmma_follow_scale(acc, change);
      exponent = next;
    }
    round_window();
    return largest;
  }
};

}  // namespace convnormpool
