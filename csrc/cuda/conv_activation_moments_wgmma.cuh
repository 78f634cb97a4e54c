// The window kernel of the fused forward on Hopper: small filters over few input channels, stride 1.
//
// What it computes: (mean, M2) of a(conv3d(x, w, b)) per (sample, piece, channel), a piece being one
// output row (all Z depths of it) within one tile of 32 columns.
//
// Mapping. An input plane adds to the T output planes that it overlaps, all from one window. So a
// wgmma has the rows of M as output positions, N as the 16 T pairs of (kd, channel) and the depth as
// the plane's taps (ci, kh, kw). D holds T slots of 16 columns; output plane z rolls in slot z mod T
// and is finished T - 1 planes after it began.
//   M: warp q of a warpgroup owns one output row and 32 columns of it, as two tiles of 16 rows. Rows
//      g and g + 8 of tile t stand for columns 4 block(g) + 2 t and + 2 t + 1.
//   A: lane (g, c) holds the window x[.., h + c, 4 block(g) ..+ 7]: c = kh. In tf32 step j of a
//      channel covers kw = j (k slot c) and kw = j + 2 (k slot c + 4), so that its four registers are
//      x[2 t + j .. 2 t + j + 3]. In 16 bits one step covers kw = 0..3 and the registers are
//      the pairs that begin at 2 t .. 2 t + 3.
//   B: shared memory, blocks of 16 columns in the order kd = 0, T - 1, .., 1, 0, T - 1, .., 1: for
//      plane p, slot j needs kd = (p - j) mod T, so the operand begins at block (-p) mod T.
// A warpgroup works on 4 rows at a time (an item): of one sample, or where P is no multiple of 4 the
// P mod 4 last rows of several samples. Its input planes flow through a ring of stages.
//
// Launch: grid (blocks, channel tiles of 16), block Config::kThreads, dynamic shared memory
// wgmma_shared_bytes<Config>(params); one block per SM, so blocks = number of SMs is best. Any grid
// gives the same bits: items are independent, and what they are depends on the problem alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "activation.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/ptx_hopper.cuh"
#include "problem.h"

namespace convnormpool {

// kSplit: float32 as two float16 halves and three products; x scaled per sample, w per channel.
enum class WgmmaOperand { kTf32, kFloat16, kBFloat16, kSplit };

// kTensor: the tensor copy engine; needs rows of x whose bytes are a multiple of 16 and an aligned
// base. kElements: anything else, element by element.
enum class WgmmaLoads { kTensor, kElements };

// The tensor cores stay busy by the other warpgroups while one finishes a plane. kFree: in whatever
// order they come. kOrdered: they issue in turn, so that they cannot all finish at the same time.
enum class WgmmaOverlap { kFree, kOrdered };

template <WgmmaOperand kOperand_, int kC_, int kT_, int kR_, int kS_,
          WgmmaLoads kLoads_ = WgmmaLoads::kTensor,
          WgmmaOverlap kOverlap_ = WgmmaOverlap::kOrdered, int kWarpgroups_ = 3,
          int kStages_ = 4>
struct WgmmaConfig {
  static constexpr WgmmaOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr WgmmaLoads kLoads = kLoads_;
  static constexpr WgmmaOverlap kOverlap = kOverlap_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static_assert(kT >= 1 && kT <= 4, "N = 16 T of at most 64: two tiles of accumulators in registers");
  static_assert(kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4, "four lanes stand for kh, four slots for kw");
  static_assert(kC >= 1 && kC <= 4, "fragments of all channels of a plane in registers");

  static constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  static constexpr bool kTf32 = kOperand == WgmmaOperand::kTf32;
  static constexpr bool kFloat = kTf32 || kSplit;
  static constexpr WgmmaType kType = kTf32                                  ? WgmmaType::kTf32
                                     : kOperand == WgmmaOperand::kBFloat16 ? WgmmaType::kBf16
                                                                            : WgmmaType::kF16;
  static constexpr int kElementBytes = kFloat ? 4 : 2;
  // Elements of a staged row: 35 are needed. The pitch keeps window loads free of bank conflicts.
  static constexpr int kColumns = kFloat ? 36 : 48;
  static constexpr int kPitch = kColumns * kElementBytes;
  static constexpr int kWindowWords = kFloat ? 8 : 4;

