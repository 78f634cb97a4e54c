// The fused backward on Hopper, both gradients from one recomputation: those of x and of filter and
// bias, for small filters over few input channels, stride 1; neither the convolution's output nor
// its gradient is ever in memory.
//
// Items, recomputation, dy and dx are those of conv_activation_moments_backward_wgmma_input.cuh.
// dy and the windows of x are kept in shared memory besides, as operands of the filter's gradient:
// dw[k, ci, kd, kh, kw] is the sum over positions of dy[k, z, h, q] x[ci, z + kd, h + kh, q + kw].
// For one input plane M is the 64 pairs (kd, k), N the taps (kh / 2, ci, kw, kh % 2), the depth the
// 16 positions of a tile of an output row: columns j and j + 2 of the eight blocks.
//   A: dy as it leaves the registers, T planes from the newest that meets the plane of x to the
//      oldest, next to each other.
//   B: a window's columns 0 .. 6, of all blocks, as vectors of eight. The taps of column j are
//      those from j on: core matrices that overlap.
//   D: all of dw in 8 C registers. A plane of x is multiplied T steps after it came, with that
//      step's dy as the newest; what is computed for no output, or by two items, is zero in all but
//      one of them.
//
// A step: dy of a finished plane is formed while the products of the step before are under way;
// then dx's products and the plane's recomputation, which hold the warps, and after the barrier of
// the step the filter's, which don't.
//
// Sums leave the accumulators for the warpgroup's result in memory at an item's end, where dy's
// exponent changes. Every result is written, and added to, by one thread in a fixed order. float32:
// x has one exponent for the planes of a warpgroup, which sums and planes follow where it changes.
//
// Launch: as conv_activation_moments_backward_wgmma_input; then sum_backward_kernel for dw, with a
// count of blocks kWarpgroups, and for db with four times that.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_both_filter.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_sweep.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaBothSweep : WgmmaInputSweep<Config, Act> {
  using Input = WgmmaInputSweep<Config, Act>;
  using Outputs = WgmmaInputOutputs<Config, Act>;
  using Input::a, Input::acc, Input::gradient, Input::ring, Input::rows, Input::turned;
  static constexpr int kT = Config::kT;

  WgmmaBothFilter<Config> filter;
  typename Outputs::Terms terms = {};

  __device__ __forceinline__ WgmmaBothSweep(WgmmaInputRing<Config>& r, const Act& activation,
                                            const WgmmaBothParams& p)
      : Input(r, activation), filter(r, p) {}

  // dy of a finished plane, or of none, into registers and the ring. Loads the windows of the plane
  // that the ring has reached, if any: before, there are no registers for them.
  template <int kSlot, bool kForm, bool kLoad = true>
  __device__ __forceinline__ void form(int plane) {
    filter.next_slot();
    if constexpr (kForm) {
      float v[16];
      Outputs::template output_gradients<kSlot>(terms, v);
      filter.add_bias(v, plane);
      Outputs::round_gradients(v);
      if constexpr (kLoad) Outputs::load_window();
      filter.store_gradients(gradient[0][3], gradient[0][4], plane);
    } else {
      if constexpr (kLoad) Outputs::load_window();
      filter.store_no_gradients();
    }
  }

  // The filter's products of the step before are done.
  __device__ __forceinline__ void settle_products() {
    wgmma_wait<0>();
    pin_accumulators(filter.sums);
  }

  // So they are, and what step kPhase begins is cleared.
  template <int kPhase>
  __device__ __forceinline__ void finish_products() {
    settle_products();
    if constexpr (Config::kFloat) filter.template follow_exponent<kPhase>();
    Input::template clear_turned<(kPhase + kT - 1) % kT>();
  }

  // As WgmmaInputSweep's, but the ring has reached the plane on entry and, unless the work ends,
  // the next one on return; and the filter's products may be under way.
  template <int kPhase, int kCount, bool kForm, bool kBody>
  __device__ __forceinline__ void step(int p) {
    form<kPhase, kForm>(kBody ? p - kT : ring.p.planes - kT);
    finish_products<kPhase>();
    Outputs::template clear<kPhase>();
    const float largest = Outputs::template fragments<!kBody && kPhase == 0>();
    if constexpr (Config::kFloat) filter.template note_largest<kPhase>(largest);
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    if constexpr (kForm) {
      Input::template multiply_gradient<kPhase>();
    } else {
      rows.template store<kPhase>(turned);
    }
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    Outputs::template recompute<0, kPhase, kCount>();
    Outputs::template recompute<1, kPhase, kCount>();
    wgmma_commit();
    fence_proxy_async();
    if constexpr (kForm) {
      wgmma_wait<1>();
      rows.template store<kPhase>(turned);
    }
    ring.meet();
    filter.multiply();
    if constexpr (!kBody && kPhase == 0) ring.announce();
    if constexpr (kPhase % Config::kRefill == Config::kRefill - 1) {
      ring.template refill<Config::kRefill>(p);
    }
    if constexpr (kBody && kPhase == 0) {
      if (p == kT) rows.begin(this->gradient_exponent);
    }
    const auto row_terms = rows.load(Input::template finished<kBody>(p));
    if constexpr (Config::kFloat) {
      filter.template choose_exponent<kPhase>(!kBody && kPhase == 0 && ring.quad == 0);
    }
    filter.store_plane(a, this->exponent);
    rows.add(Input::template finished<kBody>(p), row_terms);
    const bool last = kBody && kPhase == kT - 1 && p + 1 == ring.p.planes && ring.last();
    if (!last) ring.next();
    if constexpr (kBody || kPhase == kT - 1) Outputs::load_terms(terms, p + 1 - kT);
    wgmma_wait<1>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
    pin_accumulators(turned[0]);
    pin_accumulators(turned[1]);
  }

  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT) {
      step<kPlane, kPlane + 1, kPlane == 0, false>(kPlane);
      if constexpr (kPlane == 0) {
        Outputs::begin_quad();
        filter.begin_quad();
      }
      head<kPlane + 1>();
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void body(int p) {
    if constexpr (kPhase < kT) {
      step<kPhase, kT, true, true>(p + kPhase);
      body<kPhase + 1>(p);
    }
  }

  // What the last quad leaves.
  template <int kPlane>
  __device__ __forceinline__ void drain() {
    if constexpr (kPlane < kT) {
      form<kPlane, kPlane == 0, false>(ring.p.planes - kT);
      finish_products<kPlane>();
      fence_proxy_async();
      if constexpr (kPlane == 0) {
        Input::template multiply_gradient<0>();
        wgmma_wait<0>();
        pin_accumulators(turned[0]);
        pin_accumulators(turned[1]);
      }
      rows.template store<kPlane>(turned);
      ring.meet();
      filter.multiply();
      const int plane = Input::template finished<false>(kPlane);
      rows.add(plane, rows.load(plane));
      drain<kPlane + 1>();
    }
  }

  // The sums of an item are complete.
  __device__ __forceinline__ void finish_item() {
    settle_products();
    filter.flush();
  }

  __device__ __forceinline__ void run() {
    filter.begin();
    if (!ring.exists()) return;
    Outputs::begin();
#pragma unroll
    for (int i = 0; i < Config::kN / 2; ++i) turned[0][i] = turned[1][i] = 0.f;
    ring.next();
    while (true) {
      head<0>();
      if (ring.quad == 0) {
        finish_item();
        filter.gradient_exponent = this->gradient_exponent;
      }
      int p = kT;
      do {
        body<0>(p);
        p += kT;
      } while (p < ring.p.planes);
      settle_products();
      if (ring.last()) break;
      ring.next_quad();
    }
    drain<0>();
    finish_item();
  }
};

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_backward_wgmma_both(const WgmmaBothParams p,
                                                const __grid_constant__ TensorMap map,
                                                const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  wgmma_input_begin<Config>(shared);
  const WgmmaWeights<Config> weights(p, 16 * p.first_tile);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  WgmmaInputRing<Config> ring(p, &map, group);
  wgmma_input_stage<Config>(p, weights, shared);

  WgmmaBothSweep<Config, Act> sweep(ring, act, p);
  sweep.run();
}

}  // namespace convnormpool
