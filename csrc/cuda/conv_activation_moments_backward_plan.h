// Which backward window kernel takes a problem, how it cuts a sample and what memory it needs:
// plain C++, asked by the planner and by the launch, so that both go by the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv_activation_moments_backward_map.h"
#include "cuda/conv_activation_moments_backward_wgmma_plan.h"
#include "cuda/conv_activation_moments_plan.h"
#include "problem.h"

namespace convnormpool {

// Planes of a slab: what a strip leaves to the next is kept for each of them, for the input's
// gradient.
constexpr int32_t kBackwardSlabPlanes = 16;
constexpr int32_t kBackwardFilterSlabPlanes = kWindowSlabPlanes;

// Warps of a block for rows and for the filter's gradient, and blocks on an SM.
struct BackwardWarps {
  int32_t rows, filter, blocks_per_sm;
};

// Either gradient has its own kernel. Of what was timed on an H200 (benchmarks/NOTES.md) these were
// fastest, but for {2, 1, 4}: with three blocks, not timed, what is left of the kernels spills
// less.
constexpr BackwardWarps backward_warps(bool split, bool input_gradient) {
  if (input_gradient) return {4, 0, 2};
  return split ? BackwardWarps{4, 4, 1} : BackwardWarps{2, 1, 3};
}

inline bool backward_is_split(const Problem& p) {
  return p.dtype == DType::kFloat32 && p.precision == Precision::kIeee;
}

// Tiles of output channels: the filter's gradient has blocks for each, the input's a launch, all of
// which add up.
inline int64_t backward_tiles(const Problem& p) { return (p.K + 15) / 16; }

inline BackwardGeometry backward_geometry_of(const Problem& p, bool input_gradient) {
  const auto narrow = [](int64_t extent) { return static_cast<int32_t>(extent); };
  return backward_geometry(
      narrow(p.D), narrow(p.H), narrow(p.W), narrow(p.K), narrow(p.T), narrow(p.R), narrow(p.S),
      narrow(p.padding[0]), narrow(p.padding[1]), narrow(p.padding[2]),
      input_gradient ? kBackwardSlabPlanes : kBackwardFilterSlabPlanes,
      backward_warps(backward_is_split(p), input_gradient).rows, input_gradient);
}

// Blocks of a launch, for each tile of output channels. The sums over blocks are in their order,
// so filter gradients depend on the device's number of SMs, and on nothing else but the problem.
inline int64_t backward_blocks(const Problem& p, int32_t sm_count, bool input_gradient) {
  const BackwardWarps warps = backward_warps(backward_is_split(p), input_gradient);
  const int64_t side_by_side = input_gradient ? 1 : backward_tiles(p);
  const int64_t room = std::max<int64_t>(1, sm_count * warps.blocks_per_sm / side_by_side);
  return std::min(p.N * backward_pieces(backward_geometry_of(p, input_gradient)), room);
}

// Sums of a filter's gradient, and of a bias's, that each tile of channels leaves in memory; those
// by wgmma at most.
struct BackwardSums {
  int64_t filter, bias;
};

inline BackwardSums backward_sums(const Problem& p, int32_t sm_count, bool wgmma) {
  const bool split = backward_is_split(p);
  if (wgmma) {
    const int64_t groups = wgmma_filter_most_sums(p, sm_count, split);
    return {groups, groups * 4};  // of each warp
  }
  const BackwardWarps warps = backward_warps(split, false);
  const int64_t blocks = backward_blocks(p, sm_count, false);
  return {blocks * warps.filter, blocks * warps.rows};
}

// Floats of workspace, in this order: dx in float where it is rounded to 16 bits after more than
// one launch, the sums for w, those for the bias.
struct BackwardWorkspace {
  int64_t dx_sum, filter, bias;
  int64_t total() const { return dx_sum + filter + bias; }
};

inline BackwardWorkspace backward_workspace(const Problem& p, int32_t sm_count, bool wgmma,
                                            bool input_gradient, bool filter_gradient) {
  BackwardWorkspace floats{};
  if (p.N == 0 || p.K == 0) return floats;
  if (input_gradient && backward_tiles(p) > 1 && p.dtype != DType::kFloat32) {
    floats.dx_sum = p.N * p.C * p.D * p.H * p.W;
  }
  if (filter_gradient) {
    BackwardSums sums = backward_sums(p, sm_count, wgmma);
    if (wgmma && input_gradient) {
      const int64_t both = wgmma_both_most_sums(p, sm_count, backward_is_split(p));
      sums = {std::max(sums.filter, both), std::max(sums.bias, both * 4)};
    }
    floats.filter = backward_tiles(p) * sums.filter * 16 * p.C * p.T * p.R * p.S;
    floats.bias = backward_tiles(p) * sums.bias * 16;
  }
  return floats;
}

// Why no backward window kernel takes a problem that a forward one takes, on a device of compute
// capability major.minor; empty if one does.
inline std::string backward_refusal(const Problem& p, int32_t major, int32_t minor) {
  const std::string refusal = window_refusal(p, major, minor);
  if (!refusal.empty()) return refusal;
  if (!compiled_filter(p)) return compiled_filters_of("the fused gradients");
  if (!(major == 9 || (major == 10 && minor <= 3))) {
    return "the fused gradients need the shared memory of compute capability 9.0 or 10.0";
  }
  return "";
}

}  // namespace convnormpool
