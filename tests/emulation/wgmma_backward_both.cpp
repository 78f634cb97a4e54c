// The Hopper kernels of all gradients on the host, against float64. Compiled once for each operand
// kind: -DOPERAND=kTf32, kSplit, kFloat16 or kBFloat16. They share the shapes out among themselves;
// with -DEVERY_SHAPE each runs all of them, which takes minutes. The emulated instructions come
// before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

#include "cuda/conv_activation_moments_backward_wgmma_both.cuh"
#include "cuda/conv_activation_moments_backward_wgmma_both_split.cuh"
#include "wgmma_backward_check.h"
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

constexpr Activation kHardswish = Activation::kHardswish;

struct Gradients {
  std::vector<Element> dx, dw, db;
};

// The kernel of an operand's kind, and how many sums its blocks leave.
template <WgmmaOperand kKind, int C, int T, int R, int S>
struct Kernel {
  template <bool>
  using Config = WgmmaBothConfig<kKind, C, T, R, S>;
  static constexpr int kSums = Config<true>::kWarpgroups;
  template <class Act, bool>
  static constexpr auto of = conv_activation_moments_backward_wgmma_both<Config<true>, Act>;
};
template <int C, int T, int R, int S>
struct Kernel<WgmmaOperand::kSplit, C, T, R, S> {
  template <bool kWhole>
  using Config = WgmmaBothSplitConfig<C, T, R, S, kWhole>;
  static constexpr int kSums = Config<true>::kTiles;
  template <class Act, bool kWhole>
  static constexpr auto of = conv_activation_moments_backward_wgmma_both_split<Config<kWhole>, Act>;
};

template <class Kernel, class Act>
Gradients launch(const Shape& s, const Data& d, const std::vector<float>& m2, unsigned blocks,
                 const Act& act, int most_planes) {
  using Config = typename Kernel::template Config<true>;
  WgmmaBothParams p{};
  const Problem problem = check::problem_of(s);
  static_cast<WgmmaInputParams&>(p) = wgmma_input_params<Config>(problem, most_planes);
  const check::DeviceCopy x(d.x);
  p.x = x.data(), p.w = d.w.data(), p.b = d.bias.empty() ? nullptr : d.bias.data();
  p.mean = d.mean.data(), p.m2 = m2.data();
  p.grad_mean = d.grad_mean.data(), p.grad_m2 = d.grad_m2.data();
  TensorMap map = check::tensor_map(s, p.x, Config::kElementBytes);
  wgmma_input_box<Config>(map.box);
  // Guard zones around dx.
  constexpr size_t kGuard = 1024;
  const Element guard(12.5f);
  std::vector<Element> dx(d.x.size() + 2 * kGuard, guard);
  std::fill(dx.begin() + kGuard, dx.end() - kGuard, Element(NAN));
  std::vector<float> sum(d.x.size(), NAN);
  p.dx = dx.data() + kGuard;
  const int tiles = int(s.K + 15) / 16;
  if (tiles > 1) p.dx_sum = sum.data();
  blocks = std::min(blocks, unsigned(wgmma_input_blocks<Config>(p, 132)));
  const int64_t count = int64_t(blocks) * Kernel::kSums;
  std::vector<float> filter(size_t(tiles * count * 16 * Config::kTaps), NAN);
  std::vector<float> bias(size_t(tiles * count * 4 * 16), NAN);
  p.filter_partial = filter.data(), p.bias_partial = bias.data();
  for (int tile = 0; tile < tiles; ++tile) {
    p.first_tile = tile, p.add_to_sum = tile > 0, p.write_dx = tile + 1 == tiles;
    const auto run = [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      using Chosen = typename Kernel::template Config<kWhole>;
      emulate(dim3(blocks), dim3(Chosen::kThreads), wgmma_input_shared_bytes<Chosen>(p),
              Kernel::template of<Act, kWhole>, p, map, act);
    };
    if (p.segments * p.slabs == 1) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  }
  for (size_t i = 0; i < kGuard; ++i) {
    if (float(dx[i]) != 12.5f || float(dx[dx.size() - 1 - i]) != 12.5f) fail("a guard zone");
  }
  return {std::vector<Element>(dx.begin() + kGuard, dx.end() - kGuard),
          Check::sum_of(filter, count, s.K, Config::kTaps), Check::sum_of(bias, count * 4, s.K, 1)};
}

template <int T, int R, int S, int C, class Act = HardswishFn>
void test(Shape s, std::mt19937_64& random, const char* note = "", int most_planes = 16,
          Activation kind = kHardswish, Data d = {}) {
  using Choice = Kernel<kOperand, C, T, R, S>;
  s.C = C, s.T = T, s.R = R, s.S = S;
  const bool given = !d.x.empty();
  if (d.x.empty()) {
    d = Check::make_data(s, random, kind, kOperand == WgmmaOperand::kFloat16 ? 1 : 1e-7);
  }
  const Check::Expected e = Check::reference(s, d, kind);
  const auto m2 = Check::m2_of(s, d, kind);
  Act act{};
  if constexpr (std::is_same_v<Act, ActivationFn>) act.kind = kind;
  const std::string name = check::name_of(s, note);
  const auto compare = [&](const Gradients& g) {
    Check::compare(name + " dx", g.dx, e.dx, e.dx_square, e.dx_slack);
    Check::compare(name + " dw", g.dw, e.dw, e.dw_square, e.dw_slack);
    Check::compare(name + " db", g.db, e.db, e.db_square, e.db_slack);
  };
  const Gradients g = launch<Choice>(s, d, m2, 1, act, most_planes);
  compare(g);
  if (given) return;
  const Gradients again = launch<Choice>(s, d, m2, 3, act, most_planes);
  compare(again);
  if (memcmp(g.dx.data(), again.dx.data(), g.dx.size() * sizeof(Element)) != 0) {
    fail("another grid gives other bits of dx");
  }
}

