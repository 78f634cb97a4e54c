// What a Hopper window kernel is compiled for and what it is told:
// conv_activation_moments_wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_plan.h"
#include "problem.h"

namespace convnormpool {
// float32 is scaled by powers of two, w per channel, x per plane and block of four columns of an
// output row, and rounded to float16's 11 bits, as many as tf32 has (kTf32), or to the sum of two
// of them, with three products (kSplit).
enum class WgmmaOperand { kTf32, kFloat16, kBFloat16, kSplit };

// Weights of 16 channels as floats, an odd number of words a channel: no bank conflicts.
constexpr int wgmma_raw_pitch(int taps) { return taps | 1; }
constexpr int wgmma_raw_bytes(int taps) { return 16 * 4 * wgmma_raw_pitch(taps); }

// What tensors of a kind have as elements.
template <WgmmaOperand kOperand>
using WgmmaElement = std::conditional_t<
    kOperand == WgmmaOperand::kFloat16, __half,
    std::conditional_t<kOperand == WgmmaOperand::kBFloat16, __nv_bfloat16, float>>;

// The tensor cores stay busy by the other warpgroups while one finishes a plane. kFree: in whatever
// order they come. kOrdered: they issue in turn, so that they cannot all finish at the same time.
enum class WgmmaOverlap { kFree, kOrdered };

template <WgmmaOperand kOperand_, int kC_, int kT_, int kR_, int kS_,
          WgmmaOverlap kOverlap_ = WgmmaOverlap::kOrdered, int kWarpgroups_ = 3>
struct WgmmaConfig {
  static constexpr WgmmaOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr WgmmaOverlap kOverlap = kOverlap_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kThreads = 128 * kWarpgroups;
  // Stages of a warpgroup's ring: plane p of an item is in stage p mod T, which the unrolled loop
  // over planes knows.
  static constexpr int kStages = kT;
  static_assert(kT >= 1 && kT <= 4,
                "N = 16 T of at most 64: two tiles of accumulators in registers");
  static_assert(kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4,
                "four lanes stand for kh, four slots for kw");
  static_assert(kC >= 1 && kC <= 4, "fragments of all channels of a plane in registers");

  static constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  static constexpr bool kFloat = kSplit || kOperand == WgmmaOperand::kTf32;
  static constexpr int kParts = kSplit ? 2 : 1;  // of an operand
  static constexpr WgmmaType kType =
      kOperand == WgmmaOperand::kBFloat16 ? WgmmaType::kBf16 : WgmmaType::kF16;
  using Element = WgmmaElement<kOperand>;
  static constexpr int kElementBytes = sizeof(Element);
  // Elements of a staged row: 35 are needed. The pitch keeps window loads free of bank conflicts.
  static constexpr int kColumns = kFloat ? 36 : 48;
  static constexpr int kPitch = kColumns * kElementBytes;
  static constexpr int kWindowWords = kFloat ? 8 : 4;
  // From the columns of one tile to those of the other, and from those of rows g to those of rows g
  // + 8. Where windows are made in registers a step's operand then is one value twice and two
  // others, which saves moves; where they are loaded it does not.
  static constexpr int kTileColumns = kFloat ? 1 : 2, kHalfColumns = 3 - kTileColumns;
  // Boxes of tensor copies begin at multiples of this many columns.
  static constexpr int kColumnStep = 16 / kElementBytes;

  static constexpr int kSteps = kC * kParts;
  static constexpr int kBlocks = 2 * kT - 1;
  static constexpr int kDepthBytes = kBlocks * 256;  // a half of a step: 16 bytes of depth
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kSteps * kStepBytes;

  // Named barriers, one for each warpgroup: its turn to issue, and its own four warps.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kWarpgroups;
  // Shared memory.
  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;
  // What a slot's accumulators begin with: for each two channels 2 t, 2 t + 1 these values twice,
  // for the lower eight channels, then for the upper ones.
  static constexpr int kResetOffset = 384;
  static constexpr int kPlaceOffset = 512;
  static constexpr int kZeroOffset = 768;
  static constexpr int kWeightOffset = 1024;
  // Sums of the last item and, before there are any, the weights as they are in memory.
  static constexpr int kKeptOffset = kWeightOffset + kWeightBytes;
  static constexpr int kRawOffset = kKeptOffset;
  static constexpr int kRawBytes = (wgmma_raw_bytes(kC * kT * kR * kS) + 127) / 128 * 128;
  static constexpr int kStageOffset =
      kKeptOffset + (48 * kThreads > kRawBytes ? 48 * kThreads : kRawBytes);
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kWarpgroups * 64 <= kZeroOffset - kPlaceOffset, "four places a warpgroup");
  static_assert(kPitch <= kWeightOffset - kZeroOffset, "a row of zeros");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
};

