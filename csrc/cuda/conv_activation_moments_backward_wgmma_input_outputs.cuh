// The outputs once more and their gradient, in the Hopper kernel of the input's gradient: one
// thread's windows, fragments and accumulators. See
// conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
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
  // Of the lane's channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9, if scaled: y = accumulator * unscale +
  // bias.
  float unscale[4];
  int exponent;           // x is scaled by 2^exponent
  int gradient_exponent;  // and dy by this one
  uint32_t inside[4];     // 1/2 as a float where the lane's column is an output, or 0
  int outputs;            // planes from the slab's first on that are outputs
  uint32_t address;       // of this lane's windows in stage 0
  uint32_t terms_from, zeros_from;
  int before;            // the lane of the block of columns before; itself in the first block
  uint32_t before_mask;  // zero in the first block
  float zero;            // in a register: to write a constant takes two instructions

  __device__ __forceinline__ WgmmaInputOutputs(WgmmaInputRing<Config>& r, const Act& activation)
      : ring(r), act(activation) {}

  static __device__ __forceinline__ int lane() { return WgmmaInputRing<Config>::lane(); }
  static __device__ __forceinline__ int warp() { return WgmmaInputRing<Config>::warp(); }
  static __device__ __forceinline__ int block() { return wgmma_block<Config>(lane() / 4); }
  // threadIdx.x where time does not count: where registers are short, what is made from it must not
  // wait in them for a later use.
  static __device__ __forceinline__ int cold_thread() {
    return Config::kIndexAnew ? thread_index_anew() : int(threadIdx.x);
  }
  // The index of channel i of a lane among the tile's 16.
  static __device__ __forceinline__ int channel(int i, int lane) {
    return i / 2 * 8 + lane % 4 * 2 + i % 2;
  }

  // ---- what changes from quad to quad

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4; ++i) unscale[i] = 1.f;
#pragma unroll
    for (int i = 0; i < 8 * kT; ++i) acc[0][i] = acc[1][i] = 0.f;
    clear<0, kT>();
    address = window_address();
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

  // Of this lane's windows in stage 0, in the first of its boxes.
  __device__ __forceinline__ uint32_t window_address() const {
    const int thread = cold_thread(), lane = thread % 32;
    return ring.stage_address(0) +
           uint32_t((thread % 128 / 32 + lane % 4) * Config::kPitch +
                    wgmma_block<Config>(lane / 4) * 4 * Config::kElementBytes);
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

  __device__ __forceinline__ void next_window() {
    ring.next();
    load_window();
  }

  __device__ __forceinline__ void load_window() {
    const bool tap = Config::kR == 4 || lane() % 4 < Config::kR;
    uint32_t from = address + uint32_t(ring.stage * Config::kStageBytes);
    // Else each channel's address would wait in a register, and be added up.
    if (!Config::kInput) from = uint32_t(opaque_value(int(from)));
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      constexpr int kChannelBytes = Config::kPitch * (4 + Config::kR - 1);
      uint32_t at = from + uint32_t(ci * kChannelBytes);
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
    if (kS >= 4) to[2] = distinct_copy(to[1], ring.p.zero);
  }

  // The eight floats of each window become four words of high and, if split, four of low halves.
  // Returns the largest magnitude as the bits of a half.
  __device__ __forceinline__ int make_halves() {
    const float scale = wgmma_power_of_two(exponent);
    __half2 largest = __floats2half2_rn(0.f, 0.f);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t (&words)[Config::kWindowWords] = window[ci];
      uint32_t rest_words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x0 = __uint_as_float(words[2 * i]) * scale;
        const float x1 = i == 3 ? 0.f : __uint_as_float(words[2 * i + 1]) * scale;
        const __half2 high_half = __floats2half2_rn(x0, x1);
        largest = __hmax2(largest, __habs2(high_half));
        if constexpr (Config::kSplit) {
          const float2 back = __half22float2(high_half);
          const __half2 rest = __floats2half2_rn(x0 - back.x, i == 3 ? 0.f : x1 - back.y);
          memcpy(&rest_words[i], &rest, 4);
        }
        memcpy(&words[i], &high_half, 4);
      }
#pragma unroll
      for (int i = 0; i < 4 && Config::kSplit; ++i) words[4 + i] = rest_words[i];
    }
    return max(int(__half_as_ushort(__low2half(largest))),
               int(__half_as_ushort(__high2half(largest))));
  }

  // The bits of the largest magnitude in the loaded windows of the four lanes that share rows of A.
  __device__ __forceinline__ uint32_t largest_input() const {
    float largest = 0.f;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
#pragma unroll
      for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[ci][i])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return __float_as_uint(fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)));
  }

  // Rounds the plane in `window`, scaled for each four lanes that share rows of A. The largest
  // magnitude comes to 2^12 at first; the scale stays until a plane would pass 2^15 or stay below
  // 1, and then the accumulators follow. Returns the lane's largest magnitude, perhaps rounded.
  template <bool kFirst>
  __device__ __forceinline__ float scale_window() {
    if constexpr (kFirst) {
      const uint32_t bits = largest_input();
      set_exponent(min(139 - wgmma_exponent_field(bits), 127));
      make_halves();
      return __uint_as_float(bits);
    } else {
      constexpr int kOne = 0x3C00, kMost = 0x7800;  // 1 and 2^15 as halves
      // A lane's own row may be small beside those of the other three, which follow() finds out.
      const int largest = make_halves();
      const bool fits = uint32_t(largest - kOne) < uint32_t(kMost - kOne) || largest == 0;
      if (__builtin_expect(__any_sync(~0u, !fits) != 0, 0)) return follow();
      return __half2float(__ushort_as_half(uint16_t(largest))) *
             wgmma_power_of_two(max(-exponent, -126));
    }
  }

  // Chooses the scale anew where the plane needs it. Up it goes by no more than 2^24 a plane: sums
  // of a plane that much larger leave the accumulators before they could overflow.
  __device__ __forceinline__ float follow() {
    load_window();
    const uint32_t bits = largest_input();
    const int field = wgmma_exponent_field(bits);
    const bool unfit = uint32_t(field - 127 + exponent) > 14u && bits != 0;
    if (__any_sync(~0u, unfit)) {
      const int next = unfit ? min(min(139 - field, 127), exponent + 24) : exponent;
      const int change = next - exponent;
      const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
      for (int i = 0; i < 8 * kT; ++i) {
        scale_accumulator(acc[0][i], factor);
        scale_accumulator(acc[1][i], factor);
      }
      set_exponent(next);
    }
    make_halves();
    return __uint_as_float(bits);
  }

  __device__ __forceinline__ void set_exponent(int e) {
    const int* exponents =
        reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
    exponent = e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unscale[i] = wgmma_power_of_two_or_limit(-(e + exponents[channel(i, lane())]));
    }
  }

  // The fragments of the plane in `window`; kFirst: of a quad. Returns what scale_window does.
  template <bool kFirst>
  __device__ __forceinline__ float fragments() {
    float largest = 0.f;
    if constexpr (Config::kFloat) largest = scale_window<kFirst>();
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = window[ci][4 * part + i];
        pairs<0>(a[0][part * kC + ci], words);
        pairs<1>(a[1][part * kC + ci], words);
      }
    }
    return largest;
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
