#include "backward_plan.h"

namespace convnormpool {
namespace cpu {
namespace {

constexpr double kUnitFlops = 2e7;      // below this, halo and packing would count
constexpr int64_t kBatchVectors = 128;  // per channel: what stays in the first-level cache
constexpr int64_t kMaxShares = 64;
constexpr int64_t kShareBytes = 32 << 20;  // of the sums of all shares
constexpr int64_t kWholeSamples = 16;      // from this N on shares hold whole samples

Phase make_phase(const Geometry& g, int64_t h, int64_t w) {
  const Problem& p = g.problem;
  Phase phase{h, w, {}, {}, 0, 0};
  for (int64_t r = 0; r < p.R; ++r) {
    for (int64_t s = 0; s < p.S; ++s) {
      const int64_t dh = r * p.dilation[1];
      const int64_t dw = s * p.dilation[2];
      if (dh % p.stride[1] != h || dw % p.stride[2] != w) continue;
      phase.filter.push_back(r * p.S + s);
      phase.shift.push_back((dh / p.stride[1]) * g.pitch + dw / p.stride[2]);
    }
  }
  const int64_t first = p.padding[1];
  phase.row_first = first > h ? ceil_div(first - h, p.stride[1]) : 0;
  const int64_t end = first + p.H > h ? ceil_div(first + p.H - h, p.stride[1]) : 0;
  phase.row_count = std::max<int64_t>(0, end - phase.row_first);
  return phase;
}

}  // namespace

BackwardPlan::BackwardPlan(const Geometry& g, bool want_dx, int64_t width, int64_t element_size) {
  const Problem& p = g.problem;
  halo = want_dx ? g.halo : 0;
  batch = std::min(g.Z, std::max<int64_t>(1, kBatchVectors / g.vectors));
  whole_samples = p.N >= kWholeSamples;

  // The cuts count on the halo whether or not dx is wanted: dw has the same bits in both cases.
  const int64_t fit = kGradientBytes / (p.K * g.phase_size * element_size) - g.halo;
  const double worth = std::min(kUnitFlops / g.plane_flops(), static_cast<double>(g.Z));
  int64_t planes = std::max(2 * g.halo, static_cast<int64_t>(std::ceil(worth)));
  if (whole_samples) planes = g.Z;
  planes = std::max<int64_t>(1, std::min({planes, fit, g.Z}));
  unit = std::min(g.Z, round_up(ceil_div(g.Z, ceil_div(g.Z, planes)), batch));
  units = ceil_div(g.Z, unit);
  if (whole_samples) {
    shares = p.N;
  } else {
    // Four times its halo is what a share should have, but two shares are worth twice the halo.
    const int64_t total = p.N * g.Z;
    const int64_t halo_planes = std::max<int64_t>(1, g.halo);
    const int64_t few = std::min<int64_t>(2, total / (2 * halo_planes));
    shares = std::min(p.N * units, std::max({int64_t{1}, few, total / (4 * halo_planes)}));
  }
  const int64_t bytes = p.K * g.taps * static_cast<int64_t>(sizeof(double));
  shares = std::min({shares, kMaxShares, std::max<int64_t>(2, kShareBytes / bytes)});

  if (want_dx) {
    for (int64_t h = 0; h < p.stride[1]; ++h) {
      for (int64_t w = 0; w < p.stride[2]; ++w) phases.push_back(make_phase(g, h, w));
    }
    margin = round_up(g.plane_offset(p.R - 1, p.S - 1) % g.phase_size, width);
  }
  // As for the input's planes: neighbours must not share sets of the first-level cache.
  constexpr int64_t kLine = 16;
  dy_plane = round_up(margin + std::max(g.line, want_dx ? g.phase_size + width : 0), kLine);
  while (dy_plane / kLine % 16 != 5) dy_plane += kLine;
  dy_channel = dy_plane * (halo + unit);
  x_channel = g.input_planes(halo + unit) * g.plane_size;
}

}  // namespace cpu
}  // namespace convnormpool
