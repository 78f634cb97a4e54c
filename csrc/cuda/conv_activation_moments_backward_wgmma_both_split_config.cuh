// What the Hopper kernel of all gradients with split operands is compiled for:
// conv_activation_moments_backward_wgmma_both_split.cuh.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_both_config.cuh"

namespace convnormpool {

// The kernel of the input's gradient with one item for two warpgroups, and the operands of the
// filter's gradient. kWhole: items are whole samples, so that all of their dy counts for the
// filter.
template <int kC, int kT, int kR, int kS, bool kWhole_ = true, int kStages = 4>
struct WgmmaBothSplitConfig : WgmmaInputConfig<WgmmaOperand::kSplit, kC, kT, kR, kS, 1, kStages> {
  using Input = WgmmaInputConfig<WgmmaOperand::kSplit, kC, kT, kR, kS, 1, kStages>;
  using Input::kParts, Input::kSteps, Input::kTapBytes, Input::kSumBytes;
  static constexpr bool kWhole = kWhole_;
  static constexpr bool kIndexAnew = true;
  static constexpr int kTiles = 2;  // a warpgroup for each, with sums of its own
  static constexpr int kThreads = 128 * kTiles;
  static_assert(kR >= 3 && kS >= 3, "the stored windows");
  static constexpr int kTaps = kC * kT * kR * kS;

  // Weights of the recomputation, for each channel and part [kh / 2][kd][k] of (kw, kh % 2); those
  // of the input's gradient for each kw and part, whose column 8 (i / 2) + 2 kh + i % 2 is (kd,
  // ci), i = kd C + ci.
  static constexpr int kDepthBytes = kT * 256;
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kSteps * kStepBytes;
  static constexpr int kTurnedBytes = kS * kParts * kTapBytes;

  // dy: for each row, tile and half of a tile's positions the planes, and of each the two halves of
  // the channels as core matrices. The newest plane is first, and the first kT - 1 places stand
  // once more at the end, so that the planes that meet one of x are always neighbours. As many
  // places as a step stores beside the products of the step before.
  static constexpr int kPlaces = kT + 2;
  static constexpr int kPlaceBytes = 256;
  static constexpr int kHalfBytes = (kPlaces + kT - 1) * kPlaceBytes;
  static constexpr int kTileBytes = 2 * kHalfBytes;
  static constexpr int kGradientBytes = 8 * kTileBytes;  // of a part
  // Before those of a part, zeros: for each place a row, as that before the first one.
  static constexpr int kZeroRowBytes = kWhole ? kPlaces * kPlaceBytes : 0;
  static constexpr int kGradientPart = kZeroRowBytes + kGradientBytes;
  // x: a span is two neighbouring rows of a channel, for j = 0 .. 6 column j of all blocks of both,
  // as vectors of eight: of rows 2 i and 2 i + 1, and next to it of rows 2 i + 1 and 2 i + 2. The
  // taps of an output row and column kw = 0 .. 3, kh % 2 are 128 bytes from its column on. From the
  // step before its recomputation a plane waits for the last dy that it meets.
  static constexpr int kSlots = kT + 3;
  static constexpr int kColumnBytes = 32;
  static constexpr int kSpanBytes = 7 * kColumnBytes;
  static constexpr int kSpanStep = 2 * kSpanBytes;
  static constexpr int kPairBytes = kC * kSpanStep;
  static constexpr int kPlaneBytes = 3 * kPairBytes;  // of a part
  static constexpr int kSlotBytes = kParts * kPlaneBytes;
  // Where the spans of a row's first pair begin, or of its second.
  static __host__ __device__ constexpr int pair_offset(int row, int pair) {
    return (row / 2 + pair) * kPairBytes + row % 2 * kSpanBytes;
  }
  // If not kWhole, dy of the newest plane once more, all of it, as operand of the input's gradient:
  // for each row, column of a block and half of the channels a matrix whose rows are the blocks in
  // order, behind a row of zeros.
  static constexpr int kMatrixBytes = 9 * 16;
  static constexpr int kNewestBytes = kWhole ? 0 : 32 * kMatrixBytes;  // of a part

  // The barrier of the block, behind those of the stages.
  static constexpr int kMeetOffset = Input::kBarrierOffset + 8 * kStages;
  // Shared memory. kWordOffset: each warp's largest magnitude of x in a plane, for two planes, then
  // the exponents of the slots of x and, for each warp, of the dy in its sums.
  static constexpr int kWeightOffset = Input::kTermOffset + kTiles * 1024;
  static constexpr int kTurnedOffset = kWeightOffset + kWeightBytes;
  static constexpr int kSumOffset = kTurnedOffset + kTurnedBytes;
  static constexpr int kStageOffset = kSumOffset + 3 * kSumBytes;
  static constexpr int kWordOffset = kStageOffset + kStages * Input::kStageBytes;
  static constexpr int kSlotExponentOffset = kWordOffset + 64;
  static constexpr int kGradientExponentOffset = kWordOffset + 96;
  static constexpr int kGradientOffset = kWordOffset + 128 + kZeroRowBytes;
  static constexpr int kPlaneOffset = kGradientOffset + kParts * kGradientPart - kZeroRowBytes;
  static constexpr int kNewestOffset = kPlaneOffset + kSlots * kSlotBytes;
  static constexpr int kCarryOffset = kNewestOffset + 2 * kParts * kNewestBytes;
  static constexpr int kRawOffset = kSumOffset;  // the weights as they are in memory, at first
  static_assert(wgmma_raw_bytes(kTaps) <= kStageOffset - kSumOffset, "the weights");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
  static_assert(4 * kSlots <= 32, "the slots' exponents");

  // Where sums of a plane meet, the halves of four columns change places in rows of odd kh: so the
  // stores of a tile are free of bank conflicts.
  static constexpr bool kSwapped = true;

  static constexpr int kMostPlanes = 16;  // of a slab
  static constexpr int kMostSharedBytes = kCarryOffset + kMostPlanes * Input::kCarryBytes;
  static_assert(kMostSharedBytes <= 227 * 1024, "shared memory of a block");
};

}  // namespace convnormpool
