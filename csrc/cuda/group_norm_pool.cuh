// The kernels of _group_norm_pool_out and its backward: GroupNorm of the mean over positions, from
// moments. All may be programmatic dependent launches. kFloat: mean, m2 and their gradients are
// float32, else of the type they say.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/group_norm_pool_groups.cuh"

namespace convnormpool {

// Threads of a block that sums over samples.
constexpr int kSampleThreads = 1024;

template <bool kFloat>
__global__ void __launch_bounds__(kGroupThreads) group_norm_pool_kernel(const NormPool norm) {
  grid_dependency_launch();
  grid_dependency_wait();
  const GroupPlace place = group_place(norm.p);
  normalise_group(norm, place, MomentsInMemory<kFloat>(norm.p), place.index * norm.p.group_channels,
                  first_affine(norm, place));
}

// grad_mean and grad_m2, a group at a time.
template <bool kFloat>
__global__ void __launch_bounds__(kGroupThreads)
    group_norm_pool_backward_kernel(GroupNormPool p, TypedPointer grad_out, TypedPointer grad_mean,
                                    TypedPointer grad_m2) {
  grid_dependency_launch();
  grid_dependency_wait();
  const GroupPlace place = group_place(p);
  const int lanes = 1 << p.lanes_log2;
  const int64_t J = p.group_channels;
  const int64_t base = place.index * J;
  const int64_t first_channel = place.group * J;
  const int64_t mine = place.active ? J : 0;
  const MomentsInMemory<kFloat> moments(p);
  const GroupStatistics group = group_statistics(p, moments, base, place.lane, place.active);
  double P = 0, Q = 0;
#pragma unroll 1
  for (int64_t j = place.lane; j < mine; j += lanes) {
    const double wd = p.weight_of(first_channel + j) * load_element(grad_out, base + j);
    P += wd;
    Q += wd * (moments.mean(base + j) - group.mean);
  }
  P = p.by_channels.divide(lanes_sum(P, lanes));
  Q = p.by_channels.divide(lanes_sum(Q, lanes));
  const double r = group.rstd;
  const double r3Q = r * r * r * Q, of_m2 = -r3Q / (2.0 * p.count);
  // Not kept from being unrolled: ptxas would spill.
  for (int64_t j = place.lane; j < mine; j += lanes) {
    // One channel is its group's mean: nothing flows back. As a product with zero, which fused
    // multiply-adds would miss by a rounding, and which keeps a NaN.
    double to_mean = r * 0.0, to_m2 = r * 0.0;
    if (J > 1) {
      const double wd = p.weight_of(first_channel + j) * load_element(grad_out, base + j);
      to_mean = r * (wd - P) - r3Q * (moments.mean(base + j) - group.mean);
      to_m2 = of_m2;
    }
    store_statistic<kFloat>(grad_mean, base + j, to_mean);
    store_statistic<kFloat>(grad_m2, base + j, to_m2);
  }
}

// grad_weight and grad_bias: a block for 2^lanes_log2 channels of a group, all samples. Thread
// (s, l) takes channel l of the samples s, s + height, ... in order, height = threads / lanes; the
// height partial sums are joined by a fixed tree. Group statistics are formed again, since there is
// no place to keep them. Grid (chunks of a group's channels, groups).
template <bool kFloat>
__global__ void __launch_bounds__(kSampleThreads)
    group_norm_pool_parameters_kernel(GroupNormPool p, TypedPointer grad_out,
                                      TypedPointer grad_weight, TypedPointer grad_bias) {
  __shared__ double shared_weight[kSampleThreads];
  __shared__ double shared_bias[kSampleThreads];
  grid_dependency_launch();
  grid_dependency_wait();
  const int lanes = 1 << p.lanes_log2;
  const int thread = threadIdx.x;
  const int threads = blockDim.x;
  const int lane = thread & (lanes - 1);
  const int height = threads >> p.lanes_log2;
  const int64_t J = p.group_channels;
  const MomentsInMemory<kFloat> moments(p);
  for (int64_t group = blockIdx.y; group < p.groups; group += gridDim.y) {
    const int64_t in_group = static_cast<int64_t>(blockIdx.x) * lanes + lane;
    const int64_t channel = group * J + in_group;
    double weight_sum = 0, bias_sum = 0;
    for (int64_t first = 0; first < p.samples; first += height) {
      const int64_t sample = first + (thread >> p.lanes_log2);
      const bool active = sample < p.samples;
      const int64_t base = sample * p.channels + group * J;
      const GroupStatistics statistics = group_statistics(p, moments, base, lane, active);
      if (active && in_group < J) {
        const double d = load_element(grad_out, base + in_group);
        const double mean = moments.mean(base + in_group);
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