  static constexpr int kStepsPerChannel = kTf32 && kS > 1 ? 2 : 1;
  static constexpr int kSteps = kC * kStepsPerChannel * (kSplit ? 2 : 1);
  static constexpr int kBlocks = 2 * kT - 1;
  static constexpr int kDepthBytes = kBlocks * 256;  // a half of a step: 16 bytes of depth
  static constexpr int kStepBytes = 2 * kDepthBytes;
  static constexpr int kWeightBytes = kSteps * kStepBytes;

  // Named barriers, one for each warpgroup: its turn to issue, and its own four warps.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kWarpgroups;
  // Shared memory.
  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;
  static constexpr int kCursorOffset = 320;
  static constexpr int kZeroOffset = 512;
  static constexpr int kWeightOffset = 768;
  static constexpr int kStageOffset = kWeightOffset + kWeightBytes;
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kWarpgroups * 40 <= kZeroOffset - kCursorOffset, "cursors");
  static_assert(kPitch <= kWeightOffset - kZeroOffset, "a row of zeros");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
};

struct WgmmaParams {
  const void* x;         // (N, C, D, H, W) contiguous
  const void* w;         // (K, C, T, R, S) contiguous
  const void* b;         // (K,) or null
  const uint32_t* amax;  // kSplit: the bits of max |x| of each sample
  float2* partials;      // (N, pieces, K): mean and M2
  int N, D, H, W, K, Z, P, Q;
  int padding[3];
  int column_tiles;  // of 32 output columns
  int quads;         // P / 4
  int rest;          // P mod 4: rows of a sample that no quad takes
  int rest_samples;  // samples that share an item for those: 4 / rest
  int items;
  int stage_bytes;
};

inline int wgmma_pieces(const WgmmaParams& p) { return p.P * p.column_tiles; }

template <class Config>
size_t wgmma_shared_bytes(const WgmmaParams& p) {
  return Config::kStageOffset + size_t(Config::kWarpgroups) * Config::kStages * p.stage_bytes;
}

// The parameters that follow from the problem; the pointers are left null.
template <class Config>
WgmmaParams wgmma_params(const Problem& problem) {
  WgmmaParams p{};
  p.N = int(problem.N), p.D = int(problem.D), p.H = int(problem.H), p.W = int(problem.W);
  p.K = int(problem.K), p.Z = int(problem.Z()), p.P = int(problem.P()), p.Q = int(problem.Q());
  for (int i = 0; i < 3; ++i) p.padding[i] = int(problem.padding[i]);
  p.column_tiles = (p.Q + 31) / 32;
  p.quads = p.P / 4;
  p.rest = p.P % 4;
  p.rest_samples = p.rest == 0 ? 1 : 4 / p.rest;
  const int rest_items = p.rest == 0 ? 0 : (p.N + p.rest_samples - 1) / p.rest_samples;
  p.items = p.column_tiles * (p.N * p.quads + rest_items);
  const int row_bytes = Config::kC * Config::kPitch;
  const int quad_bytes = p.quads == 0 ? 0 : row_bytes * (4 + Config::kR - 1);
  const int rest_box = p.rest == 0 ? 0 : (row_bytes * (p.rest + Config::kR - 1) + 127) / 128 * 128;
  const int rest_bytes = p.rest_samples * rest_box;
  p.stage_bytes = ((quad_bytes > rest_bytes ? quad_bytes : rest_bytes) + 127) / 128 * 128;
  return p;
}

// The box of a tensor copy, fastest axis first: all channels of one plane, the rows of an item.
template <class Config>
void wgmma_box(const WgmmaParams& p, bool rest, uint32_t (&box)[5]) {
  box[0] = Config::kColumns;
  box[1] = uint32_t((rest ? p.rest : 4) + Config::kR - 1);
  box[2] = 1;
  box[3] = Config::kC;
  box[4] = 1;
}

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

// ---- weights

