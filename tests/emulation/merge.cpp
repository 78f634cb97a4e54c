// The merge of the fused forward's pieces on the host, alone and with the normalisation behind it:
// moments against float64, and the same bits from one launch as from two.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/conv_activation_moments_merge.cuh"
#include "cuda/conv_activation_moments_wgmma_pieces.cuh"
#include "cuda/conv_activation_moments_window_pieces.cuh"
#include "cuda/group_norm_pool.cuh"
#include "check.h"
// clang-format on

namespace {

using namespace convnormpool;
using check::Shape;

std::mt19937_64 generator(11);

// The outputs that a piece stands for.
std::vector<double> counts(const WgmmaPieces& p) {
  std::vector<double> n;
  for (int i = 0; i < p.P * p.column_tiles; ++i) {
    const int first = p.first_column + 32 * (i % p.column_tiles);
    n.push_back(double(p.Z) * (std::min(first + 32, p.Q) - std::max(first, 0)));
  }
  return n;
}
std::vector<double> counts(const WindowPieces& p) {
  std::vector<double> n;
  for (int i = 0; i < window_pieces(p.geometry); ++i) {
    const WindowPiece piece = window_piece(p.geometry, i);
    n.push_back(double(piece.planes) * piece.columns);
  }
  return n;
}

void set_partials(WgmmaPieces& p, const float2* partials) { p.partials = partials; }
void set_partials(WindowPieces& p, const float2* partials) { p.partial = partials; }

// mean and M2 of the samples, and the normalised output as bytes.
struct Results {
  std::vector<float> mean, m2;
  std::vector<char> out;
};

template <class Pieces>
unsigned blocks_of(const Pieces& p, int block_samples) {
  return unsigned((p.samples() + block_samples - 1) / block_samples);
}

// K channels in `groups` groups; out of `dtype`, poisoned.
template <class Pieces>
void run(const char* name, Pieces pieces, int groups, DType dtype, bool affine) {
  const std::vector<double> n = counts(pieces);
  const size_t N = size_t(pieces.samples()), K = size_t(pieces.channels());
  double positions = 0;
  for (const double c : n) positions += c;

  // Exactly as much memory as there are pieces, so that the sanitizer sees what is read beyond.
  std::vector<float2> partials(N * n.size() * K);
  std::normal_distribution<float> normal;
  for (float2& piece : partials) {
    piece = float2{3 + normal(generator), 10 * std::fabs(normal(generator))};
  }
  set_partials(pieces, partials.data());
  std::vector<float> weight(K), bias(K);
  for (size_t k = 0; k < K; ++k) weight[k] = normal(generator), bias[k] = normal(generator);

  const auto norm_of = [&](Results& r) {
    r.mean.assign(N * K, NAN), r.m2.assign(N * K, NAN);
    r.out.assign(N * K * size_t(element_size(dtype)), char(0xFF));
    const auto typed = [](std::vector<float>& v) {
      return TypedPointer{v.data(), DType::kFloat32};
    };
    NormPool norm{};
    norm.p = {typed(r.mean), typed(r.m2), {}, int64_t(N), int64_t(K), groups, positions, 1e-5};
    group_norm_pool_derive(norm.p);
    if (affine) norm.p.weight = typed(weight), norm.bias = typed(bias);
    norm.out = {r.out.data(), dtype};
    return norm;
  };

  // Two launches.
  Results two;
  const NormPool norm = norm_of(two);
  constexpr int kUnits = kMergeLeastUnits;
  const size_t tasks = N * size_t(merge_tiles(pieces.channels()));
  emulate(dim3(unsigned((tasks + kUnits - 1) / kUnits)), dim3(kUnits * kMergeThreads), 0,
          merge_pieces_kernel<Pieces>, pieces, two.mean.data(), two.m2.data());
  const int64_t per_block = kGroupThreads >> norm.p.lanes_log2;
  emulate(dim3(unsigned((int64_t(N) * groups + per_block - 1) / per_block)), dim3(kGroupThreads), 0,
          group_norm_pool_kernel<true>, norm);

  for (size_t i = 0; i < N * K; ++i) {
    const size_t k = i % K;
    double mean = 0, m2 = 0;
    const auto piece = [&](size_t j) { return partials[(i / K * n.size() + j) * K + k]; };
    for (size_t j = 0; j < n.size(); ++j) mean += n[j] * double(piece(j).x) / positions;
    for (size_t j = 0; j < n.size(); ++j) {
      m2 += double(piece(j).y) + n[j] * std::pow(double(piece(j).x) - mean, 2);
    }
    if (!(std::fabs(two.mean[i] - mean) <= 1e-6 * std::fabs(mean) + 1e-7)) check::fail("mean");
    if (!(std::fabs(two.m2[i] - m2) <= 1e-6 * m2)) check::fail("m2");
  }

  // One launch: a block's samples and units as the host chooses them, and others.
  const MergeBlock few = merge_block(pieces.samples(), pieces.channels(), 1000),
                   many = merge_block(pieces.samples(), pieces.channels(), 1);
  const int room = kMergeMostMoments / pieces.channels();
  const MergeBlock other{std::min(3, room), few.units};
  for (const MergeBlock& block : {few, many, MergeBlock{1, 1}, other}) {
    if (block.samples > room) check::fail("more moments than a block keeps");
    Results one;
    emulate(dim3(blocks_of(pieces, block.samples)), dim3(unsigned(block.units * kMergeThreads)), 0,
            merge_norm_pool_kernel<Pieces>, pieces, block.samples, norm_of(one));
    if (memcmp(one.mean.data(), two.mean.data(), 4 * N * K) != 0 ||
        memcmp(one.m2.data(), two.m2.data(), 4 * N * K) != 0 || one.out != two.out) {
      printf("FAIL %s: one launch of %d samples a block gives other bits\n", name, block.samples);
      exit(1);
    }
  }
  printf("ok   %s N%d K%d groups %d, %d pieces\n", name, int(N), int(K), groups, int(n.size()));
}

Problem problem(const Shape& s, DType dtype) {
  Problem p{};
  p.N = s.N, p.C = s.C, p.D = s.D, p.H = s.H, p.W = s.W;
  p.K = s.K, p.T = s.T, p.R = s.R, p.S = s.S;
  p.padding[0] = s.pad_d, p.padding[1] = s.pad_h, p.padding[2] = s.pad_w;
  for (int i = 0; i < 3; ++i) p.stride[i] = p.dilation[i] = 1;
  p.groups = 1;
  p.dtype = dtype;
  return p;
}

void run_wgmma(const Shape& s, int groups, DType dtype, bool affine = true) {
  run("wgmma", wgmma_pieces_of(problem(s, dtype), nullptr), groups, dtype, affine);
}
void run_window(const Shape& s, int slab_planes, int groups, DType dtype, bool affine = true) {
  const auto narrow = [](int64_t extent) { return int32_t(extent); };
  const WindowGeometry geometry = window_geometry(
      narrow(s.D), narrow(s.H), narrow(s.W), narrow(s.K), narrow(s.Z()), narrow(s.P()),
      narrow(s.Q()), narrow(s.pad_d), narrow(s.pad_h), narrow(s.pad_w), slab_planes, 4);
  run("window", WindowPieces{geometry, nullptr, int32_t(s.N)}, groups, dtype, affine);
}

// A sample whose M2 leaves float32's range, or is no number: NaN, and so is all of its group.
template <class Pieces>
void not_finite(Pieces pieces) {
  const size_t K = size_t(pieces.channels()), all = counts(pieces).size() * K;
  for (const float2 value :
       {float2{0, 3e38f}, float2{1e30f, 1}, float2{1, NAN}, float2{NAN, NAN}}) {
    std::vector<float2> partials(2 * all, float2{1, 1});
    for (size_t i = 1; i < all; i += K) partials[i] = i % (2 * K) == 1 ? value : float2{0, 3e38f};
    set_partials(pieces, partials.data());
    std::vector<float> mean(2 * K), m2(mean), out(mean);
    const DType f = DType::kFloat32;
    NormPool norm{};
    norm.p = {{mean.data(), f}, {m2.data(), f}, {}, 2, int64_t(K), 1, 100, 1e-5};
    group_norm_pool_derive(norm.p);
    norm.out = {out.data(), f};
    const MergeBlock block = merge_block(pieces.samples(), pieces.channels(), 1);
    emulate(dim3(blocks_of(pieces, block.samples)), dim3(unsigned(block.units * kMergeThreads)), 0,
            merge_norm_pool_kernel<Pieces>, pieces, block.samples, norm);
    for (size_t k = 0; k < K; ++k) {
      if (std::isfinite(m2[k]) == (k == 1)) check::fail("M2 that is not finite");
      if (!std::isnan(out[k])) check::fail("a group with a channel that is not finite");
      if (!std::isfinite(out[K + k])) check::fail("another sample has changed");
    }
  }
  puts("ok   not finite");
}

}  // namespace

