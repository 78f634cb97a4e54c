// What the window kernels and the taps kernel make of their outputs: a piece's moments, and the
// merge of a sample's pieces.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/moments.cuh"
#include "cuda/common/reduce.cuh"
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

}  // namespace window

constexpr int kMergeChannels = 16, kMergeLanes = 16;  // of a block

// mean and m2 (N, K) from the pieces' moments, in float64: a block for 16 channels of a sample, 16
// threads for each. A thread takes every 16th piece, and a fixed tree joins what they have.
static __global__ void __launch_bounds__(kMergeChannels* kMergeLanes)
    merge_window_kernel(const WindowGeometry geometry, const float2* __restrict__ partial,
                        float* __restrict__ mean, float* __restrict__ m2) {
  __shared__ double counts[kMergeLanes][kMergeChannels];
  __shared__ double firsts[kMergeLanes][kMergeChannels], seconds[kMergeLanes][kMergeChannels];
  const int K = geometry.K, tiles = (K + kMergeChannels - 1) / kMergeChannels;
  const int channel = static_cast<int>(threadIdx.x) % kMergeChannels;
  const int thread = static_cast<int>(threadIdx.x) / kMergeChannels;
  const int64_t sample = blockIdx.x / static_cast<unsigned>(tiles);
  const int k =
      static_cast<int>(blockIdx.x % static_cast<unsigned>(tiles)) * kMergeChannels + channel;
  const int32_t pieces = window_pieces(geometry);
  const float2* const p = partial + sample * pieces * K + min(k, K - 1);
  const double pivot = p[0].x;
  double count = 0.0, first = 0.0, second = 0.0;
  for (int32_t i = thread; i < pieces; i += kMergeLanes) {
    const WindowPiece piece = window_piece(geometry, i);
    const float2 moments = p[static_cast<int64_t>(i) * K];
    const double n = static_cast<double>(piece.planes) * piece.columns;
    const double d = moments.x - pivot;
    count += n;
    first += n * d;
    second += n * d * d + moments.y;
  }
  counts[thread][channel] = count;
  firsts[thread][channel] = first;
  seconds[thread][channel] = second;
  for (int span = kMergeLanes / 2; span > 0; span /= 2) {
    __syncthreads();
    if (thread < span) {
      counts[thread][channel] += counts[thread + span][channel];
      firsts[thread][channel] += firsts[thread + span][channel];
      seconds[thread][channel] += seconds[thread + span][channel];
    }
  }
  if (thread > 0 || k >= K) return;
  const double difference = firsts[0][channel] / counts[0][channel];
  const double sum = seconds[0][channel] - difference * firsts[0][channel];
  mean[sample * K + k] = static_cast<float>(pivot + difference);
  m2[sample * K + k] = static_cast<float>(sum < 0.0 ? 0.0 : sum);
}

}  // namespace convnormpool
