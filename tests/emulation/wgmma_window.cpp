// The Hopper window kernel on the host, against float64. Compiled once for each operand kind:
// -DOPERAND=kTf32, kFloat16, kBFloat16 or kSplit.
// The emulated instructions come before the kernels.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

// Inlined as on the device the kernel's copies of a plane take a compiler minutes.
#undef __forceinline__
#define __forceinline__ inline
#include "cuda/conv_activation_moments_wgmma.cuh"
#include "check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::Shape;

constexpr WgmmaOperand kOperand = WgmmaOperand::OPERAND;
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
  std::vector<double> out = check::widened(v);
  if constexpr (kOperand == WgmmaOperand::kTf32) {
    for (double& x : out) x = __uint_as_float(round_tf32(__float_as_uint(float(x))));
  }
  return out;
}

// Unit error of a value relative to the sum of absolute products: float accumulation, truncated,
// over the longest chain of products; the halves of a split operand leave out 2^-22.
constexpr double kTolerance = kOperand == WgmmaOperand::kSplit ? 2e-6 : 1e-6;

template <class Config>
TensorMap tensor_map(const Shape& s, const WgmmaParams& p, bool rest) {
  TensorMap map{};
  map.base = static_cast<const char*>(p.x);
  map.element_bytes = Config::kElementBytes;
  const int64_t extent[5] = {s.W, s.H, s.D, s.C, s.N};
  uint64_t stride = Config::kElementBytes;
  for (int i = 0; i < 5; ++i) {
    map.extent[i] = uint64_t(extent[i]);
    map.stride_bytes[i] = stride;
    stride *= uint64_t(extent[i]);
  }
  wgmma_box<Config>(p, rest, map.box);
  return map;
}

using Partials = std::vector<float2>;

template <class Config, class Act>
Partials launch(const Shape& s, const Data& d, unsigned blocks, Act act, WgmmaParams& p) {
  Problem problem{s.N,
                  s.C,
                  s.D,
                  s.H,
                  s.W,
                  s.K,
                  s.T,
                  s.R,
                  s.S,
                  {1, 1, 1},
                  {s.pad_d, s.pad_h, s.pad_w},
                  {1, 1, 1},
                  1,
                  DType::kFloat32,
                  Precision::kTf32};
  p = wgmma_params<Config>(problem);
  // As aligned as an allocation on the device.
  Element* x =
      static_cast<Element*>(aligned_alloc(256, (d.x.size() * sizeof(Element) + 255) / 256 * 256));
  memcpy(x, d.x.data(), d.x.size() * sizeof(Element));
  p.x = x;
  p.w = d.w.data();
  p.b = d.bias.empty() ? nullptr : d.bias.data();
  std::vector<uint32_t> amax(size_t(s.N), 0);
  for (size_t i = 0; i < d.x.size(); ++i) {
    uint32_t& a = amax[i / (d.x.size() / size_t(s.N))];
    a = std::max(a, __float_as_uint(std::fabs(float(d.x[i]))));
  }
  p.amax = amax.data();
  Partials partials(size_t(s.N * wgmma_pieces(p) * s.K), float2{NAN, NAN});
  p.partials = partials.data();
  const TensorMap quad_map = tensor_map<Config>(s, p, false);
  const TensorMap rest_map = tensor_map<Config>(s, p, true);
  emulate(dim3(blocks, unsigned(s.K + 15) / 16), dim3(Config::kThreads),
          wgmma_shared_bytes<Config>(p), conv_activation_moments_wgmma<Config, Act>, p, quad_map,
          rest_map, act);
  free(x);
  return partials;
}

// Merges the pieces of each sample and channel in float64.
void merge(const Shape& s, const WgmmaParams& p, const Partials& partials, std::vector<float>& mean,
           std::vector<float>& m2) {
  mean.clear(), m2.clear();
  const int64_t pieces = wgmma_pieces(p);
  for (int64_t n = 0; n < s.N; ++n) {
    for (int64_t k = 0; k < s.K; ++k) {
      double count = 0, average = 0, squares = 0;
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t column = i % p.column_tiles;
        const double add = double(s.Z() * std::min<int64_t>(32, s.Q() - 32 * column));
        const float2 v = partials[size_t((n * pieces + i) * s.K + k)];
        const double delta = v.x - average;
        count += add;
        average += delta * add / count;
        squares += v.y + delta * delta * add * (count - add) / count;
      }
      mean.push_back(float(average));
      m2.push_back(float(squares));
    }
  }
}

