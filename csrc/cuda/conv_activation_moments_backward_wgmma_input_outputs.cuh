// The outputs once more and their gradient, in the Hopper kernel of the input's gradient: one
// thread's windows, fragments and accumulators. See
// conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaInputOutputs {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;
  static constexpr bool kHardswish = std::is_same_v<Act, HardswishFn>;

  WgmmaInputRing<Config>& ring;
  const Act act;

  float acc[2][8 * kT];  // [tile][slot]; rows g and g + 8 are columns tile and tile + 2 of four
  uint32_t a[2][Config::kSteps][4];
  uint32_t window[kC][Config::kWindowWords];
  // dy of the columns m - 3 and m - 1 of this lane's four; negative ones are of the block before.
  uint32_t gradient[kParts][5][4];
  // Of the lane's channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9: what an output's accumulator begins
  // with, and if scaled y = accumulator * unscale + bias.
  float reset[4], unscale[4];
  int exponent;           // x is scaled by 2^exponent
  int gradient_exponent;  // and dy by this one
  uint32_t mask[4];       // all ones where the lane's column is an output
  int outputs;            // planes from the slab's first on that are outputs
  uint32_t address;       // of this lane's windows in stage 0
  int before;             // the lane of the block of columns before; itself in the first block
  uint32_t before_mask;   // zero in the first block
  float zero;             // in a register: to write a constant takes two instructions

  __device__ __forceinline__ WgmmaInputOutputs(WgmmaInputRing<Config>& r, const Act& activation)
      : ring(r), act(activation) {}

  static __device__ __forceinline__ int lane() { return WgmmaInputRing<Config>::lane(); }
  static __device__ __forceinline__ int warp() { return WgmmaInputRing<Config>::warp(); }
  static __device__ __forceinline__ int block() { return wgmma_block<Config>(lane() / 4); }
  // The index of channel i of this lane among the tile's 16.
  static __device__ __forceinline__ int channel(int i) {
    return i / 2 * 8 + lane() % 4 * 2 + i % 2;
  }

  // ---- what changes from quad to quad

  __device__ __forceinline__ void begin() {
    const WgmmaInputParams& p = ring.p;
    const int first_channel = 16 * p.first_tile;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = first_channel + channel(i);
      reset[i] = Config::kFloat ? 0.f : bias(k);
      unscale[i] = 1.f;
    }
