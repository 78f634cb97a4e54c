#include "direct.h"

namespace convnormpool {
namespace cpu {

Geometry::Geometry(const Problem& p, int64_t width) : problem(p) {
  Z = p.Z();
  P = p.P();
  Q = p.Q();
  filter_taps = p.T * p.R * p.S;
  group_inputs = p.C / p.groups;
  group_outputs = p.K / p.groups;
  taps = group_inputs * filter_taps;
  padded_planes = p.D + 2 * p.padding[0];
  rows = ceil_div(p.H + 2 * p.padding[1], p.stride[1]);
  pitch = ceil_div(p.W + 2 * p.padding[2], p.stride[2]);
  phases = p.stride[1] * p.stride[2];
  phase_size = rows * pitch;
  span = (P - 1) * pitch + Q;
  vectors = ceil_div(span, width);
  line = vectors * width;
  // Planes a few cache lines off a multiple of 4096 bytes, so that the same position of
  // neighbouring planes does not fall into one set of the first-level cache.
  constexpr int64_t kLine = 16;
  plane_size = round_up(phases * phase_size, kLine);
  while (plane_size / kLine % 64 % 16 != 5) plane_size += kLine;
  halo = (p.T - 1) * p.dilation[0] / p.stride[0];
}

std::vector<int64_t> tap_offsets(const Geometry& g, int64_t channel_stride) {
  const Problem& p = g.problem;
  std::vector<int64_t> offsets;
  offsets.reserve(static_cast<size_t>(g.taps));
  for (int64_t c = 0; c < g.group_inputs; ++c) {
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t plane = c * channel_stride + t * p.dilation[0] * g.plane_size;
      for (int64_t r = 0; r < p.R; ++r) {
        for (int64_t s = 0; s < p.S; ++s) offsets.push_back(plane + g.plane_offset(r, s));
      }
    }
  }
  return offsets;
}

template <typename T>
std::vector<Mask<T>> position_mask(const Geometry& g) {
  std::vector<Mask<T>> mask(static_cast<size_t>(g.line), 0);
  for (int64_t o = 0; o < g.span; ++o) mask[o] = o % g.pitch < g.Q ? -1 : 0;
  return mask;
}

std::vector<Tile> channel_tiles(int64_t channels, const std::vector<int64_t>& sizes) {
  std::vector<Tile> tiles;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    for (; first + size <= channels; first += size) tiles.push_back({first, size});
  }
  return tiles;
}

template <typename S>
void pack_weights(const S* w, const Geometry& g, const std::vector<Tile>& tiles,
                  Compute<S>* packed) {
  using T = Compute<S>;
  for (int64_t group = 0; group < g.problem.groups; ++group) {
    for (const Tile& tile : tiles) {
      const int64_t k0 = group * g.group_outputs + tile.first;
      T* out = packed + k0 * g.taps;
      for (int64_t tap = 0; tap < g.taps; ++tap) {
        for (int64_t k = 0; k < tile.size; ++k) {
          out[tap * tile.size + k] = static_cast<T>(w[(k0 + k) * g.taps + tap]);
        }
      }
    }
  }
}

namespace {

// One padded plane from in (H, W), or from padding alone where in is nullptr.
template <typename S>
void pack_plane(const S* in, const Geometry& g, Compute<S>* out) {
  using T = Compute<S>;
  const Problem& p = g.problem;
  if (in == nullptr) {
    std::fill(out, out + g.phases * g.phase_size, T(0));
    return;
  }
  const int64_t sw = p.stride[2];
  for (int64_t h = 0; h < p.H; ++h) {
    const int64_t row = h + p.padding[1];
    T* phase = out + (row % p.stride[1]) * sw * g.phase_size + (row / p.stride[1]) * g.pitch;
    const S* source = in + h * p.W;
    if (sw == 1) {
      T* target = phase + p.padding[2];
      if constexpr (std::is_same_v<S, T>) {
        std::memcpy(target, source, static_cast<size_t>(p.W) * sizeof(T));
      } else {
        for (int64_t w = 0; w < p.W; ++w) target[w] = static_cast<T>(source[w]);
      }
      continue;
    }
    for (int64_t f = 0; f < sw; ++f) {
      // The first w that falls into this phase.
      const int64_t w0 = ((f - p.padding[2]) % sw + sw) % sw;
      T* target = phase + f * g.phase_size + (w0 + p.padding[2]) / sw;
      for (int64_t w = w0; w < p.W; w += sw) *target++ = static_cast<T>(source[w]);
    }
  }
}

}  // namespace

