// The kernels of _act_moments_backward_out: element by element, one read of y and one write of dy.
//
// dy may be y itself, so nothing here is __restrict__, and each thread loads what it will store
// before it stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/activation_moments_partition.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/grid.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

constexpr int kBackwardThreads = 256;
// Positions of a channels-first row that one block takes at most.
constexpr int64_t kBackwardPiece = 16384;

// dy = (per_position + 2 * grad_m2 * (a - mean)) * a', with per_position = grad_mean / positions.
template <typename S>
struct RowGradient {
  S mean, per_position, twice_grad_m2;

  template <typename A>
  __device__ __forceinline__ S operator()(const A& a, S x) const {
    return (per_position + twice_grad_m2 * (a.value(x) - mean)) * a.derivative(x);
  }
};

// What the gradient of every row is made of. dy is of y's dtype, or of the statistics type if
// `wide_dy`.
template <typename T>
struct GradientTensors {
  using S = statistics_t<T>;
  const T* y;
  void* dy;
  bool wide_dy;
  const S* mean;
  const S* grad_mean;
  const S* grad_m2;

  S inverse_positions;

  __device__ __forceinline__ RowGradient<S> row(int64_t index) const {
    return {mean[index], grad_mean[index] * inverse_positions, S(2) * grad_m2[index]};
  }

  // kCount neighbours from `index` on, by one access if `vector`.
  template <int kCount>
  __device__ __forceinline__ void store(const S* values, int64_t index, bool vector) const {
    if (wide_dy) {
      store_values<kCount>(values, static_cast<S*>(dy) + index, vector);
    } else {
      T narrowed[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) narrowed[i] = narrow(values[i], T());
      store_values<kCount>(narrowed, static_cast<T*>(dy) + index, vector);
    }
  }

 private:
  template <int kCount, typename U>
  static __device__ __forceinline__ void store_values(const U* values, U* target, bool vector) {
    if (vector) {
      store_vector<kCount>(values, target);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) target[i] = values[i];
    }
  }
};

// kUnroll vectors of kCount neighbours each; offset(u) gives the place of the u-th in y, or -1.
template <int kCount, int kUnroll, typename T, typename Fn, typename Gradient, typename Offset>
__device__ __forceinline__ void backward_batch(const GradientTensors<T>& tensors, bool vector,
                                               const Fn& fn, const Gradient& gradient,
                                               const Offset& offset) {
  using S = statistics_t<T>;
  T raw[kUnroll * kCount] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = offset(u);
    if (at < 0) continue;
    if (vector) {
      load_vector<kCount>(tensors.y + at, raw + u * kCount);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) raw[u * kCount + i] = tensors.y[at + i];
    }
  }
  S x[kUnroll * kCount];
#pragma unroll
  for (int i = 0; i < kUnroll * kCount; ++i) x[i] = widen(raw[i]);
  transform(fn, x, gradient);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = offset(u);
    if (at >= 0) tensors.template store<kCount>(x + u * kCount, at, vector);
  }
}

// Channels-first rows, each by 2^lanes_log2 threads, cut into pieces of kBackwardPiece for a whole
// block; grid (pieces, groups of rows). A row begins where it begins: `vectors` says that y and dy
// are aligned to 16 bytes, and then each piece takes single elements up to the first aligned
// vector, vectors, and single elements again.
template <typename T, typename Fn>
__global__ void __launch_bounds__(kBackwardThreads)
    activation_moments_backward_rows_kernel(GradientTensors<T> tensors, int64_t rows,
                                            int64_t positions, int lanes_log2, bool vectors,
                                            Fn fn) {
  using S = statistics_t<T>;
  constexpr int kVector = kVectorBytes / sizeof(T);
  constexpr int kUnroll = sizeof(T) == 4 ? 4 : 2;
  const int lanes = 1 << lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t row = ((grid_row() * kBackwardThreads) >> lanes_log2) + (threadIdx.x >> lanes_log2);
  if (row >= rows) return;
  const int64_t begin = row * positions + blockIdx.x * kBackwardPiece;
  const int64_t left = positions - blockIdx.x * kBackwardPiece;
  const int count = static_cast<int>(left < kBackwardPiece ? left : kBackwardPiece);
  const RowGradient<S> row_gradient = tensors.row(row);
  const auto gradient = [&](const auto& a, S x, int) { return row_gradient(a, x); };

  int head = static_cast<int>((kVector - begin % kVector) % kVector);
  head = vectors && head < count ? head : count;
  const int body = (count - head) / kVector;
  for (int first = lane; first < body; first += lanes * kUnroll) {
    backward_batch<kVector, kUnroll>(tensors, true, fn, gradient, [&](int u) {
      const int vector = first + u * lanes;
      return vector < body ? begin + head + static_cast<int64_t>(vector) * kVector : -1;
    });
  }
  // The elements before and behind the vectors, or all of them; by the last threads first, which
  // have the fewest vectors.
  const int single = count - body * kVector;
  for (int first = lanes - 1 - lane; first < single; first += lanes * 4) {
    backward_batch<1, 4>(tensors, false, fn, gradient, [&](int u) {
      const int index = first + u * lanes;
      if (index >= single) return int64_t{-1};
      return begin + (index < head ? index : index + body * kVector);
    });
  }
}

// Channels-last, with the tiles of the forward: a thread keeps kVector channels and their
// coefficients. Grid (pieces · tiles, samples), a piece being tile.rows · positions_each positions.
template <typename T, typename Fn, int kVector>
__global__ void __launch_bounds__(kMomentsThreads)
    activation_moments_backward_channels_kernel(GradientTensors<T> tensors, int64_t samples,
                                                int64_t channels, int64_t positions,
                                                ChannelTile tile, int positions_each, bool vectors,
                                                Fn fn) {
  using S = statistics_t<T>;
  constexpr int kUnroll = kVector == 1 ? 32 / sizeof(T) : 4;
  static_assert(kVector == 1 || kVector == kActivationChunk, "a chunk's index is the channel's");
  const int64_t sample = grid_row();
  const unsigned tiles = static_cast<unsigned>(tile.tiles);
  const int row = threadIdx.x / tile.lanes;
  const int64_t channel =
      (static_cast<int64_t>(blockIdx.x % tiles) * tile.lanes + threadIdx.x % tile.lanes) * kVector;
  if (sample >= samples || row >= tile.rows || channel >= channels) return;

  RowGradient<S> gradients[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    gradients[v] = tensors.row(sample * channels + channel + v);
  }
  const auto gradient = [&](const auto& a, S x, int j) { return gradients[j % kVector](a, x); };

  const int64_t piece = static_cast<int64_t>(tile.rows) * positions_each;
  const int64_t begin = blockIdx.x / tiles * piece;
  const int64_t end = begin + piece < positions ? begin + piece : positions;
  for (int64_t first = begin + row; first < end; first += tile.rows * kUnroll) {
    backward_batch<kVector, kUnroll>(tensors, vectors, fn, gradient, [&](int u) {
      const int64_t position = first + u * tile.rows;
      return position < end ? (sample * positions + position) * channels + channel : -1;
    });
  }
}

}  // namespace convnormpool
