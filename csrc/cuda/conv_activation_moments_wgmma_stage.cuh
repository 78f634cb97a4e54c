// Operands of the Hopper window kernel into shared memory: the weights once, the input planes
// through a ring. See conv_activation_moments_wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"

namespace convnormpool {

// Where the box of an item begins, the same for all its planes. kind: 0 for four rows of one
// sample (a quad), 1 for the rest rows of several samples, -1 for no item.
struct alignas(16) WgmmaPlace {
  int w, h, n, kind;
};

__device__ __forceinline__ WgmmaPlace wgmma_place(const WgmmaParams& p, int index) {
  const int group = p.by_group.divide(index);
  int i = index - group * p.group_items;
  WgmmaPlace place;
  place.n = group * p.rest_samples;
  const int left = p.N - place.n, samples = left < p.rest_samples ? left : p.rest_samples;
  const int quads = samples * p.sample_items;
  place.kind = i >= quads;
  int column = i - quads, quad = p.quads;
  if (place.kind == 0) {
    const int sample = p.by_sample.divide(i);
    i -= sample * p.sample_items;
    column = p.by_quads.divide(i);
    quad = i - column * p.quads;
    place.n += sample;
  }
  place.h = 4 * quad - p.padding[1];
  place.w = p.first_column + 32 * column - p.padding[2];
  return place;
}

// Which block of four columns row g of a tile stands for. With the pitch of a float row, lanes of
// one phase of a 16-byte load (two g, four rows) meet eight different groups of four banks.
template <class Config>
__device__ __forceinline__ int wgmma_block(int g) {
  return Config::kFloat ? g / 2 + g % 2 * 4 : g;
}

// The exponent field of a magnitude's bits; Inf and NaN count as the largest numbers.
__device__ __forceinline__ int wgmma_exponent_field(uint32_t magnitude) {
  return min(int(magnitude >> 23), 254);
}

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float wgmma_power_of_two(int e) {
  return __uint_as_float(uint32_t(e + 127) << 23);
}

// 2^e for any e of two factors' sum: 0 or Inf where float has no such number.
__device__ __forceinline__ float wgmma_power_of_two_or_limit(int e) {
  const int near = min(max(e, -126), 127);
  return wgmma_power_of_two(near) * wgmma_power_of_two(min(max(e - near, -126), 127));
}

template <class Config>
__device__ __forceinline__ float wgmma_weight(const void* w, size_t i) {
  if constexpr (Config::kFloat) {
    return static_cast<const float*>(w)[i];
  } else if constexpr (Config::kOperand == WgmmaOperand::kFloat16) {
    return __half2float(static_cast<const __half*>(w)[i]);
  } else {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(w)[i]);
  }
}

// The weights of channels first .. first + 15, on their way from memory: begun before anything else
// that a block prepares, since nothing takes as long.
template <class Config>
struct WgmmaWeights {
  static constexpr int kTaps = Config::kC * Config::kT * Config::kR * Config::kS;
  static constexpr int kLoads = (16 * kTaps + Config::kThreads - 1) / Config::kThreads;
  static constexpr int kPitch = wgmma_raw_pitch(kTaps);

  using Element = typename Config::Element;

  Element values[kLoads];

  template <class Params>
  __device__ __forceinline__ WgmmaWeights(const Params& p, int first) {
    const int exist = min(p.K - first, 16) * kTaps;
    const Element* const from = static_cast<const Element*>(p.w) + int64_t(first) * kTaps;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = j * Config::kThreads + int(threadIdx.x);
      values[j] = i < exist ? from[i] : Element(0.f);
    }
  }

  // To shared memory, as they are. Ends with a barrier of the block.
  __device__ __forceinline__ void store(unsigned char* shared) const {
    float* const raw = reinterpret_cast<float*>(shared + Config::kRawOffset);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = j * Config::kThreads + int(threadIdx.x);
      if (i < 16 * kTaps) raw[i / kTaps * kPitch + i % kTaps] = float(values[j]);
    }
    __syncthreads();
  }

  // Channel k of those that are stored.
  static __device__ __forceinline__ const float* channel(const unsigned char* shared, int k) {
    return reinterpret_cast<const float*>(shared + Config::kRawOffset) + k * kPitch;
  }
};

