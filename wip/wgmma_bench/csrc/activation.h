// The activations, value and derivative, one definition for CPU and CUDA.
//
// An activation is chosen at run time by a switch on a value that is the same for a whole launch,
// so kernels are compiled once for hardswish (HardswishFn, with its own fast form) and once for all
// the others (ActivationFn); dispatch_activation turns the code that crosses the operator boundary
// into one of the two. Values and derivatives at the kinks are PyTorch's. T is float or double.
//
// NaN comes out as NaN from every value. A derivative may be finite at NaN, as PyTorch's masks are.
// Comparisons are written so that NaN falls through to the arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define CONVNORMPOOL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CONVNORMPOOL_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace convnormpool {

// The order is the code that crosses the operator boundary; activation_name gives PyTorch's names.
enum class Activation : int32_t {
  kHardswish = 0,
  kIdentity = 1,
  kRelu = 2,
  kRelu6 = 3,
  kLeakyRelu = 4,  // negative_slope 0.01
  kElu = 5,        // alpha 1
  kSilu = 6,
  kGelu = 7,
  kGeluTanh = 8,
  kMish = 9,
  kHardsigmoid = 10,
};
constexpr int32_t kNumActivations = 11;

// nullptr for a code that is none.
inline const char* activation_name(int64_t code) {
  constexpr const char* kNames[kNumActivations] = {
      "hardswish", "identity", "relu",      "relu6", "leaky_relu",  "elu",
      "silu",      "gelu",     "gelu_tanh", "mish",  "hardsigmoid",
  };
  return code >= 0 && code < kNumActivations ? kNames[code] : nullptr;
}

namespace activations {

// x limited to [low, high]; NaN stays.
template <typename T>
CONVNORMPOOL_HOST_DEVICE T clamp(T x, T low, T high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// NaN where x is infinite or NaN, else 0: PyTorch's smooth derivatives are NaN there.
template <typename T>
CONVNORMPOOL_HOST_DEVICE T nan_unless_finite(T x) {
  return x - x;
}

// 1 - s for s = 1 / (1 + e), without cancellation where s is near 1.
template <typename T>
CONVNORMPOOL_HOST_DEVICE T one_minus(T s, T e) {
  return e < T(1) ? e * s : T(1) - s;
}

// Host code wants loops that vectorise, which calls of the C library prevent: float has its own
// exponential and what follows from it there. Devices and double use the library's.
#ifdef __CUDA_ARCH__
#define CONVNORMPOOL_LIBRARY_FUNCTIONS true
#else
#define CONVNORMPOOL_LIBRARY_FUNCTIONS (sizeof(T) == 8)
#endif

// exp(x) = 2^n exp(r) with |r| <= log(2) / 2 and exp(r) = 1 + r + r^2 * quadratic.
struct ReducedExp {
  float r;
  float quadratic;
  float low_scale;  // low_scale * high_scale = 2^n, for n beyond the normal range too
  float high_scale;

  // x within [-104, 89], or NaN.
  explicit CONVNORMPOOL_HOST_DEVICE ReducedExp(float x) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const float shift = 12582912.0f;
    const float shifted = x * 1.44269504088896340736f + shift;
    const float n = shifted - shift;
    // log(2) in two parts, the first short enough that its multiples by n are exact.
    r = (x - n * 0.693145751953125f) - n * 1.42860682030941723212e-6f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    quadratic = p * r + 0.5f;
    int32_t bits = 0;
    std::memcpy(&bits, &shifted, sizeof(bits));
    const int32_t exponent = bits - 0x4B400000;
    const int32_t half = exponent >> 1;
    low_scale = power_of_two(half);
    high_scale = power_of_two(exponent - half);
  }

  static CONVNORMPOOL_HOST_DEVICE float power_of_two(int32_t n) {
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float f = 0;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
  }
};

template <typename T>
CONVNORMPOOL_HOST_DEVICE T exponential(T x) {
  if constexpr (CONVNORMPOOL_LIBRARY_FUNCTIONS) {
    return std::exp(x);
  } else {
    const ReducedExp e(clamp(x, -104.0f, 89.0f));
    return ((1.0f + (e.r + e.r * e.r * e.quadratic)) * e.low_scale) * e.high_scale;
  }
}

// exp(x) - 1 for x <= 0.
template <typename T>
CONVNORMPOOL_HOST_DEVICE T exponential_minus_1(T x) {
  if constexpr (CONVNORMPOOL_LIBRARY_FUNCTIONS) {
    return std::expm1(x);
  } else {
    const ReducedExp e(clamp(x, -30.0f, 0.0f));
    const float scale = e.low_scale * e.high_scale;
    return scale * (e.r + e.r * e.r * e.quadratic) + (scale - 1.0f);
  }
}

// The distribution function of the normal distribution, with its relative accuracy for negative x.
// gauss is exp(-x^2 / 2).
template <typename T>
CONVNORMPOOL_HOST_DEVICE T normal_cdf(T x, T gauss) {
  if constexpr (CONVNORMPOOL_LIBRARY_FUNCTIONS) {
    (void)gauss;
    return T(0.5) * std::erfc(x * T(-0.70710678118654752440));
  } else {
    // The tail is gauss * q(t) / (1 + 2 z), z = |x| / sqrt(2), t = (z - 2) / (z + 2), q the
    // Chebyshev interpolant of erfcx(z) (1 + 2 z) / 2 in t. Beyond 28 gauss is zero.
    const float z = clamp(x < 0.0f ? -x : x, 0.0f, 28.0f) * 0.70710678118654752440f;
    const float t = (z - 2.0f) / (z + 2.0f);
    float q = 8.293378778034821e-05f;
    q = q * t - 9.123900963459164e-05f;
    q = q * t - 0.0007041788776405156f;
    q = q * t + 0.0005202403990551829f;
    q = q * t + 0.004350108560174704f;
    q = q * t - 0.003970353398472071f;
    q = q * t - 0.027107950299978256f;
    q = q * t + 0.08201763778924942f;
    q = q * t - 0.08301530033349991f;
    q = q * t - 0.04638151824474335f;
    q = q * t + 0.6384891867637634f;
    const float tail = gauss * (q / (1.0f + 2.0f * z));
    return x < 0.0f ? tail : 1.0f - tail;
  }
}

#undef CONVNORMPOOL_LIBRARY_FUNCTIONS

struct Hardswish {
  // In float x/6 + 1/2 is one fused instruction. It loses the last bits of x + 3 next to -3, where
  // the product is near zero: an absolute error of one rounding of 1/2. In double 1/6 rounds down,
  // so that it would be positive at -3. -Inf * 0 is NaN, as in x * relu6(x + 3) / 6.
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    if constexpr (sizeof(T) == 4) {
#ifdef __CUDA_ARCH__
      return x * __saturatef(fmaf(x, 1.0f / 6.0f, 0.5f));
#else
      return x * clamp(x * T(1.0 / 6.0) + T(0.5), T(0), T(1));
#endif
    } else {
      return x * (clamp(x + T(3), T(0), T(6)) * T(1.0 / 6.0));
    }
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T inner = x * T(1.0 / 3.0) + T(0.5);
    const T upper = x >= T(3) ? T(1) : inner;
    return x <= T(-3) ? T(0) : upper;
  }
};

