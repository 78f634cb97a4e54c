// How the fused backward cuts its work and lays out its buffers: a function of the problem alone.
//
// A sample is cut into units of whole output planes, and runs of units ("shares") are what threads
// take. A share has sums of its own for dw and db, added up in order at the end. An input plane
// belongs to the unit of the last output plane that reads it, so that the bits of dx depend on no
// border; a share that begins inside a sample computes the output planes before it once more, its
// halo.
#pragma once

#include "direct.h"

namespace convnormpool {
namespace cpu {

// The taps (r, s) that reach the inputs of one phase of the stride, for dx.
struct Phase {
  int64_t h, w;
  std::vector<int64_t> filter;   // r * S + s
  std::vector<int64_t> shift;    // positions from dx back to dy
  int64_t row_first, row_count;  // rows of the phase that are not padding
};

struct BackwardPlan {
  int64_t halo = 0;   // output planes kept from before a unit; 0 without dx
  int64_t batch = 1;  // output planes that one call of the weight gradient takes
  int64_t unit = 1;   // output planes of a unit: whole batches
  int64_t units = 1;  // of a sample
  int64_t shares = 1;
  bool whole_samples = false;  // shares hold whole samples

  int64_t margin = 0;    // zeros before dy of a plane; as many as dx needs follow it
  int64_t dy_plane = 0;  // elements
  int64_t dy_channel = 0;
  int64_t x_channel = 0;
  std::vector<Phase> phases;

  BackwardPlan(const Geometry& g, bool want_dx, int64_t width, int64_t element_size);

  // The first unit, of all samples' units, of a share.
  int64_t share_begin(const Geometry& g, int64_t share) const {
    return whole_samples ? g.problem.N * share / shares * units
                         : g.problem.N * units * share / shares;
  }
};

}  // namespace cpu
}  // namespace convnormpool
