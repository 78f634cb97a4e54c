// The kernel of _to_channels_last_out: (N, C, positions) to (N, positions, C), by element size.
//
// A block moves a tile of channels times positions through shared memory: reads run along
// positions, writes along channels and, where the tile holds all channels, on through the next
// position. Elements of one or two bytes travel in units of four where their places allow it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/grid.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

constexpr int kTransposeThreads = 256;
// Bytes of a tile, without the padding of its rows.
constexpr int kTransposeTileBytes = 32768;
constexpr int kTransposeTilePadding = 2048;
constexpr int kTransposeUnitBytes = 4;
constexpr int kTransposeUnroll = 8;

// The tile: `channels` of C, 2^positions_log2 positions, rows of `pitch` elements in shared memory.
struct TransposeTile {
  int channels;
  int positions_log2;
  int pitch;
  int64_t channel_tiles, position_tiles;
};

// For 32 lanes that read a tile along channels, channel c at position p lies in bank
// c · pitch + p, counted in units: with an odd pitch a full run of channels meets every bank once;
// a short run of fewer than 32 channels covers ceil(32 / channels) positions, and a pitch of that
// many banks keeps the channels apart.
inline TransposeTile transpose_tile(int64_t C, int64_t positions, int element_size) {
  const int unit = element_size < kTransposeUnitBytes ? kTransposeUnitBytes / element_size : 1;
  const int64_t elements = kTransposeTileBytes / (element_size < 4 ? 4 : element_size);
  const int64_t channel_tiles = (C + 63) / 64;
  const int channels = static_cast<int>((C + channel_tiles - 1) / channel_tiles);
  int log2 = 5;
  while ((int64_t{channels} << (log2 + 1)) <= elements && (int64_t{1} << log2) < positions) ++log2;
  const int banks = channels >= 32 ? 1 : (32 + channels - 1) / channels;
  const int pitch = (1 << log2) + banks * unit;
  return {channels, log2, pitch, channel_tiles, (positions + (1 << log2) - 1) >> log2};
}

// What an element of kSize bytes is moved as.
template <int kSize>
struct Element;
template <>
struct Element<1> {
  using Type = uint8_t;
};
template <>
struct Element<2> {
  using Type = uint16_t;
};
template <>
struct Element<4> {
  using Type = uint32_t;
};
template <>
struct Element<8> {
  using Type = uint2;
};

// Reads the tile, `columns` of its positions and `rows` of its channels, into shared memory; kUnit
// neighbouring positions at a time.
template <int kUnit, typename T>
__device__ __forceinline__ void read_tile(const T* x, int64_t positions, const TransposeTile& tile,
                                          int rows, int columns, T* shared) {
  // A row's columns in units are a power of two, so a shift finds the place.
  const int log2 = tile.positions_log2 - (kUnit == 4 ? 2 : kUnit == 2 ? 1 : 0);
  const int total = rows << log2;
  for (int first = threadIdx.x; first < total; first += kTransposeThreads * kTransposeUnroll) {
    T values[kTransposeUnroll][kUnit];
#pragma unroll
    for (int u = 0; u < kTransposeUnroll; ++u) {
      const int index = first + u * kTransposeThreads;
      const int row = index >> log2;
      const int column = (index & ((1 << log2) - 1)) * kUnit;
      if (index < total && column < columns) {
        load_vector<kUnit>(x + row * positions + column, values[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kTransposeUnroll; ++u) {
      const int index = first + u * kTransposeThreads;
      const int row = index >> log2;
      const int column = (index & ((1 << log2) - 1)) * kUnit;
      if (index < total && column < columns) {
        store_vector<kUnit>(values[u], shared + row * tile.pitch + column);
      }
    }
  }
}

// Writes the tile: `rows` channels of each of `columns` positions, kUnit neighbours of the output
// at a time; where rows is C these may go on into the next position.
template <int kUnit, typename T>
__device__ __forceinline__ void write_tile(T* out, int64_t C, const TransposeTile& tile, int rows,
                                           int columns, const T* shared) {
  const int total = rows * columns;
  const int step_columns = kTransposeThreads * kUnit / rows;
  const int step_rows = kTransposeThreads * kUnit - step_columns * rows;
  int column = static_cast<int>(threadIdx.x) * kUnit / rows;
  int row = static_cast<int>(threadIdx.x) * kUnit - column * rows;
  for (int index = threadIdx.x * kUnit; index < total; index += kTransposeThreads * kUnit) {
    T values[kUnit];
    int r = row, c = column;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values[i] = shared[r * tile.pitch + c];
      if (++r == rows) {
        r = 0;
        ++c;
      }
    }
    store_vector<kUnit>(values, out + column * C + row);
    row += step_rows;
    column += step_columns;
    if (row >= rows) {
      row -= rows;
      ++column;
    }
  }
}

// Grid (position tiles · channel tiles, samples). wide_in and wide_out say that every unit read and
// written is aligned and whole.
template <int kSize>
__global__ void __launch_bounds__(kTransposeThreads)
    to_channels_last_kernel(const void* x, void* out, int64_t samples, int64_t C, int64_t positions,
                            TransposeTile tile, bool wide_in, bool wide_out) {
  using T = typename Element<kSize>::Type;
  constexpr int kUnit = kSize < kTransposeUnitBytes ? kTransposeUnitBytes / kSize : 1;
  __shared__ __align__(16)
      T shared[(kTransposeTileBytes + kTransposeTilePadding) / (kSize < 4 ? 4 : kSize)];
  const int64_t sample = grid_row();
  if (sample >= samples) return;
  const unsigned position_tiles = static_cast<unsigned>(tile.position_tiles);
  const int64_t channel = static_cast<int64_t>(blockIdx.x / position_tiles) * tile.channels;
  const int64_t position = static_cast<int64_t>(blockIdx.x % position_tiles) << tile.positions_log2;
  const int rows = static_cast<int>(C - channel < tile.channels ? C - channel : tile.channels);
  const int64_t left = positions - position;
  const int columns =
      static_cast<int>(left < (1 << tile.positions_log2) ? left : (1 << tile.positions_log2));

  const T* source = static_cast<const T*>(x) + (sample * C + channel) * positions + position;
  if (wide_in) {
    read_tile<kUnit>(source, positions, tile, rows, columns, shared);
  } else {
    read_tile<1>(source, positions, tile, rows, columns, shared);
  }
  __syncthreads();
  T* target = static_cast<T*>(out) + (sample * positions + position) * C + channel;
  if (wide_out) {
    write_tile<kUnit>(target, C, tile, rows, columns, shared);
  } else {
    write_tile<1>(target, C, tile, rows, columns, shared);
  }
}

}  // namespace convnormpool
