// The reduction kernels on the host, against float64: moments of an activated tensor in both
// layouts and their backward, GroupNorm of the pooled mean and its backward, the change of layout.
// clang-format off
#include "emulator.h"
#include "ptx.cuh"

#include "cuda/activation_moments.cuh"
#include "cuda/activation_moments_backward.cuh"
#include "cuda/channels_last.cuh"
#include "cuda/group_norm_pool.cuh"
#include "check.h"
// clang-format on

namespace {

using namespace convnormpool;

std::mt19937_64 generator(7);

void require(bool holds, const std::string& what) {
  if (holds) return;
  printf("FAIL %s\n", what.c_str());
  exit(1);
}

void require_close(double value, double expected, double tolerance, const std::string& what) {
  if (std::fabs(value - expected) <= tolerance) return;
  printf("FAIL %s: %.9g, expected %.9g within %.2g\n", what.c_str(), value, expected, tolerance);
  exit(1);
}

unsigned ceil_divide(int64_t a, int64_t b) { return unsigned((a + b - 1) / b); }

template <class T>
constexpr double kEpsilon = std::is_same_v<T, double>   ? 1e-15
                            : std::is_same_v<T, float>  ? 1.2e-7
                            : std::is_same_v<T, __half> ? 1e-3
                                                        : 8e-3;

struct Case {
  int64_t N, K, positions;
  bool channels_last;
  double offset;
  int64_t at(int64_t n, int64_t k, int64_t s) const {
    return channels_last ? (n * positions + s) * K + k : (n * K + k) * positions + s;
  }
};

template <class T, class Fn>
void test_moments(const Case& c, const Fn& fn, Activation kind) {
  using S = statistics_t<T>;
  constexpr int64_t kVector = kVectorBytes / sizeof(T);
  const auto values = check::random_values(generator, size_t(c.N * c.K * c.positions), 3.0);
  std::vector<T> y(values.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = narrow(values[i] + c.offset, T());
  const ActMomentsPartition partition = act_moments_partition(c.K, c.positions, c.channels_last);
  std::vector<S> mean(size_t(c.N * c.K), S(NAN)), m2(mean);
  std::vector<S> workspace(size_t(act_moments_workspace(c.N, c.K, c.positions, c.channels_last)),
                           S(NAN));
  const MomentsOut<S> out{mean.data(), m2.data(), workspace.data()};
  const int64_t rows = c.N * c.K;
  const ChannelTile tile = channel_tile(c.K);
  const bool vectors = c.positions % kVector == 0;
  const RowAccess access = vectors ? RowAccess::kWide : RowAccess::kStrided;
  if (c.channels_last) {
    const dim3 grid(unsigned(partition.pieces * tile.tiles), unsigned(c.N));
    if (tile.vector == 4) {
      emulate(grid, dim3(kMomentsThreads), 0, activation_moments_channels_kernel<T, Fn, 4>,
              y.data(), c.N, c.K, c.positions, tile, partition, true, fn, out);
    } else {
      emulate(grid, dim3(kMomentsThreads), 0, activation_moments_channels_kernel<T, Fn, 1>,
              y.data(), c.N, c.K, c.positions, tile, partition, true, fn, out);
    }
  } else if (c.positions <= kWarpRowPositions) {
    const int log2 = ceil_log2((c.positions + 3) / 4, 5);
    emulate(dim3(ceil_divide(rows, kMomentsThreads >> log2)), dim3(kMomentsThreads), 0,
            activation_moments_warp_kernel<T, Fn>, y.data(), rows, int(c.positions), access, log2,
            fn, out);
  } else {
    emulate(dim3(unsigned(partition.pieces), unsigned(rows)), dim3(kMomentsThreads), 0,
            activation_moments_block_kernel<T, Fn>, y.data(), rows, c.positions, partition, access,
            fn, out);
  }
  if (partition.pieces > 1) {
    const int log2 = ceil_log2(partition.pieces, 5);
    emulate(dim3(ceil_divide(rows, kMomentsThreads >> log2)), dim3(kMomentsThreads), 0,
            activation_moments_merge_kernel<S>, workspace.data(), rows, c.positions, partition,
            log2, mean.data(), m2.data());
  }
  // Its gradient, with gradients of the moments that differ by row.
  std::vector<S> grad_mean(mean.size()), grad_m2(mean.size());
  for (size_t i = 0; i < mean.size(); ++i) grad_mean[i] = S(1 + i), grad_m2[i] = S(0.1) * S(i);
  std::vector<T> dy(y.size());
  const GradientTensors<T> tensors{y.data(),
                                   dy.data(),
                                   false,
                                   mean.data(),
                                   grad_mean.data(),
                                   grad_m2.data(),
                                   S(1) / S(c.positions)};
  if (!c.channels_last) {
    const int log2 = ceil_log2((c.positions + kVector - 1) / kVector, 8);
    emulate(
        dim3(ceil_divide(c.positions, kBackwardPiece), ceil_divide(rows, kBackwardThreads >> log2)),
        dim3(kBackwardThreads), 0, activation_moments_backward_rows_kernel<T, Fn>, tensors, rows,
        c.positions, log2, vectors, fn);
  } else {
    const dim3 grid(ceil_divide(c.positions, int64_t{tile.rows} * 32) * unsigned(tile.tiles),
                    unsigned(c.N));
    if (tile.vector == 4) {
      emulate(grid, dim3(kMomentsThreads), 0, activation_moments_backward_channels_kernel<T, Fn, 4>,
              tensors, c.N, c.K, c.positions, tile, 32, true, fn);
    } else {
      emulate(grid, dim3(kMomentsThreads), 0, activation_moments_backward_channels_kernel<T, Fn, 1>,
              tensors, c.N, c.K, c.positions, tile, 32, true, fn);
    }
  }

  const double eps = kEpsilon<S>;
  for (int64_t n = 0; n < c.N; ++n) {
    for (int64_t k = 0; k < c.K; ++k) {
      const size_t row = size_t(n * c.K + k);
      double total = 0, squares = 0, largest = 0;
      for (int64_t s = 0; s < c.positions; ++s) {
        const double h = check::activate(kind, double(widen(y[size_t(c.at(n, k, s))])));
        total += h;
        largest = std::fmax(largest, std::fabs(h));
      }
      const double expected = total / double(c.positions);
      for (int64_t s = 0; s < c.positions; ++s) {
        const double h = check::activate(kind, double(widen(y[size_t(c.at(n, k, s))])));
        squares += (h - expected) * (h - expected);
      }
      const double unit = 4 * eps * largest;
      require_close(double(mean[row]), expected, unit, "mean");
      require_close(double(m2[row]), squares,
                    2 * unit * std::sqrt(double(c.positions) * squares) +
                        double(c.positions) * unit * unit + 16 * eps * squares,
                    "m2");
      for (int64_t s = 0; s < c.positions; ++s) {
        const size_t at = size_t(c.at(n, k, s));
        const double x = double(widen(y[at]));
        double derivative = 0;
        activations::visit(kind, [&](auto a) { derivative = a.derivative(x); });
        const double difference = check::activate(kind, x) - double(mean[row]);
        const double g =
            (double(grad_mean[row]) / double(c.positions) + 2 * double(grad_m2[row]) * difference) *
            derivative;
        const double size = double(grad_mean[row]) / double(c.positions) +
                            2 * double(grad_m2[row]) * (std::fabs(difference) + largest);
        require_close(double(widen(dy[at])), g, 16 * eps * size + kEpsilon<T> * std::fabs(g) + 1e-7,
                      "dy");
      }
    }
  }
  printf("ok   moments N%d K%d positions %d %s of %d bytes\n", int(c.N), int(c.K), int(c.positions),
         c.channels_last ? "channels-last" : "channels-first", int(sizeof(T)));
}

template <class T>
TypedPointer typed(std::vector<T>& v, DType dtype) {
  return {v.data(), dtype};
}

// To the last bit, where exact quotients, as of the mean of equal numbers, are exact.
void test_divisor() {
  std::normal_distribution<double> normal;
  for (int64_t J = 1; J <= 2048; ++J) {
    const double divisor = double(J) * (J % 2 == 0 ? 50 : 1);
    const KnownDivisor by{divisor, 1.0 / divisor};
    for (int i = 0; i < 50; ++i) {
      const double x = std::ldexp(normal(generator), int(generator() % 80) - 40);
      const double equal = double(float(normal(generator)));
      if (by.divide(x) != x / divisor || by.divide(divisor * equal) != equal) {
        printf("FAIL %.17g by %.17g\n", x, divisor);
        exit(1);
      }
    }
    if (by.divide(INFINITY) != INFINITY || !std::isnan(by.divide(NAN))) {
      printf("FAIL what is not finite by %.17g\n", divisor);
      exit(1);
    }
  }
  puts("ok   quotients by known numbers");
}

void test_group_norm(int64_t N, int64_t K, int64_t groups) {
  const int64_t J = K / groups;
  const double count = 50, eps = 1e-5;
  std::vector<float> mean(size_t(N * K)), m2(mean), out(mean), grad(mean), to_mean(mean),
      to_m2(mean), group_mean(size_t(N * groups)), group_rstd(group_mean), weight(size_t(K), NAN),
      bias(weight), grad_weight(weight), grad_bias(weight);
  std::normal_distribution<float> normal;
  for (auto* v : {&mean, &grad, &weight, &bias}) {
    for (float& x : *v) x = normal(generator);
  }
  for (float& x : m2) x = 50 * std::fabs(normal(generator));
  const DType f = DType::kFloat32;
  GroupNormPool p{typed(mean, f), typed(m2, f), typed(weight, f), N, K, groups, count, eps};
  group_norm_pool_derive(p);
  const dim3 grid(ceil_divide(N * groups, kGroupThreads >> p.lanes_log2));
  emulate(grid, dim3(kGroupThreads), 0, group_norm_pool_kernel<true>,
          NormPool{p, typed(bias, f), typed(out, f), typed(group_mean, f), typed(group_rstd, f)});
  emulate(grid, dim3(kGroupThreads), 0, group_norm_pool_backward_kernel<true>, p, typed(grad, f),
          typed(to_mean, f), typed(to_m2, f));
  emulate(dim3(ceil_divide(J, int64_t{1} << p.lanes_log2), unsigned(groups)), dim3(64), 0,
          group_norm_pool_parameters_kernel<true>, p, typed(grad, f), typed(grad_weight, f),
          typed(grad_bias, f));
  std::vector<double> dw(size_t(K), 0.0), db(dw);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      double mu = 0, variance = 0, P = 0, Q = 0;
      for (int64_t j = 0; j < J; ++j) mu += mean[size_t(n * K + g * J + j)] / double(J);
      for (int64_t j = 0; j < J; ++j) {
        const size_t i = size_t(n * K + g * J + j);
        variance += m2[i] + count * (mean[i] - mu) * (mean[i] - mu);
        P += double(weight[size_t(g * J + j)]) * grad[i];
        Q += double(weight[size_t(g * J + j)]) * grad[i] * (mean[i] - mu);
      }
      const double r = 1 / std::sqrt(variance / (count * double(J)) + eps);
      require_close(group_mean[size_t(n * groups + g)], mu, 1e-6, "group mean");
      require_close(group_rstd[size_t(n * groups + g)], r, 1e-6 * r, "group rstd");
      for (int64_t j = 0; j < J; ++j) {
        const size_t k = size_t(g * J + j), i = size_t(n * K) + k;
        const double d = mean[i] - mu;
        require_close(out[i], weight[k] * d * r + bias[k], 1e-5, "out");
        const double expected = J == 1 ? 0
                                       : weight[k] * double(grad[i]) * r - r * P / double(J) -
                                             r * r * r * Q * d / double(J);
        require_close(to_mean[i], expected, 1e-5, "grad_mean");
        require_close(to_m2[i], J == 1 ? 0 : -r * r * r * Q / (2 * count * double(J)), 1e-5,
                      "grad_m2");
        dw[k] += double(grad[i]) * d * r;
        db[k] += grad[i];
      }
    }
  }
  for (size_t k = 0; k < size_t(K); ++k) {
    require_close(grad_weight[k], dw[k], 1e-5, "grad_weight");
    require_close(grad_bias[k], db[k], 1e-5, "grad_bias");
  }
  printf("ok   group_norm_pool N%d K%d groups %d\n", int(N), int(K), int(groups));
}

