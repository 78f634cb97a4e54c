// The backward window kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_backward_sums.cuh"
#include "cuda/conv_activation_moments_backward_window.cuh"
#include "backward_check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::fail;
using check::Shape;

constexpr WindowOperand kOperand = WindowOperand::OPERAND;
using Check = check::Backward<kOperand>;
using Element = Check::Element;
using Data = Check::Data;
using Gradients = Check::Gradients;

void test_sum(std::mt19937_64& random) {
  const int32_t K = 21;
  std::vector<std::vector<float>> partials;
  std::vector<std::vector<Element>> outs, expected;
  std::vector<BackwardSum> sums;
  for (const auto& [count, length] : {std::pair{37, 26}, {150, 1}}) {
    partials.push_back(
        check::rounded<float>(check::random_values(random, size_t(2 * count * 16 * length), 1.0)));
    outs.emplace_back(size_t(K * length), Element(NAN));
    expected.push_back(Check::sum_of(partials.back(), count, K, length));
    sums.push_back(backward_sum(partials.back().data(), count, K, length, outs.back().data()));
  }
  if (sums[0].elements == sums[1].elements) fail("one kind of block only");
  emulate(dim3(sums[0].blocks + sums[1].blocks), dim3(kBackwardSumThreads), 0,
          sum_backward_kernel<Element>, sums[0], sums[1], K);
  for (size_t j = 0; j < outs.size(); ++j) {
    for (size_t i = 0; i < outs[j].size(); ++i) {
      // Sums in double differ by their order, if at all, in the last bit of what is stored.
      const float sum = float(expected[j][i]);
      const double allowed = 2 * Check::kStoreUnit * std::fabs(sum) + 0x1p-23;
      if (!(std::fabs(float(outs[j][i]) - sum) <= allowed)) fail("the sum over blocks");
    }
  }
  puts("ok   sums over blocks");
}

template <class Config>
Gradients launch(const Shape& s, const Data& d, int slab_planes, unsigned blocks, Activation kind) {
  const auto narrow = [](int64_t extent) { return int32_t(extent); };
  BackwardParameters p{};
  p.x = d.x.data(), p.w = d.w.data(), p.bias = d.bias.empty() ? nullptr : d.bias.data();
  p.mean = d.mean.data(), p.grad_mean = d.grad_mean.data(), p.grad_m2 = d.grad_m2.data();
  p.N = narrow(s.N);
  p.geometry =
      backward_geometry(narrow(s.D), narrow(s.H), narrow(s.W), narrow(s.K), Config::T, Config::R,
                        Config::S, narrow(s.pad_d), narrow(s.pad_h), narrow(s.pad_w), slab_planes,
                        Config::kRowWarps, Config::kInputGradient);
  blocks = std::min(blocks, unsigned(s.N * backward_pieces(p.geometry)));
  const int tiles = int(s.K + 15) / 16;
  Gradients g;
  std::vector<float> sum,
      filter(size_t(tiles * int(blocks) * Config::kFilterWarps * 16 * Config::kTaps), NAN);
  std::vector<float> bias(size_t(tiles * int(blocks) * Config::kRowWarps * 16), NAN);
  p.filter_partial = filter.data(), p.bias_partial = bias.data();
  typename Config::ActivationType activation{};
  if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
    activation.kind = kind;
  }
  const size_t shared = size_t(Config::shared_bytes(p.geometry.slab_planes));
  if constexpr (Config::kInputGradient) {
    g.dx.assign(d.x.size(), Element(NAN));
    sum.assign(d.x.size(), NAN);
    p.dx = g.dx.data(), p.dx_sum = sum.data();
    for (int tile = 0; tile < tiles; ++tile) {
      p.first_tile = tile, p.add_to_sum = tile > 0, p.write_dx = tile + 1 == tiles;
      emulate(dim3(blocks), dim3(Config::kThreads), shared, backward_window_kernel<Config>, p,
              activation);
    }
  } else {
    emulate(dim3(blocks, unsigned(tiles)), dim3(Config::kThreads), shared,
            backward_window_kernel<Config>, p, activation);
  }
  if constexpr (Config::kFilterGradient) {
    const int32_t count = int32_t(blocks);
    g.dw = Check::sum_of(filter, count * Config::kFilterWarps, p.geometry.K, Config::kTaps);
    g.db = Check::sum_of(bias, count * Config::kRowWarps, p.geometry.K, 1);
  }
  return g;
}

