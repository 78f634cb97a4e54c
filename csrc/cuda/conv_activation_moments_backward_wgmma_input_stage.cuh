// Operands of the Hopper kernel of the input's gradient into shared memory: the weights in their
// two forms once, the input planes through a ring. See
// conv_activation_moments_backward_wgmma_input.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_input_config.cuh"
#include "cuda/conv_activation_moments_wgmma_stage.cuh"

namespace convnormpool {

// One of the pieces that a sample is cut into: planes and columns are counted with their padding.
struct WgmmaInputItem {
  int n, plane, column;
  bool first_slab, last_slab, first_segment;

  __device__ __forceinline__ WgmmaInputItem(const WgmmaInputParams& p, int index,
                                            int segment_step) {
    const int slice = index / p.segments, segment = index - slice * p.segments;
    n = slice / p.slabs;
    const int slab = slice - n * p.slabs;
    plane = slab * p.slab_step;
    column = p.first_column + segment * segment_step;
    first_slab = slab == 0, last_slab = slab + 1 == p.slabs, first_segment = segment == 0;
  }
};

// Where the boxes of a quad begin; n < 0: there is none.
struct alignas(16) WgmmaInputPlace {
  int w, h, d, n;
};

// Two values as 16-bit operands or elements.
template <class Config>
__device__ __forceinline__ uint32_t wgmma_input_pack(float low, float high) {
  uint32_t bits;
  if constexpr (Config::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, 4);
  }
  return bits;
}

// The common exponent of all 16 channels' weights, behind theirs, float32 only; else zeros for all.
template <class Config>
__device__ __forceinline__ void wgmma_input_exponents(unsigned char* shared) {
  int* const exponents = reinterpret_cast<int*>(shared + Config::kExponentOffset);
  if constexpr (Config::kFloat) {
    wgmma_weight_exponents<Config>(shared);
    if (threadIdx.x < 32) {
      const int least = __reduce_min_sync(~0u, exponents[threadIdx.x % 16]);
      if (threadIdx.x == 0) exponents[16] = least;
    }
  } else {
    if (threadIdx.x < 17) exponents[threadIdx.x] = 0;
  }
  __syncthreads();
}

// Writes the B operand of the input's gradient; zeros where there is no tap.
template <class Config>
__device__ __forceinline__ void wgmma_input_turned(unsigned char* shared) {
  constexpr int kC = Config::kC, kT = Config::kT, kR = Config::kR, kS = Config::kS;
  constexpr int kPairs = kT * kS * Config::kN * 8;
  const int* const exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
  const float scale = Config::kFloat ? wgmma_power_of_two(exponents[16]) : 1.f;
#pragma unroll 1
  for (int i = thread_index_anew(); i < kPairs; i += Config::kThreads) {
    const int k = i % 8 * 2, n = i / 8 % Config::kN, kw = i / (8 * Config::kN) % kS;
    const int phase = i / (8 * Config::kN * kS);
    const int column = n / 8 * 2 + n % 2, slot = column / kC, ci = column % kC, kh = n % 8 / 2;
    const int kd = (slot - phase + kT) % kT;
    float w[2] = {0.f, 0.f};
    if (slot < kT && kh < kR) {
      const int tap = ((ci * kT + kd) * kR + kh) * kS + kw;
#pragma unroll
      for (int j = 0; j < 2; ++j) w[j] = WgmmaWeights<Config>::channel(shared, k + j)[tap] * scale;
    }
    unsigned char* const to = shared + Config::kTurnedOffset +
                              (phase * kS + kw) * Config::kParts * Config::kTapBytes +
                              k / 8 * (Config::kTapBytes / 2) + n * 16 + k % 8 * 2;
    wgmma_store_weights<Config>(to, w[0], w[1], Config::kTapBytes);
  }
}

// Writes what the accumulators of channels first .. first + 15 begin with: their biases or, where
// outputs are scaled, zeros. Two copies: of the same load for both tiles the compiler makes one and
// copies of its registers.
template <class Config>
__device__ __forceinline__ void wgmma_input_resets(const WgmmaInputParams& p, int first,
                                                   unsigned char* shared) {
  const int i = int(threadIdx.x % 32), lane = i / 4 % 4, half = i / 16;
  const int k = first + half * 8 + lane * 2 + i % 2;
  float value = 0.f;
  if (!Config::kFloat && p.b != nullptr && k < p.K) value = wgmma_weight<Config>(p.b, size_t(k));
  if (threadIdx.x >= 64) return;
  const int copy = int(threadIdx.x / 32);
  reinterpret_cast<float*>(shared + Config::kResetOffset + copy * Config::kResetCopy)[i] = value;
}

// How all these kernels begin, before their rings do: with the barriers of the stages and zeros.
// From here on they may read what the kernel before them has written.
template <class Config>
__device__ __forceinline__ void wgmma_input_begin(unsigned char* shared) {
  const uint32_t base = shared_address(shared);
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kWarpgroups * Config::kStages; ++i) {
      mbarrier_init(base + uint32_t(Config::kBarrierOffset + 8 * i), 1);
    }
  }
  if (threadIdx.x < 64) {
    reinterpret_cast<uint32_t*>(shared + Config::kZeroOffset)[threadIdx.x] = 0u;
  }
  fence_proxy_async();
  __syncthreads();
  grid_dependency_wait();
}

// And after: with what all planes are multiplied by.
template <class Config>
__device__ __forceinline__ void wgmma_input_stage(const WgmmaInputParams& p,
                                                  const WgmmaWeights<Config>& weights,
                                                  unsigned char* shared) {
  wgmma_input_resets<Config>(p, 16 * p.first_tile, shared);
  weights.store(shared);
  wgmma_input_exponents<Config>(shared);
  wgmma_stage_operands<Config>(shared);
  if constexpr (Config::kInput) wgmma_input_turned<Config>(shared);
  fence_proxy_async();
  __syncthreads();
}

