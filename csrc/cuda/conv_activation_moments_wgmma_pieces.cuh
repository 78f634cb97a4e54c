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
// Two lanes merge a channel, each every other piece, in order. Mean first, then M2 about it, in
// float64.
struct WgmmaPieces {
  static constexpr int kThreads = kWarpThreads;
  static constexpr int kScratch = 0;
  static constexpr int kLeastUnits = 4;
  static constexpr int kAtOnce = 16;

  const float2* partials;  // (N, pieces, K)
  int N, K, Z, P, Q;
  int first_column, column_tiles;

  CONVNORMPOOL_HOST_DEVICE int64_t samples() const { return N; }
  CONVNORMPOOL_HOST_DEVICE int channels() const { return K; }

  __device__ __forceinline__ float2 merge(int64_t sample, int k, int lane, double*) const {
    const int first = lane / kMergeChannels, pieces = P * column_tiles;
    const float2* const from = partials + sample * pieces * K + k;
    // The columns of every other piece from the first on, by its place among a row's.
    const int begin = min(first, column_tiles - 1), step = column_tiles > 2 ? 2 : 0;
    const auto next_columns = [&](int& tile) {
      const double columns = wgmma_tile_columns(Q, first_column, tile);
      tile += step;
      if (tile >= column_tiles) tile -= column_tiles;
      return columns;
    };
    double mean = 0, m2 = 0;
    int tile = begin;
    for_pieces<kAtOnce>(from, K, first, 2, pieces, [&](int, const float2& piece) {
      mean = fma(next_columns(tile), double(piece.x), mean);
    });
    mean = strided_lanes_sum(mean, kMergeChannels) / (double(P) * double(Q));
    tile = begin;
    for_pieces<kAtOnce>(from, K, first, 2, pieces, [&](int, const float2& piece) {
      const double delta = double(piece.x) - mean;
      m2 += fma(next_columns(tile) * double(Z) * delta, delta, double(piece.y));
    });
    m2 = strided_lanes_sum(m2, kMergeChannels);
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
          int(wgmma_column_tiles(p))};
}

}  // namespace convnormpool
