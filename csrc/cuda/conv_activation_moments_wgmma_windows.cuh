// The windows of the Hopper window kernel: one thread's part of an input plane from shared memory
// to fragments, and the scale of split and tf32 operands. See conv_activation_moments_wgmma.cuh.
#pragma once

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_round.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaWindows {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS;

  WgmmaRing<Config>& ring;

  float acc[2][8 * kT];
  uint32_t a[2][Config::kSteps][4];
  uint32_t window[kC][Config::kWindowWords];
  // kFloat: x is scaled by 2^exponent, an output is an accumulator times unscale.
  float unscale[4];
  int exponent;
  // Where this lane's windows stand: + stage offset + channel * channel_bytes. Lanes that stand for
  // rows the filter lacks read zeros, which have no stages and no channels.
  uint32_t address, channel_bytes;

  explicit __device__ __forceinline__ WgmmaWindows(WgmmaRing<Config>& r) : ring(r) {}

  static __device__ __forceinline__ int lane() { return int(threadIdx.x % 32); }

  template <int kStage>
  __device__ __forceinline__ void load_window() {
    const bool tap = Config::kR == 4 || lane() % 4 < Config::kR;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t at = address + uint32_t(kStage * ring.p.stage_bytes) + uint32_t(ci) * channel_bytes;
      if (!tap) at = shared_address(dynamic_shared_memory() + Config::kZeroOffset);
      wgmma_load_window<Config>(window[ci], at);
    }
  }

  // The registers of a 16-bit step from four words that hold x[0 .. 7]: the pairs that begin at the
  // columns of both halves of the tile, and for kw = 2, 3 two columns on. Where the filter has no
  // kw the pair's half is zero.
  template <int kTile>
  __device__ __forceinline__ void pairs(uint32_t (&to)[4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = Config::kTileColumns * kTile + Config::kHalfColumns * (i % 2) + i / 2 * 2;
      const int taps = kS - i / 2 * 2;
      uint32_t pair = words[at / 2];
      if (at % 2 == 1) pair = __byte_perm(words[at / 2], words[at / 2 + 1], 0x5432);
      to[i] = taps >= 2 ? pair : taps == 1 ? pair & 0xFFFFu : 0u;
    }
    if (kS >= 4 && Config::kHalfColumns == 2) to[2] = distinct_copy(to[1], ring.p.zero);
  }

  template <int kTile>
  __device__ __forceinline__ void build(int ci, const uint32_t (&words)[Config::kWindowWords]) {
    if constexpr (Config::kSplit) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = words[i], low[i] = words[4 + i];
      pairs<kTile>(a[kTile][ci], high);
      pairs<kTile>(a[kTile][kC + ci], low);
    } else {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = words[i];
      pairs<kTile>(a[kTile][ci], four);
    }
  }

  __device__ __forceinline__ int round_window() {
    return wgmma_round_windows<Config>(window, exponent);
  }

  // The exponent field of the largest magnitude in the loaded windows of the four lanes that share
  // rows of A; `zero` where there is none.
  __device__ __forceinline__ int largest_field(int zero) const {
    const float largest = wgmma_largest_input<Config>(window);
    return largest == 0.f ? zero : wgmma_exponent_field(__float_as_uint(largest));
  }

  // kFloat: rounds the plane in `window`, of stage kStage, scaled for each four lanes that share
  // rows of A. The largest magnitude comes to 2^12 at first; the scale stays until a plane would
  // pass 2^15 or stay below 1, and then the accumulators follow.
  template <bool kFirst, int kStage>
  __device__ __forceinline__ void scale_window() {
    if constexpr (kFirst) {
      set_exponent(min(139 - largest_field(0), 127));
      round_window();
    } else {
      constexpr int kOne = 0x3C00, kMost = 0x7800;  // 1 and 2^15 as halves
      // A lane's own row may be small beside those of the other three, which follow() finds out.
      const int largest = round_window();
      const bool fits = uint32_t(largest - kOne) < uint32_t(kMost - kOne) || largest == 0;
      if (__builtin_expect(__any_sync(~0u, !fits) != 0, 0)) follow<kStage>();
    }
  }

  // Chooses the scale anew where the plane needs it. Up it goes by no more than 2^24 a plane: sums
  // of a plane that much larger leave the accumulators before they could overflow.
  template <int kStage>
  __device__ __forceinline__ void follow() {
    load_window<kStage>();
    const int field = largest_field(127 - exponent);
    const bool unfit = uint32_t(field - 127 + exponent) > 14u;
    const int next = unfit ? min(min(139 - field, 127), exponent + 24) : exponent;
    const int change = next - exponent;
    if (__any_sync(~0u, unfit)) {
      wgmma_follow_scale(acc, change);
      set_exponent(next);
    }
    round_window();
  }

  __device__ __forceinline__ void set_exponent(int e) {
    exponent = e;
    wgmma_unscale<Config>(unscale, e, lane());
  }

  // The fragments of the plane in `window`; kFirst: of an item.
  template <bool kFirst, int kStage>
  __device__ __forceinline__ void fragments() {
    if constexpr (Config::kFloat) scale_window<kFirst, kStage>();
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      build<0>(ci, window[ci]);
      build<1>(ci, window[ci]);
    }
  }
};

}  // namespace convnormpool
