// The portable window kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_window.cuh"
#include "window_check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::Shape;

using check::Data;
using check::Element;
using check::kOperand;
using check::kTolerance;
using check::make_data;
using check::operand;

template <class Config>
void launch(const Shape& s, const Data& d, int slab_planes, unsigned blocks, Activation kind,
            std::vector<float>& mean, std::vector<float>& m2) {
  WindowParameters p{};
  p.x = d.x.data();
  p.w = d.w.data();
  p.bias = d.bias.empty() ? nullptr : d.bias.data();
  p.N = int32_t(s.N);
  p.geometry = check::geometry_of(s, slab_planes, Config::kTiles);
  std::vector<float2> partial(size_t(s.N * window_pieces(p.geometry) * s.K), float2{NAN, NAN});
  p.partial = partial.data();
  typename Config::ActivationType activation{};
  if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
    activation.kind = kind;
  }
  emulate(dim3(blocks, unsigned(s.K + 15) / 16), dim3(Config::kThreads), Config::kSharedBytes,
          conv_window_kernel<Config>, p, activation);
  check::merge(s, p.geometry, partial, mean, m2);
}

template <class Config>
void run(const Shape& s, const Data& d, const char* note, int slab_planes = 1 << 20,
         Activation kind = Activation::kHardswish, double tolerance = kTolerance) {
  const auto expected =
      check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), kind);
  std::vector<float> mean, m2, mean2, m22;
  launch<Config>(s, d, slab_planes, 2, kind, mean, m2);
  char name[200];
  snprintf(name, sizeof name, "N%d C%d D%d H%d W%d K%d k%dx%dx%d p%d,%d,%d %s", int(s.N), int(s.C),
           int(s.D), int(s.H), int(s.W), int(s.K), int(s.T), int(s.R), int(s.S), int(s.pad_d),
           int(s.pad_h), int(s.pad_w), note);
  check::compare(name, s, expected, mean, m2, tolerance);
  launch<Config>(s, d, slab_planes, 5, kind, mean2, m22);
  if (memcmp(mean.data(), mean2.data(), 4 * mean.size()) != 0 ||
      memcmp(m2.data(), m22.data(), 4 * m2.size()) != 0) {
    printf("FAIL %s: another number of blocks gives other bits\n", name);
    exit(1);
  }
}

template <int T, int R, int S, int C, bool General, int Tiles = 4>
using Kernel = WindowConfig<T, R, S, C, kOperand, HardswishFn, General, Tiles>;

template <class Config>
Shape shape(Shape s) {
  s.C = Config::C, s.T = Config::T, s.R = Config::R, s.S = Config::S;
  return s;
}

void fail(const char* what) {
  printf("FAIL %s\n", what);
  exit(1);
}

template <class Config>
void moments_of(const Shape& s, const Data& d, std::vector<float>& mean, std::vector<float>& m2) {
  launch<Config>(s, d, 1 << 20, 3, Activation::kHardswish, mean, m2);
}

// A sample that is not finite makes no number that looks like one, and leaves the others alone.
template <class Config>
void test_not_finite(Shape s, std::mt19937_64& random) {
  s = shape<Config>(s);
  const Data clean = make_data(s, random);
  std::vector<float> mean, m2, clean_mean, clean_m2;
  moments_of<Config>(s, clean, clean_mean, clean_m2);
  for (const float bad : {NAN, __uint_as_float(0x7FFFFFFFu), INFINITY, -INFINITY}) {
    Data d = clean;
    d.x[d.x.size() / size_t(s.N) * 3 / 2] = Element(bad);
    moments_of<Config>(s, d, mean, m2);
    for (int64_t k = 0; k < s.K; ++k) {
      if (std::isfinite(m2[size_t(s.K + k)])) fail("M2 is finite where the input is not");
      for (const int64_t n : {int64_t(0), s.N - 1}) {
        const size_t i = size_t(n * s.K + k);
        if (mean[i] != clean_mean[i] || m2[i] != clean_m2[i]) fail("another sample has changed");
      }
    }
  }
  puts("ok   input that is not finite");
}

// Values beyond 1e19 have an M2 beyond float.
template <class Config>
void test_overflow(Shape s, std::mt19937_64& random) {
  s = shape<Config>(s);
  for (const double scale : {1e22, 1e30, 1e37}) {
    Data d = make_data(s, random);
    for (auto& x : d.x) x = Element(float(x) * float(scale));
    std::vector<float> mean, m2;
    moments_of<Config>(s, d, mean, m2);
    for (const float v : m2) {
      if (std::isfinite(v)) fail("M2 is finite where it overflows");
    }
  }
  puts("ok   overflow");
}

// Scales of x across and within samples, undone by w, so that the values are ordinary.
template <class Config>
void test_range(Shape s, std::mt19937_64& random) {
  s = shape<Config>(s);
  for (const double scale : {1e-40, 1e-30, 1e-6, 1e15}) {
    Data d = make_data(s, random);
    for (auto& x : d.x) x = Element(float(double(float(x)) * scale));
    for (auto& w : d.w) w = Element(float(double(float(w)) / std::fmax(scale, 1e-37)));
    char note[40];
    snprintf(note, sizeof note, "x times %g", scale);
    run<Config>(s, d, note);
  }
  Data d = make_data(s, random);
  for (size_t i = 0; i < d.x.size(); ++i) {
    const size_t plane = i / size_t(s.H * s.W) % size_t(s.D);
    d.x[i] = Element(float(d.x[i]) * std::ldexp(1.0f, int(4 * plane) - 60));
  }
  for (auto& w : d.w) w = Element(float(w) * std::ldexp(1.0f, 60 - 4 * int(s.D)));
  run<Config>(s, d, "planes of growing scale");
}

