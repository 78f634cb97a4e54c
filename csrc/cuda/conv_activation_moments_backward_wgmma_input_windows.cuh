// The windows of the Hopper kernel of the input's gradient: one thread's part of an input plane
// from shared memory to fragments, and the scale of split and tf32 operands. See
// conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"
#include "cuda/conv_activation_moments_wgmma_round.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaInputWindows {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;

  WgmmaInputRing<Config>& ring;

  float acc[2][8 * kT];  // [tile][slot]; rows g and g + 8 are columns tile and tile + 2 of four
  uint32_t a[2][Config::kSteps][4];
  uint32_t window[kC][Config::kWindowWords];
  // Of the lane's channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9, if scaled: y = accumulator * unscale +
  // bias.
  float unscale[4];
  int exponent;      // x is scaled by 2^exponent
  uint32_t address;  // of this lane's windows in stage 0

  explicit __device__ __forceinline__ WgmmaInputWindows(WgmmaInputRing<Config>& r) : ring(r) {}

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

  // Of this lane's windows in stage 0, in the first of its boxes.
  __device__ __forceinline__ uint32_t window_address() const {
    const int thread = cold_thread(), lane = thread % 32;
    return ring.stage_address(0) +
           uint32_t((thread % 128 / 32 + lane % 4) * Config::kPitch +
                    wgmma_block<Config>(lane / 4) * 4 * Config::kElementBytes);
  }

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
      wgmma_load_window<Config>(window[ci], at);
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

  __device__ __forceinline__ int round_window() {
    return wgmma_round_windows<Config>(window, exponent);
  }
  // The bits of the largest magnitude in the loaded windows of the four lanes that share rows of A.
  __device__ __forceinline__ uint32_t largest_input() const {
    return __float_as_uint(wgmma_largest_input<Config>(window));
  }

  // Rounds the plane in `window`, scaled for each four lanes that share rows of A. The largest
  // magnitude comes to 2^12 at first; the scale stays until a plane would pass 2^15 or stay below
  // 1, and then the accumulators follow. Returns the lane's largest magnitude, perhaps rounded.
  template <bool kFirst>
  __device__ __forceinline__ float scale_window() {
    if constexpr (kFirst) {
      const uint32_t bits = largest_input();
      set_exponent(min(139 - wgmma_exponent_field(bits), 127));
      round_window();
      return __uint_as_float(bits);
    } else {
      constexpr int kOne = 0x3C00, kMost = 0x7800;  // 1 and 2^15 as halves
      // A lane's own row may be small beside those of the other three, which follow() finds out.
      const int largest = round_window();
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
      wgmma_follow_scale(acc, change);
      set_exponent(next);
    }
    round_window();
    return __uint_as_float(bits);
  }

  __device__ __forceinline__ void set_exponent(int e) {
    exponent = e;
    wgmma_unscale<Config>(unscale, e, lane());
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
};

}  // namespace convnormpool
