// The kernels of kernels.h for one instruction set. No include guard: each kernels_*.cpp includes
// this once, after kernels.h, under its own target options, with CONVNORMPOOL_ISA naming the
// namespace and CONVNORMPOOL_VECTOR_BYTES the size of a vector register. Nothing here may include a
// header: its functions would be compiled for that target and could be merged by the linker with
// those of other files.

namespace convnormpool {
namespace cpu {
namespace CONVNORMPOOL_ISA {
namespace {

constexpr int kVectorBytes = CONVNORMPOOL_VECTOR_BYTES;
// An architecture with vectors of 64 bytes has twice as many of them.
constexpr int kRegisters = kVectorBytes == 64 ? 32 : 16;

template <typename T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef Mask<T> mask __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename VecOf<T>::type;
template <typename T>
using VecMask = typename VecOf<T>::mask;
template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
inline __attribute__((always_inline)) Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
inline __attribute__((always_inline)) void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <typename T>
inline __attribute__((always_inline)) Vec<T> keep(Vec<T> v, const Mask<T>* mask) {
  VecMask<T> m;
  __builtin_memcpy(&m, mask, sizeof(m));
  return (Vec<T>)((VecMask<T>)v & m);
}

// ---- sums over the lanes of several vectors

// Lanes of the pair (a, b), 0 to 2 * width - 1, that stand in the lower halves of blocks of kBlock.
template <int kBlock>
constexpr int lower_lane(int i) {
  return i / (kBlock / 2) * kBlock + i % (kBlock / 2);
}

// For each block of kBlock lanes of a, then of b, the sums of its lower and its upper half.
template <typename T, int kBlock, int... kLane>
inline __attribute__((always_inline)) Vec<T> fold(Vec<T> a, Vec<T> b,
                                                  std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lower_lane<kBlock>(kLane)...) +
         __builtin_shufflevector(a, b, (lower_lane<kBlock>(kLane) + kBlock / 2)...);
#else
  const VecMask<T> lower = {lower_lane<kBlock>(kLane)...};
  const VecMask<T> upper = {(lower_lane<kBlock>(kLane) + kBlock / 2)...};
  return __builtin_shuffle(a, b, lower) + __builtin_shuffle(a, b, upper);
#endif
}

// Leaves the sum of the lanes of vector i in lane i of what stands at v, counted over vectors.
template <typename T, int kCount, int kBlock = kWidth<T>>
inline __attribute__((always_inline)) void fold_all(Vec<T>* v) {
  if constexpr (kBlock > 1) {
    constexpr int kNext = (kCount + 1) / 2;
#pragma GCC unroll 16
    for (int i = 0; i < kNext; ++i) {
      const Vec<T> second = 2 * i + 1 < kCount ? v[2 * i + 1] : Vec<T>{};
      v[i] = fold<T, kBlock>(v[2 * i], second, std::make_integer_sequence<int, kWidth<T>>());
    }
    fold_all<T, kNext, kBlock / 2>(v);
  }
}

template <typename T>
inline __attribute__((always_inline)) double sum_lanes(Vec<T> v) {
  fold_all<T, 1>(&v);
  return static_cast<double>(v[0]);
}

// Terms that are added one after the other: the rounding errors of a longer chain grow with the
// root of its length, so that the parts of a longer sum are formed on their own and added up.
constexpr int64_t kChain = 128;

// ---- convolution over a linear range

template <typename T, int kTile, int kVectors>
inline __attribute__((always_inline)) void conv_tile(const ConvRange<T>& a, int64_t first) {
  constexpr int kW = kWidth<T>;
  T* out = a.out + first * kW;
  Vec<T> acc[kTile][kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kTile; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[k][v] = Vec<T>{};
  }
  const T* x = a.x + first * kW;
  const T* w = a.weights;
  const int64_t* offset = a.offsets;
#pragma GCC unroll 1
  for (int64_t tap = 0; tap < a.taps; ++tap) {
    const T* window = x + offset[tap];
    Vec<T> xv[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) xv[v] = load<T>(window + v * kW);
#pragma GCC unroll 8
    for (int k = 0; k < kTile; ++k) {
      const Vec<T> wk = w[k] - Vec<T>{};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[k][v] += wk * xv[v];
    }
    w += kTile;
  }
#pragma GCC unroll 8
  for (int k = 0; k < kTile; ++k) {
    T* row = out + k * a.out_stride;
    const Vec<T> bias = (a.bias ? a.bias[k] : T(0)) - Vec<T>{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec<T> y = acc[k][v] + bias;
      if (a.accumulate) y += load<T>(row + v * kW);
      store<T>(row + v * kW, y);
    }
  }
}

// One tile of `vectors` vectors, at most kVectors.
template <typename T, int kTile, int kVectors>
inline __attribute__((always_inline)) void conv_tile_of(const ConvRange<T>& a, int64_t first,
                                                        int64_t vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return conv_tile_of<T, kTile, kVectors - 1>(a, first, vectors);
  }
  conv_tile<T, kTile, kVectors>(a, first);
}

template <typename T, int kTile, int kVectors>
void conv_range(const ConvRange<T>& a) {
  // Tiles of nearly equal size: a small one at the end would wait for its own few additions.
  const int64_t tiles = (a.vectors + kVectors - 1) / kVectors;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = a.vectors * i / tiles;
    const int64_t vectors = a.vectors * (i + 1) / tiles - first;
    ConvRange<T> chain = a;
    int64_t left = a.taps;
    do {  // once without taps, too
      chain.taps = left < kChain ? left : kChain;
      conv_tile_of<T, kTile, kVectors>(chain, first, vectors);
      left -= chain.taps;
      chain.offsets += chain.taps;
      chain.weights += chain.taps * kTile;
      chain.bias = nullptr;
      chain.accumulate = true;
    } while (left > 0);
  }
}

// ---- weight gradient

template <typename T, int kTile, int kTaps>
void weight_gradient_tile(const WeightGradient<T>& a) {
  constexpr int kW = kWidth<T>;
  for (int64_t tap0 = 0; tap0 < a.taps; tap0 += kTaps) {
    // The last block repeats the last tap and drops the copies.
    const int64_t count = a.taps - tap0 < kTaps ? a.taps - tap0 : kTaps;
    const T* x[kTaps];
#pragma GCC unroll 8
    for (int j = 0; j < kTaps; ++j) x[j] = a.x + a.offsets[tap0 + (j < count ? j : count - 1)];
    Vec<T> acc[kTile * kTaps];
#pragma GCC unroll 32
    for (int i = 0; i < kTile * kTaps; ++i) acc[i] = Vec<T>{};
    for (int64_t plane = 0; plane < a.planes; ++plane) {
      const T* dy = a.dy + plane * a.dy_plane;
      const int64_t base = plane * a.x_plane;
#pragma GCC unroll 1
      for (int64_t v = 0; v < a.vectors; ++v) {
        Vec<T> dk[kTile];
#pragma GCC unroll 8
        for (int k = 0; k < kTile; ++k) dk[k] = load<T>(dy + k * a.dy_stride + v * kW);
#pragma GCC unroll 8
        for (int j = 0; j < kTaps; ++j) {
          const Vec<T> xv = load<T>(x[j] + base + v * kW);
#pragma GCC unroll 8
          for (int k = 0; k < kTile; ++k) acc[k * kTaps + j] += dk[k] * xv;
        }
      }
    }
    fold_all<T, kTile * kTaps>(acc);
    constexpr int kFolded = (kTile * kTaps + kW - 1) / kW;
    T sums[kFolded * kW];
#pragma GCC unroll 8
    for (int i = 0; i < kFolded; ++i) store<T>(sums + i * kW, acc[i]);
    for (int k = 0; k < kTile; ++k) {
      double* sum = a.sum + k * a.sum_stride + tap0;
      for (int64_t j = 0; j < count; ++j) sum[j] += static_cast<double>(sums[k * kTaps + j]);
    }
  }
}

// ---- activation, moments, slopes

template <typename T>
void activate(Activation kind, const T* in, T* out, int64_t n) {
  activations::visit(kind, [&](auto a) {
  // out is in or apart from it.
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = a.value(in[i]);
  });
}

// Sums of (values - pivot - centre) and of its square.
template <typename T>
struct Sums {
  double first;
  double second;
};

template <typename T, bool kMasked>
inline __attribute__((always_inline)) Sums<T> shifted_sums(const T* values, const Mask<T>* mask,
                                                           int64_t n, T pivot, T centre) {
  constexpr int kW = kWidth<T>;
  constexpr int kUnroll = 4;
  const Vec<T> pivots = pivot - Vec<T>{};
  const Vec<T> centres = centre - Vec<T>{};
  Sums<T> sums{0, 0};
  int64_t i = 0;
  while (i < n) {
    const int64_t end = n - i < kChain * kUnroll * kW ? n : i + kChain * kUnroll * kW;
    Vec<T> first[kUnroll];
    Vec<T> second[kUnroll];
    for (int u = 0; u < kUnroll; ++u) first[u] = second[u] = Vec<T>{};
    for (; i + kUnroll * kW <= end; i += kUnroll * kW) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) {
        Vec<T> d = (load<T>(values + i + u * kW) - pivots) - centres;
        if (kMasked) d = keep<T>(d, mask + i + u * kW);
        first[u] += d;
        second[u] += d * d;
      }
    }
    for (; i + kW <= end; i += kW) {
      Vec<T> d = (load<T>(values + i) - pivots) - centres;
      if (kMasked) d = keep<T>(d, mask + i);
      first[0] += d;
      second[0] += d * d;
    }
    sums.first += sum_lanes<T>((first[0] + first[1]) + (first[2] + first[3]));
    sums.second += sum_lanes<T>((second[0] + second[1]) + (second[2] + second[3]));
    for (; i < end; ++i) {
      if (kMasked && !mask[i]) continue;
      const T d = (values[i] - pivot) - centre;
      sums.first += static_cast<double>(d);
      sums.second += static_cast<double>(d) * static_cast<double>(d);
    }
  }
  return sums;
}

