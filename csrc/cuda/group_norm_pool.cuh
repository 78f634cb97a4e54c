// The kernels of _group_norm_pool_out and its backward: GroupNorm of the mean over positions, from
// moments. Small tensors, so everything is float64 and dtypes are switches at run time.
//
// 2^lanes_log2 lanes of a warp share the channels of a group: lane l takes channels l, l + lanes,
// ... in order and the lanes' sums are joined by a fixed tree, so the bits depend on the number of
// channels per group alone.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace convnormpool {

constexpr int kGroupThreads = 128;
// Threads of a block that sums over samples.
constexpr int kSampleThreads = 1024;
constexpr int kMaxGroupLanesLog2 = 5;

struct GroupNormPool {
  TypedPointer mean, m2;  // (N, channels), statistics type
  TypedPointer weight;    // (channels,) or null: ones
  int64_t samples, channels, groups;
  double count;  // positions behind each mean
  double eps;
  int lanes_log2;

  __device__ __forceinline__ int64_t group_channels() const { return channels / groups; }
  __device__ __forceinline__ double weight_of(int64_t channel) const {
    return weight.data == nullptr ? 1.0 : load_element(weight, channel);
  }
};

struct GroupStatistics {
  double mean, rstd;
};

// Of the group whose first channel is element `base` of mean and m2, in each of its lanes. Every
// lane of the warp calls this; one that is not `active` reads nothing.
__device__ __forceinline__ GroupStatistics group_statistics(const GroupNormPool& p, int64_t base,
                                                            int lane, bool active) {
  const int lanes = 1 << p.lanes_log2;
  const int64_t J = active ? p.group_channels() : 0;
  double sum = 0, inner = 0;
  for (int64_t j = lane; j < J; j += lanes) {
    sum += load_element(p.mean, base + j);
    inner += load_element(p.m2, base + j);
  }
  // A division, not a product with 1/J: equal means have exactly their value as mean.
  const double divisor = static_cast<double>(p.group_channels());
  const double mean = lanes_sum(sum, lanes) / divisor;
  double outer = 0;
  for (int64_t j = lane; j < J; j += lanes) {
    const double d = load_element(p.mean, base + j) - mean;
    outer += d * d;
  }
  const double variance =
      (lanes_sum(inner, lanes) + p.count * lanes_sum(outer, lanes)) / (p.count * divisor);
  // An M2 that overflowed is Inf, and 1/sqrt(Inf) would give the finite value 0.
  const double rstd = isfinite(variance) ? 1.0 / sqrt(variance + p.eps) : static_cast<double>(NAN);
  return {mean, rstd};
}

// Where a thread works: item `index` of N · groups, and its lane there.
struct GroupPlace {
  int64_t index;
  int lane;
  bool active;
};

__device__ __forceinline__ GroupPlace group_place(const GroupNormPool& p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  const int64_t index = thread >> p.lanes_log2;
  const int lane = static_cast<int>(thread & ((1 << p.lanes_log2) - 1));
  return {index, lane, index < p.samples * p.groups};
}

__global__ void __launch_bounds__(kGroupThreads)
    group_norm_pool_kernel(GroupNormPool p, TypedPointer bias, TypedPointer out,
                           TypedPointer group_mean, TypedPointer group_rstd) {
  const GroupPlace place = group_place(p);
  const int64_t J = p.group_channels();
  const int64_t base = place.index * J;
  const GroupStatistics group = group_statistics(p, base, place.lane, place.active);
  if (!place.active) return;
  if (place.lane == 0) {
    store_element(group_mean, place.index, group.mean);
    store_element(group_rstd, place.index, group.rstd);
  }
  const int64_t first_channel = place.index % p.groups * J;
  for (int64_t j = place.lane; j < J; j += int64_t{1} << p.lanes_log2) {
    const int64_t channel = first_channel + j;
    const double normalised = (load_element(p.mean, base + j) - group.mean) * group.rstd;
    const double shift = bias.data == nullptr ? 0.0 : load_element(bias, channel);
    store_element(out, base + j, p.weight_of(channel) * normalised + shift);
  }
}

