// The Hopper kernel of the filter's gradient with operands in shared memory, on the host, against
// float64. Compiled once for each operand kind: -DOPERAND=kTf32, kFloat16 or kBFloat16. The kinds
// share the shapes out among themselves; with -DEVERY_SHAPE each runs all of them, which takes
// minutes. The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

#include "cuda/conv_activation_moments_backward_wgmma_filter_alone.cuh"
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
  std::vector<Element> dw, db;
};

template <class Config>
Gradients launch(const Shape& s, const Data& d, const std::vector<float>& m2, unsigned blocks) {
  WgmmaBothParams p{};
  const Problem problem = check::problem_of(s);
  static_cast<WgmmaInputParams&>(p) = wgmma_filter_alone_params<Config>(problem);
  const check::DeviceCopy x(d.x);
  p.x = x.data(), p.w = d.w.data(), p.b = d.bias.empty() ? nullptr : d.bias.data();
  p.mean = d.mean.data(), p.m2 = m2.data();
  p.grad_mean = d.grad_mean.data(), p.grad_m2 = d.grad_m2.data();
  TensorMap map = check::tensor_map(s, p.x, Config::kElementBytes);
  wgmma_input_box<Config>(map.box);
  const int tiles = int(s.K + 15) / 16;
  blocks = std::min(blocks, unsigned(p.segments * p.quads));
  const int64_t count = int64_t(blocks) * Config::kWarpgroups;
  std::vector<float> filter(size_t(tiles * count * 16 * Config::kTaps), NAN);
  std::vector<float> bias(size_t(tiles * count * 4 * 16), NAN);
  p.filter_partial = filter.data(), p.bias_partial = bias.data();
  for (int tile = 0; tile < tiles; ++tile) {
    p.first_tile = tile;
    emulate(dim3(blocks), dim3(Config::kThreads), Config::kMostSharedBytes,
            conv_activation_moments_backward_wgmma_filter_alone<Config>, p, map);
  }
  return {Check::sum_of(filter, count, s.K, Config::kTaps), Check::sum_of(bias, count * 4, s.K, 1)};
}

template <int T, int R, int S, int C>
void test(Shape s, std::mt19937_64& random, const char* note = "", Data d = {}) {
  using Config = WgmmaFilterAloneConfig<kOperand, C, T, R, S>;
  s.C = C, s.T = T, s.R = R, s.S = S;
  const bool given = !d.x.empty();
  if (d.x.empty()) {
    d = Check::make_data(s, random, kHardswish, kOperand == WgmmaOperand::kFloat16 ? 1 : 1e-7);
  }
  const Check::Expected e = Check::reference(s, d, kHardswish);
  const auto m2 = Check::m2_of(s, d, kHardswish);
  const std::string name = check::name_of(s, note);
  const auto compare = [&](const Gradients& g) {
    Check::compare(name + " dw", g.dw, e.dw, e.dw_square, e.dw_slack);
    Check::compare(name + " db", g.db, e.db, e.db_square, e.db_slack);
  };
  const Gradients g = launch<Config>(s, d, m2, 1);
  compare(g);
  if (given) return;
  const Gradients again = launch<Config>(s, d, m2, 3);
  compare(again);
  const Gradients same = launch<Config>(s, d, m2, 3);
  if (memcmp(same.dw.data(), again.dw.data(), same.dw.size() * sizeof(Element)) != 0) {
    fail("other bits in another run");
  }
}

void test_range(std::mt19937_64& random) {
  const Shape s{3, 1, 4, 7, 16, 16, 3, 3, 3, 1, 0, 1};  // quads have rows of two samples
  check::for_ranges<Check>(
      s, random, [&](const char* note, const Data& d) { test<3, 3, 3, 1>(s, random, note, d); });
}

void test_alike(std::mt19937_64& random) {
  const Shape s{2, 1, 3, 3, 16, 16, 3, 3, 3};
  test<3, 3, 3, 1>(s, random, "all outputs alike", check::outputs_alike<Check>(s, random));
}

// A sample that is not finite makes no number that looks like one; a channel that is
// not leaves the other channels alone.
void test_not_finite(std::mt19937_64& random) {
  using Config = WgmmaFilterAloneConfig<kOperand, 1, 3, 3, 3>;
  const Shape s{3, 1, 3, 3, 8, 16, 3, 3, 3, 1, 0, 1};
  const Data clean = Check::make_data(s, random, kHardswish);
  const auto clean_m2 = Check::m2_of(s, clean, kHardswish);
  const size_t sample = clean.x.size() / 3;
  for (const float bad : {NAN, -INFINITY}) {
    Data d = clean;
    auto m2 = clean_m2;
    d.x[sample * 3 / 2] = Element(bad);
    for (size_t k = 0; k < size_t(s.K); ++k) d.mean[size_t(s.K) + k] = m2[size_t(s.K) + k] = NAN;
    const auto g = launch<Config>(s, d, m2, 2);
    for (const Element v : g.dw) {
      if (std::isfinite(float(v))) fail("dw is finite where the input is not");
    }
  }
  const Check::Expected e = Check::reference(s, clean, kHardswish);
  Data d = clean;
  d.grad_mean[0] = INFINITY;
  auto g = launch<Config>(s, d, clean_m2, 2);
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
  //                   N  C  D  H  W   K  T  R  S  padding
  if constexpr (takes(WgmmaOperand::kTf32)) {
    test<4, 4, 4, 3>({1, 0, 6, 5, 32, 16, 0, 0, 0}, random);
    test<3, 3, 3, 3>({3, 0, 4, 7, 40, 7, 0, 0, 0, 1, 0, 1}, random, "five rows, segments");
    test_range(random);
  }
  if constexpr (takes(WgmmaOperand::kFloat16)) {
    test<4, 4, 4, 3>({1, 0, 9, 4, 16, 1, 0, 0, 0, 2, 1, 0}, random, "depth");
    test<4, 4, 4, 3>({1, 0, 4, 4, 8, 24, 0, 0, 0, 3, 3, 3}, random);
    if (kOperand == WgmmaOperand::kFloat16) test_range(random);
  }
  if constexpr (takes(WgmmaOperand::kBFloat16)) {
    test<4, 4, 4, 3>({2, 0, 5, 6, 40, 7, 0, 0, 0, 1, 1, 1}, random, "five rows, segments");
    test<3, 3, 3, 3>({1, 0, 8, 3, 40, 7, 0, 0, 0, 1, 1, 1}, random, "depth, segments");
  }
  test<3, 3, 3, 1>({2, 0, 3, 5, 8, 16, 0, 0, 0, 1, 0, 2}, random, "three rows");
  test<3, 3, 3, 1>({5, 0, 3, 3, 8, 16, 0, 0, 0, 0, 0, 1}, random, "one row");
  test_alike(random);
  test_not_finite(random);
  return 0;
}
