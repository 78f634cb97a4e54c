// Index maps of the backward window kernels: how a sample is cut, in which order a block walks
// through it, and where operands stand in shared memory.
//
// A sample is cut into pieces: a slab of planes and a segment of 32 neighbouring outputs of a row.
// A block takes whole pieces and walks each in strips of neighbouring output rows, one row for each
// of its row warps. It sweeps a strip through the depth one input plane (a step) at a time.
//
// For the input's gradient pieces are cut along the input: an input plane needs the output planes
// up to T - 1 before it, a column those up to S - 1 before, so slabs and segments overlap by that
// much (the halo). Rows need no halo: strips follow each other, and what a strip adds to the rows
// below it is carried on. The cut depends on the problem alone.
#pragma once

#include <cstdint>

#include "activation.h"
#include "cuda/conv_activation_moments_window_map.h"

namespace convnormpool {

constexpr int32_t kBackwardColumns = 32;  // outputs of a segment

struct BackwardGeometry {
  int32_t D, H, W;
  int32_t K, Z, P, Q;
  int32_t pad_d, pad_h, pad_w;
  int32_t slab_planes, slabs;
  int32_t segments;
  int32_t strip_rows, strips;
  int32_t halo_planes, halo_columns;  // zero for the filter's gradient
};

// T, R, S are the filter's extents. Slabs of at most slab_planes planes.
inline BackwardGeometry backward_geometry(int32_t D, int32_t H, int32_t W, int32_t K, int32_t T,
                                          int32_t R, int32_t S, int32_t pad_d, int32_t pad_h,
                                          int32_t pad_w, int32_t slab_planes, int32_t strip_rows,
                                          bool input_gradient) {
  BackwardGeometry g{};
  g.D = D, g.H = H, g.W = W, g.K = K;
  g.Z = D + 2 * pad_d - T + 1, g.P = H + 2 * pad_h - R + 1, g.Q = W + 2 * pad_w - S + 1;
  g.pad_d = pad_d, g.pad_h = pad_h, g.pad_w = pad_w;
  g.halo_planes = input_gradient ? T - 1 : 0;
  g.halo_columns = input_gradient ? S - 1 : 0;
  const int32_t planes = g.Z + g.halo_planes;
  const int32_t wanted = (planes + slab_planes - 1) / slab_planes;
  g.slab_planes = (planes + wanted - 1) / wanted;
  g.slabs = (planes + g.slab_planes - 1) / g.slab_planes;
  const int32_t columns = kBackwardColumns - g.halo_columns;
  g.segments = (window_larger(g.Q, 1) + columns - 1) / columns;
  g.strip_rows = strip_rows;
  g.strips = (g.P + (input_gradient ? R - 1 : 0) + strip_rows - 1) / strip_rows;
  return g;
}

CONVNORMPOOL_HOST_DEVICE int32_t backward_pieces(const BackwardGeometry& g) {
  return g.slabs * g.segments;
}

// Output planes z .. z + planes - 1 of which the first own_plane belong to the slab before, output
// columns q .. q + 31 of which the first own_column belong to the segment before.
struct BackwardPiece {
  int32_t z, planes, own_plane;
  int32_t q, own_column;
};

CONVNORMPOOL_HOST_DEVICE BackwardPiece backward_piece(const BackwardGeometry& g, int32_t index) {
  BackwardPiece piece;
  const int32_t slab = index / g.segments, segment = index - slab * g.segments;
  const int32_t first = slab * g.slab_planes;
  piece.own_plane = window_smaller(first, g.halo_planes);
  piece.z = first - piece.own_plane;
  piece.planes = window_smaller(first + g.slab_planes, g.Z) - piece.z;
  piece.q = segment * (kBackwardColumns - g.halo_columns);
  piece.own_column = segment > 0 ? g.halo_columns : 0;
  return piece;
}

// The walk of a block: samples and pieces in turn, strips, steps. Step s of a strip is the input
// plane z - pad_d + s; it ends output plane z + s - (T - 1) of it, and it is the input plane whose
// gradient output planes z + s - (T - 1) .. z + s add up to.
struct BackwardCursor {
  int32_t sample, index, strip, step;
  BackwardPiece piece;

  CONVNORMPOOL_HOST_DEVICE void begin(const BackwardGeometry& g, int32_t worker) {
    const int32_t pieces = backward_pieces(g);
    sample = worker / pieces, index = worker - sample * pieces;
    strip = 0, step = 0;
    piece = backward_piece(g, index);
  }
  // Work item `worker` and every `workers`-th after it.
  CONVNORMPOOL_HOST_DEVICE void next(const BackwardGeometry& g, const WindowStride& stride,
                                     int32_t taps) {
    if (++step < piece.planes + taps - 1) return;
    step = 0;
    if (++strip < g.strips) return;
    strip = 0;
    stride.next(sample, index);
    piece = backward_piece(g, index);
  }
  CONVNORMPOOL_HOST_DEVICE bool first() const { return step == 0; }
  // The input plane of this step.
  CONVNORMPOOL_HOST_DEVICE int32_t plane(const BackwardGeometry& g) const {
    return piece.z - g.pad_d + step;
  }
  CONVNORMPOOL_HOST_DEVICE bool inside(const BackwardGeometry& g) const {
    return plane(g) >= 0 && plane(g) < g.D;
  }
  // Whether this piece is the one that writes the gradient of the step's input plane.
  CONVNORMPOOL_HOST_DEVICE bool owns_plane(const BackwardGeometry& g) const {
    const int32_t own = piece.own_plane;
    return inside(g) && step >= own && step < own + g.slab_planes;
  }
};

// ---- an input plane in shared memory
//
// Rows (channel, kh) of the strip's row stand in units of four. A unit of column c is 16 bytes:
// rows 4u .. 4u + 3 of column c and then the same of column c + 1, so it is a row of eight taps
// (kw, kh) of an 8 x 8 matrix that ldmatrix takes, plain for the recomputation (taps along the
// products' depth) and transposed for the filter's gradient (outputs along the depth).
//
// Output 4n + t of the segment is column n of tile t. Its taps (kw, kw + 1) are the unit of column
// 4n + t + kw, and those of all n stand one after another.
constexpr int32_t kBackwardSlots = 36;  // columns of a plane
CONVNORMPOOL_HOST_DEVICE constexpr int32_t backward_slot(int32_t column) {
  return column % 4 * (kBackwardSlots / 4) + column / 4;
}

// ---- a plane of output gradients in shared memory
//
// Tile t is 256 bytes: a row of 16 bytes for each of 16 channels, with outputs 4n + t for n = 0..7.
// It is half an A fragment of the filter's gradient (plain) and a B fragment of the input's
// (transposed).
constexpr int32_t kBackwardTileBytes = 256;
constexpr int32_t kBackwardTiles = 4;

}  // namespace convnormpool
