// Inputs, the float64 convolution and its moments, and comparisons for the emulation programs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "activation.h"

namespace check {

using convnormpool::Activation;

// One convolution of stride and dilation 1.
struct Shape {
  int64_t N, C, D, H, W, K, T, R, S;
  int64_t pad_d = 0, pad_h = 0, pad_w = 0;
  int64_t Z() const { return D + 2 * pad_d - T + 1; }
  int64_t P() const { return H + 2 * pad_h - R + 1; }
  int64_t Q() const { return W + 2 * pad_w - S + 1; }
  int64_t positions() const { return Z() * P() * Q(); }
};

inline void fail(const char* what) {
  printf("FAIL %s\n", what);
  exit(1);
}

inline std::string name_of(const Shape& s, const char* note) {
  char text[200];
  snprintf(text, sizeof text, "N%d C%d D%d H%d W%d K%d k%dx%dx%d p%d,%d,%d %s", int(s.N), int(s.C),
           int(s.D), int(s.H), int(s.W), int(s.K), int(s.T), int(s.R), int(s.S), int(s.pad_d),
           int(s.pad_h), int(s.pad_w), note);
  return text;
}

inline double activate(Activation kind, double y) {
  double value = 0;
  convnormpool::activations::visit(kind, [&](auto a) { value = a.value(y); });
  return value;
}

struct ReferenceMoments {
  std::vector<double> mean, m2;   // (N, K)
  std::vector<double> magnitude;  // (N, K): largest sum of absolute products
};

// One channel of one sample: values and sums of absolute products, tap by tap over whole rows.
inline void convolve(const Shape& s, const double* x, const double* w, double* y,
                     double* absolute) {
  const int64_t Z = s.Z(), P = s.P(), Q = s.Q();
  for (int64_t tap = 0; tap < s.C * s.T * s.R * s.S; ++tap) {
    const int64_t j = tap % s.S - s.pad_w, i = tap / s.S % s.R - s.pad_h;
    const int64_t t = tap / (s.S * s.R) % s.T - s.pad_d, c = tap / (s.S * s.R * s.T);
    const int64_t first = j < 0 ? -j : 0, end = s.W - j < Q ? s.W - j : Q;
    for (int64_t row = 0; row < Z * P; ++row) {
      const int64_t d = row / P + t, h = row % P + i;
      if (d < 0 || d >= s.D || h < 0 || h >= s.H) continue;
      const double* from = x + ((c * s.D + d) * s.H + h) * s.W + j;
      for (int64_t q = first; q < end; ++q) {
        const double product = w[tap] * from[q];
        y[row * Q + q] += product;
        absolute[row * Q + q] += product < 0 ? -product : product;
      }
    }
  }
}

// x, w, bias are the values that the products are meant to take.
inline ReferenceMoments reference(const Shape& s, const std::vector<double>& x,
                                  const std::vector<double>& w, const std::vector<double>& bias,
                                  Activation kind) {
  ReferenceMoments r;
  for (int64_t n = 0; n < s.N; ++n) {
    for (int64_t k = 0; k < s.K; ++k) {
      const double b = bias.empty() ? 0.0 : bias[size_t(k)];
      std::vector<double> h(size_t(s.positions()), b), absolute(h.size(), std::fabs(b));
      convolve(s, x.data() + n * s.C * s.D * s.H * s.W, w.data() + k * s.C * s.T * s.R * s.S,
               h.data(), absolute.data());
      double largest = 0, total = 0, m2 = 0;
      for (const double v : absolute) largest = std::fmax(largest, v);
      for (double& v : h) total += v = activate(kind, v);
      const double mean = total / double(h.size());
      for (const double v : h) m2 += (v - mean) * (v - mean);
      r.mean.push_back(mean);
      r.m2.push_back(m2);
      r.magnitude.push_back(largest);
    }
  }
  return r;
}

// Fails the program unless each mean is within `tolerance` of the largest sum of absolute products,
// and each M2 within what such an error of every value can change.
inline void compare(const std::string& name, const Shape& s, const ReferenceMoments& r,
                    const std::vector<float>& mean, const std::vector<float>& m2,
                    double tolerance) {
  double worst_mean = 0, worst_m2 = 0;
  for (size_t i = 0; i < r.mean.size(); ++i) {
    const double unit = tolerance * r.magnitude[i];
    const double count = double(s.positions());
    const double m2_unit =
        2 * unit * std::sqrt(count * r.m2[i]) + count * unit * unit + 1e-6 * r.m2[i];
    if (std::isnan(r.m2[i])) {
      if (!std::isnan(m2[i]) && !std::isinf(m2[i])) worst_m2 = INFINITY;
      continue;
    }
    const double mean_error = std::fabs(mean[i] - r.mean[i]) / (unit + 1e-7 * std::fabs(r.mean[i]));
    const double m2_error = std::fabs(m2[i] - r.m2[i]) / m2_unit;
    worst_mean = std::isfinite(mean_error) ? std::fmax(worst_mean, mean_error) : INFINITY;
    if (r.m2[i] == 0 && m2[i] == 0) continue;
    worst_m2 = std::isfinite(m2_error) ? std::fmax(worst_m2, m2_error) : INFINITY;
  }
  const bool good = worst_mean <= 1 && worst_m2 <= 1;
  printf("%s %s: mean %.3f, m2 %.3f of what is allowed\n", good ? "ok  " : "FAIL", name.c_str(),
         worst_mean, worst_m2);
  fflush(stdout);
  if (!good) exit(1);
}

inline std::vector<double> random_values(std::mt19937_64& random, size_t count, double scale) {
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> v(count);
  for (double& x : v) x = normal(random);
  return v;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& v) {
  std::vector<T> out(v.size());
  for (size_t i = 0; i < v.size(); ++i) out[i] = T(float(v[i]));
  return out;
}

template <class T>
std::vector<double> widened(const std::vector<T>& v) {
  std::vector<double> out(v.size());
  for (size_t i = 0; i < v.size(); ++i) out[i] = double(float(v[i]));
  return out;
}

// The values to 11 bits, as many as tf32 and float16 have; a tie to the even one.
inline std::vector<double> to_11_bits(std::vector<double> v) {
  for (double& x : v) {
    int exponent = 0;
    const double mantissa = std::frexp(x, &exponent);
    x = std::ldexp(std::nearbyint(std::ldexp(mantissa, 11)), exponent - 11);
  }
  return v;
}

}  // namespace check
