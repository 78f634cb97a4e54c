// What a Hopper backward kernel is compiled for and what it is told:
// conv_activation_moments_backward_wgmma_filter_outputs.cuh.
#pragma once

#include "cuda/conv_activation_moments_wgmma_config.cuh"

namespace convnormpool {

// Products are of 16-bit operands. float32 is scaled by powers of two and then rounded to float16's
// 11 bits (kTf32), or split into two halves (kSplit). kOwnBytes of shared memory are the kernel's
// own, from kOwnOffset on.
template <WgmmaOperand kOperand_, int kC_, int kT_, int kR_, int kS_, WgmmaOverlap kOverlap_,
          int kWarpgroups_, int kStages_, int kOwnBytes_>
struct WgmmaBackwardConfig {
  static constexpr WgmmaOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr WgmmaOverlap kOverlap = kOverlap_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static_assert(kT >= 1 && kT <= 4 && kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4 && kC >= 1 &&
                    kC <= 4,
                "the fragments' layout");

  static constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  static constexpr bool kFloat = kSplit || kOperand == WgmmaOperand::kTf32;
  static constexpr bool kBFloat16 = kOperand == WgmmaOperand::kBFloat16;
  // bfloat16 has float32's range, so gradients need no scale.
  static constexpr bool kScaled = !kBFloat16;
  static constexpr WgmmaType kType = kBFloat16 ? WgmmaType::kBf16 : WgmmaType::kF16;
  static constexpr int kParts = kSplit ? 2 : 1;  // of an operand: the high halves and the low ones
  static constexpr int kElementBytes = kFloat ? 4 : 2;
  // As in WgmmaConfig.
  static constexpr int kColumns = kFloat ? 36 : 48;
  static constexpr int kPitch = kColumns * kElementBytes;
  static constexpr int kWindowWords = kFloat ? 8 : 4;
  static constexpr int kColumnStep = 16 / kElementBytes;
  static constexpr int kRows = 4 + kR - 1;  // of the input, under four of the output
  static constexpr int kChannelBytes = kRows * kPitch;
  static constexpr int kStageBytes = (kC * kChannelBytes + 127) / 128 * 128;

  static constexpr int kBlocks = 2 * kT - 1;
  static constexpr int kDepthBytes = kBlocks * 256;
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kC * kParts * kStepBytes;

  // Named barriers, one for each warpgroup: its turn to issue, and its own four warps.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kWarpgroups;
  // Shared memory. kGroupOffset: 48 bytes for each warpgroup, the first word its sample's exponent,
  // the others the kernel's own. kTermOffset: for each warpgroup and each two channels a float4 of
  // their biases and what undoes the weights' scales (16 bits: the biases again), then for each two
  // a float4 of both channels' terms of dy.
  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;
  static constexpr int kGroupOffset = 320;
  static constexpr int kPlaceOffset = 512;
  static constexpr int kZeroOffset = 768;
  static constexpr int kTermOffset = 1024;
  static constexpr int kWeightOffset = kTermOffset + 256 * kWarpgroups;
  static constexpr int kOwnOffset = kWeightOffset + kWeightBytes;
  static constexpr int kStageOffset = (kOwnOffset + kOwnBytes_ + 127) / 128 * 128;
  static constexpr int kSharedBytes = kStageOffset + kWarpgroups * kStages * kStageBytes;
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kWarpgroups <= 4, "four words, places and terms of each warpgroup");
  static_assert(kPitch <= kTermOffset - kZeroOffset, "a row of zeros");
};

struct WgmmaBackwardParams : WgmmaParams {
  const float *mean, *m2, *grad_mean, *grad_m2;  // (N, K)
};

// The parameters that follow from the problem; the pointers are left null. All items are four rows
// of one sample; rows past the last output are masked.
template <class Config>
WgmmaBackwardParams wgmma_backward_params(const Problem& problem) {
  WgmmaBackwardParams p{};
  static_cast<WgmmaParams&>(p) = wgmma_params<Config>(problem);
  p.quads = (p.P + 3) / 4;
  p.rest = 0;
  p.rest_samples = 1;
  p.items = p.column_tiles * p.N * p.quads;
  p.quad_bytes = Config::kC * Config::kChannelBytes;
  p.rest_bytes = 0;
  p.stage_bytes = Config::kStageBytes;
  p.sample_items = p.group_items = p.column_tiles * p.quads;
  p.by_group = p.by_sample = wgmma_divisor(p.sample_items);
  p.by_quads = wgmma_divisor(p.quads);
  return p;
}

}  // namespace convnormpool