// The exponents, at most 127, by which float32 weights are scaled, from those that are stored:
// the largest of each channel comes to [2^14, 2^15). 16 lanes take a channel. Ends with a barrier
// of the block.
template <class Config>
__device__ __forceinline__ void wgmma_weight_exponents(unsigned char* shared) {
  constexpr int kTaps = WgmmaWeights<Config>::kTaps, kLanes = 16;
  int* const exponents = reinterpret_cast<int*>(shared + Config::kExponentOffset);
  for (int k = int(threadIdx.x) / kLanes; k < 16; k += Config::kThreads / kLanes) {
    const float* const of = WgmmaWeights<Config>::channel(shared, k);
    uint32_t largest = 0;
    for (int i = int(threadIdx.x) % kLanes; i < kTaps; i += kLanes) {
      largest = max(largest, __float_as_uint(fabsf(of[i])));
    }
    largest = lanes_max(largest, kLanes);
    if (threadIdx.x % kLanes == 0) exponents[k] = min(141 - wgmma_exponent_field(largest), 127);
  }
  __syncthreads();
}

// Writes a word of operands B, two neighbours along the depth, and kSplit: what is left of them,
// part_bytes on.
template <class Config>
__device__ __forceinline__ void wgmma_store_weights(unsigned char* to, float w0, float w1,
                                                    int part_bytes) {
  if constexpr (Config::kOperand == WgmmaOperand::kBFloat16) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(w0, w1);
  } else {
    const __half2 high = __floats2half2_rn(w0, w1);
    *reinterpret_cast<__half2*>(to) = high;
    if constexpr (Config::kSplit) {
      const float2 back = __half22float2(high);
      *reinterpret_cast<__half2*>(to + part_bytes) = __floats2half2_rn(w0 - back.x, w1 - back.y);
    }
  }
}

// Writes the B operand of y's recomputation or computation, from weights that are stored, and their
// exponents; zeros where there is no tap. The loop is hardly unrolled: it runs once, and to fetch
// its code would take longer than to run it.
template <class Config>
__device__ __forceinline__ void wgmma_stage_operands(unsigned char* shared) {
  constexpr int kT = Config::kT, kC = Config::kC, kPairs = kC * kT * 8 * 16;
  const int* const exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kPairs; i += Config::kThreads) {
    const int k = i % 16, slot = i / 16 % 8 * 2, kd = i / 128 % kT, ci = i / (128 * kT);
    const int kh = slot % 8 / 2, kw = slot / 8 * 2;
    const float scale = Config::kFloat ? wgmma_power_of_two(exponents[k]) : 1.f;
    const float* const tap = WgmmaWeights<Config>::channel(shared, k) +
                             ((ci * kT + kd) * Config::kR + kh) * Config::kS + kw;
    float w[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      w[j] = kh < Config::kR && kw + j < Config::kS ? tap[j] * scale : 0.f;
    }
    unsigned char* const to = shared + Config::kWeightOffset + ci * Config::kStepBytes +
                              slot / 8 * Config::kDepthBytes + k / 8 * 128 + k % 8 * 16 +
                              slot % 8 * 2;
    // Each kd has a second block kT on, but for the one that stands last.
    for (int block = (kT - kd) % kT; block < Config::kBlocks; block += kT) {
      wgmma_store_weights<Config>(to + block * 256, w[0], w[1], kC * Config::kStepBytes);
    }
  }
}

// All of that.
template <class Config>
__device__ __forceinline__ void wgmma_stage_weights(const WgmmaWeights<Config>& weights,
                                                    unsigned char* shared) {
  weights.store(shared);
  if constexpr (Config::kFloat) wgmma_weight_exponents<Config>(shared);
  wgmma_stage_operands<Config>(shared);
}

// Writes what the accumulators of channels first .. first + 15 begin with: their biases or, where
// they are scaled, zeros.
template <class Config>
__device__ void wgmma_stage_resets(const WgmmaParams& p, int first, unsigned char* shared) {
  const int i = int(threadIdx.x);
  if (i >= 32) return;
  const int k = first + i / 16 * 8 + i % 16 / 4 * 2 + i % 2;
  const bool given = !Config::kFloat && p.b != nullptr && k < p.K;
  reinterpret_cast<float*>(shared + Config::kResetOffset)[i] =
      given ? wgmma_weight<Config>(p.b, size_t(k)) : 0.f;
}

// The ring of one warpgroup: kStages planes of its items in shared memory. A stage is filled again
// as soon as all its warps have read it, with the plane kStages later.
template <class Config>
struct WgmmaRing {
  const WgmmaParams& p;
  const TensorMap* const quad_map;
  const TensorMap* const rest_map;
  const int group;
  // The stage of the plane that was read last, and the parity of its barrier's phase.
  int stage = Config::kStages - 1;
  uint32_t parity = 1;
  uint32_t parities = 0;  // for wait_stage: a bit for each stage
  int item = 0;           // counts this warpgroup's items

