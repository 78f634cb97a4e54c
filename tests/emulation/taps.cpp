// The taps kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_taps.cuh"
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

struct Moments {
  std::vector<float> mean, m2;
};

template <class Config>
Moments launch(const Shape& s, const Data& d, int slab_planes, unsigned blocks, Activation kind) {
  TapsParameters p{};
  p.x = d.x.data();
  p.w = d.w.data();
  p.bias = d.bias.empty() ? nullptr : d.bias.data();
  p.N = int32_t(s.N);
  p.filter = {int32_t(s.C), int32_t(s.T), int32_t(s.R), int32_t(s.S)};
  p.geometry = check::geometry_of(s, slab_planes, kTapsTiles);
  std::vector<float2> partial(size_t(s.N * window_pieces(p.geometry) * s.K), float2{NAN, NAN});
  p.partial = partial.data();
  Moments moments;
  typename Config::ActivationType activation{};
  if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
    activation.kind = kind;
  }
  const unsigned tiles = unsigned(s.K + 16 * Config::kTiles - 1) / (16 * Config::kTiles);
  emulate(dim3(blocks, tiles), dim3(kTapsThreads),
          size_t(taps_memory(p.filter, Config::kParts, Config::kTiles).total),
          conv_taps_kernel<Config>, p, activation);
  check::merge(s, p.geometry, partial, moments.mean, moments.m2);
  return moments;
}

template <class Act, int ChannelTiles>
void run(const Shape& s, const Data& d, const char* note, int slab_planes = 1 << 20,
         Activation kind = Activation::kHardswish, double tolerance = kTolerance) {
  using Config = TapsConfig<kOperand, Act, ChannelTiles>;
  const auto expected =
      check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), kind);
  const Moments got = launch<Config>(s, d, slab_planes, 2, kind);
  const Moments again = launch<Config>(s, d, slab_planes, 5, kind);
  const std::string name = check::name_of(s, note);
  check::compare(name, s, expected, got.mean, got.m2, tolerance);
  if (memcmp(got.mean.data(), again.mean.data(), 4 * got.mean.size()) != 0 ||
      memcmp(got.m2.data(), again.m2.data(), 4 * got.m2.size()) != 0) {
    check::fail("another number of blocks gives other bits");
  }
}

// NaN or Inf in one sample make its moments no finite number; the others keep their bits.
void not_finite(std::mt19937_64& random) {
  using Config = TapsConfig<kOperand, HardswishFn, 1>;
  const Shape s{3, 2, 4, 9, 12, 16, 2, 3, 3};
  const Data clean = make_data(s, random);
  const Moments expected = launch<Config>(s, clean, 1 << 20, 2, Activation::kHardswish);
  const size_t sample = clean.x.size() / size_t(s.N);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    Data d = clean;
    d.x[sample + sample / 2] = Element(bad);
    const Moments got = launch<Config>(s, d, 1 << 20, 2, Activation::kHardswish);
    for (size_t i = 0; i < got.m2.size(); ++i) {
      const bool same = got.mean[i] == expected.mean[i] && got.m2[i] == expected.m2[i];
      if (i / size_t(s.K) == 1 ? std::isfinite(got.m2[i]) : !same) check::fail("not finite");
    }
  }
  puts("ok   input that is not finite");
}

// What has no tap is not multiplied: relu makes zeros of -Inf, which a weight of zero would make
// NaN. The output before it is the only one that sees the last column by its last tap.
void beyond_the_taps() {
  using Config = TapsConfig<kOperand, ActivationFn, 1>;
  const Shape s{1, 1, 1, 1, 9, 1, 1, 1, 3};
  Data d;
  for (int i = 0; i < 9; ++i) d.x.push_back(Element(i == 8 ? -INFINITY : 1.0f));
  for (int i = 0; i < 3; ++i) d.w.push_back(Element(1.0f));
  const Moments got = launch<Config>(s, d, 1 << 20, 1, Activation::kRelu);
  if (std::fabs(got.mean[0] - 18.0f / 7) > 1e-5f) check::fail("an element beyond the taps counts");
  puts("ok   elements beyond the taps");
}

}  // namespace

int main() {
  std::mt19937_64 random(31);
  const auto with = [&](const Shape& s, auto f) { f(s, make_data(s, random, s.K != 7)); };
  // Odd and even extents from 1 to 8, each with rows that end within a warp's, padding, two tiles
  // of channels, several slabs and segments.
  with({2, 4, 4, 9, 20, 16, 3, 3, 3, 1, 1, 1},
       [](auto s, auto d) { run<HardswishFn, 1>(s, d, "four channels"); });
  with({1, 2, 6, 11, 35, 24, 2, 5, 4},
       [](auto s, auto d) { run<HardswishFn, 2>(s, d, "two tiles, two segments"); });
  with({1, 1, 9, 8, 10, 7, 7, 7, 7, 3, 3, 3},
       [](auto s, auto d) { run<HardswishFn, 1>(s, d, "7, two slabs", 4); });
  with({2, 3, 1, 17, 9, 33, 1, 3, 2, 0, 2, 1},
       [](auto s, auto d) { run<HardswishFn, 2>(s, d, "one plane, three tiles"); });
  with({1, 8, 3, 3, 8, 5, 2, 1, 1, 1, 0, 0},
       [](auto s, auto d) { run<HardswishFn, 1>(s, d, "eight channels"); });
  with({1, 1, 8, 2, 9, 1, 8, 2, 8, 7, 1, 7},
       [](auto s, auto d) { run<HardswishFn, 1>(s, d, "8, all padding"); });
  if constexpr (check::kFloat) {
    // An element alone, in a column of either parity, and one far larger than its neighbours: the
    // scale must see it.
    for (const int pad : {0, 1}) {
      with({1, 1, 1, 1, 1, 17, 2, 2, pad + 1, 1, 1, pad},
           [](auto s, auto d) { run<HardswishFn, 2>(s, d, "one element"); });
      with({1, 1, 1, 1, 8, 16, 1, 1, 2}, [&](auto s, auto d) {
        d.x[size_t(4 + pad)] = Element(1e6f);
        run<HardswishFn, 1>(s, d, "one large element");
      });
    }
    // Planes of growing and falling sizes.
    for (const int sign : {1, -1}) {
      with({1, 2, 8, 4, 10, 16, 3, 3, 3}, [&](auto s, auto d) {
        for (size_t i = 0; i < d.x.size(); ++i) {
          const int plane = int(i / size_t(s.H * s.W) % size_t(s.D));
          d.x[i] = Element(float(d.x[i]) * std::ldexp(1.0f, sign * 12 * (plane - 4)));
        }
        run<HardswishFn, 1>(s, d, "planes of different sizes", 1 << 20, Activation::kHardswish,
                            4 * kTolerance);
      });
    }
  }
  not_finite(random);
  if constexpr (!check::kFloat) {
    beyond_the_taps();
  }
  for (int kind = 1; kind < kNumActivations; ++kind) {
    if (kind % 4 != int(kOperand)) continue;
    with({2, 1, 3, 5, 12, 16, 2, 2, 2}, [&](auto s, auto d) {
      run<ActivationFn, 1>(s, d, activation_name(kind), 1 << 20, Activation(kind), 4 * kTolerance);
    });
  }
  return 0;
}