struct Identity {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x;
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T) {
    return T(1);
  }
};

struct Relu {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x < T(0) ? T(0) : x;
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    return x <= T(0) ? T(0) : T(1);
  }
};

struct Relu6 {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return clamp(x, T(0), T(6));
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T upper = x < T(6) ? T(1) : T(0);
    return x > T(0) ? upper : T(0);
  }
};

struct LeakyRelu {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x > T(0) ? x : x * T(0.01);
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    return x > T(0) ? T(1) : T(0.01);
  }
};

struct Elu {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x < T(0) ? exponential_minus_1(x) : x;
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    return x > T(0) ? T(1) : exponential(x);
  }
};

struct Silu {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x / (T(1) + exponential(-x));
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T e = exponential(-x);
    const T s = T(1) / (T(1) + e);
    return s * (T(1) + x * one_minus(s, e));
  }
};

struct Gelu {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x * normal_cdf(x, exponential(x * x * T(-0.5)));
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T gauss = exponential(x * x * T(-0.5));
    return normal_cdf(x, gauss) + x * (T(0.39894228040143267794) * gauss);
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2u, which has no cancellation.
struct GeluTanh {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T exp_minus_2u(T x) {
    const T u2 = x * (T(1.59576912160573071176) + T(1.59576912160573071176 * 0.044715) * (x * x));
    return exponential(-u2);
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return x / (T(1) + exp_minus_2u(x));
  }
  // Beyond 50 the derivative is 0 or 1 in double too, and x * x could overflow.
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T z = clamp(x, T(-50), T(50));
    const T e = exp_minus_2u(z);
    const T s = T(1) / (T(1) + e);
    const T slope = T(1.59576912160573071176) + T(3 * 1.59576912160573071176 * 0.044715) * (z * z);
    return s * (T(1) + z * one_minus(s, e) * slope) + nan_unless_finite(x);
  }
};