template <class Config>
void run(const Shape& s, const Data& d, const char* note, Activation kind = Activation::kHardswish,
         double tolerance = kTolerance) {
  const auto expected =
      check::reference(s, operand(d.x), operand(d.w), check::widened(d.bias), kind);
  std::vector<float> mean, m2;
  WgmmaParams p;
  Partials partials, again;
  if (kind == Activation::kHardswish) {
    partials = launch<Config>(s, d, 1, HardswishFn{}, p);
    again = launch<Config>(s, d, 2, HardswishFn{}, p);
  } else {
    partials = launch<Config>(s, d, 1, ActivationFn{kind}, p);
    again = launch<Config>(s, d, 3, ActivationFn{kind}, p);
  }
  if (memcmp(partials.data(), again.data(), partials.size() * sizeof(float2)) != 0) {
    for (size_t i = 0; i < partials.size(); ++i) {
      if (memcmp(&partials[i], &again[i], sizeof(float2)) == 0) continue;
      printf("FAIL %s: another grid gives other bits: [%zu] (%g, %g), (%g, %g)\n", note, i,
             partials[i].x, partials[i].y, again[i].x, again[i].y);
    }
    exit(1);
  }
  merge(s, p, partials, mean, m2);
  char name[200];
  snprintf(name, sizeof(name), "%s (%ld,%ld,%ld,%ld,%ld)->%ld k(%ld,%ld,%ld) p(%ld,%ld,%ld)", note,
           long(s.N), long(s.C), long(s.D), long(s.H), long(s.W), long(s.K), long(s.T), long(s.R),
           long(s.S), long(s.pad_d), long(s.pad_h), long(s.pad_w));
  check::compare(name, s, expected, mean, m2, tolerance);
}

template <int C, int T, int R, int S, WgmmaLoads kLoads = WgmmaLoads::kTensor,
          WgmmaOverlap kOverlap = WgmmaOverlap::kOrdered, int kWarpgroups = 1, int kStages = 4>
using Config = WgmmaConfig<kOperand, C, T, R, S, kLoads, kOverlap, kWarpgroups, kStages>;

constexpr auto kElements = WgmmaLoads::kElements;
constexpr auto kTensor = WgmmaLoads::kTensor;
constexpr auto kFree = WgmmaOverlap::kFree;
constexpr auto kOrdered = WgmmaOverlap::kOrdered;

}  // namespace

int main() {
  std::mt19937_64 random(20);
  const auto with = [&](Shape s, auto f) { f(s, make_data(s, random)); };
  // Quads only, quads and a rest of each size, several samples a rest, a tail of samples; with
  // every residue of Z mod T.
  with({2, 3, 7, 7, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "quads"); });
  with({5, 3, 8, 8, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 3>>(s, d, "rest 1"); });
  with({3, 3, 9, 5, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kFree, 2, 3>>(s, d, "rest 2"); });
  with({2, 3, 10, 6, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "rest 3"); });
  // Fewer output planes than taps along the depth.
  with({3, 3, 4, 8, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "Z = 1"); });
  with({3, 3, 5, 8, 32, 16, 4, 4, 4},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "Z = 2"); });
  // Padding; several tiles of columns; rows that no tensor copy can take; masked channels.
  with({2, 3, 5, 6, 32, 16, 4, 4, 4, 3, 2, 1},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "padding"); });
  with({2, 3, 5, 5, 64, 7, 4, 4, 4, 1, 1, 3},
       [](auto s, auto d) { run<Config<3, 4, 4, 4, kTensor, kOrdered, 2>>(s, d, "wide, K = 7"); });
  for (int width : {5, 29, 31, 33}) {
    with({3, 3, 5, 6, width, 1, 4, 4, 4, 1, 0, 2}, [](auto s, auto d) {
      run<Config<3, 4, 4, 4, kElements, kFree, 2>>(s, d, "elements, K = 1");
    });
  }
  with({2, 3, 4, 5, 34, 24, 4, 4, 4, 0, 1, 0}, [](auto s, auto d) {
    run<Config<3, 4, 4, 4, kElements, kOrdered, 2>>(s, d, "elements, K = 24");
  });
  // Other filters and channels; every activation.
  with({3, 2, 5, 7, 16, 16, 3, 3, 3, 1, 1, 1},
       [](auto s, auto d) { run<Config<2, 3, 3, 3, kTensor, kOrdered, 2>>(s, d, "3 x 3 x 3"); });
  with({3, 1, 5, 7, 16, 16, 2, 3, 1, 1, 1, 0},
       [](auto s, auto d) { run<Config<1, 2, 3, 1, kTensor, kOrdered, 2>>(s, d, "2 x 3 x 1"); });
  with({3, 4, 5, 7, 16, 16, 1, 1, 2},
       [](auto s, auto d) { run<Config<4, 1, 1, 2, kTensor, kOrdered, 2>>(s, d, "1 x 1 x 2"); });
  with({3, 4, 5, 7, 16, 16, 1, 2, 4},
       [](auto s, auto d) { run<Config<4, 1, 2, 4, kTensor, kOrdered, 2>>(s, d, "1 x 2 x 4"); });
  for (int kind = 1; kind < convnormpool::kNumActivations; ++kind) {
    with({2, 1, 3, 5, 16, 16, 2, 2, 2}, [&](auto s, auto d) {
      run<Config<1, 2, 2, 2, kTensor, kOrdered, 2>>(s, d, activation_name(kind), Activation(kind),
                                                    4 * kTolerance);
    });
  }
  return 0;
}
