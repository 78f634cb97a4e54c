// The kernels of _unfold_depth_out and _fold_depth_out.
//
// A convolution of a few channels over a few planes is a two-dimensional one over the planes as
// channels: output plane z reads the input planes z·stride - padding + t·dilation, t < T. Unfolding
// writes those T·C planes as neighbouring channels, channel c·T + t, zeros where a plane lies in
// the padding or past the last channel; folding is its transpose.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/grid.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

constexpr int kUnfoldThreads = 256;
// Channels of the unfolded tensor are a multiple of this; a thread writes that many.
constexpr int kUnfoldChannels = 4;

struct UnfoldGeometry {
  int64_t N, C, D, plane;  // plane = H·W
  int64_t Z;
  int T, stride, padding, dilation;
  int channels;  // of the unfolded tensor
};

// Grid (positions · channel quads of a plane, N·Z). x is (N, C, D, H, W), out (N, Z, H, W,
// channels).
template <typename T>
__global__ void __launch_bounds__(kUnfoldThreads)
    unfold_depth_kernel(const T* __restrict__ x, T* __restrict__ out, UnfoldGeometry g) {
  const int64_t row = grid_row();
  if (row >= g.N * g.Z) return;
  const int64_t n = row / g.Z;
  const int first_plane = static_cast<int>(row - n * g.Z) * g.stride - g.padding;
  const unsigned quads = g.channels / kUnfoldChannels;
  const unsigned index = blockIdx.x * kUnfoldThreads + threadIdx.x;
  const unsigned position = index / quads;
  if (position >= g.plane) return;
  const int channel = static_cast<int>(index - position * quads) * kUnfoldChannels;

  T values[kUnfoldChannels];
  int c = channel / g.T;
  int t = channel - c * g.T;
#pragma unroll
  for (int j = 0; j < kUnfoldChannels; ++j) {
    const int d = first_plane + t * g.dilation;
    const bool inside = c < g.C && d >= 0 && d < g.D;
    values[j] = inside ? x[((n * g.C + c) * g.D + d) * g.plane + position] : T(0.0f);
    if (++t == g.T) {
      t = 0;
      ++c;
    }
  }
  T* target = out + (row * g.plane + position) * g.channels + channel;
  constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T)) < kUnfoldChannels
                              ? kVectorBytes / static_cast<int>(sizeof(T))
                              : kUnfoldChannels;
#pragma unroll
  for (int j = 0; j < kUnfoldChannels; j += kVector) store_vector<kVector>(values + j, target + j);
}

// Grid (positions of a plane, N·D). du is (N, Z, H, W, channels), dx (N, C, D, H, W). Every element
// of dx is one thread's sum over t in order.
template <typename S, typename T>
__global__ void __launch_bounds__(kUnfoldThreads)
    fold_depth_kernel(const S* __restrict__ du, T* __restrict__ dx, UnfoldGeometry g) {
  const int64_t row = grid_row();
  if (row >= g.N * g.D) return;
  const int64_t n = row / g.D;
  const int64_t d = row - n * g.D;
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kUnfoldThreads + threadIdx.x;
  if (position >= g.plane) return;
  for (int c = 0; c < g.C; ++c) {
    S sum = S(0);
    for (int t = 0; t < g.T; ++t) {
      const int64_t reach = d + g.padding - int64_t{t} * g.dilation;
      const int64_t z = reach / g.stride;
      if (reach >= 0 && z * g.stride == reach && z < g.Z) {
        sum += du[((n * g.Z + z) * g.plane + position) * g.channels + c * g.T + t];
      }
    }
    dx[((n * g.C + c) * g.D + d) * g.plane + position] = narrow(sum, T());
  }
}

}  // namespace convnormpool
