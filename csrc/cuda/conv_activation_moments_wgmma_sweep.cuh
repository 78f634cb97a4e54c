// The sweep of the Hopper window kernel: one thread's windows, fragments, accumulators and sums
// while its warpgroup goes through the planes of an item. See conv_activation_moments_wgmma.cuh.
#pragma once

#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaSweep {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS;
  static constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;
  // Whether of the last T - 1 planes only the last one has code of its own, or all of them have,
  // for each residue of the outputs mod T: faster, where registers and the code's size allow it.
  static constexpr bool kOneLast =
      Config::kOperand != WgmmaOperand::kTf32 || !std::is_same_v<Act, HardswishFn>;

  WgmmaRing<Config>& ring;
  const Act act;

  float acc[2][8 * kT];
  uint32_t a[2][Config::kSteps][4];
  uint32_t window[kC][Config::kWindowWords];
  float bias[4], pivot[4], sum[4], square[4];
  // kFloat: x is scaled by 2^exponent, an output is an accumulator times unscale.
  float unscale[4];
  int exponent;
  // Where this lane's windows stand: + stage offset + channel * channel_bytes. Lanes that stand for
  // rows the filter lacks read zeros, which have no stages and no channels.
  uint32_t address, channel_bytes;
  int first_column;  // of this lane's outputs

  __device__ __forceinline__ WgmmaSweep(WgmmaRing<Config>& r, const Act& activation)
      : ring(r), act(activation) {}

  static __device__ __forceinline__ int lane() { return int(threadIdx.x % 32); }
  static __device__ __forceinline__ int warp() { return int(threadIdx.x) % 128 / 32; }

  // Which of the item's samples this warp's row is from.
  __device__ __forceinline__ int sample_of(int kind) const {
    return kind == 0 || ring.p.rest > 2 ? 0 : ring.p.rest == 2 ? warp() / 2 : warp();
  }
  // Its row of that sample; where the item has three, the fourth warp works on the first again.
  __device__ __forceinline__ int row_of(int kind, int sample) const {
    return kind == 0 ? warp() : ring.p.rest == 3 ? warp() % 3 : warp() - sample * ring.p.rest;
  }

  __device__ __forceinline__ void begin() {
    const WgmmaParams& p = ring.p;
    const WgmmaPlace at = *ring.place(ring.item);
    const int rows = (at.kind == 0 ? 4 : p.rest) + Config::kR - 1;
    const int sample = sample_of(at.kind), block = wgmma_block<Config>(lane() / 4);
    channel_bytes = uint32_t(rows * Config::kPitch);
    address = ring.stage_address(0) + uint32_t(sample * kC) * channel_bytes +
              uint32_t((row_of(at.kind, sample) + lane() % 4) * Config::kPitch +
                       block * 4 * Config::kElementBytes);
    first_column = at.w + p.padding[2] + 4 * block;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = square[i] = pivot[i] = 0.f;
  }

  template <int kStage>
  __device__ __forceinline__ void load_window() {
    const bool tap = Config::kR == 4 || lane() % 4 < Config::kR;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t at = address + uint32_t(kStage * ring.p.stage_bytes) + uint32_t(ci) * channel_bytes;
      if (!tap) at = shared_address(dynamic_shared_memory() + Config::kZeroOffset);
      if constexpr (Config::kFloat) {
        uint32_t low[4], high[4];
        load_shared(low, at);
        load_shared(high, at + 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) window[ci][i] = low[i], window[ci][i + 4] = high[i];
      } else {
        uint32_t low[2], high[2];
        load_shared(low, at);
        load_shared(high, at + 8);
        window[ci][0] = low[0], window[ci][1] = low[1];
        window[ci][2] = high[0], window[ci][3] = high[1];
      }
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

  // kFloat: the eight floats of each window become four words of halves and, when split, four more
  // of low halves. Returns the largest magnitude as the bits of a half.
  __device__ __forceinline__ int round_window() {
    const float scale = wgmma_power_of_two(exponent);
    __half2 largest = __floats2half2_rn(0.f, 0.f);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t (&words)[Config::kWindowWords] = window[ci];
      uint32_t low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x0 = __uint_as_float(words[2 * i]) * scale;
        const float x1 = i == 3 ? 0.f : __uint_as_float(words[2 * i + 1]) * scale;
        const __half2 high = __floats2half2_rn(x0, x1);
        largest = __hmax2(largest, __habs2(high));
        memcpy(&words[i], &high, 4);
        if constexpr (Config::kSplit) {
          const float2 back = __half22float2(high);
          const __half2 rest = __floats2half2_rn(x0 - back.x, i == 3 ? 0.f : x1 - back.y);
          memcpy(&low[i], &rest, 4);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 + i] = Config::kSplit ? low[i] : 0u;
    }
    return max(int(__half_as_ushort(__low2half(largest))),
               int(__half_as_ushort(__high2half(largest))));
  }

  // The exponent field of the largest magnitude in the loaded windows of the four lanes that share
  // rows of A; `zero` where there is none.
  __device__ __forceinline__ int largest_field(int zero) const {
    float largest = 0.f;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
#pragma unroll
      for (int i = 0; i < 7; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(window[ci][i])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
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
      const float factor = change < -126 ? 0.f : wgmma_power_of_two(change);
#pragma unroll
      for (int i = 0; i < 8 * kT; ++i) {
        scale_accumulator(acc[0][i], factor);
        scale_accumulator(acc[1][i], factor);
      }
      set_exponent(next);
    }
    round_window();
  }

  __device__ __forceinline__ void set_exponent(int e) {
    const int* exponents =
        reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kExponentOffset);
    exponent = e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unscale[i] =
          wgmma_power_of_two_or_limit(-(e + exponents[i / 2 * 8 + lane() % 4 * 2 + i % 2]));
    }
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

  // One step of one tile into slots 0 .. kCount - 1 for planes p = kPhase mod T.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void step(int fragment, int weight_step) {
    constexpr int kStart = (kT - kPhase) % kT;
    const uint32_t weights = wgmma_operand(
        shared_address(dynamic_shared_memory() + Config::kWeightOffset), Config::kDepthBytes);
    const uint32_t b = weights + uint32_t(weight_step * Config::kStepBytes + kStart * 256) / 16;
    wgmma<Config::kType, 16 * kCount>(acc[kTile], a[kTile][fragment], b);
  }

  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void multiply() {
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int ci = 0; ci < kC; ++ci) {
        step<kTile, kPhase, kCount>(kC + ci, ci);
        step<kTile, kPhase, kCount>(ci, kC + ci);
      }