template <class Config>
void test(Shape s, std::mt19937_64& random, const char* note = "", int slab_planes = 1 << 20) {
  s = shape<Config>(s);
  run<Config>(s, make_data(s, random, s.K != 7), note, slab_planes);
}

using Short = Kernel<4, 4, 4, 3, false>;
using Narrow = WindowConfig<4, 4, 4, 3, kOperand, HardswishFn, false, 4, 0, true>;
using General = Kernel<4, 4, 4, 3, true>;
using Small = Kernel<3, 3, 3, 1, true>;

template <class Config>
void test_bias(std::mt19937_64& random) {
  const Shape s = shape<Config>({2, 0, 5, 4, 20, 16, 0, 0, 0, 0, 1, 1});
  Data d = make_data(s, random);
  for (auto& b : d.bias) b = Element(1000.0f + float(b));
  run<Config>(s, d, "bias 1000");
  for (auto& b : d.bias) b = Element(-30.0f);
  run<Config>(s, d, "bias -30");
}

template <class Config>
void test_activations(std::mt19937_64& random) {
  const Shape s = shape<Config>({1, 0, 5, 4, 17, 16, 0, 0, 0, 1, 1, 1});
  const Data d = make_data(s, random);
  for (const Activation kind : {Activation::kIdentity, Activation::kGelu, Activation::kRelu}) {
    run<Config>(s, d, activation_name(int64_t(kind)), 1 << 20, kind);
  }
}

// What is not tested with every kind of operand. A template, so that only one kind is compiled.
template <WindowOperand Kind>
void test_kind(std::mt19937_64& random) {
  if constexpr (Kind == WindowOperand::kTf32) {
    test<Kernel<5, 5, 5, 1, true, 2>>({1, 0, 7, 6, 21, 16, 0, 0, 0, 2, 2, 2}, random);
    test<Kernel<2, 1, 1, 4, true>>({2, 0, 2, 3, 33, 16, 0, 0, 0}, random);
    test_range<Short>({1, 0, 9, 4, 32, 16, 0, 0, 0}, random);
    test_overflow<Small>({1, 0, 4, 4, 20, 16, 0, 0, 0}, random);
  } else if constexpr (Kind == WindowOperand::kFloat16) {
    test<Kernel<2, 3, 3, 3, true>>({2, 0, 3, 5, 40, 16, 0, 0, 0, 0, 1, 1}, random);
    test<Kernel<7, 7, 7, 1, true, 2>>({1, 0, 7, 8, 18, 16, 0, 0, 0, 3, 3, 3}, random);
  } else if constexpr (Kind == WindowOperand::kBFloat16) {
    test<Kernel<2, 2, 2, 2, true, 2>>({2, 0, 4, 5, 16, 16, 0, 0, 0}, random);
    test_activations<WindowConfig<3, 3, 3, 4, Kind, ActivationFn, true>>(random);
  } else {
    test_range<Small>({2, 0, 8, 4, 20, 16, 0, 0, 0, 1, 1, 1}, random);
    test_range<Short>({1, 0, 9, 4, 32, 16, 0, 0, 0}, random);
    test_overflow<Small>({1, 0, 4, 4, 20, 16, 0, 0, 0}, random);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(20240611);
  //           N  C  D  H  W   K  T  R  S  padding
  test<Short>({1, 0, 9, 5, 32, 16, 0, 0, 0}, random, "short rows");
  test<Short>({2, 0, 6, 4, 32, 24, 0, 0, 0}, random, "short rows");
  test<Short>({1, 0, 4, 4, 32, 1, 0, 0, 0}, random, "one output row");
  test<Short>({2, 0, 5, 4, 32, 16, 0, 0, 0}, random, "fewer output planes than taps");
  test<Short>({3, 0, 1, 4, 32, 16, 0, 0, 0, 3, 0, 0}, random, "one input plane");
  test<Short>({1, 0, 12, 4, 32, 16, 0, 0, 0, 2, 0, 0}, random, "slabs of short rows", 5);
  test<Narrow>({2, 0, 6, 4, 28, 24, 0, 0, 0}, random, "narrow rows");
  test<Narrow>({1, 0, 5, 5, 30, 7, 0, 0, 0, 1, 0, 0}, random, "narrow rows");
  test<General>({2, 0, 6, 5, 29, 24, 0, 0, 0}, random);
  test<General>({1, 0, 5, 5, 31, 7, 0, 0, 0, 3, 3, 3}, random, "full padding");
  test<General>({1, 0, 8, 4, 64, 16, 0, 0, 0, 1, 0, 2}, random, "slabs", 3);
  test<Small>({1, 0, 7, 6, 33, 7, 0, 0, 0, 1, 1, 1}, random);
  test<Small>({1, 0, 2, 3, 5, 257, 0, 0, 0, 2, 2, 2}, random);
  test_not_finite<Small>({3, 0, 6, 3, 9, 7, 0, 0, 0, 1, 0, 1}, random);
  test_bias<Small>(random);
  test_kind<kOperand>(random);
  return 0;
}