// The exponent by which to scale so that amax lies in [2^14, 2^15); at most 126, so that 2^exponent
// is a float. Zero and subnormal values then keep all their bits in two halves; Inf and NaN stay.
__device__ __forceinline__ int split_exponent(uint32_t amax_bits) {
  const int exponent = 141 - int(amax_bits >> 23);
  return exponent < 126 ? exponent : 126;
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return ldexpf(1.f, exponent);
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

// Writes the B operand of channels first .. first + 15; zeros where there is no tap or channel.
template <class Config>
__device__ void stage_weights(const WgmmaParams& p, int first, unsigned char* shared) {
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
      if (threadIdx.x % 32 == 0) exponents[k] = split_exponent(amax);
    }
    __syncthreads();
  }
  constexpr int kDepth = Config::kTf32 ? 8 : 16;
  constexpr int kOnce = Config::kSteps / (Config::kSplit ? 2 : 1);
  for (int i = int(threadIdx.x); i < kOnce * kDepth * Config::kBlocks * 16;
       i += Config::kThreads) {
    const int k = i % 16, block = i / 16 % Config::kBlocks;
    const int slot = i / (16 * Config::kBlocks) % kDepth;
    const int step = i / (16 * Config::kBlocks * kDepth);
    const int ci = step / Config::kStepsPerChannel;
    const int kd = (Config::kT - block % Config::kT) % Config::kT;
    const int kh = Config::kTf32 ? slot % 4 : slot % 8 / 2;
    const int kw = Config::kTf32 ? step % Config::kStepsPerChannel + slot / 4 * 2
                                 : slot / 8 * 2 + slot % 2;
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
      const float scaled = value * power_of_two(exponents[k]);
      const __half high = __float2half_rn(scaled);
      *reinterpret_cast<__half*>(to) = high;
      *reinterpret_cast<__half*>(to + kOnce * Config::kStepBytes) =
          __float2half_rn(scaled - __half2float(high));
    }
  }
}

// ---- planes into stages

