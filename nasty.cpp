// The taps kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_taps.cuh"
#include "check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::Shape;

constexpr WindowOperand kOperand = WindowOperand::OPERAND;
using Element = std::conditional_t<
    kOperand == WindowOperand::kFloat16, __half,
    std::conditional_t<kOperand == WindowOperand::kBFloat16, __nv_bfloat16, float>>;

struct Data {
  std::vector<Element> x, w, bias;
};

Data make_data(const Shape& s, std::mt19937_64& random) {
  const double fan_in = double(s.C * s.T * s.R * s.S);
  Data d;
  d.x = check::rounded<Element>(
      check::random_values(random, size_t(s.N * s.C * s.D * s.H * s.W), 3.0));
  d.w = check::rounded<Element>(
      check::random_values(random, size_t(s.K * s.C * s.T * s.R * s.S), 1.0 / std::sqrt(fan_in)));
  if (s.K != 7) d.bias = check::rounded<Element>(check::random_values(random, size_t(s.K), 1.0));
  return d;
}

// What the products take of an operand.
std::vector<double> operand(const std::vector<Element>& v) {
  std::vector<double> out = check::widened(v);
  if constexpr (kOperand == WindowOperand::kTf32) {
    // 11 bits; a tie to the even one.
    for (double& x : out) {
      int exponent = 0;
      const double mantissa = std::frexp(x, &exponent);
      x = std::ldexp(std::nearbyint(std::ldexp(mantissa, 11)), exponent - 11);
    }
  }
  return out;
}