int main() {
  const DType f32 = DType::kFloat32, f16 = DType::kFloat16, bf16 = DType::kBFloat16;
  //     N  C  D   H   W   K  T  R  S  padding
  run_wgmma({9, 3, 16, 32, 32, 16, 4, 4, 4}, 4, f32);
  run_wgmma({1, 3, 5, 6, 32, 1, 4, 4, 4}, 1, f16);
  run_wgmma({6, 3, 5, 40, 64, 7, 4, 4, 4, 1, 1, 3}, 7, bf16);
  run_wgmma({3, 3, 5, 7, 120, 24, 4, 4, 4, 0, 0, 2}, 3, f32, false);
  run_wgmma({2, 1, 4, 5, 72, 257, 3, 3, 3, 1, 1, 1}, 1, f16);
  run_wgmma({1, 1, 3, 4, 16, 512, 3, 3, 3, 1, 1, 1}, 32, f32);
  run_window({3, 3, 16, 32, 32, 16, 4, 4, 4}, 32, 4, f32);
  run_window({1, 3, 5, 6, 29, 1, 4, 4, 4}, 32, 1, f16);
  run_window({4, 3, 9, 40, 70, 7, 4, 4, 4, 1, 1, 3}, 3, 7, bf16);
  run_window({3, 3, 5, 7, 120, 24, 4, 4, 4, 0, 0, 2}, 32, 3, f32, false);
  run_window({2, 1, 4, 20, 40, 257, 3, 3, 3, 1, 1, 1}, 32, 1, f16);
  not_finite(wgmma_pieces_of(problem({2, 3, 5, 6, 32, 16, 4, 4, 4}, f32), nullptr));
  not_finite(WindowPieces{window_geometry(5, 6, 29, 16, 2, 3, 26, 0, 0, 0, 32, 4), nullptr, 2});
  return 0;
}
