// What the programs of the portable forward kernels share: the kind of operand they are compiled
// for, inputs, and what the products take of them.
#pragma once

#include <type_traits>

#include "check.h"
#include "cuda/conv_activation_moments_window_pieces.cuh"

namespace check {

constexpr convnormpool::WindowOperand kOperand = convnormpool::WindowOperand::OPERAND;
constexpr bool kFloat = kOperand == convnormpool::WindowOperand::kTf32 ||
                        kOperand == convnormpool::WindowOperand::kSplit;
using Element = std::conditional_t<
    kFloat, float,
    std::conditional_t<kOperand == convnormpool::WindowOperand::kFloat16, __half, __nv_bfloat16>>;

struct Data {
  std::vector<Element> x, w, bias;
};

inline Data make_data(const Shape& s, std::mt19937_64& random, bool bias = true) {
  const double fan_in = double(s.C * s.T * s.R * s.S);
  Data d;
  d.x = rounded<Element>(random_values(random, size_t(s.N * s.C * s.D * s.H * s.W), 3.0));
  d.w = rounded<Element>(
      random_values(random, size_t(s.K * s.C * s.T * s.R * s.S), 1.0 / std::sqrt(fan_in)));
  if (bias) d.bias = rounded<Element>(random_values(random, size_t(s.K), 1.0));
  return d;
}

// What the products take of an operand.
inline std::vector<double> operand(const std::vector<Element>& v) {
  if (kOperand == convnormpool::WindowOperand::kTf32) return to_11_bits(widened(v));
  return widened(v);
}

// Unit error of a value relative to the sum of absolute products: float accumulation, truncated,
// over the longest chain of products; the halves of a split operand leave out 2^-22.
constexpr double kTolerance = 5e-7;

inline convnormpool::WindowGeometry geometry_of(const Shape& s, int slab_planes, int tiles) {
  return convnormpool::window_geometry(
      int32_t(s.D), int32_t(s.H), int32_t(s.W), int32_t(s.K), int32_t(s.Z()), int32_t(s.P()),
      int32_t(s.Q()), int32_t(s.pad_d), int32_t(s.pad_h), int32_t(s.pad_w), slab_planes, tiles);
}

// The merge of the pieces that a kernel has left.
inline void merge(const Shape& s, const convnormpool::WindowGeometry& geometry,
                  const std::vector<float2>& partial, std::vector<float>& mean,
                  std::vector<float>& m2) {
  using namespace convnormpool;
  const WindowPieces pieces{geometry, partial.data(), int32_t(s.N)};
  mean.assign(size_t(s.N * s.K), NAN);
  m2.assign(size_t(s.N * s.K), NAN);
  constexpr unsigned kUnits = kMergeLeastUnits;
  emulate(dim3((unsigned(s.N * merge_tiles(pieces.channels())) + kUnits - 1) / kUnits),
          dim3(kUnits * kMergeThreads), 0, merge_pieces_kernel<WindowPieces>, pieces, mean.data(),
          m2.data());
}

}  // namespace check
