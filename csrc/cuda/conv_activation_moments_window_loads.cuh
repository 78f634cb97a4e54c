// The loads of the portable window kernel (conv_activation_moments_window.cuh): the planes of a
// warp's pieces one after the other, into a ring in shared memory or into registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/conv_activation_moments_window_map.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace convnormpool {

namespace window {

// Where the loads of a piece begin, and how many planes it has.
template <class Config>
struct LoadedPiece {
  const unsigned char* plane;  // the first staged element of the next plane to load
  int planes;                  // so many of the piece are left, this one among them
  int depth;                   // outside the input it stands for padding
  uint32_t live_rows;          // bit kh: that row is inside the input
  int first_column;            // of the staged columns

  LoadedPiece() = default;
  __device__ __forceinline__ LoadedPiece(const WindowParameters& p, const WindowCursor& at) {
    const WindowGeometry& s = p.geometry;
    const WindowPiece piece = window_piece(s, at);
    planes = piece.planes + Config::T - 1;
    depth = piece.z - s.pad_d;
    const int h = piece.p - (Config::kGeneral ? s.pad_h : 0);
    live_rows = 0;
    for (int kh = 0; kh < Config::R; ++kh) {
      live_rows |= static_cast<uint32_t>(h + kh >= 0 && h + kh < s.H) << kh;
    }
    first_column = Config::kGeneral ? piece.q - s.pad_w : 0;
    plane = reinterpret_cast<const unsigned char*>(
        static_cast<const typename Config::Raw*>(p.x) +
        ((static_cast<int64_t>(at.sample) * Config::C * s.D + depth) * s.H + h) * s.W +
        first_column);
  }
};

// The planes that a warp loads, in order: those of a piece by depth, then those of its next piece,
// which follows() has named before the first of them.
template <class Config>
struct Loader {
  using Raw = typename Config::Raw;

  LoadedPiece<Config> now;
  // The piece after it: found in advance where code for it at every load would be longer than the
  // rest of a plane's.
  std::conditional_t<Config::kRing, LoadedPiece<Config>, WindowCursor> following;
  uint32_t lane_bytes;                               // from `plane` to the lane's first element
  int64_t row_stride, channel_stride, plane_stride;  // in bytes

  __device__ __forceinline__ Loader(const WindowParameters& p, const WindowCursor& first, int lane)
      : now(p, first),
        following(),
        row_stride(static_cast<int64_t>(sizeof(Raw)) * p.geometry.W),
        channel_stride(row_stride * p.geometry.H * p.geometry.D),
        plane_stride(row_stride * p.geometry.H) {
    if constexpr (Config::kNarrow) {
      lane_bytes = static_cast<uint32_t>(lane / 16 * row_stride + lane % 16 * Config::kPairBytes);
    } else {
      lane_bytes = static_cast<uint32_t>(lane) * (Config::kRing ? 16 : sizeof(Raw));
    }
  }

  // The piece after the one that is multiplied; behind the last of all its planes are read again.
  __device__ __forceinline__ void follows(const WindowParameters& p, const WindowCursor& at) {
    if constexpr (Config::kRing) {
      following = at.sample < p.N ? LoadedPiece<Config>(p, at) : now;
    } else {
      following = at;
    }
  }

  // To be called before each load.
  __device__ __forceinline__ void enter_piece(const WindowParameters& p) {
    if (now.planes > 0) return;
    if constexpr (Config::kRing) {
      now = following;
    } else if (following.sample < p.N) {
      now = LoadedPiece<Config>(p, following);
    }
  }

  // So many planes from this one on are of one piece and in the input.
  __device__ __forceinline__ int inside(const WindowGeometry& s) const {
    return exists(s) ? min(now.planes, s.D - now.depth) : 0;
  }

  __device__ __forceinline__ bool exists(const WindowGeometry& s) const {
    return static_cast<uint32_t>(now.depth) < static_cast<uint32_t>(s.D);
  }