// The kernel of the filter's gradient, or of the input's.
template <int T, int R, int S, int C, bool Input, class Activation_>
using Kernel = BackwardConfig<T, R, S, C, kOperand, Activation_, R - 1, Input ? 0 : R - 2, 1>;

template <int T, int R, int S, int C, class Activation_ = HardswishFn>
void test(Shape s, std::mt19937_64& random, const char* note = "", int slab_planes = 1 << 20,
          Activation kind = Activation::kHardswish, Data d = {}) {
  s.C = C, s.T = T, s.R = R, s.S = S;
  if (d.x.empty()) {
    d = Check::make_data(s, random, kind, kOperand == WindowOperand::kFloat16 ? 1 : 1e-7);
  }
  const Check::Expected e = Check::reference(s, d, kind);
  const std::string name = check::name_of(s, note);
  const auto filter = launch<Kernel<T, R, S, C, false, Activation_>>(s, d, slab_planes, 2, kind);
  Check::compare(name + " dw", filter.dw, e.dw, e.dw_square, e.dw_slack);
  Check::compare(name + " db", filter.db, e.db, e.db_square, e.db_slack);
  const auto input = launch<Kernel<T, R, S, C, true, Activation_>>(s, d, slab_planes, 5, kind);
  Check::compare(name + " dx", input.dx, e.dx, e.dx_square, e.dx_slack);
}

template <bool Input>
using Small = Kernel<3, 3, 3, 1, Input, HardswishFn>;

constexpr Activation kHardswish = Activation::kHardswish;

// A sample that is not finite, whose mean then is not either, makes no number that looks like one,
// and leaves the input's gradient of the others alone.
void test_not_finite(std::mt19937_64& random) {
  const Shape s{3, 1, 3, 3, 9, 16, 3, 3, 3, 1, 0, 1};
  const Data clean = Check::make_data(s, random, kHardswish);
  const auto expected = launch<Small<true>>(s, clean, 1 << 20, 2, kHardswish);
  const size_t sample = clean.x.size() / 3;
  for (const float bad : {NAN, -INFINITY}) {
    Data d = clean;
    d.x[sample * 3 / 2] = Element(bad);
    for (size_t k = 0; k < size_t(s.K); ++k) d.mean[size_t(s.K) + k] = NAN;
    auto g = launch<Small<true>>(s, d, 1 << 20, 1, kHardswish);
    for (size_t i = 0; i < g.dx.size(); ++i) {
      if (i / sample == 1 ? std::isfinite(float(g.dx[i]))
                          : float(g.dx[i]) != float(expected.dx[i])) {
        fail("dx of a sample that is not finite, or of another");
      }
    }
    g = launch<Small<false>>(s, d, 1 << 20, 2, kHardswish);
    for (const Element v : g.dw) {
      if (std::isfinite(float(v))) fail("dw is finite where the input is not");
    }
  }
  // Of one channel alone.
  const Check::Expected e = Check::reference(s, clean, kHardswish);
  Data d = clean;
  d.grad_mean[0] = INFINITY;
  auto g = launch<Small<false>>(s, d, 1 << 20, 2, kHardswish);
  for (size_t i = 0; i < 27; ++i) {
    if (std::isfinite(float(g.dw[i]))) fail("dw of a channel that is not finite");
    g.dw[i] = Element(float(e.dw[i]));
  }
  Check::compare("one channel is not finite", g.dw, e.dw, e.dw_square, e.dw_slack);
  puts("ok   input that is not finite");
}

