// Which window kernel takes a problem, and how it cuts a sample: plain C++, asked by the planner
// and by the launch, so that both go by the same numbers.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "cuda/conv_activation_moments_taps_map.h"
#include "cuda/conv_activation_moments_wgmma_plan.h"
#include "cuda/conv_activation_moments_window_map.h"
#include "problem.h"

namespace convnormpool {

// The compiled window kernels, and the one for filters of any extents (kTaps). "Short rows": no
// padding in H and W, and rows of kShortRow inputs, so that loads are of 16 bytes and none is
// masked, or of an even number from kNarrowRow on, so that they are of pairs.
enum class WindowKernel : int32_t {
  kNone,
  k4x4x4Channels3ShortRows,
  k4x4x4Channels3,
  k3x3x3Channels1,
  k3x3x3Channels3,
  kTaps,
};

// Output columns of a segment, in tiles of 8. Four tiles' accumulators and masks do not fit beside
// the weights of a 4x4x4 filter for 3 channels.
constexpr int32_t kWindowTiles = 4, kWindowFewTiles = 2;
constexpr int32_t window_tiles(WindowKernel kernel) {
  return kernel == WindowKernel::k4x4x4Channels3 ? kWindowFewTiles : kWindowTiles;
}
// The taps kernel takes this many input channels.
constexpr int64_t kTapsMostChannels = 16;
// What x must be aligned to, in bytes, for rows of kShortRow inputs.
constexpr int64_t kWindowAlignment = 16;
// Output planes of a slab: deep samples are cut so that few of them fill the device.
constexpr int32_t kWindowSlabPlanes = 32;

inline WindowKernel window_kernel(const Problem& p) {
  if (has_filter(p, 4, 3)) {
    const bool unpadded = p.padding[1] == 0 && p.padding[2] == 0;
    const bool short_rows = unpadded && p.W % 2 == 0 && p.W >= kNarrowRow && p.W <= kShortRow;
    return short_rows ? WindowKernel::k4x4x4Channels3ShortRows : WindowKernel::k4x4x4Channels3;
  }
  if (has_filter(p, 3, 1)) return WindowKernel::k3x3x3Channels1;
  if (has_filter(p, 3, 3)) return WindowKernel::k3x3x3Channels3;
  const bool small = p.T <= kTapsMostExtent && p.R <= kTapsMostExtent && p.S <= kTapsMostExtent;
  return small && p.C <= kTapsMostChannels ? WindowKernel::kTaps : WindowKernel::kNone;
}

// The filter of a problem that falls to the taps kernel, and what a block of it needs.
inline TapsFilter taps_filter(const Problem& p) {
  return {static_cast<int32_t>(p.C), static_cast<int32_t>(p.T), static_cast<int32_t>(p.R),
          static_cast<int32_t>(p.S)};
}
inline int64_t taps_bytes(const Problem& p, int32_t channel_tiles) {
  const bool split = p.dtype == DType::kFloat32 && p.precision == Precision::kIeee;
  return taps_memory(taps_filter(p), split ? 2 : 1, channel_tiles).total;
}
// Shared memory that a block may have on a device of compute capability major.minor; of those that
// are not known, the least.
constexpr int64_t taps_most_bytes(int32_t major, int32_t minor) {
  if (major == 9 || major == 10) return 227 * 1024;
  return (major == 8 && (minor == 0 || minor == 7) ? 163 : 99) * 1024;
}
// Tiles of 16 output channels of a block.
inline int32_t taps_channel_tiles(const Problem& p, int32_t major, int32_t minor) {
  return p.K > 16 && taps_bytes(p, 2) <= taps_most_bytes(major, minor) ? 2 : 1;
}

inline WindowGeometry window_geometry_of(const Problem& p) {
  const auto narrow = [](int64_t extent) { return static_cast<int32_t>(extent); };
  return window_geometry(narrow(p.D), narrow(p.H), narrow(p.W), narrow(p.K), narrow(p.Z()),
                         narrow(p.P()), narrow(p.Q()), narrow(p.padding[0]), narrow(p.padding[1]),
                         narrow(p.padding[2]), kWindowSlabPlanes, window_tiles(window_kernel(p)));
}

// Why no window kernel takes the problem on a device of compute capability major.minor; empty if
// one does.
inline std::string window_refusal(const Problem& p, int32_t major, int32_t minor) {
  if (major < 8) return "the fused kernels need compute capability 8.0 or later";
  if (p.dtype == DType::kFloat64) return "the fused kernels take no float64";
  for (int i = 0; i < 3; ++i) {
    if (p.stride[i] != 1 || p.dilation[i] != 1) {
      return "the fused kernels take stride 1 and dilation 1";
    }
  }
  if (p.groups != 1) return "the fused kernels take no grouped convolutions";
  const WindowKernel kernel = window_kernel(p);
  if (kernel == WindowKernel::kNone) {
    return "the fused kernels take filters of at most " + std::to_string(kTapsMostExtent) +
           " on each axis over at most " + std::to_string(kTapsMostChannels) +
           " input channels; this one is " + std::to_string(p.T) + "x" + std::to_string(p.R) + "x" +
           std::to_string(p.S) + " over " + std::to_string(p.C);
  }
  if (kernel == WindowKernel::kTaps && taps_bytes(p, 1) > taps_most_bytes(major, minor)) {
    return "the filter and the input planes under it need " + std::to_string(taps_bytes(p, 1)) +
           " bytes of shared memory, and a block may have " +
           std::to_string(taps_most_bytes(major, minor));
  }
  const int64_t filter[3] = {p.T, p.R, p.S};
  for (int i = 0; i < 3; ++i) {
    if (p.padding[i] < 0 || p.padding[i] >= filter[i]) {
      return "the fused kernels take padding below the kernel size";
    }
  }
  if (p.Z() < 1 || p.P() < 1 || p.Q() < 1) return "the filter is larger than the padded input";
  if ((p.K + 15) / 16 > 65535) return "the fused kernels take at most 1,048,560 output channels";
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.D >= kMost || p.H >= kMost || p.W >= kMost || p.K >= kMost || p.N >= kMost ||
      p.P() * ((p.Z() + kWindowSlabPlanes) / kWindowSlabPlanes + 1) *
              (p.Q() / (8 * kWindowFewTiles) + 1) >=
          kMost) {
    return "the problem's extents are beyond the fused kernels' 32-bit counts";
  }
  return "";
}

// Floats of workspace that _conv_act_moments_out needs on CUDA: (mean, M2) of each piece.
inline int64_t conv_act_moments_workspace(const Problem& p, bool wgmma) {
  const int64_t pieces = wgmma ? wgmma_pieces(p) : window_pieces(window_geometry_of(p));
  return p.N * pieces * p.K * 2;
}

// What it needs x to be aligned to, in bytes.
inline int64_t conv_act_moments_alignment(const Problem& p, bool wgmma) {
  if (wgmma) return kWgmmaAlignment;
  if (window_kernel(p) != WindowKernel::k4x4x4Channels3ShortRows) return element_size(p.dtype);
  return p.W == kShortRow ? kWindowAlignment : 2 * element_size(p.dtype);
}

}  // namespace convnormpool