template <typename S>
void pack_planes(const S* x, const Geometry& g, int64_t first, int64_t count,
                 int64_t channel_stride, Compute<S>* packed) {
  const Problem& p = g.problem;
  for (int64_t c = 0; c < p.C; ++c) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t d = first + i - p.padding[0];
      const bool inside = d >= 0 && d < p.D;
      pack_plane(inside ? x + (c * p.D + d) * p.H * p.W : nullptr, g,
                 packed + c * channel_stride + i * g.plane_size);
    }
  }
}

Geometry check_conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
                    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                    const std::vector<int64_t>& dilation, int64_t groups) {
  const ScalarType dtype = x.scalar_type();
  check_dense(x, "x", dtype, x.numel());
  check_dense(w, "w", dtype, w.numel());
  STD_TORCH_CHECK(x.dim() == 5 && w.dim() == 5, "x and w must have five dimensions");
  STD_TORCH_CHECK(stride.size() == 3 && padding.size() == 3 && dilation.size() == 3,
                  "stride, padding and dilation must have three elements");
  Problem p{};
  p.N = x.size(0);
  p.C = x.size(1);
  p.D = x.size(2);
  p.H = x.size(3);
  p.W = x.size(4);
  p.K = w.size(0);
  p.T = w.size(2);
  p.R = w.size(3);
  p.S = w.size(4);
  p.groups = groups;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(stride[axis] > 0 && dilation[axis] > 0 && padding[axis] >= 0,
                    "stride and dilation must be positive and padding not negative");
    p.stride[axis] = stride[axis];
    p.padding[axis] = padding[axis];
    p.dilation[axis] = dilation[axis];
  }
  STD_TORCH_CHECK(groups > 0 && p.C % groups == 0 && p.K % groups == 0,
                  "groups must divide the input and the output channels");
  STD_TORCH_CHECK(w.size(1) == p.C / groups, "w has the wrong number of input channels");
  STD_TORCH_CHECK(p.C > 0 && p.K > 0 && p.T > 0 && p.R > 0 && p.S > 0,
                  "channels and filter extents must be positive");
  const int64_t input[3] = {p.D, p.H, p.W};
  const int64_t filter[3] = {p.T, p.R, p.S};
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(axis == 0 || stride[axis] <= input[axis] + 2 * padding[axis],
                    "the fused CPU kernel takes strides up to the padded input's extent");
    STD_TORCH_CHECK(input[axis] + 2 * padding[axis] >= dilation[axis] * (filter[axis] - 1) + 1,
                    "the filter is larger than the padded input");
  }
  if (b.has_value()) check_dense(*b, "b", dtype, p.K);
  const bool is_double = dtype == ScalarType::Double;
  return Geometry(p, is_double ? kernels<double>().width : kernels<float>().width);
}

template std::vector<Mask<float>> position_mask<float>(const Geometry&);
template std::vector<Mask<double>> position_mask<double>(const Geometry&);

#define CONVNORMPOOL_INSTANTIATE(S)                                                                \
  template void pack_weights<S>(const S*, const Geometry&, const std::vector<Tile>&, Compute<S>*); \
  template void pack_planes<S>(const S*, const Geometry&, int64_t, int64_t, int64_t, Compute<S>*)

CONVNORMPOOL_INSTANTIATE(double);
CONVNORMPOOL_INSTANTIATE(float);
CONVNORMPOOL_INSTANTIATE(Half);
CONVNORMPOOL_INSTANTIATE(BFloat16);

#undef CONVNORMPOOL_INSTANTIATE

}  // namespace cpu
}  // namespace convnormpool