// Scales of x, w and the gradients: of everything, of samples against each other, and of planes.
void test_range(std::mt19937_64& random) {
  const Shape s{4, 1, 5, 3, 9, 16, 3, 3, 3, 1, 0, 1};
  const auto scaled = [&](const char* note, const auto& scale_x, const auto& scale_gradient) {
    Data d = Check::make_data(s, random, kHardswish, 1.0);
    const size_t sample = d.x.size() / size_t(s.N);
    for (size_t i = 0; i < d.x.size(); ++i) {
      d.x[i] = Element(float(d.x[i]) * scale_x(i / sample, i % sample / size_t(s.H * s.W)));
    }
    for (size_t i = 0; i < d.mean.size(); ++i) {
      d.mean[i] *= scale_x(i / size_t(s.K), size_t(0));
      const float factor = scale_gradient(i / size_t(s.K));
      d.grad_mean[i] *= factor, d.grad_m2[i] *= factor;
    }
    test<3, 3, 3, 1>(s, random, note, 1 << 20, kHardswish, d);
  };
  const auto one = [](auto...) { return 1.0f; };
  scaled("tiny gradients", one, [](size_t) { return 1e-25f; });
  scaled("falling gradients", one, [](size_t n) { return std::ldexp(1.0f, -30 * int(n)); });
  scaled(
      "growing samples", [](size_t n, size_t) { return std::ldexp(1.0f, 8 * int(n) - 12); },
      [](size_t n) { return std::ldexp(1.0f, -8 * int(n)); });
  scaled("growing planes", [](size_t, size_t d) { return std::ldexp(1.0f, 3 * int(d) - 12); }, one);
}

void test_bias(std::mt19937_64& random) {
  const Shape s{2, 1, 3, 3, 9, 16, 3, 3, 3, 0, 1, 1};
  for (const float bias : {1000.0f, -30.0f, 3.0f}) {
    Data d = Check::make_data(s, random, kHardswish);
    for (auto& b : d.bias) b = Element(bias);
    for (auto& m : d.mean) m = bias < 0 ? 0.0f : bias;
    test<3, 3, 3, 1>(s, random, "one bias", 1 << 20, kHardswish, d);
  }
}

void test_activations(std::mt19937_64& random) {
  const Shape s{1, 0, 3, 3, 17, 16, 0, 0, 0, 1, 1, 1};
  for (const Activation kind : {Activation::kIdentity, Activation::kGelu, Activation::kRelu}) {
    test<3, 3, 3, 3, ActivationFn>(s, random, activation_name(int64_t(kind)), 1 << 20, kind);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(20240611);
  //                         N  C  D  H  W   K  T  R  S  padding
  test<4, 4, 4, 3>({2, 0, 5, 4, 29, 16, 0, 0, 0}, random);
  test<4, 4, 4, 3>({1, 0, 4, 4, 31, 24, 0, 0, 0, 3, 3, 3}, random, "slabs", 4);
  test<4, 4, 4, 3>({1, 0, 4, 4, 64, 7, 0, 0, 0, 1, 0, 2}, random, "slabs", 3);
  test<4, 4, 4, 3>({1, 0, 4, 4, 5, 1, 0, 0, 0}, random);
  test<3, 3, 3, 3>({1, 0, 3, 4, 33, 7, 0, 0, 0, 1, 1, 1}, random);
  test<3, 3, 3, 1>({3, 0, 2, 3, 5, 40, 0, 0, 0, 2, 2, 2}, random);
  test_sum(random);
  test_not_finite(random);
  if (kOperand == WindowOperand::kFloat16) test_bias(random);
  if (kOperand == WindowOperand::kSplit) test_range(random);
  if (kOperand == WindowOperand::kBFloat16) test_activations(random);
  return 0;
}
