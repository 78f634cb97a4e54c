// The outputs of the convolution once more and their gradients, in the Hopper kernel of the
// gradients of filter and bias, four rows of one sample at a time. See
// conv_activation_moments_backward_wgmma_filter.cuh.
//
// The outputs are computed as in conv_activation_moments_wgmma.cuh. Warp q of a warpgroup owns row
// q of the four and 32 columns; in tile 0 and 1, rows g and g + 8 of an accumulator fragment stand
// for columns 4 wgmma_block(g) + 2 tile and + 2 tile + 1. From a finished plane z follows
//   dy = (grad_mean / positions + 2 grad_m2 (a(y) - mean)) a'(y)
// in the same registers, which rounded to 16 bits are an A fragment: 16 positions by 16 channels.
// Where there is no output, dy is zero.
//
// All planes of all items of a warpgroup are one stream of steps. A step reads one input plane and
// finishes output plane z = plane - (T - 1) of its item; every accumulator slot takes part in every
// step, and the first T - 1 steps of an item, which finish nothing, throw away what the planes past
// the last output of the item before left. So there are T copies of a step in the code, for the
// slot that it finishes.
//
// Range: |a(y) - mean| is at most sqrt(M2), which bounds dy. So float16 gradients have one exponent
// for each sample and 16 channels, chosen before the first output is known.
#pragma once

#include <type_traits>

#include "activation.h"
#include "cuda/common/activation.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_config.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter_windows.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_stage.cuh"

namespace convnormpool {

// At most this is the derivative of any activation, with room for what rounding adds to dy.
constexpr float kWgmmaSlopeBound = 4.f;

// One thread's part of a warpgroup's work. Derived takes the gradients, and has
//   row()                 which of the four rows this warp owns
//   prepare()             in a step, before its wgmmas; what other warps stored in the steps before
//                         can be read
//   issue()               its own wgmmas, ends a group
//   overlap()             work while the tensor cores compute; `a` is still the step's fragments
//   complete()            after the wait for issue()'s group: more wgmmas, one group, which may be
//                         under way while gradients are formed
//   gradient_scale()      of the step's dy, a power of two; bfloat16 has none
//   gradients(dy, sums)   dy[tile][part] as A fragments, zeros where !counted(), and the sum of the
//                         values of each of the lane's channels (`channel`), scaled
//   inputs(largest)       `a` holds the next plane's fragments, of which four lanes' largest
//                         magnitude (float32 kinds)
//   end_step()            the last in a step; waits for complete()'s group
template <class Config, class Act, class Derived>
struct WgmmaFilterOutputs : WgmmaFilterWindows<Config> {
  using Windows = WgmmaFilterWindows<Config>;
  using Windows::a, Windows::acc, Windows::address, Windows::exponent, Windows::live, Windows::ring;
  using Windows::lane, Windows::shared;
  static constexpr int kT = Config::kT, kC = Config::kC, kParts = Config::kParts;
  static constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;

  const WgmmaBackwardParams& p;
  const Act act;
  const int first_channel;

  int plane;  // of the item, which the step reads
  int sample;

  __device__ __forceinline__ WgmmaFilterOutputs(const WgmmaBackwardParams& params,
                                                WgmmaRing<Config>& r, const Act& activation,
                                                int channel)
      : Windows(r), p(params), act(activation), first_channel(channel) {}

  __device__ __forceinline__ Derived& derived() { return static_cast<Derived&>(*this); }
  static __device__ __forceinline__ int warp() { return int(threadIdx.x) % 128 / 32; }
  // The output plane that the step finishes, if it is one.
  __device__ __forceinline__ int z() const { return plane - (kT - 1); }
  __device__ __forceinline__ bool counted() const { return z() >= 0 && z() < p.Z; }
  // Channel i = 0 .. 3 of this lane, within its 16.
  static __device__ __forceinline__ int channel(int i) {
    return i / 2 * 8 + lane() % 4 * 2 + i % 2;
  }
  // This lane's two pairs of channels are 64 bytes apart.
  __device__ __forceinline__ uint32_t biases() const {
    return shared() + uint32_t(Config::kTermOffset + 256 * ring.group) + uint32_t(lane() % 4 * 16);
  }
  // The exponent of the sample's gradients that suits all 16 channels: the bound of |dy| comes to
  // [2^12, 2^13). From the item's second step on.
  __device__ __forceinline__ int sample_exponent() const {
    return *reinterpret_cast<const int*>(dynamic_shared_memory() + Config::kGroupOffset +
                                         48 * ring.group);
  }

