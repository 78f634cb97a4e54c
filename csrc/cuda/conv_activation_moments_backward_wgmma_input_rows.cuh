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
  // Whether the sums are in registers before they are added up. kSplit has none to spare.
  static constexpr bool kEarly = !Config::kSplit;

  WgmmaInputRing<Config>& ring;
  int64_t offset = 0;     // of the elements in the quad's first plane
  float inverse = 0.f;    // of the scale of the sums
  int low = 0, high = 0;  // planes low .. high - 1 are written, if these elements exist
  bool first = true;      // no quad above has left anything
  uint32_t buffer = 0;    // of the two for a plane's sums
  // kIndexAnew: carry_of(0), which else would stand in three registers.
  uint32_t carry_from = 0;

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

  // What meets in row warp() of the four that are complete with this quad, and in the row four
  // below: for each kh a row of the sums, that of one of the four output rows, and what the quad
  // above has left. The latter row is left to the quad below.
  struct Terms {
    uint32_t from;
    float row[4][4], carry[4];
  };

  __device__ __forceinline__ Terms load(int plane) {
    Terms terms;
    terms.from = sums() + uint32_t(((channel() * 4 + warp()) * 4 * kPitch + lane() % 8 * 4) * 4);
    if constexpr (kEarly) {
#pragma unroll
      for (int kh = 0; kh < 4; ++kh) load_row(terms.row[kh], terms, kh, warp());
      load_carry(terms.carry, plane, warp() < 3);
    }
    buffer ^= uint32_t(Config::kSumBytes);
    return terms;
  }

  __device__ __forceinline__ void load_carry(float (&to)[4], int plane, bool exists) const {
#pragma unroll
    for (float& x : to) x = 0.f;
    if (exists && !first && has_channel()) load_shared(to, carry(plane));
  }

  // The sums of kh for a row of the first four, or where kh is more, for that four below.
  static __device__ __forceinline__ void load_row(float (&to)[4], const Terms& terms, int kh,
                                                  int row) {
    constexpr int kRowBytes = kPitch * 4;
    load_shared(to, terms.from + uint32_t((kh > row ? 4 * 4 * kRowBytes : 0) - kh * 3 * kRowBytes));
  }

  __device__ __forceinline__ void add(int plane, const Terms& terms) const {
    float sum[4];
    switch (warp()) {
      case 0:
        add_rows<0>(plane, terms, sum);
        break;
      case 1:
        add_rows<1>(plane, terms, sum);
        break;
      case 2:
        add_rows<2>(plane, terms, sum);
        break;
      default:
        add_rows<3>(plane, terms, sum);
    }
    if (low <= plane && plane < high) write(plane, sum);
  }

  // Lanes that have no channel take the last one's sums, for nothing, and leave the carries alone:
  // others write there.
  static __device__ __forceinline__ bool has_channel() { return lane() < 8 * kC; }
  static __device__ __forceinline__ int channel() { return min(lane() / 8, kC - 1); }
  __device__ __forceinline__ uint32_t carry(int plane) const {
    if constexpr (Config::kIndexAnew) return carry_from + uint32_t(plane * Config::kCarryBytes);
    return carry_of(plane);
  }
  __device__ __forceinline__ uint32_t carry_of(int plane) const {
    return ring.base() + uint32_t(Config::kCarryOffset +
                                  (ring.group * ring.p.planes + plane) * Config::kCarryBytes +
                                  (warp() * kC + channel()) * 128 + lane() % 8 * 16);
  }

  template <int kRow>
  __device__ __forceinline__ void add_rows(int plane, const Terms& terms, float (&sum)[4]) const {
    Terms t = terms;
    if constexpr (!kEarly) {
#pragma unroll
      for (int kh = 3; kh >= 0; --kh) load_row(t.row[kh], t, kh, kRow);
      load_carry(t.carry, plane, kRow < 3);
    }
    const auto of = [&](int kh, int i) { return t.row[kh][Config::kSwapped ? i ^ kh % 2 * 2 : i]; };
    float below[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      below[i] = of(3, i);
#pragma unroll
      for (int kh = 2; kh > kRow; --kh) below[i] += of(kh, i);
      sum[i] = kRow < 3 ? t.carry[i] + of(kRow, i) : of(3, i);
#pragma unroll
      for (int kh = kRow - 1; kh >= 0; --kh) sum[i] += of(kh, i);
    }
    if (kRow < 3 && has_channel()) store_shared(carry(plane), below);
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
      store_global(static_cast<float*>(p.dx) + to, sum);
    } else {
      store_global(static_cast<uint16_t*>(p.dx) + to, wgmma_input_pack<Config>(sum[0], sum[1]),
                   wgmma_input_pack<Config>(sum[2], sum[3]));
    }
  }
};

}  // namespace convnormpool
