// The planner: a problem and a device give the path, its parameters, and for each path that was not
// taken one sentence why. Pure functions of plain structs, no CUDA call, no torch: the C++ that
// decides is the C++ that the tests question, on any machine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "problem.h"

namespace convnormpool {

enum class Path : int32_t { kFused = 0, kTwoStage = 1, kEager = 2 };
constexpr int kNumPaths = 3;

// What the planner needs to know of a device; on CPU only that it is none of CUDA's.
struct Device {
  bool cuda;
  int32_t major, minor;  // compute capability
  int32_t sm_count;
  int64_t l2_bytes;
  bool sm_90a;  // whether the build has code for it
};

struct Decision {
  Path path;           // of the forward
  Path backward_path;  // of the gradients
  // One sentence for each path that the forward does not take (its own is empty), and one for the
  // gradients where their path differs from the forward's.
  std::array<std::string, kNumPaths> reason;
  std::string backward_reason;
  std::string kernel;  // what computes the convolution, in words
  // Fused on CUDA: whether it is the kernel of compute capability 9.0, and on such a device one
  // sentence why if not; floats of workspace. What x must be aligned to, in bytes: any other x is
  // copied first, so that no result depends on where its input happens to lie.
  bool wgmma;
  std::string kernel_reason;
  int64_t workspace;
  int64_t alignment;
  // The same of the gradients' kernels. Where they are those of compute capability 9.0, the
  // forward's is, too, and x must be aligned as for it.
  bool backward_wgmma;
  std::string backward_kernel_reason;
  // Two-stage: how many samples a library convolution takes at once, and how many output planes
  // along Z. chunk_planes == Z except on CPU, where big samples are cut into slabs.
  int64_t chunk_samples;
  int64_t chunk_planes;
  bool channels_last;  // the layout in which the library convolution is called
  // Two-stage on CUDA: the T planes under the filter become channels of a two-dimensional
  // convolution, of which there are `unfolded_channels` (zeros fill up); 0 where they do not.
  int64_t unfolded_channels;
};

// Extents must make sense (the Python side has checked them). With a `requested` path that can't
// run it throws std::invalid_argument with the sentence why.
Decision plan(const Problem& problem, const Device& device, std::optional<Path> requested);

}  // namespace convnormpool
