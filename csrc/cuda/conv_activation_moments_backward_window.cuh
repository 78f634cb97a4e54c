// The fused backward for small filters, stride 1 and few input channels, by mma.sync: the gradients
// of x, w and the bias of moments(a(conv3d(x, w, b))) from those of the moments; neither the
// convolution's output nor its gradient is ever in memory. Instructions of compute capability 8.0,
// shared memory of 9.0 and 10.0.
//
// A block sweeps strips of rows through the depth (conv_activation_moments_backward_map.h). In each
// tick every row warp stages its row's input of the next plane, and adds the present one to the T
// output planes it belongs to, as the forward does. The plane that is then complete becomes dy =
// (grad_mean / positions + 2 grad_m2 (a(y) - mean)) a'(y), scaled by a power of two and rounded
// into shared memory. Then, one of them in a kernel,
//
//   input gradient    the row warp multiplies the last T planes of its dy by the weights: rows
//                     (channel, kh) x columns, depth (kd, output channel). After the tick's barrier
//                     the sums of R neighbouring rows make a row of dx.
//   filter gradient   filter warps, a tick later, multiply dy (channels x outputs) by the input
//                     (outputs x taps) of the plane T ticks ago, for all depth taps, into sums that
//                     stay in their registers for the kernel's life.
//
// MMAs (16 x 8 x 16) for 32 outputs of a row and plane, 4 x 4 x 4 filter of 3 channels: 48 again,
// 48 filter gradient, 64 input gradient, each three times when split.
//
// Launch backward_window_kernel<Config> with Config::kThreads threads, shared_bytes(slab_planes)
// bytes of dynamic shared memory and a grid of (blocks, channel tiles), one tile for the input's
// gradient; blocks at most N backward_pieces(). Then sum_backward_kernel for w and for the bias.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/conv_activation_moments_backward_filter.cuh"
#include "cuda/conv_activation_moments_backward_rows.cuh"

