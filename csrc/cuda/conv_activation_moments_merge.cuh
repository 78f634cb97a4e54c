// What follows the fused convolution: the merge of each sample's pieces, alone or with the
// normalisation behind it. Templates over the kind of pieces, which says how they are merged:
//
//   samples(), channels()
//   share(sample, k, lane)   what a lane merges of channel k, which is that of channel `lane % 4`
//                 of four, or the last one; reads nothing
//   merge(share)  (mean, M2) of the channel, in lane `lane % 4`; all lanes of the warp, a unit,
//                 call it
//
// Both kernels write the same bits, and may be programmatic dependent launches: what needs nothing
// of the convolution comes before they wait for it. Their code is short because it runs once: to
// fetch it takes longer than to run it.
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
constexpr int kMergeMostMoments = kMergeMostRounds * kMergeMostUnits * kMergeChannels;

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

// Moments that a block has merged, float32; it reads them back from here.
struct MergedMoments {
  float means[kMergeMostMoments], m2s[kMergeMostMoments];

  __device__ __forceinline__ double mean(int64_t index) const { return double(means[index]); }
  __device__ __forceinline__ double m2(int64_t index) const { return double(m2s[index]); }
};

// A unit's part: a tile of channels of a sample, or nothing where `exists` is false.
template <class Pieces>
struct MergeTile {
  int64_t element;  // of mean and m2: this lane's channel of the sample
  int k;            // the channel, if this lane writes one
  bool writes;
  typename Pieces::Share share;

  __device__ __forceinline__ MergeTile(const Pieces& pieces, int64_t sample, int tile,
                                       bool exists) {
    const int lane = static_cast<int>(threadIdx.x) % kMergeThreads, K = pieces.channels();
    k = tile * kMergeChannels + lane % kMergeChannels;
    element = sample * K + k;
    writes = exists && lane < kMergeChannels && k < K;
    share = pieces.share(exists ? sample : int64_t{0}, exists ? min(k, K - 1) : 0, lane);
  }

  // Its mean and M2, in lanes that write.
  __device__ __forceinline__ float2 merge(const Pieces& pieces, float* mean, float* m2) const {
    const float2 merged = pieces.merge(share);
    if (writes) mean[element] = merged.x, m2[element] = merged.y;
    return merged;
  }
};

// Launch with a unit for each tile of each sample, kMergeLeastUnits a block.
template <class Pieces>
__global__ void __launch_bounds__(kMergeThreads* kMergeLeastUnits)
    merge_pieces_kernel(const Pieces pieces, float* mean, float* m2) {
  grid_dependency_launch();
  const int tiles = merge_tiles(pieces.channels());
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t task = thread / kMergeThreads, sample = task / tiles;
  const MergeTile<Pieces> tile(pieces, sample, static_cast<int>(task % tiles),
                               sample < pieces.samples());
  grid_dependency_wait();
  tile.merge(pieces, mean, m2);
}

// Merges block_samples samples in a block, into norm.p.mean and norm.p.m2, and normalises their
// groups. Launch with at most kMergeMostUnits units a block, and kMergeMostMoments channels of
// samples.
template <class Pieces>
__global__ void __launch_bounds__(kMergeThreads* kMergeMostUnits)
    merge_norm_pool_kernel(const Pieces pieces, const int block_samples, const NormPool norm) {
  __shared__ MergedMoments merged;
  grid_dependency_launch();
  const GroupNormPool& p = norm.p;
  const int thread = static_cast<int>(threadIdx.x), K = pieces.channels();
  const int tiles = merge_tiles(K);
  const int units = static_cast<int>(blockDim.x) / kMergeThreads, unit = thread / kMergeThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_samples;
  const int samples = static_cast<int>(min(int64_t{block_samples}, pieces.samples() - first));
  const int lanes = 1 << p.lanes_log2, at_once = static_cast<int>(blockDim.x) >> p.lanes_log2;
  const int groups = static_cast<int>(p.groups), count = samples * groups;
  const auto group_of = [&](int start) {
    const int i = start + (thread >> p.lanes_log2);
    return GroupPlace{first * groups + i, i % groups, thread & (lanes - 1), i < count};
  };
  const GroupPlace group = group_of(0);
  Affine affine;
#pragma unroll 1
  for (int start = 0; start < block_samples * tiles; start += units) {
    const int sample = (start + unit) / tiles;
    const MergeTile<Pieces> tile(pieces, first + sample, (start + unit) % tiles, sample < samples);
    if (start == 0) {
      grid_dependency_wait();
      affine = first_affine(norm, group);  // on its way while the pieces are merged
    }
    const float2 moments =
        tile.merge(pieces, static_cast<float*>(p.mean.data), static_cast<float*>(p.m2.data));
    if (tile.writes) {
      merged.means[sample * K + tile.k] = moments.x;
      merged.m2s[sample * K + tile.k] = moments.y;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int start = 0; start < count; start += at_once) {
    const GroupPlace of = group_of(start);
    normalise_group(norm, of, merged, of.index * p.group_channels - first * K, affine, start == 0);
  }
}

}  // namespace convnormpool