template <typename T, bool kMasked>
Moments block_moments(const T* values, const Mask<T>* mask, int64_t n, int64_t count, T pivot) {
  pivot = __builtin_isfinite(pivot) ? pivot : T(0);
  const double size = static_cast<double>(count);
  const Sums<T> one = shifted_sums<T, kMasked>(values, mask, n, pivot, T(0));
  const double shift = one.first / size;
  const double m2 = one.second - one.first * shift;
  // With a pivot near the mean one pass is as good as two.
  if (one.second <= 2 * m2) return {static_cast<double>(pivot) + shift, m2};
  const T centre = static_cast<T>(shift);
  const Sums<T> two = shifted_sums<T, kMasked>(values, mask, n, pivot, centre);
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

template <typename T>
double slope(Activation kind, const T* y, T* dy, int64_t n, const Slope<T>& s,
             const Mask<T>* mask) {
  constexpr int kW = kWidth<T>;
  activations::visit(kind, [&](auto a) {
    const T base = s.base;
    const T factor = s.slope;
    const T mean = s.mean;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      dy[i] = (base + factor * (a.value(y[i]) - mean)) * a.derivative(y[i]);
    }
  });
  double sum = 0;
  int64_t i = 0;
  while (i + kW <= n) {
    const int64_t end = n - i < kChain * kW ? n : i + kChain * kW;
    Vec<T> part{};
    if (mask) {
      for (; i + kW <= end; i += kW) {
        const Vec<T> d = keep<T>(load<T>(dy + i), mask + i);
        store<T>(dy + i, d);
        part += d;
      }
    } else {
      for (; i + kW <= end; i += kW) part += load<T>(dy + i);
    }
    sum += sum_lanes<T>(part);
  }
  for (; i < n; ++i) {
    if (mask && !mask[i]) dy[i] = T(0);
    sum += static_cast<double>(dy[i]);
  }
  return sum;
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