#pragma unroll
      for (int ci = 0; ci < kC; ++ci) step<kTile, kPhase, kCount>(ci, ci);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kSteps; ++i) step<kTile, kPhase, kCount>(i, i);
    }
  }

  __device__ __forceinline__ float output(float accumulated, int channel) const {
    return Config::kFloat ? fmaf(accumulated, unscale[channel], bias[channel]) : accumulated;
  }

  // The sums are shifted by the first output of the row, the same for all lanes of a channel.
  template <int kSlot>
  __device__ __forceinline__ void choose_pivot() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = act.value(output(acc[0][8 * kSlot + i / 2 * 4 + i % 2], i));
      pivot[i] = __shfl_sync(~0u, y, lane() % 4);
    }
  }

  // Adds a finished plane of one tile, as far as its columns are below `columns`, to the sums and
  // resets its slot.
  template <int kTile, int kSlot>
  __device__ __forceinline__ void finish(int columns) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = output(acc[kTile][8 * kSlot + i % 4 / 2 * 4 + i / 4 * 2 + i % 2], i % 4);
    }
    transform(act, y, [](const auto& function, float v, int) { return function.value(v); });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float shifted[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) shifted[i] = y[4 * half + i] - pivot[i];
      add_moments_if(sum, square, shifted,
                     first_column + Config::kTileColumns * kTile + Config::kHalfColumns * half,
                     columns);
    }
    clear<kTile, kSlot>();
  }

  template <int kTile, int kSlot>
  __device__ __forceinline__ void clear() {
    const uint32_t from = ring.base() + uint32_t(Config::kResetOffset) + uint32_t(lane() % 4) * 16u;
    load_accumulators(acc[kTile] + 8 * kSlot, from);
    load_accumulators(acc[kTile] + 8 * kSlot + 4, from + 64);
  }
  template <int kSlot = 0>
  __device__ __forceinline__ void clear_all() {
    if constexpr (kSlot < kT) {
      clear<0, kSlot>();
      clear<1, kSlot>();
      clear_all<kSlot + 1>();
    }
  }

  // Waits until every warp of the warpgroup has read its windows of this plane, so that the stage
  // may be filled again, and where warpgroups take turns until it is this one's turn to issue.
  __device__ __forceinline__ void release() {
    if constexpr (kOrdered) {
      take_turn();
    } else {
      ring.meet();
    }
  }

  __device__ __forceinline__ void take_turn() {
    barrier_sync(Config::kTurnBarrier + ring.group, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (kOrdered) {
      barrier_arrive(Config::kTurnBarrier + (ring.group + 1) % Config::kWarpgroups, 256);
    }
  }

  template <int kStage>
  __device__ __forceinline__ void next_window() {
    ring.template wait_stage<kStage>();
    load_window<kStage>();
  }

  // Plane p = kPhase mod T of the item into slots 0 .. kCount - 1; z = p - T + 1 is the output
  // plane that it finishes, if kFinish. kMayBegin: p or z may be 0; kEnd: z may be past the last
  // one. more: another plane of the item follows. On entry and, where more, on return the plane's
  // fragments are in `a`.
  template <int kPhase, int kCount, bool kFinish, bool kMayBegin, bool kEnd>
  __device__ __forceinline__ void plane(int p, bool more) {
    constexpr int kSlot = (kPhase + 1) % kT, kNext = kSlot;
    const int z = p - (kT - 1);
    const int columns = !kEnd || z < ring.p.Z ? ring.p.Q : 0;
    release();
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    multiply<0, kPhase, kCount>();
    multiply<1, kPhase, kCount>();
    wgmma_commit();
    pass_turn();
    ring.template refill_stage<kPhase>(p);
    if constexpr (kMayBegin) {
      if (p == 0) {
        ring.announce();
        if (ring.item > 0) write(ring.item - 1);
      }
    }
    wgmma_wait<0>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
    if (more) next_window<kNext>();
    if constexpr (kFinish) {
      if constexpr (kMayBegin || (kEnd && !kOneLast)) {
        if (z == 0) choose_pivot<kSlot>();
      }
      finish<0, kSlot>(columns);
      finish<1, kSlot>(columns);
    }
    if (more) fragments<false, kNext>();
  }

  // The planes that come before the first finished one, from p = kPlane on.
  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT - 1) {
      plane<kPlane, kPlane + 1, false, kPlane == 0, false>(kPlane, true);
      head<kPlane + 1>();
    }
  }

  // Planes that overlap all T slots: T at a time from p = T - 1 on, below `end`.
  template <int kOffset>
  __device__ __forceinline__ bool body(int& p, int end) {
    if constexpr (kOffset < kT) {
      constexpr int kPhase = (kT - 1 + kOffset) % kT;
      // Items have at least T - 1 planes of outputs (T = 1: two), of which those past Z are not
      // counted. Where the body is all but the last plane it can meet them.
      constexpr bool kEnd = kT == 1 || (kOneLast && kOffset > 0 && kOffset < kT - 2);
      plane<kPhase, kT, true, kOffset == 0, kEnd>(p, kT > 1 || p + 1 < end);
      if (++p == end) return false;
      return body<kOffset + 1>(p, end);
    } else {
      return true;
    }
  }

  // Plane `index` after the last that overlaps T outputs, where outputs mod T is the residue, has
  // live slots from tail_low on, cyclic. Its wgmmas cover slots 0 .. tail_width - 1: ptxas copies
  // all accumulators where one begins at another slot. The other slots begin anew with the item.
  static __host__ __device__ constexpr int tail_low(int residue, int index) {
    return (residue + index + 1) % kT;
  }
  static __host__ __device__ constexpr int tail_width(int residue, int index) {
    const int end = tail_low(residue, index) + kT - 1 - index;
    return end < kT ? end : kT;
  }

  template <int kResidue, int kIndex>
  __device__ __forceinline__ void tail(int p) {
    if constexpr (kIndex < kT - 1) {
      plane<(kResidue + kIndex) % kT, tail_width(kResidue, kIndex), true, false, true>(
          p, kIndex < kT - 2);
      tail<kResidue, kIndex + 1>(p + 1);
    }
  }

  // The last kCount planes of an item, from p on.
  template <int kCount, int kResidue = 0>
  __device__ __forceinline__ void tails(int p, int residue) {
    if constexpr (kResidue < kT - 1) {
      if (residue == kResidue) {
        tail<kResidue, kT - 1 - kCount>(p);
      } else {
        tails<kCount, kResidue + 1>(p, residue);
      }
    } else {
      tail<kResidue, kT - 1 - kCount>(p);
    }
  }

  // A whole item; outputs past Z - 1 come from planes of zeros.
  __device__ __forceinline__ void sweep() {
    clear_all();
    next_window<0>();
    fragments<true, 0>();
    head<0>();
    constexpr int kTail = kT == 1 ? 0 : kOneLast ? 1 : kT - 1;
    const int end = ring.p.planes - kTail;
    int p = kT - 1;
    if (kOneLast || p < end) {
      while (body<0>(p, end)) {
      }
    }
    if constexpr (kTail > 0) tails<kTail>(p, ring.p.outputs % kT);
  }

  // Where this lane's sums wait for their item to be written.
  __device__ __forceinline__ uint32_t kept() const {
    return ring.base() + uint32_t(Config::kKeptOffset) + threadIdx.x * 48u;
  }
  __device__ __forceinline__ void keep() const {
    store_shared(kept(), sum);
    store_shared(kept() + 16, square);
    store_shared(kept() + 32, pivot);
  }

  // Adds the lanes of a channel and writes the (mean, M2) of an item whose sums were kept: while
  // the products of the next one's first plane are under way.
  __device__ __forceinline__ void write(int item) const {
    const WgmmaParams& p = ring.p;
    const WgmmaPlace at = *ring.place(item);
    float sum[4], square[4], pivot[4];
    load_shared(sum, kept());
    load_shared(square, kept() + 16);
    load_shared(pivot, kept() + 32);
    const bool upper = (lane() & 16) != 0, odd = (lane() & 8) != 0;
    float s[2], q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = upper ? sum[2 + i] : sum[i];
      q[i] = upper ? square[2 + i] : square[i];
      s[i] += __shfl_xor_sync(~0u, upper ? sum[i] : sum[2 + i], 16);
      q[i] += __shfl_xor_sync(~0u, upper ? square[i] : square[2 + i], 16);
    }
    float total = (odd ? s[1] : s[0]) + __shfl_xor_sync(~0u, odd ? s[0] : s[1], 8);
    float squares = (odd ? q[1] : q[0]) + __shfl_xor_sync(~0u, odd ? q[0] : q[1], 8);
    total += __shfl_xor_sync(~0u, total, 4);
    squares += __shfl_xor_sync(~0u, squares, 4);
    const float low = odd ? pivot[1] : pivot[0], high = odd ? pivot[3] : pivot[2];
    const int tile = (at.w + p.padding[2] - p.first_column) / 32;
    const float shift = total / (float(p.Z) * float(wgmma_tile_columns(p.Q, p.first_column, tile)));
    float m2 = squares - total * shift;
    m2 = m2 < 0.f ? 0.f : m2;
    m2 = m2 - m2 == 0.f ? m2 : __int_as_float(0x7FFFFFFF);
    const int sample = sample_of(at.kind), n = at.n + sample;
    const int row = at.h + p.padding[1] + row_of(at.kind, sample);
    const int k = int(blockIdx.y) * 16 + (upper ? 8 : 0) + lane() % 4 * 2 + (odd ? 1 : 0);
    const bool repeated = at.kind != 0 && p.rest == 3 && warp() == 3;
    if ((lane() & 4) == 0 && !repeated && n < p.N && k < p.K) {
      const int64_t piece = int64_t(n) * (p.P * p.column_tiles) + row * p.column_tiles + tile;
      p.partials[piece * p.K + k] = make_float2((upper ? high : low) + shift, m2);
    }
  }
};

}  // namespace convnormpool