  // All items of the warpgroup.
  __device__ __forceinline__ void run() {
    plane = 0;
    if (ring.exists(0)) {
      begin_stream();
      ring.next();
      fragments(true);
      while (steps<0>()) {
      }
    }
    // One item fewer than the first warpgroup: let the others have their turns.
    if (kOrdered && ring.item * Config::kWarpgroups < ring.block_items()) {
      for (int i = 0; i < p.planes; ++i) {
        take_turn();
        pass_turn();
      }
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

 private:
  __device__ __forceinline__ void begin_stream() {
    address = ring.stage_address(0) +
              uint32_t((derived().row() + lane() % 4) * Config::kPitch +
                       wgmma_block<Config>(lane() / 4) * 4 * Config::kElementBytes);
    exponent = 0;
#pragma unroll
    for (int i = 0; i < 8 * kT; ++i) acc[0][i] = acc[1][i] = 0.f;
    reset<0, kT>();
  }

  // The outputs of slots kFirst .. kFirst + kCount - 1 begin anew: with zero, or with the bias
  // where accumulators are not scaled.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void reset() {
    const uint32_t from = Config::kFloat ? shared() + uint32_t(Config::kZeroOffset) : biases();
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) {
      load_accumulators(acc[i % 2] + 8 * kFirst + i / 2 * 4, from + uint32_t(i / 2 % 2 * 64));
    }
  }

  // In the first step of an item: where its outputs are, and the terms of its gradients.
  __device__ __forceinline__ void begin_item() {
    const WgmmaPlace at = *ring.place(ring.item);
    sample = at.n;
    const int column = at.w + p.padding[2] + 4 * wgmma_block<Config>(lane() / 4);
    live = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) live |= uint32_t(uint32_t(column + j) < uint32_t(p.Q)) << (4 + j);
    if (at.h + p.padding[1] + derived().row() < p.P) live |= live >> 4;
    if (warp() != 1) return;
    const int k = first_channel + lane() % 16;
    float mean = 0.f, alpha = 0.f, kappa = 0.f, bound = 0.f;
    if (k < p.K) {
      const int64_t from = int64_t(sample) * p.K + k;
      mean = p.mean[from];
      alpha = p.grad_mean[from] / float(int64_t(p.Z) * p.P * p.Q);
      kappa = 2.f * p.grad_m2[from];
      // y as it was when mean and M2 were computed may differ from the one computed here.
      const float spread = sqrtf(p.m2[from]) + 0x1p-12f * fabsf(mean);
      bound = kWgmmaSlopeBound * (fabsf(alpha) + fabsf(kappa) * spread);
    }
    // A channel that is not finite must not decide the others' scale.
    const uint32_t bits = bound - bound == 0.f ? __float_as_uint(bound) : 0u;
    const uint32_t largest = __reduce_max_sync(~0u, bits);
    if (lane() < 16) {
      float* const term = reinterpret_cast<float*>(dynamic_shared_memory() + Config::kTermOffset) +
                          64 * ring.group + 32 + 2 * lane();
      term[0] = alpha - kappa * mean;
      term[1] = kappa;
    }
    if (lane() == 0) {
      *reinterpret_cast<int*>(dynamic_shared_memory() + Config::kGroupOffset + 48 * ring.group) =
          min(139 - wgmma_exponent_field(largest), 120);
    }
    __syncwarp();
  }

  // The fragments of the plane that the ring has reached; first: of an item.
  __device__ __forceinline__ void fragments(bool first) {
    float largest = 0.f;
    if constexpr (Config::kFloat) {
      largest = Windows::scale_window(first);
    } else {
#pragma unroll
      for (int ci = 0; ci < kC; ++ci) {
        uint32_t window[Config::kWindowWords];
        Windows::load_window(ci, window);
        Windows::pairs(ci, window);
      }
    }
    derived().inputs(largest);
  }

