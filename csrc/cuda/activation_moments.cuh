// The kernels of _act_moments_out: mean and M2 over positions of the activated values.
//
// Which thread takes which element depends on (positions, channels, layout, dtype) alone, and the
// order of every sum with it: neither N, nor a sample's place in the batch, nor a pointer's
// alignment changes a bit.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/activation_moments_partition.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/grid.cuh"
#include "cuda/common/moments.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

// How a group of threads walks along a channels-first row.
//   kWide     rows of a whole number of vectors: thread t takes the vectors t, t + threads, ...
//   kNarrow   the same elements in the same order, where the base pointer rules out wide loads
//   kStrided  other rows, whose beginnings are misaligned in turn, so that wide loads would need a
//             mapping that depends on the row's place: thread t takes the elements t, t + threads,
//             ... A batch's sixteen coalesced loads in flight are enough to fill the memory system.
enum class RowAccess : int32_t { kWide, kNarrow, kStrided };

// Where the moments of a (row, piece) go: to the outputs, or to the workspace, there with the mean
// still in two parts (pivot, mean about it), since a piece's rounded mean would cost digits of M2.
template <typename S>
struct MomentsOut {
  S* mean;
  S* m2;
  S* workspace;

  __device__ __forceinline__ void store(int64_t row, const ActMomentsPartition& partition,
                                        int64_t piece, const Moments<S>& moments) const {
    if (partition.pieces == 1) {
      mean[row] = moments.count > S(0) ? moments.pivot + moments.mean : S(NAN);
      m2[row] = moments.m2;
    } else {
      S* entry = workspace + kPieceValues * (row * partition.pieces + piece);
      entry[0] = moments.pivot;
      entry[1] = moments.mean;
      entry[2] = moments.m2;
    }
  }
};

// f(j) for the first `valid` of kBatch indices; all of them, without a test, if kFull.
template <bool kFull, int kBatch, typename F>
__device__ __forceinline__ void each_valid(int valid, const F& f) {
  constexpr int kGroup = 4;
#pragma unroll
  for (int group = 0; group < kBatch; group += kGroup) {
    if (kFull || group < valid) {
#pragma unroll
      for (int j = group; j < group + kGroup; ++j) {
        if (kFull || j < valid) f(j);
      }
    }
  }
}

// Joins a batch's values into (mean, m2) about `pivot`. The batch's own mean is taken out before
// squaring; `inverse` is the reciprocal of its count. The first batch sets the pivot: about_mean
// makes it of the mean of the raw(j). An outlier in that batch costs no more digits than it would
// cost any sum that it is part of.
template <bool kFull, int kBatch, typename S, typename Raw, typename AboutMean, typename Value>
__device__ __forceinline__ void fold(const Raw& raw, const AboutMean& about_mean,
                                     const Value& value, int valid, bool first, S inverse,
                                     const ChanWeights<S>& weights, S& pivot, S& mean, S& m2) {
  if (first) {
    S sum[4] = {};
    each_valid<kFull, kBatch>(valid, [&](int j) { sum[j % 4] += raw(j); });
    pivot = about_mean(((sum[0] + sum[1]) + (sum[2] + sum[3])) * inverse);
  }
  S deviation[kBatch];
  S sum[4] = {};
  each_valid<kFull, kBatch>(valid, [&](int j) {
    deviation[j] = value(raw(j)) - pivot;
    sum[j % 4] += deviation[j];
  });
  const S batch_mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * inverse;
  S square[4] = {};
  each_valid<kFull, kBatch>(valid, [&](int j) {
    const S d = deviation[j] - batch_mean;
    square[j % 4] += d * d;
  });
  join(mean, m2, batch_mean, (square[0] + square[1]) + (square[2] + square[3]), weights);
}

// fold with the activation. Hardswish is left to the sums, so that its last product and the
// subtraction of the pivot are one instruction, and the pivot is the activation of a mean; the
// others have been applied to x.
template <bool kFull, int kBatch, typename S, typename Fn, typename Raw>
__device__ __forceinline__ void fold_activated(const Fn& fn, const Raw& raw, int valid, bool first,
                                               S inverse, const ChanWeights<S>& weights, S& pivot,
                                               S& mean, S& m2) {
  const auto value = [&](S x) {
    if constexpr (std::is_same_v<Fn, HardswishFn>) {
      return fn.value(x);
    } else {
      return x;
    }
  };
  fold<kFull, kBatch>(raw, value, value, valid, first, inverse, weights, pivot, mean, m2);
}

