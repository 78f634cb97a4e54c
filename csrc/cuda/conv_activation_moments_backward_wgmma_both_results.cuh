// How a warpgroup of the Hopper kernels of both gradients, or of the filter's alone, adds its sums
// to its results in memory. Each result is written, and added to, by one thread.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

// Adds sums [kh / 2][ci] of (kd, k) x (kw, kh % 2), times 2^exponent, to `filter` (16, C T R S) or,
// if kClear, writes zeros. `thread` counts within the warpgroup.
template <class Config, bool kClear>
__device__ __forceinline__ void wgmma_both_add_filter(float* filter,
                                                      const float (&sums)[8 * Config::kC],
                                                      uint32_t thread, int exponent) {
  constexpr int kC = Config::kC, kT = Config::kT, kR = Config::kR, kS = Config::kS;
  constexpr int kTaps = Config::kTaps;
  const uint32_t lane = thread % 32, kw = lane % 4, kd = thread / 32;
  float* const to = filter + lane / 4 * kTaps + kd * (kR * kS) + kw;
  // Two factors: the products' exponent may pass that of any float.
  const int near = min(max(exponent, -126), 127);
  const float first = wgmma_power_of_two(near);
  const float second = wgmma_power_of_two_or_limit(exponent - near);
  // By halves, whose loads are under way together.
#pragma unroll
  for (int half = 0; half < 2 && kd < kT && kw < kS; ++half) {
    float before[4 * kC];
    const auto place = [&](int i) {
      const int kh = half * 2 + i % 2;
      return to + i % 4 / 2 * 8 * kTaps + (i / 4 * kT * kR + kh) * kS;
    };
    const auto exists = [&](int i) { return half * 2 + i % 2 < kR; };
#pragma unroll
    for (int i = 0; i < 4 * kC; ++i) before[i] = kClear || !exists(i) ? 0.f : *place(i);
#pragma unroll
    for (int i = 0; i < 4 * kC; ++i) {
      const float sum = sums[half * 4 * kC + i] * first * second;
      if (exists(i)) *place(i) = kClear ? 0.f : before[i] + sum;
    }
  }
}

// The same of `bias` (warps, 16), from sums of channels 8 (i / 2) + 2 (lane % 4) + i % 2.
template <bool kClear>
__device__ __forceinline__ void wgmma_both_add_bias(float* bias, const float (&sums)[4],
                                                    uint32_t thread, int exponent) {
  const uint32_t lane = thread % 32;
  float* const first = bias + thread / 32 * 16 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = kClear ? 0.f : sums[i] * wgmma_power_of_two_or_limit(exponent);
#pragma unroll
    for (int step = 4; step < 32 && !kClear; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    float* const to = first + i / 2 * 8 + i % 2;
    if (lane < 4) *to = kClear ? 0.f : *to + sum;
  }
}

}  // namespace convnormpool
