// Operands of the Hopper window kernel into shared memory: the weights once, the input planes
// through a ring. See conv_activation_moments_wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"

namespace convnormpool {

// Four output rows: `rows` of each of 4 / rows samples from n on.
struct WgmmaItem {
  int n, row, rows, column;
};

__device__ __forceinline__ WgmmaItem wgmma_item(const WgmmaParams& p, int index) {
  const int per_group = p.column_tiles * (p.rest_samples * p.quads + (p.rest != 0));
  const int group = index / per_group;
  int i = index - group * per_group;
  WgmmaItem item;
  item.n = group * p.rest_samples;
  const int samples = p.N - item.n < p.rest_samples ? p.N - item.n : p.rest_samples;
  const int per_sample = p.column_tiles * p.quads;
  if (i < samples * per_sample) {
    item.n += i / per_sample;
    i %= per_sample;
    item.column = i / p.quads;
    item.row = i % p.quads * 4;
    item.rows = 4;
  } else {
    item.column = i - samples * per_sample;
    item.row = p.quads * 4;
    item.rows = p.rest;
  }
  return item;
}

// The bytes of one sample's box in a stage.
template <class Config>
__device__ __forceinline__ int wgmma_box_bytes(int rows) {
  const int bytes = Config::kC * (rows + Config::kR - 1) * Config::kPitch;
  return rows == 4 ? bytes : (bytes + 127) / 128 * 128;
}

// Which block of four columns row g of a tile stands for. With the pitch of a float row, lanes of
// one phase of a 16-byte load (two g, four rows) meet eight different groups of four banks.
template <class Config>
__device__ __forceinline__ int wgmma_block(int g) {
  return Config::kFloat ? g / 2 + g % 2 * 4 : g;
}

// The exponent by which to scale so that amax lies in [2^14, 2^15); at most 126, so that 2^exponent
// is a float. Zero and subnormal values then keep all their bits in two halves; Inf and NaN stay.
__device__ __forceinline__ int wgmma_split_exponent(uint32_t amax_bits) {
  const int exponent = 141 - int(amax_bits >> 23);
  return exponent < 126 ? exponent : 126;
}

__device__ __forceinline__ float wgmma_power_of_two(int exponent) { return ldexpf(1.f, exponent); }

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

// Writes the B operand of channels first .. first + 15; zeros where there is no tap or channel.
template <class Config>
__device__ void wgmma_stage_weights(const WgmmaParams& p, int first, unsigned char* shared) {
  constexpr int kTaps = Config::kC * Config::kT * Config::kR * Config::kS;
  int* exponents = reinterpret_cast<int*>(shared + Config::kExponentOffset);
  if constexpr (Config::kSplit) {
    for (int k = int(threadIdx.x) / 32; k < 16; k += Config::kThreads / 32) {
      uint32_t amax = 0;
      for (int i = int(threadIdx.x) % 32; i < kTaps && first + k < p.K; i += 32) {
        const float value = static_cast<const float*>(p.w)[size_t(first + k) * kTaps + i];
        amax = max(amax, __float_as_uint(fabsf(value)));
      }
      amax = __reduce_max_sync(~0u, amax);
      if (threadIdx.x % 32 == 0) exponents[k] = wgmma_split_exponent(amax);
    }
    __syncthreads();
  }
  constexpr int kDepth = Config::kTf32 ? 8 : 16;
  constexpr int kOnce = Config::kSteps / (Config::kSplit ? 2 : 1);
  for (int i = int(threadIdx.x); i < kOnce * kDepth * Config::kBlocks * 16; i += Config::kThreads) {
    const int k = i % 16, block = i / 16 % Config::kBlocks;
    const int slot = i / (16 * Config::kBlocks) % kDepth;
    const int step = i / (16 * Config::kBlocks * kDepth);
    const int ci = step / Config::kStepsPerChannel;
    const int kd = (Config::kT - block % Config::kT) % Config::kT;
    const int kh = Config::kTf32 ? slot % 4 : slot % 8 / 2;
    const int kw =
        Config::kTf32 ? step % Config::kStepsPerChannel + slot / 4 * 2 : slot / 8 * 2 + slot % 2;
    float value = 0.f;
    if (kh < Config::kR && kw < Config::kS && first + k < p.K) {
      const int tap = ((ci * Config::kT + kd) * Config::kR + kh) * Config::kS + kw;
      value = wgmma_weight<Config>(p.w, size_t(first + k) * kTaps + tap);
    }
    const int byte = slot * Config::kElementBytes / (Config::kSplit ? 2 : 1);
    unsigned char* to = shared + Config::kWeightOffset + step * Config::kStepBytes +
                        byte / 16 * Config::kDepthBytes + (block * 2 + k / 8) * 128 + k % 8 * 16 +
                        byte % 16;
    if constexpr (Config::kTf32) {
      *reinterpret_cast<uint32_t*>(to) = round_tf32(__float_as_uint(value));
    } else if constexpr (Config::kOperand == WgmmaOperand::kBFloat16) {
      *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(value);
    } else if constexpr (Config::kOperand == WgmmaOperand::kFloat16) {
      *reinterpret_cast<__half*>(to) = __float2half_rn(value);
    } else {
      const float scaled = value * wgmma_power_of_two(exponents[k]);
      const __half high = __float2half_rn(scaled);
      *reinterpret_cast<__half*>(to) = high;
      *reinterpret_cast<__half*>(to + kOnce * Config::kStepBytes) =
          __float2half_rn(scaled - __half2float(high));
    }
  }
}

// What a ring copies next. It stands in shared memory, used by one thread: registers are short.
struct WgmmaCursor {
  int stage, item, end, plane;
  int n, h, w;  // of the box
  int samples, box_bytes, copied_bytes;
  int rest;
};

// The ring of one warpgroup; `fill` is called by all its threads.
template <class Config>
struct WgmmaRing {
  static constexpr bool kTensor = Config::kLoads == WgmmaLoads::kTensor;

