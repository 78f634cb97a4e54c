// The fused backward on Hopper, both gradients from one recomputation, with split operands: what
// conv_activation_moments_backward_wgmma_both.cuh does, as exactly as float32.
//
// Two warpgroups share an item and do the same: of each block of four columns warpgroup t has
// columns 2 t and 2 t + 1, its tile, whose rows g and g + 8 these are. Warp q owns output row q.
//
// Each plane of x is scaled, split and stored once. It is operand A of the recomputation, loaded
// into registers, and B of the filter's gradient, by descriptors. dy of a plane is stored as
// operand A of both gradients: of the filter's by descriptors, of the input's to be loaded into
// registers, for the columns of other lanes and of the other warpgroup are then read like the own.
//
// The products of a plane are added up in accumulators of their own, the small ones first, and
// planes outside, for the tensor cores round towards zero. So the weights need no order for each
// phase: that is in which registers the products are added.
//
// A step, of plane p of x:
//   y of plane p and dw of the dy that the step before has stored are begun;
//   y of plane p is complete, and dy of the output plane that it finishes is formed and stored;
//   plane p + 1 of x, which the step before loaded, is stored, and plane p + 2 loaded;
//   the rows of dx that the step before the last stored are added up and written, by one of the
//   warpgroups;
//   dx of the dy that the step before has stored is begun, and dw and dx are added up;
//   the plane of dx that is finished is stored where its rows meet.
// The barrier of the block between steps is in two halves: a warp arrives before it begins dx, when
// all is stored but those rows, and waits at the next step's beginning. So the warpgroups may be
// part of a step apart. What a step stores has a place of its own until all warps have arrived in
// the next one, and that of wgmmas' operands in shared memory one step longer.
//
// Launch: conv_activation_moments_backward_wgmma_both_split with wgmma_input_blocks blocks of
// Config::kThreads threads, one on an SM, and wgmma_input_shared_bytes<Config>(params) bytes of
// dynamic shared memory; then sum_backward_kernel for dw, with a count of Config::kTiles for each
// block, and for db with four times that.
#pragma once

#include "cuda/conv_activation_moments_backward_wgmma_both_split_filter.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_inputs.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split_outputs.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_rows.cuh"

namespace convnormpool {

template <class Config, class Act>
struct WgmmaBothSplitSweep : WgmmaBothSplitOutputs<Config, Act> {
  using Outputs = WgmmaBothSplitOutputs<Config, Act>;
  using Terms = typename Outputs::Terms;
  using Outputs::gradient_exponent, Outputs::ring, Outputs::tile;
  using Outputs::lane, Outputs::warp;
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS, kParts = Config::kParts;
  static constexpr int kSteps = Config::kSteps, kN = Config::kN;

  uint32_t meeting = 0;   // the parity of the barrier's phase, and whose words are next
  uint32_t row_sums = 0;  // which of the places for a plane's sums is the step's
  WgmmaInputRows<Config> rows;
  WgmmaBothSplitInputs<Config> inputs;
  WgmmaBothSplitFilter<Config> filter;
  float turned[2 * kT * kC];  // dx: [slot][ci][column]; kh is lane % 4
  // This lane's row of matrices of dy kw columns before, in the first place.
  uint32_t gradients_from[kS];

  __device__ __forceinline__ WgmmaBothSplitSweep(WgmmaInputRing<Config>& r, const Act& activation,
                                                 const WgmmaBothParams& p, int t)
      : Outputs(r, activation, t), rows(r), inputs(r, t), filter(r, p, t) {}

  // The barrier of the block in two halves: of a step, and of the next one. Every lane arrives:
  // one for its warp would do, but compute-sanitizer's racecheck counts an arrival for its lane
  // alone. The branch is always taken; without it ptxas moves loads across and spills.
  __device__ __forceinline__ void arrive() const {
    __syncwarp();
    if (lane() < int(blockDim.x)) mbarrier_arrive(ring.base() + uint32_t(Config::kMeetOffset));
    __syncwarp();
  }
  __device__ __forceinline__ void wait() {
    mbarrier_wait(ring.base() + uint32_t(Config::kMeetOffset), meeting);
    meeting ^= 1;
  }

  __device__ __forceinline__ void begin() {
    Outputs::begin();
    rows.carry_from = uint32_t(opaque_value(int(rows.carry_of(0))));
#pragma unroll
    for (float& v : turned) v = 0.f;
    const int second = lane() / 8 % 2, half = lane() / 16;
#pragma unroll
    for (int kw = 0; kw < kS; ++kw) {
      const int column = 2 * tile + second - kw;
      gradients_from[kw] = filter.newest_from(column < 0 ? column + 8 : column, half);
    }
  }

  __device__ __forceinline__ void begin_quad() {
    if (ring.quad == 0) filter.template add_bias_results<false>(gradient_exponent);
    Outputs::begin_quad();
    filter.begin_quad();
  }

  // ---- dy

