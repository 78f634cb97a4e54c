// The Hopper kernel of the filter's gradient on the host, against float64. Compiled once for each
// operand kind: -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit. The kinds share the shapes out
// among themselves; with -DEVERY_SHAPE each runs all of them, which takes minutes. The emulated
// instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

#include "cuda/conv_activation_moments_backward_wgmma_filter.cuh"
#include "backward_check.h"
#include "wgmma_check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::fail;
using check::kOperand;
using check::Shape;
using check::takes;

using Check = check::Backward<WindowOperand::OPERAND>;
using Element = Check::Element;
using Data = Check::Data;

constexpr auto kFree = WgmmaOverlap::kFree;
constexpr auto kOrdered = WgmmaOverlap::kOrdered;
constexpr Activation kHardswish = Activation::kHardswish;

struct Sums {
  std::vector<Element> dw, db;
};

template <class Config, class Act>
Sums launch(const Shape& s, const Data& d, unsigned blocks, Activation kind) {
  WgmmaFilterParams p{};
  static_cast<WgmmaBackwardParams&>(p) = wgmma_backward_params<Config>(check::problem_of(s));
  const check::DeviceCopy x(d.x);
  const std::vector<float> m2 = Check::m2_of(s, d, kind);
  p.x = x.data(), p.w = d.w.data(), p.b = d.bias.empty() ? nullptr : d.bias.data();
  p.mean = d.mean.data(), p.m2 = m2.data();
  p.grad_mean = d.grad_mean.data(), p.grad_m2 = d.grad_m2.data();
  blocks = std::min(blocks, unsigned(p.items));
  wgmma_deal(p, int(blocks));
  const int64_t tiles = (s.K + 15) / 16, count = int64_t(blocks) * Config::kWarpgroups;
  std::vector<float> filter(size_t(tiles * count * 16 * Config::kTaps), NAN);
  std::vector<float> bias(size_t(tiles * count * 4 * 16), NAN);
  p.filter_partial = filter.data(), p.bias_partial = bias.data();
  TensorMap map = check::tensor_map(s, p.x, Config::kElementBytes);
  wgmma_box<Config>(p, false, map.box);
  Act act{};
  if constexpr (std::is_same_v<Act, ActivationFn>) act.kind = kind;
  emulate(dim3(blocks, unsigned(tiles)), dim3(Config::kThreads), size_t(Config::kSharedBytes),
          conv_activation_moments_backward_wgmma_filter<Config, Act>, p, map, act);
  return {Check::sum_of(filter, count, s.K, Config::kTaps), Check::sum_of(bias, count * 4, s.K, 1)};
}

template <int C, int T, int R, int S, WgmmaOverlap kOverlap = kOrdered, int kWarpgroups = 2>
using Filter = WgmmaFilterConfig<kOperand, C, T, R, S, kOverlap, kWarpgroups, 3>;
using Large = Filter<3, 4, 4, 4>;
using Small = Filter<1, 3, 3, 3, kOrdered, 1>;

template <class Config, class Act = HardswishFn>
void test(Shape s, std::mt19937_64& random, unsigned blocks, const char* note,
          Activation kind = kHardswish, Data d = {}) {
  s.C = Config::kC, s.T = Config::kT, s.R = Config::kR, s.S = Config::kS;
  if (d.x.empty()) {
    d = Check::make_data(s, random, kind, kOperand == WgmmaOperand::kFloat16 ? 1 : 1e-7);
  }
  const Check::Expected e = Check::reference(s, d, kind);
  const std::string name = check::name_of(s, note);
  const Sums g = launch<Config, Act>(s, d, blocks, kind);
  Check::compare(name + " dw", g.dw, e.dw, e.dw_square, e.dw_slack);
  Check::compare(name + " db", g.db, e.db, e.db_square, e.db_slack);
}

