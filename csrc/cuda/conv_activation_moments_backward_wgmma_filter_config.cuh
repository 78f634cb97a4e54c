// What the Hopper kernel of the gradients of filter and bias is compiled for, and its parameters:
// conv_activation_moments_backward_wgmma_filter.cuh.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_config.cuh"

namespace convnormpool {

// Shared memory of the filter's gradient: a row for stores that nobody reads, words of each
// warpgroup, and its rings.
template <WgmmaOperand kOperand, int kC, int kT>
struct WgmmaFilterLayout {
  static constexpr int kParts = kOperand == WgmmaOperand::kSplit ? 2 : 1;
  static constexpr int kSlots = kT + 1;
  static constexpr int kRowBytes = kC * 4 * 16;
  static constexpr int kChunkBytes = 7 * kRowBytes;
  static constexpr int kInputPartBytes = 4 * kChunkBytes;
  static constexpr int kInputBytes = kParts * kInputPartBytes;
  static constexpr int kGradientRowBytes = kParts * 1024;
  static constexpr int kGradientBytes = 4 * kGradientRowBytes;
  static constexpr int kUnreadBytes = 128, kWordBytes = 128;
  static constexpr int kWarpgroupBytes = kWordBytes + kSlots * (kInputBytes + kGradientBytes);
};

template <WgmmaOperand kOperand, int kC, int kT, int kR, int kS,
          WgmmaOverlap kOverlap = WgmmaOverlap::kFree,
          int kWarpgroups = kOperand == WgmmaOperand::kSplit ? 2 : 3,
          int kStages = kOperand == WgmmaOperand::kSplit ? 3 : 4>
struct WgmmaFilterConfig
    : WgmmaBackwardConfig<kOperand, kC, kT, kR, kS, kOverlap, kWarpgroups, kStages,
                          WgmmaFilterLayout<kOperand, kC, kT>::kUnreadBytes +
                              kWarpgroups * WgmmaFilterLayout<kOperand, kC, kT>::kWarpgroupBytes>,
      WgmmaFilterLayout<kOperand, kC, kT> {
  static_assert(kR >= 3, "rows 0 and 3 of the outputs see all of the input's");
  using WgmmaFilterLayout<kOperand, kC, kT>::kParts;
  static_assert(WgmmaFilterConfig::kSharedBytes <= 227 * 1024, "shared memory of a block");
  static constexpr int kTaps = kC * kT * kR * kS;
};

struct WgmmaFilterParams : WgmmaBackwardParams {
  float* filter_partial;  // (channel tiles, blocks, warpgroups, 16, C T R S)
  float* bias_partial;    // (channel tiles, blocks, warpgroups, warps, 16)
};

}  // namespace convnormpool