  // Called by all threads of the warpgroup; a barrier follows before one of them uses it.
  __device__ __forceinline__ WgmmaRing(const WgmmaParams& params, const TensorMap* quads,
                                       const TensorMap* rests, int g)
      : p(params), quad_map(quads), rest_map(rests), group(g) {
    if (threadIdx.x % 128 == 0 && exists(0)) {
      const WgmmaPlace at = wgmma_place(p, index(0));
      *place(0) = at;
#pragma unroll 1
      for (int i = 0; i < Config::kStages; ++i) copy(at, i, i);
    }
    __syncwarp();
  }

  // The warpgroups take the items of their block in turn. Not kept: registers are short.
  __device__ __forceinline__ int block_items() const {
    return p.share + (int(blockIdx.x) < p.extra);
  }
  __device__ __forceinline__ bool exists(int i) const {
    return i * Config::kWarpgroups + group < block_items();
  }
  __device__ __forceinline__ int index(int i) const {
    return int(blockIdx.x) * p.share + min(int(blockIdx.x), p.extra) + i * Config::kWarpgroups +
           group;
  }

  // The barrier of this warpgroup.
  __device__ __forceinline__ void meet() const { barrier_sync(Config::kGroupBarrier + group, 128); }

  // Of the item counted `i`: the current one, the next or the one before.
  __device__ __forceinline__ WgmmaPlace* place(int i) const {
    return reinterpret_cast<WgmmaPlace*>(dynamic_shared_memory() + Config::kPlaceOffset) +
           4 * group + i % 4;
  }
  __device__ __forceinline__ uint32_t base() const {
    return shared_address(dynamic_shared_memory());
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base() + uint32_t(Config::kBarrierOffset + (group * Config::kStages + i) * 8);
  }
  __device__ __forceinline__ uint32_t stage_address(int i) const {
    return base() + uint32_t(Config::kStageOffset + (group * Config::kStages + i) * p.stage_bytes);
  }

  __device__ __forceinline__ void copy(const WgmmaPlace& at, int to, int plane) const {
    const bool rest = at.kind != 0;
    mbarrier_arrive_expect(full(to), uint32_t(rest ? p.rest_bytes : p.quad_bytes));
    tensor_copy(stage_address(to), rest ? rest_map : quad_map, full(to), at.w, at.h,
                plane - p.padding[0], 0, at.n);
  }

  // Writes down where the item after this one is: during its first plane, before the last kStages.
  __device__ __forceinline__ void announce() {
    if (threadIdx.x % 128 == 96) {
      WgmmaPlace at{0, 0, 0, -1};
      if (exists(item + 1)) at = wgmma_place(p, index(item + 1));
      *place(item + 1) = at;
    }
    __syncwarp();
  }

  // Fills the stage of plane `index`, which all warps have read. The warps take turns.
  __device__ __forceinline__ void refill(int index) {
    if (int(threadIdx.x % 128) == stage % 4 * 32) {
      const int plane = index + Config::kStages;
      const bool next = plane >= p.planes;
      const WgmmaPlace at = *place(next ? item + 1 : item);
      if (at.kind >= 0) copy(at, stage, next ? plane - p.planes : plane);
    }
    __syncwarp();
  }

  // The same for kernels that keep plane p of an item in stage p mod kStages.
  template <int kStage>
  __device__ __forceinline__ void refill_stage(int index) {
    refill(kStage, index + Config::kStages, kStage);
  }

  // Fills stage `to` with a plane of this item or, where it has no such plane, one of the next
  // item. Not in common with the other: with it ptxas spills there, without it the forward's code
  // is not the one that was measured.
  __device__ __forceinline__ void refill(int to, int plane, int plane_of_next) {
    if (int(threadIdx.x % 128) == (to & 3) * 32) {
      const bool next = plane >= p.planes;
      const WgmmaPlace at = *place(next ? item + 1 : item);
      if (at.kind >= 0) copy(at, to, next ? plane_of_next : plane);
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

  __device__ __forceinline__ uint32_t offset() const { return uint32_t(stage * p.stage_bytes); }

  // Waits until the plane of stage kStage is there, for kernels that go by refill_stage.
  template <int kStage>
  __device__ __forceinline__ void wait_stage() {
    mbarrier_wait(full(kStage), parities >> kStage & 1u);
    parities ^= 1u << kStage;
  }
};

}  // namespace convnormpool