// Scales of the gradients and of x: of everything, of samples against each other, and of planes.
void test_range(std::mt19937_64& random) {
  constexpr bool kHalf = kOperand == WgmmaOperand::kFloat16;
  constexpr bool kSplit = kOperand == WgmmaOperand::kSplit;
  const Shape s{3, 1, 4, 5, 16, 16, 3, 3, 3, 1, 0, 1};
  const auto scaled = [&](const char* note, const auto& scale_x, const auto& scale_gradient) {
    Data d = Check::make_data(s, random, kHardswish, 1.0);
    const size_t sample = d.x.size() / size_t(s.N);
    for (size_t i = 0; i < d.x.size(); ++i) {
      d.x[i] = Element(float(d.x[i]) * scale_x(i / sample, i % sample / size_t(s.H * s.W)));
    }
    for (size_t i = 0; i < d.mean.size(); ++i) {
      std::vector<double> y, size;
      Check::outputs_of(s, d, int64_t(i) / s.K, int64_t(i) % s.K, y, size);
      double sum = 0;
      for (const double v : y) sum += check::activate(kHardswish, v);
      d.mean[i] = float(sum / double(y.size()));
      const float factor = scale_gradient(i / size_t(s.K));
      d.grad_mean[i] *= factor, d.grad_m2[i] *= factor;
    }
    test<Small>(s, random, 1, note, kHardswish, d);
  };
  const auto one = [](auto...) { return 1.0f; };
  if (!kHalf && !kSplit) {
    scaled("tiny gradients", one, [](size_t) { return 1e-25f; });
    scaled("huge gradients", one, [](size_t) { return 1e20f; });
  }
  if (!kSplit) {
    scaled("no gradients", one, [](size_t) { return 0.0f; });
    scaled("some without gradients", one, [](size_t n) { return n % 2 ? 1.0f : 0.0f; });
    scaled("falling gradients", one, [](size_t n) { return std::ldexp(1.0f, -10 * int(n)); });
    scaled("growing gradients", one, [](size_t n) { return std::ldexp(1.0f, 4 * int(n) - 12); });
  }
  if (kHalf) return;
  scaled(
      "growing samples", [](size_t n, size_t) { return std::ldexp(1.0f, 8 * int(n) - 12); },
      [](size_t n) { return std::ldexp(1.0f, -8 * int(n)); });
  scaled("growing planes", [](size_t, size_t d) { return std::ldexp(1.0f, 6 * int(d) - 12); }, one);
  scaled("falling planes", [](size_t, size_t d) { return std::ldexp(1.0f, 12 - 6 * int(d)); }, one);
  scaled("planes of zeros", [](size_t n, size_t d) { return d < 3 || n == 1 ? 0.f : 1.f; }, one);
}

// A sample that is not finite, whose mean then is not either, makes no number that looks like one;
// a channel that is not leaves the others alone.
void test_not_finite(std::mt19937_64& random) {
  const Shape s{3, 1, 3, 3, 16, 16, 3, 3, 3, 1, 0, 1};
  const Data clean = Check::make_data(s, random, kHardswish);
  for (const float bad : {NAN, -INFINITY}) {
    Data d = clean;
    d.x[d.x.size() / 2] = Element(bad);
    for (size_t k = 0; k < size_t(s.K); ++k) d.mean[size_t(s.K) + k] = NAN;
    const Sums g = launch<Small, HardswishFn>(s, d, 2, kHardswish);
    for (const Element v : g.dw) {
      if (std::isfinite(float(v))) fail("dw is finite where the input is not");
    }
  }
  const Check::Expected e = Check::reference(s, clean, kHardswish);
  Data d = clean;
  d.grad_mean[0] = INFINITY;
  Sums g = launch<Small, HardswishFn>(s, d, 2, kHardswish);
  for (size_t i = 0; i < 27; ++i) {
    if (std::isfinite(float(g.dw[i]))) fail("dw of a channel that is not finite");
    g.dw[i] = Element(float(e.dw[i]));
  }
  Check::compare("one channel is not finite", g.dw, e.dw, e.dw_square, e.dw_slack);
  puts("ok   input that is not finite");
}

}  // namespace

int main() {
  std::mt19937_64 random(20240611);
  //    N  C  D  H  W   K  T  R  S  padding
  if constexpr (takes(WgmmaOperand::kFloat16)) {
    test<Large>({2, 0, 6, 7, 32, 16, 0, 0, 0}, random, 1, "");
  }
  if constexpr (takes(WgmmaOperand::kTf32)) {
    test<Large>({1, 0, 4, 5, 24, 1, 0, 0, 0, 1, 3, 1}, random, 2, "");
  }
  if constexpr (takes(WgmmaOperand::kBFloat16)) {
    test<Large>({1, 0, 4, 4, 40, 24, 0, 0, 0, 2, 1, 3}, random, 3, "column tiles");
    for (const Activation kind : {Activation::kIdentity, Activation::kGelu, Activation::kRelu}) {
      test<Small, ActivationFn>({1, 0, 3, 4, 16, 16, 0, 0, 0, 1, 1, 1}, random, 1,
                                activation_name(int64_t(kind)), kind);
    }
  }
  if constexpr (takes(WgmmaOperand::kSplit)) {
    test<Large>({1, 0, 4, 6, 16, 7, 0, 0, 0}, random, 1, "");
    test<Filter<3, 3, 3, 3, kFree>>({1, 0, 4, 5, 24, 16, 0, 0, 0, 1, 1, 1}, random, 2, "free");
  }
  test<Small>({5, 0, 2, 3, 8, 20, 0, 0, 0, 2, 2, 2}, random, 2, "few planes");
  if (kOperand != WgmmaOperand::kBFloat16) test_range(random);
  test_not_finite(random);
  return 0;
}
