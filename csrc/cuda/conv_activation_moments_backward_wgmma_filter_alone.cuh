// The gradient of filter and bias on Hopper, alone: what
// conv_activation_moments_backward_wgmma_both.cuh does without dx. Its operands, both in shared
// memory, and its sums are the same. For hardswish.
//
// Quads are fours of output rows of all samples, one after the other, in a segment of 32 columns:
// no output is computed twice, and none that does not exist but for columns past the last and what
// fills up the planes. A warpgroup takes quads that follow each other. A sample's dy has a scale
// that suits the next one's, too, whose rows may share its last quad. The sums leave the
// accumulators for the warpgroup's result in memory where a sample begins.
//
// A step: dy of a finished plane is formed while the products of the step before are under way;
// then the recomputation, which holds the warps, and after the barrier of the step the filter's
// products, which don't.
//
// Launch: for each tile of 16 output channels p.first_tile, a grid of wgmma_filter_alone_blocks(
// params, SMs), block Config::kThreads, dynamic shared memory Config::kMostSharedBytes; then
// sum_backward_kernel for dw, with a count of blocks kWarpgroups, and for db with four times that.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_both_filter.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_filter_alone_ring.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_outputs.cuh"

namespace convnormpool {

template <class Config>
struct WgmmaFilterAlone : WgmmaInputOutputs<Config, HardswishFn> {
  using Outputs = WgmmaInputOutputs<Config, HardswishFn>;
  using Outputs::a, Outputs::acc, Outputs::gradient, Outputs::ring;
  using typename Outputs::Terms;
  static constexpr int kT = Config::kT;
  // Whether alpha has what the mean takes off, which saves registers where windows are of float32:
  // dy = (alpha - slope mean + slope a(y)) a'(y).
  static constexpr bool kFolded = Config::kFloat;

  WgmmaBothFilter<Config> filter;
  Terms terms = {};
  // Of the lane's columns: what the gate is at 0, and where the derivative's knees are. No output:
  // the gate and the derivative are 0.
  float middle[4] = {}, knee[4] = {};
  uint32_t edges_from;  // where they wait
  bool first = true;    // no quad has been begun
  bool begins;          // the quad in work begins a sample, or is the first: a scale of its own

  __device__ __forceinline__ WgmmaFilterAlone(WgmmaInputRing<Config>& r, const WgmmaBothParams& p)
      : Outputs(r, HardswishFn{}), filter(r, p) {}

  __device__ __forceinline__ void begin() {
    Outputs::begin();
    edges_from = filter.base() + uint32_t(Config::kUnreadOffset + filter.lane() / 4 * 32);
  }

  // Before the first step of a quad: where its windows are.
  __device__ __forceinline__ void enter_quad() {
    const bool second = own_row(*ring.place(0)) >= sample_rows();
    this->address = Outputs::window_address() + (second ? uint32_t(Config::kBoxBytes) : 0u);
  }
  __device__ __forceinline__ int sample_rows() const { return wgmma_sample_rows(ring.p.P); }
  // This warp's output row, counted from the first sample's first.
  __device__ __forceinline__ int own_row(const WgmmaInputPlace& at) const {
    return ring.first_row(at) + filter.warp();
  }

