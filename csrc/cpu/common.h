// What the CPU operators share: storage types, checked access to tensors, merging of moments.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace convnormpool {
namespace cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The arithmetic and statistics type of a storage type.
template <typename S>
using Compute = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <typename S>
struct TypeTag {
  using type = S;
};

// Calls f(TypeTag<S>{}) for the storage type of dtype.
template <typename F>
void dispatch_dtype(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f(TypeTag<double>{});
    case ScalarType::Float:
      return f(TypeTag<float>{});
    case ScalarType::Half:
      return f(TypeTag<Half>{});
    case ScalarType::BFloat16:
      return f(TypeTag<BFloat16>{});
    default:
      STD_TORCH_CHECK(false, "the dtype must be float64, float32, float16 or bfloat16");
  }
}

inline ScalarType statistics_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_activation(int64_t activation) {
  STD_TORCH_CHECK(activation_name(activation) != nullptr, "unknown activation code ", activation);
}

inline bool is_storage_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

// A contiguous CPU tensor of that dtype, one of the four, and number of elements.
inline void check_dense(const Tensor& t, const char* name, ScalarType dtype, int64_t numel) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be a CPU tensor");
  STD_TORCH_CHECK(t.scalar_type() == dtype && is_storage_dtype(dtype), name,
                  " has the wrong dtype");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements instead of ", numel);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

template <typename S>
const S* input_data(const Tensor& t) {
  return static_cast<const S*>(t.const_data_ptr());
}

template <typename S>
S* output_data(const Tensor& t) {
  return static_cast<S*>(t.mutable_data_ptr());
}

// An array aligned to vectors, not initialised.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(::operator new(
            static_cast<size_t>(std::max<int64_t>(size, 1)) * sizeof(T), std::align_val_t(64)))),
        size_(size) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }
  void zero() { std::fill(data_, data_ + size_, T(0)); }

 private:
  T* data_;
  int64_t size_;
};

// n storage elements as the arithmetic type: the elements themselves, or a copy in scratch.
template <typename S>
const Compute<S>* as_compute(const S* in, Compute<S>* scratch, int64_t n) {
  if constexpr (std::is_same_v<S, Compute<S>>) {
    (void)scratch, (void)n;
    return in;
  } else {
    for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<float>(in[i]);
    return scratch;
  }
}

// The element at i of a tensor of any of the four dtypes, in double; fallback without a tensor.
inline double element(const void* data, ScalarType dtype, int64_t i, double fallback = 0) {
  if (data == nullptr) return fallback;
  switch (dtype) {
    case ScalarType::Double:
      return static_cast<const double*>(data)[i];
    case ScalarType::Float:
      return static_cast<const float*>(data)[i];
    case ScalarType::Half:
      return static_cast<float>(static_cast<const Half*>(data)[i]);
    default:
      return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
  }
}

// float, rounded to odd: rounding that again to a half type is rounding x once.
inline float round_to_odd(double x) {
  const float f = static_cast<float>(x);
  if (static_cast<double>(f) == x || !std::isfinite(x) || !std::isfinite(f)) return f;
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  if (bits & 1) return f;
  const bool away = std::fabs(static_cast<double>(f)) > std::fabs(x);
  bits = away ? bits - 1 : bits + 1;
  float odd;
  std::memcpy(&odd, &bits, sizeof(odd));
  return odd;
}

template <typename S>
S round_once(double x) {
  if constexpr (std::is_same_v<S, double> || std::is_same_v<S, float>) {
    return static_cast<S>(x);
  } else {
    return S(round_to_odd(x));
  }
}

inline void set_element(void* data, ScalarType dtype, int64_t i, double value) {
  switch (dtype) {
    case ScalarType::Double:
      static_cast<double*>(data)[i] = value;
      return;
    case ScalarType::Float:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case ScalarType::Half:
      static_cast<Half*>(data)[i] = round_once<Half>(value);
      return;
    default:
      static_cast<BFloat16*>(data)[i] = round_once<BFloat16>(value);
  }
}

// Running moments of a sequence of blocks, merged by Chan's rule.
struct Merger {
  double count = 0;
  double mean = 0;
  double m2 = 0;

  void add(double block_count, double block_mean, double block_m2) {
    if (count == 0) {
      count = block_count;
      mean = block_mean;
      m2 = block_m2;
      return;
    }
    const double total = count + block_count;
    const double delta = block_mean - mean;
    const double share = block_count / total;
    m2 += block_m2 + delta * delta * count * share;
    // An infinite mean stays infinite: Inf - Inf would make it NaN.
    mean = std::isfinite(delta) ? mean + delta * share : mean + block_mean;
    count = total;
  }

  // What the next block's mean may be near to; first is one of its values.
  template <typename T>
  T guess(T first) const {
    return count > 0 && std::isfinite(mean) ? static_cast<T>(mean) : first;
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace cpu
}  // namespace convnormpool
