// What follows the fused convolution: the merge of each sample's pieces, alone or with the
// normalisation behind it. Templates over the kind of pieces, which says how they are merged:
//
//   kThreads      threads, a unit, that merge kChannels channels of a sample
//   kScratch      doubles of shared memory of a unit
//   kLeastUnits   of a block
//   kMostRounds   in which a block merges a sample, if it normalises it, too
//   samples(), channels()
//   merge(sample, k, thread, scratch)   (mean, M2) of channel k in the unit's first kChannels
//                 threads, where k is that of channel `thread % kChannels`, or the last one; all
//                 threads of the block call it, which may synchronise them
//
// Both kernels write the same bits, and may be programmatic dependent launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/group_norm_pool_groups.cuh"

namespace convnormpool {

constexpr int kMergeMostThreads = 1024;

template <class Pieces>
constexpr int merge_most_units() {
  return kMergeMostThreads / Pieces::kThreads;
}
template <class Pieces>
CONVNORMPOOL_HOST_DEVICE int merge_tiles(const Pieces& pieces) {
  return (pieces.channels() + Pieces::kChannels - 1) / Pieces::kChannels;
}

// Samples and units of a block of merge_norm_pool_kernel. While an SM has one block at most, it
// merges as many tiles at once as it can; then several blocks share an SM, so that some merge while
// others, with a few of their warps, normalise.
struct MergeBlock {
  int samples, units;
};
template <class Pieces>
inline MergeBlock merge_block(const Pieces& pieces, int sm_count) {
  const int threads = pieces.samples() > sm_count ? kMergeMostThreads / 4 : kMergeMostThreads;
  const int tiles = merge_tiles(pieces), most = threads / Pieces::kThreads;
  const int samples = tiles < Pieces::kLeastUnits ? Pieces::kLeastUnits / tiles : 1;
  return {samples, samples * tiles < most ? samples * tiles : most};
}

template <class Pieces>
constexpr size_t merge_shared_bytes(int units) {
  return sizeof(double) * Pieces::kScratch * static_cast<size_t>(units);
}

// f(i, piece i) for the pieces i = first, first + step, .. below `count`, in order, which stand
// `stride` apart; so many are loaded before the first is used.
template <int kAtOnce, class F>
__device__ __forceinline__ void for_pieces(const float2* pieces, int stride, int first, int step,
                                           int count, const F& f) {
  for (int i = first; i < count; i += kAtOnce * step) {
    float2 loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      loaded[j] = pieces[int64_t{min(i + j * step, count - 1)} * stride];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * step < count) f(i + j * step, loaded[j]);
    }
  }
}

// Writes mean and M2 of a tile of channels of a sample, or nothing where `exists` is false.
template <class Pieces>
__device__ __forceinline__ void merge_tile(const Pieces& pieces, int64_t sample, int tile,
                                           bool exists, float* mean, float* m2) {
  const int thread = static_cast<int>(threadIdx.x) % Pieces::kThreads;
  const int unit = static_cast<int>(threadIdx.x) / Pieces::kThreads;
  double* scratch = nullptr;
  if constexpr (Pieces::kScratch > 0) {
    scratch = reinterpret_cast<double*>(dynamic_shared_memory()) + unit * Pieces::kScratch;
  }
  const int K = pieces.channels();
  const int k = tile * Pieces::kChannels + thread % Pieces::kChannels;
  const float2 merged =
      pieces.merge(exists ? sample : int64_t{0}, exists ? min(k, K - 1) : 0, thread, scratch);
  if (!exists || thread >= Pieces::kChannels || k >= K) return;
  mean[sample * K + k] = merged.x;
  m2[sample * K + k] = merged.y;
}

// Launch with a unit for each tile of each sample and merge_shared_bytes<Pieces>(units of a block).
template <class Pieces>
__global__ void __launch_bounds__(Pieces::kThreads* Pieces::kLeastUnits)
    merge_pieces_kernel(const Pieces pieces, float* mean, float* m2) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int tiles = merge_tiles(pieces);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t task = thread / Pieces::kThreads, sample = task / tiles;
  merge_tile(pieces, sample, static_cast<int>(task % tiles), sample < pieces.samples(), mean, m2);
}

// Merges block_samples samples in a block, into norm.p.mean and norm.p.m2, and normalises their
// groups. Launch with at most merge_most_units<Pieces>() units a block and their
// merge_shared_bytes<Pieces>.
template <class Pieces>
__global__ void __launch_bounds__(kMergeMostThreads)
    merge_norm_pool_kernel(const Pieces pieces, const int block_samples, const NormPool norm) {
  grid_dependency_launch();
  grid_dependency_wait();
  const GroupNormPool& p = norm.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = merge_tiles(pieces);
  const int units = static_cast<int>(blockDim.x) / Pieces::kThreads;
  const int unit = thread / Pieces::kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_samples;
  const int64_t end = min(first + block_samples, pieces.samples());
  for (int start = 0; start < block_samples * tiles; start += units) {
    const int64_t sample = first + (start + unit) / tiles;
    merge_tile(pieces, sample, (start + unit) % tiles, sample < end,
               static_cast<float*>(p.mean.data), static_cast<float*>(p.m2.data));
    __syncthreads();
  }
  // The block reads back what its threads wrote.
  const int lanes = 1 << p.lanes_log2, at_once = static_cast<int>(blockDim.x) >> p.lanes_log2;
  const int groups = static_cast<int>(p.groups), count = static_cast<int>(end - first) * groups;
  for (int start = 0; start < count; start += at_once) {
    const int i = start + (thread >> p.lanes_log2);
    normalise_group<true>(norm, {first * groups + i, i % groups, thread & (lanes - 1), i < count});
  }
}

}  // namespace convnormpool