// What a ring copies next. It stands in shared memory, used by one thread: registers are short.
struct WgmmaCursor {
  int stage, item, plane;
  int n, h, w;       // of the box
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
  const int barrier;  // of the warpgroup
  unsigned char* stage_pointer;
  WgmmaCursor* cursor;
  uint32_t stages, barriers;  // shared addresses
  int planes, end;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ WgmmaRing(const WgmmaParams& params, const TensorMap* quads,
                                        const TensorMap* rests, unsigned char* shared, int group,
                                        int first, int last, int plane_count)
      : p(params), quad_map(quads), rest_map(rests), barrier(Config::kGroupBarrier + group),
        planes(plane_count), end(last) {
    const uint32_t base = shared_address(shared);
    const uint32_t offset =
        uint32_t(Config::kStageOffset + group * Config::kStages * params.stage_bytes);
    stages = base + offset;
    stage_pointer = shared + offset;
    barriers = base + uint32_t(Config::kBarrierOffset + group * Config::kStages * 8);
    cursor = reinterpret_cast<WgmmaCursor*>(shared + Config::kCursorOffset) + group;
    if (threadIdx.x % 128 == 0) {
      cursor->stage = cursor->plane = 0;
      cursor->item = first;
      if (first < last) locate();
    }
    barrier_sync(barrier, 128);
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

  __device__ __forceinline__ void advance() {
    cursor->stage = cursor->stage + 1 == Config::kStages ? 0 : cursor->stage + 1;
    if (++cursor->plane == planes) {
      cursor->plane = 0;
      cursor->item += Config::kWarpgroups;
      if (cursor->item < end) locate();
    }
  }

  // Starts the copy of the next plane, if there is one, into the stage that was read longest ago.
  __device__ __forceinline__ void fill() {
    if constexpr (kTensor) {
      if (threadIdx.x % 128 == 0 && cursor->item < end) {
        fill_tensor();
        advance();
      }
      __syncwarp();
    } else {
      if (cursor->item < end) fill_elements();
      cp_async_commit();
      barrier_sync(barrier, 128);
      if (threadIdx.x % 128 == 0 && cursor->item < end) advance();
      barrier_sync(barrier, 128);
    }
  }

  __device__ __forceinline__ void fill_tensor() {
    const WgmmaCursor c = *cursor;
    const uint32_t full = barriers + uint32_t(c.stage * 8);
    const TensorMap* map = c.rest ? rest_map : quad_map;
    const int d = c.plane - p.padding[0];
    uint32_t to = stages + uint32_t(c.stage * p.stage_bytes);
    mbarrier_arrive_expect(full, uint32_t(c.copied_bytes));
    tensor_copy(to, map, full, c.w, c.h, d, 0, c.n);
#pragma unroll 1
    for (int s = 1; s < c.samples; ++s) {
      to += uint32_t(c.box_bytes);
      tensor_copy(to, map, full, c.w, c.h, d, 0, c.n + s);
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
      unsigned char* to = stage_pointer + c.stage * p.stage_bytes + s * c.box_bytes +
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
      mbarrier_wait(barriers + uint32_t(stage * 8), parity);
    } else {
      cp_async_wait<Config::kStages - 1>();
      barrier_sync(barrier, 128);
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

// ---- one thread's windows, fragments and sums

template <class Config, class Act>
struct WgmmaSweep {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS;
  static constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;

  WgmmaRing<Config>& ring;
  const Act act;
  const int group, warp, lane;
  uint64_t weights;  // descriptor of block 0 of step 0
  uint32_t zeros;

  float acc[2][8 * kT];
  uint32_t a[2][Config::kSteps][4];
  uint32_t window[kC][Config::kWindowWords];
  float bias[4], reset[4], unscale[4], pivot[4], sum[4], square[4];
  float scale;
  // Where this lane's windows stand: + stage offset + channel * channel_bytes. Lanes that stand for
  // rows the filter lacks read zeros, which have no stages and no channels.
  uint32_t address, channel_bytes;
  int valid_columns, first_column;

  __device__ __forceinline__ WgmmaSweep(WgmmaRing<Config>& r, const Act& activation, int g,
                                         uint32_t shared)
      : ring(r), act(activation), group(g), warp(int(threadIdx.x) % 128 / 32),
        lane(int(threadIdx.x) % 32),
        weights(wgmma_descriptor(shared + Config::kWeightOffset, Config::kDepthBytes, 128)),
        zeros(shared + Config::kZeroOffset) {}

  __device__ __forceinline__ void begin(const WgmmaItem& item) {
    const WgmmaParams& p = ring.p;
    const int in_item = item.rows == 3 && warp == 3 ? 0 : warp;
    const int rows = item.rows + Config::kR - 1;
    const int block = wgmma_block<Config>(lane / 4);
    address = ring.stages + uint32_t(in_item / item.rows * wgmma_box_bytes<Config>(item.rows) +
                                     (in_item % item.rows + lane % 4) * Config::kPitch +
                                     block * 4 * Config::kElementBytes);
    channel_bytes = uint32_t(rows * Config::kPitch);
    first_column = item.column * 32;
    valid_columns = p.Q - first_column - 4 * block;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = square[i] = pivot[i] = 0.f;
  }

  __device__ __forceinline__ void load_window() {
    const bool tap = Config::kR == 4 || lane % 4 < Config::kR;
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t at = address + ring.offset() + uint32_t(ci) * channel_bytes;
      if (!tap) at = zeros;
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
    ring.next();
  }

  // The registers of a 16-bit step from four words that hold x[0 .. 7]: the pairs that begin at
  // first .. first + 3. Where the filter has no kw the pair's half is zero.
  __device__ __forceinline__ void pairs(uint32_t (&to)[4], const uint32_t (&words)[4], int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + i;
      uint32_t pair = words[at / 2];
      if (at % 2 == 1) pair = __byte_perm(words[at / 2], words[at / 2 + 1], 0x5432);
      const int taps = kS - i / 2 * 2;
      to[i] = taps >= 2 ? pair : taps == 1 ? pair & 0xFFFFu : 0u;
    }
  }

  template <int kTile>
  __device__ __forceinline__ void build() {
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      if constexpr (Config::kTf32) {
#pragma unroll
        for (int j = 0; j < Config::kStepsPerChannel; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int kw = j + i / 2 * 2;
            a[kTile][ci * Config::kStepsPerChannel + j][i] =
                kw < kS ? round_tf32(window[ci][2 * kTile + j + i]) : 0u;
          }
        }
      } else if constexpr (Config::kSplit) {
        pairs(a[kTile][ci], reinterpret_cast<uint32_t(&)[4]>(window[ci][0]), 2 * kTile);
        pairs(a[kTile][kC + ci], reinterpret_cast<uint32_t(&)[4]>(window[ci][4]), 2 * kTile);
      } else {
        pairs(a[kTile][ci], window[ci], 2 * kTile);
      }
    }
  }

  // kSplit: eight floats of each window become four words of high and four words of low halves.
  __device__ __forceinline__ void split_window() {
#pragma unroll
    for (int ci = 0; ci < kC; ++ci) {
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x0 = __uint_as_float(window[ci][2 * i]) * scale;
        const float x1 = i == 3 ? 0.f : __uint_as_float(window[ci][2 * i + 1]) * scale;
        const __half2 high = __floats2half2_rn(x0, x1);
        const float2 back = __half22float2(high);
        const __half2 low = __floats2half2_rn(x0 - back.x, x1 - back.y);
        memcpy(&words[i], &high, 4);
        memcpy(&words[4 + i], &low, 4);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) window[ci][i] = words[i];
    }
  }

