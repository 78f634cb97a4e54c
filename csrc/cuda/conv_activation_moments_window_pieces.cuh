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
// Eight lanes merge a channel: each takes every eighth piece, and a fixed tree joins what they
// have.
struct WindowPieces {
  WindowGeometry geometry;
  const float2* partial;  // (N, pieces, K)
  int32_t N;

  CONVNORMPOOL_HOST_DEVICE int64_t samples() const { return N; }
  CONVNORMPOOL_HOST_DEVICE int channels() const { return geometry.K; }

  // What a lane merges: its first piece, and where that is; the pivot is the sample's first mean.
  struct Share {
    const float2 *pivot, *from;
    WindowCursor cursor;
    int32_t begin;
  };
  __device__ __forceinline__ Share share(int64_t sample, int k, int lane) const {
    const int32_t begin = lane / kMergeChannels;
    const float2* const first = partial + sample * window_pieces(geometry) * geometry.K + k;
    return {first, first + begin * geometry.K, window_cursor(geometry, begin), begin};
  }

  __device__ __forceinline__ float2 merge(const Share& of) const {
    const int32_t pieces = window_pieces(geometry);
    const double pivot = of.pivot->x;
    const float2* at = of.from;
    WindowCursor cursor = of.cursor;
    const WindowCursor distance = window_cursor(geometry, kMergeLanes);
    double count = 0.0, first = 0.0, second = 0.0;
#pragma unroll 1
    for (int32_t piece = of.begin; piece < pieces; piece += kMergeAtOnce * kMergeLanes) {
      float2 loaded[kMergeAtOnce];
#pragma unroll
      for (int j = 0; j < kMergeAtOnce; ++j) {
        loaded[j] = piece + j * kMergeLanes < pieces ? *at : make_float2(0.f, 0.f);
        at += kMergeLanes * geometry.K;
      }
#pragma unroll
      for (int j = 0; j < kMergeAtOnce; ++j) {
        const WindowPiece is = window_piece(geometry, cursor);
        cursor.advance(geometry, distance);
        const double n =
            piece + j * kMergeLanes < pieces ? static_cast<double>(is.planes * is.columns) : 0.0;
        const double d = loaded[j].x - pivot;
        count += n;
        first = fma(n, d, first);
        second += fma(n * d, d, static_cast<double>(loaded[j].y));
      }
    }
    count = strided_lanes_sum(count, kMergeChannels);
    first = strided_lanes_sum(first, kMergeChannels);
    second = strided_lanes_sum(second, kMergeChannels);
    const double difference = first / count;
    const double sum = fma(-difference, first, second);
    return make_float2(static_cast<float>(pivot + difference),
                       static_cast<float>(sum < 0.0 ? 0.0 : sum));
  }
};

}  // namespace convnormpool
