// The backward of the fused direct convolution: y is recomputed plane by plane, dy stays in a
// buffer of a few planes, and dw, db and dx are formed from there. backward_plan.h has the cuts.
#include "backward_plan.h"

namespace convnormpool {
namespace cpu {
namespace {

template <typename S>
class Backward {
  using T = Compute<S>;

 public:
  struct Arguments {
    const S* x;
    const S* w;
    const T* mean;
    const T* grad_mean;
    const T* grad_m2;
    S* dx;  // these three: nullptr where not wanted
    S* dw;
    S* db;
  };

  Backward(const Geometry& geometry, const Arguments& arguments, const std::optional<Tensor>& b,
           Activation kind)
      : g_(geometry),
        plan_(geometry, arguments.dx != nullptr, kernels<T>().width, sizeof(T)),
        a_(arguments),
        kind_(kind),
        tiles_(channel_tiles(g_.group_outputs, conv_tile_sizes<T>())),
        dw_tiles_(channel_tiles(g_.group_outputs, {4, 2, 1})),
        dx_tiles_(channel_tiles(g_.group_inputs, conv_tile_sizes<T>())),
        offsets_(tap_offsets(geometry, plan_.x_channel)),
        mask_(position_mask<T>(geometry)),
        bias_(bias_values<T>(b, g_.problem.K)),
        weights_(g_.problem.K * g_.taps) {
    pack_weights(a_.w, g_, tiles_, weights_.data());
    if (a_.dx != nullptr) pack_transposed();
  }

  void run() const {
    const int64_t channels = g_.problem.K;
    const int64_t sums = channels * g_.taps;
    Buffer<double> dw(a_.dw != nullptr ? plan_.shares * sums : 0);
    Buffer<double> db(a_.db != nullptr ? plan_.shares * channels : 0);
    dw.zero();
    db.zero();
    torch::stable::parallel_for(0, plan_.shares, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t share = begin; share < end; ++share) {
        scratch.dw = a_.dw != nullptr ? &dw[share * sums] : nullptr;
        scratch.db = a_.db != nullptr ? &db[share * channels] : nullptr;
        const int64_t first = plan_.share_begin(g_, share);
        const int64_t last = plan_.share_begin(g_, share + 1);
        for (int64_t i = first; i < last; ++i) {
          run_unit(i / plan_.units, i % plan_.units, i > first, &scratch);
        }
      }
    });
    if (a_.dw != nullptr) add_shares(dw, sums, a_.dw);
    if (a_.db != nullptr) add_shares(db, channels, a_.db);
  }

 private:
  struct Scratch {
    explicit Scratch(const Backward& b)
        : x(b.g_.problem.C * b.plan_.x_channel + 2 * kernels<T>().width),
          dy(b.g_.problem.K * b.plan_.dy_channel),
          dx(kMaxTile * b.dx_line()) {
      x.zero();
      dy.zero();
    }
    Buffer<T> x;
    Buffer<T> dy;  // [channel][halo and unit][margin, line, zeros]
    Buffer<T> dx;  // one plane of one tile of input channels
    double* dw = nullptr;
    double* db = nullptr;
  };

  int64_t dx_line() const {
    return a_.dx != nullptr ? round_up(g_.phase_size, kernels<T>().width) : 0;
  }

