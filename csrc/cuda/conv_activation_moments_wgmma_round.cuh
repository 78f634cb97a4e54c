// float32 windows as the Hopper kernels of the outputs hold them, for each channel the eight floats
// x[0 .. 7] of which seven count: rounded to halves, and the largest of them.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

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
