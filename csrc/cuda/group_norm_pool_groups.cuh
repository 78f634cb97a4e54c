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

// Quotients by a number known before the launch, rounded as a division rounds them (Markstein: a
// quotient by the rounded reciprocal, mended by its exact remainder), in three instructions where a
// double division takes dozens.
struct KnownDivisor {
  double divisor, inverse;

  __device__ __forceinline__ double divide(double x) const {
    const double q = x * inverse;
    return isfinite(q) ? fma(fma(-q, divisor, x), inverse, q) : q;
  }
};

inline KnownDivisor known_divisor(double divisor) { return {divisor, 1.0 / divisor}; }

struct GroupNormPool {
  TypedPointer mean, m2;  // (N, channels), statistics type
  TypedPointer weight;    // (channels,) or null: ones
  int64_t samples, channels, groups;
  double count;  // positions behind each mean
  double eps;
  // What group_norm_pool_derive makes of the others.
  int lanes_log2 = 0;
  int64_t group_channels = 0;
  KnownDivisor by_channels{}, by_count{};  // of a group, and of its positions in all channels
  __device__ __forceinline__ double weight_of(int64_t channel) const {
    return weight.data == nullptr ? 1.0 : load_element(weight, channel);
  }
};

inline void group_norm_pool_derive(GroupNormPool& p) {
  p.group_channels = p.channels / p.groups;
  p.lanes_log2 = ceil_log2(p.group_channels, kMaxGroupLanesLog2);
  const double channels = static_cast<double>(p.group_channels), all = p.count * channels;
  p.by_channels = known_divisor(channels);
  p.by_count = known_divisor(all);
}

struct GroupStatistics {
  double mean, rstd;
};

// Where mean and m2 (N, channels) are: kFloat where they are known to be float32, else of the type
// they say.
template <bool kFloat>
struct MomentsInMemory {
  const TypedPointer &means, &m2s;

  explicit __device__ __forceinline__ MomentsInMemory(const GroupNormPool& p)
      : means(p.mean), m2s(p.m2) {}

  __device__ __forceinline__ double mean(int64_t index) const { return load(means, index); }
  __device__ __forceinline__ double m2(int64_t index) const { return load(m2s, index); }

  static __device__ __forceinline__ double load(const TypedPointer& from, int64_t index) {
    if constexpr (kFloat) {
      return static_cast<double>(static_cast<const float*>(from.data)[index]);
    } else {
      return load_element(from, index);
    }
  }
};

// Likewise their gradients.
template <bool kFloat>
__device__ __forceinline__ void store_statistic(const TypedPointer& p, int64_t index, double x) {
  if constexpr (kFloat) {
    static_cast<float*>(p.data)[index] = narrow(x, float());
  } else {
    store_element(p, index, x);
  }
}

// Of the group whose first channel is element `base` of what `moments` finds, in each of its lanes.
// Every lane of the warp calls this; one that is not `active` reads nothing. No loop here or below
// is unrolled: mostly a lane has one channel, and to fetch code takes longer than to run it.
template <class Source>
__device__ __forceinline__ GroupStatistics group_statistics(const GroupNormPool& p,
                                                            const Source& moments, int64_t base,
                                                            int lane, bool active) {
  const int lanes = 1 << p.lanes_log2;
  const int64_t J = active ? p.group_channels : 0;
  double sum = 0, inner = 0;
#pragma unroll 1
  for (int64_t j = lane; j < J; j += lanes) {
    sum += moments.mean(base + j);
    inner += moments.m2(base + j);
  }
  // A quotient, not a product with 1/J: equal means have exactly their value as mean.
  const double mean = p.by_channels.divide(lanes_sum(sum, lanes));
  double outer = 0;
#pragma unroll 1
  for (int64_t j = lane; j < J; j += lanes) {
    const double d = moments.mean(base + j) - mean;
    outer = fma(d, d, outer);
  }
  const double variance =
      p.by_count.divide(fma(p.count, lanes_sum(outer, lanes), lanes_sum(inner, lanes)));
  // An M2 that overflowed is Inf, whose rsqrt would be the finite value 0.
  const double rstd = isfinite(variance) ? rsqrt(variance + p.eps) : static_cast<double>(NAN);
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

// What one channel is multiplied by and shifted by.
struct Affine {
  double weight, bias;
};

__device__ __forceinline__ Affine affine_of(const NormPool& norm, int64_t channel) {
  return {norm.p.weight_of(channel),
          norm.bias.data == nullptr ? 0.0 : load_element(norm.bias, channel)};
}

// That of a lane's first channel, or none: loaded before the group's statistics are formed it is
// there by then.
__device__ __forceinline__ Affine first_affine(const NormPool& norm, const GroupPlace& place) {
  const int64_t J = norm.p.group_channels;
  const bool exists = place.active && place.lane < J;
  return exists ? affine_of(norm, place.group * J + place.lane) : Affine{};
}

// Every lane of the warp calls this. The group's first channel is element `base` of what `moments`
// finds. known: `affine` is that of the lane's first channel.
template <class Source>
__device__ __forceinline__ void normalise_group(const NormPool& norm, const GroupPlace& place,
                                                const Source& moments, int64_t base, Affine affine,
                                                bool known = true) {
  const GroupNormPool& p = norm.p;
  const int64_t J = p.group_channels;
  const GroupStatistics group = group_statistics(p, moments, base, place.lane, place.active);
  if (!place.active) return;
  if (place.lane == 0 && norm.group_mean.data != nullptr) {
    store_element(norm.group_mean, place.index, group.mean);
    store_element(norm.group_rstd, place.index, group.rstd);
  }
#pragma unroll 1
  for (int64_t j = place.lane; j < J; j += int64_t{1} << p.lanes_log2) {
    if (!known) affine = affine_of(norm, place.group * J + j);
    known = false;
    const double normalised = (moments.mean(base + j) - group.mean) * group.rstd;
    store_element(norm.out, place.index * J + j, fma(affine.weight, normalised, affine.bias));
  }
}

}  // namespace convnormpool