  const WgmmaParams& p;
  const TensorMap* quad_map;
  const TensorMap* rest_map;
  const int group;
  WgmmaCursor* const cursor;
  int stage = 0;
  uint32_t parity = 0;

  // Items first, first + kWarpgroups, .. below last.
  __device__ __forceinline__ WgmmaRing(const WgmmaParams& params, const TensorMap* quads,
                                       const TensorMap* rests, int g, int first, int last)
      : p(params),
        quad_map(quads),
        rest_map(rests),
        group(g),
        cursor(reinterpret_cast<WgmmaCursor*>(dynamic_shared_memory() + Config::kCursorOffset) +
               g) {
    if (threadIdx.x % 128 == 0) {
      cursor->stage = cursor->plane = 0;
      cursor->item = first;
      cursor->end = last;
      if (first < last) locate();
    }
    meet();
  }

  // The barrier of this warpgroup.
  __device__ __forceinline__ void meet() const { barrier_sync(Config::kGroupBarrier + group, 128); }

  __device__ __forceinline__ int stage_offset(int i) const {
    return Config::kStageOffset + (group * Config::kStages + i) * p.stage_bytes;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return shared_address(dynamic_shared_memory() + Config::kBarrierOffset +
                          (group * Config::kStages + i) * 8);
  }

  __device__ __forceinline__ void locate() {
    const WgmmaItem item = wgmma_item(p, cursor->item);
    cursor->n = item.n;
    cursor->h = item.row - p.padding[1];
    cursor->w = item.column * 32 - p.padding[2];
    cursor->samples = 4 / item.rows;
    cursor->box_bytes = wgmma_box_bytes<Config>(item.rows);
    cursor->copied_bytes =
        cursor->samples * Config::kC * (item.rows + Config::kR - 1) * Config::kPitch;
    cursor->rest = item.rows != 4;
  }

