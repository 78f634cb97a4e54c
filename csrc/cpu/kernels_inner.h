// The kernels of kernels.h for one instruction set. No include guard: each kernels_*.cpp includes
// this once, after kernels.h, under its own target options, with CONVNORMPOOL_ISA naming the
// namespace and CONVNORMPOOL_VECTOR_BYTES the size of a vector register. Nothing here may include
// any other header: its functions would be compiled for that target and could be merged by the
// linker with those of other files.

#include "kernels_inner_vectors.h"
// (before what uses them)
#include "kernels_inner_convolution.h"

namespace convnormpool {
namespace cpu {
namespace CONVNORMPOOL_ISA {
namespace {

// ---- activation, moments, slopes

template <typename T>
void activate(Activation kind, const T* in, T* out, int64_t n) {
  activations::visit(kind, [&](auto a) {
  // out is in or apart from it.
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = a.value(in[i]);
  });
}

// Values that are added one after the other. Fewer than products: where all are alike, as behind a
// constant background, the errors of all chains have one sign and grow with their length.
constexpr int64_t kValueChain = 16;

// The sum over [0, n) of a range that sum(first, size) adds up, size at most `most`: by halves, so
// that the errors of joining them grow with the logarithm of n.
template <typename F>
auto pairwise(const F& sum, int64_t first, int64_t n, int64_t most) -> decltype(sum(first, n)) {
  if (n <= most) return sum(first, n);
  const int64_t half = ((n + most - 1) / most + 1) / 2 * most;
  const auto lower = pairwise(sum, first, half, most);
  return lower + pairwise(sum, first + half, n - half, most);
}

// Sums of (values - pivot - centre) and of its square.
struct Sums {
  double first;
  double second;
  Sums operator+(const Sums& other) const { return {first + other.first, second + other.second}; }
};

constexpr int kUnroll = 4;

template <typename T, bool kMasked>
inline __attribute__((always_inline)) Sums chain_of_shifted(const T* values, const Mask<T>* mask,
                                                            int64_t n, T pivot, T centre) {
  constexpr int kW = kWidth<T>;
  const Vec<T> pivots = pivot - Vec<T>{};
  const Vec<T> centres = centre - Vec<T>{};
  Vec<T> first[kUnroll];
  Vec<T> second[kUnroll];
  for (int u = 0; u < kUnroll; ++u) first[u] = second[u] = Vec<T>{};
  int64_t i = 0;
  for (; i + kUnroll * kW <= n; i += kUnroll * kW) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) {
      Vec<T> d = (load<T>(values + i + u * kW) - pivots) - centres;
      if (kMasked) d = keep<T>(d, mask + i + u * kW);
      first[u] += d;
      second[u] += d * d;
    }
  }
  for (; i + kW <= n; i += kW) {
    Vec<T> d = (load<T>(values + i) - pivots) - centres;
    if (kMasked) d = keep<T>(d, mask + i);
    first[0] += d;
    second[0] += d * d;
  }
  Vec<T> both[2] = {(first[0] + first[1]) + (first[2] + first[3]),
                    (second[0] + second[1]) + (second[2] + second[3])};
  fold_all<T, 2>(both);
  Sums sums{static_cast<double>(both[0][0]), static_cast<double>(both[0][1])};
  for (; i < n; ++i) {
    if (kMasked && !mask[i]) continue;
    const T d = (values[i] - pivot) - centre;
    sums.first += static_cast<double>(d);
    sums.second += static_cast<double>(d) * static_cast<double>(d);
  }
  return sums;
}

template <typename T, bool kMasked>
Sums shifted_sums(const T* values, const Mask<T>* mask, int64_t n, T pivot, T centre) {
  const auto chain = [=](int64_t first, int64_t size) {
    const Mask<T>* part = kMasked ? mask + first : nullptr;
    return chain_of_shifted<T, kMasked>(values + first, part, size, pivot, centre);
  };
  return pairwise(chain, 0, n, kValueChain * kUnroll * kWidth<T>);
}

template <typename T, bool kMasked>
Moments block_moments(const T* values, const Mask<T>* mask, int64_t n, int64_t count, T pivot) {
  pivot = __builtin_isfinite(pivot) ? pivot : T(0);
  const double size = static_cast<double>(count);
  const Sums one = shifted_sums<T, kMasked>(values, mask, n, pivot, T(0));
  const double shift = one.first / size;
  const double m2 = one.second - one.first * shift;
  // With a pivot near the mean one pass is as good as two.
  if (one.second <= 2 * m2) return {static_cast<double>(pivot) + shift, m2};
  const T centre = static_cast<T>(shift);
  const Sums two = shifted_sums<T, kMasked>(values, mask, n, pivot, centre);
  const double rest = two.first / size;
  const double m = two.second - two.first * rest;
  // An infinite mean stays infinite, though nothing can be centred at it.
  const double mean = __builtin_isfinite(rest) ? static_cast<double>(centre) + rest : shift;
  // Rounding may leave less than nothing; NaN stays.
  return {static_cast<double>(pivot) + mean, m < 0.0 ? 0.0 : m};
}

template <typename T>
Moments moments(const T* values, const Mask<T>* mask, int64_t n, int64_t count, T pivot) {
  return mask ? block_moments<T, true>(values, mask, n, count, pivot)
              : block_moments<T, false>(values, mask, n, count, pivot);
}

// The sum of n values, of which those that do not count become zero.
template <typename T>
inline __attribute__((always_inline)) double keep_and_sum(T* values, const Mask<T>* mask,
                                                          int64_t n) {
  constexpr int kW = kWidth<T>;
  Vec<T> part{};
  int64_t i = 0;
  if (mask) {
    for (; i + kW <= n; i += kW) {
      const Vec<T> d = keep<T>(load<T>(values + i), mask + i);
      store<T>(values + i, d);
      part += d;
    }
  } else {
    for (; i + kW <= n; i += kW) part += load<T>(values + i);
  }
  double sum = sum_lanes<T>(part);
  for (; i < n; ++i) {
    if (mask && !mask[i]) values[i] = T(0);
    sum += static_cast<double>(values[i]);
  }
  return sum;
}

template <typename T>
double slope(Activation kind, const T* y, T* dy, int64_t n, const Slope<T>& s,
             const Mask<T>* mask) {
  activations::visit(kind, [&](auto a) {
    const T base = s.base;
    const T factor = s.slope;
    const T mean = s.mean;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      dy[i] = (base + factor * (a.value(y[i]) - mean)) * a.derivative(y[i]);
    }
  });
  const auto chain = [=](int64_t first, int64_t size) {
    return keep_and_sum<T>(dy + first, mask ? mask + first : nullptr, size);
  };
  return pairwise(chain, 0, n, kValueChain * kWidth<T>);
}

// ---- channels-last

template <typename T>
void column_moments(Activation kind, const T* in, T* scratch, int64_t rows, int64_t period,
                    double* mean, double* m2) {
  activate<T>(kind, in, scratch, rows * period);
  T* values = scratch;
  constexpr int kW = kWidth<T>;
  const T inverse = T(1) / static_cast<T>(rows);
  int64_t l = 0;
  for (; l + kW <= period; l += kW) {
    Vec<T> pivot = load<T>(values + l);
    for (int j = 0; j < kW; ++j) pivot[j] = __builtin_isfinite(pivot[j]) ? pivot[j] : T(0);
    Vec<T> sum{};
    for (int64_t r = 0; r < rows; ++r) sum += load<T>(values + r * period + l) - pivot;
    const Vec<T> centre = sum * inverse;
    Vec<T> square{};
    for (int64_t r = 0; r < rows; ++r) {
      const Vec<T> d = (load<T>(values + r * period + l) - pivot) - centre;
      square += d * d;
    }
    for (int j = 0; j < kW; ++j) {
      mean[l + j] = static_cast<double>(pivot[j]) + static_cast<double>(centre[j]);
      m2[l + j] = static_cast<double>(square[j]);
    }
  }
  for (; l < period; ++l) {
    const T pivot = __builtin_isfinite(values[l]) ? values[l] : T(0);
    T sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += values[r * period + l] - pivot;
    const T centre = sum * inverse;
    T square = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const T d = (values[r * period + l] - pivot) - centre;
      square += d * d;
    }
    mean[l] = static_cast<double>(pivot) + static_cast<double>(centre);
    m2[l] = static_cast<double>(square);
  }
}