  // The lane's element of a row.
  __device__ __forceinline__ const Raw* row(int index) const {
    const int64_t distance = index / Config::R * channel_stride + index % Config::R * row_stride;
    return reinterpret_cast<const Raw*>(now.plane + lane_bytes + distance);
  }
};

// A plane in registers: the lane's column of every row and its share of the columns from the 32nd
// on.
template <class Config>
struct RawPlane {
  typename Config::Raw row[Config::kRing ? 1 : Config::kRows];
  typename Config::Raw extra[Config::kExtras > 0 ? Config::kExtras : 1];
};

template <class Config>
__device__ __forceinline__ void load_plane(const Loader<Config>& from, const WindowGeometry& s,
                                           int lane, RawPlane<Config>& raw) {
  const int column = from.now.first_column + lane;
  const bool exists = from.exists(s);
  const bool live_column = column >= 0 && column < s.W && lane < Config::kStagedColumns && exists;
#pragma unroll
  for (int row = 0; row < (Config::kRing ? 0 : Config::kRows); ++row) {
    const bool live = live_column && (from.now.live_rows >> row % Config::R & 1);
    raw.row[row] = load_if(live, from.row(row));
  }
#pragma unroll
  for (int i = 0; i < Config::kExtras; ++i) {
    const int e = lane + 32 * i, row = e / Config::kExtraDivisor;
    const int beyond = 32 + e % Config::kExtraDivisor;
    const bool live = row < Config::kRows && from.now.first_column + beyond < s.W && exists;
    raw.extra[i] = load_if(live && (from.now.live_rows >> row % Config::R & 1),
                           from.row(row) + (beyond - lane));
  }
}

// A plane into the ring, or zeros if it is none of the input's. Columns from W on stay zero.
template <class Config>
__device__ __forceinline__ void copy_plane(const Loader<Config>& from, bool exists, int lane, int W,
                                           unsigned char* to) {
  constexpr int kChunks = Config::R * Config::kRowChunks;  // of a channel
  if constexpr (Config::kNarrow) {
    static_assert(Config::R % 2 == 0, "two rows of a channel");
    to += lane / 16 * Config::kRowBytes + lane % 16 * Config::kPairBytes;
    if (lane % 16 * 2 < W) {
#pragma unroll
      for (int row = 0; row < Config::kRows; row += 2) {
        cp_async<Config::kPairBytes>(to + row * Config::kRowBytes,
                                     from.now.plane + from.lane_bytes +
                                         row / Config::R * from.channel_stride +
                                         row % Config::R * from.row_stride,
                                     exists ? Config::kPairBytes : 0);
      }
    }
  } else if (kChunks == 32 || lane < kChunks) {
    to += lane / Config::kRowChunks * Config::kRowBytes + lane % Config::kRowChunks * 16;
#pragma unroll
    for (int channel = 0; channel < Config::C; ++channel) {
      cp_async<16>(to + channel * Config::R * Config::kRowBytes,
                   from.now.plane + from.lane_bytes + channel * from.channel_stride,
                   exists ? 16 : 0);
    }
  }
  cp_async_commit();
}

// What the ways to the products have in common.
template <class Config>
struct LoadedPlanes {
  using Raw = typename Config::Raw;

  const WindowParameters& p;
  const int lane;
  unsigned char* const shared;
  Loader<Config> loader;
  RawPlane<Config> raw;
  uint32_t slot;  // of the ring, that of the plane that is looked at next

  __device__ __forceinline__ LoadedPlanes(const WindowParameters& parameters,
                                          const WindowCursor& first, int lane_index,
                                          unsigned char* memory)
      : p(parameters),
        lane(lane_index),
        shared(memory),
        loader(parameters, first, lane_index),
        slot(0) {}

  __device__ __forceinline__ unsigned char* in_ring(uint32_t of) const {
    return shared + Config::kRingOffset + of % Config::kRingPlanes * Config::kRawBytes;
  }

  // Inside: the next plane is known to be of the same piece as the one before and in the input;
  // skip() then tells the loader afterwards how many those were.
  template <bool Inside>
  __device__ __forceinline__ void load(uint32_t into) {
    if (!Inside) loader.enter_piece(p);
    if constexpr (Config::kRing) {
      copy_plane(loader, Inside || loader.exists(p.geometry), lane, p.geometry.W, in_ring(into));
    } else {
      load_plane(loader, p.geometry, lane, raw);
    }
    if (!Inside) --loader.now.planes, ++loader.now.depth;
    loader.now.plane += loader.plane_stride;
  }
  // So many of the next planes may be loaded by Inside.
  __device__ __forceinline__ int inside() const {
    return Config::kRing ? loader.inside(p.geometry) : 0;
  }
  __device__ __forceinline__ void skip(int count) {
    loader.now.planes -= count;
    loader.now.depth += count;
  }

  // With a ring: the warp has copied the plane in `slot` and is done with the one before, whose
  // place the next load takes.
  template <bool Inside>
  __device__ __forceinline__ void turn_ring() {
    cp_async_wait<Config::kRingPlanes - 2>();
    __syncwarp();
    load<Inside>(slot + Config::kRingPlanes - 1);
  }
};

}  // namespace window

}  // namespace convnormpool