template <int kSize, class T>
void test_channels_last(int64_t N, int64_t C, int64_t positions) {
  std::vector<T> x(size_t(N * C * positions)), out(x.size(), T(-1));
  for (size_t i = 0; i < x.size(); ++i) x[i] = T(i * 7 + 3);
  const TransposeTile tile = transpose_tile(C, positions, kSize);
  constexpr int kUnit = kSize < kTransposeUnitBytes ? kTransposeUnitBytes / kSize : 1;
  const bool wide = positions % kUnit == 0 && C % kUnit == 0;
  emulate(dim3(unsigned(tile.position_tiles * tile.channel_tiles), unsigned(N)),
          dim3(kTransposeThreads), 0, to_channels_last_kernel<kSize>, x.data(), out.data(), N, C,
          positions, tile, wide, wide && tile.channels % kUnit == 0);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t s = 0; s < positions; ++s) {
        require(out[size_t((n * positions + s) * C + c)] == x[size_t((n * C + c) * positions + s)],
                "to_channels_last");
      }
    }
  }
  printf("ok   to_channels_last N%d C%d positions %d of %d bytes\n", int(N), int(C), int(positions),
         kSize);
}

}  // namespace

int main() {
  const HardswishFn hardswish;
  test_moments<float>({2, 3, 37, false, 0}, hardswish, Activation::kHardswish);
  test_moments<float>({1, 2, 2052, false, 1000}, hardswish, Activation::kHardswish);
  test_moments<float>({1, 1, 16500, false, 0}, hardswish, Activation::kHardswish);
  test_moments<float>({2, 12, 77, true, 1000}, hardswish, Activation::kHardswish);
  test_moments<float>({1, 7, 700, true, 0}, hardswish, Activation::kHardswish);
  test_moments<__half>({1, 16, 96, false, 0}, hardswish, Activation::kHardswish);
  test_moments<__nv_bfloat16>({1, 8, 65, true, 0}, ActivationFn{Activation::kGelu},
                              Activation::kGelu);
  test_moments<double>({1, 3, 50, false, 0}, hardswish, Activation::kHardswish);
  test_divisor();
  test_group_norm(3, 16, 4);
  test_group_norm(2, 7, 7);
  test_group_norm(2, 30, 6);
  test_group_norm(1, 66, 1);
  test_channels_last<4, uint32_t>(2, 3, 101);
  test_channels_last<2, uint16_t>(1, 66, 40);
  test_channels_last<8, uint64_t>(1, 5, 33);
  return 0;
}
