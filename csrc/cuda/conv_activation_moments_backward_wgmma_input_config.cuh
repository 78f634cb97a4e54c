// What a Hopper kernel of the input's gradient is compiled for and what it is told:
// conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "problem.h"

namespace convnormpool {

// kTf32 is computed as float16 scaled by powers of two, whose 11 bits are tf32's. Without kInput
// there is nothing of dx, and a quad's rows may be of two samples.
template <WgmmaOperand kOperand_, int kC_, int kT_, int kR_, int kS_, int kWarpgroups_ = 2,
          int kStages_ = 2 * kT_, bool kInput_ = true>
struct WgmmaInputConfig {
  static constexpr WgmmaOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr bool kInput = kInput_;
  static constexpr bool kIndexAnew = !kInput;  // see WgmmaInputOutputs
  static constexpr int kThreads = 128 * kWarpgroups;
  static_assert(kT >= 2 && kT <= 4, "N = 16 T of at most 64: two tiles of accumulators");
  static_assert(kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4, "four lanes for kh, four columns for kw");
  static_assert(kC >= 1 && kC <= 4, "T C columns of four lanes are at most 64");

  static constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  static constexpr bool kFloat = kSplit || kOperand == WgmmaOperand::kTf32;
  static constexpr bool kBFloat16 = kOperand == WgmmaOperand::kBFloat16;
  static constexpr WgmmaType kType = kBFloat16 ? WgmmaType::kBf16 : WgmmaType::kF16;
  static constexpr int kParts = kSplit ? 2 : 1;
  using Element = WgmmaElement<kOperand>;
  static constexpr int kElementBytes = sizeof(Element);
  // Elements of a staged row: 35 are needed. The pitch keeps window loads free of bank conflicts.
  static constexpr int kColumns = kFloat ? 36 : 48;
  static constexpr int kPitch = kColumns * kElementBytes;
  static constexpr int kWindowWords = kFloat ? 8 : 4;
  // Boxes of tensor copies begin at multiples of this many columns.
  static constexpr int kColumnStep = 16 / kElementBytes;
  // Columns from one segment to the next, and of a later segment those that the one before owns.
  static constexpr int kSegmentStep = (32 - (kS - 1)) / kColumnStep * kColumnStep;
  static constexpr int kHaloColumns = 32 - kSegmentStep;

  // Weights of the recomputation: a step is a channel (part by part), a block is a depth tap.
  static constexpr int kSteps = kC * kParts;
  static constexpr int kBlocks = 2 * kT - 1;
  static constexpr int kDepthBytes = kBlocks * 256;  // a half of a step: 16 bytes of depth
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kSteps * kStepBytes;
  // Weights of the input's gradient, for each phase of the slots, kw and part: 16 output channels
  // deep; column 8 (i / 2) + 2 kh + i % 2 is (slot, ci), i = slot C + ci.
  static constexpr int kN = (kT * kC + 3) / 4 * 16;
  static constexpr int kTapBytes = 32 * kN;
  static constexpr int kTurnedBytes = kInput ? kT * kS * kParts * kTapBytes : 0;

  // Sums of a plane, rows of 32 columns [ci][output row][kh]. The pitch, in floats, keeps their
  // stores free of bank conflicts; which one does depends on wgmma_block.
  static constexpr int kSumPitch = kFloat ? 36 : 40;
  static constexpr bool kSwapped = false;  // halves of four columns, where kh is odd
  static constexpr int kSumBytes = kInput ? kC * 16 * kSumPitch * 4 : 0;
  // What four output rows add to the three rows below them, in one plane.
  static constexpr int kCarryBytes = kInput ? 3 * kC * 32 * 4 : 0;
  static constexpr int kMostPlanes = kC < 4 ? 32 : 16;  // of a slab

  // Named barriers, one for each warpgroup.
  static constexpr int kGroupBarrier = 1;
  // Shared memory.
  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;  // of 16 channels' weights, then of all of them
  // What the outputs' accumulators begin with, in the order of four lanes' fragments: 128 bytes
  // and, kResetCopy on, the same.
  static constexpr int kResetOffset = 384, kResetCopy = 256;
  static constexpr int kPlaceOffset = 512;
  static constexpr int kZeroOffset = 768;
  static constexpr int kTermOffset = 1024;
  static constexpr int kWeightOffset = kTermOffset + kWarpgroups * 1024;
  static constexpr int kTurnedOffset = kWeightOffset + kWeightBytes;
  static constexpr int kSumOffset = kTurnedOffset + kTurnedBytes;
  static constexpr int kStageOffset = kSumOffset + kWarpgroups * 2 * kSumBytes;
  static constexpr int kCopyBytes = kC * kPitch * (4 + kR - 1);  // of one sample's rows
  static constexpr int kBoxBytes = (kCopyBytes + 127) / 128 * 128;
  static constexpr int kStageBytes = kInput ? kBoxBytes : 2 * kBoxBytes;
  static constexpr int kCarryOffset = kStageOffset + kWarpgroups * kStages * kStageBytes;
  // The weights as they are in memory, before there are sums or, without kInput, operands.
  static constexpr int kRawOffset = kInput ? kSumOffset : kCarryOffset;
  static_assert(!kInput || wgmma_raw_bytes(kC * kT * kR * kS) <= kStageOffset - kSumOffset,
                "the weights");
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kWarpgroups * 32 <= kResetOffset + kResetCopy - kPlaceOffset,
                "two places a warpgroup");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
};

