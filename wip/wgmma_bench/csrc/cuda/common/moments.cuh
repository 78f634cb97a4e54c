// Moments of a set of values, and how those of two sets become those of their union.
//
// Sums of squares are never subtracted from each other: a batch of values has its mean taken out
// before squaring, and batches are joined by Chan's rule, whose terms are all positive.
#pragma once

#include <cuda_runtime.h>

namespace convnormpool {

// a / b for counts: within two units in the last place, for float one reciprocal and one product.
__device__ __forceinline__ float divide_counts(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double divide_counts(double a, double b) { return a / b; }

// Count, mean and sum of squared deviations from the mean. `mean` stands relative to `pivot`, a
// value near the data: where the mean is large against the deviation, a rounded mean alone would
// cost more digits of M2 than the values' own rounding does. A set that is empty has count, mean
// and M2 zero and any finite pivot.
template <typename S>
struct Moments {
  S pivot;
  S count;
  S mean;
  S m2;

  // The same moments about another pivot.
  __device__ __forceinline__ S mean_about(S other) const {
    return count > S(0) ? mean + (pivot - other) : S(0);
  }
};

// The factors by which Chan's rule joins sets of a and b elements: b's share of the union, and
// a·b/(a + b). One pair serves all channels with these counts.
template <typename S>
struct ChanWeights {
  S share;
  S product;

  __device__ __forceinline__ ChanWeights(S a, S b)
      : share(divide_counts(b, a + b > S(0) ? a + b : S(1))), product(a * share) {}
};

// (mean, m2) becomes the union's; both means stand about one pivot.
template <typename S>
__device__ __forceinline__ void join(S& mean, S& m2, S other_mean, S other_m2,
                                     const ChanWeights<S>& weights) {
  const S delta = other_mean - mean;
  mean += delta * weights.share;
  // In this order an infinite square never meets a weight of zero.
  m2 += other_m2 + delta * (delta * weights.product);
}

// a becomes the moments of the union; its pivot stays.
template <typename S>
__device__ __forceinline__ void join(Moments<S>& a, const Moments<S>& b) {
  const ChanWeights<S> weights(a.count, b.count);
  join(a.mean, a.m2, b.mean_about(a.pivot), b.m2, weights);
  a.count += b.count;
}

}  // namespace convnormpool