// How many threads share a row, as a power of two known at compile time or not.
template <int kLog2>
struct FixedLanes {
  static constexpr int log2 = kLog2;
};
struct RuntimeLanes {
  int log2;
};

// A batch's elements one by one, the j-th at source[place(j)], and widened.
template <bool kFull, int kBatch, typename T, typename Place>
__device__ __forceinline__ void load_row_elements(const T* source, int valid, const Place& place,
                                                  statistics_t<T> (&x)[kBatch]) {
  decltype(load_loose(source)) loose[kBatch] = {};
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (kFull || j < valid) loose[j] = load_loose(source + place(j));
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) x[j] = widen_loose(loose[j], T());
}

// A batch's elements, widened, of the thread whose first element is at `source`.
template <bool kFull, int kBatch, typename T, typename Lanes>
__device__ __forceinline__ void load_row_batch(const T* source, RowAccess access, Lanes lanes,
                                               int valid, statistics_t<T> (&x)[kBatch]) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  if (access == RowAccess::kStrided) {
    load_row_elements<kFull>(source, valid, [&](int j) { return j << lanes.log2; }, x);
  } else if (access == RowAccess::kNarrow) {
    const auto place = [&](int j) { return (j / kVector * kVector << lanes.log2) + j % kVector; };
    load_row_elements<kFull>(source, valid, place, x);
  } else {
    T raw[kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; j += kVector) {
      if (kFull || j < valid) load_vector<kVector>(source + (j << lanes.log2), raw + j);
    }
    widen_all(raw, x);
  }
}

// One batch; `valid` of its elements exist.
template <bool kFull, int kBatch, typename T, typename Fn, typename Lanes,
          typename S = statistics_t<T>>
__device__ __forceinline__ void row_batch(const T* source, RowAccess access, Lanes lanes, int valid,
                                          const Fn& fn, Moments<S>& moments) {
  S x[kBatch];
  load_row_batch<kFull, kBatch>(source, access, lanes, valid, x);
  if (!kFull && valid == 0) return;
  if constexpr (!std::is_same_v<Fn, HardswishFn>) {
    transform(fn, x, [](auto a, S value, int) { return a.value(value); });
  }
  const S count = valid;
  const S inverse = kFull ? S(1) / S(kBatch) : divide_counts(S(1), count);
  const ChanWeights<S> weights(moments.count, count);
  fold_activated<kFull, kBatch>(
      fn, [&](int j) { return x[j]; }, valid, moments.count == S(0), inverse, weights,
      moments.pivot, moments.mean, moments.m2);
  moments.count += count;
}

// What thread `lane` finds in its share of a row of `count` elements.
template <int kBatch, typename T, typename Fn, typename Lanes, typename S = statistics_t<T>>
__device__ __forceinline__ Moments<S> row_moments(const T* row, int count, RowAccess access,
                                                  int lane, Lanes lanes, const Fn& fn) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  static_assert(kBatch % kVector == 0, "a batch holds whole vectors");
  const int unit = access == RowAccess::kStrided ? 1 : kVector;
  const T* source = row + lane * unit;
  // Elements from this thread's first one on, rounded up to whole turns of the group.
  int left = count - lane * unit + (unit << lanes.log2) - unit;
  const int step = kBatch << lanes.log2;
  Moments<S> moments = {};
  for (; left >= (unit << lanes.log2); left -= step, source += step) {
    // The general activations have one copy of their code, with the tests.
    if (std::is_same_v<Fn, HardswishFn> && left >= step) {
      row_batch<true, kBatch>(source, access, lanes, kBatch, fn, moments);
    } else {
      int valid = left >> lanes.log2;
      valid = valid < kBatch ? valid / unit * unit : kBatch;
      row_batch<false, kBatch>(source, access, lanes, valid, fn, moments);
    }
  }
  return moments;
}

// Rows of at most kWarpRowPositions, each by 2^lanes_log2 lanes of a warp.
template <typename T, typename Fn>
__global__ void __launch_bounds__(kMomentsThreads)
    activation_moments_warp_kernel(const T* y, int64_t rows, int positions, RowAccess access,
                                   int lanes_log2, Fn fn, MomentsOut<statistics_t<T>> out) {
  using S = statistics_t<T>;
  const int thread = threadIdx.x;
  const int lane = thread & ((1 << lanes_log2) - 1);
  const int64_t row =
      ((static_cast<int64_t>(blockIdx.x) * kMomentsThreads) >> lanes_log2) + (thread >> lanes_log2);
  const bool active = row < rows;
  constexpr int kBatch = sizeof(T) == 8 ? 8 : 16;
  Moments<S> moments =
      row_moments<kBatch>(y + (active ? row * positions : 0), active ? positions : 0, access, lane,
                          RuntimeLanes{lanes_log2}, fn);
  lanes_join(moments, 1 << lanes_log2);
  if (lane == 0 && active) {
    const ActMomentsPartition whole = {1, positions};
    out.store(row, whole, 0, moments);
  }
}

