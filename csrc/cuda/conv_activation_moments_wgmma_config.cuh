// What a Hopper window kernel is compiled for and what it is told:
// conv_activation_moments_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/ptx_hopper.cuh"
#include "problem.h"

namespace convnormpool {
// kSplit: float32 as two float16 halves and three products; x scaled per sample, w per channel.
enum class WgmmaOperand { kTf32, kFloat16, kBFloat16, kSplit };

// kTensor: the tensor copy engine; needs rows of x whose bytes are a multiple of 16 and an aligned
// base. kElements: anything else, element by element.
enum class WgmmaLoads { kTensor, kElements };

// The tensor cores stay busy by the other warpgroups while one finishes a plane. kFree: in whatever
// order they come. kOrdered: they issue in turn, so that they cannot all finish at the same time.
enum class WgmmaOverlap { kFree, kOrdered };

template <WgmmaOperand kOperand_, int kC_, int kT_, int kR_, int kS_,
          WgmmaLoads kLoads_ = WgmmaLoads::kTensor, WgmmaOverlap kOverlap_ = WgmmaOverlap::kOrdered,
          int kWarpgroups_ = 3, int kStages_ = 4>
struct WgmmaConfig {
  static constexpr WgmmaOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr WgmmaLoads kLoads = kLoads_;
  static constexpr WgmmaOverlap kOverlap = kOverlap_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static_assert(kT >= 1 && kT <= 4,
                "N = 16 T of at most 64: two tiles of accumulators in registers");
  static_assert(kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4,
                "four lanes stand for kh, four slots for kw");
  static_assert(kC >= 1 && kC <= 4, "fragments of all channels of a plane in registers");

  static constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  static constexpr bool kTf32 = kOperand == WgmmaOperand::kTf32;
  static constexpr bool kFloat = kTf32 || kSplit;
  static constexpr WgmmaType kType = kTf32                                 ? WgmmaType::kTf32
                                     : kOperand == WgmmaOperand::kBFloat16 ? WgmmaType::kBf16
                                                                           : WgmmaType::kF16;
  static constexpr int kElementBytes = kFloat ? 4 : 2;
  // Elements of a staged row: 35 are needed. The pitch keeps window loads free of bank conflicts.
  static constexpr int kColumns = kFloat ? 36 : 48;
  static constexpr int kPitch = kColumns * kElementBytes;
  static constexpr int kWindowWords = kFloat ? 8 : 4;

  static constexpr int kStepsPerChannel = kTf32 && kS > 1 ? 2 : 1;
  static constexpr int kSteps = kC * kStepsPerChannel * (kSplit ? 2 : 1);
  static constexpr int kBlocks = 2 * kT - 1;
  static constexpr int kDepthBytes = kBlocks * 256;  // a half of a step: 16 bytes of depth
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kSteps * kStepBytes;

  // Named barriers, one for each warpgroup: its turn to issue, and its own four warps.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kWarpgroups;
  // Shared memory.
  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;
  static constexpr int kCursorOffset = 320;
  static constexpr int kItemOffset = 512;
  static constexpr int kZeroOffset = 768;
  static constexpr int kWeightOffset = 1024;
  static constexpr int kStageOffset = kWeightOffset + kWeightBytes;
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kWarpgroups * 44 <= kItemOffset - kCursorOffset, "cursors");
  static_assert(kWarpgroups * 64 <= kZeroOffset - kItemOffset, "a WgmmaItem for each warp");
  static_assert(kPitch <= kWeightOffset - kZeroOffset, "a row of zeros");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
};

struct WgmmaParams {
  const void* x;         // (N, C, D, H, W) contiguous
  const void* w;         // (K, C, T, R, S) contiguous
  const void* b;         // (K,) or null
  const uint32_t* amax;  // kSplit: the bits of max |x| of each sample
  float2* partials;      // (N, pieces, K): mean and M2
  uint32_t* tickets;     // (N, channel tiles), zero: pieces that are finished
  float* mean;           // (N, K)
  float* m2;             // (N, K)
  int N, D, H, W, K, Z, P, Q;
  int padding[3];
  int column_tiles;  // of 32 output columns
  int quads;         // P / 4
  int rest;          // P mod 4: rows of a sample that no quad takes
  int rest_samples;  // samples that share an item for those: 4 / rest
  int items;
  int outputs;  // max(Z, T - 1)
  int planes;   // of an item: outputs + T - 1
  int stage_bytes;
};

inline int wgmma_pieces(const WgmmaParams& p) { return p.P * p.column_tiles; }

template <class Config>
size_t wgmma_shared_bytes(const WgmmaParams& p) {
  return Config::kStageOffset + size_t(Config::kWarpgroups) * Config::kStages * p.stage_bytes;
}

// The parameters that follow from the problem; the pointers are left null.
template <class Config>
WgmmaParams wgmma_params(const Problem& problem) {
  WgmmaParams p{};
  p.N = int(problem.N), p.D = int(problem.D), p.H = int(problem.H), p.W = int(problem.W);
  p.K = int(problem.K), p.Z = int(problem.Z()), p.P = int(problem.P()), p.Q = int(problem.Q());
  for (int i = 0; i < 3; ++i) p.padding[i] = int(problem.padding[i]);
  p.outputs = p.Z > Config::kT - 1 ? p.Z : Config::kT - 1;
  p.planes = p.outputs + Config::kT - 1;
  p.column_tiles = (p.Q + 31) / 32;
  p.quads = p.P / 4;
  p.rest = p.P % 4;
  p.rest_samples = p.rest == 0 ? 1 : 4 / p.rest;
  const int rest_items = p.rest == 0 ? 0 : (p.N + p.rest_samples - 1) / p.rest_samples;
  p.items = p.column_tiles * (p.N * p.quads + rest_items);
  const int row_bytes = Config::kC * Config::kPitch;
  const int quad_bytes = p.quads == 0 ? 0 : row_bytes * (4 + Config::kR - 1);
  const int rest_box = p.rest == 0 ? 0 : (row_bytes * (p.rest + Config::kR - 1) + 127) / 128 * 128;
  const int rest_bytes = p.rest_samples * rest_box;
  p.stage_bytes = ((quad_bytes > rest_bytes ? quad_bytes : rest_bytes) + 127) / 128 * 128;
  return p;
}

// The box of a tensor copy, fastest axis first: all channels of one plane, the rows of an item.
template <class Config>
void wgmma_box(const WgmmaParams& p, bool rest, uint32_t (&box)[5]) {
  box[0] = Config::kColumns;
  box[1] = uint32_t((rest ? p.rest : 4) + Config::kR - 1);
  box[2] = 1;
  box[3] = Config::kC;
  box[4] = 1;
}

}  // namespace convnormpool
