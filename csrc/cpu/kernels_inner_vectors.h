// Vectors, and the sums over their lanes: a part of kernels_inner.h, which says how it is compiled.

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

}  // namespace
}  // namespace CONVNORMPOOL_ISA
}  // namespace cpu
}  // namespace convnormpool
