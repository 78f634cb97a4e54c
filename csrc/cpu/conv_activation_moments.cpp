// The fused direct convolution, activation and moments: one output plane of one tile of channels
// at a time is in memory.
//
// A sample is cut into slabs of output planes whose borders depend on the problem alone; threads
// take (sample, slab) items and the slabs of a sample are merged in order.
#include "direct.h"

namespace convnormpool {
namespace cpu {
namespace {

// A slab should be worth this many operations, so that packing and merging do not count.
constexpr double kSlabFlops = 2e7;

int64_t slab_planes(const Geometry& g, int64_t element_size) {
  const int64_t plane_bytes = g.problem.C * g.plane_size * element_size;
  const int64_t fit = (kPackedBytes / plane_bytes - g.input_planes(1)) / g.problem.stride[0] + 1;
  const double worth = kSlabFlops / g.plane_flops();
  int64_t planes = std::max<int64_t>(2 * g.halo, 1);
  if (worth > static_cast<double>(planes)) {
    planes = worth >= static_cast<double>(g.Z) ? g.Z : static_cast<int64_t>(std::ceil(worth));
  }
  planes = std::max<int64_t>(1, std::min({planes, fit, g.Z}));
  // Slabs of equal size.
  return ceil_div(g.Z, ceil_div(g.Z, planes));
}

template <typename S>
class Forward {
  using T = Compute<S>;

 public:
  Forward(const Geometry& geometry, const Tensor& x, const Tensor& w,
          const std::optional<Tensor>& b, Activation kind)
      : g_(geometry),
        kind_(kind),
        x_(input_data<S>(x)),
        planes_(slab_planes(geometry, sizeof(T))),
        slabs_(ceil_div(geometry.Z, planes_)),
        channel_stride_(g_.input_planes(planes_) * g_.plane_size),
        tiles_(channel_tiles(g_.group_outputs, conv_tile_sizes<T>())),
        offsets_(tap_offsets(geometry, channel_stride_)),
        mask_(position_mask<T>(geometry)),
        bias_(bias_values<T>(b, g_.problem.K)),
        weights_(g_.problem.K * g_.taps) {
    pack_weights(input_data<S>(w), g_, tiles_, weights_.data());
  }

  void run(T* mean, T* m2) const {
    const int64_t channels = g_.problem.K;
    const int64_t items = g_.problem.N * slabs_;
    std::vector<Merger> partial(static_cast<size_t>(items * channels));
    torch::stable::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
      // Vectors read a little past the last plane.
      Buffer<T> packed(g_.problem.C * channel_stride_ + 2 * kernels<T>().width);
      Buffer<T> y(kMaxTile * g_.line);
      packed.zero();
      for (int64_t item = begin; item < end; ++item) {
        slab(item / slabs_, item % slabs_, packed.data(), y.data(), &partial[item * channels]);
      }
    });
    for (int64_t n = 0; n < g_.problem.N; ++n) {
      for (int64_t k = 0; k < channels; ++k) {
        Merger merger;
        for (int64_t s = 0; s < slabs_; ++s) {
          const Merger& part = partial[(n * slabs_ + s) * channels + k];
          merger.add(part.count, part.mean, part.m2);
        }
        mean[n * channels + k] = static_cast<T>(merger.mean);
        m2[n * channels + k] = static_cast<T>(merger.m2);
      }
    }
  }

 private:
  void slab(int64_t n, int64_t index, T* packed, T* y, Merger* merger) const {
    const Problem& p = g_.problem;
    const int64_t first = index * planes_;
    const int64_t last = std::min(g_.Z, first + planes_);
    pack_planes(x_ + n * p.C * p.D * p.H * p.W, g_, first * p.stride[0],
                g_.input_planes(last - first), channel_stride_, packed);
    for (int64_t z = first; z < last; ++z) {
      const T* plane = packed + (z - first) * p.stride[0] * g_.plane_size;
      for (int64_t group = 0; group < p.groups; ++group) {
        const T* input = plane + group * g_.group_inputs * channel_stride_;
        for (const Tile& t : tiles_) {
          tile(input, group * g_.group_outputs + t.first, t.size, y, merger);
        }
      }
    }
  }

  void tile(const T* input, int64_t k0, int64_t size, T* y, Merger* merger) const {
    const Kernels<T>& kernel = kernels<T>();
    ConvRange<T> range{};
    range.x = input;
    range.offsets = offsets_.data();
    range.taps = g_.taps;
    range.weights = weights_.data() + k0 * g_.taps;
    range.bias = bias_.data() + k0;
    range.out = y;
    range.out_stride = g_.line;
    range.vectors = g_.vectors;
    range.accumulate = false;
    kernel.conv[size](range);
    const int64_t count = g_.P * g_.Q;
    for (int64_t k = 0; k < size; ++k) {
      T* row = y + k * g_.line;
      kernel.activate(kind_, row, row, g_.line);
      const T guess = merger[k0 + k].guess(row[0]);
      const Moments m = kernel.moments(row, mask_.data(), g_.line, count, guess);
      merger[k0 + k].add(static_cast<double>(count), m.mean, m.m2);
    }
  }

  const Geometry g_;
  const Activation kind_;
  const S* x_;
  const int64_t planes_;
  const int64_t slabs_;
  const int64_t channel_stride_;
  const std::vector<Tile> tiles_;
  const std::vector<int64_t> offsets_;
  const std::vector<Mask<T>> mask_;
  const std::vector<T> bias_;
  Buffer<T> weights_;
};

void conv_act_moments_out(Tensor x, Tensor w, std::optional<Tensor> b, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation,
                          int64_t groups, int64_t activation, int64_t /*precision*/, bool /*wgmma*/,
                          Tensor mean, Tensor m2, std::optional<Tensor> /*workspace*/) {
  check_activation(activation);
  const Geometry g = check_conv(x, w, b, stride, padding, dilation, groups);
  const int64_t rows = g.problem.N * g.problem.K;
  const ScalarType statistics = statistics_dtype(x.scalar_type());
  check_dense(mean, "mean", statistics, rows);
  check_dense(m2, "m2", statistics, rows);
  if (rows == 0) return;
  dispatch_dtype(x.scalar_type(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    const Forward<S> forward(g, x, w, b, static_cast<Activation>(activation));
    forward.run(output_data<Compute<S>>(mean), output_data<Compute<S>>(m2));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CPU, m) {
  m.impl("_conv_act_moments_out", TORCH_BOX(&conv_act_moments_out));
}

}  // namespace cpu
}  // namespace convnormpool
