// Index maps of the window kernels: which outputs a piece of a sample covers, which input planes
// and filter taps it needs, and where an input element stands in shared memory.
//
// A sample's outputs (Z, P, Q) are cut into pieces: a slab of output planes, one output row, one
// segment of that row. The cut depends on the problem alone, never on N or the device, and so do
// the partial moments of a piece and the order in which they are merged.
#pragma once

#include <cstdint>

#include "activation.h"

namespace convnormpool {

// Columns of the input that the kernel of short rows is made for, and the least that its narrow
// form takes.
constexpr int32_t kShortRow = 32, kNarrowRow = 28;

struct WindowGeometry {
  int32_t D, H, W;
  int32_t K, Z, P, Q;
  int32_t pad_d, pad_h, pad_w;
  int32_t slab_planes;      // output planes of a slab; the last may be thinner
  int32_t slabs;            // ceil(Z / slab_planes)
  int32_t segment_columns;  // outputs of a segment: 8 times the kernel's kTiles
  int32_t segments;         // ceil(Q / segment_columns)
};

// Output planes [z, z + planes), row p, columns [q, q + columns).
struct WindowPiece {
  int32_t z, planes, p, q, columns;
};

CONVNORMPOOL_HOST_DEVICE int32_t window_smaller(int32_t a, int32_t b) { return a < b ? a : b; }
CONVNORMPOOL_HOST_DEVICE int32_t window_larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Slabs of at most slab_planes output planes, as even as they can be; segments of `tiles` tiles.
inline WindowGeometry window_geometry(int32_t D, int32_t H, int32_t W, int32_t K, int32_t Z,
                                      int32_t P, int32_t Q, int32_t pad_d, int32_t pad_h,
                                      int32_t pad_w, int32_t slab_planes, int32_t tiles) {
  const int32_t most = window_smaller(slab_planes, Z);
  const int32_t wanted = (Z + most - 1) / most;
  const int32_t even = (Z + wanted - 1) / wanted;
  const int32_t columns = 8 * tiles;
  return {D,       H,
          W,       K,
          Z,       P,
          Q,       pad_d,
          pad_h,   pad_w,
          even,    (Z + even - 1) / even,
          columns, (Q + columns - 1) / columns};
}

CONVNORMPOOL_HOST_DEVICE int32_t window_pieces(const WindowGeometry& s) {
  return s.slabs * s.P * s.segments;
}

// Where a piece stands among all pieces of all samples, whose number is that of the worker that
// takes it first: segments vary fastest.
struct WindowCursor {
  int32_t sample, slab, row, segment;

  // Moves on by as many pieces as `distance` is from the first of all. No digit carries twice.
  CONVNORMPOOL_HOST_DEVICE void advance(const WindowGeometry& s, const WindowCursor& distance) {
    segment += distance.segment;
    row += distance.row;
    slab += distance.slab;
    sample += distance.sample;
    if (segment >= s.segments) segment -= s.segments, ++row;
    if (row >= s.P) row -= s.P, ++slab;
    if (slab >= s.slabs) slab -= s.slabs, ++sample;
  }
};

// The piece with this number.
CONVNORMPOOL_HOST_DEVICE WindowCursor window_cursor(const WindowGeometry& s, int32_t number) {
  const int32_t rows = number / s.segments, slabs = rows / s.P, sample = slabs / s.slabs;
  return {sample, slabs - sample * s.slabs, rows - slabs * s.P, number - rows * s.segments};
}

// The piece's number among all of them.
CONVNORMPOOL_HOST_DEVICE int64_t window_number(const WindowGeometry& s, const WindowCursor& at) {
  const int32_t index = (at.slab * s.P + at.row) * s.segments + at.segment;
  return static_cast<int64_t>(at.sample) * window_pieces(s) + index;
}

CONVNORMPOOL_HOST_DEVICE WindowPiece window_piece(const WindowGeometry& s, const WindowCursor& at) {
  WindowPiece piece;
  piece.q = at.segment * s.segment_columns;
  piece.p = at.row;
  piece.z = at.slab * s.slab_planes;
  piece.planes = window_smaller(s.slab_planes, s.Z - piece.z);
  piece.columns = window_smaller(s.segment_columns, s.Q - piece.q);
  return piece;
}
CONVNORMPOOL_HOST_DEVICE WindowPiece window_piece(const WindowGeometry& s, int32_t index) {
  const int32_t rows = index / s.segments, slab = rows / s.P;
  return window_piece(s, {0, slab, rows - slab * s.P, index - rows * s.segments});
}

// Which worker a block is. Blocks come to the SMs in turn, one each before the second; workers on
// one SM should have neighbouring rows, whose input they share. Only speed depends on this.
CONVNORMPOOL_HOST_DEVICE int32_t window_place(int32_t block, int32_t blocks,
                                              int32_t blocks_per_sm) {
  const int32_t sms = blocks / blocks_per_sm;
  return blocks % blocks_per_sm == 0 ? block % sms * blocks_per_sm + block / sms : block;
}

// Workers take pieces (sample, index) in turn: worker i of n takes every n-th.
struct WindowStride {
  int32_t samples, pieces, all_pieces;

  CONVNORMPOOL_HOST_DEVICE WindowStride(int32_t workers, int32_t pieces_of_a_sample)
      : samples(workers / pieces_of_a_sample),
        pieces(workers % pieces_of_a_sample),
        all_pieces(pieces_of_a_sample) {}

  // Moves on to the worker's next piece and gives its sample.
  CONVNORMPOOL_HOST_DEVICE int32_t next(int32_t& sample, int32_t& index) const {
    sample += samples;
    index += pieces;
    if (index >= all_pieces) {
      index -= all_pieces;
      ++sample;
    }
    return sample;
  }
};

// Rows (input channel, kh) of a staged plane stand in units of four: unit u of column c holds rows
// 4u .. 4u + 3 of that column next to each other, rows that are none as zeros. A lane reads the
// B operand of four rows by one load.
CONVNORMPOOL_HOST_DEVICE constexpr int32_t window_unit(int32_t row, int32_t column,
                                                       int32_t columns) {
  return row / 4 * columns + column;
}

// Column n of a tile of accumulators is output q + 8 tile + n of a piece, or with `direct` output
// q + 4 n + tile; accumulators {0, 1} (and {2, 3}) are columns 2 (lane % 4) + {0, 1}. The lane's
// share of the piece's columns ends where window_position reaches window_live.
CONVNORMPOOL_HOST_DEVICE int32_t window_live(const WindowPiece& c, int32_t lane,
                                             bool direct = false) {
  return c.columns - (direct ? 8 : 2) * (lane & 3);
}
CONVNORMPOOL_HOST_DEVICE constexpr int32_t window_position(int32_t tile, int32_t accumulator,
                                                           bool direct = false) {
  return direct ? 4 * (accumulator & 1) + tile : 8 * tile + (accumulator & 1);
}

}  // namespace convnormpool