namespace convnormpool {

namespace window {

__device__ __forceinline__ int next_slot(int slot, int slots) {
  return slot + 1 == slots ? 0 : slot + 1;
}

template <class Config>
__device__ __forceinline__ void run_row_warp(const BackwardParameters& p,
                                             const typename Config::ActivationType& activation,
                                             const WindowStride& stride, int warp, int lane_index,
                                             int weight_exponent, unsigned char* shared) {
  constexpr int T = Config::T;
  const BackwardGeometry& g = p.geometry;
  int lane = lane_index;
  const int first_channel = 16 * (p.first_tile + static_cast<int>(blockIdx.y));
  unsigned char* const input =
      shared + Config::kInputOffset + warp * Config::kInputSlots * Config::kInputBytes;
  unsigned char* const gradients =
      shared + Config::kGradientOffset + warp * Config::kGradientSlots * Config::kGradientBytes;
  const uint32_t input_address = shared_address(input);
  const uint32_t gradient_address = shared_address(gradients);
  int* const exponents =
      reinterpret_cast<int*>(shared + Config::kExponentOffset + warp * Config::kExponentBytes);
  float* const sums = reinterpret_cast<float*>(shared + Config::kSumOffset);
  float* const carry = reinterpret_cast<float*>(shared + Config::kCarryOffset);

  RowWarp<Config> state;
  state.activation = activation;
  state.begin(p, first_channel, lane, shared + Config::kTermOffset + warp * Config::kTermBytes);
  for (int i = lane; i < Config::kInputSlots * Config::kInputBytes / 16; i += 32) {
    reinterpret_cast<uint4*>(input)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();

  // Three places in the walk: what is loaded, what is multiplied, and T - 1 ticks later the output
  // plane that is then complete, or past a strip's last one the input plane.
  BackwardCursor loading;
  loading.begin(g, static_cast<int32_t>(blockIdx.x));
  BackwardCursor now = loading, ended = loading;
  const int64_t plane_stride = static_cast<int64_t>(g.H) * g.W;
  const bool extras = g.W + g.pad_w > kBackwardColumns;
  BackwardLoader<Config> loader;
  BackwardPlane<Config> raw;
  int staged_exponent = 0, staging = 0;
  bool raw_first = true;
  const auto load = [&] {
    raw_first = loading.first();
    if (raw_first) {
      loader.place(p, loading, loading.strip * Config::kRowWarps + warp, lane);
    } else {
      loader.plane += plane_stride;
    }
    loader.load(g, loading.inside(g), lane, raw);
  };
  const auto stage = [&] {
    float scale = 1.0f;
    if constexpr (Config::kFloat32) {
      staged_exponent = next_exponent(largest_magnitude(raw), raw_first, staged_exponent);
      scale = power_of_two(staged_exponent);
    }
    if (lane == 0) exponents[staging] = staged_exponent;
    stage_plane(raw, scale, extras, lane, input + staging * Config::kInputBytes);
    staging = next_slot(staging, Config::kInputSlots);
    loading.next(g, stride, T);
  };
  load();
  stage();

  int slot = 0, newest = 0, buffer = 0;
  for (int tick = 0; ended.sample < p.N; ++tick) {
    // Dozens of addresses depend on the lane; registers are for weights and accumulators.
    lane = opaque_value(lane);
    const bool live = now.sample < p.N && now.strip * Config::kRowWarps + warp < g.P;
    const int exponent = staged_exponent;
    __syncwarp();
    const bool more = loading.sample < p.N;
    if (more) load();
    if (live) {
      if (now.first()) state.begin_sample(p, now.sample, first_channel, lane);
      if constexpr (Config::kFloat32) {
        if (now.first() || exponent != state.exponent) state.follow(exponent, now.first());
      }
      // Planes of padding are multiplied like others, as zeros.
      state.recompute(input_address + slot * Config::kInputBytes, lane,
                      window_larger(0, now.step - (now.piece.planes - 1)),
                      window_smaller(T - 1, now.step));
    }
    slot = next_slot(slot, Config::kInputSlots);
    const bool delayed = tick >= T - 1;
    if (delayed) {
      const bool row_lives = ended.strip * Config::kRowWarps + warp < g.P;
      if (row_lives && ended.step < ended.piece.planes) {
        const int e =
            state.form_gradient(p, ended, lane, gradients + newest * Config::kGradientBytes);
        if (lane == 0) exponents[8 + newest] = e;
      }
    }
    lane = opaque_value(lane);
    if (more) stage();
    if (delayed) {
      if constexpr (Config::kInputGradient) {
        __syncwarp();
        lane = opaque_value(lane);
        if (ended.owns_plane(g)) {
          float* const row_sums =
              sums + (buffer * Config::kRowWarps + warp) * (Config::kSumBytes / 4);
          if (ended.strip * Config::kRowWarps + warp < g.P) {
            input_gradient<Config>(ended, gradient_address, newest, exponents + 8,
                                   shared + Config::kWeightOffset, weight_exponent, lane, row_sums);
          } else {
            for (int i = lane; i < Config::kSumBytes / 4; i += 32) row_sums[i] = 0.0f;
          }
        }
      }
    }
    __syncthreads();
    if (delayed) {
      if constexpr (Config::kInputGradient) {
        if (ended.owns_plane(g)) {
          sum_rows<Config>(p, ended, warp, lane,
                           sums + buffer * Config::kRowWarps * (Config::kSumBytes / 4), carry);
        }
        buffer ^= 1;
      }
      newest = next_slot(newest, Config::kGradientSlots);
      ended.next(g, stride, T);
    }
    if (now.sample < p.N) now.next(g, stride, T);
  }

  if constexpr (Config::kFilterGradient) {
    __syncthreads();  // the filter warps are a tick later
    float* const to =
        p.bias_partial +
        ((static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * Config::kRowWarps + warp) *
            16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = lanes_sum(state.bias_gradient[i], 4);
      if (lane % 4 == 0) to[lane / 4 + 8 * i] = sum;
    }
  }
}

template <class Config>
__device__ __forceinline__ void run_filter_warp(const BackwardParameters& p,
                                                const WindowStride& stride, int warp, int lane,
                                                unsigned char* shared) {
  constexpr int T = Config::T;
  const BackwardGeometry& g = p.geometry;
  FilterWarp<Config> state;
  state.begin();
  BackwardCursor at;
  at.begin(g, static_cast<int32_t>(blockIdx.x));
  for (int tick = 0; tick < T; ++tick) __syncthreads();
  int slot = 0, newest = 0;
  for (; at.sample < p.N; at.next(g, stride, T)) {
    if (at.inside(g)) {
#pragma unroll 1
      for (int row = warp; row < Config::kRowWarps; row += Config::kFilterWarps) {
        if (at.strip * Config::kRowWarps + row >= g.P) break;
        const unsigned char* const input = shared + Config::kInputOffset +
                                           (row * Config::kInputSlots + slot) * Config::kInputBytes;
        const unsigned char* const gradients =
            shared + Config::kGradientOffset +
            row * Config::kGradientSlots * Config::kGradientBytes;
        const int* const exponents = reinterpret_cast<const int*>(shared + Config::kExponentOffset +
                                                                  row * Config::kExponentBytes);
        state.add(at, shared_address(input), exponents[slot], shared_address(gradients), newest,
                  exponents + 8, lane);
      }
    }
    slot = next_slot(slot, Config::kInputSlots);
    newest = next_slot(newest, Config::kGradientSlots);
    __syncthreads();
  }
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  state.store(p.filter_partial + (block * Config::kFilterWarps + warp) * 16 * Config::kTaps, lane);
}

}  // namespace window

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    backward_window_kernel(const BackwardParameters p,
                           const typename Config::ActivationType activation) {
  using namespace window;
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = uniform_value(static_cast<int>(threadIdx.x) / 32);
  const WindowStride stride(static_cast<int32_t>(gridDim.x), backward_pieces(p.geometry));
  unsigned char* const shared = dynamic_shared_memory();
  int weight_exponent = 0;
  if constexpr (Config::kInputGradient) {
    const int first = 16 * (p.first_tile + static_cast<int>(blockIdx.y));
    if constexpr (Config::kFloat32) {
      const uint32_t largest = largest_weight<Config>(p, first, 16, lane, 32);
      weight_exponent = exponent_of_weights(__reduce_max_sync(kFullWarp, largest));
    }
    stage_weights<Config>(p, first, weight_exponent, shared + Config::kWeightOffset);
    __syncthreads();
  }
  if constexpr (Config::kFilterGradient) {
    if (warp >= Config::kRowWarps) {
      run_filter_warp<Config>(p, stride, warp - Config::kRowWarps, lane, shared);
      return;
    }
  }
  run_row_warp<Config>(p, activation, stride, warp, lane, weight_exponent, shared);
}

}  // namespace convnormpool
