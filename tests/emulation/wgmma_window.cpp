// The Hopper window kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit. The kinds share the shapes out among themselves;
// with -DEVERY_SHAPE each runs all of them, which takes minutes.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

#include "cuda/conv_activation_moments_wgmma.cuh"
#include "cuda/conv_activation_moments_wgmma_pieces.cuh"
#include "wgmma_check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::kEveryShape;
using check::kOperand;
using check::Shape;
using check::takes;

constexpr bool kFloat = kOperand == WgmmaOperand::kTf32 || kOperand == WgmmaOperand::kSplit;
using Element = std::conditional_t<
    kFloat, float, std::conditional_t<kOperand == WgmmaOperand::kBFloat16, __nv_bfloat16, __half>>;

struct Data {
  std::vector<Element> x, w, bias;
};

Data make_data(const Shape& s, std::mt19937_64& random, double scale = 3, double bias = 1) {
  const double fan_in = double(s.C * s.T * s.R * s.S);
  Data d;
  d.x = check::rounded<Element>(
      check::random_values(random, size_t(s.N * s.C * s.D * s.H * s.W), scale));
  d.w = check::rounded<Element>(
      check::random_values(random, size_t(s.K * s.C * s.T * s.R * s.S), 1.0 / std::sqrt(fan_in)));
  if (bias != 0) d.bias = check::rounded<Element>(check::random_values(random, size_t(s.K), bias));
  return d;
}

// What the products take of an operand.
std::vector<double> operand(const std::vector<Element>& v) {
  if (kOperand == WgmmaOperand::kTf32) return check::to_11_bits(check::widened(v));
  return check::widened(v);
}

// Unit error of a value relative to the sum of absolute products: float accumulation, truncated,
// over the longest chain of products; the halves of a split operand leave out 2^-22.
constexpr double kTolerance = kOperand == WgmmaOperand::kSplit ? 2e-6 : 1e-6;

struct Moments {
  std::vector<float> mean, m2;
};

template <class Config, class Act>
Moments launch(const Shape& s, const Data& d, unsigned blocks, Act act) {
  WgmmaParams p = wgmma_params<Config>(check::problem_of(s));
  // As aligned as an allocation on the device, and with the end where it is.
  const check::DeviceCopy x(d.x);
  p.x = x.data();
  p.w = d.w.data();
  p.b = d.bias.empty() ? nullptr : d.bias.data();
  const size_t tiles = size_t(s.K + 15) / 16;
  std::vector<float2> partials(size_t(s.N * wgmma_pieces(p) * s.K), float2{NAN, NAN});
  Moments moments{std::vector<float>(size_t(s.N * s.K), -1.f),
                  std::vector<float>(size_t(s.N * s.K), -1.f)};
  p.partials = partials.data();
  blocks = std::min(blocks, unsigned(p.items));
  wgmma_deal(p, int(blocks));
  TensorMap maps[2];
  for (const bool rest : {false, true}) {
    maps[rest] = check::tensor_map(s, p.x, Config::kElementBytes);
    wgmma_box<Config>(p, rest, maps[rest].box);
  }
  emulate(dim3(blocks, unsigned(tiles)), dim3(Config::kThreads), wgmma_shared_bytes<Config>(p),
          conv_activation_moments_wgmma<Config, Act>, p, maps[0], maps[1], act);
  constexpr unsigned kUnits = kMergeLeastUnits;
  const WgmmaPieces pieces = wgmma_pieces_of(check::problem_of(s), partials.data());
  emulate(dim3((unsigned(s.N * merge_tiles(pieces.channels())) + kUnits - 1) / kUnits),
          dim3(kUnits * kMergeThreads), 0, merge_pieces_kernel<WgmmaPieces>, pieces,
          moments.mean.data(), moments.m2.data());
  return moments;
}

// kAny: through the functor of all activations.
template <class Config, bool kAny = false>
void run(const Shape& s, const Data& d, const char* note, Activation kind = Activation::kHardswish,
         double tolerance = kTolerance) {
  const auto expected =
      check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), kind);
  Moments got, again;
  if constexpr (kAny) {
    got = launch<Config>(s, d, 1, ActivationFn{kind});
    again = launch<Config>(s, d, 3, ActivationFn{kind});
  } else {
    got = launch<Config>(s, d, 1, HardswishFn{});
    again = launch<Config>(s, d, 3, HardswishFn{});
  }
  if (memcmp(got.mean.data(), again.mean.data(), got.mean.size() * sizeof(float)) != 0 ||
      memcmp(got.m2.data(), again.m2.data(), got.m2.size() * sizeof(float)) != 0) {
    printf("FAIL %s: another grid gives other bits\n", note);
    exit(1);
  }
  check::compare(check::name_of(s, note), s, expected, got.mean, got.m2, tolerance);
}

