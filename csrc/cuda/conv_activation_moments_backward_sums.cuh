// The sums over blocks of the fused gradients of filter and bias, in one launch.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

// out[k, i] = the sum of `count` partial results of partial (tiles, count, 16, length), where tile
// and row are those of channel k. A block sums `elements` of them, a power of two.
struct BackwardSum {
  const float* partial;
  void* out;
  int32_t count, length, elements;
  uint32_t blocks;
};

constexpr int kBackwardSumThreads = 512;

// Few results are shared out more finely, so that each thread has few partial ones.
inline BackwardSum backward_sum(const float* partial, int64_t count, int64_t K, int64_t length,
                                void* out) {
  const int64_t elements = K * length < kBackwardSumThreads ? 4 : 32;
  return {partial,
          out,
          static_cast<int32_t>(count),
          static_cast<int32_t>(length),
          static_cast<int32_t>(elements),
          static_cast<uint32_t>((K * length + elements - 1) / elements)};
}

// Sums in double and always in the same order. Launch with first.blocks + second.blocks blocks of
// kBackwardSumThreads threads; a sum of no blocks is none.
template <class Element>
__global__ void sum_backward_kernel(const BackwardSum first, const BackwardSum second, int32_t K) {
  __shared__ double sums[kBackwardSumThreads];
  grid_dependency_launch();
  grid_dependency_wait();
  const bool is_first = blockIdx.x < first.blocks;
  const BackwardSum of = is_first ? first : second;
  const uint32_t block = is_first ? blockIdx.x : blockIdx.x - first.blocks;
  const int thread = static_cast<int>(threadIdx.x), slices = kBackwardSumThreads / of.elements;
  const int64_t at = static_cast<int64_t>(block) * of.elements + thread % of.elements;
  double sum = 0.0;
  if (at < static_cast<int64_t>(K) * of.length) {
    const int64_t k = at / of.length, stride = int64_t{16} * of.length;
    const float* const from =
        of.partial + (k / 16 * of.count) * stride + k % 16 * of.length + at % of.length;
#pragma unroll 16
    for (int32_t i = thread / of.elements; i < of.count; i += slices) sum += from[i * stride];
  }
  sums[thread] = sum;
  for (int half = slices / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half * of.elements) sums[thread] += sums[thread + half * of.elements];
  }
  if (thread < of.elements && at < static_cast<int64_t>(K) * of.length) {
    static_cast<Element*>(of.out)[at] = narrow(sums[thread], Element{});
  }
}

}  // namespace convnormpool