  // One step of one tile into slots 0 .. kCount - 1 for planes p = kPhase mod T.
  template <int kTile, int kPhase, int kCount>
  __device__ __forceinline__ void step(int fragment, int weight_step) {
    constexpr int kStart = (kT - kPhase) % kT;
    const uint64_t b = weights + uint64_t((weight_step * Config::kStepBytes + kStart * 256) / 16);
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
    return Config::kSplit ? fmaf(accumulated, unscale[channel], bias[channel]) : accumulated;
  }

  // The sums are shifted by the first output of the row, the same for all lanes of a channel.
  template <int kSlot>
  __device__ __forceinline__ void choose_pivot() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = act.value(output(acc[0][8 * kSlot + i / 2 * 4 + i % 2], i));
      pivot[i] = __shfl_sync(~0u, y, lane % 4);
    }
  }

  // Adds a finished plane of one tile to the sums and resets its slot.
  template <int kTile, int kSlot>
  __device__ __forceinline__ void finish(bool counted) {
    if (counted) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float shifted[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float y = output(acc[kTile][8 * kSlot + i / 2 * 4 + half * 2 + i % 2], i);
          shifted[i] = act.value(y) - pivot[i];
        }
        add_moments_if(sum, square, shifted, 2 * kTile + half, valid_columns);
      }
    }
    clear<kTile, kSlot>();
  }

  template <int kTile, int kSlot>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      set_accumulator(acc[kTile][8 * kSlot + i], reset[i / 4 * 2 + i % 2]);
    }
  }

  // Waits until every warp of the warpgroup has read its windows of this plane, so that the stage
  // may be filled again, and where warpgroups take turns until it is this one's turn to issue.
  __device__ __forceinline__ void release() {
    if constexpr (kOrdered) {
      take_turn();
    } else {
      barrier_sync(ring.barrier, 128);
    }
  }

  __device__ __forceinline__ void take_turn() { barrier_sync(Config::kTurnBarrier + group, 256); }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (kOrdered) {
      barrier_arrive(Config::kTurnBarrier + (group + 1) % Config::kWarpgroups, 256);
    }
  }

  __device__ __forceinline__ void next_window() {
    ring.wait();
    load_window();
  }

  // Plane p = kPhase mod T into slots 0 .. kCount - 1. z = p - T + 1 is the output plane
  // that it finishes, if kFinish; kLast: of the item. On entry and, unless kLast, on return the
  // plane's fragments are in `a`.
  template <int kPhase, int kCount, bool kFinish, bool kEnd>
  __device__ __forceinline__ void plane(int z, bool more) {
    constexpr int kSlot = (kPhase + 1) % kT;
    const bool counted = !kEnd || z < ring.p.Z;
    release();
    pin_fragments(a[0]);
    pin_fragments(a[1]);
    wgmma_fence();
    multiply<0, kPhase, kCount>();
    multiply<1, kPhase, kCount>();
    wgmma_commit();
    pass_turn();
    wgmma_wait<0>();
    pin_accumulators(acc[0]);
    pin_accumulators(acc[1]);
    if (more) next_window();
    if constexpr (kFinish) {
      if (z == 0) choose_pivot<kSlot>();
      finish<0, kSlot>(counted);
      finish<1, kSlot>(counted);
    }
    ring.fill();
    if (more) fragments();
  }

  __device__ __forceinline__ void fragments() {
    if constexpr (Config::kSplit) split_window();
    build<0>();
    build<1>();
  }

  // The planes that come before the first finished one, from p = kPlane on.
  template <int kPlane>
  __device__ __forceinline__ void head() {
    if constexpr (kPlane < kT - 1) {
      plane<kPlane, kPlane + 1, false, false>(0, true);
      head<kPlane + 1>();
    }
  }

  // Planes that overlap all T slots: T at a time from p = T - 1 on while z < outputs; the phase
  // that comes next is returned.
  template <int kOffset>
  __device__ __forceinline__ bool body(int& z, int outputs) {
    if constexpr (kOffset < kT) {
      constexpr int kPhase = (kT - 1 + kOffset) % kT;
      plane<kPhase, kT, true, false>(z, kT > 1 || z + 1 < outputs);
      if (++z == outputs) return false;
      return body<kOffset + 1>(z, outputs);
    } else {
      return true;
    }
  }

  // Plane `index` after the last that overlaps T outputs, where outputs mod T is the residue, has
  // live slots from tail_low on, cyclic. Its wgmmas cover slots 0 .. tail_width - 1: ptxas copies
  // all accumulators where one begins at another slot.
  static constexpr int tail_low(int residue, int index) { return (residue + index + 1) % kT; }
  static constexpr int tail_width(int residue, int index) {
    const int end = tail_low(residue, index) + kT - 1 - index;
    return end < kT ? end : kT;
  }
  // Whether such a wgmma adds to a slot without an output.
  static constexpr bool tail_spoils(int residue, int slot) {
    for (int i = 0; i < kT - 1; ++i) {
      const bool live = (slot - tail_low(residue, i) + kT) % kT < kT - 1 - i;
      if (!live && slot < tail_width(residue, i)) return true;
    }
    return false;
  }

  template <int kResidue, int kIndex>
  __device__ __forceinline__ void tail(int z) {
    if constexpr (kIndex < kT - 1) {
      plane<(kResidue + kIndex) % kT, tail_width(kResidue, kIndex), true, true>(z,
                                                                                kIndex < kT - 2);
      tail<kResidue, kIndex + 1>(z + 1);
    } else {
      restore<kResidue, 0>();
    }
  }

  template <int kResidue, int kSlot>
  __device__ __forceinline__ void restore() {
    if constexpr (kSlot < kT) {
      if constexpr (tail_spoils(kResidue, kSlot)) {
        clear<0, kSlot>();
        clear<1, kSlot>();
      }
      restore<kResidue, kSlot + 1>();
    }
  }

  // A whole item. `outputs` is max(Z, T - 1): fewer than T - 1 output planes are computed as if
  // there were T - 1, from planes of zeros, and not counted.
  __device__ __forceinline__ void sweep(int outputs) {
    next_window();
    fragments();
    head<0>();
    int z = 0;
    const int whole = outputs - (kT - 1);
    if (whole > 0) {
      while (body<0>(z, whole)) {
      }
    }
    if constexpr (kT > 1) {
      const int residue = outputs % kT;
      if (residue == 0) {
        tail<0, 0>(z);
      } else if (residue == 1) {
        tail<1 % kT, 0>(z);
      } else if (residue == 2) {
        tail<2 % kT, 0>(z);
      } else {
        tail<3 % kT, 0>(z);
      }
    }
  }

  // Adds the lanes of a channel and writes its (mean, M2).
  __device__ __forceinline__ void write(const WgmmaItem& item, int first_channel) {
    const WgmmaParams& p = ring.p;
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
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
    const int columns = p.Q - first_column < 32 ? p.Q - first_column : 32;
    const float shift = total / (float(p.Z) * float(columns));
    float m2 = squares - total * shift;
    m2 = m2 < 0.f ? 0.f : m2;
    m2 = m2 - m2 == 0.f ? m2 : __int_as_float(0x7FFFFFFF);
    const int n = item.n + warp / item.rows, row = item.row + warp % item.rows;
    const int k = first_channel + (upper ? 8 : 0) + lane % 4 * 2 + (odd ? 1 : 0);
    const bool exists = warp / item.rows < 4 / item.rows && n < p.N && k < p.K;
    if ((lane & 4) == 0 && exists) {
      const int64_t piece = int64_t(n) * (p.P * p.column_tiles) + row * p.column_tiles + item.column;
      p.partials[piece * p.K + k] = make_float2((upper ? high : low) + shift, m2);
    }
  }
};