  void add_shares(const Buffer<double>& parts, int64_t size, S* out) const {
    torch::stable::parallel_for(0, size, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double sum = 0;
        for (int64_t share = 0; share < plan_.shares; ++share) sum += parts[share * size + i];
        out[i] = round_once<S>(sum);
      }
    });
  }

  // Weights for dx: for each group, t and phase, tile after tile of input channels, each
  // [output channel, tap of the phase][input channel of the tile].
  void pack_transposed() {
    const Problem& p = g_.problem;
    transposed_.reserve(static_cast<size_t>(p.K * g_.taps));
    for (int64_t group = 0; group < p.groups; ++group) {
      for (int64_t t = 0; t < p.T; ++t) {
        for (const Phase& phase : plan_.phases) {
          transposed_first_.push_back(static_cast<int64_t>(transposed_.size()));
          for (const Tile& tile : dx_tiles_) {
            for (int64_t k = 0; k < g_.group_outputs; ++k) {
              for (const int64_t filter : phase.filter) {
                for (int64_t c = tile.first; c < tile.first + tile.size; ++c) {
                  const int64_t row = (group * g_.group_outputs + k) * g_.group_inputs + c;
                  transposed_.push_back(static_cast<T>(a_.w[(row * p.T + t) * p.R * p.S + filter]));
                }
              }
            }
          }
        }
      }
    }
    for (const Phase& phase : plan_.phases) {
      std::vector<int64_t> offsets;
      for (int64_t k = 0; k < g_.group_outputs; ++k) {
        for (const int64_t shift : phase.shift) offsets.push_back(k * plan_.dy_channel - shift);
      }
      dx_offsets_.push_back(offsets);
    }
  }

  // Unit `index` of sample n. continued: scratch holds the unit before it in this share.
  void run_unit(int64_t n, int64_t index, bool continued, Scratch* scratch) const {
    const Problem& p = g_.problem;
    const int64_t first = index * plan_.unit;
    const int64_t last = std::min(g_.Z, first + plan_.unit);
    // Plane z of dy stands at index z - base of the buffer.
    const int64_t base = first - plan_.halo;
    int64_t compute_first = first;
    if (index > 0 && plan_.halo > 0) {
      if (continued) {
        keep_halo(scratch);
      } else {
        compute_first = std::max<int64_t>(0, base);
      }
    }
    pack_planes(a_.x + n * p.C * p.D * p.H * p.W, g_, compute_first * p.stride[0],
                g_.input_planes(last - compute_first), plan_.x_channel, scratch->x.data());
    for (int64_t z = compute_first; z < last; ++z) {
      const T* x = scratch->x.data() + (z - compute_first) * p.stride[0] * g_.plane_size;
      form_dy(n, x, (z - base) * plan_.dy_plane + plan_.margin, z < first ? nullptr : scratch->db,
              scratch);
    }
    if (scratch->dw != nullptr) {
      for (int64_t z = first; z < last; z += plan_.batch) {
        const int64_t planes = std::min(plan_.batch, last - z);
        add_dw(scratch->x.data() + (z - compute_first) * p.stride[0] * g_.plane_size,
               scratch->dy.data() + (z - base) * plan_.dy_plane + plan_.margin, planes,
               scratch->dw);
      }
    }
    if (a_.dx != nullptr) {
      const int64_t end = last < g_.Z ? last * p.stride[0] : g_.padded_planes;
      for (int64_t d = first * p.stride[0]; d < end; ++d) {
        if (d >= p.padding[0] && d < p.padding[0] + p.D) write_dx(n, d, base, scratch);
      }
    }
  }

  // The last planes of the unit before become the halo.
  void keep_halo(Scratch* scratch) const {
    for (int64_t k = 0; k < g_.problem.K; ++k) {
      T* channel = scratch->dy.data() + k * plan_.dy_channel;
      std::memmove(channel, channel + plan_.unit * plan_.dy_plane,
                   static_cast<size_t>(plan_.halo * plan_.dy_plane) * sizeof(T));
    }
  }

  // dy of one output plane of all channels, whose input begins at x; db nullptr in the halo.
  void form_dy(int64_t n, const T* x, int64_t position, double* db, Scratch* scratch) const {
    const Kernels<T>& kernel = kernels<T>();
    const int64_t count = g_.Z * g_.P * g_.Q;
    for (int64_t group = 0; group < g_.problem.groups; ++group) {
      for (const Tile& tile : tiles_) {
        const int64_t k0 = group * g_.group_outputs + tile.first;
        T* dy = scratch->dy.data() + k0 * plan_.dy_channel + position;
        ConvRange<T> range{};
        range.x = x + group * g_.group_inputs * plan_.x_channel;
        range.offsets = offsets_.data();
        range.taps = g_.taps;
        range.weights = weights_.data() + k0 * g_.taps;
        range.bias = bias_.data() + k0;
        range.out = dy;
        range.out_stride = plan_.dy_channel;
        range.vectors = g_.vectors;
        range.accumulate = false;
        kernel.conv[tile.size](range);
        for (int64_t k = 0; k < tile.size; ++k) {
          const int64_t i = n * g_.problem.K + k0 + k;
          const Slope<T> slope{
              static_cast<T>(static_cast<double>(a_.grad_mean[i]) / static_cast<double>(count)),
              T(2) * a_.grad_m2[i], a_.mean[i]};
          T* row = dy + k * plan_.dy_channel;
          const double sum = kernel.slope(kind_, row, row, g_.line, slope, mask_.data());
          if (db != nullptr) db[k0 + k] += sum;
        }
      }
    }
  }

  void add_dw(const T* x, const T* dy, int64_t planes, double* dw) const {
    // Long planes are taken in pieces that stay in the first-level cache.
    const int64_t piece = plan_.batch > 1 ? g_.vectors : 64;
    const int64_t width = kernels<T>().width;
    for (int64_t v = 0; v < g_.vectors; v += piece) {
      for (int64_t group = 0; group < g_.problem.groups; ++group) {
        for (const Tile& tile : dw_tiles_) {
          const int64_t k0 = group * g_.group_outputs + tile.first;
          WeightGradient<T> gradient{};
          gradient.dy = dy + k0 * plan_.dy_channel + v * width;
          gradient.dy_stride = plan_.dy_channel;
          gradient.dy_plane = plan_.dy_plane;
          gradient.x = x + group * g_.group_inputs * plan_.x_channel + v * width;
          gradient.x_plane = g_.problem.stride[0] * g_.plane_size;
          gradient.offsets = offsets_.data();
          gradient.taps = g_.taps;
          gradient.mask = mask_.data() + v * width;
          gradient.planes = planes;
          gradient.vectors = std::min(piece, g_.vectors - v);
          gradient.sum = dw + k0 * g_.taps;
          gradient.sum_stride = g_.taps;
          kernels<T>().weight_gradient[tile.size](gradient);
        }
      }
    }
  }

  // Input plane d of the padded sample, all channels.
  void write_dx(int64_t n, int64_t d, int64_t base, Scratch* scratch) const {
    const Problem& p = g_.problem;
    for (int64_t group = 0; group < p.groups; ++group) {
      for (size_t f = 0; f < plan_.phases.size(); ++f) {
        const Phase& phase = plan_.phases[f];
        if (phase.row_count == 0) continue;
        for (const Tile& tile : dx_tiles_) {
          sum_dx(group, f, tile, d, base, scratch);
          const int64_t c0 = group * g_.group_inputs + tile.first;
          for (int64_t c = 0; c < tile.size; ++c) {
            S* plane = a_.dx + ((n * p.C + c0 + c) * p.D + d - p.padding[0]) * p.H * p.W;
            unpack(scratch->dx.data() + c * dx_line(), phase, plane);
          }
        }
      }
    }
  }

  // The non-padding rows of one phase of plane d, for a tile of input channels, into scratch->dx.
  void sum_dx(int64_t group, size_t f, const Tile& tile, int64_t d, int64_t base,
              Scratch* scratch) const {
    const Problem& p = g_.problem;
    const Phase& phase = plan_.phases[f];
    ConvRange<T> range{};
    range.offsets = dx_offsets_[f].data();
    range.taps = static_cast<int64_t>(dx_offsets_[f].size());
    range.bias = nullptr;
    range.out = scratch->dx.data();
    range.out_stride = dx_line();
    range.vectors = ceil_div(phase.row_count * g_.pitch, kernels<T>().width);
    range.accumulate = false;
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t z = (d - t * p.dilation[0]) / p.stride[0];
      if (d < t * p.dilation[0] || z * p.stride[0] + t * p.dilation[0] != d || z >= g_.Z) continue;
      const int64_t weights = transposed_first_[(group * p.T + t) * plan_.phases.size() + f];
      range.weights = transposed_.data() + weights + tile.first * range.taps;
      range.x = scratch->dy.data() + group * g_.group_outputs * plan_.dy_channel +
                (z - base) * plan_.dy_plane + plan_.margin + phase.row_first * g_.pitch;
      kernels<T>().conv[tile.size](range);
      range.accumulate = true;
    }
    if (!range.accumulate) scratch->dx.zero();
  }

  void unpack(const T* rows, const Phase& phase, S* plane) const {
    const Problem& p = g_.problem;
    const int64_t step = p.stride[2];
    const int64_t first = phase.w < p.padding[2] ? ceil_div(p.padding[2] - phase.w, step) : 0;
    for (int64_t r = 0; r < phase.row_count; ++r) {
      const int64_t h = (phase.row_first + r) * p.stride[1] + phase.h - p.padding[1];
      const T* in = rows + r * g_.pitch + first;
      S* out = plane + h * p.W;
      for (int64_t w = first * step + phase.w - p.padding[2]; w < p.W; w += step) {
        out[w] = S(*in++);
      }
    }
  }

  const Geometry g_;
  const BackwardPlan plan_;
  const Arguments a_;
  const Activation kind_;
  const std::vector<Tile> tiles_;
  const std::vector<Tile> dw_tiles_;
  const std::vector<Tile> dx_tiles_;
  const std::vector<int64_t> offsets_;
  const std::vector<Mask<T>> mask_;
  const std::vector<T> bias_;
  Buffer<T> weights_;
  std::vector<T> transposed_;
  std::vector<int64_t> transposed_first_;
  std::vector<std::vector<int64_t>> dx_offsets_;
};