// With e = exp(x) and n = e (e + 2), tanh(softplus(x)) = n / (n + 2). Beyond the limit the quotient
// is 1 in T and (n + 2)^2 is still finite.
struct Mish {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T limited(T x) {
    const T limit = sizeof(T) == 4 ? T(20) : T(40);
    return x > limit ? limit : x;
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    const T e = exponential(limited(x));
    const T n = e * (e + T(2));
    return x * (n / (n + T(2)));
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T z = limited(x);
    const T e = exponential(z);
    const T n = e * (e + T(2));
    const T inverse = T(1) / (n + T(2));
    return (n + z * (T(4) * e * (T(1) + e)) * inverse) * inverse + nan_unless_finite(x);
  }
};

struct Hardsigmoid {
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T value(T x) {
    return clamp(x + T(3), T(0), T(6)) * T(1.0 / 6.0);
  }
  template <typename T>
  static CONVNORMPOOL_HOST_DEVICE T derivative(T x) {
    const T upper = x < T(3) ? T(1.0 / 6.0) : T(0);
    return x > T(-3) ? upper : T(0);
  }
};

// visit(kind, f) calls f with the type of the activation: a switch outside f's loops.
template <typename F>
CONVNORMPOOL_HOST_DEVICE auto visit(Activation kind, F&& f) {
  switch (kind) {
    case Activation::kIdentity:
      return f(Identity{});
    case Activation::kRelu:
      return f(Relu{});
    case Activation::kRelu6:
      return f(Relu6{});
    case Activation::kLeakyRelu:
      return f(LeakyRelu{});
    case Activation::kElu:
      return f(Elu{});
    case Activation::kSilu:
      return f(Silu{});
    case Activation::kGelu:
      return f(Gelu{});
    case Activation::kGeluTanh:
      return f(GeluTanh{});
    case Activation::kMish:
      return f(Mish{});
    case Activation::kHardsigmoid:
      return f(Hardsigmoid{});
    case Activation::kHardswish:
      break;
  }
  return f(Hardswish{});
}

}  // namespace activations

// The two functors that kernels are instantiated with.
struct HardswishFn {
  template <typename T>
  CONVNORMPOOL_HOST_DEVICE T value(T x) const {
    return activations::Hardswish::value(x);
  }
  template <typename T>
  CONVNORMPOOL_HOST_DEVICE T derivative(T x) const {
    return activations::Hardswish::derivative(x);
  }
};

#define CONVNORMPOOL_ACTIVATION_CASES(function)     \
  switch (kind) {                                   \
    case Activation::kIdentity:                     \
      return activations::Identity::function(x);    \
    case Activation::kRelu:                         \
      return activations::Relu::function(x);        \
    case Activation::kRelu6:                        \
      return activations::Relu6::function(x);       \
    case Activation::kLeakyRelu:                    \
      return activations::LeakyRelu::function(x);   \
    case Activation::kElu:                          \
      return activations::Elu::function(x);         \
    case Activation::kSilu:                         \
      return activations::Silu::function(x);        \
    case Activation::kGelu:                         \
      return activations::Gelu::function(x);        \
    case Activation::kGeluTanh:                     \
      return activations::GeluTanh::function(x);    \
    case Activation::kMish:                         \
      return activations::Mish::function(x);        \
    case Activation::kHardsigmoid:                  \
      return activations::Hardsigmoid::function(x); \
    case Activation::kHardswish:                    \
      break;                                        \
  }                                                 \
  return activations::Hardswish::function(x)

struct ActivationFn {
  Activation kind;

  template <typename T>
  CONVNORMPOOL_HOST_DEVICE T value(T x) const {
    CONVNORMPOOL_ACTIVATION_CASES(value);
  }
  template <typename T>
  CONVNORMPOOL_HOST_DEVICE T derivative(T x) const {
    CONVNORMPOOL_ACTIVATION_CASES(derivative);
  }
};

#undef CONVNORMPOOL_ACTIVATION_CASES

// Calls f with the functor for an activation's code: HardswishFn or ActivationFn. The code must be
// valid (activation_name(code) is not null); f returns one type for both.
template <typename F>
auto dispatch_activation(int64_t code, F&& f) {
  if (code == static_cast<int64_t>(Activation::kHardswish)) return f(HardswishFn{});
  return f(ActivationFn{static_cast<Activation>(code)});
}

}  // namespace convnormpool
