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

CONVNORMPOOL_HOST_DEVICE WindowPiece window_piece(const WindowGeometry& s, int32_t index) {
  WindowPiece piece;
  const int32_t rows = index / s.segments;
  const int32_t slab = rows / s.P;
  piece.q = (index - rows * s.segments) * s.segment_columns;
  piece.p = rows - slab * s.P;
  piece.z = slab * s.slab_planes;
  piece.planes = window_smaller(s.slab_planes, s.Z - piece.z);
  piece.columns = window_smaller(s.segment_columns, s.Q - piece.q);
  return piece;
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

// Input planes of a piece are counted by their step: plane = z - pad_d + step. Those before 0 and
// from D on are padding and left out; since pad_d < T, none of a piece's outputs sees padding
// alone.
CONVNORMPOOL_HOST_DEVICE int32_t window_first_step(const WindowGeometry& s, const WindowPiece& c) {
  return window_larger(0, s.pad_d - c.z);
}
CONVNORMPOOL_HOST_DEVICE int32_t window_last_step(const WindowGeometry& s, const WindowPiece& c,
                                                  int32_t taps) {
  return window_smaller(c.planes + taps - 2, s.D - 1 + s.pad_d - c.z);
}

// At a step, depth tap kd adds to output plane z + step - kd. Those from low to high are wanted.
CONVNORMPOOL_HOST_DEVICE int32_t window_low_tap(const WindowPiece& c, int32_t step) {
  return window_larger(0, step - (c.planes - 1));
}
CONVNORMPOOL_HOST_DEVICE int32_t window_high_tap(int32_t step, int32_t taps) {
  return window_smaller(taps - 1, step);
}

// Rows (input channel, kh) of a staged plane stand in units of four: unit u of column c holds rows
// 4u .. 4u + 3 of that column next to each other, rows that are none as zeros. A lane reads the
// B operand of four rows by one load.
CONVNORMPOOL_HOST_DEVICE constexpr int32_t window_unit(int32_t row, int32_t column,
                                                       int32_t columns) {
  return row / 4 * columns + column;
}

// Outputs q + 8 tile + 2 (lane % 4) + {0, 1} of a piece are in accumulators {0, 1} (and {2, 3}) of
// a tile; the lane's share of the piece's columns ends where that index reaches `live`.
CONVNORMPOOL_HOST_DEVICE int32_t window_live(const WindowPiece& c, int32_t lane) {
  return c.columns - 2 * (lane & 3);
}
CONVNORMPOOL_HOST_DEVICE constexpr int32_t window_position(int32_t tile, int32_t accumulator) {
  return 8 * tile + (accumulator & 1);
}

}  // namespace convnormpool
