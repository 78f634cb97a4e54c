// What the programs of the Hopper kernels share: the kind of operand they are compiled for, the
// shapes that fall to it, and inputs as the kernels are given them.
#pragma once

#include <cstdlib>
#include <cstring>

#include "check.h"
#include "cuda/common/ptx_hopper.cuh"
#include "cuda/conv_activation_moments_wgmma_config.cuh"
#include "problem.h"

namespace check {

constexpr convnormpool::WgmmaOperand kOperand = convnormpool::WgmmaOperand::OPERAND;

#ifdef EVERY_SHAPE
constexpr bool kEveryShape = true;
#else
constexpr bool kEveryShape = false;
#endif

// Whether the shapes that fall to this kind are run.
constexpr bool takes(convnormpool::WgmmaOperand kind) { return kEveryShape || kind == kOperand; }

// The problem as the host side states it; precision decides nothing in a kernel.
inline convnormpool::Problem problem_of(const Shape& s) {
  convnormpool::Problem p{};
  p.N = s.N, p.C = s.C, p.D = s.D, p.H = s.H, p.W = s.W;
  p.K = s.K, p.T = s.T, p.R = s.R, p.S = s.S;
  const int64_t padding[3] = {s.pad_d, s.pad_h, s.pad_w};
  for (int i = 0; i < 3; ++i) p.stride[i] = p.dilation[i] = 1, p.padding[i] = padding[i];
  p.groups = 1;
  p.dtype = kOperand == convnormpool::WgmmaOperand::kFloat16    ? convnormpool::DType::kFloat16
            : kOperand == convnormpool::WgmmaOperand::kBFloat16 ? convnormpool::DType::kBFloat16
                                                                : convnormpool::DType::kFloat32;
  p.precision = convnormpool::Precision::kTf32;
  return p;
}

// The elements as aligned as an allocation on the device, with the end of the memory where theirs
// is if their number of bytes allows.
template <class Element>
class DeviceCopy {
 public:
  explicit DeviceCopy(const std::vector<Element>& elements) {
    const size_t bytes = elements.size() * sizeof(Element), before = (256 - bytes % 256) % 256;
    memory_ = static_cast<char*>(aligned_alloc(256, bytes + before));
    data_ = bytes % 16 == 0 ? memory_ + before : memory_;
    memcpy(data_, elements.data(), bytes);
  }
  ~DeviceCopy() { free(memory_); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  const char* data() const { return data_; }

 private:
  char *memory_, *data_;
};

// The map of x; its box is still to be set.
inline convnormpool::TensorMap tensor_map(const Shape& s, const void* x, int element_bytes) {
  convnormpool::TensorMap map{};
  map.base = static_cast<const char*>(x);
  map.element_bytes = element_bytes;
  const int64_t extent[5] = {s.W, s.H, s.D, s.C, s.N};
  uint64_t stride = uint64_t(element_bytes);
  for (int i = 0; i < 5; ++i) {
    map.extent[i] = uint64_t(extent[i]);
    map.stride_bytes[i] = stride;
    stride *= uint64_t(extent[i]);
  }
  return map;
}

}  // namespace check
