// The outputs once more and their gradient, in the Hopper kernel of all gradients with split
// operands: one thread's fragments and sums. See
// conv_activation_moments_backward_wgmma_both_split.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_outputs.cuh"

namespace convnormpool {

// What concerns a sample, a quad and a plane's terms is WgmmaInputOutputs'.
template <class Config, class Act>
struct WgmmaBothSplitOutputs : WgmmaInputOutputs<Config, Act> {
  using Base = WgmmaInputOutputs<Config, Act>;
  using Terms = typename Base::Terms;
  using Base::act, Base::gradient_exponent, Base::inside, Base::ring, Base::unscale;
  using Base::lane, Base::warp;
  static constexpr int kT = Config::kT, kC = Config::kC, kParts = Config::kParts;
  static constexpr int kSteps = Config::kSteps;

  const int tile;
  float y[8 * kT];       // [slot]
  uint32_t inputs_from;  // this lane's row of matrices of x in slot 0

  __device__ __forceinline__ WgmmaBothSplitOutputs(WgmmaInputRing<Config>& r, const Act& activation,
                                                   int t)
      : Base(r, activation), tile(t) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& v : y) v = 0.f;
    this->terms_from = uint32_t(opaque_value(int(Base::terms())));
    this->zeros_from = ring.base() + uint32_t(Config::kZeroOffset);
    this->outputs = gradient_exponent = 0;
    inside[0] = inside[1] = 0u;
    set_exponent(0);
    inputs_from = ring.base() +
                  uint32_t(Config::kPlaneOffset + Config::pair_offset(warp(), lane() / 16) +
                           (2 * tile + lane() / 8 % 2) * Config::kColumnBytes + lane() % 8 * 16);
  }

  // As Base's, but nothing for it waits in registers.
  __device__ __forceinline__ void set_exponent(int e) {
    const int* const exponents =
        reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
    const int lane = Base::cold_thread() % 32;
    this->exponent = e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unscale[i] = wgmma_power_of_two_or_limit(-(e + exponents[Base::channel(i, lane)]));
    }
  }

  // Whether a plane of the slab is one of outputs.
  __device__ __forceinline__ bool is_output(int plane) const {
    return plane < (Config::kWhole ? ring.p.Z : this->outputs);
  }

  // The terms of a sample, with dy = (alpha + slope a(y)) a'(y).
  __device__ __forceinline__ void begin_sample(int n) {
    Terms of;
    Base::choose_gradient_exponent(Base::sample_terms(of, n));
#pragma unroll
    for (int i = 0; i < 4; ++i) of.alpha[i] = fmaf(-of.slope[i], of.mean[i], of.alpha[i]);
    Base::begin_terms(of);
  }

  __device__ __forceinline__ void begin_quad() {
    const WgmmaInputParams& p = ring.p;
    const WgmmaInputItem at(p, ring.item, Config::kSegmentStep);
    if (ring.quad == 0) begin_sample(at.n);
    this->outputs = p.Z - at.plane;
    const int thread = Base::cold_thread();
    const int block = wgmma_block<Config>(thread % 32 / 4);
    const bool row = 4 * ring.quad + thread % 128 / 32 < p.P;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = at.column + 4 * block + 2 * tile + i;
      const bool output = row && column >= 0 && column < p.Q;
      inside[i] = uint32_t(opaque_value(output ? int(__float_as_uint(0.5f)) : 0));
    }
  }

  // An operand of which the compiler does not know that it is the same in every step: it would keep
  // the descriptors of all wgmmas in registers.
  __device__ __forceinline__ uint32_t fixed_operand(int offset, int depth_bytes) const {
    const uint32_t operand = wgmma_operand(ring.base() + uint32_t(offset), uint32_t(depth_bytes));
    return uint32_t(uniform_value(int(operand)));
  }

  // ---- the outputs again

  __device__ __forceinline__ void load_inputs(uint32_t (&a)[kSteps][4], int slot) const {
    const uint32_t from = inputs_from + uint32_t(slot * Config::kSlotBytes);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ldmatrix_x4_trans(a[i],
                        from + uint32_t(i / kC * Config::kPlaneBytes + i % kC * Config::kSpanStep));
    }
  }

  template <int kCount, bool kAccumulate = true>
  __device__ __forceinline__ void recompute_step(float* d, const uint32_t (&a)[4], uint32_t weights,
                                                 int step) const {
    wgmma<Config::kType, 16 * kCount, kAccumulate>(
        d, a, weights + uint32_t(step * Config::kStepBytes) / 16);
  }
  // By recursion: loops that call two wgmmas a turn are not always unrolled.
  template <int kCount, int kChannel>
  __device__ __forceinline__ void recompute_small(float* fresh, const uint32_t (&a)[kSteps][4],
                                                  uint32_t weights) const {
    if constexpr (kChannel < kC) {
      recompute_step<kCount, (kChannel > 0)>(fresh, a[kC + kChannel], weights, kChannel);
      recompute_step<kCount>(fresh, a[kChannel], weights, kC + kChannel);
      recompute_small<kCount, kChannel + 1>(fresh, a, weights);
    }
  }
  template <int kCount, int kChannel>
  __device__ __forceinline__ void recompute_large(float* fresh, const uint32_t (&a)[kSteps][4],
                                                  uint32_t weights) const {
    if constexpr (kChannel < kC) {
      recompute_step<kCount>(fresh, a[kChannel], weights, kChannel);
      recompute_large<kCount, kChannel + 1>(fresh, a, weights);
    }
  }

  // Begins the products [kd] of the step's plane of x with its first kCount depth taps.
  template <int kCount>
  __device__ __forceinline__ void recompute(float* fresh, uint32_t (&a)[kSteps][4]) const {
    pin_fragments(a);
    wgmma_fence();
    const uint32_t weights = fixed_operand(Config::kWeightOffset, Config::kDepthBytes);
    recompute_small<kCount, 0>(fresh, a, weights);
    recompute_large<kCount, 0>(fresh, a, weights);
    wgmma_commit();
  }

  // Adds them, x scaled by 2^exponent: slot kPhase begins.
  template <int kPhase, int kCount>
  __device__ __forceinline__ void add_outputs(const float* fresh, int exponent) {
    if (__builtin_expect(exponent != this->exponent, 0)) {
      const int change = min(exponent - this->exponent, 127);
      const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
      for (float& v : y) v *= factor;
      set_exponent(exponent);
    }
#pragma unroll
    for (int kd = 0; kd < kCount; ++kd) {
      float* const to = y + 8 * ((kPhase - kd + kT) % kT);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = (kd == 0 ? 0.f : to[i]) + fresh[8 * kd + i];
    }
    pin_accumulators(y);  // later, `fresh` would have to be copied
  }

  // ---- their gradient

  // dy of the plane in slot kSlot, zero where the lane has no output: [column][channel].
  template <int kSlot>
  __device__ __forceinline__ void output_gradients(const Terms& of, float (&v)[8]) const {
    const auto &alpha = of.alpha, &slope = of.slope, &biases = of.biases;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = j % 4;
      v[j] = fmaf(y[8 * kSlot + i / 2 * 4 + j / 4 * 2 + i % 2], unscale[i], biases[i]);
    }
    if constexpr (Base::kHardswish) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        // Half of hardswish's derivative is the gate less 1/4, or half of it beyond the knees.
        float value[4], gate[4], half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          value[i] = v[4 * column + i];
          gate[i] = __saturatef(fmaf(value[i], 1.f / 6.f, 0.5f));
          half[i] = gate[i] - 0.25f;
        }
        multiply_beyond(half, value, 3.f, gate, __uint_as_float(inside[column]), inside[column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[4 * column + i] = fmaf(slope[i], value[i] * gate[i], alpha[i]) * half[i];
        }
      }
    } else {
      transform(act, v, [&](const auto& function, float value, int i) {
        return fmaf(slope[i], function.value(value), alpha[i]) * function.derivative(value);
      });
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = inside[j / 4] != 0 ? v[j] : 0.f;
    }
  }

  // dy as operands.
  static __device__ __forceinline__ void split_gradients(const float (&v)[8],
                                                         uint32_t (&parts)[kParts][4]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int to = j / 4 + j % 4;
      const uint32_t pair = wgmma_input_pack<Config>(v[j], v[j + 1]);
      __half2 halves;
      memcpy(&halves, &pair, 4);
      const float2 back = __half22float2(halves);
      parts[0][to] = pair;
      parts[1][to] = wgmma_input_pack<Config>(v[j] - back.x, v[j + 1] - back.y);
    }
  }
};

}  // namespace convnormpool