// Quotients of 0 .. 2^31 - 1 by a number known before the launch.
struct WgmmaDivisor {
  uint32_t multiplier;
  int shift;

  __host__ __device__ int divide(int n) const {
    const uint32_t high = uint32_t(uint64_t(multiplier) * uint32_t(n) >> 32);
    return int((high + uint32_t(n)) >> shift);
  }
};

inline WgmmaDivisor wgmma_divisor(int divisor) {
  const uint64_t d = divisor < 1 ? 1 : uint64_t(divisor);
  int shift = 0;
  while (uint64_t{1} << shift < d) ++shift;
  return {uint32_t((((uint64_t{1} << shift) - d) << 32) / d + 1), shift};
}

struct WgmmaParams {
  const void* x;     // (N, C, D, H, W) contiguous
  const void* w;     // (K, C, T, R, S) contiguous
  const void* b;     // (K,) or null
  float2* partials;  // (N, pieces, K): mean and M2
  int N, D, H, W, K, Z, P, Q;
  int padding[3];
  int first_column;  // the output column, at most 0, where the first tile of 32 begins
  int column_tiles;
  int quads;         // P / 4
  int rest;          // P mod 4: rows of a sample that no quad takes
  int rest_samples;  // samples that share an item for those: 4 / rest
  int items;
  int share, extra;  // of items: each block has `share`, the first `extra` blocks one more
  int outputs;       // of an item; those from Z on are not counted
  int planes;        // of an item: outputs + T - 1
  int stage_bytes, quad_bytes, rest_bytes;
  int group_items, sample_items;  // items of rest_samples samples, quads' items of one
  WgmmaDivisor by_group, by_sample, by_quads;
  uint32_t zero;  // see distinct_copy
};

// Deals the items to the blocks of the launch.
inline void wgmma_deal(WgmmaParams& p, int blocks) {
  p.share = p.items / blocks;
  p.extra = p.items % blocks;
}

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
  // More planes than stages, so that the copies of one item reach at most into the next.
  constexpr int kFewest = Config::kStages + 2 - Config::kT;
  p.outputs = p.Z > Config::kT - 1 ? p.Z : Config::kT - 1;
  if (p.outputs < kFewest) p.outputs = kFewest;
  p.planes = p.outputs + Config::kT - 1;
  constexpr int kStep = Config::kColumnStep;
  p.first_column = int(wgmma_first_column(p.padding[2], kStep));
  p.column_tiles = int(wgmma_column_tiles(p.Q, p.first_column));
  p.quads = p.P / 4;
  p.rest = p.P % 4;
  p.rest_samples = p.rest == 0 ? 1 : 4 / p.rest;
  const int rest_items = p.rest == 0 ? 0 : (p.N + p.rest_samples - 1) / p.rest_samples;
  p.items = p.column_tiles * (p.N * p.quads + rest_items);
  const int row_bytes = Config::kC * Config::kPitch;
  p.quad_bytes = p.quads == 0 ? 0 : row_bytes * (4 + Config::kR - 1);
  p.rest_bytes = p.rest == 0 ? 0 : p.rest_samples * row_bytes * (p.rest + Config::kR - 1);
  p.stage_bytes = ((p.quad_bytes > p.rest_bytes ? p.quad_bytes : p.rest_bytes) + 127) / 128 * 128;
  p.sample_items = p.column_tiles * p.quads;
  p.group_items = p.rest_samples * p.sample_items + (p.rest == 0 ? 0 : p.column_tiles);
  p.by_group = wgmma_divisor(p.group_items);
  p.by_sample = wgmma_divisor(p.sample_items);
  p.by_quads = wgmma_divisor(p.quads);
  return p;
}

// The box of a tensor copy, fastest axis first: all channels of one plane, the rows of an item.
template <class Config>
void wgmma_box(const WgmmaParams& p, bool rest, uint32_t (&box)[5]) {
  box[0] = Config::kColumns;
  box[1] = uint32_t((rest ? p.rest : 4) + Config::kR - 1);
  box[2] = 1;
  box[3] = Config::kC;
  box[4] = uint32_t(rest ? p.rest_samples : 1);
}

}  // namespace convnormpool