// A piece of a row by a block; grid (pieces, rows).
template <typename T, typename Fn>
__global__ void __launch_bounds__(kMomentsThreads)
    activation_moments_block_kernel(const T* y, int64_t rows, int64_t positions,
                                    ActMomentsPartition partition, RowAccess access, Fn fn,
                                    MomentsOut<statistics_t<T>> out) {
  using S = statistics_t<T>;
  constexpr int kWarps = kMomentsThreads / kWarpThreads;
  constexpr int kLog2 = 7;
  static_assert(kMomentsThreads == 1 << kLog2, "a batch's loads are at fixed distances");
  __shared__ Moments<S> warp_moments[kWarps];

  const int64_t row = grid_row();
  if (row >= rows) return;
  const int thread = threadIdx.x;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * partition.piece;
  const int64_t left = positions - begin;
  const int count = static_cast<int>(left < partition.piece ? left : partition.piece);
  Moments<S> moments =
      row_moments<16>(y + row * positions + begin, count, access, thread, FixedLanes<kLog2>{}, fn);
  lanes_join(moments, kWarpThreads);
  if (thread % kWarpThreads == 0) warp_moments[thread / kWarpThreads] = moments;
  __syncthreads();
  if (thread == 0) {
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) join(moments, warp_moments[warp]);
    out.store(row, partition, blockIdx.x, moments);
  }
}

// Positions that a thread of a channels-last block loads before it uses the first.
constexpr int kPositionBatch = 8;

// A channels-last block's loop: `left` positions remain, this thread takes every tile.rows-th.
template <bool kFull, int kVector, typename T, typename Fn, typename S = statistics_t<T>>
__device__ __forceinline__ void channels_batch(const T* y, int stride, int valid, bool wide,
                                               const Fn& fn, S& count, S (&pivot)[kVector],
                                               S (&mean)[kVector], S (&m2)[kVector]) {
  T raw[kPositionBatch * kVector] = {};
  S x[kPositionBatch * kVector];
  if (wide) {
#pragma unroll
    for (int j = 0; j < kPositionBatch; ++j) {
      if (kFull || j < valid) load_vector<kVector>(y + j * stride, raw + j * kVector);
    }
    widen_all(raw, x);
  } else {
#pragma unroll
    for (int j = 0; j < kPositionBatch * kVector; ++j) {
      if (kFull || j / kVector < valid) raw[j] = y[j / kVector * stride + j % kVector];
    }
    widen_all(raw, x);
  }
  if (!kFull && valid == 0) return;
  if constexpr (!std::is_same_v<Fn, HardswishFn>) {
    transform(fn, x, [](auto a, S value, int) { return a.value(value); });
  }
  const S added = valid;
  const S inverse = kFull ? S(1) / S(kPositionBatch) : divide_counts(S(1), added);
  const ChanWeights<S> weights(count, added);
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    fold_activated<kFull, kPositionBatch>(
        fn, [&](int j) { return x[j * kVector + v]; }, valid, count == S(0), inverse, weights,
        pivot[v], mean[v], m2[v]);
  }
  count += added;
}

// Blocks of the channels-last kernel that an SM is to hold: the most that cost no spilled register.
template <typename T, typename Fn>
constexpr int kChannelBlocks = sizeof(T) == 8                    ? 1
                               : std::is_same_v<Fn, HardswishFn> ? 5
                                                                 : 4;

