// Which backward window kernel takes a problem, how it cuts a sample and what memory it needs:
// plain C++, asked by the planner and by the launch, so that both go by the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/conv_activation_moments_backward_map.h"
#include "cuda/conv_activation_moments_plan.h"
#include "problem.h"

namespace convnormpool {

// Planes of a slab: what a strip leaves to the next is kept for each of them, where an input
// gradient is wanted.
constexpr int32_t kBackwardSlabPlanes = 16;
constexpr int32_t kBackwardFilterSlabPlanes = kWindowSlabPlanes;

// Warps of a block for rows and for the filter's gradient, and blocks on an SM.
struct BackwardWarps {
  int32_t rows, filter, blocks_per_sm;
};

// What was fastest on an H200 at the reference workload.
constexpr BackwardWarps backward_warps(bool split, bool input_gradient, bool filter_gradient) {
  if (!filter_gradient) return {4, 0, 2};
  if (split) return input_gradient ? BackwardWarps{5, 3, 1} : BackwardWarps{4, 4, 1};
  return input_gradient ? BackwardWarps{6, 2, 1} : BackwardWarps{2, 1, 4};
}

inline bool backward_is_split(const Problem& p) {
  return p.dtype == DType::kFloat32 && p.precision == Precision::kIeee;
}

// With more than one tile of output channels dx is a sum over launches, one for each tile, and the
// filter's gradient has a launch of its own.
inline int64_t backward_tiles(const Problem& p) { return (p.K + 15) / 16; }
inline bool backward_in_one(const Problem& p, bool input_gradient, bool filter_gradient) {
  return input_gradient && filter_gradient && backward_tiles(p) == 1;
}

inline BackwardGeometry backward_geometry_of(const Problem& p, bool input_gradient,
                                             bool filter_gradient) {
  const auto narrow = [](int64_t extent) { return static_cast<int32_t>(extent); };
  return backward_geometry(
      narrow(p.D), narrow(p.H), narrow(p.W), narrow(p.K), narrow(p.T), narrow(p.R), narrow(p.S),
      narrow(p.padding[0]), narrow(p.padding[1]), narrow(p.padding[2]),
      input_gradient ? kBackwardSlabPlanes : kBackwardFilterSlabPlanes,
      backward_warps(backward_is_split(p), input_gradient, filter_gradient).rows, input_gradient);
}

// Blocks of a launch, for each tile of output channels. The sums over blocks are in their order,
// so filter gradients depend on the device's number of SMs, and on nothing else but the problem.
inline int64_t backward_blocks(const Problem& p, int32_t sm_count, bool input_gradient,
                               bool filter_gradient) {
  const BackwardWarps warps = backward_warps(backward_is_split(p), input_gradient, filter_gradient);
  const int64_t side_by_side = input_gradient ? 1 : backward_tiles(p);
  const int64_t room = std::max<int64_t>(1, sm_count * warps.blocks_per_sm / side_by_side);
  const int64_t items =
      p.N * backward_pieces(backward_geometry_of(p, input_gradient, filter_gradient));
  return std::min(items, room);
}

// Floats of workspace: the blocks' sums for w, those for the bias, and dx in float where it is
// rounded to 16 bits after more than one launch.
struct BackwardWorkspace {
  int64_t filter, bias, dx_sum;
  int64_t total() const { return filter + bias + dx_sum; }
};

inline BackwardWorkspace backward_workspace(const Problem& p, int32_t sm_count, bool input_gradient,
                                            bool filter_gradient) {
  BackwardWorkspace floats{};
  if (p.N == 0 || p.K == 0) return floats;
  if (filter_gradient) {
    const bool in_one = backward_in_one(p, input_gradient, filter_gradient);
    const BackwardWarps warps = backward_warps(backward_is_split(p), in_one, true);
    const int64_t rows = backward_tiles(p) * backward_blocks(p, sm_count, in_one, true) * 16;
    floats.filter = rows * warps.filter * p.C * p.T * p.R * p.S;
    floats.bias = rows * warps.rows;
  }
  if (input_gradient && backward_tiles(p) > 1 && p.dtype != DType::kFloat32) {
    floats.dx_sum = p.N * p.C * p.D * p.H * p.W;
  }
  return floats;
}

// Why no backward window kernel takes a problem that a forward one takes, on a device of compute
// capability major.minor; empty if one does. Those that keep both gradients of float32 in one block
// need up to 176 KiB of shared memory, the others up to 125.
inline std::string backward_refusal(const Problem& p, int32_t major, int32_t minor) {
  const std::string refusal = window_refusal(p, major);
  if (!refusal.empty()) return refusal;
  if (!(major == 9 || (major == 10 && minor <= 3))) {
    return "the fused gradients need the shared memory of compute capability 9.0 or 10.0";
  }
  return "";
}

}  // namespace convnormpool
