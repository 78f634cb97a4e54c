// Data, the float64 gradients and comparisons for the backward window kernel's programs: the
// emulation and a benchmark on a device.
#pragma once

#include <cstring>
#include <type_traits>

#include "check.h"
#include "cuda/conv_activation_moments_window_operands.cuh"

namespace check {

using convnormpool::WindowOperand;
namespace activations = convnormpool::activations;

template <WindowOperand kOperand>
struct Backward {
  using Element = std::conditional_t<
      kOperand == WindowOperand::kFloat16, __half,
      std::conditional_t<kOperand == WindowOperand::kBFloat16, __nv_bfloat16, float>>;

  // Unit errors: of dy as an operand, relative to itself; of sums, y's among them, relative to the
  // sum of absolute products; and of a result as it is stored.
  static constexpr double kOperandUnit = kOperand == WindowOperand::kSplit      ? 0x1p-22
                                         : kOperand == WindowOperand::kBFloat16 ? 0x1p-9
                                                                                : 0x1p-12;
  static constexpr double kSumUnit = kOperand == WindowOperand::kSplit ? 2e-7 : 5e-7;
  static constexpr double kStoreUnit = kOperand == WindowOperand::kFloat16    ? 0x1p-11
                                       : kOperand == WindowOperand::kBFloat16 ? 0x1p-8
                                                                              : 0x1p-23;

  struct Data {
    std::vector<Element> x, w, bias;
    std::vector<float> mean, grad_mean, grad_m2;
  };

  struct Expected {
    std::vector<double> dx, dw, db;
    // Of each result: the sum of squared products, and what errors of y and of the sum change.
    std::vector<double> dx_square, dw_square, db_square, dx_slack, dw_slack, db_slack;
  };

  struct Gradients {
    std::vector<Element> dx, dw, db;
  };

  // What the products take of an element.
  static double operand(Element x) {
    if constexpr (kOperand == WindowOperand::kTf32) {
      // Rounded to tf32's 11 bits.
      float f = float(x);
      if (!std::isfinite(f)) return double(f);
      uint32_t bits;
      memcpy(&bits, &f, sizeof bits);
      bits = (bits + 0xFFFu + (bits >> 13 & 1)) & 0xFFFFE000u;
      memcpy(&f, &bits, sizeof f);
      return double(f);
    } else {
      return double(float(x));
    }
  }

  static std::vector<double> operands(const Element* first, int64_t count) {
    std::vector<double> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(operand(first[i]));
    return out;
  }

  // y, and the sum of absolute products, of one channel of one sample.
  static void outputs_of(const Shape& s, const Data& d, int64_t n, int64_t k,
                         std::vector<double>& y, std::vector<double>& size) {
    const int64_t inputs = s.C * s.D * s.H * s.W, taps = s.C * s.T * s.R * s.S;
    const auto x = operands(d.x.data() + n * inputs, inputs);
    const auto w = operands(d.w.data() + k * taps, taps);
    const double b = d.bias.empty() ? 0.0 : double(float(d.bias[size_t(k)]));
    y.assign(size_t(s.positions()), b);
    size.assign(y.size(), std::fabs(b));
    convolve(s, x.data(), w.data(), y.data(), size.data());
  }

  // Gradients of the moments, and the mean that belongs to the data.
  static Data make_data(const Shape& s, std::mt19937_64& random, Activation kind,
                        double scale = 1e-7) {
    const double fan_in = double(s.C * s.T * s.R * s.S);
    Data d;
    d.x = rounded<Element>(random_values(random, size_t(s.N * s.C * s.D * s.H * s.W), 3.0));
    d.w = rounded<Element>(
        random_values(random, size_t(s.K * s.C * s.T * s.R * s.S), 1.0 / std::sqrt(fan_in)));
    if (s.K != 7) d.bias = rounded<Element>(random_values(random, size_t(s.K), 1.0));
    const size_t channels = size_t(s.N * s.K);
    d.grad_mean = rounded<float>(random_values(random, channels, scale));
    d.grad_m2 = rounded<float>(random_values(random, channels, scale / double(s.positions())));
    for (int64_t i = 0; i < s.N * s.K; ++i) {
      std::vector<double> y, size;
      outputs_of(s, d, i / s.K, i % s.K, y, size);
      double sum = 0;
      for (const double v : y) sum += activate(kind, v);
      d.mean.push_back(float(sum / double(y.size())));
    }
    return d;
  }

  // M2 of the float64 outputs, as the forward would give it.
  static std::vector<float> m2_of(const Shape& s, const Data& d, Activation kind) {
    std::vector<float> m2;
    for (int64_t i = 0; i < s.N * s.K; ++i) {
      std::vector<double> y, size;
      outputs_of(s, d, i / s.K, i % s.K, y, size);
      double sum = 0;
      for (const double v : y) {
        const double difference = activate(kind, v) - double(d.mean[size_t(i)]);
        sum += difference * difference;
      }
      m2.push_back(float(sum));
    }
    return m2;
  }

  // What sum_backward_kernel does, whose blocks of many threads would take most of the time.
  static std::vector<Element> sum_of(const std::vector<float>& partial, int64_t count, int64_t K,
                                     int64_t length) {
    std::vector<Element> out;
    for (int64_t i = 0; i < K * length; ++i) {
      const int64_t k = i / length;
      double sum = 0;
      for (int64_t j = 0; j < count; ++j) {
        sum += double(partial[size_t(((k / 16 * count + j) * 16 + k % 16) * length + i % length)]);
      }
      out.push_back(Element(float(sum)));
    }
    return out;
  }