#pragma unroll
    for (int i = 0; i < 8 * kT; ++i) acc[0][i] = acc[1][i] = reset[i % 8 / 4 * 2 + i % 2];
    address = ring.stage_address(0) + uint32_t((warp() + lane() % 4) * Config::kPitch +
                                               block() * 4 * Config::kElementBytes);
    before_mask = block() == 0 ? 0u : ~0u;
    before = lane();
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (wgmma_block<Config>(g) == block() - 1) before = 4 * g + lane() % 4;
    }
    exponent = gradient_exponent = outputs = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mask[i] = 0u;
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

  // The gradient's terms of a sample and their scale: |a(y) - mean| is at most the root of M2, and
  // no activation's slope is above 1.5.
  __device__ __forceinline__ void begin_sample(int n) {
    const WgmmaInputParams& p = ring.p;
    const float positions = float(int64_t(p.Z) * p.P * p.Q);
    float mean[4], alpha[4], slope[4], biases[4], bound = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 16 * p.first_tile + channel(i);
      const bool exists = k < p.K;
      const int64_t at = int64_t(n) * p.K + (exists ? k : 0);
      biases[i] = bias(k);
      mean[i] = exists ? p.mean[at] : 0.f;
      alpha[i] = exists ? p.grad_mean[at] / positions : 0.f;
      slope[i] = exists ? 2.f * p.grad_m2[at] : 0.f;
      // The second term covers roundings of y where nearly all outputs are alike.
      const float spread = exists ? sqrtf(p.m2[at]) + fabsf(mean[i]) * 0x1p-10f : 0.f;
      bound = fmaxf(bound, 2.f * (fabsf(alpha[i]) + fabsf(slope[i]) * spread));
    }
    if constexpr (!Config::kBFloat16) {
      bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, 1));
      bound = fmaxf(bound, __shfl_xor_sync(~0u, bound, 2));
      gradient_exponent = min(141 - wgmma_exponent_field(__float_as_uint(bound)), 127);
    }
    // Twice as large for hardswish, whose derivative comes as its half.
    constexpr float kFactor = kHardswish ? 2.f : 1.f;
    const float scale = wgmma_power_of_two(gradient_exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      alpha[i] = alpha[i] * scale * kFactor;
      slope[i] = slope[i] * scale * kFactor;
    }
    if (lane() < 4) {
      store_shared(terms(), mean);
      store_shared(terms() + 64, alpha);
      store_shared(terms() + 128, slope);
      store_shared(terms() + 192, biases);
    }
    __syncwarp();
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
      mask[i] = row && column >= 0 && column < p.Q ? ~0u : 0u;
    }
  }

  // ---- the outputs again

  __device__ __forceinline__ void next_window() {
    ring.next();
    load_window();
  }

  __device__ __forceinline__ void load_window() {
    const bool tap = Config::kR == 4 || lane() % 4 < Config::kR;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      constexpr int kChannelBytes = Config::kPitch * (4 + Config::kR - 1);
      uint32_t at = address + uint32_t(ring.stage * Config::kStageBytes + ci * kChannelBytes);
      if (!tap) at = shared_address(dynamic_shared_memory() + Config::kZeroOffset);
      if constexpr (Config::kFloat) {
        uint32_t low_words[4], high_words[4];
        load_shared(low_words, at);
        load_shared(high_words, at + 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          window[ci][i] = low_words[i], window[ci][i + 4] = high_words[i];
        }
      } else {
        uint32_t low_words[2], high_words[2];
        load_shared(low_words, at);
        load_shared(high_words, at + 8);
        window[ci][0] = low_words[0], window[ci][1] = low_words[1];
        window[ci][2] = high_words[0], window[ci][3] = high_words[1];
      }
    }
  }

  // The registers of a step from four words that hold x[0 .. 7]: rows g are column kTile, rows g +
  // 8 are two on; a register is the pair that begins there, or two on for kw = 2, 3. Where the
  // filter has no kw the pair's half is zero.
  template <int kTile>
  __device__ __forceinline__ void pairs(uint32_t (&to)[4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = i % 2 + i / 2, taps = kS - i / 2 * 2;
      const uint32_t pair = kTile == 0
                                ? words[word]
                                : __byte_perm(words[word], words[word < 3 ? word + 1 : 3], 0x5432);
      to[i] = taps >= 2 ? pair : taps == 1 ? pair & 0xFFFFu : 0u;
    }
  }

  // The eight floats of a window become four words of high and, if split, four of low halves.
  __device__ __forceinline__ void make_halves(uint32_t (&words)[Config::kWindowWords]) {
    const float scale = wgmma_power_of_two(exponent);
    uint32_t rest_words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x0 = __uint_as_float(words[2 * i]) * scale;
      const float x1 = i == 3 ? 0.f : __uint_as_float(words[2 * i + 1]) * scale;
      const __half2 high_half = __floats2half2_rn(x0, x1);
      if constexpr (Config::kSplit) {
        const float2 back = __half22float2(high_half);
        const __half2 rest = __floats2half2_rn(x0 - back.x, x1 - back.y);
        memcpy(&rest_words[i], &rest, 4);
      }
      memcpy(&words[i], &high_half, 4);
    }
