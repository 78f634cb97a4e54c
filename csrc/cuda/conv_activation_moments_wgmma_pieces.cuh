// How the pieces of the Hopper window kernel (conv_activation_moments_wgmma.cuh) are merged.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_merge.cuh"
#include "cuda/conv_activation_moments_wgmma_plan.h"
#include "problem.h"

namespace convnormpool {

// The pieces of all samples as merge_pieces_kernel takes them (conv_activation_moments_merge.cuh).
// Eight lanes merge a channel, each every eighth piece, in order. Mean first, then M2 about it, in
// float64. One piece of code for both: it runs once, and to fetch it takes longer than to run it.
struct WgmmaPieces {
  const float2* partials;  // (N, pieces, K)
  int N, K, Z, P, Q;
  int first_column, column_tiles;
  KnownDivisor by_positions;  // P Q: pieces have all depths

  CONVNORMPOOL_HOST_DEVICE int64_t samples() const { return N; }
  CONVNORMPOOL_HOST_DEVICE int channels() const { return K; }

  // What a lane merges: its first piece, the tile of columns of that one and from one of its pieces
  // to the next.
  struct Share {
    const float2* from;
    int first, first_tile, tile_step;
  };
  __device__ __forceinline__ Share share(int64_t sample, int k, int lane) const {
    const int first = lane / kMergeChannels, pieces = P * column_tiles;
    return {partials + (sample * pieces + first) * K + k, first, first % column_tiles,
            kMergeLanes % column_tiles};
  }

  __device__ __forceinline__ float2 merge(const Share& of) const {
    const int pieces = P * column_tiles;
    double mean = 0, m2 = 0;
    float2 loaded[kMergeAtOnce];
    double columns[kMergeAtOnce];
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const float2* at = of.from;
      int tile = of.first_tile;
      double sum = 0;
#pragma unroll 1
      for (int piece = of.first; piece < pieces; piece += kMergeAtOnce * kMergeLanes) {
        if (pass == 0 || pieces > kMergeAtOnce * kMergeLanes) {
#pragma unroll
          for (int j = 0; j < kMergeAtOnce; ++j) {
            const bool exists = piece + j * kMergeLanes < pieces;
            loaded[j] = exists ? *at : make_float2(0.f, 0.f);
            columns[j] = exists ? double(wgmma_tile_columns(Q, first_column, tile)) : 0.;
            at += kMergeLanes * K;
            tile += of.tile_step;
            if (tile >= column_tiles) tile -= column_tiles;
          }
        }
#pragma unroll
        for (int j = 0; j < kMergeAtOnce; ++j) {
          const double x = loaded[j].x;
          if (pass == 0) {
            sum = fma(columns[j], x, sum);
          } else {
            const double delta = x - mean;
            sum += fma(columns[j] * double(Z) * delta, delta, double(loaded[j].y));
          }
        }
      }
      m2 = strided_lanes_sum(sum, kMergeChannels);
      if (pass == 0) mean = by_positions.divide(m2);
    }
    // An M2 that leaves float32's range is NaN, as one that left it earlier.
    return make_float2(float(mean), m2 <= double(FLT_MAX) ? float(m2) : __int_as_float(0x7FFFFFFF));
  }
};

inline WgmmaPieces wgmma_pieces_of(const Problem& p, const float2* partials) {
  const int64_t step = kWgmmaAlignment / element_size(p.dtype);
  return {partials,
          int(p.N),
          int(p.K),
          int(p.Z()),
          int(p.P()),
          int(p.Q()),
          int(wgmma_first_column(p.padding[2], step)),
          int(wgmma_column_tiles(p)),
          known_divisor(double(p.P()) * double(p.Q()))};
}

}  // namespace convnormpool