  // Calls f(input index, tap index, output position) for every product of one sample.
  template <class F>
  static void for_products(const Shape& s, const F& f) {
    for (int64_t tap = 0; tap < s.C * s.T * s.R * s.S; ++tap) {
      const int64_t kw = tap % s.S - s.pad_w, kh = tap / s.S % s.R - s.pad_h;
      const int64_t kd = tap / (s.S * s.R) % s.T - s.pad_d, c = tap / (s.S * s.R * s.T);
      for (int64_t row = 0; row < s.Z() * s.P(); ++row) {
        const int64_t z = row / s.P() + kd, h = row % s.P() + kh;
        if (z < 0 || z >= s.D || h < 0 || h >= s.H) continue;
        for (int64_t q = 0; q < s.Q(); ++q) {
          const int64_t w = q + kw;
          if (w >= 0 && w < s.W) f(((c * s.D + z) * s.H + h) * s.W + w, tap, row * s.Q() + q);
        }
      }
    }
  }

  static Expected reference(const Shape& s, const Data& d, Activation kind) {
    Expected e;
    const int64_t inputs = s.C * s.D * s.H * s.W, taps = s.C * s.T * s.R * s.S;
    for (auto* v : {&e.dx, &e.dx_square, &e.dx_slack}) v->assign(size_t(s.N * inputs), 0);
    for (auto* v : {&e.dw, &e.dw_square, &e.dw_slack}) v->assign(size_t(s.K * taps), 0);
    for (auto* v : {&e.db, &e.db_square, &e.db_slack}) v->assign(size_t(s.K), 0);
    for (int64_t i = 0; i < s.N * s.K; ++i) {
      const int64_t n = i / s.K, k = i % s.K;
      std::vector<double> y, size, dy, unsure;
      outputs_of(s, d, n, k, y, size);
      const double alpha = double(d.grad_mean[size_t(i)]) / double(s.positions());
      const double slope = 2 * double(d.grad_m2[size_t(i)]), mean = double(d.mean[size_t(i)]);
      for (size_t j = 0; j < y.size(); ++j) {
        double value = 0, derivative = 0;
        activations::visit(kind, [&](auto a) {
          value = a.value(y[j]);
          derivative = a.derivative(y[j]);
        });
        dy.push_back((alpha + slope * (value - mean)) * derivative);
        // Every activation's derivative is at most 1.2, and so is its own change with y, but at
        // kinks, where a value of y in doubt changes the derivative by up to 1.
        const double doubt = kSumUnit * size[j];
        const bool kink = std::fabs(std::fabs(y[j]) - 3) < doubt || std::fabs(y[j]) < doubt;
        const double bound =
            std::fabs(alpha) + std::fabs(slope) * (std::fabs(value - mean) + doubt);
        unsure.push_back((std::fabs(slope) * 1.5 + bound) * doubt + (kink ? bound : 0) +
                         1e-6 * bound);
        e.db[size_t(k)] += dy[j];
        e.db_slack[size_t(k)] += unsure[j];
      }
      const Element* const x = d.x.data() + n * inputs;
      const Element* const w = d.w.data() + k * taps;
      for_products(s, [&](int64_t input, int64_t tap, int64_t position) {
        const double value = operand(x[input]), weight = operand(w[tap]);
        const double g = dy[size_t(position)], slack = unsure[size_t(position)];
        const size_t to = size_t(n * inputs + input), filter = size_t(k * taps + tap);
        e.dw[filter] += g * value;
        e.dw_square[filter] += g * value * g * value;
        e.dw_slack[filter] += (slack + kSumUnit * std::fabs(g)) * std::fabs(value);
        e.dx[to] += g * weight;
        e.dx_square[to] += g * weight * g * weight;
        e.dx_slack[to] += (slack + kSumUnit * std::fabs(g)) * std::fabs(weight);
      });
    }
    return e;
  }

  // The largest error in units of what is allowed, and the norm of all against that of the results.
  static void compare(const std::string& name, const std::vector<Element>& got,
                      const std::vector<double>& expected, const std::vector<double>& square,
                      const std::vector<double>& slack) {
    double worst = 0, error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double difference = std::fabs(double(float(got[i])) - expected[i]);
      // Rounding errors of operands are independent and uniform: 4 is seven times their deviation.
      const double allowed = 4 * kOperandUnit * std::sqrt(square[i]) + slack[i] +
                             kStoreUnit * std::fabs(expected[i]) +
                             (kOperand == WindowOperand::kFloat16 ? 0x1p-24 : 1e-44);
      const double ratio = difference / allowed;
      worst = std::isfinite(ratio) ? std::fmax(worst, ratio) : INFINITY;
      error += difference * difference, norm += expected[i] * expected[i];
    }
    printf("%s %s: %.3f of what is allowed, relative error %.2g\n", worst <= 1 ? "ok  " : "FAIL",
           name.c_str(), worst, std::sqrt(error / (norm + 1e-300)));
    fflush(stdout);
    if (!(worst <= 1)) exit(1);
  }
};

}  // namespace check
