// Which problems the Hopper window kernel takes, and how it cuts a sample: plain C++, asked by the
// planner and by the launch, so that both go by the same numbers.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "activation.h"
#include "problem.h"

namespace convnormpool {

// Its tensor copies take rows and addresses that are multiples of this many bytes.
constexpr int64_t kWgmmaAlignment = 16;
// Columns of a tile; a piece is an output row, in all its depths, within one tile.
constexpr int64_t kWgmmaTileColumns = 32;

// The output column, at most 0, where the first tile begins: where its box does at a multiple of
// `step` columns.
constexpr int64_t wgmma_first_column(int64_t padding, int64_t step) {
  return padding - (padding + step - 1) / step * step;
}

constexpr int64_t wgmma_column_tiles(int64_t columns, int64_t first) {
  return (columns - first + kWgmmaTileColumns - 1) / kWgmmaTileColumns;
}

// How many columns of a tile are outputs, of `columns` and where the first begins at `first`.
CONVNORMPOOL_HOST_DEVICE int32_t wgmma_tile_columns(int32_t columns, int32_t first, int32_t tile) {
  constexpr int32_t kColumns = static_cast<int32_t>(kWgmmaTileColumns);
  const int32_t begin = first + kColumns * tile, end = begin + kColumns;
  return (end < columns ? end : columns) - (begin < 0 ? 0 : begin);
}

inline int64_t wgmma_column_tiles(const Problem& p) {
  const int64_t step = kWgmmaAlignment / element_size(p.dtype);
  return wgmma_column_tiles(p.Q(), wgmma_first_column(p.padding[2], step));
}

inline int64_t wgmma_pieces(const Problem& p) { return p.P() * wgmma_column_tiles(p); }

// The compute capability whose kernel it is: the instructions exist on no other.
constexpr bool wgmma_device(int32_t major, int32_t minor) { return major == 9 && minor == 0; }

inline bool has_filter(const Problem& p, int64_t extent, int64_t channels) {
  return p.T == extent && p.R == extent && p.S == extent && p.C == channels;
}

// The filters that kernels of their own are compiled for.
inline bool compiled_filter(const Problem& p) {
  return has_filter(p, 4, 3) || has_filter(p, 3, 1) || has_filter(p, 3, 3);
}
inline std::string compiled_filters_of(const std::string& kernels) {
  return kernels + " are compiled for filters 4x4x4 over 3 input channels and 3x3x3 over 1 or 3";
}

// Why it does not take a problem that the window kernels take (window_refusal); empty if it does.
// compiled: the build has code for sm_90a.
inline std::string wgmma_refusal(const Problem& p, bool compiled) {
  if (!compiled) return "this build has no code for sm_90a; add 9.0a to TORCH_CUDA_ARCH_LIST";
  if (!compiled_filter(p)) return compiled_filters_of("the wgmma kernels");
  const int64_t row = p.W * element_size(p.dtype);
  if (row % kWgmmaAlignment != 0) {
    return "the wgmma kernel takes rows of x of a multiple of 16 bytes, and here they have " +
           std::to_string(row);
  }
  // An item is four rows of a tile, or what is left of a sample's rows. What window_refusal lets
  // pass keeps the counts of one sample within 32 bits.
  constexpr int64_t kMostItems = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostStride = int64_t{1} << 40;  // of a tensor copy
  const int64_t sample_items = wgmma_column_tiles(p) * (p.P() / 4 + 1);
  const int64_t plane = p.H * row;
  if (p.N > kMostItems / sample_items || plane >= kMostStride ||
      p.C * p.D > kMostStride / plane - 1) {
    return "the problem's extents are beyond the wgmma kernel's counts";
  }
  return "";
}

}  // namespace convnormpool
