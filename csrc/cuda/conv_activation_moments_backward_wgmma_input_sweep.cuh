// The sweep of the Hopper kernel of the input's gradient: a warpgroup's way through the planes of
// its quads. See conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_outputs.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_rows.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaInputSweep : WgmmaInputOutputs<Config, Act> {
  using Outputs = WgmmaInputOutputs<Config, Act>;
  using Outputs::a;
  using Outputs::acc;
  using Outputs::begin;
  using Outputs::begin_quad;
  using Outputs::gradient;
  using Outputs::gradient_exponent;
  using Outputs::next_window;
  using Outputs::ring;
  using Outputs::zero;
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;

  WgmmaInputRows<Config> rows;
  float turned[2][Config::kN / 2];  // dx: [tile][(slot, ci)]; rows as of y, kh is lane % 4

  __device__ __forceinline__ WgmmaInputSweep(WgmmaInputRing<Config>& r, const Act& activation)
      : Outputs(r, activation), rows(r) {}

  template <int kTile, int kPhase, bool kAccumulate = true>
  __device__ __forceinline__ void turn(float* d, int kw, int gradient_part, int weight_part) {
    const uint32_t weights = wgmma_operand(
        shared_address(dynamic_shared_memory() + Config::kTurnedOffset), Config::kTapBytes / 2);
    const int tap = (kPhase * kS + kw) * kParts + weight_part;
    wgmma<Config::kType, Config::kN, kAccumulate>(d, gradient[gradient_part][kTile - kw + 3],
                                                  weights + uint32_t(tap * Config::kTapBytes) / 16);
  }

  // dy of planes kPhase mod T times the weights: its plane of dx is in slot kPhase, the newest that
  // it adds to in the slot before.
  template <int kPhase>
  __device__ __forceinline__ void multiply_gradient() {
    pin_fragments(gradient[0]);
    wgmma_fence();
#pragma unroll
    for (int kw = 0; kw < kS; ++kw) turn<0, kPhase>(turned[0], kw, 0, 0);
#pragma unroll
    for (int kw = 0; kw < kS; ++kw) turn<1, kPhase>(turned[1], kw, 0, 0);
    wgmma_commit();
  }

  template <int kTile, int kPhase, int kTap>
  __device__ __forceinline__ void turn_small(float* fresh) {
    if constexpr (kTap < kS) {
      turn<kTile, kPhase, (kTap > 0)>(fresh, kTap, 1, 0);
      turn<kTile, kPhase>(fresh, kTap, 0, 1);
      turn_small<kTile, kPhase, kTap + 1>(fresh);
    }
  }
  template <int kTile, int kPhase, int kTap>
  __device__ __forceinline__ void turn_large(float* fresh) {
    if constexpr (kTap < kS) {
      turn<kTile, kPhase>(fresh, kTap, 0, 0);
      turn_large<kTile, kPhase, kTap + 1>(fresh);
    }
  }

  // kSplit: the products of one tile with that plane alone, the small ones first, then added.
  template <int kTile, int kPhase>
  __device__ __forceinline__ void multiply_gradient_fresh() {
    float fresh[Config::kN / 2];
    pin_fragments(gradient[0]);
    pin_fragments(gradient[kParts - 1]);
    wgmma_fence();
    turn_small<kTile, kPhase, 0>(fresh);
    turn_large<kTile, kPhase, 0>(fresh);
    wgmma_commit();
    wgmma_wait<0>();
    pin_accumulators(fresh);
    constexpr int kNewest = (kPhase + kT - 1) % kT;
#pragma unroll
    for (int i = 0; i < Config::kN / 2; ++i) {
      const bool begins = (i / 4 * 2 + i % 2) / kC == kNewest;
      turned[kTile][i] = (begins ? 0.f : turned[kTile][i]) + fresh[i];
    }
    pin_accumulators(turned[kTile]);
  }

  // Not before all wgmmas are done: ptxas would run them one by one if other instructions wrote
  // accumulators meanwhile, even those of another group.
  template <int kSlot>
  __device__ __forceinline__ void clear_turned() {
    constexpr int kFirst = kSlot * kC, kEnd = kFirst + kC;
#pragma unroll
    for (int pair = kFirst / 2; pair < (kEnd + 1) / 2; ++pair) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float* const d = turned[tile] + 4 * pair;
        if (2 * pair >= kFirst && 2 * pair + 1 < kEnd) {
          load_accumulators(d, ring.base() + uint32_t(Config::kZeroOffset + 16 * tile));
        } else {
          const int i = 2 * pair < kFirst;
          set_accumulator(d[i], zero);
          set_accumulator(d[i + 2], zero);
        }
      }
    }
  }

  // ---- planes

  // Plane p = kPhase mod T of the quad into slots 0 .. kCount - 1 of y. If kForm, first dy of the
  // output plane that the plane before has finished, p - T or, in the quad before, the last one;
  // its products finish slot kPhase of dx, plane p - T or, of the quad before, planes + p - T. On
  // entry and, unless the work ends, on return the plane's windows are loaded. No wgmma is under
  // way at either: ptxas runs them one by one where it does not see which are.
  template <int kPhase, int kCount, bool kForm, bool kBody>
  __device__ __forceinline__ void step(int p) {
    if constexpr (kForm)
      Outputs::template form_gradient<kPhase>(kBody ? p - kT : ring.p.planes - kT);
    Outputs::template clear<kPhase>();
    Outputs::template fragments<!kBody && kPhase == 0>();
    if constexpr (kForm) {
      multiply_gradient<kPhase>();
    } else {
      rows.template store<kPhase>(turned);
    }
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    Outputs::template recompute<0, kPhase, kCount>();
    Outputs::template recompute<1, kPhase, kCount>();
    wgmma_commit();
    if constexpr (kForm) {
      wgmma_wait<1>();
      rows.template store<kPhase>(turned);
    }
    const auto terms = meet<kPhase, kBody>(p);
    const bool last = kBody && kPhase == kT - 1 && p + 1 == ring.p.planes && ring.last();
    if (!last) next_window();
    rows.add(finished<kBody>(p), terms);
    wgmma_wait<0>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
    pin_accumulators(turned[0]);
    pin_accumulators(turned[1]);
    clear_turned<kPhase>();
  }

  // kSplit: as step, but the plane's windows are loaded here. The tensor cores cut off what falls
  // out of an accumulator, always towards zero: split operands, which are to be exact, are added up
  // over one plane only, and planes outside.
  template <int kPhase, int kCount, bool kForm, bool kBody>
  __device__ __forceinline__ void split_step(int p) {
    if constexpr (kForm) {
      Outputs::template form_gradient<kPhase>(kBody ? p - kT : ring.p.planes - kT);
      multiply_gradient_fresh<0, kPhase>();
      multiply_gradient_fresh<1, kPhase>();
    }
    rows.template store<kPhase>(turned);
    if constexpr (!kBody) clear_turned<kPhase>();
    next_window();
    Outputs::template fragments<!kBody && kPhase == 0>();
    float fresh[2][8 * kCount];
    Outputs::template recompute_fresh<0, kPhase, kCount>(fresh[0]);
    wgmma_wait<0>();
    pin_accumulators(fresh[0]);
    Outputs::template add_outputs<0, kPhase, kCount>(fresh[0]);
    Outputs::template recompute_fresh<1, kPhase, kCount>(fresh[1]);
    rows.add(finished<kBody>(p), meet<kPhase, kBody>(p));
    wgmma_wait<0>();
    pin_accumulators(fresh[1]);
    Outputs::template add_outputs<1, kPhase, kCount>(fresh[1]);
  }

  // The plane of dx that plane p finishes, of this quad or the one before.
  template <bool kBody>
  __device__ __forceinline__ int finished(int p) const {
    return kBody ? p - kT : ring.p.planes - kT + p;
  }

  // All warps have then stored their sums, and read their windows of this plane.
  template <int kPhase, bool kBody>
  __device__ __forceinline__ typename WgmmaInputRows<Config>::Terms meet(int p) {
    ring.meet();
    if constexpr (!kBody && kPhase == 0) ring.announce();
    if constexpr (kPhase == kT - 1) ring.refill(p);
    if constexpr (kBody && kPhase == 0) {
      if (p == kT) rows.begin(gradient_exponent);
    }
    return rows.load(finished<kBody>(p));
  }

  template <int kPhase, int kCount, bool kForm, bool kBody>
  __device__ __forceinline__ void any_step(int p) {
    if constexpr (Config::kSplit) {
      split_step<kPhase, kCount, kForm, kBody>(p);
    } else {
      step<kPhase, kCount, kForm, kBody>(p);
    }
  }

  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT) {
      any_step<kPlane, kPlane + 1, kPlane == 0, false>(kPlane);
      if constexpr (kPlane == 0) begin_quad();
      head<kPlane + 1>();
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void body(int p) {
    if constexpr (kPhase < kT) {
      any_step<kPhase, kT, true, true>(p + kPhase);
      body<kPhase + 1>(p);
    }
  }

  // What the last quad leaves.
  template <int kPlane>
  __device__ __forceinline__ void drain() {
    if constexpr (kPlane < kT) {
      if constexpr (kPlane == 0) {
        Outputs::template form_gradient<0>(ring.p.planes - kT);
        if constexpr (Config::kSplit) {
          multiply_gradient_fresh<0, 0>();
          multiply_gradient_fresh<1, 0>();
        } else {
          multiply_gradient<0>();
          wgmma_wait<0>();
          pin_accumulators(turned[0]);
          pin_accumulators(turned[1]);
        }
      }
      rows.template store<kPlane>(turned);
      ring.meet();
      rows.add(finished<false>(kPlane), rows.load(finished<false>(kPlane)));
      drain<kPlane + 1>();
    }
  }

  __device__ __forceinline__ void run() {
    if (!ring.exists()) return;
    begin();
#pragma unroll
    for (int i = 0; i < Config::kN / 2; ++i) turned[0][i] = turned[1][i] = 0.f;
    if (!Config::kSplit) next_window();
    while (true) {
      head<0>();
      int p = kT;
      do {
        body<0>(p);
        p += kT;
      } while (p < ring.p.planes);
      if (ring.last()) break;
      ring.next_quad();
    }
    drain<0>();
  }
};

}  // namespace convnormpool
