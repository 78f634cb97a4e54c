// Which problems the Hopper kernels of the gradients take, and what memory they need: plain C++,
// asked by the planner and by the launch, so that both go by the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/conv_activation_moments_wgmma_plan.h"
#include "problem.h"

namespace convnormpool {

// Of a block of the filter's gradient, each of which has sums of its own.
constexpr int64_t wgmma_filter_warpgroups(bool split) { return split ? 2 : 3; }

// Likewise of the filter's gradient with both operands in shared memory, which is for hardswish and
// operands of one part.
constexpr int64_t kWgmmaFilterAloneWarpgroups = 3;

// Of a block of both gradients at once, likewise.
constexpr int64_t kWgmmaBothWarpgroups = 2;

// At least so many columns and planes lie between neighbouring pieces of the input's gradient.
constexpr int64_t kWgmmaInputLeastColumns = 24, kWgmmaInputLeastPlanes = 10;

// At most so many pieces of a sample for the input's gradient.
inline int64_t wgmma_input_most_pieces(const Problem& p) {
  return ((p.Z() + p.T) / kWgmmaInputLeastPlanes + 2) * (p.W / kWgmmaInputLeastColumns + 2);
}

// At most so many sums of a filter's gradient that the kernel of both leaves for each tile of
// output channels. With split operands a block takes one piece at a time instead of two.
inline int64_t wgmma_both_most_sums(const Problem& p, int32_t sm_count, bool split) {
  const int64_t pieces = p.N * wgmma_input_most_pieces(p);
  const int64_t at_once = split ? 1 : kWgmmaBothWarpgroups;
  return std::min<int64_t>((pieces + at_once - 1) / at_once, sm_count) * kWgmmaBothWarpgroups;
}

// Why they do not take a problem that the backward window kernels take (backward_refusal); empty
// if they do.
inline std::string wgmma_backward_refusal(const Problem& p, bool compiled) {
  const std::string refusal = wgmma_refusal(p, compiled);
  if (!refusal.empty()) return refusal;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (p.N > kMost / wgmma_input_most_pieces(p) || p.H * p.W > kMost ||
      p.N > kMost / ((p.P() + 3) * wgmma_column_tiles(p))) {
    return "the problem's extents are beyond the counts of the gradients by wgmma";
  }
  return "";
}

// Blocks of the filter's gradient for each tile of 16 output channels: an item is four rows of a
// tile of columns. The sums over blocks are in their order, so the gradient depends on the
// device's number of SMs, and on nothing else but the problem.
inline int64_t wgmma_filter_blocks(const Problem& p, int32_t sm_count) {
  const int64_t items = p.N * wgmma_column_tiles(p) * ((p.P() + 3) / 4);
  return std::min(items, std::max<int64_t>(1, sm_count / ((p.K + 15) / 16)));
}

// Its kernel for hardswish: the output rows of all samples follow each other, and fours of them are
// an item, in a tile of columns. Fewer than three rows are filled up to four, so that an item has
// rows of two samples at most.
CONVNORMPOOL_HOST_DEVICE int32_t wgmma_sample_rows(int32_t rows) { return rows < 3 ? 4 : rows; }

inline int64_t wgmma_filter_alone_blocks(const Problem& p, int32_t sm_count) {
  const int64_t rows = p.N * wgmma_sample_rows(static_cast<int32_t>(p.P()));
  return std::min<int64_t>(wgmma_column_tiles(p) * ((rows + 3) / 4), sm_count);
}

// At most so many sums for each tile of output channels, whatever the activation.
inline int64_t wgmma_filter_most_sums(const Problem& p, int32_t sm_count, bool split) {
  const int64_t sums = wgmma_filter_blocks(p, sm_count) * wgmma_filter_warpgroups(split);
  if (split) return sums;
  return std::max(sums, wgmma_filter_alone_blocks(p, sm_count) * kWgmmaFilterAloneWarpgroups);
}

}  // namespace convnormpool