void test_range(std::mt19937_64& random) {
  const Shape s{3, 1, 4, 3, 16, 16, 3, 3, 3, 1, 0, 1};
  check::for_ranges<Check>(s, random, [&](const char* note, const Data& d) {
    test<3, 3, 3, 1>(s, random, note, 16, kHardswish, d);
  });
}

void test_alike(std::mt19937_64& random) {
  const Shape s{2, 1, 3, 3, 16, 16, 3, 3, 3};
  test<3, 3, 3, 1>(s, random, "all outputs alike", 16, kHardswish,
                   check::outputs_alike<Check>(s, random));
}

// A sample that is not finite makes no number that looks like one, and leaves the others' dx alone;
// a channel that is not leaves the other channels alone.
void test_not_finite(std::mt19937_64& random) {
  using Choice = Kernel<kOperand, 1, 3, 3, 3>;
  const Shape s{3, 1, 3, 3, 8, 16, 3, 3, 3, 1, 0, 1};
  const Data clean = Check::make_data(s, random, kHardswish);
  const auto clean_m2 = Check::m2_of(s, clean, kHardswish);
  const auto expected = launch<Choice>(s, clean, clean_m2, 2, HardswishFn{}, 16);
  const size_t sample = clean.x.size() / 3;
  for (const float bad : {NAN, -INFINITY}) {
    Data d = clean;
    auto m2 = clean_m2;
    d.x[sample * 3 / 2] = Element(bad);
    for (size_t k = 0; k < size_t(s.K); ++k) d.mean[size_t(s.K) + k] = m2[size_t(s.K) + k] = NAN;
    const auto g = launch<Choice>(s, d, m2, 2, HardswishFn{}, 16);
    for (size_t i = 0; i < g.dx.size(); ++i) {
      if (i / sample == 1 ? std::isfinite(float(g.dx[i]))
                          : float(g.dx[i]) != float(expected.dx[i])) {
        fail("dx of a sample that is not finite, or of another");
      }
    }
    for (const Element v : g.dw) {
      if (std::isfinite(float(v))) fail("dw is finite where the input is not");
    }
  }
  const Check::Expected e = Check::reference(s, clean, kHardswish);
  Data d = clean;
  d.grad_mean[0] = INFINITY;
  auto g = launch<Choice>(s, d, clean_m2, 2, HardswishFn{}, 16);
  for (size_t i = 0; i < 27; ++i) {
    if (std::isfinite(float(g.dw[i]))) fail("dw of a channel that is not finite");
    g.dw[i] = Element(float(e.dw[i]));
  }
  Check::compare("one channel is not finite", g.dw, e.dw, e.dw_square, e.dw_slack);
  puts("ok   input that is not finite");
}

void test_activations(std::mt19937_64& random) {
  const Shape s{1, 0, 3, 3, 16, 16, 0, 0, 0, 1, 1, 1};
  for (const Activation kind : {Activation::kGelu, Activation::kRelu}) {
    test<3, 3, 3, 3, ActivationFn>(s, random, activation_name(int64_t(kind)), 16, kind);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(20240611);
  //                   N  C  D  H  W   K  T  R  S  padding
  if constexpr (takes(WgmmaOperand::kTf32)) {
    test<4, 4, 4, 3>({1, 0, 6, 5, 32, 16, 0, 0, 0}, random);
    test_range(random);
  }
  if constexpr (takes(WgmmaOperand::kSplit)) {
    test<4, 4, 4, 3>({2, 0, 6, 5, 32, 16, 0, 0, 0}, random);
    test<4, 4, 4, 3>({1, 0, 6, 5, 40, 16, 0, 0, 0, 0, 1, 1}, random, "segments");
    test<3, 3, 3, 3>({1, 0, 8, 6, 8, 7, 0, 0, 0, 1, 1, 1}, random, "slabs", 9);
    test_range(random);
  }
  if constexpr (takes(WgmmaOperand::kFloat16)) {
    test<4, 4, 4, 3>({1, 0, 9, 4, 16, 1, 0, 0, 0, 2, 1, 0}, random, "slabs", 12);
    test<4, 4, 4, 3>({1, 0, 4, 4, 8, 24, 0, 0, 0, 3, 3, 3}, random);
    if (kOperand == WgmmaOperand::kFloat16) test_range(random);
  }
  if constexpr (takes(WgmmaOperand::kBFloat16)) {
    test<4, 4, 4, 3>({1, 0, 5, 6, 40, 7, 0, 0, 0, 1, 1, 1}, random, "segments");
    test<3, 3, 3, 3>({1, 0, 8, 3, 40, 7, 0, 0, 0, 1, 1, 1}, random, "slabs, segments", 9);
    test_activations(random);
  }
  test<3, 3, 3, 1>({2, 0, 3, 5, 8, 16, 0, 0, 0, 1, 0, 2}, random);
  test_alike(random);
  test_not_finite(random);
  return 0;
}
