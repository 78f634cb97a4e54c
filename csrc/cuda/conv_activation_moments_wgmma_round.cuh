// What the windows of all Hopper kernels have in common: a lane holds of each channel x[0 .. 7], of
// which seven count. Their loads, the rounding of float32 ones to halves, and their scale.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

// x[0 .. 7] of a channel from shared memory, aligned to half their size.
template <class Config>
__device__ __forceinline__ void wgmma_load_window(uint32_t (&window)[Config::kWindowWords],
                                                  uint32_t at) {
  if constexpr (Config::kFloat) {
    uint32_t low[4], high[4];
    load_shared(low, at);
    load_shared(high, at + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) window[i] = low[i], window[i + 4] = high[i];
  } else {
    uint32_t low[2], high[2];
    load_shared(low, at);
    load_shared(high, at + 8);
    window[0] = low[0], window[1] = low[1];
    window[2] = high[0], window[3] = high[1];
  }
}

// The accumulators of both tiles follow a scale that goes up by 2^change.
template <int kCount>
__device__ __forceinline__ void wgmma_follow_scale(float (&acc)[2][kCount], int change) {
  const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scale_accumulator(acc[0][i], factor);
    scale_accumulator(acc[1][i], factor);
  }
}

// What the outputs of a lane's channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of sixteen are multiplied by
// where x is scaled by 2^exponent: t = lane % 4.
template <class Config>
__device__ __forceinline__ void wgmma_unscale(float (&unscale)[4], int exponent, int lane) {
  const int* const exponents =
      reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unscale[i] =
        wgmma_power_of_two_or_limit(-(exponent + exponents[i / 2 * 8 + lane % 4 * 2 + i % 2]));
  }
}

// The floats, scaled by 2^exponent, become four words of halves and, when split, four more of low
// halves. Returns the largest magnitude as the bits of a half.
template <class Config>
__device__ __forceinline__ int wgmma_round_windows(
    uint32_t (&window)[Config::kC][Config::kWindowWords], int exponent) {
  const float scale = wgmma_power_of_two(exponent);
  __half2 largest = __floats2half2_rn(0.f, 0.f);
#pragma unroll
  for (int ci = 0; ci < Config::kC; ++ci) {
    uint32_t (&words)[Config::kWindowWords] = window[ci];
    uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x0 = __uint_as_float(words[2 * i]) * scale;
      const float x1 = i == 3 ? 0.f : __uint_as_float(words[2 * i + 1]) * scale;
      const __half2 high = __floats2half2_rn(x0, x1);
      largest = __hmax2(largest, __habs2(high));
      memcpy(&words[i], &high, 4);
      if constexpr (Config::kSplit) {
        const float2 back = __half22float2(high);
        const __half2 rest = __floats2half2_rn(x0 - back.x, i == 3 ? 0.f : x1 - back.y);
        memcpy(&low[i], &rest, 4);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 && Config::kSplit; ++i) words[4 + i] = low[i];
  }
  return max(int(__half_as_ushort(__low2half(largest))),
             int(__half_as_ushort(__high2half(largest))));
}

// The largest magnitude in the windows of the four lanes that share rows of A.
template <class Config>
__device__ __forceinline__ float wgmma_largest_input(
    const uint32_t (&window)[Config::kC][Config::kWindowWords]) {
  float largest = 0.f;
#pragma unroll
  for (int ci = 0; ci < Config::kC; ++ci) {
#pragma unroll
    for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[ci][i])));
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

}  // namespace convnormpool