void conv_act_moments_backward_out(Tensor x, Tensor w, std::optional<Tensor> b, Tensor mean,
                                   Tensor m2, Tensor grad_mean, Tensor grad_m2,
                                   std::vector<int64_t> stride, std::vector<int64_t> padding,
                                   std::vector<int64_t> dilation, int64_t groups,
                                   int64_t activation, int64_t /*precision*/, bool /*wgmma*/,
                                   std::optional<Tensor> dx, std::optional<Tensor> dw,
                                   std::optional<Tensor> db, std::optional<Tensor> /*workspace*/) {
  check_activation(activation);
  const Geometry g = check_conv(x, w, b, stride, padding, dilation, groups);
  const int64_t rows = g.problem.N * g.problem.K;
  const ScalarType dtype = x.scalar_type();
  const ScalarType statistics = statistics_dtype(dtype);
  check_dense(mean, "mean", statistics, rows);
  check_dense(m2, "m2", statistics, rows);
  check_dense(grad_mean, "grad_mean", statistics, rows);
  check_dense(grad_m2, "grad_m2", statistics, rows);
  if (dx.has_value()) check_dense(*dx, "dx", dtype, x.numel());
  if (dw.has_value()) check_dense(*dw, "dw", dtype, w.numel());
  if (db.has_value()) check_dense(*db, "db", dtype, g.problem.K);
  if (!dx.has_value() && !dw.has_value() && !db.has_value()) return;
  dispatch_dtype(dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Compute<S>;
    const auto wanted = [](const std::optional<Tensor>& t) {
      return t.has_value() ? output_data<S>(*t) : nullptr;
    };
    const typename Backward<S>::Arguments arguments{
        input_data<S>(x),       input_data<S>(w), input_data<T>(mean), input_data<T>(grad_mean),
        input_data<T>(grad_m2), wanted(dx),       wanted(dw),          wanted(db)};
    const Backward<S> backward(g, arguments, b, static_cast<Activation>(activation));
    backward.run();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CPU, m) {
  m.impl("_conv_act_moments_backward_out", TORCH_BOX(&conv_act_moments_backward_out));
}

}  // namespace cpu
}  // namespace convnormpool
