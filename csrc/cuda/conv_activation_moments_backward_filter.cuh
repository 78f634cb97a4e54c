// The filter warps of the backward window kernel (conv_activation_moments_backward_window.cuh), and
// the sums over blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/conv_activation_moments_backward_rows.cuh"

namespace convnormpool {

namespace window {

// Operands times 2^change, change at most 0. Half's smallest normal number is 2^-14, which hardly
// ever does not suffice.
template <int kSteps, int kParts>
__device__ __forceinline__ void scale_down(uint32_t (&r)[kSteps][kParts][4], int change) {
  for (int left = max(change, -14 * 4); left < 0; left += 14) {
    const uint32_t half = static_cast<uint32_t>(max(left, -14) + 15) << 10;
#pragma unroll
    for (int i = 0; i < kSteps * kParts * 4; ++i) {
      uint32_t& x = r[i / (kParts * 4)][i / 4 % kParts][i % 4];
      x = multiply_f16x2(x, half * 0x10001u);
    }
  }
}

// The gradient of 16 output channels' filters: rows are the channels, columns the taps of a pair of
// kw of a unit. The sums stand for themselves times 2^exponent, which falls when larger products
// come; smaller ones are scaled down to it.
template <class Config>
struct FilterWarp {
  static constexpr int T = Config::T, kUnits = Config::kUnits, kParts = Config::kParts;
  static constexpr int kSteps = kBackwardTiles / 2;  // of 16 outputs
  static constexpr int kUnknown = 1 << 20;

  float acc[T][kUnits][2][4];
  int exponent;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < T * kUnits * 8; ++i) {
      acc[i / (kUnits * 8)][i / 8 % kUnits][i / 4 % 2][i % 4] = 0.0f;
    }
    exponent = kUnknown;
  }

  __device__ __forceinline__ void lower_exponent(int to) {
    const float factor = falling_power(to - exponent);
#pragma unroll
    for (int i = 0; i < T * kUnits * 8; ++i) {
      acc[i / (kUnits * 8)][i / 8 % kUnits][i / 4 % 2][i % 4] *= factor;
    }
    exponent = to;
  }

  // The products of depth tap kd, of both halves of the outputs.
  __device__ __forceinline__ void multiply(int kd, uint32_t (&a)[kSteps][kParts][4],
                                           const uint32_t (&b)[kSteps][kUnits][2][2][kParts]) {
    // The tensor cores cut off what falls out of an accumulator, always downwards: split operands,
    // which are to be exact, are added up over one plane only.
    float fresh[kUnits][2][4];
#pragma unroll
    for (int i = 0; i < kUnits * 8; ++i) fresh[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int product = 0; product < Config::kProducts; ++product) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kUnits * 2; ++i) {
          float (&d)[4] = Config::kSplit ? fresh[i / 2][i % 2] : acc[kd][i / 2][i % 2];
          multiply_parts<Config>(d, a[step], b[step][i / 2][i % 2][0], b[step][i / 2][i % 2][1],
                                 product, d);
        }
      }
    }
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int i = 0; i < kUnits * 8; ++i) {
        acc[kd][i / 8][i / 4 % 2][i % 4] += fresh[i / 8][i / 4 % 2][i % 4];
      }
    }
  }

  // Adds one output row's share: the input plane of step `at`, and the output planes whose taps
  // meet it, the newest in slot `newest`.
  __device__ __forceinline__ void add(const BackwardCursor& at, uint32_t input, int input_exponent,
                                      uint32_t gradients, int newest, const int* exponents,
                                      int lane) {
    int change[T];
    if constexpr (Config::kScaled) {
      int lowest = exponent;
#pragma unroll
      for (int kd = 0; kd < T; ++kd) {
        change[kd] = input_exponent + exponents[slot_before(newest, kd)];
        if (counts(at, kd)) lowest = min(lowest, change[kd]);
      }
      if (lowest < exponent) lower_exponent(lowest);
    }
    uint32_t b[kSteps][kUnits][2][2][kParts];
#pragma unroll
    for (int i = 0; i < kSteps * kUnits * kParts; ++i) {
      const int part = i % kParts, u = i / kParts % kUnits, step = i / (kParts * kUnits);
      uint32_t r[4];
      ldmatrix_x4_trans(r, input + part * Config::kInputPartBytes + u * Config::kUnitBytes +
                               operand_offset(lane, 2 * step));
#pragma unroll
      for (int j = 0; j < 4; ++j) b[step][u][j % 2][j / 2][part] = r[j];
    }
#pragma unroll
    for (int kd = 0; kd < T; ++kd) {
      if (!counts(at, kd)) continue;
      uint32_t a[kSteps][kParts][4];
#pragma unroll
      for (int i = 0; i < kSteps * kParts; ++i) {
        const int part = i % kParts, step = i / kParts;
        ldmatrix_x4(a[step][part], gradients + slot_before(newest, kd) * Config::kGradientBytes +
                                       part * Config::kGradientPartBytes +
                                       2 * step * kBackwardTileBytes + 16 * lane);
      }
      if constexpr (Config::kScaled) {
        if (change[kd] != exponent) scale_down(a, exponent - change[kd]);
      }
      multiply(kd, a, b);
    }
  }

  __device__ __forceinline__ static int slot_before(int newest, int kd) {
    return newest - kd < 0 ? newest - kd + Config::kGradientSlots : newest - kd;
  }
  __device__ __forceinline__ static bool counts(const BackwardCursor& at, int kd) {
    const int plane = at.step - kd;
    return plane >= 0 && plane < at.piece.planes;
  }

  // partial (16, C T R S)
  __device__ __forceinline__ void store(float* partial, int lane) const {
    const float inverse =
        Config::kScaled && exponent != kUnknown ? any_power_of_two(-exponent) : 1.0f;
#pragma unroll
    for (int i = 0; i < T * kUnits * 8; ++i) {
      const int kd = i / (kUnits * 8), u = i / 8 % kUnits, pair = i / 4 % 2, reg = i % 4;
      const int tap = lane % 4 * 2 + reg % 2;
      const int row = 4 * u + tap % 4, kw = 2 * pair + tap / 4;
      if (row >= Config::kRows || kw >= Config::S) continue;
      const int channel = row / Config::R, kh = row % Config::R;
      const int to = ((channel * T + kd) * Config::R + kh) * Config::S + kw;
      partial[(lane / 4 + 8 * (reg / 2)) * Config::kTaps + to] = acc[kd][u][pair][reg] * inverse;
    }
  }
};

}  // namespace window

}  // namespace convnormpool
