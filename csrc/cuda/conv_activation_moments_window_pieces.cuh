// What the window kernels and the taps kernel make of their outputs: a piece's moments, and how a
// sample's are merged.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/moments.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_merge.cuh"
#include "cuda/conv_activation_moments_window_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace convnormpool {

namespace window {

// 2^e, infinite or rounded to zero where float ends.
__device__ __forceinline__ float power_of_two_or_limit(int e) {
  const int near = min(max(e, -126), 127);
  return power_of_two(near) * power_of_two(min(max(e - near, -126), 127));
}

template <class Config>
__device__ __forceinline__ float load_bias(const void* bias, int channels, int k) {
  if (bias == nullptr || k >= channels) return 0.0f;
  if constexpr (Config::kOperand == WindowOperand::kFloat16) {
    return __half2float(static_cast<const __half*>(bias)[k]);
  } else if constexpr (Config::kOperand == WindowOperand::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[k]);
  } else {
    return static_cast<const float*>(bias)[k];
  }
}

// A piece's (mean, M2) from a lane's sums about its pivot, joined across the four lanes that share
// a channel.
__device__ __forceinline__ float2 piece_moments(const WindowPiece& piece, int live, float pivot,
                                                float sum, float square) {
  const int count = piece.planes * (((live + 7) >> 3) + ((live + 6) >> 3));
  const float inverse_count = count > 0 ? 1.0f / static_cast<float>(count) : 0.0f;
  const float mean = __fmul_rn(sum, inverse_count);
  const float m2 = fmaf(-mean, sum, square);
  Moments<float> moments{count > 0 ? pivot : 0.0f, static_cast<float>(count), mean,
                         m2 < 0.0f ? 0.0f : m2};
  lanes_join(moments, 4);
  return make_float2(moments.pivot + moments.mean, moments.m2);
}

// The same where the lanes' sums are about one pivot, over `count` values together; in all of them.
__device__ __forceinline__ float2 joint_moments(float count, float pivot, float sum, float square) {
  sum = lanes_sum(sum, 4);
  square = lanes_sum(square, 4);
  const float mean = __fmul_rn(sum, divide_counts(1.0f, count));
  const float m2 = fmaf(-mean, sum, square);
  return make_float2(pivot + mean, m2 < 0.0f ? 0.0f : m2);
}

}  // namespace window

// The pieces of all samples as merge_pieces_kernel takes them (conv_activation_moments_merge.cuh).
// 16 threads merge a channel: each takes every 16th piece, and a fixed tree joins what they have.
struct WindowPieces {
  static constexpr int kChannels = 16, kLanes = 16;  // lanes of a channel
  static constexpr int kThreads = kChannels * kLanes;
  static constexpr int kScratch = 3 * kThreads;
  static constexpr int kLeastUnits = 1, kMostRounds = 1;

  WindowGeometry geometry;
  const float2* partial;  // (N, pieces, K)
  int32_t N;

  CONVNORMPOOL_HOST_DEVICE int64_t samples() const { return N; }
  CONVNORMPOOL_HOST_DEVICE int channels() const { return geometry.K; }

  __device__ __forceinline__ float2 merge(int64_t sample, int k, int thread,
                                          double* scratch) const {
    // (kLanes, kChannels) each
    double* const counts = scratch + thread;
    double *const firsts = counts + kThreads, *const seconds = firsts + kThreads;
    const int32_t pieces = window_pieces(geometry);
    const float2* const p = partial + sample * pieces * geometry.K + k;
    const double pivot = p[0].x;
    double count = 0.0, first = 0.0, second = 0.0;
    const auto add = [&](int32_t i, const float2& moments) {
      const WindowPiece piece = window_piece(geometry, i);
      const double n = static_cast<double>(piece.planes) * piece.columns;
      const double d = moments.x - pivot;
      count += n;
      first = fma(n, d, first);
      second += fma(n * d, d, static_cast<double>(moments.y));
    };
    for_pieces<4>(p, geometry.K, thread / kChannels, kLanes, pieces, add);
    *counts = count, *firsts = first, *seconds = second;
    for (int span = kThreads / 2; span >= kChannels; span /= 2) {
      __syncthreads();
      if (thread < span) {
        *counts += counts[span];
        *firsts += firsts[span];
        *seconds += seconds[span];
      }
    }
    const double difference = *firsts / *counts;
    const double sum = fma(-difference, *firsts, *seconds);
    return make_float2(static_cast<float>(pivot + difference),
                       static_cast<float>(sum < 0.0 ? 0.0 : sum));
  }
};

}  // namespace convnormpool
