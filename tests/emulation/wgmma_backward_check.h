// Data that the programs of the Hopper kernels of the gradients have in common.
#pragma once

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "backward_check.h"

namespace check {

// Scales of x and the gradients: of everything, of samples against each other, and of planes. Calls
// f(note, data) for each.
template <class Check, class F>
void for_ranges(const Shape& s, std::mt19937_64& random, const F& f) {
  using Element = typename Check::Element;
  const auto scaled = [&](const char* note, const auto& scale_x, const auto& scale_gradient) {
    auto d = Check::make_data(s, random, convnormpool::Activation::kHardswish, 1.0);
    const size_t sample = d.x.size() / size_t(s.N);
    for (size_t i = 0; i < d.x.size(); ++i) {
      d.x[i] = Element(float(d.x[i]) * scale_x(i / sample, i % sample / size_t(s.H * s.W)));
    }
    for (size_t i = 0; i < d.mean.size(); ++i) {
      d.mean[i] *= scale_x(i / size_t(s.K), size_t(0));
      const float factor = scale_gradient(i / size_t(s.K));
      d.grad_mean[i] *= factor, d.grad_m2[i] *= factor;
    }
    f(note, d);
  };
  const auto one = [](auto...) { return 1.0f; };
  scaled("no gradients", one, [](size_t) { return 0.0f; });
  scaled("falling gradients", one, [](size_t n) { return std::ldexp(1.0f, -8 * int(n)); });
  if (!std::is_same_v<Element, float>) return;
  scaled("tiny gradients", one, [](size_t) { return 1e-25f; });
  scaled("very different gradients", one, [](size_t n) { return n % 2 ? 1e-20f : 1e12f; });
  scaled(
      "growing samples", [](size_t n, size_t) { return std::ldexp(1.0f, 8 * int(n) - 12); },
      [](size_t n) { return std::ldexp(1.0f, -8 * int(n)); });
  scaled("growing planes", [](size_t, size_t d) { return std::ldexp(1.0f, 6 * int(d) - 12); }, one);
  scaled("falling planes", [](size_t, size_t d) { return std::ldexp(1.0f, 12 - 6 * int(d)); }, one);
  scaled("planes of zeros", [](size_t n, size_t d) { return d < 3 || n == 1 ? 0.f : 1.f; }, one);
}

// All outputs of a channel alike: M2 says nothing about how large dy can be.
template <class Check>
typename Check::Data outputs_alike(const Shape& s, std::mt19937_64& random) {
  using Element = typename Check::Element;
  constexpr auto kHardswish = convnormpool::Activation::kHardswish;
  auto d = Check::make_data(s, random, kHardswish, 1.0);
  for (auto& w : d.w) w = Element(0.0f);
  for (size_t i = 0; i < d.bias.size(); ++i) d.bias[i] = Element(float(i) - 8.5f);
  for (size_t i = 0; i < d.mean.size(); ++i) {
    d.mean[i] = float(activate(kHardswish, double(i % size_t(s.K)) - 8.5));
    d.grad_mean[i] = 0;
  }
  return d;
}

}  // namespace check
