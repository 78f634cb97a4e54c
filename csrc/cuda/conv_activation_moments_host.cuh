// What the host sides of the fused convolution and of its gradients share: the problem that the
// tensors state, their checks, the device, and the kind of operand.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "cuda/common/launch.cuh"

namespace convnormpool {

inline Problem problem_of(const Tensor& x, const Tensor& w, const std::vector<int64_t>& stride,
                          const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
                          int64_t groups, int64_t precision) {
  STD_TORCH_CHECK(x.dim() == 5 && w.dim() == 5, "x and w must be 5-D");
  STD_TORCH_CHECK(stride.size() == 3 && padding.size() == 3 && dilation.size() == 3,
                  "stride, padding and dilation must have three elements");
  Problem p{};
  p.N = x.size(0), p.C = x.size(1), p.D = x.size(2), p.H = x.size(3), p.W = x.size(4);
  p.K = w.size(0), p.T = w.size(2), p.R = w.size(3), p.S = w.size(4);
  std::copy(stride.begin(), stride.end(), p.stride);
  std::copy(padding.begin(), padding.end(), p.padding);
  std::copy(dilation.begin(), dilation.end(), p.dilation);
  p.groups = groups;
  p.dtype = dtype_of(x, "x");
  p.precision = static_cast<Precision>(precision);
  return p;
}

// x, w and b hold the problem's elements, one after another, of one dtype.
inline void check_operands(const Problem& p, const Tensor& x, const Tensor& w,
                           const std::optional<Tensor>& b) {
  check_dense(x, "x", p.N * p.C * p.D * p.H * p.W, x);
  check_dense(w, "w", p.K * p.C * p.T * p.R * p.S, x);
  STD_TORCH_CHECK(dtype_of(w, "w") == p.dtype, "w must have the dtype of x");
  if (b) {
    check_dense(*b, "b", p.K, x);
    STD_TORCH_CHECK(dtype_of(*b, "b") == p.dtype, "b must have the dtype of x");
  }
}

// The current device.
struct DeviceFacts {
  int major = 0, minor = 0, sm_count = 0;

  DeviceFacts() {
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  }
};

// Calls f with the problem's kind of operand, a WindowOperand or WgmmaOperand, as a constant.
template <class Operand, class F>
void dispatch_operand(const Problem& p, const F& f) {
  switch (p.dtype) {
    case DType::kFloat16:
      return f(std::integral_constant<Operand, Operand::kFloat16>{});
    case DType::kBFloat16:
      return f(std::integral_constant<Operand, Operand::kBFloat16>{});
    default:
      return p.precision == Precision::kTf32
                 ? f(std::integral_constant<Operand, Operand::kTf32>{})
                 : f(std::integral_constant<Operand, Operand::kSplit>{});
  }
}

#ifdef CONVNORMPOOL_SM_90A
constexpr bool kWgmmaCompiled = true;
#else
constexpr bool kWgmmaCompiled = false;
#endif

}  // namespace convnormpool
