// Activation and moments of a convolution's output that is in memory, and the backward.
//
// A channel is read in blocks that fit the first-level cache, two passes each, merged by Chan's
// rule in the order of the positions. Long channels are cut into segments, whose borders depend on
// the shape alone, so that a few of them still occupy all threads.
#include "common.h"

namespace convnormpool {
namespace cpu {
namespace {

constexpr int64_t kBlock = 4096;           // elements that one two-pass block holds
constexpr int64_t kSegment = 64 * kBlock;  // elements of one parallel item
constexpr int64_t kColumnRows = 32;        // rows of one block of column_moments

// y (N, K, *) as one of the two layouts that the operators take.
struct Layout {
  int64_t samples = 0;
  int64_t channels = 0;
  int64_t positions = 1;
  bool channels_last = false;
};

Layout layout_of(const Tensor& y, const char* name) {
  STD_TORCH_CHECK(y.is_cpu(), name, " must be a CPU tensor");
  STD_TORCH_CHECK(y.dim() >= 2, name, " must have at least two dimensions");
  Layout layout;
  layout.samples = y.size(0);
  layout.channels = y.size(1);
  for (int64_t d = 2; d < y.dim(); ++d) layout.positions *= y.size(d);
  if (y.is_contiguous()) return layout;
  layout.channels_last = true;
  bool dense = layout.channels == 1 || y.stride(1) == 1;
  int64_t stride = layout.channels;
  for (int64_t d = y.dim() - 1; d >= 2; --d) {
    dense = dense && (y.size(d) == 1 || y.stride(d) == stride);
    stride *= y.size(d);
  }
  dense = dense && (layout.samples == 1 || y.stride(0) == stride);
  STD_TORCH_CHECK(dense, name, " must be contiguous or channels-last");
  return layout;
}

template <typename S>
Merger segment_moments(const S* y, int64_t n, Activation kind, Compute<S>* scratch) {
  using T = Compute<S>;
  const Kernels<T>& k = kernels<T>();
  Merger merger;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = std::min(kBlock, n - i);
    const T* block = as_compute(y + i, scratch, size);
    k.activate(kind, block, scratch, size);
    const Moments m = k.moments(scratch, nullptr, size, size, merger.guess(scratch[0]));
    merger.add(static_cast<double>(size), m.mean, m.m2);
  }
  return merger;
}

template <typename T>
void write_moments(const Merger& merger, int64_t i, T* mean, T* m2) {
  mean[i] = static_cast<T>(merger.mean);
  m2[i] = static_cast<T>(merger.m2);
}

template <typename S>
void channels_first_moments(const S* y, const Layout& layout, Activation kind, Compute<S>* mean,
                            Compute<S>* m2) {
  using T = Compute<S>;
  const int64_t rows = layout.samples * layout.channels;
  const int64_t positions = layout.positions;
  const int64_t segments = ceil_div(positions, kSegment);
  std::vector<Merger> partial(static_cast<size_t>(segments > 1 ? rows * segments : 0));
  const int64_t grain = std::max<int64_t>(1, kBlock / positions);
  torch::stable::parallel_for(0, rows * segments, grain, [&](int64_t begin, int64_t end) {
    Buffer<T> scratch(kBlock);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / segments;
      const int64_t first = (item % segments) * kSegment;
      const Merger merger = segment_moments(
          y + row * positions + first, std::min(kSegment, positions - first), kind, scratch.data());
      if (segments == 1) {
        write_moments(merger, row, mean, m2);
      } else {
        partial[item] = merger;
      }
    }
  });
  for (int64_t row = 0; segments > 1 && row < rows; ++row) {
    Merger merger;
    for (int64_t s = 0; s < segments; ++s) {
      const Merger& part = partial[row * segments + s];
      merger.add(part.count, part.mean, part.m2);
    }
    write_moments(merger, row, mean, m2);
  }
}

// Moments of the channels of `count` consecutive positions, into merger[channels]. Positions are
// taken `repeat` at a time, as columns of their own, so that few channels still fill the vectors.
template <typename S>
class ColumnMoments {
  using T = Compute<S>;

 public:
  ColumnMoments(int64_t channels, Activation kind)
      : channels_(channels),
        kind_(kind),
        repeat_(std::max<int64_t>(1, 128 / channels)),
        scratch_(kColumnRows * repeat_ * channels),
        mean_(repeat_ * channels),
        m2_(repeat_ * channels) {}

