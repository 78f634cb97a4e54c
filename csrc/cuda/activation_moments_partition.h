// How the reduction over positions is cut into pieces: plain C++, so that the planner sizes the
// workspace with the numbers that the kernels run with.
//
// Nothing here depends on N or on the dtype: a sample's partition, and with it every bit of its
// moments, is the same in any batch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace convnormpool {

// Threads of a block of the reduction kernels, in both layouts.
constexpr int kMomentsThreads = 128;
// Rows up to this length belong to one warp or to a part of one, longer ones to a block.
constexpr int64_t kWarpRowPositions = 2048;
// A block takes rows up to this length whole; longer ones are cut.
constexpr int64_t kBlockRowPositions = 16384;
// What the workspace holds of a piece: a pivot, the mean about it, M2.
constexpr int64_t kPieceValues = 3;
// The last launch merges at most this many pieces of a row.
constexpr int64_t kMaxPieces = 1024;

// Positions are cut into `pieces` runs of `piece` positions; the last may be shorter.
struct ActMomentsPartition {
  int64_t pieces;
  int64_t piece;
};

// A channels-last block: `lanes` channel lanes, each of `vector` neighbouring channels, times
// `rows` positions side by side; `tiles` blocks cover all channels.
struct ChannelTile {
  int vector;
  int lanes;
  int rows;
  int64_t tiles;
};

inline ChannelTile channel_tile(int64_t channels) {
  const int vector = channels % 4 == 0 ? 4 : 1;
  const int64_t vectors = std::max<int64_t>(1, channels / vector);
  const int64_t most = vector == 4 ? 32 : kMomentsThreads;
  const int64_t tiles = (vectors + most - 1) / most;
  const int lanes = static_cast<int>((vectors + tiles - 1) / tiles);
  return {vector, lanes, kMomentsThreads / lanes, tiles};
}

inline ActMomentsPartition act_moments_partition(int64_t K, int64_t positions, bool channels_last) {
  const auto ceil_divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  // A piece is a whole number of `unit`, so that only the last one meets a partial batch.
  int64_t unit, target;
  if (channels_last && K > 1 && positions > 1) {
    const ChannelTile tile = channel_tile(K);
    // Blocks of channels-last tensors are few where channels are few: samples are cut into about
    // eight pieces, of 16 to 64 positions per thread.
    unit = int64_t{8} * tile.rows;
    target = std::clamp(ceil_divide(ceil_divide(positions, 8), unit) * unit, 2 * unit, 8 * unit);
    if (positions <= 3 * unit) target = 3 * unit;
  } else {
    unit = int64_t{32} * kMomentsThreads;
    target = kBlockRowPositions;
  }
  if (positions <= target) return {1, std::max<int64_t>(1, positions)};
  const int64_t wanted = std::min(kMaxPieces, ceil_divide(positions, target));
  const int64_t piece = ceil_divide(ceil_divide(positions, wanted), unit) * unit;
  return {ceil_divide(positions, piece), piece};
}

// Elements of the statistics type that _act_moments_out needs as workspace: the moments of every
// piece of every (sample, channel), or none where a row is one piece.
inline int64_t act_moments_workspace(int64_t N, int64_t K, int64_t positions, bool channels_last) {
  const int64_t pieces = act_moments_partition(K, positions, channels_last).pieces;
  return pieces == 1 ? 0 : N * K * pieces * kPieceValues;
}

}  // namespace convnormpool