template <int C, int T, int R, int S, WgmmaOverlap kOverlap = WgmmaOverlap::kOrdered,
          int kWarpgroups = 1>
using Config = WgmmaConfig<kOperand, C, T, R, S, kOverlap, kWarpgroups>;

constexpr auto kFree = WgmmaOverlap::kFree;
constexpr auto kOrdered = WgmmaOverlap::kOrdered;

// NaN, Inf, or an M2 beyond float32 in one sample: all of its M2 are NaN, the others keep their
// bits.
template <class Config>
void not_finite(std::mt19937_64& random) {
  const Shape s{6, Config::kC, 4, 5, 16, 16, Config::kT, Config::kR, Config::kS};
  const Data clean = make_data(s, random);
  const Moments expected = launch<Config>(s, clean, 2, HardswishFn{});
  const size_t sample = clean.x.size() / size_t(s.N), k = size_t(s.K);
  for (const float value : {__uint_as_float(0x7FFFFFFF), NAN, INFINITY, -INFINITY, 3e38f}) {
    if (kOperand != WgmmaOperand::kTf32 && std::isfinite(value)) continue;
    Data d = clean;
    d.x[sample * 4 + sample / 3] = Element(value);
    const Moments got = launch<Config>(s, d, 2, HardswishFn{});
    const auto right = check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias),
                                        Activation::kHardswish);
    bool good = true;
    for (size_t i = 0; i < got.m2.size(); ++i) {
      const bool same = got.mean[i] == expected.mean[i] && got.m2[i] == expected.m2[i];
      const bool finite = right.m2[i] <= FLT_MAX;
      const bool near = finite && std::fabs(got.m2[i] - right.m2[i]) <= 1e-4 * right.m2[i];
      good = good && (i / k == 4 ? near || (!finite && std::isnan(got.m2[i])) : same);
    }
    printf("%s one sample with %g\n", good ? "ok  " : "FAIL", double(value));
    if (!good) exit(1);
  }
}

// Values of very different sizes, which hardswish hides: only outputs that are zero see the large
// one, so that float32 would keep all digits of the others. Four columns have a scale of their own.
template <class Config>
void hidden_outlier(std::mt19937_64& random) {
  const Shape s{1, 3, 12, 5, 32, 16, 4, 4, 4};
  Data d = make_data(s, random, 3, 0);
  for (Element& w : d.w) w = Element(-std::fabs(float(w)));
  d.x[(5 * 5 + 0) * 32 + 31] = Element(1e9f);
  const Moments got = launch<Config>(s, d, 2, HardswishFn{});
  const auto right = check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias),
                                      Activation::kHardswish);
  double worst = 0;
  for (size_t i = 0; i < got.m2.size(); ++i) {
    worst = std::fmax(worst, std::fabs(got.m2[i] - right.m2[i]) / right.m2[i]);
  }
  printf("%s an outlier that hardswish hides: m2 %.1e\n", worst < 1e-5 ? "ok  " : "FAIL", worst);
  if (!(worst < 1e-5)) exit(1);
}