struct WgmmaInputParams {
  const void* x;      // (N, C, D, H, W) contiguous
  const void* w;      // (K, C, T, R, S) contiguous
  const void* b;      // (K,) or null
  const float* mean;  // (N, K), as the next three
  const float* m2;
  const float* grad_mean;
  const float* grad_m2;
  void* dx;       // (N, C, D, H, W) of x's dtype
  float* dx_sum;  // the same in float, where dx is the sum over several launches; float32
                  // tensors are their own. Null with one launch
  int N, D, H, W, K, Z, P, Q;
  int padding[3];
  int first_tile;    // of 16 output channels
  bool add_to_sum;   // dx_sum holds what earlier tiles gave
  bool write_dx;     // this launch's sums are complete
  int first_column;  // the output column, at most 0, where the first segment begins
  int segments, slabs;
  int quads;      // fours of output rows, and of dx rows counted with their padding
  int planes;     // of a slab, a multiple of T
  int slab_step;  // from one slab to the next
  int items;      // (sample, slab, segment)
  uint32_t zero;  // see distinct_copy
};

template <class Config>
size_t wgmma_input_shared_bytes(const WgmmaInputParams& p) {
  return Config::kCarryOffset + size_t(Config::kWarpgroups) * p.planes * Config::kCarryBytes;
}

template <class Config>
int wgmma_input_blocks(const WgmmaInputParams& p, int sm_count) {
  return std::min((p.items + Config::kWarpgroups - 1) / Config::kWarpgroups, sm_count);
}

// The parameters that follow from the problem; pointers and what concerns tiles are left out.
template <class Config>
WgmmaInputParams wgmma_input_params(const Problem& problem, int most_planes = Config::kMostPlanes) {
  constexpr int kT = Config::kT, kStep = Config::kColumnStep;
  WgmmaInputParams p{};
  p.N = int(problem.N), p.D = int(problem.D), p.H = int(problem.H), p.W = int(problem.W);
  p.K = int(problem.K), p.Z = int(problem.Z()), p.P = int(problem.P()), p.Q = int(problem.Q());
  for (int i = 0; i < 3; ++i) p.padding[i] = int(problem.padding[i]);
  p.first_column = p.padding[2] - (p.padding[2] + kStep - 1) / kStep * kStep;
  const int columns = p.padding[2] + p.W - p.first_column;
  p.segments = 1 + (std::max(columns - 32, 0) + Config::kSegmentStep - 1) / Config::kSegmentStep;
  p.quads = (p.padding[1] + p.H + 3) / 4;
  // A slab of L planes completes all of them but T - 1 at each end where another slab meets it.
  const auto whole = [](int planes) {
    return (std::max(planes, std::max(2 * kT, Config::kStages)) + kT - 1) / kT * kT;
  };
  const int all = p.Z + kT - 1, most = std::max(most_planes / kT * kT, whole(3 * kT));
  p.planes = std::min(whole(all), most);
  const auto slabs = [&](int planes) {
    const int step = planes - 2 * (kT - 1);
    return 1 + (std::max(all - planes, 0) + step - 1) / step;
  };
  p.slabs = slabs(p.planes);
  while (p.planes - kT >= whole(1) && slabs(p.planes - kT) == p.slabs) p.planes -= kT;
  p.slab_step = p.planes - 2 * (kT - 1);
  p.items = p.N * p.slabs * p.segments;
  return p;
}

// The box of a tensor copy, fastest axis first: all channels of one plane, the rows of a quad.
template <class Config>
void wgmma_input_box(uint32_t (&box)[5]) {
  box[0] = Config::kColumns;
  box[1] = 4 + Config::kR - 1;
  box[2] = 1;
  box[3] = Config::kC;
  box[4] = 1;
}

}  // namespace convnormpool