  // Starts the copy of the next plane, if there is one, into the stage that was read longest ago;
  // `advance` must follow. Two functions, since this one is best called while wgmmas are in flight,
  // when the other would find no registers.
  __device__ __forceinline__ void fill() {
    if constexpr (kTensor) {
      if (threadIdx.x % 128 == 0 && cursor->item < cursor->end) fill_tensor();
      __syncwarp();
    } else {
      if (cursor->item < cursor->end) fill_elements();
      cp_async_commit();
      meet();
    }
  }

  __device__ __forceinline__ void advance() {
    if (threadIdx.x % 128 == 0 && cursor->item < cursor->end) {
      cursor->stage = cursor->stage + 1 == Config::kStages ? 0 : cursor->stage + 1;
      if (++cursor->plane == p.planes) {
        cursor->plane = 0;
        cursor->item += Config::kWarpgroups;
        if (cursor->item < cursor->end) locate();
      }
    }
    if constexpr (kTensor) {
      __syncwarp();
    } else {
      meet();
    }
  }

  __device__ __forceinline__ void fill_tensor() {
    const WgmmaCursor c = *cursor;
    const uint32_t barrier = full(c.stage);
    const TensorMap* map = c.rest ? rest_map : quad_map;
    const int d = c.plane - p.padding[0];
    uint32_t to = shared_address(dynamic_shared_memory() + stage_offset(c.stage));
    mbarrier_arrive_expect(barrier, uint32_t(c.copied_bytes));
    tensor_copy(to, map, barrier, c.w, c.h, d, 0, c.n);
#pragma unroll 1
    for (int s = 1; s < c.samples; ++s) {
      to += uint32_t(c.box_bytes);
      tensor_copy(to, map, barrier, c.w, c.h, d, 0, c.n + s);
    }
  }

  // Lanes along a row of the box, the warps deal its rows.
  __device__ __forceinline__ void fill_elements() {
    const WgmmaCursor c = *cursor;
    const int rows = c.copied_bytes / (c.samples * Config::kC * Config::kPitch);
    const int lane = int(threadIdx.x) % 32, d = c.plane - p.padding[0];
    for (int r = int(threadIdx.x) % 128 / 32; r < c.samples * Config::kC * rows; r += 4) {
      const int s = r / (Config::kC * rows), ci = r / rows % Config::kC;
      const int n = c.n + s, h = c.h + r % rows;
      const bool inside = n < p.N && d >= 0 && d < p.D && h >= 0 && h < p.H;
      const int64_t from = (((int64_t(n) * Config::kC + ci) * p.D + d) * p.H + h) * p.W;
      unsigned char* to = dynamic_shared_memory() + stage_offset(c.stage) + s * c.box_bytes +
                          (ci * rows + r % rows) * Config::kPitch;
      for (int i = lane; i < 36; i += 32) {
        const int column = c.w + i;
        const bool valid = inside && column >= 0 && column < p.W;
        if constexpr (Config::kFloat) {
          const float* x = static_cast<const float*>(p.x);
          cp_async<4>(to + 4 * i, valid ? x + from + column : x, valid ? 4 : 0);
        } else {
          const uint16_t* x = static_cast<const uint16_t*>(p.x);
          reinterpret_cast<uint16_t*>(to)[i] = valid ? x[from + column] : uint16_t(0);
        }
      }
    }
  }

  // Waits until the current plane is there; its stage is `stage`.
  __device__ __forceinline__ void wait() {
    if constexpr (Config::kLoads == WgmmaLoads::kTensor) {
      mbarrier_wait(full(stage), parity);
    } else {
      cp_async_wait<Config::kStages - 1>();
      meet();
    }
  }

  __device__ __forceinline__ uint32_t offset() const { return uint32_t(stage * p.stage_bytes); }

  __device__ __forceinline__ void next() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace convnormpool