// Channels-last: thread (position lane, channel lane) keeps kVector channels and walks over
// positions, so that a block reads whole runs of positions. Grid (pieces · tiles, samples).
template <typename T, typename Fn, int kVector>
__global__ void __launch_bounds__(kMomentsThreads, kChannelBlocks<T, Fn>)
    activation_moments_channels_kernel(const T* y, int64_t samples, int64_t channels,
                                       int64_t positions, ChannelTile tile,
                                       ActMomentsPartition partition, bool wide, Fn fn,
                                       MomentsOut<statistics_t<T>> out) {
  using S = statistics_t<T>;
  __shared__ S shared_count[kMomentsThreads];
  __shared__ S shared_moments[3 * kVector][kMomentsThreads];

  const int64_t sample = grid_row();
  if (sample >= samples) return;
  const unsigned tiles = static_cast<unsigned>(tile.tiles);
  const unsigned piece = blockIdx.x / tiles;
  const int thread = threadIdx.x;
  const int row = thread / tile.lanes;
  const int64_t channel =
      (static_cast<int64_t>(blockIdx.x % tiles) * tile.lanes + thread % tile.lanes) * kVector;
  const bool active = row < tile.rows && channel < channels;

  S count = 0, pivot[kVector] = {}, mean[kVector] = {}, m2[kVector] = {};
  if (active) {
    const int64_t begin = piece * partition.piece;
    int64_t left = positions - begin;
    left = left < partition.piece ? left : partition.piece;
    const int stride = static_cast<int>(tile.rows * channels);
    const int step = tile.rows * kPositionBatch;
    const T* source = y + (sample * positions + begin + row) * channels + channel;
    for (; left > 0; left -= step, source += kPositionBatch * stride) {
      if (std::is_same_v<Fn, HardswishFn> && left >= step) {
        channels_batch<true, kVector>(source, stride, kPositionBatch, wide, fn, count, pivot, mean,
                                      m2);
      } else {
        int valid = 0;
#pragma unroll
        for (int j = 0; j < kPositionBatch; ++j) valid += row + j * tile.rows < left;
        channels_batch<false, kVector>(source, stride, valid, wide, fn, count, pivot, mean, m2);
      }
    }
  }

  // A tree over the position lanes, each step into the lower one and about its pivot.
  int span = 1;
  while (span < tile.rows) span *= 2;
  shared_count[thread] = count;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    shared_moments[3 * v][thread] = pivot[v];
    shared_moments[3 * v + 1][thread] = mean[v];
    shared_moments[3 * v + 2][thread] = m2[v];
  }
  for (span /= 2; span > 0; span /= 2) {
    __syncthreads();
    if (active && row < span && row + span < tile.rows) {
      const int other = thread + span * tile.lanes;
      const S added = shared_count[other];
      const ChanWeights<S> weights(count, added);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const Moments<S> its = {shared_moments[3 * v][other], added,
                                shared_moments[3 * v + 1][other], shared_moments[3 * v + 2][other]};
        join(mean[v], m2[v], its.mean_about(pivot[v]), its.m2, weights);
        shared_moments[3 * v + 1][thread] = mean[v];
        shared_moments[3 * v + 2][thread] = m2[v];
      }
      count += added;
      shared_count[thread] = count;
    }
  }
  if (active && row == 0) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      out.store(sample * channels + channel + v, partition, piece,
                Moments<S>{pivot[v], count, mean[v], m2[v]});
    }
  }
}

// The moments of rows from those of their pieces, in float64: 2^lanes_log2 lanes a row, each lane
// taking every such piece in order. A launch of its own, because a counter that lets the last block
// of a row do this would have to be zeroed before each call and kept apart for each stream.
template <typename S>
__global__ void __launch_bounds__(kMomentsThreads)
    activation_moments_merge_kernel(const S* workspace, int64_t rows, int64_t positions,
                                    ActMomentsPartition partition, int lanes_log2, S* mean, S* m2) {
  const int lanes = 1 << lanes_log2;
  const int thread = threadIdx.x;
  const int lane = thread & (lanes - 1);
  const int64_t row =
      ((static_cast<int64_t>(blockIdx.x) * kMomentsThreads) >> lanes_log2) + (thread >> lanes_log2);
  const bool active = row < rows;
  const int pieces = active ? static_cast<int>(partition.pieces) : 0;
  const S* entries = workspace + (active ? kPieceValues * row * partition.pieces : 0);
  const auto count = [&](int piece) {
    const int64_t left = positions - piece * partition.piece;
    return static_cast<double>(left < partition.piece ? left : partition.piece);
  };
  const auto piece_mean = [&](int piece) {
    const S* entry = entries + kPieceValues * piece;
    return static_cast<double>(entry[0]) + static_cast<double>(entry[1]);
  };
  double sum = 0;
  for (int piece = lane; piece < pieces; piece += lanes) sum += count(piece) * piece_mean(piece);
  const double row_mean = lanes_sum(sum, lanes) / static_cast<double>(positions);
  double squares = 0;
  for (int piece = lane; piece < pieces; piece += lanes) {
    const double d = piece_mean(piece) - row_mean;
    squares += static_cast<double>(entries[kPieceValues * piece + 2]) + count(piece) * d * d;
  }
  squares = lanes_sum(squares, lanes);
  if (lane == 0 && active) {
    mean[row] = narrow(row_mean, S());
    m2[row] = narrow(squares, S());
  }
}

}  // namespace convnormpool
