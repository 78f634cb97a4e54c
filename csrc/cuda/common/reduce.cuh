// Reductions across the lanes of a warp: all warp shuffles of the project.
//
// `lanes` is a power of two up to 32: neighbouring lanes that work on one thing. Every lane of the
// warp takes part in every call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/moments.cuh"

namespace convnormpool {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpThreads = 32;

// The sum over the group, the same bits in each of its lanes.
template <typename S>
__device__ __forceinline__ S lanes_sum(S x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullWarp, x, offset);
  }
  return x;
}

// The sum over lanes that differ by multiples of `stride`, the same bits in each of them.
template <typename S>
__device__ __forceinline__ S strided_lanes_sum(S x, int stride) {
  for (int offset = kWarpThreads / 2; offset >= stride; offset /= 2) {
    x += __shfl_xor_sync(kFullWarp, x, offset);
  }
  return x;
}

// The largest over the group, in each of its lanes.
__device__ __forceinline__ uint32_t lanes_max(uint32_t x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(kFullWarp, x, offset));
  }
  return x;
}

// x of the group's first lane.
template <typename S>
__device__ __forceinline__ S lanes_first(S x, int lanes) {
  return __shfl_sync(kFullWarp, x, 0, lanes);
}

// x of the lane before in the group, zero in its first lane.
__device__ __forceinline__ float previous_lane(float x, int lanes) {
  const float before = __shfl_up_sync(kFullWarp, x, 1, lanes);
  return threadIdx.x % static_cast<unsigned>(lanes) == 0 ? 0.0f : before;
}

// The group's joint moments in its first lane, about that lane's pivot.
template <typename S>
__device__ __forceinline__ void lanes_join(Moments<S>& moments, int lanes) {
  const S pivot = __shfl_sync(kFullWarp, moments.pivot, 0, lanes);
  moments.mean = moments.mean_about(pivot);
  moments.pivot = pivot;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const S count = __shfl_down_sync(kFullWarp, moments.count, offset, lanes);
    const S mean = __shfl_down_sync(kFullWarp, moments.mean, offset, lanes);
    const S m2 = __shfl_down_sync(kFullWarp, moments.m2, offset, lanes);
    join(moments.mean, moments.m2, mean, m2, ChanWeights<S>(moments.count, count));
    moments.count += count;
  }
}

}  // namespace convnormpool