template <typename T>
void column_slope(Activation kind, const T* y, T* dy, int64_t rows, int64_t period, const T* base,
                  const T* slope, const T* mean) {
  activations::visit(kind, [&](auto a) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* in = y + r * period;
      T* out = dy + r * period;
#pragma GCC ivdep
      for (int64_t l = 0; l < period; ++l) {
        out[l] = (base[l] + slope[l] * (a.value(in[l]) - mean[l])) * a.derivative(in[l]);
      }
    }
  });
}

// ---- the table

// Accumulators of a tile fill the registers that the operands leave.
template <typename T>
Kernels<T> make_kernels() {
  Kernels<T> k{};
  k.width = kWidth<T>;
  k.conv[1] = conv_range<T, 1, 8>;
  if constexpr (kRegisters >= 32) {
    k.conv[2] = conv_range<T, 2, 8>;
    k.conv[3] = conv_range<T, 3, 7>;
    k.conv[4] = conv_range<T, 4, 6>;
    k.conv[8] = conv_range<T, 8, 3>;
    k.weight_gradient[1] = weight_gradient_tile<T, 1, 8>;
    k.weight_gradient[2] = weight_gradient_tile<T, 2, 8>;
    k.weight_gradient[4] = weight_gradient_tile<T, 4, 6>;
  } else {
    k.conv[2] = conv_range<T, 2, 4>;
    k.conv[3] = conv_range<T, 3, 3>;
    k.conv[4] = conv_range<T, 4, 3>;
    k.weight_gradient[1] = weight_gradient_tile<T, 1, 8>;
    k.weight_gradient[2] = weight_gradient_tile<T, 2, 4>;
    k.weight_gradient[4] = weight_gradient_tile<T, 4, 2>;
  }
  k.activate = activate<T>;
  k.moments = moments<T>;
  k.slope = slope<T>;
  k.column_moments = column_moments<T>;
  k.column_slope = column_slope<T>;
  return k;
}

}  // namespace

Kernels<float> float_kernels() { return make_kernels<float>(); }
Kernels<double> double_kernels() { return make_kernels<double>(); }

}  // namespace CONVNORMPOOL_ISA
}  // namespace cpu
}  // namespace convnormpool