#pragma unroll
    for (int i = 0; i < 4 && Config::kSplit; ++i) words[4 + i] = rest_words[i];
  }

  // Chooses the scale of the plane in `window`, for each four lanes that share rows of A. The
  // largest magnitude comes to 2^12 at first; the scale stays until a plane would pass 2^15 or stay
  // below 1. Up it goes by no more than 2^24 a plane: sums of a plane that much larger leave the
  // accumulators before they could overflow.
  __device__ __forceinline__ void choose_scale(bool first_plane) {
    float largest = 0.f;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
#pragma unroll
      for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[ci][i])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const uint32_t bits = __float_as_uint(largest);
    const int field = wgmma_exponent_field(bits);
    const int fitting = min(139 - field, 127);
    if (first_plane) {
      set_exponent(fitting);
    } else {
      const bool unfit = uint32_t(field - 127 + exponent) > 14u && bits != 0;
      if (__any_sync(~0u, unfit)) {
        const int next = unfit ? min(fitting, exponent + 24) : exponent, change = next - exponent;
        const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
        for (int i = 0; i < 8 * kT; ++i) {
          scale_accumulator(acc[0][i], factor);
          scale_accumulator(acc[1][i], factor);
        }
        set_exponent(next);
      }
    }
  }

  __device__ __forceinline__ void set_exponent(int e) {
    const int* exponents =
        reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
    exponent = e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unscale[i] = wgmma_power_of_two_or_limit(-(e + exponents[channel(i)]));
    }
  }

  // The fragments of the plane in `window`.
  __device__ __forceinline__ void fragments(bool first_plane) {
    if constexpr (Config::kFloat) choose_scale(first_plane);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      if constexpr (Config::kFloat) make_halves(window[ci]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = window[ci][4 * part + i];
        pairs<0>(a[0][part * kC + ci], words);
        pairs<1>(a[1][part * kC + ci], words);
      }
    }
  }

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

  template <int kSlot>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      set_accumulator(acc[i / 8][8 * kSlot + i % 8],
                      Config::kFloat ? zero : reset[i % 8 / 4 * 2 + i % 2]);
    }
  }

  // ---- their gradient

  // dy of the slab's output plane `plane`, which is in slot kSlot, as fragments.
  template <int kSlot>
  __device__ __forceinline__ void form_gradient(int plane) {
    const bool counted = plane < outputs;
    float mean[4], alpha[4], slope[4], biases[4];
    load_shared(mean, terms());
    load_shared(alpha, terms() + 64);
    load_shared(slope, terms() + 128);
    if constexpr (Config::kFloat) load_shared(biases, terms() + 192);
    float v[16];  // [column][channel]
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = j / 4, i = j % 4;
      const float y = acc[column % 2][8 * kSlot + i / 2 * 4 + column / 2 * 2 + i % 2];
      v[j] = Config::kFloat ? fmaf(y, unscale[i], biases[i]) : y;
    }
    if constexpr (kHardswish) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float y = v[j], gate = __saturatef(fmaf(y, 1.f / 6.f, 0.5f));
        const float d = fmaf(y, gate, -mean[j % 4]);
        v[j] = fmaf(slope[j % 4], d, alpha[j % 4]) * half_hardswish_derivative(y, gate);
      }
    } else {
      transform(act, v, [&](const auto& function, float y, int i) {
        return fmaf(slope[i], function.value(y) - mean[i], alpha[i]) * function.derivative(y);
      });
    }
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const int column = j / 4, half = j % 4 / 2;
      const uint32_t live = counted ? mask[column] : 0u;
      const uint32_t pair = wgmma_input_pack<Config>(v[j], v[j + 1]);
      gradient[0][3 + column % 2][column / 2 + 2 * half] = pair & live;
      if constexpr (Config::kSplit) {
        __half2 halves;
        memcpy(&halves, &pair, 4);
        const float2 back = __half22float2(halves);
        gradient[kParts - 1][3 + column % 2][column / 2 + 2 * half] =
            wgmma_input_pack<Config>(v[j] - back.x, v[j + 1] - back.y) & live;
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) shift(gradient[part]);
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
      f[1][i + 1] = f[3][i];
      f[2][i] = f[0][i + 1];
      f[2][i + 1] = f[4][i];
    }
  }
};

}  // namespace convnormpool