  void add(const S* y, int64_t count, Merger* merger) {
    int64_t position = 0;
    while (position < count) {
      const int64_t left = count - position;
      const int64_t repeat = std::min(repeat_, left);
      const int64_t rows = std::min(kColumnRows, left / repeat);
      const int64_t period = repeat * channels_;
      const T* block = as_compute(y + position * channels_, scratch_.data(), rows * period);
      kernels<T>().column_moments(kind_, block, scratch_.data(), rows, period, mean_.data(),
                                  m2_.data());
      for (int64_t r = 0; r < repeat; ++r) {
        for (int64_t k = 0; k < channels_; ++k) {
          const int64_t l = r * channels_ + k;
          merger[k].add(static_cast<double>(rows), mean_[l], m2_[l]);
        }
      }
      position += rows * repeat;
    }
  }

 private:
  const int64_t channels_;
  const Activation kind_;
  const int64_t repeat_;
  Buffer<T> scratch_;
  Buffer<double> mean_;
  Buffer<double> m2_;
};

template <typename S>
void channels_last_moments(const S* y, const Layout& layout, Activation kind, Compute<S>* mean,
                           Compute<S>* m2) {
  const int64_t channels = layout.channels;
  const int64_t positions = layout.positions;
  const int64_t length = ceil_div(kSegment, channels);
  const int64_t segments = ceil_div(positions, length);
  std::vector<Merger> partial(
      static_cast<size_t>(segments > 1 ? layout.samples * segments * channels : 0));
  const int64_t grain = std::max<int64_t>(1, kBlock / (positions * channels));
  torch::stable::parallel_for(0, layout.samples * segments, grain, [&](int64_t begin, int64_t end) {
    ColumnMoments<S> columns(channels, kind);
    std::vector<Merger> merger(static_cast<size_t>(channels));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / segments;
      const int64_t first = (item % segments) * length;
      std::fill(merger.begin(), merger.end(), Merger());
      columns.add(y + (n * positions + first) * channels, std::min(length, positions - first),
                  merger.data());
      for (int64_t k = 0; k < channels; ++k) {
        if (segments == 1) {
          write_moments(merger[k], n * channels + k, mean, m2);
        } else {
          partial[item * channels + k] = merger[k];
        }
      }
    }
  });
  for (int64_t i = 0; segments > 1 && i < layout.samples * channels; ++i) {
    Merger merger;
    for (int64_t s = 0; s < segments; ++s) {
      const Merger& part = partial[(i / channels * segments + s) * channels + i % channels];
      merger.add(part.count, part.mean, part.m2);
    }
    write_moments(merger, i, mean, m2);
  }
}

void act_moments_out(Tensor y, int64_t activation, Tensor mean, Tensor m2,
                     std::optional<Tensor> /*workspace*/) {
  check_activation(activation);
  const Layout layout = layout_of(y, "y");
  const int64_t rows = layout.samples * layout.channels;
  const ScalarType statistics = statistics_dtype(y.scalar_type());
  check_dense(mean, "mean", statistics, rows);
  check_dense(m2, "m2", statistics, rows);
  if (rows == 0) return;
  STD_TORCH_CHECK(layout.positions > 0, "y must have at least one position");
  const Activation kind = static_cast<Activation>(activation);
  dispatch_dtype(y.scalar_type(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    if (layout.channels_last) {
      channels_last_moments(input_data<S>(y), layout, kind, output_data<T>(mean),
                            output_data<T>(m2));
    } else {
      channels_first_moments(input_data<S>(y), layout, kind, output_data<T>(mean),
                             output_data<T>(m2));
    }
  });
}

// dy of n elements of one channel, or of whole rows of channels: kernel(y, dy) computes it in T.
template <typename S, typename D, typename F>
void through_scratch(const S* y, D* dy, int64_t n, Compute<S>* scratch, const F& kernel) {
  using T = Compute<S>;
  const T* in = as_compute(y, scratch, n);
  if constexpr (std::is_same_v<D, T>) {
    kernel(in, dy);
  } else {
    kernel(in, scratch);
    for (int64_t i = 0; i < n; ++i) dy[i] = D(scratch[i]);
  }
}

template <typename T>
Slope<T> slope_of(const T* mean, const T* grad_mean, const T* grad_m2, int64_t i,
                  int64_t positions) {
  return {static_cast<T>(static_cast<double>(grad_mean[i]) / static_cast<double>(positions)),
          T(2) * grad_m2[i], mean[i]};
}

