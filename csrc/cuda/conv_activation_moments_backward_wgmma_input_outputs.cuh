// The outputs once more and their gradient, in the Hopper kernel of the input's gradient: one
// thread's accumulators and fragments. See conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_windows.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaInputOutputs : WgmmaInputWindows<Config> {
  using Windows = WgmmaInputWindows<Config>;
  using Windows::a, Windows::acc, Windows::address, Windows::exponent, Windows::ring,
      Windows::unscale;
  using Windows::block, Windows::channel, Windows::cold_thread, Windows::lane, Windows::warp;
  static constexpr int kT = Config::kT, kC = Config::kC, kParts = Config::kParts;
  static constexpr bool kHardswish = std::is_same_v<Act, HardswishFn>;

  const Act act;

  // dy of the columns m - 3 and m - 1 of this lane's four; negative ones are of the block before.
  uint32_t gradient[kParts][5][4];
  int gradient_exponent;  // dy is scaled by 2^gradient_exponent
  uint32_t inside[4];     // 1/2 as a float where the lane's column is an output, or 0
  int outputs;            // planes from the slab's first on that are outputs
  uint32_t terms_from, zeros_from;
  int before;            // the lane of the block of columns before; itself in the first block
  uint32_t before_mask;  // zero in the first block
  float zero;            // in a register: to write a constant takes two instructions

  __device__ __forceinline__ WgmmaInputOutputs(WgmmaInputRing<Config>& r, const Act& activation)
      : Windows(r), act(activation) {}

  // ---- what changes from quad to quad

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4; ++i) unscale[i] = 1.f;
#pragma unroll
    for (int i = 0; i < 8 * kT; ++i) acc[0][i] = acc[1][i] = 0.f;
    clear<0, kT>();
    address = Windows::window_address();
    before_mask = block() == 0 ? 0u : ~0u;
    before = lane();
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (wgmma_block<Config>(g) == block() - 1) before = 4 * g + lane() % 4;
    }
    terms_from = uint32_t(opaque_value(int(terms())));
    zeros_from = ring.base() + uint32_t(Config::kZeroOffset);
    exponent = gradient_exponent = outputs = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) inside[i] = 0u;
    float zeros[4];
    load_shared(zeros, ring.base() + uint32_t(Config::kZeroOffset));
    zero = zeros[0];
  }

  __device__ __forceinline__ float bias(int k) const {
    const bool given = ring.p.b != nullptr && k < ring.p.K;
    return given ? wgmma_weight<Config>(ring.p.b, size_t(k)) : 0.f;
  }

  // Where the terms of a sample's gradient wait, for each warp four rows of 16 channels in the
  // lanes' order: dy = (alpha + slope (a(y) - mean)) a'(y), alpha and slope scaled by
  // 2^gradient_exponent; and the biases.
  __device__ __forceinline__ uint32_t terms() const {
    return ring.base() + uint32_t(Config::kTermOffset) + threadIdx.x / 32 * 256u +
           threadIdx.x % 4 * 16u;
  }

  // Of the lane's four channels; see terms(). Planes that are no outputs have zeros.
  struct Terms {
    float mean[4], alpha[4], slope[4], biases[4];
  };

  // The gradient's terms of a sample, not yet scaled. Returns what none of the lane's dy is above:
  // |a(y) - mean| is at most the root of M2, and no activation's slope is above 1.5.
  __device__ __forceinline__ float sample_terms(Terms& of, int n) const {
    const WgmmaInputParams& p = ring.p;
    const float positions = float(int64_t(p.Z) * p.P * p.Q);
    const int lane = cold_thread() % 32;
    const int channels = Config::kInput && Config::kIndexAnew ? opaque_value(p.K) : p.K;
    float bound = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 16 * p.first_tile + channel(i, lane);
      const bool exists = k < p.K;
      const int64_t at = int64_t(n) * channels + (exists ? k : 0);
      of.biases[i] = bias(k);
      of.mean[i] = exists ? p.mean[at] : 0.f;
      of.alpha[i] = exists ? p.grad_mean[at] / positions : 0.f;
      of.slope[i] = exists ? 2.f * p.grad_m2[at] : 0.f;
      // The second term covers roundings of y where nearly all outputs are alike.
      const float spread = exists ? sqrtf(p.m2[at]) + fabsf(of.mean[i]) * 0x1p-10f : 0.f;
      const float largest = 2.f * (fabsf(of.alpha[i]) + fabsf(of.slope[i]) * spread);
      // A channel that is not finite must not decide the others' scale.
      bound = fmaxf(bound, largest - largest == 0.f ? largest : 0.f);
    }
    return bound;
  }

  // Chooses the scale for gradients up to the largest of the lanes' bounds.
  __device__ __forceinline__ void choose_gradient_exponent(float bound) {
    if constexpr (!Config::kBFloat16) {
      bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, 1));
      bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, 2));
      gradient_exponent = min(141 - wgmma_exponent_field(__float_as_uint(bound)), 127);
    }
  }

  // Writes the terms of a sample, scaled.
  __device__ __forceinline__ void begin_terms(Terms& of) {
    // Twice as large where hardswish's derivative comes as its half.
    constexpr float kFactor = kHardswish && Config::kInput ? 2.f : 1.f;
    const float scale = wgmma_power_of_two(gradient_exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of.alpha[i] = of.alpha[i] * scale * kFactor;
      of.slope[i] = of.slope[i] * scale * kFactor;
    }
    if (lane() < 4) {
      store_shared(terms(), of.mean);
      store_shared(terms() + 64, of.alpha);
      store_shared(terms() + 128, of.slope);
      store_shared(terms() + 192, of.biases);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void begin_sample(int n) {
    Terms of;
    const float bound = sample_terms(of, n);
    choose_gradient_exponent(bound);
    begin_terms(of);
  }

  __device__ __forceinline__ void begin_quad() {
    const WgmmaInputParams& p = ring.p;
    const WgmmaInputItem at(p, ring.item, Config::kSegmentStep);
    if (ring.quad == 0) begin_sample(at.n);
    outputs = p.Z - at.plane;
    const bool row = 4 * ring.quad + warp() < p.P;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = at.column + 4 * block() + i;
      // As floats that the compiler does not see through: it would choose them anew in every step.
      const bool output = row && column >= 0 && column < p.Q;
      inside[i] = uint32_t(opaque_value(output ? int(__float_as_uint(0.5f)) : 0));
    }
  }

  // ---- the outputs again

  template <int kTile, int kPhase, int kCount, bool kAccumulate = true>
  __device__ __forceinline__ void recompute_step(float* d, int fragment, int weight_step) {
    constexpr int kStart = (kT - kPhase) % kT;
    const uint32_t weights = wgmma_operand(
        shared_address(dynamic_shared_memory() + Config::kWeightOffset), Config::kDepthBytes);
    const uint32_t b = weights + uint32_t(weight_step * Config::kStepBytes + kStart * 256) / 16;
    wgmma<Config::kType, 16 * kCount, kAccumulate>(d, a[kTile][fragment], b);
  }

  // The plane in `a` into slots 0 .. kCount - 1, for planes kPhase mod T.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void recompute() {
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) recompute_step<kTile, kPhase, kCount>(acc[kTile], ci, ci);
  }

  // By recursion: loops that call two wgmmas a turn are not always unrolled.
  template <int kTile, int kPhase, int kCount, int kChannel>
  __device__ __forceinline__ void recompute_small(float* fresh) {
    if constexpr (kChannel < kC) {
      recompute_step<kTile, kPhase, kCount, (kChannel > 0)>(fresh, kC + kChannel, kChannel);
      recompute_step<kTile, kPhase, kCount>(fresh, kChannel, kC + kChannel);
      recompute_small<kTile, kPhase, kCount, kChannel + 1>(fresh);
    }
  }
  template <int kTile, int kPhase, int kCount, int kChannel>
  __device__ __forceinline__ void recompute_large(float* fresh) {
    if constexpr (kChannel < kC) {
      recompute_step<kTile, kPhase, kCount>(fresh, kChannel, kChannel);
      recompute_large<kTile, kPhase, kCount, kChannel + 1>(fresh);
    }
  }

  // kSplit: the products of one tile with that plane alone, the small ones first.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void recompute_fresh(float* fresh) {
    pin_fragments(a[kTile]);
    wgmma_fence();
    recompute_small<kTile, kPhase, kCount, 0>(fresh);
    recompute_large<kTile, kPhase, kCount, 0>(fresh);
    wgmma_commit();
  }

  // Adds them; slot kPhase begins.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void add_outputs(const float* fresh) {
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i) {
      acc[kTile][i] = (i / 8 == kPhase ? 0.f : acc[kTile][i]) + fresh[i];
    }
    pin_accumulators(acc[kTile]);  // later, `fresh` would have to be copied
  }

  // Slots kFirst .. kFirst + kCount - 1 begin anew.
  template <int kFirst, int kCount = 1>
  __device__ __forceinline__ void clear() {
    const uint32_t from = ring.base() + uint32_t(Config::kResetOffset) + threadIdx.x % 4 * 16u;
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) {
      load_accumulators(acc[i % 2] + 8 * kFirst + i / 2 * 4,
                        from + uint32_t(i % 2 * Config::kResetCopy + i / 2 % 2 * 64));
    }
  }

  // ---- their gradient

  // dy of the slab's output plane `plane`, which is in slot kSlot, as fragments.
  template <int kSlot>
  __device__ __forceinline__ void form_gradient(int plane) {
    Terms of;
    load_terms(of, plane);
    float v[16];
    output_gradients<kSlot>(of, v);
    round_gradients(v);
  }

  __device__ __forceinline__ void load_terms(Terms& of, int plane) const {
    const uint32_t from = plane < outputs ? terms_from : zeros_from;
    load_shared(of.mean, from);
    load_shared(of.alpha, from + 64);
    load_shared(of.slope, from + 128);
    if constexpr (Config::kFloat) load_shared(of.biases, from + 192);
  }

  // dy of the plane in slot kSlot, zero where the lane has no output: [column][channel].
  template <int kSlot>
  __device__ __forceinline__ void output_gradients(const Terms& of, float (&v)[16]) {
    const auto &mean = of.mean, &alpha = of.alpha, &slope = of.slope, &biases = of.biases;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = j / 4, i = j % 4;
      const float y = acc[column % 2][8 * kSlot + i / 2 * 4 + column / 2 * 2 + i % 2];
      v[j] = Config::kFloat ? fmaf(y, unscale[i], biases[i]) : y;
    }
    if constexpr (kHardswish) {
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        // Half of hardswish's derivative is the gate less 1/4, or half of it beyond the knees.
        float y[4], gate[4], half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = v[4 * column + i];
          gate[i] = __saturatef(fmaf(y[i], 1.f / 6.f, 0.5f));
          half[i] = gate[i] - 0.25f;
        }
        multiply_beyond(half, y, 3.f, gate, __uint_as_float(inside[column]), inside[column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float d = fmaf(y[i], gate[i], -mean[i]);
          v[4 * column + i] = fmaf(slope[i], d, alpha[i]) * half[i];
        }
      }
    } else {
      transform(act, v, [&](const auto& function, float y, int i) {
        return fmaf(slope[i], function.value(y) - mean[i], alpha[i]) * function.derivative(y);
      });
#pragma unroll
      for (int j = 0; j < 16; ++j) v[j] = inside[j / 4] != 0 ? v[j] : 0.f;
    }
  }

  // dy as fragments.
  __device__ __forceinline__ void round_gradients(const float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int column = j / 4, half = j % 4 / 2;
      const uint32_t pair = wgmma_input_pack<Config>(v[j], v[j + 1]);
      gradient[0][3 + column % 2][column / 2 + 2 * half] = pair;
      if constexpr (Config::kSplit) {
        __half2 halves;
        memcpy(&halves, &pair, 4);
        const float2 back = __half22float2(halves);
        gradient[kParts - 1][3 + column % 2][column / 2 + 2 * half] =
            wgmma_input_pack<Config>(v[j] - back.x, v[j + 1] - back.y);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts && Config::kInput; ++part) shift(gradient[part]);
  }

  // Fragments of negative columns from those of columns 0, 2 and 1, 3.
  __device__ __forceinline__ void shift(uint32_t (&f)[5][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[0][i] = __shfl_sync(~0u, f[4][i], before) & before_mask;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      f[1][i] = __shfl_sync(~0u, f[3][i + 1], before) & before_mask;
      f[1][i + 1] = distinct_copy(f[3][i], ring.p.zero);
      f[2][i] = distinct_copy(f[0][i + 1], ring.p.zero);
      f[2][i + 1] = distinct_copy(f[4][i], ring.p.zero);
    }
  }
};

}  // namespace convnormpool
