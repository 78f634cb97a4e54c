// GroupNorm of the mean over positions, from moments: what every kernel does that has a part in it.
// Small tensors, so everything is float64 and dtypes are switches at run time. fma() where a
// product is added, so that all kernels give the same bits.
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
constexpr int kMaxGroupLanesLog2 = 5;

struct GroupNormPool {
  TypedPointer mean, m2;  // (N, channels), statistics type
  TypedPointer weight;    // (channels,) or null: ones
  int64_t samples, channels, groups;
  double count;  // positions behind each mean
  double eps;
  int lanes_log2;
  int64_t group_channels;  // channels / groups, which takes long on the device
  __device__ __forceinline__ double weight_of(int64_t channel) const {
    return weight.data == nullptr ? 1.0 : load_element(weight, channel);
  }
};

struct GroupStatistics {
  double mean, rstd;
};

// An element of mean or m2: kFloat where they are known to be float32, else of the type they say.
template <bool kFloat>
__device__ __forceinline__ double load_statistic(const TypedPointer& p, int64_t index) {
  if constexpr (kFloat) {
    return static_cast<double>(static_cast<const float*>(p.data)[index]);
  } else {
    return load_element(p, index);
  }
}

// Of the group whose first channel is element `base` of mean and m2, in each of its lanes. Every
// lane of the warp calls this; one that is not `active` reads nothing.
template <bool kFloat = false>
__device__ __forceinline__ GroupStatistics group_statistics(const GroupNormPool& p, int64_t base,
                                                            int lane, bool active) {
  const int lanes = 1 << p.lanes_log2;
  const int64_t J = active ? p.group_channels : 0;
  double sum = 0, inner = 0;
  for (int64_t j = lane; j < J; j += lanes) {
    sum += load_statistic<kFloat>(p.mean, base + j);
    inner += load_statistic<kFloat>(p.m2, base + j);
  }
  // A division, not a product with 1/J: equal means have exactly their value as mean.
  const double divisor = static_cast<double>(p.group_channels);
  const double mean = lanes_sum(sum, lanes) / divisor;
  double outer = 0;
  for (int64_t j = lane; j < J; j += lanes) {
    const double d = load_statistic<kFloat>(p.mean, base + j) - mean;
    outer = fma(d, d, outer);
  }
  const double variance =
      fma(p.count, lanes_sum(outer, lanes), lanes_sum(inner, lanes)) / (p.count * divisor);
  // An M2 that overflowed is Inf, and 1/sqrt(Inf) would give the finite value 0.
  const double rstd = isfinite(variance) ? 1.0 / sqrt(variance + p.eps) : static_cast<double>(NAN);
  return {mean, rstd};
}

// Where a thread works: item `index` of N · groups, a group of its sample, and its lane there.
struct GroupPlace {
  int64_t index, group;
  int lane;
  bool active;
};

__device__ __forceinline__ GroupPlace group_place(const GroupNormPool& p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kGroupThreads + threadIdx.x;
  const int64_t index = thread >> p.lanes_log2;
  const int lane = static_cast<int>(thread & ((1 << p.lanes_log2) - 1));
  return {index, index % p.groups, lane, index < p.samples * p.groups};
}

// The normalisation, and what it writes.
struct NormPool {
  GroupNormPool p;
  TypedPointer bias;                    // (channels,) or null: zeros
  TypedPointer out;                     // (N, channels)
  TypedPointer group_mean, group_rstd;  // (N, groups), or null: not wanted
};

// Every lane of the warp calls this. kFloat as in load_statistic.
template <bool kFloat = false>
__device__ __forceinline__ void normalise_group(const NormPool& norm, const GroupPlace& place) {
  const GroupNormPool& p = norm.p;
  const int64_t J = p.group_channels;
  const int64_t base = place.index * J;
  const GroupStatistics group = group_statistics<kFloat>(p, base, place.lane, place.active);
  if (!place.active) return;
  if (place.lane == 0 && norm.group_mean.data != nullptr) {
    store_element(norm.group_mean, place.index, group.mean);
    store_element(norm.group_rstd, place.index, group.rstd);
  }
  const int64_t first_channel = place.group * J;
  for (int64_t j = place.lane; j < J; j += int64_t{1} << p.lanes_log2) {
    const int64_t channel = first_channel + j;
    const double normalised = (load_statistic<kFloat>(p.mean, base + j) - group.mean) * group.rstd;
    const double shift = norm.bias.data == nullptr ? 0.0 : load_element(norm.bias, channel);
    store_element(norm.out, base + j, fma(p.weight_of(channel), normalised, shift));
  }
}

}  // namespace convnormpool
