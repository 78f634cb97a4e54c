// The sweep of the Hopper window kernel: one thread's accumulators and sums while its warpgroup
// goes through the planes of an item. See conv_activation_moments_wgmma.cuh.
#pragma once

#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"
#include "cuda/conv_activation_moments_wgmma_windows.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaSweep : WgmmaWindows<Config> {
  using Windows = WgmmaWindows<Config>;
  using Windows::a, Windows::acc, Windows::address, Windows::channel_bytes, Windows::lane,
      Windows::ring, Windows::unscale;
  static constexpr int kT = Config::kT, kC = Config::kC;
  static constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;
  // Whether of the last T - 1 planes only the last one has code of its own, or all of them have,
  // for each residue of the outputs mod T: faster, where registers and the code's size allow it.
  static constexpr bool kOneLast =
      Config::kOperand != WgmmaOperand::kTf32 || !std::is_same_v<Act, HardswishFn>;

  // Whether each tile's products are a group of their own, so that the first tile is finished while
  // the second's are under way: faster with float32's operands, slower in 16 bits.
  static constexpr bool kTileGroups = Config::kFloat;

  const Act act;

  float bias[4], pivot[4], sum[4], square[4];
  int first_column;  // of this lane's outputs

  __device__ __forceinline__ WgmmaSweep(WgmmaRing<Config>& r, const Act& activation)
      : Windows(r), act(activation) {}

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

  // One step of one tile into slots 0 .. kCount - 1 for planes p = kPhase mod T.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void step(int fragment, int weight_step) {
    constexpr int kStart = (kT - kPhase) % kT;
    const uint32_t weights = wgmma_operand(
        shared_address(dynamic_shared_memory() + Config::kWeightOffset), Config::kDepthBytes);
    const uint32_t b = weights + uint32_t(weight_step * Config::kStepBytes + kStart * 256) / 16;
    if constexpr (Config::kSplit) {  // too many descriptors
      wgmma<Config::kType, 16 * kCount>(acc[kTile], a[kTile][fragment], b);
    } else {
      wgmma<Config::kType, 16 * kCount>(acc[kTile], a[kTile][fragment], wgmma_descriptor(b));
    }
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
    Windows::template load_window<kStage>();
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
    if constexpr (kTileGroups) wgmma_commit();
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
    const auto finish_first = [&] {
      if constexpr (kFinish && (kMayBegin || (kEnd && !kOneLast))) {
        if (z == 0) choose_pivot<kSlot>();
      }
      if constexpr (kFinish) finish<0, kSlot>(columns);
    };
    wgmma_wait<int(kTileGroups)>();
    pin_accumulators(acc[0]);
    if constexpr (kTileGroups) {
      finish_first();
      wgmma_wait<0>();
    }
    pin_accumulators(acc[1]);
    if (more) next_window<kNext>();
    if constexpr (!kTileGroups) finish_first();
    if constexpr (kFinish) finish<1, kSlot>(columns);
    if (more) Windows::template fragments<false, kNext>();
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
    Windows::template fragments<true, 0>();
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