  // dy of output plane `plane`, which is complete in slot kSlot, as operands.
  template <int kSlot>
  __device__ __forceinline__ void form(const Terms& of, int plane) {
    float v[8];
    Outputs::template output_gradients<kSlot>(of, v);
    filter.add_bias(v, plane);
    uint32_t parts[kParts][4];
    Outputs::split_gradients(v, parts);
    filter.store_gradients(parts, plane);
  }

  // ---- dx

  template <bool kAccumulate = true>
  __device__ __forceinline__ void turn(float* d, const uint32_t (&dy)[4], uint32_t weights, int kw,
                                       int weight_part) const {
    wgmma<Config::kType, kN, kAccumulate>(
        d, dy, weights + uint32_t((kw * kParts + weight_part) * Config::kTapBytes) / 16);
  }
  template <int kTap>
  __device__ __forceinline__ void turn_small(float* fresh, const uint32_t (&dy)[kParts * kS][4],
                                             uint32_t weights) const {
    if constexpr (kTap < kS) {
      turn<(kTap > 0)>(fresh, dy[kS + kTap], weights, kTap, 0);
      turn(fresh, dy[kTap], weights, kTap, 1);
      turn_small<kTap + 1>(fresh, dy, weights);
    }
  }
  template <int kTap>
  __device__ __forceinline__ void turn_large(float* fresh, const uint32_t (&dy)[kParts * kS][4],
                                             uint32_t weights) const {
    if constexpr (kTap < kS) {
      turn(fresh, dy[kTap], weights, kTap, 0);
      turn_large<kTap + 1>(fresh, dy, weights);
    }
  }

  // Begins the products [kd, ci] of the newest dy.
  __device__ __forceinline__ void load_gradients(uint32_t (&dy)[kParts * kS][4],
                                                 uint32_t newest) const {
#pragma unroll
    for (int i = 0; i < kParts * kS; ++i) {
      ldmatrix_x4(dy[i], gradients_from[i % kS] + newest + uint32_t(i / kS * filter.kNewestPart));
    }
  }
  __device__ __forceinline__ void multiply_gradient(float* fresh,
                                                    uint32_t (&dy)[kParts * kS][4]) const {
    pin_fragments(dy);
    wgmma_fence();
    const uint32_t weights = Outputs::fixed_operand(Config::kTurnedOffset, Config::kTapBytes / 2);
    turn_small<0>(fresh, dy, weights);
    turn_large<0>(fresh, dy, weights);
    wgmma_commit();
  }

  // Adds them: slot kPhase is complete, the one before begins.
  template <int kPhase>
  __device__ __forceinline__ void add_inputs(const float* fresh) {
#pragma unroll
    for (int i = 0; i < kT * kC; ++i) {
      float* const to = turned + 2 * ((kPhase + i / kC) % kT * kC + i % kC);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float product = fresh[i / 2 * 4 + column * 2 + i % 2];
        to[column] = (i / kC == kT - 1 ? 0.f : to[column]) + product;
      }
    }
    pin_accumulators(turned);
  }