// Planes of falling and rising sizes, 1e-30 to 1e15.
template <class Config>
void large_range(std::mt19937_64& random) {
  const Shape s{2, 3, 16, 5, 32, 16, 4, 4, 4};
  for (const int kind : {0, 1, 2}) {
    Data d = make_data(s, random, 1, 0);
    const size_t plane = size_t(s.H * s.W);
    for (size_t i = 0; i < d.x.size(); ++i) {
      const int z = int(i / plane % size_t(s.D));
      const double power = kind == 0 ? 15 - 3 * z : kind == 1 ? -30 + 3 * z : z % 5 == 2 ? 12 : -12;
      d.x[i] = Element(float(double(float(d.x[i])) * std::pow(10.0, power)));
    }
    const auto right = check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias),
                                        Activation::kHardswish);
    const Moments got = launch<Config>(s, d, 2, HardswishFn{});
    char name[64];
    snprintf(name, sizeof(name), "large range %d", kind);
    // The sums stand about the row's first output, here its largest.
    check::compare(name, s, right, got.mean, got.m2, 4 * kTolerance);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(20);
  const auto with = [&](Shape s, auto f) { f(s, make_data(s, random)); };
  // Items of four rows and what is left of a sample's rows, each number of them: of several
  // samples, with a tail of samples. Every residue of Z mod T.
  if constexpr (takes(WgmmaOperand::kTf32)) {
    with({2, 3, 7, 8, 32, 16, 4, 4, 4},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kOrdered, 3>>(s, d, "rest 1"); });
    with({2, 3, 6, 6, 32, 16, 4, 4, 4},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kOrdered, 3>>(s, d, "rest 3"); });
    // A bias that is large against the spread of the outputs; two tiles of columns.
    const Shape s{1, 3, 4, 5, 64, 7, 4, 4, 4, 1, 1, 3};
    Data d = make_data(s, random, 0.1, 1);
    for (Element& b : d.bias) b = Element(1000.f + float(b));
    run<Config<3, 4, 4, 4, kOrdered, 3>>(s, d, "bias 1000, K = 7");
  }
  if constexpr (takes(WgmmaOperand::kFloat16)) {
    with({3, 3, 9, 5, 32, 16, 4, 4, 4},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kFree, 2>>(s, d, "rest 2"); });
    // Fewer output planes than taps along the depth; a tile that begins before the outputs.
    with({2, 3, 4, 7, 24, 1, 4, 4, 4, 0, 0, 2},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kFree, 2>>(s, d, "Z = 1, K = 1"); });
    with({3, 1, 5, 7, 16, 16, 2, 3, 1, 1, 1, 0},
         [](auto s, auto d) { run<Config<1, 2, 3, 1, kFree, 2>>(s, d, "2 x 3 x 1"); });
  }
  if constexpr (takes(WgmmaOperand::kBFloat16)) {
    // Two tiles of columns, the first early; two of channels. All padding, and two output planes.
    with({1, 3, 4, 5, 32, 24, 4, 4, 4, 0, 1, 3},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kFree, 4>>(s, d, "two tiles, K = 24"); });
    with({1, 3, 3, 4, 40, 16, 4, 4, 4, 1, 3, 1},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kFree, 4>>(s, d, "padding"); });
    with({3, 4, 5, 7, 16, 16, 1, 2, 4},
         [](auto s, auto d) { run<Config<4, 1, 2, 4, kFree, 2>>(s, d, "1 x 2 x 4"); });
  }
  if constexpr (takes(WgmmaOperand::kSplit)) {
    with({2, 1, 4, 7, 24, 16, 3, 3, 3, 1, 1, 1},
         [](auto s, auto d) { run<Config<1, 3, 3, 3, kOrdered, 3>>(s, d, "3 x 3 x 3"); });
    if constexpr (kFloat) large_range<Config<3, 4, 4, 4, kOrdered, 2>>(random);
  }
  if constexpr (kOperand == WgmmaOperand::kSplit) {
    hidden_outlier<Config<3, 4, 4, 4, kOrdered, 2>>(random);
  }
  if constexpr (kEveryShape) {
    with({2, 3, 7, 7, 32, 16, 4, 4, 4},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kOrdered, 2>>(s, d, "quads"); });
    with({3, 3, 5, 8, 32, 16, 4, 4, 4},
         [](auto s, auto d) { run<Config<3, 4, 4, 4, kOrdered, 2>>(s, d, "Z = 2"); });
    for (int width : {8, 40}) {
      with({3, 3, 5, 6, width, 1, 4, 4, 4, 1, 0, 2},
           [](auto s, auto d) { run<Config<3, 4, 4, 4, kFree, 2>>(s, d, "early, K = 1"); });
    }
    with({3, 2, 5, 7, 16, 16, 3, 3, 3, 1, 1, 1},
         [](auto s, auto d) { run<Config<2, 3, 3, 3, kOrdered, 2>>(s, d, "3 x 3 x 3"); });
    with({3, 3, 5, 7, 16, 16, 3, 3, 3, 1, 1, 1},
         [](auto s, auto d) { run<Config<3, 3, 3, 3, kOrdered, 2>>(s, d, "3 x 3 x 3"); });
    with({3, 4, 5, 7, 16, 16, 1, 1, 2},
         [](auto s, auto d) { run<Config<4, 1, 1, 2, kOrdered, 2>>(s, d, "1 x 1 x 2"); });
  }
  using Small = Config<1, 2, 2, 2, kOrdered, 2>;
  not_finite<Small>(random);
  for (int kind = 1; kind < convnormpool::kNumActivations; ++kind) {
    if (!takes(WgmmaOperand(kind % 4))) continue;
    with({2, 1, 3, 5, 16, 16, 2, 2, 2}, [&](auto s, auto d) {
      run<Small, true>(s, d, activation_name(kind), Activation(kind), 4 * kTolerance);
    });
  }
  return 0;
}
