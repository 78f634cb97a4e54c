// __half and __half2 for the host: storage and the conversions, rounding to nearest even.
#pragma once

#include <cuda_runtime.h>

struct __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  unsigned short bits;
  __half() = default;
  __half(float x) : bits(emu_bits<unsigned short>(_Float16(x))) {}
  __half(double x) : bits(emu_bits<unsigned short>(_Float16(x))) {}
  __half(__half_raw raw) : bits(raw.x) {}
  operator float() const { return float(emu_bits<_Float16>(bits)); }
  operator __half_raw() const { return {bits}; }
};
using half = __half;

struct alignas(4) __half2 {
  __half x, y;
};
using half2 = __half2;

inline float __half2float(__half x) { return float(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __half2 __habs2(__half2 v) {
  const auto magnitude = [](__half x) {
    return __half(__half_raw{static_cast<unsigned short>(x.bits & 0x7FFF)});
  };
  return {magnitude(v.x), magnitude(v.y)};
}
// The larger; of a number and NaN the number.
inline __half2 __hmax2(__half2 v, __half2 w) {
  const auto larger = [](__half x, __half y) {
    return float(x) != float(x) || float(x) < float(y) ? y : x;
  };
  return {larger(v.x, w.x), larger(v.y, w.y)};
}
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
