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
// window_shared_bytes<Config>(params); one block per SM, so blocks = number of SMs is best. Any grid
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
enum class WindowOperand { kTf32, kHalf, kBfloat16, kSplit };

// kTensor: the tensor copy engine; needs rows of x whose bytes are a multiple of 16 and an aligned
// base. kElements: anything else, element by element.
enum class WindowLoads { kTensor, kElements };

// How tensor cores stay busy while a warpgroup finishes a plane. kFree: by the other warpgroups, in
// whatever order they come. kOrdered: by the other warpgroups, which issue in turn. kTiles: also by
// its own other tile; the two tiles' wgmmas are separate groups.
enum class WindowOverlap { kFree, kOrdered, kTiles };

template <WindowOperand kOperand_, int kC_, int kT_, int kR_, int kS_,
          WindowLoads kLoads_ = WindowLoads::kTensor,
          WindowOverlap kOverlap_ = WindowOverlap::kOrdered, int kWarpgroups_ = 3,
          int kStages_ = 4>
struct WindowConfig {
  static constexpr WindowOperand kOperand = kOperand_;
  static constexpr int kC = kC_, kT = kT_, kR = kR_, kS = kS_;
  static constexpr WindowLoads kLoads = kLoads_;
  static constexpr WindowOverlap kOverlap = kOverlap_;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static_assert(kT >= 1 && kT <= 4, "N = 16 T of at most 64: two tiles of accumulators in registers");
  static_assert(kR >= 1 && kR <= 4 && kS >= 1 && kS <= 4, "four lanes stand for kh, four slots for kw");
  static_assert(kC >= 1 && kC <= 4, "fragments of all channels of a plane in registers");

  static constexpr bool kSplit = kOperand == WindowOperand::kSplit;
  static constexpr bool kTf32 = kOperand == WindowOperand::kTf32;
  static constexpr bool kFloat = kTf32 || kSplit;
  static constexpr WgmmaType kType = kTf32                                  ? WgmmaType::kTf32
                                     : kOperand == WindowOperand::kBfloat16 ? WgmmaType::kBf16
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

  static constexpr int kBarrierOffset = 0;
  static constexpr int kExponentOffset = 256;
  static constexpr int kZeroOffset = 384;
  static constexpr int kWeightOffset = 640;
  static constexpr int kStageOffset = kWeightOffset + kWeightBytes;
  static_assert(kWarpgroups * kStages * 8 <= kExponentOffset, "barriers");
  static_assert(kPitch <= kWeightOffset - kZeroOffset, "a row of zeros");
  static_assert(kStageOffset % 128 == 0, "destinations of tensor copies");
};

