// The rows of a plane of dx in the Hopper kernel of the input's gradient: they meet in shared
// memory, are added up and written. See conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_stage.cuh"

namespace convnormpool {

// One thread's part: four elements of row warp() of the quad's four, in channel lane() / 8.
template <class Config>
struct WgmmaInputRows {
  static constexpr int kT = Config::kT, kC = Config::kC, kPitch = Config::kSumPitch;

  WgmmaInputRing<Config>& ring;
  int64_t offset = 0;     // of the elements in the quad's first plane
  float inverse = 0.f;    // of the scale of the sums
  int low = 0, high = 0;  // planes low .. high - 1 are written, if these elements exist
  bool first = true;      // no quad above has left anything
  uint32_t buffer = 0;    // of the two for a plane's sums

  __device__ __forceinline__ explicit WgmmaInputRows(WgmmaInputRing<Config>& r) : ring(r) {}

  static __device__ __forceinline__ int lane() { return WgmmaInputRing<Config>::lane(); }
  static __device__ __forceinline__ int warp() { return WgmmaInputRing<Config>::warp(); }

  // From here on the planes are of the quad in work, whose dy is scaled by 2^gradient_exponent.
  __device__ __forceinline__ void begin(int gradient_exponent) {
    const WgmmaInputParams& p = ring.p;
    const WgmmaInputItem at(p, ring.item, Config::kSegmentStep);
    const int* exponents =
        reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
    inverse = wgmma_power_of_two_or_limit(-(gradient_exponent + exponents[16]));
    first = ring.quad == 0;
    const int ci = lane() / 8, column = lane() % 8 * 4;
    const int h = 4 * ring.quad + warp() - p.padding[1], w = at.column + column - p.padding[2];
    const int d = at.plane - p.padding[0];
    low = max(at.first_slab ? 0 : kT - 1, -d);
    high = min(at.last_slab ? p.planes : p.planes - (kT - 1), p.D - d);
    const bool own = at.first_segment || column >= Config::kHaloColumns;
    if (!own || ci >= kC || h < 0 || h >= p.H || w < 0 || w >= p.W) high = low;
    offset = (((int64_t(at.n) * kC + ci) * p.D + d) * p.H + h) * p.W + w;
  }

  __device__ __forceinline__ uint32_t sums() const {
    return ring.base() + uint32_t(Config::kSumOffset + ring.group * 2 * Config::kSumBytes) + buffer;
  }

  // A finished plane of dx to where its rows are added up: this lane has kh = lane % 4.
  template <int kSlot>
  __device__ __forceinline__ void store(const float (&turned)[2][Config::kN / 2]) const {
    const uint32_t to =
        sums() +
        uint32_t(((warp() * 4 + lane() % 4) * kPitch + 4 * wgmma_block<Config>(lane() / 4)) * 4);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      constexpr int kFirst = kSlot * kC;
      const int i = (kFirst + ci) / 2 * 4 + (kFirst + ci) % 2;
      const float four[4] = {turned[0][i], turned[1][i], turned[0][i + 2], turned[1][i + 2]};
      store_shared(to + uint32_t(ci * 16 * kPitch * 4), four);
    }
  }

  // Adds up row warp() of the four that are complete with this quad, and the row four below, of
  // which the quad leaves a part to the next one. Then writes the former.
  __device__ __forceinline__ void add(int plane) {
    const int ci = lane() / 8;
    if (ci < kC) {
      const uint32_t from =
          sums() + uint32_t(((ci * 4 + warp()) * 4 * kPitch + lane() % 8 * 4) * 4);
      const uint32_t carry =
          ring.base() + uint32_t(Config::kCarryOffset +
                                 (ring.group * ring.p.planes + plane) * Config::kCarryBytes +
                                 (warp() * kC + ci) * 128 + lane() % 8 * 16);
      float sum[4];
      switch (warp()) {
        case 0:
          add_row<0>(from, carry, sum);
          break;
        case 1:
          add_row<1>(from, carry, sum);
          break;
        case 2:
          add_row<2>(from, carry, sum);
          break;
        default:
          add_row<3>(from, carry, sum);
      }
      if (low <= plane && plane < high) write(plane, sum);
    }
    buffer ^= uint32_t(Config::kSumBytes);
  }

  template <int kRow>
  __device__ __forceinline__ void add_row(uint32_t from, uint32_t carry, float (&sum)[4]) const {
    constexpr int kRowBytes = kPitch * 4;
    if constexpr (kRow < 3) {
      float below[4];
      load_shared(below, from + (4 - 3) * 4 * kRowBytes + 3 * kRowBytes);
#pragma unroll
      for (int kh = 2; kh > kRow; --kh) {
        add_term(below, from + uint32_t((4 - kh) * 4 + kh) * kRowBytes);
      }
      if (first) {
#pragma unroll
        for (float& x : sum) x = 0.f;
      } else {
        load_shared(sum, carry);
      }
      store_shared(carry, below);
    } else {
      load_shared(sum, from - 3 * 4 * kRowBytes + 3 * kRowBytes);
    }
#pragma unroll
    for (int kh = kRow < 3 ? kRow : 2; kh >= 0; --kh) {
      add_term(sum, from - uint32_t(kh * 3 * kRowBytes));
    }
  }

  static __device__ __forceinline__ void add_term(float (&sum)[4], uint32_t from) {
    float term[4];
    load_shared(term, from);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += term[i];
  }

  __device__ __forceinline__ void write(int plane, float (&sum)[4]) const {
    const WgmmaInputParams& p = ring.p;
    const int64_t to = offset + int64_t(plane) * (p.H * p.W);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= inverse;
    if (p.dx_sum != nullptr) {
      float4* const total = reinterpret_cast<float4*>(p.dx_sum + to);
      if (p.add_to_sum) {
        const float4 before_sum = *total;
        sum[0] += before_sum.x, sum[1] += before_sum.y;
        sum[2] += before_sum.z, sum[3] += before_sum.w;
      }
      if (!p.write_dx) {
        *total = make_float4(sum[0], sum[1], sum[2], sum[3]);
        return;
      }
    }
    if constexpr (Config::kFloat) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.dx) + to) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.dx) + to) = make_uint2(
          wgmma_input_pack<Config>(sum[0], sum[1]), wgmma_input_pack<Config>(sum[2], sum[3]));
    }
  }
};

}  // namespace convnormpool