// grad_mean and grad_m2, a group at a time.
__global__ void __launch_bounds__(kGroupThreads)
    group_norm_pool_backward_kernel(GroupNormPool p, TypedPointer grad_out, TypedPointer grad_mean,
                                    TypedPointer grad_m2) {
  const GroupPlace place = group_place(p);
  const int lanes = 1 << p.lanes_log2;
  const int64_t J = p.group_channels();
  const int64_t base = place.index * J;
  const int64_t first_channel = place.index % p.groups * J;
  const int64_t mine = place.active ? J : 0;
  const GroupStatistics group = group_statistics(p, base, place.lane, place.active);
  double P = 0, Q = 0;
  for (int64_t j = place.lane; j < mine; j += lanes) {
    const double wd = p.weight_of(first_channel + j) * load_element(grad_out, base + j);
    P += wd;
    Q += wd * (load_element(p.mean, base + j) - group.mean);
  }
  P = lanes_sum(P, lanes) / static_cast<double>(J);
  Q = lanes_sum(Q, lanes) / static_cast<double>(J);
  const double r = group.rstd;
  const double r3Q = r * r * r * Q;
  for (int64_t j = place.lane; j < mine; j += lanes) {
    // One channel is its group's mean: nothing flows back. As a product with zero, which fused
    // multiply-adds would miss by a rounding, and which keeps a NaN.
    double to_mean = r * 0.0, to_m2 = r * 0.0;
    if (J > 1) {
      const double wd = p.weight_of(first_channel + j) * load_element(grad_out, base + j);
      to_mean = r * (wd - P) - r3Q * (load_element(p.mean, base + j) - group.mean);
      to_m2 = -r3Q / (2.0 * p.count);
    }
    store_element(grad_mean, base + j, to_mean);
    store_element(grad_m2, base + j, to_m2);
  }
}

// grad_weight and grad_bias: a block for 2^lanes_log2 channels of a group, all samples. Thread
// (s, l) takes channel l of the samples s, s + height, ... in order, height = threads / lanes; the
// height partial sums are joined by a fixed tree. Group statistics are formed again, since there is
// no place to keep them. Grid (chunks of a group's channels, groups).
__global__ void __launch_bounds__(kSampleThreads)
    group_norm_pool_parameters_kernel(GroupNormPool p, TypedPointer grad_out,
                                      TypedPointer grad_weight, TypedPointer grad_bias) {
  __shared__ double shared_weight[kSampleThreads];
  __shared__ double shared_bias[kSampleThreads];
  const int lanes = 1 << p.lanes_log2;
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  const int lane = thread & (lanes - 1);
  const int height = threads >> p.lanes_log2;
  const int64_t J = p.group_channels();
  for (int64_t group = blockIdx.y; group < p.groups; group += gridDim.y) {
    const int64_t in_group = static_cast<int64_t>(blockIdx.x) * lanes + lane;
    const int64_t channel = group * J + in_group;
    double weight_sum = 0, bias_sum = 0;
    for (int64_t first = 0; first < p.samples; first += height) {
      const int64_t sample = first + (thread >> p.lanes_log2);
      const bool active = sample < p.samples;
      const int64_t base = sample * p.channels + group * J;
      const GroupStatistics statistics = group_statistics(p, base, lane, active);
      if (active && in_group < J) {
        const double d = load_element(grad_out, base + in_group);
        const double mean = load_element(p.mean, base + in_group);
        weight_sum += d * ((mean - statistics.mean) * statistics.rstd);
        bias_sum += d;
      }
    }
    shared_weight[thread] = weight_sum;
    shared_bias[thread] = bias_sum;
    for (int span = threads / 2; span >= lanes; span /= 2) {
      __syncthreads();
      if (thread < span) {
        shared_weight[thread] += shared_weight[thread + span];
        shared_bias[thread] += shared_bias[thread + span];
      }
    }
    if (thread < lanes && in_group < J) {
      if (grad_weight.data != nullptr) store_element(grad_weight, channel, shared_weight[thread]);
      if (grad_bias.data != nullptr) store_element(grad_bias, channel, shared_bias[thread]);
    }
    __syncthreads();
  }
}

}  // namespace convnormpool
