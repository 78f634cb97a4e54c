// The portable window kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_window.cuh"
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

Data make_data(const Shape& s, std::mt19937_64& random, bool bias = true) {
  const double fan_in = double(s.C * s.T * s.R * s.S);
  Data d;
  d.x = check::rounded<Element>(
      check::random_values(random, size_t(s.N * s.C * s.D * s.H * s.W), 3.0));
  d.w = check::rounded<Element>(
      check::random_values(random, size_t(s.K * s.C * s.T * s.R * s.S), 1.0 / std::sqrt(fan_in)));
  if (bias) d.bias = check::rounded<Element>(check::random_values(random, size_t(s.K), 1.0));
  return d;
}

// What the products take of an operand.
std::vector<double> operand(const std::vector<Element>& v) {
  std::vector<double> out = check::widened(v);
  if constexpr (kOperand == WindowOperand::kTf32) {
    for (double& x : out) x = __uint_as_float(round_tf32(float(x)));
  }
  return out;
}

// Unit error of a value relative to the sum of absolute products: float accumulation, truncated,
// over the longest chain of products; the halves of a split operand leave out 2^-22.
constexpr double kTolerance = kOperand == WindowOperand::kSplit ? 2e-6 : 1e-6;

template <class Config>
void launch(const Shape& s, const Data& d, int slab_planes, unsigned blocks, Activation kind,
            std::vector<float>& mean, std::vector<float>& m2) {
  WindowParameters p{};
  p.x = d.x.data();
  p.w = d.w.data();
  p.bias = d.bias.empty() ? nullptr : d.bias.data();
  p.N = int32_t(s.N);
  p.geometry = window_geometry(int32_t(s.D), int32_t(s.H), int32_t(s.W), int32_t(s.K),
                               int32_t(s.Z()), int32_t(s.P()), int32_t(s.Q()), int32_t(s.pad_d),
                               int32_t(s.pad_h), int32_t(s.pad_w), slab_planes, Config::kTiles);
  std::vector<float2> partial(size_t(s.N * window_pieces(p.geometry) * s.K), float2{NAN, NAN});
  p.partial = partial.data();
  mean.assign(size_t(s.N * s.K), NAN);
  m2.assign(size_t(s.N * s.K), NAN);
  typename Config::ActivationType activation{};
  if constexpr (std::is_same_v<typename Config::ActivationType, ActivationFn>) {
    activation.kind = kind;
  }
  emulate(dim3(blocks, unsigned(s.K + 15) / 16), dim3(Config::kThreads), Config::kSharedBytes,
          conv_window_kernel<Config>, p, activation);
  emulate(dim3(unsigned(s.N * s.K + 127) / 128), dim3(128), 0, merge_window_kernel, p.geometry, p.N,
          partial.data(), mean.data(), m2.data());
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

template <int T, int R, int S, int C, bool General, int Tiles = 4, int FullTiles = 0>
using Kernel = WindowConfig<T, R, S, C, kOperand, HardswishFn, General, Tiles, FullTiles>;

}  // namespace

int main() {
  std::mt19937_64 random(20240611);
  const auto simple = [&](auto config, Shape s, const char* note = "", int slab_planes = 1 << 20) {
    using Config = decltype(config);
    s.C = Config::C, s.T = Config::T, s.R = Config::R, s.S = Config::S;
    run<Config>(s, make_data(s, random, s.K != 7), note, slab_planes);
  };
  //                       N  C  D  H  W   K  T  R  S
  simple(Kernel<4, 4, 4, 3, false, 4, 3>(), {1, 0, 9, 5, 32, 16, 0, 0, 0}, "masks in one tile");
  simple(Kernel<4, 4, 4, 3, true>(), {2, 0, 6, 5, 29, 24, 0, 0, 0});
  simple(Kernel<4, 4, 4, 3, false>(), {1, 0, 4, 4, 6, 1, 0, 0, 0}, "one plane");
  simple(Kernel<4, 4, 4, 3, true>(), {1, 0, 5, 5, 31, 7, 0, 0, 0, 3, 3, 3}, "full padding");
  simple(Kernel<4, 4, 4, 3, true>(), {1, 0, 8, 4, 64, 16, 0, 0, 0, 1, 0, 2}, "slabs", 3);
  simple(Kernel<3, 3, 3, 1, true>(), {1, 0, 7, 6, 33, 7, 0, 0, 0, 1, 1, 1});
  simple(Kernel<3, 3, 3, 1, true>(), {1, 0, 2, 3, 5, 257, 0, 0, 0, 2, 2, 2});
  simple(Kernel<3, 3, 3, 2, true>(), {1, 0, 1, 1, 40, 16, 0, 0, 0, 1, 1, 1});
  return 0;
}
