// Geometry and packing of the fused direct convolution.
//
// The planes of a sample are copied, padded, into a buffer in which every tap of the filter is a
// constant offset: with stride s an axis is split into its s phases, so that the positions of an
// output plane, numbered o = p * pitch + q, find the input of tap (c, t, r, s) at offset(tap) + o.
// Vectors then run over o without bounds checks. The positions between Q and the pitch are computed
// too, from whatever stands there, and masked out.
#pragma once

#include "../problem.h"
#include "common.h"

namespace convnormpool {
namespace cpu {

// The largest buffers that a thread should hold, in bytes: the second-level cache.
constexpr int64_t kPackedBytes = int64_t{1} << 20;
constexpr int64_t kGradientBytes = int64_t{3} << 19;

struct Geometry {
  Problem problem;
  int64_t Z, P, Q;
  int64_t filter_taps;   // T * R * S
  int64_t group_inputs;  // input channels of a group
  int64_t group_outputs;
  int64_t taps;  // group_inputs * filter_taps

  int64_t padded_planes;
  int64_t rows;   // of one phase of a padded plane
  int64_t pitch;  // of such a row
  int64_t phases;
  int64_t phase_size;
  int64_t plane_size;  // of all phases of a padded plane of one channel
  int64_t span;        // positions of an output plane: (P - 1) * pitch + Q
  int64_t vectors;     // that cover the span
  int64_t line;        // vectors * width: elements of an output plane in a buffer
  int64_t halo;        // output planes before z that share input planes with z

  Geometry(const Problem& p, int64_t width);

  // Input planes that output planes [first, last) read start at first * stride and are this many.
  int64_t input_planes(int64_t output_planes) const {
    return (output_planes - 1) * problem.stride[0] + problem.dilation[0] * (problem.T - 1) + 1;
  }
  // The offset of filter position (r, s) inside a packed plane.
  int64_t plane_offset(int64_t r, int64_t s) const {
    const int64_t h = r * problem.dilation[1];
    const int64_t w = s * problem.dilation[2];
    const int64_t phase = (h % problem.stride[1]) * problem.stride[2] + w % problem.stride[2];
    return phase * phase_size + (h / problem.stride[1]) * pitch + w / problem.stride[2];
  }
  double plane_flops() const {
    return 2.0 * static_cast<double>(problem.K) * static_cast<double>(taps) *
           static_cast<double>(P * Q);
  }
};

// The offset of each tap of a group, in the order of the weights (c, t, r, s), for channels that
// are channel_stride apart and planes that are plane_size apart.
std::vector<int64_t> tap_offsets(const Geometry& g, int64_t channel_stride);

// One mask entry for each of `line` positions.
template <typename T>
std::vector<Mask<T>> position_mask(const Geometry& g);

// The tiles that a number of channels is cut into, in order.
struct Tile {
  int64_t first;
  int64_t size;
};
std::vector<Tile> channel_tiles(int64_t channels, const std::vector<int64_t>& sizes);

template <typename T>
std::vector<int64_t> conv_tile_sizes() {
  std::vector<int64_t> sizes;
  for (int64_t size = kMaxTile; size > 0; --size) {
    if (kernels<T>().conv[size] != nullptr) sizes.push_back(size);
  }
  return sizes;
}

// The weights of every group, tile after tile, each [tap][channel of the tile]: a tile of channels
// starting at channel k of all starts at k * taps.
template <typename S>
void pack_weights(const S* w, const Geometry& g, const std::vector<Tile>& tiles,
                  Compute<S>* packed);

// Copies padded input planes [first, first + count) of the sample at x into packed, channel after
// channel, channel_stride apart. `packed` must have been zeroed once: the padding inside a plane is
// never written.
template <typename S>
void pack_planes(const S* x, const Geometry& g, int64_t first, int64_t count,
                 int64_t channel_stride, Compute<S>* packed);

// Reads and checks the arguments that the two operators have in common.
Geometry check_conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b,
                    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                    const std::vector<int64_t>& dilation, int64_t groups);

// The bias as T, zeros without one.
template <typename T>
std::vector<T> bias_values(const std::optional<Tensor>& b, int64_t channels) {
  std::vector<T> bias(static_cast<size_t>(channels), T(0));
  for (int64_t k = 0; b.has_value() && k < channels; ++k) {
    bias[k] = static_cast<T>(element(b->const_data_ptr(), b->scalar_type(), k));
  }
  return bias;
}

}  // namespace cpu
}  // namespace convnormpool