template <typename S, typename D>
void channels_first_backward(const S* y, const Layout& layout, Activation kind,
                             const Compute<S>* mean, const Compute<S>* grad_mean,
                             const Compute<S>* grad_m2, D* dy) {
  using T = Compute<S>;
  const int64_t rows = layout.samples * layout.channels;
  const int64_t positions = layout.positions;
  const int64_t segments = ceil_div(positions, kSegment);
  const int64_t grain = std::max<int64_t>(1, kBlock / positions);
  torch::stable::parallel_for(0, rows * segments, grain, [&](int64_t begin, int64_t end) {
    Buffer<T> scratch(kBlock);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / segments;
      const int64_t first = (item % segments) * kSegment;
      const int64_t last = std::min(positions, first + kSegment);
      const Slope<T> slope = slope_of(mean, grad_mean, grad_m2, row, positions);
      for (int64_t i = first; i < last; i += kBlock) {
        const int64_t size = std::min(kBlock, last - i);
        through_scratch(
            y + row * positions + i, dy + row * positions + i, size, scratch.data(),
            [&](const T* in, T* out) { kernels<T>().slope(kind, in, out, size, slope, nullptr); });
      }
    }
  });
}

template <typename S, typename D>
void channels_last_backward(const S* y, const Layout& layout, Activation kind,
                            const Compute<S>* mean, const Compute<S>* grad_mean,
                            const Compute<S>* grad_m2, D* dy) {
  using T = Compute<S>;
  const int64_t channels = layout.channels;
  const int64_t positions = layout.positions;
  const int64_t repeat = std::max<int64_t>(1, 128 / channels);
  const int64_t period = repeat * channels;
  const int64_t block = std::max<int64_t>(1, kBlock / period) * repeat;
  const int64_t length = std::max<int64_t>(1, kSegment / (block * channels)) * block;
  const int64_t segments = ceil_div(positions, length);
  torch::stable::parallel_for(0, layout.samples * segments, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> scratch(block * channels);
    Buffer<T> base(period);
    Buffer<T> factor(period);
    Buffer<T> centre(period);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / segments;
      for (int64_t l = 0; l < period; ++l) {
        const Slope<T> slope =
            slope_of(mean, grad_mean, grad_m2, n * channels + l % channels, positions);
        base[l] = slope.base;
        factor[l] = slope.slope;
        centre[l] = slope.mean;
      }
      const int64_t first = (item % segments) * length;
      const int64_t last = std::min(positions, first + length);
      int64_t i = first;
      while (i < last) {
        const int64_t columns = std::min(repeat, last - i);
        const int64_t rows = std::min(block / repeat, (last - i) / columns);
        const int64_t offset = (n * positions + i) * channels;
        through_scratch(y + offset, dy + offset, rows * columns * channels, scratch.data(),
                        [&](const T* in, T* out) {
                          kernels<T>().column_slope(kind, in, out, rows, columns * channels,
                                                    base.data(), factor.data(), centre.data());
                        });
        i += rows * columns;
      }
    }
  });
}

void act_moments_backward_out(Tensor y, Tensor mean, Tensor grad_mean, Tensor grad_m2,
                              int64_t activation, Tensor dy) {
  check_activation(activation);
  const Layout layout = layout_of(y, "y");
  const Layout dy_layout = layout_of(dy, "dy");
  const int64_t rows = layout.samples * layout.channels;
  const ScalarType dtype = y.scalar_type();
  const ScalarType statistics = statistics_dtype(dtype);
  check_dense(mean, "mean", statistics, rows);
  check_dense(grad_mean, "grad_mean", statistics, rows);
  check_dense(grad_m2, "grad_m2", statistics, rows);
  STD_TORCH_CHECK(dy.scalar_type() == dtype || dy.scalar_type() == statistics,
                  "dy must have y's dtype or the dtype of the statistics");
  STD_TORCH_CHECK(dy_layout.samples == layout.samples && dy_layout.channels == layout.channels &&
                      dy_layout.positions == layout.positions,
                  "dy must have y's sizes");
  // A tensor with one channel or one position has both layouts.
  STD_TORCH_CHECK(dy_layout.channels_last == layout.channels_last || layout.channels == 1 ||
                      layout.positions == 1,
                  "dy must have y's layout");
  if (rows == 0 || layout.positions == 0) return;
  const Activation kind = static_cast<Activation>(activation);
  dispatch_dtype(dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const auto run = [&](auto* out) {
      const auto backward = layout.channels_last
                                ? channels_last_backward<S, std::decay_t<decltype(*out)>>
                                : channels_first_backward<S, std::decay_t<decltype(*out)>>;
      backward(input_data<S>(y), layout, kind, input_data<T>(mean), input_data<T>(grad_mean),
               input_data<T>(grad_m2), out);
    };
    if (dy.scalar_type() == dtype) {
      run(output_data<S>(dy));
    } else {
      run(output_data<T>(dy));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CPU, m) {
  m.impl("_act_moments_out", TORCH_BOX(&act_moments_out));
  m.impl("_act_moments_backward_out", TORCH_BOX(&act_moments_backward_out));
}

}  // namespace cpu
}  // namespace convnormpool