// ---- kernels

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_activation_moments_wgmma(const WgmmaParams p, const __grid_constant__ TensorMap quad_map,
                                  const __grid_constant__ TensorMap rest_map, const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  const int first_channel = int(blockIdx.y) * 16;
  if (threadIdx.x == 0 && Config::kLoads == WgmmaLoads::kTensor) {
    for (int i = 0; i < Config::kWarpgroups * Config::kStages; ++i) {
      mbarrier_init(base + uint32_t(Config::kBarrierOffset + 8 * i), 1);
    }
  }
  if (threadIdx.x < 64) {
    reinterpret_cast<uint32_t*>(shared + Config::kZeroOffset)[threadIdx.x] = 0u;
  }
  stage_weights<Config>(p, first_channel, shared);
  fence_proxy_async();
  __syncthreads();

  const int first = int(int64_t(p.items) * blockIdx.x / gridDim.x);
  const int last = int(int64_t(p.items) * (blockIdx.x + 1) / gridDim.x);
  const int group = __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
  const int outputs = p.Z > Config::kT - 1 ? p.Z : Config::kT - 1;
  const int planes = outputs + Config::kT - 1;
  WgmmaRing<Config> ring(p, &quad_map, &rest_map, shared, group, first + group, last, planes);
  for (int i = 0; i < Config::kStages; ++i) ring.fill();

  WgmmaSweep<Config, Act> sweep(ring, act, group, base);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i / 2 * 8 + sweep.lane % 4 * 2 + i % 2;
    const bool given = p.b != nullptr && first_channel + k < p.K;
    sweep.bias[i] = given ? wgmma_weight<Config>(p.b, size_t(first_channel + k)) : 0.f;
    sweep.reset[i] = Config::kSplit ? 0.f : sweep.bias[i];
  }