  template <int kTile, int kPhase>
  __device__ __forceinline__ void multiply() {
    constexpr int kStart = (kT - kPhase) % kT;
    const uint32_t weights =
        wgmma_operand(shared() + uint32_t(Config::kWeightOffset), Config::kDepthBytes);
    const auto step = [&](int fragment, int weight_step) {
      const uint32_t b = weights + uint32_t(weight_step * Config::kStepBytes + kStart * 256) / 16;
      wgmma<Config::kType, 16 * kT>(acc[kTile], a[kTile][fragment], b);
    };
    if constexpr (Config::kSplit) {
#pragma unroll
      for (int ci = 0; ci < kC; ++ci) {
        step(kC + ci, ci);
        step(ci, kC + ci);
      }
    }
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) step(ci, ci);
  }

  // The gradients of the plane in slot kSlot, scaled by the kernel's scale: values and fragments.
  template <int kSlot>
  __device__ __forceinline__ void form(uint32_t (&dy)[2][kParts][4], float (&sums)[4]) {
    constexpr bool kHardswish = std::is_same_v<Act, HardswishFn>;
    const float scale = Config::kScaled ? derived().gradient_scale() : 1.f;
    float term[2][4], bias[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_shared(term[i], biases() + uint32_t(128 + 64 * i));
      if constexpr (Config::kFloat) {
        load_shared(bias[i], biases() + uint32_t(64 * i));
        bias[i][2] *= wgmma_power_of_two(-exponent);
        bias[i][3] *= wgmma_power_of_two(-exponent);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      // v[4 j + i]: column j of the tile's two, channel i.
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = i % 4;
        const float y = acc[tile][8 * kSlot + k / 2 * 4 + i / 4 * 2 + k % 2];
        v[i] = Config::kFloat ? fmaf(y, bias[k / 2][2 + k % 2], bias[k / 2][k % 2]) : y;
      }
      if constexpr (kHardswish) {
#pragma unroll
        for (int j = 0; j < 2; ++j) form_hardswish(term, scale, 1u << (2 * tile + j), v + 4 * j);
      } else {
        transform(act, v, [&](const auto& function, float y, int k) {
          return fmaf(term[k / 2][k % 2 * 2 + 1], function.value(y), term[k / 2][k % 2 * 2]) *
                 scale * function.derivative(y);
        });
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i] = (live >> (2 * tile + i / 4) & 1u) != 0 ? v[i] : 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] = tile == 0 ? v[i] + v[4 + i] : sums[i] + (v[i] + v[4 + i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = i % 2 * 4 + i / 2 * 2;
        uint32_t low = 0;
        wgmma_operands<Config>(v[from], v[from + 1], dy[tile][0][i], low);
        if constexpr (Config::kSplit) dy[tile][kParts - 1][i] = low;
      }
    }
  }

  // The outputs of four channels in one column (its bit) become their gradients. With s = clamp(y /
  // 6 + 1 / 2, 0, 1) hardswish is y s, its derivative 2 s - 1 / 2 between -3 and 3 and s beyond;
  // PyTorch's is zero at -3 and one at 3.
  __device__ __forceinline__ void form_hardswish(const float (&term)[2][4], float scale,
                                                 uint32_t column, float* v) {
    const float edge = (live & column) != 0 ? scale : 0.f;
    float y[4], s[4], slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = v[i];
      s[i] = __saturatef(fmaf(y[i], 1.f / 6.f, 0.5f));
      slope[i] = fmaf(s[i], 2.f * scale, -0.5f * scale);
    }
    multiply_beyond(slope, y, 3.f, s, edge, live & column);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = fmaf(term[i / 2][i % 2 * 2 + 1], y[i] * s[i], term[i / 2][i % 2 * 2]) * slope[i];
  }

  template <int kSlot>
  __device__ __forceinline__ void finish() {
    uint32_t dy[2][kParts][4];
    float sums[4];
    if (counted()) {
      form<kSlot>(dy, sums);
    } else {
#pragma unroll
      for (int i = 0; i < 8 * kParts; ++i) dy[i / (4 * kParts)][i / 4 % kParts][i % 4] = 0u;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = 0.f;
    }
    derived().gradients(dy, sums);
    reset<kSlot, 1>();
  }

  // A step of phase kPhase, of which slot (kPhase + 1) mod T is finished. more: another follows. On
  // entry and, where more, on return the plane's fragments are in `a`.
  template <int kPhase>
  __device__ __forceinline__ void step(bool more) {
    // Every warp of the warpgroup has then read its windows of this plane, so that its stage may be
    // filled again, and stored what it made in the step before.
    if constexpr (kOrdered) {
      take_turn();
    } else {
      ring.meet();
    }
    derived().prepare();
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    multiply<0, kPhase>();
    derived().issue();
    multiply<1, kPhase>();
    wgmma_commit();
    pass_turn();
    ring.refill(plane);
    if (plane == 0) {
      ring.announce();
      begin_item();
    }
    derived().overlap();
    wgmma_wait<1>();
    derived().complete();
    wgmma_wait<1>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
    finish<(kPhase + 1) % kT>();
    // float32's windows need the registers of complete()'s operands.
    if constexpr (Config::kFloat) derived().end_step();
    if (more) {
      ring.next();
      fragments(plane + 1 == p.planes);
    }
    if constexpr (!Config::kFloat) derived().end_step();
  }

  // Steps of phases kPhase .. T - 1; false where the last of all is done.
  template <int kPhase>
  __device__ __forceinline__ bool steps() {
    if constexpr (kPhase < kT) {
      const bool last = plane + 1 == p.planes;
      const bool more = !last || ring.exists(ring.item + 1);
      step<kPhase>(more);
      plane = last ? 0 : plane + 1;
      if (last) ++ring.item;
      return more && steps<kPhase + 1>();
    } else {
      return true;
    }
  }
};

}  // namespace convnormpool