// The ring of one warpgroup: kStages planes of its quads in shared memory. After each few planes
// all their stages are filled again at once, each by another warp, with the planes kStages later.
template <class Config>
struct WgmmaInputStages {
  // Which of the two leaves ptxas without spills was tried out.
  static __device__ __forceinline__ int lane() {
    return Config::kInput ? int(threadIdx.x) % 32 : int(threadIdx.x % 32);
  }
  static __device__ __forceinline__ int warp() { return int(threadIdx.x) % 128 / 32; }

  const WgmmaInputParams& p;
  const TensorMap* const map;
  const int group;
  // The stage of the plane that was read last, and the parity of its barrier's phase.
  int stage = Config::kStages - 1;
  uint32_t parity = 1;
  int turn = 0;  // which of the two places is that of the quad in work

  __device__ __forceinline__ WgmmaInputStages(const WgmmaInputParams& params, const TensorMap* m,
                                              int g)
      : p(params), map(m), group(g) {}

  // The barrier of this warpgroup.
  __device__ __forceinline__ void meet() const { barrier_sync(Config::kGroupBarrier + group, 128); }

  __device__ __forceinline__ WgmmaInputPlace* place(int i) const {
    return reinterpret_cast<WgmmaInputPlace*>(dynamic_shared_memory() + Config::kPlaceOffset) +
           2 * group + (turn ^ i);
  }
  __device__ __forceinline__ uint32_t base() const {
    return shared_address(dynamic_shared_memory());
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base() + uint32_t(Config::kBarrierOffset + (group * Config::kStages + i) * 8);
  }
  __device__ __forceinline__ uint32_t stage_address(int i) const {
    return base() +
           uint32_t(Config::kStageOffset + (group * Config::kStages + i) * Config::kStageBytes);
  }

  // Fills the stages of planes last - (kCount - 1) .. last, which all warps have read; last is that
  // of `stage`, and kCount - 1 mod kCount. copy(place, stage, plane) fills one.
  template <int kCount, class Copy>
  __device__ __forceinline__ void refill_stages(int last, const Copy& copy) {
    static_assert(kCount <= Config::kStages && Config::kT % kCount == 0, "of one quad");
    if (warp() < kCount && lane() == 0) {
      const int before = kCount - 1 - warp(), to = stage - before;
      const int plane = last - before + Config::kStages;
      const bool next = plane >= p.planes;
      const WgmmaInputPlace at = *place(next);
      if (at.n >= 0) {
        copy(at, to < 0 ? to + Config::kStages : to, next ? plane - p.planes : plane);
      }
    }
    __syncwarp();
  }

  // Waits until the next plane is there; its stage is then `stage`.
  __device__ __forceinline__ void next() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
    mbarrier_wait(full(stage), parity);
  }
};

// The quads of items, each of which is a sample or a piece of one.
template <class Config, bool kInput = Config::kInput>
struct WgmmaInputRing : WgmmaInputStages<Config> {
  using Stages = WgmmaInputStages<Config>;
  using Stages::p, Stages::place, Stages::turn;

  int item, quad = 0;  // those in work

  // Called by all threads of the warpgroup. Without a map it only says what is in work.
  __device__ __forceinline__ WgmmaInputRing(const WgmmaInputParams& params, const TensorMap* m,
                                            int g)
      : Stages(params, m, g), item(int(blockIdx.x) * Config::kWarpgroups + g) {
    if (m == nullptr) return;
    if (threadIdx.x % 128 == 0 && exists()) {
      *place(0) = place_of(item, 0);
      for (int i = 0; i < Config::kStages; ++i) copy(*place(0), i, i);
    }
    __syncwarp();
    Stages::meet();
  }

  __device__ __forceinline__ bool exists() const { return item < p.items; }
  __device__ __forceinline__ int next_item() const {
    return item + int(gridDim.x) * Config::kWarpgroups;
  }
  __device__ __forceinline__ bool last_quad() const { return quad + 1 == p.quads; }
  __device__ __forceinline__ bool last() const { return last_quad() && next_item() >= p.items; }
  __device__ __forceinline__ void next_quad() {
    if (last_quad()) item = next_item();
    quad = last_quad() ? 0 : quad + 1;
    turn ^= 1;
  }

  __device__ __forceinline__ WgmmaInputPlace place_of(int index, int quad_index) const {
    if (index >= p.items) return {0, 0, 0, -1};
    const WgmmaInputItem at(p, index, Config::kSegmentStep);
    return {at.column - p.padding[2], 4 * quad_index - p.padding[1], at.plane - p.padding[0], at.n};
  }

  __device__ __forceinline__ void copy(const WgmmaInputPlace& at, int to, int plane) const {
    mbarrier_arrive_expect(this->full(to), Config::kCopyBytes);
    tensor_copy(this->stage_address(to), this->map, this->full(to), at.w, at.h, at.d + plane, 0,
                at.n);
  }

  // Writes down where the quad after this one is: during its first plane, before any refill.
  __device__ __forceinline__ void announce() {
    if (threadIdx.x % 128 == 96) {
      *place(1) = last_quad() ? place_of(next_item(), 0) : place_of(item, quad + 1);
    }
    __syncwarp();
  }

  template <int kCount = Config::kT>
  __device__ __forceinline__ void refill(int last) {
    Stages::template refill_stages<kCount>(
        last, [&](const WgmmaInputPlace& at, int to, int plane) { copy(at, to, plane); });
  }
};

}  // namespace convnormpool
