// The part of the filter in the Hopper kernel of all gradients: one thread's part of the operands
// and the sums of its warpgroup. See conv_activation_moments_backward_wgmma_both.cuh.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_results.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaBothFilter {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS;
  static constexpr int kNothing = 1 << 20;  // an exponent that nothing has

  WgmmaInputRing<Config>& ring;
  const WgmmaBothParams& p;

  float sums[8 * kC];  // [kh / 2][ci] of (kd, k) x (kw, kh % 2)
  float bias_sums[4];
  int slot = 0;               // of the step: where its dy and its x are
  uint32_t own = 0;           // all ones where dy in this lane's columns is no other segment's
  int own_from = 0;           // nor another slab's from this plane on
  uint32_t gradients_to;      // this lane's part of its row of dy in slot 0
  uint32_t planes_to;         // likewise of x
  uint32_t plane_step;        // bytes from a plane of x to the next, or 0 if nothing is stored
  int gradient_exponent = 0;  // of the dy in the sums
  // kFloat: exponents of x, that of the plane stored last, the lowest of its item's, of the sums,
  // and for each phase that of its last plane in a byte.
  int input_exponent = 0, lowest_exponent = kNothing, sums_input_exponent = 0;
  uint32_t plane_exponents = 0;
  // The first bits of a plane's largest magnitude that input_exponent fits, and those beyond.
  uint32_t fitting = 0, fitting_to = 0;

  __device__ __forceinline__ WgmmaBothFilter(WgmmaInputRing<Config>& r, const WgmmaBothParams& q)
      : ring(r), p(q) {}

  static __device__ __forceinline__ int lane() { return WgmmaInputRing<Config>::lane(); }
  static __device__ __forceinline__ int warp() { return WgmmaInputRing<Config>::warp(); }

  __device__ __forceinline__ unsigned char* own_memory() const {
    return dynamic_shared_memory() + Config::kFilterOffset + ring.group * Config::kFilterBytes;
  }
  __device__ __forceinline__ uint32_t base() const { return shared_address(own_memory()); }
  __device__ __forceinline__ int slot_before() const { return slot == 0 ? kT : slot - 1; }

  // Called by all threads of the warpgroup: no operands, no sums.
  __device__ __forceinline__ void begin() {
    for (int i = 16 * int(threadIdx.x % 128); i < Config::kFilterBytes; i += 16 * 128) {
      *reinterpret_cast<uint4*>(own_memory() + i) = make_uint4(0u, 0u, 0u, 0u);
    }
    fence_proxy_async();
    ring.meet();
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) sums[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_sums[i] = 0.f;
    gradients_to = base() + uint32_t(Config::kGradientOffset + warp() * 2 * Config::kTileBytes +
                                     lane() / 8 % 2 * Config::kHalfBytes + lane() / 16 * 128 +
                                     lane() % 8 * 16);
    // The rows of a matrix are the two columns of a pair for each kh; pairs that two warps have are
    // stored by that with the lower kh.
    const int kh = lane() % 8 / 2;
    const bool stored = !Config::kInput || warp() >= 2 || kh < 2;
    plane_step = stored ? uint32_t(Config::kPlaneBytes) : 0u;
    planes_to = base();
    if (stored) {
      planes_to += uint32_t(Config::kPlaneOffset + Config::pair_offset(warp(), kh / 2) +
                            lane() % 2 * Config::kColumnBytes + kh % 2 * 16);
    } else {
      planes_to += uint32_t(Config::kUnreadOffset);
    }
    if (Config::kFloat) planes_to += uint32_t(stored_column(lane() / 8) * Config::kColumnBytes);
    add_results<true>();
  }

  // In the first steps of a quad, with its terms known.
  __device__ __forceinline__ void begin_quad() {
    const WgmmaInputItem at(p, ring.item, Config::kSegmentStep);
    const int column = 4 * wgmma_block<Config>(lane() / 4);
    own = at.first_segment || column >= Config::kHaloColumns ? ~0u : 0u;
    own_from = at.first_slab ? 0 : kT - 1;
  }

  __device__ __forceinline__ void next_slot() { slot = slot_before(); }

  // Of dy of plane `plane`: [column][channel].
  __device__ __forceinline__ void add_bias(const float (&v)[16], int plane) {
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      add_if(bias_sums, v + 4 * column, own_from <= plane ? own : 0u);
    }
  }

  // The fragments of both tiles of dy into the ring.
  __device__ __forceinline__ void store_gradients(const uint32_t (&first)[4],
                                                  const uint32_t (&second)[4], int plane) {
    const uint32_t counted = own_from <= plane ? own : 0u;
    uint32_t masked[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      masked[0][i] = first[i] & counted, masked[1][i] = second[i] & counted;
    }
    store_tiles(masked[0], masked[1]);
  }
  __device__ __forceinline__ void store_no_gradients() {
    const uint32_t zeros[4] = {0u, 0u, 0u, 0u};
    store_tiles(zeros, zeros);
  }
  __device__ __forceinline__ void store_tiles(const uint32_t (&first)[4],
                                              const uint32_t (&second)[4]) {
    const uint32_t to = gradients_to + uint32_t(slot * Config::kPlaceBytes);
    stmatrix_x4(to, first);
    stmatrix_x4(to + uint32_t(Config::kTileBytes), second);
    const uint32_t again = slot < kT - 1 ? to + Config::kSlots * Config::kPlaceBytes : to;
    stmatrix_x4(again, first);
    stmatrix_x4(again + uint32_t(Config::kTileBytes), second);
  }

  // kFloat: the largest magnitude of the plane in work, in the windows of four lanes.
  template <int kPhase>
  __device__ __forceinline__ void note_largest(float largest) {
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (lane() == 0) reinterpret_cast<uint32_t*>(own_memory())[4 * kPhase + warp()] = bits;
    __syncwarp();
  }

  // kFloat: after all warps' note_largest, the exponent for the plane in work. It stays until a
  // plane would pass 2^15, or stay below 1 (2^9 where an item's values begin).
  template <int kPhase>
  __device__ __forceinline__ void choose_exponent(bool first_of_item) {
    uint32_t of[4];
    load_shared(of, base() + uint32_t(16 * kPhase));
    const uint32_t bits = max(max(of[0], of[1]), max(of[2], of[3]));
    if (first_of_item) {
      lowest_exponent = kNothing;
      fitting = fitting_to - (6u << 23);
    }
    if (__builtin_expect(bits < fitting || bits >= fitting_to, 0)) change_exponent(bits);
    plane_exponents = __byte_perm(plane_exponents, uint32_t(input_exponent),
                                  0x3210u + ((4u - kPhase) << (4 * kPhase)));
  }

  // Sums go up with it by no more than float has room for.
  __device__ __forceinline__ void change_exponent(uint32_t bits) {
    if (bits == 0) return;
    const int field = wgmma_exponent_field(bits);
    input_exponent = min(min(139 - field, 127), lowest_exponent + 64);
    lowest_exponent = min(lowest_exponent, input_exponent);
    fitting = uint32_t(127 - input_exponent) << 23;
    fitting_to = fitting + (15u << 23);
  }

  // Stores the plane in work, whose fragments are scaled by 2^exponent.
  __device__ __forceinline__ void store_plane(const uint32_t (&a)[2][Config::kSteps][4],
                                              int exponent) {
    if constexpr (Config::kFloat) {
      const int change = input_exponent - exponent;
      if (__builtin_expect(__any_sync(~0u, uint32_t(change + 14) > 29u) != 0, 0)) {
        const int near = min(max(change, -14), 15);
        const uint32_t first = half_power_of_two(near);
        const uint32_t second = half_power_of_two(min(max(change - near, -25), 15));
        store_pairs(
            a, [&](uint32_t pair) { return multiply_f16x2(multiply_f16x2(pair, first), second); });
      } else {
        const uint32_t factor = uint32_t(change + 15) * 0x04000400u;
        store_pairs(a, [&](uint32_t pair) { return multiply_f16x2(pair, factor); });
      }
    } else {
      store_pairs(a, [](uint32_t pair) { return pair; });
    }
  }

  // 2^e as two halves, 0 for e = -25.
  static __device__ __forceinline__ uint32_t half_power_of_two(int e) {
    const uint32_t half = e >= -14 ? uint32_t(e + 15) << 10 : e > -25 ? 1u << (e + 24) : 0u;
    return half * 0x10001u;
  }

  // The first column of the pair i of four that hold columns 0 .. 6 of the windows, or 0 .. 5 where
  // there is no kw = 3: those of the first tile begin at 0, 2, 2, 4, of the second at 1, 3, 3, 5.
  static __host__ __device__ constexpr int stored_column(int i) {
    return i < 2 ? 2 * i : i == 3 ? 5 : kS == 4 ? 4 : 3;
  }

  template <class Scaled>
  __device__ __forceinline__ void store_pairs(const uint32_t (&a)[2][Config::kSteps][4],
                                              const Scaled& scaled) {
    const uint32_t to =
        planes_to + uint32_t(slot) * (Config::kInput ? plane_step : uint32_t(Config::kPlaneBytes));
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      const uint32_t at = to + uint32_t(ci * Config::kSpanStep);
      const uint32_t pairs[4] = {scaled(a[0][ci][0]), scaled(a[0][ci][1]),
                                 scaled(kS == 4 ? a[0][ci][3] : a[1][ci][1]), scaled(a[1][ci][3])};
      if constexpr (Config::kFloat) {
        stmatrix_x4_trans(at, pairs);
      } else {
        // One by one: the fragments' registers would have to be copied to follow each other.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          stmatrix_x1_trans(at + uint32_t(stored_column(i) * Config::kColumnBytes), pairs[i]);
        }
      }
    }
  }

  // The products of the plane of x that waited longest, which ends a group.
  __device__ __forceinline__ void multiply() {
    const uint32_t gradients =
        wgmma_operand(base() + uint32_t(Config::kGradientOffset), Config::kHalfBytes) +
        uint32_t(slot * (Config::kPlaceBytes / 16));
    const uint32_t inputs =
        wgmma_operand(base() + uint32_t(Config::kPlaneOffset), 2 * Config::kColumnBytes) +
        uint32_t(slot_before() * (Config::kPlaneBytes / 16));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = i / 2, tile = i % 2;
      const int from = Config::pair_offset(row, 0) + tile * Config::kColumnBytes;
      wgmma_shared<Config::kType, 16 * kC, Config::kSpanStep>(
          sums, gradients + uint32_t(i * Config::kTileBytes / 16), inputs + uint32_t(from / 16));
    }
    wgmma_commit();
  }

  // kFloat: before the products with the plane of phase kPhase, with none under way: the sums come
  // to its exponent.
  template <int kPhase>
  __device__ __forceinline__ void follow_exponent() {
    const int exponent = int(int8_t(plane_exponents >> (8 * kPhase)));
    if (__builtin_expect(exponent != sums_input_exponent, 0)) {
      const int change = min(exponent - sums_input_exponent, 127);
      const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
      for (int i = 0; i < 8 * kC; ++i) scale_accumulator(sums[i], factor);
      sums_input_exponent = exponent;
    }
  }

  // Adds the sums to the warpgroup's results in memory and begins new ones.
  __device__ __forceinline__ void flush() {
    add_results<false>();
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) set_accumulator(sums[i], 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_sums[i] = 0.f;
  }

  // Or, if kClear, writes zeros.
  template <bool kClear>
  __device__ __forceinline__ void add_results() {
    const int64_t at =
        (int64_t(p.first_tile) * gridDim.x + blockIdx.x) * Config::kWarpgroups + ring.group;
    // Where registers are short no address may wait in them from one call to the next.
    const bool anew = !Config::kInput && Config::kFloat;
    const uint32_t thread = anew ? uint32_t(thread_index_anew()) : threadIdx.x;
    wgmma_both_add_filter<Config, kClear>(p.filter_partial + at * 16 * Config::kTaps, sums,
                                          thread % 128, -(gradient_exponent + sums_input_exponent));
    wgmma_both_add_bias<kClear>(p.bias_partial + at * 64, bias_sums, thread % 128,
                                -gradient_exponent);
  }
};

}  // namespace convnormpool