struct WindowParams {
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

inline int window_pieces(const WindowParams& p) { return p.P * p.column_tiles; }

template <class Config>
size_t window_shared_bytes(const WindowParams& p) {
  return Config::kStageOffset + size_t(Config::kWarpgroups) * Config::kStages * p.stage_bytes;
}

// The parameters that follow from the problem; the pointers are left null.
template <class Config>
WindowParams window_params(const Problem& problem) {
  WindowParams p{};
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
void window_box(const WindowParams& p, bool rest, uint32_t (&box)[5]) {
  box[0] = Config::kColumns;
  box[1] = uint32_t((rest ? p.rest : 4) + Config::kR - 1);
  box[2] = 1;
  box[3] = Config::kC;
  box[4] = 1;
}

// Four output rows: `rows` of each of 4 / rows samples from n on.
struct WindowItem {
  int n, row, rows, column;
};

__device__ __forceinline__ WindowItem window_item(const WindowParams& p, int index) {
  const int per_group = p.column_tiles * (p.rest_samples * p.quads + (p.rest != 0));
  const int group = index / per_group;
  int i = index - group * per_group;
  WindowItem item;
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
__device__ __forceinline__ int window_box_bytes(int rows) {
  const int bytes = Config::kC * (rows + Config::kR - 1) * Config::kPitch;
  return rows == 4 ? bytes : (bytes + 127) / 128 * 128;
}

// Which block of four columns row g of a tile stands for. With the pitch of a float row, lanes of
// one phase of a 16-byte load (two g, four rows) meet eight different groups of four banks.
template <class Config>
__device__ __forceinline__ int window_block(int g) {
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
__device__ __forceinline__ float window_weight(const void* w, size_t i) {
  if constexpr (Config::kFloat) {
    return static_cast<const float*>(w)[i];
  } else if constexpr (Config::kOperand == WindowOperand::kHalf) {
    return __half2float(static_cast<const __half*>(w)[i]);
  } else {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(w)[i]);
  }
}

// Writes the B operand of channels first .. first + 15; zeros where there is no tap or channel.
template <class Config>
__device__ void stage_weights(const WindowParams& p, int first, unsigned char* shared) {
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
      value = window_weight<Config>(p.w, size_t(first + k) * kTaps + tap);
    }
    const int byte = slot * Config::kElementBytes / (Config::kSplit ? 2 : 1);
    unsigned char* to = shared + Config::kWeightOffset + step * Config::kStepBytes +
                        byte / 16 * Config::kDepthBytes + (block * 2 + k / 8) * 128 + k % 8 * 16 +
                        byte % 16;
    if constexpr (Config::kTf32) {
      *reinterpret_cast<uint32_t*>(to) = round_tf32(__float_as_uint(value));
    } else if constexpr (Config::kOperand == WindowOperand::kBfloat16) {
      *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(value);
    } else if constexpr (Config::kOperand == WindowOperand::kHalf) {
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

// The ring of one warpgroup. All its threads hold the same copy; `fill` is called by all of them.
template <class Config>
struct WindowRing {
  const WindowParams& p;
  const TensorMap* quad_map;
  const TensorMap* rest_map;
  uint32_t stages, barriers;  // shared addresses
  unsigned char* stage_pointer;
  int planes, end;
  int fill_stage = 0, fill_item, fill_plane = 0;
  WindowItem item;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ WindowRing(const WindowParams& params, const TensorMap* quads,
                                        const TensorMap* rests, unsigned char* shared, int group,
                                        int first, int last, int plane_count)
      : p(params), quad_map(quads), rest_map(rests), planes(plane_count), end(last),
        fill_item(first) {
    const uint32_t base = shared_address(shared);
    const uint32_t offset =
        uint32_t(Config::kStageOffset + group * Config::kStages * params.stage_bytes);
    stages = base + offset;
    stage_pointer = shared + offset;
    barriers = base + uint32_t(Config::kBarrierOffset + group * Config::kStages * 8);
    if (fill_item < end) item = window_item(p, fill_item);
  }

  // Starts the copy of the next plane, if there is one, into the stage that was read longest ago.
  __device__ __forceinline__ void fill() {
    if constexpr (Config::kLoads == WindowLoads::kTensor) {
      if (threadIdx.x % 128 == 0) fill_tensor();
      __syncwarp();
    } else {
      if (fill_item < end) fill_elements();
      cp_async_commit();
      advance();
    }
  }

  __device__ __forceinline__ void advance() {
    fill_stage = fill_stage + 1 == Config::kStages ? 0 : fill_stage + 1;
    if (++fill_plane == planes) {
      fill_plane = 0;
      fill_item += Config::kWarpgroups;
      if (fill_item < end) item = window_item(p, fill_item);
    }
  }

  __device__ __forceinline__ void fill_tensor() {
    if (fill_item >= end) return;
    const int bytes = window_box_bytes<Config>(item.rows);
    const int samples = 4 / item.rows;
    const uint32_t barrier = barriers + uint32_t(fill_stage * 8);
    const uint32_t to = stages + uint32_t(fill_stage * p.stage_bytes);
    mbarrier_arrive_expect(
        barrier, uint32_t(samples * Config::kC * (item.rows + Config::kR - 1) * Config::kPitch));
    const TensorMap* map = item.rows == 4 ? quad_map : rest_map;
    for (int s = 0; s < samples; ++s) {
      tensor_copy(to + uint32_t(s * bytes), map, barrier, item.column * 32 - p.padding[2],
                  item.row - p.padding[1], fill_plane - p.padding[0], 0, item.n + s);
    }
    advance();
  }

  // Lanes along a row of the box, the warps deal its rows.
  __device__ __forceinline__ void fill_elements() {
    const int rows = item.rows + Config::kR - 1;
    const int bytes = window_box_bytes<Config>(item.rows);
    const int lane = int(threadIdx.x) % 32, d = fill_plane - p.padding[0];
    for (int r = int(threadIdx.x) % 128 / 32; r < 4 / item.rows * Config::kC * rows; r += 4) {
      const int s = r / (Config::kC * rows), ci = r / rows % Config::kC;
      const int n = item.n + s, h = item.row + r % rows - p.padding[1];
      const bool inside = n < p.N && d >= 0 && d < p.D && h >= 0 && h < p.H;
      const int64_t from = (((int64_t(n) * Config::kC + ci) * p.D + d) * p.H + h) * p.W;
      unsigned char* to = stage_pointer + fill_stage * p.stage_bytes + s * bytes +
                          (ci * rows + r % rows) * Config::kPitch;
      for (int i = lane; i < 36; i += 32) {
        const int column = item.column * 32 - p.padding[2] + i;
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
  __device__ __forceinline__ void wait(int barrier_id) {
    if constexpr (Config::kLoads == WindowLoads::kTensor) {
      mbarrier_wait(barriers + uint32_t(stage * 8), parity);
    } else {
      cp_async_wait<Config::kStages - 1>();
      barrier_sync(barrier_id, 128);
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
struct WindowSweep {
  static constexpr int kT = Config::kT, kC = Config::kC, kS = Config::kS;
  static constexpr bool kTiles = Config::kOverlap == WindowOverlap::kTiles;
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + Config::kWarpgroups;

  WindowRing<Config>& ring;
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

  __device__ __forceinline__ WindowSweep(WindowRing<Config>& r, const Act& activation, int g,
                                         uint32_t shared)
      : ring(r), act(activation), group(g), warp(int(threadIdx.x) % 128 / 32),
        lane(int(threadIdx.x) % 32),
        weights(wgmma_descriptor(shared + Config::kWeightOffset, Config::kDepthBytes, 128)),
        zeros(shared + Config::kZeroOffset) {}

  __device__ __forceinline__ void begin(const WindowItem& item) {
    const WindowParams& p = ring.p;
    const int in_item = item.rows == 3 && warp == 3 ? 0 : warp;
    const int rows = item.rows + Config::kR - 1;
    const int block = window_block<Config>(lane / 4);
    address = ring.stages + uint32_t(in_item / item.rows * window_box_bytes<Config>(item.rows) +
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
        if (2 * kTile + half < valid_columns) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float y = output(acc[kTile][8 * kSlot + i / 2 * 4 + half * 2 + i % 2], i);
            const float shifted = act.value(y) - pivot[i];
            sum[i] += shifted;
            square[i] = fmaf(shifted, shifted, square[i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      set_accumulator(acc[kTile][8 * kSlot + i], reset[i / 4 * 2 + i % 2]);
    }
  }

  // Every warp of the warpgroup has read its windows of this plane: the stage may be filled again.
  __device__ __forceinline__ void release() {
    if constexpr (Config::kOverlap == WindowOverlap::kOrdered) {
      take_turn();
    } else {
      barrier_sync(kGroupBarrier + group, 128);
    }
    ring.fill();
  }

  __device__ __forceinline__ void take_turn() { barrier_sync(kTurnBarrier + group, 256); }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Config::kOverlap == WindowOverlap::kOrdered) {
      barrier_arrive(kTurnBarrier + (group + 1) % Config::kWarpgroups, 256);
    }
  }

  __device__ __forceinline__ void next_window() {
    ring.wait(kGroupBarrier + group);
    load_window();
  }

  // Plane p = kPhase mod T into slots 0 .. kCount - 1. z = p - T + 1 is the output plane
  // that it finishes, if kFinish; kLast: of the item. On entry and, unless kLast, on return the
  // plane's windows are in `window` (kTiles) or its fragments in `a`.
  template <int kPhase, int kCount, bool kFinish, bool kEnd>
  __device__ __forceinline__ void plane(int z, bool more) {
    constexpr int kSlot = (kPhase + 1) % kT;
    const bool counted = !kEnd || z < ring.p.Z;
    if constexpr (kTiles) {
      if constexpr (Config::kSplit) split_window();
      build<0>();
      release();
      pin_fragments(a[0]);
      wgmma_fence();
      multiply<0, kPhase, kCount>();
      wgmma_commit();
      if constexpr (kFinish) {
        wgmma_wait<1>();
        pin_accumulators(acc[1]);
        if (z > 0) finish<1, kPhase>(!kEnd || z - 1 < ring.p.Z);
      } else if constexpr (kPhase > 0) {
        wgmma_wait<1>();
        pin_accumulators(acc[1]);
      }
      build<1>();
      pin_fragments(a[1]);
      wgmma_fence();
      multiply<1, kPhase, kCount>();
      wgmma_commit();
      wgmma_wait<1>();
      pin_accumulators(acc[0]);
      if (more) next_window();
      if constexpr (kFinish) {
        if (z == 0) choose_pivot<kSlot>();
        finish<0, kSlot>(counted);
      }
      if (!more) {
        wgmma_wait<0>();
        pin_accumulators(acc[1]);
        if constexpr (kFinish) finish<1, kSlot>(counted);
      }
    } else {
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
      if (more) fragments();
    }
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

  // The planes after the last that overlaps T outputs; kResidue = outputs mod T. Only slots from 0 on
  // may be a part: ptxas copies all accumulators where a wgmma has others of them.
  template <int kResidue, int kIndex>
  __device__ __forceinline__ void tail(int z) {
    if constexpr (kIndex < kT - 1) {
      constexpr int kPhase = (kResidue + kIndex) % kT;
      constexpr int kLow = (kPhase + 1) % kT, kLive = kT - 1 - kIndex;
      plane<kPhase, kLow + kLive < kT ? kLow + kLive : kT, true, true>(z, kIndex < kT - 2);
      tail<kResidue, kIndex + 1>(z + 1);
    }
  }

  // A whole item. `outputs` is max(Z, T - 1): fewer than T - 1 output planes are computed as if
  // there were T - 1, from planes of zeros, and not counted.
  __device__ __forceinline__ void sweep(int outputs) {
    next_window();
    if constexpr (!kTiles) fragments();
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
  __device__ __forceinline__ void write(const WindowItem& item, int first_channel) {
    const WindowParams& p = ring.p;
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
    conv_activation_moments_wgmma(const WindowParams p, const __grid_constant__ TensorMap quad_map,
                                  const __grid_constant__ TensorMap rest_map, const Act act) {
  unsigned char* shared = dynamic_shared_memory();
  const uint32_t base = shared_address(shared);
  const int first_channel = int(blockIdx.y) * 16;
  if (threadIdx.x == 0 && Config::kLoads == WindowLoads::kTensor) {
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
  WindowRing<Config> ring(p, &quad_map, &rest_map, shared, group, first + group, last, planes);
  for (int i = 0; i < Config::kStages; ++i) ring.fill();

  WindowSweep<Config, Act> sweep(ring, act, group, base);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i / 2 * 8 + sweep.lane % 4 * 2 + i % 2;
    const bool given = p.b != nullptr && first_channel + k < p.K;
    sweep.bias[i] = given ? window_weight<Config>(p.b, size_t(first_channel + k)) : 0.f;
    sweep.reset[i] = Config::kSplit ? 0.f : sweep.bias[i];
  }
#pragma unroll
  for (int i = 0; i < 8 * Config::kT; ++i) {
    sweep.acc[0][i] = sweep.acc[1][i] = sweep.reset[i % 8 / 4 * 2 + i % 2];
  }
  constexpr bool kOrdered = Config::kOverlap == WindowOverlap::kOrdered;
  if (kOrdered && group == Config::kWarpgroups - 1) sweep.pass_turn();
  for (int round = first; round < last; round += Config::kWarpgroups) {
    if (round + group < last) {
      const WindowItem item = window_item(p, round + group);
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
