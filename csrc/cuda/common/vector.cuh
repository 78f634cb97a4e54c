// Storage types: widening to the statistics type, rounding back, and loads and stores of several
// neighbouring elements at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "problem.h"

namespace convnormpool {

// The widest access of a thread.
constexpr int kVectorBytes = 16;

template <typename T>
struct Storage {
  using Statistics = float;
};
template <>
struct Storage<double> {
  using Statistics = double;
};
template <typename T>
using statistics_t = typename Storage<T>::Statistics;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int kCount>
__device__ __forceinline__ void widen_all(const T (&raw)[kCount], statistics_t<T> (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = widen(raw[i]);
}

// One element as it comes from memory, in a register of its own: 16-bit values that are loaded one
// by one under conditions would else be packed in pairs, each pair waiting for its loads.
__device__ __forceinline__ double load_loose(const double* p) { return *p; }
__device__ __forceinline__ float load_loose(const float* p) { return *p; }
__device__ __forceinline__ uint32_t load_loose(const __half* p) {
  return *reinterpret_cast<const uint16_t*>(p);
}
__device__ __forceinline__ uint32_t load_loose(const __nv_bfloat16* p) {
  return *reinterpret_cast<const uint16_t*>(p);
}
// widen_loose(load_loose(p), T{}) is widen(*p).
__device__ __forceinline__ double widen_loose(double x, double) { return x; }
__device__ __forceinline__ float widen_loose(float x, float) { return x; }
__device__ __forceinline__ float widen_loose(uint32_t bits, __half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float widen_loose(uint32_t bits, __nv_bfloat16) {
  return __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(bits)));
}

// narrow(x, T{}) is x rounded once to T.
__device__ __forceinline__ double narrow(double x, double) { return x; }
__device__ __forceinline__ float narrow(double x, float) { return static_cast<float>(x); }
__device__ __forceinline__ __half narrow(double x, __half) { return __double2half(x); }
__device__ __forceinline__ __nv_bfloat16 narrow(double x, __nv_bfloat16) {
  return __double2bfloat16(x);
}
__device__ __forceinline__ float narrow(float x, float) { return x; }
__device__ __forceinline__ __half narrow(float x, __half) { return __float2half_rn(x); }
__device__ __forceinline__ __nv_bfloat16 narrow(float x, __nv_bfloat16) {
  return __float2bfloat16_rn(x);
}

template <int kBytes>
struct Chunk;
template <>
struct Chunk<1> {
  using Type = uint8_t;
};
template <>
struct Chunk<2> {
  using Type = uint16_t;
};
template <>
struct Chunk<4> {
  using Type = uint32_t;
};
template <>
struct Chunk<8> {
  using Type = uint2;
};
template <>
struct Chunk<16> {
  using Type = uint4;
};

// The alignment that load_vector and store_vector of kCount elements of T ask for.
template <typename T, int kCount>
constexpr int kVectorAlignment =
    sizeof(T) * kCount < kVectorBytes ? int(sizeof(T) * kCount) : kVectorBytes;

// target[0 .. kCount) = source[0 .. kCount), by accesses as wide as that many elements allow.
template <int kCount, typename T>
__device__ __forceinline__ void load_vector(const T* source, T* target) {
  constexpr int kBytes = kVectorAlignment<T, kCount>;
  constexpr int kEach = kBytes / sizeof(T);
  using Type = typename Chunk<kBytes>::Type;
#pragma unroll
  for (int i = 0; i < kCount; i += kEach) {
    const Type chunk = *reinterpret_cast<const Type*>(source + i);
    memcpy(target + i, &chunk, kBytes);
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void store_vector(const T* source, T* target) {
  constexpr int kBytes = kVectorAlignment<T, kCount>;
  constexpr int kEach = kBytes / sizeof(T);
  using Type = typename Chunk<kBytes>::Type;
#pragma unroll
  for (int i = 0; i < kCount; i += kEach) {
    Type chunk;
    memcpy(&chunk, source + i, kBytes);
    *reinterpret_cast<Type*>(target + i) = chunk;
  }
}

// A tensor's elements behind a dtype known at run time only: for small tensors, where a switch at
// each access costs less than kernels multiplied by four for each such tensor. Null where there is
// no tensor.
struct TypedPointer {
  void* data;
  DType dtype;
};

__device__ __forceinline__ double load_element(const TypedPointer& p, int64_t index) {
  switch (p.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(p.data)[index];
    case DType::kFloat32:
      return static_cast<const float*>(p.data)[index];
    case DType::kFloat16:
      return widen(static_cast<const __half*>(p.data)[index]);
    default:
      return widen(static_cast<const __nv_bfloat16*>(p.data)[index]);
  }
}

__device__ __forceinline__ void store_element(const TypedPointer& p, int64_t index, double x) {
  switch (p.dtype) {
    case DType::kFloat64:
      static_cast<double*>(p.data)[index] = x;
      break;
    case DType::kFloat32:
      static_cast<float*>(p.data)[index] = narrow(x, float());
      break;
    case DType::kFloat16:
      static_cast<__half*>(p.data)[index] = narrow(x, __half());
      break;
    default:
      static_cast<__nv_bfloat16*>(p.data)[index] = narrow(x, __nv_bfloat16());
  }
}

}  // namespace convnormpool
