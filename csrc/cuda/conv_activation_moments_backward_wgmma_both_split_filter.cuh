// The part of the filter in the Hopper kernel of all gradients with split operands: one thread's
// part of dy as operands and of the sums of its warpgroup. See
// conv_activation_moments_backward_wgmma_both_split.cuh.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_results.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_inputs.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaBothSplitFilter {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;
  static constexpr int kNothing = 1 << 20;  // an exponent that nothing has
  static constexpr int kMostRise = 64;      // of an item's sums

  WgmmaInputRing<Config>& ring;
  const WgmmaBothParams& p;
  const int tile;

  float products[8 * kC];  // of a step: [kh / 2][ci] of (kd, k) x (kw, kh % 2)
  float sums[8 * kC];
  float bias_sums[4];
  int slot = 0;           // of the plane of x that the step recomputes from
  int place = 0;          // of the newest dy
  uint32_t newest = 0;    // its buffer of two as operand of the input's gradient
  uint32_t own = 0;       // all ones where dy in this lane's columns is no other segment's
  int own_from = 0;       // nor another slab's from this plane on
  uint32_t gradients_to;  // this lane's row of matrices of dy in place 0
  uint32_t newest_to;     // and in the first of the buffers
  // Exponents of x in the sums, and the lowest of their item's.
  int input_exponent = 0, lowest_exponent = kNothing;

  __device__ __forceinline__ WgmmaBothSplitFilter(WgmmaInputRing<Config>& r,
                                                  const WgmmaBothParams& q, int t)
      : ring(r), p(q), tile(t) {
    const int half = lane() / 8 % 2, channels = lane() / 16;
    gradients_to =
        ring.base() + uint32_t(Config::kGradientOffset + (warp() * 2 + tile) * Config::kTileBytes +
                               half * Config::kHalfBytes + channels * 128 + lane() % 8 * 16);
    newest_to = ring.base() + newest_row() +
                uint32_t(((2 * tile + half) * 2 + channels) * Config::kMatrixBytes);
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) products[i] = sums[i] = 0.f;
#pragma unroll
    for (float& sum : bias_sums) sum = 0.f;
  }

  static __device__ __forceinline__ int lane() { return WgmmaInputRing<Config>::lane(); }
  static __device__ __forceinline__ int warp() { return WgmmaInputRing<Config>::warp(); }

  // Where the first matrix of this warp's row of the newest dy has the row of lanes j mod 8.
  static __device__ __forceinline__ uint32_t newest_row() {
    return uint32_t(Config::kNewestOffset + warp() * 8 * Config::kMatrixBytes +
                    (1 + wgmma_block<Config>(lane() % 8)) * 16);
  }

  // Where the newest dy of a column of this lane's row of matrices stands, as operand of the
  // input's gradient, from newest_offset() on: columns 4 .. 7 are those of the block of columns
  // before.
  __device__ __forceinline__ uint32_t newest_from(int column, int channels) const {
    const int block = wgmma_block<Config>(lane() % 8) - column / 4;
    if constexpr (Config::kWhole) {
      const int row = block % 4 * 2 + block / 4;  // whose block it is
      const int of = column % 4;
      const int at = (warp() * 2 + of / 2) * Config::kTileBytes + of % 2 * Config::kHalfBytes +
                     channels * 128 + row * 16;
      return ring.base() + uint32_t(Config::kGradientOffset) +
             uint32_t(block < 0 ? 112 - Config::kZeroRowBytes : at);
    } else {
      return ring.base() + newest_row() +
             uint32_t((column % 4 * 2 + channels) * Config::kMatrixBytes - column / 4 * 16);
    }
  }
  __device__ __forceinline__ uint32_t newest_offset() const {
    return Config::kWhole ? uint32_t(place * Config::kPlaceBytes) : newest;
  }
  static constexpr int kNewestPart = Config::kWhole ? Config::kGradientPart : Config::kNewestBytes;

  // So many slots on.
  __device__ __forceinline__ int slot_after(int steps) const {
    return slot + steps < Config::kSlots ? slot + steps : slot + steps - Config::kSlots;
  }

  // In the first steps of a quad.
  __device__ __forceinline__ void begin_quad() {
    const WgmmaInputItem at(p, ring.item, Config::kSegmentStep);
    const int column = 4 * wgmma_block<Config>(lane() / 4);
    own = at.first_segment || column >= Config::kHaloColumns ? ~0u : 0u;
    own_from = at.first_slab ? 0 : kT - 1;
  }

  // Of dy of plane `plane`: [column][channel].
  __device__ __forceinline__ void add_bias(const float (&v)[8], int plane) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      if constexpr (Config::kWhole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) bias_sums[i] += v[4 * column + i];
      } else {
        add_if(bias_sums, v + 4 * column, own_from <= plane ? own : 0u);
      }
    }
  }

  // The fragments of dy of plane `plane`, which is from here on the newest.
  __device__ __forceinline__ void store_gradients(const uint32_t (&parts)[kParts][4], int plane) {
    const uint32_t counted = own_from <= plane ? own : 0u;
    next_place();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if constexpr (Config::kWhole) {
        store_part(part, parts[part]);
        continue;
      }
      stmatrix_x4(newest_to + newest + uint32_t(part * Config::kNewestBytes), parts[part]);
      uint32_t masked[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) masked[i] = parts[part][i] & counted;
      store_part(part, masked);
    }
  }
  __device__ __forceinline__ void store_no_gradients() {
    const uint32_t zeros[4] = {0u, 0u, 0u, 0u};
    next_place();
#pragma unroll
    for (int part = 0; part < kParts; ++part) store_part(part, zeros);
  }
  __device__ __forceinline__ void next_place() {
    place = place == 0 ? Config::kPlaces - 1 : place - 1;
    newest ^= uint32_t(kParts * Config::kNewestBytes);
  }
  __device__ __forceinline__ void store_part(int part, const uint32_t (&fragment)[4]) const {
    const uint32_t to =
        gradients_to + uint32_t(part * Config::kGradientPart + place * Config::kPlaceBytes);
    stmatrix_x4(to, fragment);
    if (place < kT - 1) stmatrix_x4(to + uint32_t(Config::kPlaces * Config::kPlaceBytes), fragment);
  }

  // Row i of dy of a part times x of one, likewise.
  template <int kRow, bool kAccumulate>
  __device__ __forceinline__ void multiply_row(uint32_t gradients, uint32_t inputs,
                                               int gradient_part, int input_part) {
    const int of = gradient_part * Config::kGradientPart + kRow * 2 * Config::kTileBytes;
    const int at = input_part * Config::kPlaneBytes + Config::pair_offset(kRow, 0);
    wgmma_shared<Config::kType, 16 * kC, Config::kSpanStep, kAccumulate>(
        products, gradients + uint32_t(of / 16), inputs + uint32_t(at / 16));
  }
  template <int kRow>
  __device__ __forceinline__ void multiply_small(uint32_t gradients, uint32_t inputs) {
    if constexpr (kRow < 4) {
      multiply_row<kRow, (kRow > 0)>(gradients, inputs, kParts - 1, 0);
      multiply_row<kRow, true>(gradients, inputs, 0, kParts - 1);
      multiply_small<kRow + 1>(gradients, inputs);
    }
  }
  template <int kRow>
  __device__ __forceinline__ void multiply_large(uint32_t gradients, uint32_t inputs) {
    if constexpr (kRow < 4) {
      multiply_row<kRow, true>(gradients, inputs, 0, 0);
      multiply_large<kRow + 1>(gradients, inputs);
    }
  }

  // The products of the plane of x that waited longest, the small ones first; ends a group.
  __device__ __forceinline__ void multiply() {
    const uint32_t first_gradients =
        wgmma_operand(ring.base() + uint32_t(Config::kGradientOffset + tile * Config::kTileBytes),
                      Config::kHalfBytes);
    const uint32_t first_inputs = wgmma_operand(
        ring.base() + uint32_t(Config::kPlaneOffset + tile * 2 * Config::kColumnBytes),
        Config::kColumnBytes);
    const int meeting = slot_after(Config::kSlots - kT);
    const uint32_t gradients =
        uint32_t(uniform_value(int(first_gradients) + place * (Config::kPlaceBytes / 16)));
    const uint32_t inputs =
        uint32_t(uniform_value(int(first_inputs) + meeting * (Config::kSlotBytes / 16)));
    wgmma_fence();
    multiply_small<0>(gradients, inputs);
    multiply_large<0>(gradients, inputs);
    wgmma_commit();
  }

  // Adds them. `same`: all planes from the one in them on have this exponent.
  __device__ __forceinline__ void add_products(int exponent, bool same) {
    if (__builtin_expect(exponent != input_exponent || !same, 0)) follow_exponent();
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) sums[i] += products[i];
    pin_accumulators(sums);
  }
  // Sums go up with the exponent by no more than float has room for.
  __device__ __forceinline__ void follow_exponent() {
    const int exponent =
        *WgmmaBothSplitInputs<Config>::slot_exponent(slot_after(Config::kSlots - kT));
    lowest_exponent = min(lowest_exponent, exponent);
    const int next = min(exponent, lowest_exponent + kMostRise);
    const int change = min(next - input_exponent, 127);
    const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
    const float less = next - exponent < -126 ? 0.f : wgmma_power_of_two(next - exponent);
#pragma unroll
    for (int i = 0; i < 8 * kC; ++i) {
      sums[i] *= factor;
      products[i] *= less;
    }
    input_exponent = next;
  }

  // Of the dy in the sums, for each warp in memory.
  static __device__ __forceinline__ int* gradient_exponent() {
    return reinterpret_cast<int*>(dynamic_shared_memory() + Config::kGradientExponentOffset) +
           thread_index_anew() / 32;
  }
  __device__ __forceinline__ void set_gradient_exponent(int exponent) const {
    __syncwarp();  // the one before has been read
    if (lane() == 0) *gradient_exponent() = exponent;
    __syncwarp();
  }

  // Adds the sums to the warpgroup's results in memory and begins new ones.
  __device__ __forceinline__ void flush() {
    add_results<false>();
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    input_exponent = lowest_exponent = kNothing;
  }

  // Found anew in each call: no address may wait in registers from one to the next.
  __device__ __forceinline__ int64_t result() const {
    return (int64_t(p.first_tile) * gridDim.x + blockIdx.x) * Config::kTiles +
           thread_index_anew() / 128;
  }

  // Or, if kClear, writes zeros.
  template <bool kClear>
  __device__ __forceinline__ void add_results() {
    const int exponent = kClear ? 0 : -(*gradient_exponent() + input_exponent);
    wgmma_both_add_filter<Config, kClear>(p.filter_partial + result() * 16 * Config::kTaps, sums,
                                          thread_index_anew() % 128, exponent);
  }

  // The same of the bias, whose dy is scaled by 2^exponent.
  template <bool kClear>
  __device__ __forceinline__ void add_bias_results(int exponent) {
    wgmma_both_add_bias<kClear>(p.bias_partial + result() * 64, bias_sums,
                                thread_index_anew() % 128, -exponent);
#pragma unroll
    for (float& sum : bias_sums) sum = 0.f;
  }
};

}  // namespace convnormpool
