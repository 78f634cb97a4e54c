// The one struct that describes a problem. Extents as CUTLASS names them: N C D H W for the input,
// K T R S for the filter, Z P Q for the output. Plain data: it crosses from Python to the planner
// and from the host to the kernels.
#pragma once

#include <cstdint>

namespace convnormpool {

enum class DType : int32_t { kFloat64 = 0, kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3 };

// The smallest e with 2^e >= count, at most `most`.
inline int ceil_log2(int64_t count, int most) {
  int e = 0;
  while (e < most && (int64_t{1} << e) < count) ++e;
  return e;
}

// In bytes.
constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// How float32 products are formed. Other dtypes ignore it.
enum class Precision : int32_t { kIeee = 0, kTf32 = 1 };

struct Problem {
  int64_t N, C, D, H, W;
  int64_t K, T, R, S;
  int64_t stride[3];
  int64_t padding[3];
  int64_t dilation[3];
  int64_t groups;
  DType dtype;
  Precision precision;

  int64_t extent(int axis) const {
    const int64_t in[3] = {D, H, W};
    const int64_t filter[3] = {T, R, S};
    return (in[axis] + 2 * padding[axis] - dilation[axis] * (filter[axis] - 1) - 1) / stride[axis] +
           1;
  }
  int64_t Z() const { return extent(0); }
  int64_t P() const { return extent(1); }
  int64_t Q() const { return extent(2); }
  int64_t positions() const { return Z() * P() * Q(); }
  int64_t channels_per_group() const { return C / groups; }
};

}  // namespace convnormpool
