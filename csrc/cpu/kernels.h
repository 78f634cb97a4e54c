// The inner loops of the CPU operators, compiled once per instruction set and chosen at run time.
//
// kernels_inner.h is the source; kernels_baseline.cpp, kernels_avx2.cpp and kernels_avx512.cpp
// compile it with different target options, so that a wheel built without -march runs at full
// speed. T is the type of the arithmetic: double for float64 tensors, float for all others.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../activation.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CONVNORMPOOL_X86_TARGETS 1
#else
#define CONVNORMPOOL_X86_TARGETS 0
#endif

namespace convnormpool {
namespace cpu {

template <typename T>
struct MaskOf;
template <>
struct MaskOf<float> {
  using type = int32_t;
};
template <>
struct MaskOf<double> {
  using type = int64_t;
};
// One integer per position: all bits set where the position counts, zero elsewhere.
template <typename T>
using Mask = typename MaskOf<T>::type;

// A sum of products over a linear range of positions:
//   out[k * out_stride + i] (+)= bias[k] + sum over taps of weights[tap][k] * x[offsets[tap] + i]
// for i in [0, vectors * width). All of x that this touches must be readable.
template <typename T>
struct ConvRange {
  const T* x;
  const int64_t* offsets;
  int64_t taps;
  const T* weights;  // [taps][tile]
  const T* bias;     // [tile] or nullptr
  T* out;
  int64_t out_stride;
  int64_t vectors;
  bool accumulate;
};

// sum[k * sum_stride + tap] += sum over planes and i of
//   dy[k * dy_stride + plane * dy_plane + i] * x[offsets[tap] + plane * x_plane + i]
// for the channels of the tile and all taps, i over the positions that mask, one entry for each,
// counts. dy must be zero at the others.
template <typename T>
struct WeightGradient {
  const T* dy;
  int64_t dy_stride;
  int64_t dy_plane;
  const T* x;
  int64_t x_plane;
  const int64_t* offsets;
  int64_t taps;
  const Mask<T>* mask;
  int64_t planes;
  int64_t vectors;
  double* sum;
  int64_t sum_stride;
};

// What the derivative of the moments needs of a channel: dy = (base + slope * (a(y) - mean)) a'(y).
template <typename T>
struct Slope {
  T base;
  T slope;
  T mean;
};

struct Moments {
  double mean;
  double m2;
};

constexpr int kMaxTile = 8;
constexpr int kMaxGradientTile = 4;

template <typename T>
struct Kernels {
  int64_t width;  // elements of a vector

  // Indexed by the number of channels in the tile; nullptr where the instruction set has too few
  // registers for it. 1 to 4 are always there.
  void (*conv[kMaxTile + 1])(const ConvRange<T>&);
  void (*weight_gradient[kMaxGradientTile + 1])(const WeightGradient<T>&);

  // out[i] = a(in[i]); out may be in.
  void (*activate)(Activation kind, const T* in, T* out, int64_t n);
  // pivot: a guess of the mean, which decides whether one pass is enough. mask: nullptr, or one
  // entry per position; count is the number of positions that count.
  Moments (*moments)(const T* values, const Mask<T>* mask, int64_t n, int64_t count, T pivot);
  // dy[i] from y[i], zero where mask (nullptr: everywhere counts) is zero; returns the sum of dy.
  double (*slope)(Activation kind, const T* y, T* dy, int64_t n, const Slope<T>& slope,
                  const Mask<T>* mask);

  // Channels-last: rows of `period` values that stand for as many independent channels.
  // mean[l], m2[l] over the rows of column l; values is overwritten.
  void (*column_moments)(Activation kind, const T* in, T* scratch, int64_t rows, int64_t period,
                         double* mean, double* m2);
  void (*column_slope)(Activation kind, const T* y, T* dy, int64_t rows, int64_t period,
                       const T* base, const T* slope, const T* mean);
};

// The table for this machine.
template <typename T>
const Kernels<T>& kernels();

}  // namespace cpu
}  // namespace convnormpool
