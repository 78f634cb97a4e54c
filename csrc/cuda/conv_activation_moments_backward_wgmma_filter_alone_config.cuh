// What the Hopper kernel of the filter's gradient alone is compiled for and what it is told:
// conv_activation_moments_backward_wgmma_filter_alone.cuh.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_both_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_plan.h"

namespace convnormpool {

template <WgmmaOperand kOperand, int kC, int kT, int kR, int kS,
          int kWarpgroups = int(kWgmmaFilterAloneWarpgroups),
          int kStages = kOperand == WgmmaOperand::kTf32 ? 2 : 3>
using WgmmaFilterAloneConfig =
    WgmmaBothConfig<kOperand, kC, kT, kR, kS, kWarpgroups, kStages, false>;

// As wgmma_input_params, but whole samples, in segments that don't overlap; the quads are those of
// a segment of all samples.
template <class Config>
WgmmaInputParams wgmma_filter_alone_params(const Problem& problem) {
  const int most_planes = int(problem.Z()) + 4 * Config::kT + Config::kStages;
  WgmmaInputParams p = wgmma_input_params<Config>(problem, most_planes);
  p.segments = int(wgmma_column_tiles(p.Q, p.first_column));
  p.quads = int((int64_t(p.N) * wgmma_sample_rows(p.P) + 3) / 4);
  return p;
}

}  // namespace convnormpool