// As for the window kernel.
constexpr double kTolerance = 5e-7;

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
  p.geometry = window_geometry(int32_t(s.D), int32_t(s.H), int32_t(s.W), int32_t(s.K),
                               int32_t(s.Z()), int32_t(s.P()), int32_t(s.Q()), int32_t(s.pad_d),
                               int32_t(s.pad_h), int32_t(s.pad_w), slab_planes, kTapsTiles);
  std::vector<float2> partial(size_t(s.N * window_pieces(p.geometry) * s.K), float2{NAN, NAN});
  p.partial = partial.data();
  Moments moments{std::vector<float>(size_t(s.N * s.K), NAN),
                  std::vector<float>(size_t(s.N * s.K), NAN)};
  typename Config::ActivationType activation{};
  if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
    activation.kind = kind;
  }
  const unsigned tiles = unsigned(s.K + 16 * Config::kTiles - 1) / (16 * Config::kTiles);
  emulate(dim3(blocks, tiles), dim3(kTapsThreads),
          size_t(taps_memory(p.filter, Config::kParts, Config::kTiles).total),
          conv_taps_kernel<Config>, p, activation);
  emulate(dim3(unsigned(s.N * ((s.K + 15) / 16))), dim3(256), 0, merge_window_kernel, p.geometry,
          partial.data(), moments.mean.data(), moments.m2.data());
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
[[maybe_unused]] void beyond_the_taps() {
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


template <class Act, int Tiles>
void one(std::mt19937_64& random, const Shape& s, const char* note, int slab=1<<20, double tol=kTolerance, Activation k=Activation::kHardswish){
  run<Act, Tiles>(s, make_data(s, random), note, slab, k, tol);
}
int main(int argc, char** argv) {
  std::mt19937_64 random(argc > 1 ? atoi(argv[1]) : 77);
  // planner's fits only matter on the device
  one<HardswishFn,1>(random, {2,1,1,1,1,1,1,1,1}, "all one");
  one<HardswishFn,2>(random, {1,1,1,1,1,17,8,8,8,7,7,7}, "one element, all padding");
  one<HardswishFn,1>(random, {1,2,1,1,1,3,8,1,8,7,0,7}, "one element b");
  one<HardswishFn,1>(random, {1,16,2,3,4,3,1,8,8,0,7,7}, "16 channels 1x8x8");
  one<HardswishFn,1>(random, {1,16,1,1,33,5,1,1,1}, "pointwise, segment of one");
  one<HardswishFn,1>(random, {1,3,2,9,40,5,2,1,8,1,0,7}, "W 40 pad 7");
  one<HardswishFn,1>(random, {1,5,3,10,33,33,3,1,5,2,0,4}, "C5 k3x1x5");
  one<HardswishFn,2>(random, {1,3,7,8,9,31,5,7,6,4,6,5}, "577 slabs", 2);
  one<HardswishFn,1>(random, {3,1,70,1,3,2,4,1,1,3,0,0}, "slabs 32", 32);
  one<HardswishFn,1>(random, {1,1,5,9,65,1,1,1,7,0,0,6}, "Q 71");
  one<HardswishFn,2>(random, {1,13,2,2,3,40,2,3,1,1,2,0}, "C13 S1");
  one<HardswishFn,1>(random, {1,1,2,100,2,1,1,2,2,0,1,1}, "tall");
  std::mt19937_64 r2(random());
  for (int i = 0; i < 14; ++i) {
    auto u = [&](int a, int b) { return int64_t(a + r2() % uint64_t(b - a + 1)); };
    Shape s{u(1,2),u(1,6),u(1,5),u(1,11),u(1,36),u(1,40),u(1,5),u(1,5),u(1,8)};
    s.pad_d=u(0,s.T-1); s.pad_h=u(0,s.R-1); s.pad_w=u(0,s.S-1);
    if (s.Z()<1||s.P()<1||s.Q()<1) { --i; continue; }
    if (i%2) one<HardswishFn,1>(random, s, "random", int(u(1,4)));
    else one<HardswishFn,2>(random, s, "random", int(u(1,4)));
  }
  // one weight tiny, one channel of input of other units
  for (double ratio : {1e2, 1e4, 1e6, 1e8, 1e10}) {
    if (kOperand != WindowOperand::kTf32 && kOperand != WindowOperand::kSplit) break;
    const Shape s{1,2,4,9,12,16,2,3,2};
    Data d = make_data(s, random);
    const size_t per = size_t(s.D*s.H*s.W), taps = size_t(s.T*s.R*s.S);
    for (size_t i=0;i<per;++i) d.x[i] = Element(float(d.x[i])*float(ratio));
    for (size_t i=0;i<d.w.size();++i) if (i/taps%2==0) d.w[i] = Element(float(d.w[i])/float(ratio));
    const auto e = check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), Activation::kHardswish);
    const Moments got = launch<TapsConfig<kOperand, HardswishFn,1>>(s,d,1<<20,2,Activation::kHardswish);
    double worst=0, wm=0;
    for (size_t i=0;i<e.mean.size();++i) { worst=std::fmax(worst,std::fabs(got.mean[i]-e.mean[i])/e.magnitude[i]); wm=std::fmax(wm,std::fabs(got.m2[i]-e.m2[i])/e.m2[i]);}
    printf("channels of ratio %g: mean error %.2e of magnitude, m2 %.2e relative\n", ratio, worst, wm);
  }
  // extremes: big, subnormal
  for (double scale : {1e30, 1e-30, 1e-38, 3e-42}) {
    if (kOperand != WindowOperand::kTf32 && kOperand != WindowOperand::kSplit) break;
    const Shape s{1,2,3,9,9,4,2,2,2};
    Data d = make_data(s, random);
    for (auto& v : d.x) v = Element(float(double(float(v))*scale));
    for (auto& v : d.w) v = Element(float(double(float(v))/std::fmin(scale,1e38)/1.0));
    bool fin=true; for (auto& v : d.w) fin = fin && std::isfinite(double(float(v)));
    if (!fin) for (auto& v : d.w) v = Element(float(1e37));
    const auto e = check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), Activation::kIdentity);
    const Moments got = launch<TapsConfig<kOperand, ActivationFn,1>>(s,d,1<<20,2,Activation::kIdentity);
    double worst=0; for (size_t i=0;i<e.mean.size();++i) worst=std::fmax(worst,std::fabs(got.mean[i]-e.mean[i])/e.magnitude[i]);
    printf("scale %g: %.2e  (%g vs %g) m2 %g vs %g\n", scale, worst, got.mean[0], e.mean[0], got.m2[0], e.m2[0]);
  }
  not_finite(random);
  return 0;
}
