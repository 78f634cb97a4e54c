// __nv_bfloat16 and its pair for the host: storage and the conversions, rounding to nearest even.
#pragma once

#include <cuda_fp16.h>

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    const unsigned b = __float_as_uint(x);
    bits = x != x ? 0x7FFF : static_cast<unsigned short>((b + 0x7FFF + (b >> 16 & 1)) >> 16);
  }
  __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {}
  operator float() const { return __uint_as_float(unsigned(bits) << 16); }
  operator __nv_bfloat16_raw() const { return {bits}; }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

// Rounds a double once: towards the odd neighbour in float, then to nearest even.
inline __nv_bfloat16 __double2bfloat16(double x) {
  float f = float(x);
  if (double(f) != x && std::isfinite(f) && !(__float_as_uint(f) & 1)) {
    f = nextafterf(f, double(f) < x ? INFINITY : -INFINITY);
  }
  return __nv_bfloat16(f);
}
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
  return __nv_bfloat16(__nv_bfloat16_raw{x});
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) {
  return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float __low2float(__nv_bfloat162 v) { return v.x; }
inline float __high2float(__nv_bfloat162 v) { return v.y; }