#pragma unroll
  for (int i = 0; i < 8 * Config::kT; ++i) {
    sweep.acc[0][i] = sweep.acc[1][i] = sweep.reset[i % 8 / 4 * 2 + i % 2];
  }
  constexpr bool kOrdered = Config::kOverlap == WgmmaOverlap::kOrdered;
  if (kOrdered && group == Config::kWarpgroups - 1) sweep.pass_turn();
  for (int round = first; round < last; round += Config::kWarpgroups) {
    if (round + group < last) {
      const WgmmaItem item = wgmma_item(p, round + group);
      sweep.begin(item);
      if constexpr (Config::kSplit) {
        const int* exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset);
        const int in_item = sweep.warp / item.rows;
        const int n = item.n + (in_item < 4 / item.rows ? in_item : 0);
        const int exponent = split_exponent(p.amax[n < p.N ? n : p.N - 1]);
        sweep.scale = power_of_two(exponent);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int k = i / 2 * 8 + sweep.lane % 4 * 2 + i % 2;
          sweep.unscale[i] = power_of_two(-exponent - exponents[k]);
        }
      }
      sweep.sweep(outputs);
      sweep.write(item, first_channel);
    } else if (kOrdered) {
      for (int i = 0; i < planes; ++i) {
        sweep.take_turn();
        sweep.pass_turn();
      }
    }
  }
}

}  // namespace convnormpool