  // A finished plane of dx to where its rows are added up.
  template <int kPhase>
  __device__ __forceinline__ void store_rows() const {
    const int kh = lane() % 4;
    const uint32_t to = ring.base() + uint32_t(Config::kSumOffset) + row_sums +
                        uint32_t(((warp() * 4 + kh) * Config::kSumPitch + 4 * Outputs::block() +
                                  2 * (tile ^ (kh % 2))) *
                                 4);
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      const float* const from = turned + 2 * (kPhase * kC + ci);
      const float two[2] = {from[0], from[1]};
      store_shared(to + uint32_t(ci * 16 * Config::kSumPitch * 4), two);
    }
  }

  // The plane that the step two before plane p has stored, of this quad or the one before.
  template <int kPhase>
  __device__ __forceinline__ void add_rows(int p) {
    const int plane = p > kT + 1 ? p - kT - 2 : p - kT - 2 + ring.p.planes;
    row_sums = row_sums == 2 * Config::kSumBytes ? 0u : row_sums + Config::kSumBytes;
    if (kPhase % 2 == tile) {
      rows.buffer = row_sums == 2 * Config::kSumBytes ? 0u : row_sums + Config::kSumBytes;
      rows.add(plane, rows.load(plane));
    }
  }

  // ---- planes

  // Plane p = kPhase mod T of the quad, with kCount planes of y in work. kDy: the step before has
  // stored dy. Without kInput there is no plane, but what those before it leave.
  template <int kPhase, int kCount, bool kDy, bool kBody, bool kInput = true>
  __device__ __forceinline__ void step(int p) {
    wait();
    const int planes = ring.p.planes;
    if (kInput && tile == 0) ring.template refill<1>(p + 1);
    float fresh[8 * kCount], fresh_turned[kN / 2];
    uint32_t a[kSteps][4], dy[kParts * kS][4];
    constexpr bool kForm = kInput && (kBody || kPhase == kT - 1);
    Terms terms;
    const uint32_t terms_from =
        Outputs::is_output(p + 1 - kT) ? this->terms_from : this->zeros_from;
    uint32_t word = 0;
    if constexpr (kInput) {
      Outputs::load_inputs(a, filter.slot);
      word = inputs.word(meeting ^ 1);
      if constexpr (kForm) load_shared(terms.biases, terms_from + 192);
      Outputs::template recompute<kCount>(fresh, a);
    }
    filter.multiply();

    const uint32_t newest = filter.newest_offset();
    if constexpr (kInput) {
      wgmma_wait<1>();
      pin_accumulators(fresh);
      Outputs::template add_outputs<kPhase, kCount>(fresh, inputs.exponent);
    }
    if constexpr (kForm) {
      load_shared(terms.alpha, terms_from + 64);
      load_shared(terms.slope, terms_from + 128);
      form<(kPhase + 1) % kT>(terms, p + 1 - kT);
    } else {
      filter.store_no_gradients();
    }
    const bool last = kBody && ring.last();
    if constexpr (kInput) {
      if (!last || p + 1 < planes) {
        const bool begins = kBody && kPhase == kT - 1 && p + 1 == planes;
        inputs.choose_exponent(word, begins, begins && ring.last_quad());
        inputs.store(filter.slot_after(1));
      }
      if (!last || p + 2 < planes) inputs.load();
    }
    if constexpr (kDy) load_gradients(dy, newest);
    add_rows<kPhase>(p);
    if constexpr (kInput) {
      if (!last || p + 2 < planes) inputs.note(meeting);
    }
    fence_proxy_async();
    arrive();
    if constexpr (kDy) multiply_gradient(fresh_turned, dy);
    wgmma_wait<int(kDy)>();
    pin_accumulators(filter.products);
    filter.add_products(inputs.exponent, inputs.calm > kT);
    if constexpr (kDy) {
      wgmma_wait<0>();
      pin_accumulators(fresh_turned);
      add_inputs<kPhase>(fresh_turned);
    }
    store_rows<kPhase>();
    if constexpr (!kBody) {
#pragma unroll
      for (int i = 0; i < 2 * kC; ++i) turned[kPhase * 2 * kC + i] = 0.f;
    }
    filter.slot = filter.slot_after(1);
    if constexpr (kBody && kPhase == 1) {
      if (p == kT + 1) rows.begin(gradient_exponent);
    }
  }

  // The filter's sums of an item are complete.
  __device__ __forceinline__ void finish_item() {
    filter.flush();
    filter.set_gradient_exponent(gradient_exponent);
  }

  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT) {
      step<kPlane, kT, kPlane == 0, false>(kPlane);
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
      step<kPlane, 1, kPlane == 0, false, false>(kPlane);
      drain<kPlane + 1>();
    }
  }

  // The first two planes.
  __device__ __forceinline__ void begin_planes() {
    inputs.channel = warp() + 2 * tile;
    inputs.load();
    inputs.note(1);
    __syncthreads();
    if (tile == 0) ring.template refill<1>(0);
    inputs.choose_exponent(inputs.word(1), true, true);
    inputs.store(0);
    inputs.load();
    inputs.note(0);
    fence_proxy_async();
    arrive();
  }

  __device__ __forceinline__ void run() {
    filter.template add_results<true>();
    filter.template add_bias_results<true>(0);
    if (!ring.exists()) return;
    begin();
    begin_planes();
    while (true) {
      if (tile == 0) ring.announce();
      begin_quad();
      head<0>();
      if (ring.quad == 0) finish_item();
      int p = kT;
      do {
        body<0>(p);
        p += kT;
      } while (p < ring.p.planes);
      if (ring.last()) break;
      ring.next_quad();
    }
    drain<0>();
    wait();
    add_rows<0>(kT);
    __syncthreads();
    add_rows<1>(kT + 1);
    finish_item();
    filter.template add_bias_results<false>(gradient_exponent);
  }
};

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_backward_wgmma_both_split(const WgmmaBothParams p,
                                                      const __grid_constant__ TensorMap map,
                                                      const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(shared) + uint32_t(Config::kMeetOffset), Config::kThreads);
  }
  wgmma_input_begin<Config>(shared);
  const WgmmaWeights<Config> weights(p, 16 * p.first_tile);
  const int tile = uniform_value(int(threadIdx.x) / 128);
  WgmmaInputRing<Config> ring(p, tile == 0 ? &map : nullptr, 0);
  // The first one met in there: racecheck orders warps by how many barriers they have passed.
  if (tile != 0) barrier_sync(Config::kGroupBarrier + 1, 128);
  weights.store(shared);
  wgmma_input_exponents<Config>(shared);
  wgmma_both_split_operands<Config>(shared);
  // No operands yet.
  for (int i = Config::kWordOffset + 16 * int(threadIdx.x); i < Config::kCarryOffset;
       i += 16 * Config::kThreads) {
    *reinterpret_cast<uint4*>(shared + i) = make_uint4(0u, 0u, 0u, 0u);
  }
  fence_proxy_async();
  __syncthreads();

  WgmmaBothSplitSweep<Config, Act> sweep(ring, act, p, tile);
  sweep.run();
}

}  // namespace convnormpool
