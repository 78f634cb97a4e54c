// What a Hopper kernel of all gradients is compiled for and what it is told:
// conv_activation_moments_backward_wgmma_both.cuh.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_input_config.cuh"

namespace convnormpool {

// The kernel of the input's gradient with, in each warpgroup, the operands of the filter's. Without
// kInput the filter's alone.
template <WgmmaOperand kOperand, int kC, int kT, int kR, int kS, int kWarpgroups = 2,
          int kStages = kOperand == WgmmaOperand::kTf32 ? 3 : 4, bool kInput = true>
struct WgmmaBothConfig : WgmmaInputConfig<kOperand, kC, kT, kR, kS, kWarpgroups, kStages, kInput> {
  using Input = WgmmaInputConfig<kOperand, kC, kT, kR, kS, kWarpgroups, kStages, kInput>;
  static_assert(!Input::kSplit, "one part");
  static_assert(kR >= 3 && kS >= 3, "the stored windows");
  static constexpr int kTaps = kC * kT * kR * kS;
  static constexpr int kMostPlanes = 16;  // of a slab

  // Steps whose operands are kept: a plane of x waits for the last dy that it meets.
  static constexpr int kSlots = kT + 1;
  // dy: for each row, tile and half of a tile's positions the planes, and of each the two halves of
  // the channels as core matrices. The newest plane is first, and the first kT - 1 places stand
  // once more at the end, so that the planes that meet one of x are always neighbours.
  static constexpr int kPlaceBytes = 256;
  static constexpr int kHalfBytes = (kSlots + kT - 1) * kPlaceBytes;
  static constexpr int kTileBytes = 2 * kHalfBytes;
  static constexpr int kGradientBytes = 8 * kTileBytes;
  // x: a span is two neighbouring rows of a channel, for j = 0 .. 6 column j of all blocks of both.
  // A row of outputs finds the taps of kw = 0 .. 3 from its column on, which is a core matrix of B.
  // Its spans, of two pairs of rows times kC channels, are kSpanStep apart. Of one sample the pairs
  // are stored once, those from an even row on before those from an odd one. Where rows may be of
  // two samples each has both of its own, in turn with the next row's: so the stores of a matrix,
  // whose rows are in both pairs, are free of bank conflicts.
  static constexpr int kColumnBytes = 32;
  static constexpr int kSpanBytes = 7 * kColumnBytes;
  static constexpr int kSpanStep = kInput ? kSpanBytes : 2 * kSpanBytes;
  static constexpr int kPairBytes = kC * kSpanStep;
  static constexpr int kPlaneBytes = (kInput ? 6 : 8) * kC * kSpanBytes;
  // Where the spans of a row's first pair begin, or of its second.
  static __host__ __device__ constexpr int pair_offset(int row, int pair) {
    return kInput ? (row % 2 * 3 + row / 2 + pair) * kPairBytes
                  : row / 2 * 2 * kPairBytes + row % 2 * kSpanBytes + pair * kPairBytes;
  }

  // Stages that are filled at once.
  static constexpr int kRefill = kT % 2 == 0 ? 2 : 1;

  // Of a warpgroup: each warp's largest magnitude in a plane, by phase; where planes are stored
  // that nobody reads or, without kInput, what masks the columns; operands.
  static constexpr int kUnreadOffset = 128;
  static constexpr int kUnreadBytes = kInput ? (kPairBytes + 127) / 128 * 128 : 256;
  static constexpr int kGradientOffset = kUnreadOffset + kUnreadBytes;
  static constexpr int kPlaneOffset = kGradientOffset + kGradientBytes;
  static constexpr int kFilterBytes = kPlaneOffset + kSlots * kPlaneBytes;
  static constexpr int kFilterOffset = Input::kCarryOffset;
  static constexpr int kCarryOffset = kFilterOffset + kWarpgroups * kFilterBytes;
  static_assert(kT * 16 <= kUnreadOffset, "the words");
  static_assert(kFilterBytes % 16 == 0 && kPlaneBytes % 16 == 0, "matrices");
  static constexpr int kMostSharedBytes =
      kCarryOffset + kWarpgroups * kMostPlanes * Input::kCarryBytes;
  static_assert(kMostSharedBytes <= 227 * 1024, "shared memory of a block");
};

// Padding is below the filter's extents (window_refusal), so that the boxes of x under dx see all
// outputs.
struct WgmmaBothParams : WgmmaInputParams {
  float* filter_partial;  // (channel tiles, blocks, warpgroups, 16, C T R S)
  float* bias_partial;    // (channel tiles, blocks, warpgroups, warps, 16)
};

}  // namespace convnormpool