  // After its first step, which still formed dy of the quad before: its own dy.
  __device__ __forceinline__ void begin_quad() {
    const WgmmaBothParams& p = filter.p;
    const WgmmaInputPlace at = *ring.place(0);
    const bool second = own_row(at) >= sample_rows();
    const int row = own_row(at) - (second ? sample_rows() : 0);
    const int next = min(at.n + 1, p.N - 1);
    this->gradient_exponent = *sums_exponent();
    begins = __any_sync(~0u, first || ring.begins(at)) != 0;
    if (begins || __any_sync(~0u, second) != 0) {
      Terms of, of_next;
      const float bound = Outputs::sample_terms(of, second ? next : at.n);
      if (begins) {
        const int other = second ? at.n : next;
        Outputs::choose_gradient_exponent(fmaxf(bound, Outputs::sample_terms(of_next, other)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kFolded) of.alpha[i] = fmaf(-of.slope[i], of.mean[i], of.alpha[i]);
      }
      Outputs::begin_terms(of);
    }
    first = false;
    const bool exists = row < p.P && (!second || at.n + 1 < p.N);
    this->terms_from = exists ? Outputs::terms() : this->zeros_from;
    float from[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column =
          at.w + p.padding[2] + 4 * wgmma_block<Config>(Outputs::cold_thread() % 32 / 4) + i;
      const bool output = column >= 0 && column < p.Q;
      from[0][i] = output ? 0.5f : -1e30f, from[1][i] = output ? 3.f : 0.f;
    }
    if (filter.warp() == 0 && filter.lane() % 4 == 0) {
      store_shared(edges_from, from[0]);
      store_shared(edges_from + 16, from[1]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_terms(int plane) {
    const uint32_t from = plane < ring.p.Z ? this->terms_from : this->zeros_from;
    if constexpr (!kFolded) load_shared(terms.mean, from);
    load_shared(terms.alpha, from + 64);
    load_shared(terms.slope, from + 128);
    if constexpr (Config::kFloat) load_shared(terms.biases, from + 192);
    load_shared(middle, edges_from);
    load_shared(knee, edges_from + 16);
  }

  // dy of the plane in slot kSlot, zero where the lane has no output: [column][channel].
  template <int kSlot>
  __device__ __forceinline__ void output_gradients(float (&v)[16]) {
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      float y[4], gate[4], d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = acc[column % 2][8 * kSlot + i / 2 * 4 + column / 2 * 2 + i % 2];
        if constexpr (Config::kFloat) y[i] = fmaf(y[i], this->unscale[i], terms.biases[i]);
        gate[i] = __saturatef(fmaf(y[i], 1.f / 6.f, middle[column]));
        const float value = kFolded ? y[i] * gate[i] : fmaf(y[i], gate[i], -terms.mean[i]);
        d[i] = fmaf(terms.slope[i], value, terms.alpha[i]);
      }
      // The derivative is the gate and, between the knees, a sixth of y.
      add_within(gate, y, 1.f / 6.f, knee[column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[4 * column + i] = d[i] * gate[i];
    }
  }

  // dy of a finished plane, or of none, into the ring. Loads the windows of the plane that the ring
  // of x has reached, if any: before, there are no registers for them.
  template <int kSlot, bool kForm, bool kLoad = true>
  __device__ __forceinline__ void form() {
    filter.next_slot();
    if constexpr (kForm) {
      float v[16];
      output_gradients<kSlot>(v);
#pragma unroll
      for (int j = 0; j < 16; ++j) filter.bias_sums[j % 4] += v[j];
      Outputs::round_gradients(v);
      if constexpr (kLoad) Outputs::load_window();
      filter.store_tiles(gradient[0][3], gradient[0][4]);
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

  // Plane p = kPhase mod T of the quad into slots 0 .. kCount - 1 of y; if kForm, first dy of the
  // output plane that the plane before has finished. The ring has reached the plane on entry and,
  // unless the work ends, the next one on return; the filter's products may be under way at both.
  template <int kPhase, int kCount, bool kForm, bool kBody>
  __device__ __forceinline__ void step(int p) {
    form<kPhase, kForm>();
    settle_products();
    if constexpr (Config::kFloat) filter.template follow_exponent<kPhase>();
    Outputs::template clear<kPhase>();
    const float largest = Outputs::template fragments<!kBody && kPhase == 0>();
    if constexpr (Config::kFloat) filter.template note_largest<kPhase>(largest);
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    Outputs::template recompute<0, kPhase, kCount>();
    Outputs::template recompute<1, kPhase, kCount>();
    wgmma_commit();
    fence_proxy_async();
    ring.meet();
    filter.multiply();
    if constexpr (!kBody && kPhase == 0) ring.announce();
    if constexpr (kPhase % Config::kRefill == Config::kRefill - 1) {
      ring.template refill<Config::kRefill>(p);
    }
    if constexpr (Config::kFloat) {
      filter.template choose_exponent<kPhase>(!kBody && kPhase == 0 && ring.begins(*ring.place(0)));
    }
    filter.store_plane(a, this->exponent);
    const bool last = kBody && kPhase == kT - 1 && p + 1 == ring.p.planes && ring.last();
    if (!last) ring.next();
    if constexpr (kBody || kPhase == kT - 1) load_terms(p + 1 - kT);
    wgmma_wait<1>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
  }

  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT) {
      step<kPlane, kPlane + 1, kPlane == 0, false>(kPlane);
      if constexpr (kPlane == 0) begin_quad();
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
      form<kPlane, kPlane == 0, false>();
      settle_products();
      if constexpr (Config::kFloat) filter.template follow_exponent<kPlane>();
      fence_proxy_async();
      ring.meet();
      filter.multiply();
      drain<kPlane + 1>();
    }
  }

  // Of this warp: the exponent of the dy in the sums. Registers are short.
  __device__ __forceinline__ int* sums_exponent() const {
    static_assert(kT * 16 + 16 <= Config::kUnreadOffset, "behind the magnitudes of planes");
    return reinterpret_cast<int*>(filter.own_memory() + kT * 16) + filter.warp();
  }

  __device__ __forceinline__ void flush() {
    filter.gradient_exponent = *sums_exponent();
    filter.flush();
    __syncwarp();
    if (filter.lane() == 0) *sums_exponent() = this->gradient_exponent;
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    filter.begin();
    if (!ring.exists()) return;
    begin();
    ring.next();
    while (true) {
      enter_quad();
      head<0>();
      settle_products();
      if (begins) flush();
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
    settle_products();
    flush();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_backward_wgmma_filter_alone(const WgmmaBothParams p,
                                                        const __grid_constant__ TensorMap map) {
  unsigned char* shared = dynamic_shared_memory();
  wgmma_input_begin<Config>(shared);
  const WgmmaWeights<Config> weights(p, 16 * p.first_tile);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  WgmmaInputRing<Config> ring(p, &map, group);
  wgmma_input_stage<Config>(p, weights, shared);

  WgmmaFilterAlone<Config> sweep(ring, p);
  sweep.run();
}

}  // namespace convnormpool
