// What follows the fused convolution: the merge of each sample's pieces, alone or with the
// normalisation behind it. Templates over the kind of pieces, which says how they are merged:
//
//   samples(), channels()
//   merge(sample, k, lane)   (mean, M2) of channel k in lane `lane % 4`, where k is that of channel
//                 `lane % 4` of four, or the last one; all lanes of the warp, a unit, call it
//
// Both kernels write the same bits, and may be programmatic dependent launches. Their code is short
// because it runs once: to fetch it takes longer than to run it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm_pool_groups.cuh"

namespace convnormpool {

constexpr int kMergeThreads = kWarpThreads;  // of a unit
constexpr int kMergeChannels = 4, kMergeLanes = kMergeThreads / kMergeChannels;
constexpr int kMergeAtOnce = 4;  // pieces that a lane loads before it uses the first
constexpr int kMergeLeastUnits = 4, kMergeMostUnits = 32;  // of a block
// In which a block merges a sample, if it normalises it, too.
constexpr int kMergeMostRounds = 4;

CONVNORMPOOL_HOST_DEVICE int merge_tiles(int channels) {
  return (channels + kMergeChannels - 1) / kMergeChannels;
}

// Samples and units of a block of merge_norm_pool_kernel. While an SM has one block at most, it
// merges as many tiles at once as it can; then several blocks share an SM, so that some merge while
// others, with a few of their warps, normalise.
struct MergeBlock {
  int samples, units;
};
inline MergeBlock merge_block(int64_t samples, int channels, int sm_count) {
  const int most = samples > sm_count ? kMergeMostUnits / 4 : kMergeMostUnits;
  const int tiles = merge_tiles(channels);
  const int of_block = tiles < kMergeLeastUnits ? kMergeLeastUnits / tiles : 1;
  return {of_block, of_block * tiles < most ? of_block * tiles : most};
}

// Writes mean and M2 of a tile of channels of a sample, or nothing where `exists` is false.
template <class Pieces>
__device__ __forceinline__ void merge_tile(const Pieces& pieces, int64_t sample, int tile,
                                           bool exists, float* mean, float* m2) {
  const int lane = static_cast<int>(threadIdx.x) % kMergeThreads;
  const int K = pieces.channels(), k = tile * kMergeChannels + lane % kMergeChannels;
  const float2 merged =
      pieces.merge(exists ? sample : int64_t{0}, exists ? min(k, K - 1) : 0, lane);
  if (!exists || lane >= kMergeChannels || k >= K) return;
  mean[sample * K + k] = merged.x;
  m2[sample * K + k] = merged.y;
}

// Launch with a unit for each tile of each sample, kMergeLeastUnits a block.
template <class Pieces>
__global__ void __launch_bounds__(kMergeThreads* kMergeLeastUnits)
    merge_pieces_kernel(const Pieces pieces, float* mean, float* m2) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int tiles = merge_tiles(pieces.channels());
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t task = thread / kMergeThreads, sample = task / tiles;
  merge_tile(pieces, sample, static_cast<int>(task % tiles), sample < pieces.samples(), mean, m2);
}

// Merges block_samples samples in a block, into norm.p.mean and norm.p.m2, and normalises their
// groups. Launch with at most kMergeMostUnits units a block.
template <class Pieces>
__global__ void __launch_bounds__(kMergeThreads* kMergeMostUnits)
    merge_norm_pool_kernel(const Pieces pieces, const int block_samples, const NormPool norm) {
  grid_dependency_launch();
  grid_dependency_wait();
  const GroupNormPool& p = norm.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = merge_tiles(pieces.channels());
  const int units = static_cast<int>(blockDim.x) / kMergeThreads, unit = thread / kMergeThreads;
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
