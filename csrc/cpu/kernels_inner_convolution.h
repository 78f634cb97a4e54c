// Convolution and weight gradient: a part of kernels_inner.h, which says how it is compiled.

namespace convnormpool {
namespace cpu {
namespace CONVNORMPOOL_ISA {
namespace {

// ---- convolution over a linear range

// Products that are added one after the other: the rounding errors of a longer chain grow with the
// root of its length, so that the parts of a longer sum are formed on their own and added up.
constexpr int64_t kChain = 128;

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
      Vec<T> y = acc[k][v];
      if (a.accumulate) y += load<T>(row + v * kW);
      store<T>(row + v * kW, y + bias);
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
      chain.bias = left > kChain ? nullptr : a.bias;  // all of the sum is rounded at its size
      conv_tile_of<T, kTile, kVectors>(chain, first, vectors);
      left -= chain.taps;
      chain.offsets += chain.taps;
      chain.weights += chain.taps * kTile;
      chain.accumulate = true;
    } while (left > 0);
  }
}

// ---- weight gradient

// The sum of one channel and tap over the positions that count. The tiles take all of them, since
// dy is zero at the others, where x may be one that no output depends on: its NaN or infinity is
// not the filter's.
template <typename T>
double counted_products(const WeightGradient<T>& a, int64_t k, int64_t tap) {
  double sum = 0;
  for (int64_t plane = 0; plane < a.planes; ++plane) {
    const T* dy = a.dy + k * a.dy_stride + plane * a.dy_plane;
    const T* x = a.x + a.offsets[tap] + plane * a.x_plane;
    for (int64_t i = 0; i < a.vectors * kWidth<T>; ++i) {
      if (a.mask[i]) sum += static_cast<double>(dy[i]) * static_cast<double>(x[i]);
    }
  }
  return sum;
}

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
      for (int64_t j = 0; j < count; ++j) {
        const double found = static_cast<double>(sums[k * kTaps + j]);
        const bool as_found = __builtin_isfinite(found) || __builtin_isnan(sum[j]);
        sum[j] += as_found ? found : counted_products(a, k, tap0 + j);
      }
    }
  }
}

}  // namespace
}  // namespace CONVNORMPOOL_ISA
}  // namespace cpu
}  // namespace convnormpool
