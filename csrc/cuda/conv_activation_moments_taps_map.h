// Index maps of the taps kernel: in which order the products take a filter's taps, where their
// elements stand in shared memory, and how much of it a problem needs. Plain C++, asked by the
// planner and by the launch, so that both go by the same numbers.
//
// The depth of the products is the taps of one kd: pairs of neighbouring kw, eight to a step. Where
// S is odd the last kw stands alone; those pairs, and what a last step lacks, come after the
// others, since half of each is masked.
#pragma once

#include <cstdint>

#include "activation.h"

namespace convnormpool {

// A block's outputs: so many rows, a warp for each, of one segment of 32 columns.
constexpr int32_t kTapsRows = 8, kTapsTiles = 4;
constexpr int32_t kTapsThreads = 32 * kTapsRows;
constexpr int32_t kTapsMostExtent = 8;  // of a filter's axis
// Elements of a staged row, 39 at most are used. With this pitch, and 16 words between the bank of
// an element in one copy and in the other, lanes of a load meet different banks.
constexpr int32_t kTapsPitch = 48;

struct TapsFilter {
  int32_t C, T, R, S;

  CONVNORMPOOL_HOST_DEVICE int32_t full_pairs() const { return C * R * (S / 2); }
  CONVNORMPOOL_HOST_DEVICE int32_t pairs() const { return C * R * ((S + 1) / 2); }
  // Of a kd; the first need no masks.
  CONVNORMPOOL_HOST_DEVICE int32_t full_steps() const { return full_pairs() / 8; }
  CONVNORMPOOL_HOST_DEVICE int32_t steps() const { return (pairs() + 7) / 8; }
  // Staged rows of a channel.
  CONVNORMPOOL_HOST_DEVICE int32_t rows() const { return kTapsRows + R - 1; }
  // A plane has two copies of its rows, the second one column on, so that every pair begins at a
  // multiple of four bytes in one of them.
  CONVNORMPOOL_HOST_DEVICE int32_t copy_bytes() const {
    const int32_t bytes = C * rows() * kTapsPitch * 2;
    return bytes + (192 - bytes % 128) % 128;
  }
  CONVNORMPOOL_HOST_DEVICE int32_t plane_bytes() const { return 2 * copy_bytes(); }
  // The planes of an output plane and the next.
  CONVNORMPOOL_HOST_DEVICE int32_t planes() const { return T + 1; }
};

// The tap of a pair, 0 <= pair: its row (channel, kh), its first kw, and how many it has.
struct TapsPair {
  int32_t ci, kh, kw, taps;
};

CONVNORMPOOL_HOST_DEVICE TapsPair taps_pair(const TapsFilter& f, int32_t pair) {
  const int32_t full = f.full_pairs(), half = f.S / 2;
  if (pair >= f.pairs()) return {0, 0, 0, 0};
  const bool alone = pair >= full;
  const int32_t row = alone ? pair - full : pair / half;
  return {row / f.R, row % f.R, alone ? f.S - 1 : pair % half * 2, alone ? 1 : 2};
}

// Shared memory, in this order: weights as fragments (kd, step, tile of 16 channels, part, lane),
// the table of a kd's steps, four entries each, the planes, and exponents.
struct TapsMemory {
  int64_t table, planes, exponents, total;
};

constexpr int32_t kTapsFragmentBytes = 512, kTapsEntryBytes = 16;

CONVNORMPOOL_HOST_DEVICE TapsMemory taps_memory(const TapsFilter& f, int32_t parts,
                                                int32_t channel_tiles) {
  TapsMemory m;
  m.table = int64_t{f.T} * f.steps() * channel_tiles * parts * kTapsFragmentBytes;
  m.planes = m.table + f.steps() * 4 * kTapsEntryBytes;
  m.exponents = m.planes + int64_t{f.planes()} * parts * f.plane_bytes();
  // Of 16 channels a tile, of the planes, and two rows of the warps' largest magnitudes.
  m.total = m.exponents + 4 * (16 * channel_tiles + kTapsMostExtent + 1 + 2 * kTapsRows);
  return m;
}

}  // namespace convnormpool
