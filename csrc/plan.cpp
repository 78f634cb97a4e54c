#include "plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cuda/conv_activation_moments_backward_plan.h"
#include "cuda/conv_activation_moments_plan.h"

namespace convnormpool {
namespace {

// Two-dimensional library convolutions are several times faster than three-dimensional ones where
// channels are few (their weight gradient without tf32 up to 50 times): up to this many channels
// after unfolding. Measured in benchmarks/NOTES.md.
constexpr int64_t kMaxUnfoldedChannels = 128;
constexpr int64_t kUnfoldedMultiple = 4;
// A chunk's convolution output and its converted input together stay under this on CUDA. Larger
// chunks fill the chip better and leave the L2; measured in benchmarks/NOTES.md.
constexpr int64_t kCudaChunkBytes = int64_t{92} << 20;
// On CPU a piece belongs to one thread and its output should still be in that core's L2 when it is
// reduced.
constexpr int64_t kCpuPieceBytes = int64_t{1} << 20;
// Up to this many input channels per group, and for pointwise filters of any, the direct CPU kernel
// is faster than the library's blocked one but for some gradients; measured in benchmarks/NOTES.md.
constexpr int64_t kCpuFusedMaxChannels = 32;

std::string fused_refusal(const Problem& p, const Device& device) {
  if (!device.cuda) {
    if (p.stride[1] > p.H + 2 * p.padding[1] || p.stride[2] > p.W + 2 * p.padding[2]) {
      return "the fused CPU kernel takes strides up to the padded input's extent";
    }
    if (p.channels_per_group() > kCpuFusedMaxChannels && p.T * p.R * p.S > 1) {
      std::ostringstream s;
      s << "the fused CPU kernel is for at most " << kCpuFusedMaxChannels
        << " input channels per group, and here there are " << p.channels_per_group();
      return s.str();
    }
    return "";
  }
  return window_refusal(p, device.major, device.minor);
}

void plan_two_stage(const Problem& p, const Device& device, Decision& d) {
  d.chunk_planes = p.Z();
  if (device.cuda) {
    const int64_t unfolded =
        (p.C * p.T + kUnfoldedMultiple - 1) / kUnfoldedMultiple * kUnfoldedMultiple;
    const bool plane_fits =
        p.H * p.W * unfolded < (int64_t{1} << 31) && p.D + 2 * p.padding[0] < (int64_t{1} << 31);
    if (p.T > 1 && p.groups == 1 && unfolded <= kMaxUnfoldedChannels && plane_fits) {
      d.unfolded_channels = unfolded;
    }
    // cuDNN's float32-accurate 3-D convolution is faster on contiguous tensors, its tf32 one on
    // channels_last_3d ones; contiguous 16-bit 3-D convolutions bypass cuDNN in some versions, and
    // depthwise ones have kernels for contiguous tensors alone.
    const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
    const bool tf32 = p.dtype == DType::kFloat32 && p.precision == Precision::kTf32;
    const bool depthwise = p.groups > 1 && p.groups == p.C;
    d.channels_last = d.unfolded_channels > 0 || (!depthwise && tf32) || half;
    int64_t input = d.channels_last ? p.C * p.D * p.H * p.W : 0;
    if (d.unfolded_channels > 0) input = d.unfolded_channels * p.Z() * p.H * p.W;
    const int64_t per_sample = (p.K * p.positions() + input) * element_size(p.dtype);
    d.chunk_samples = std::max<int64_t>(1, kCudaChunkBytes / std::max<int64_t>(1, per_sample));
  } else {
    d.channels_last = false;
    // CPU convolutions run in float32 whatever 16-bit type came in.
    const int64_t size = p.dtype == DType::kFloat64 ? 8 : 4;
    const int64_t per_sample = p.K * p.positions() * size;
    d.chunk_samples = std::max<int64_t>(1, kCpuPieceBytes / std::max<int64_t>(1, per_sample));
    if (per_sample > 2 * kCpuPieceBytes) {
      const int64_t per_plane = per_sample / p.Z();
      // A slab reads dilation * (T - 1) planes of halo, so thin slabs would mostly read halo.
      const int64_t thinnest = 2 * (p.dilation[0] * (p.T - 1) / p.stride[0] + 1);
      d.chunk_planes =
          std::clamp(std::max(kCpuPieceBytes / per_plane, thinnest), int64_t{1}, p.Z());
    }
  }
  d.chunk_samples = std::min(d.chunk_samples, std::max<int64_t>(1, p.N));
}

}  // namespace

Decision plan(const Problem& p, const Device& device, std::optional<Path> requested) {
  Decision d{};
  const auto reason = [&d](Path path) -> std::string& { return d.reason[static_cast<int>(path)]; };
  const std::string refusal = fused_refusal(p, device);
  if (requested == Path::kFused && !refusal.empty()) throw std::invalid_argument(refusal);

  d.path = requested.value_or(refusal.empty() ? Path::kFused : Path::kTwoStage);
  d.backward_path = d.path;
  reason(Path::kFused) = refusal;
  reason(Path::kEager) = "it keeps the convolution's output in memory";
  if (refusal.empty()) {
    reason(Path::kTwoStage) = "the fused kernel takes this problem";
  }
  if (requested) {
    for (std::string& sentence : d.reason) {
      if (sentence.empty()) sentence = "another path was asked for";
    }
  }
  reason(d.path).clear();

  plan_two_stage(p, device, d);
  d.alignment = element_size(p.dtype);
  if (device.cuda && d.path == Path::kFused) {
    if (wgmma_device(device.major, device.minor)) {
      d.kernel_reason = wgmma_refusal(p, device.sm_90a);
      d.wgmma = d.kernel_reason.empty();
    }
    d.workspace = conv_act_moments_workspace(p, d.wgmma);
    d.alignment = conv_act_moments_alignment(p, d.wgmma);
    d.backward_reason = backward_refusal(p, device.major, device.minor);
    if (!d.backward_reason.empty()) {
      d.backward_path = Path::kTwoStage;
    } else if (wgmma_device(device.major, device.minor)) {
      d.backward_kernel_reason = wgmma_backward_refusal(p, device.sm_90a);
      d.backward_wgmma = d.backward_kernel_reason.empty();
    }
  }
  switch (d.path) {
    case Path::kFused:
      d.kernel = "direct convolution with statistics";
      if (device.cuda) {
        if (window_kernel(p) == WindowKernel::kTaps) d.kernel += " for filters of any extents";
        d.kernel += d.wgmma ? " by wgmma" : " by mma.sync";
      }
      break;
    case Path::kTwoStage:
      d.kernel = d.unfolded_channels > 0
                     ? "2-D library convolution of the unfolded depth over chunks, then the "
                       "reduction kernel"
                     : "library convolution over chunks, then the reduction kernel";
      break;
    case Path::kEager:
      d.kernel = "PyTorch's operators";
      break;
  }
  return d;
}

}  // namespace convnormpool
