// Host side of _unfold_depth_out and _fold_depth_out.
#include "cuda/common/launch.cuh"
#include "cuda/unfold_depth.cuh"

namespace convnormpool {
namespace {

// Extents from the folded tensor (N, C, D, H, W) and the unfolded one (N, Z, H, W, channels).
UnfoldGeometry geometry(const Tensor& folded, const Tensor& unfolded, int64_t filter,
                        int64_t stride, int64_t padding, int64_t dilation) {
  STD_TORCH_CHECK(folded.dim() == 5 && unfolded.dim() == 5, "both tensors must be 5-D");
  UnfoldGeometry g{};
  g.N = folded.size(0), g.C = folded.size(1), g.D = folded.size(2);
  g.plane = folded.size(3) * folded.size(4);
  g.Z = unfolded.size(1);
  g.T = static_cast<int>(filter), g.stride = static_cast<int>(stride);
  g.padding = static_cast<int>(padding), g.dilation = static_cast<int>(dilation);
  g.channels = static_cast<int>(unfolded.size(4));
  STD_TORCH_CHECK(unfolded.size(0) == g.N && unfolded.size(2) == folded.size(3) &&
                      unfolded.size(3) == folded.size(4),
                  "the unfolded tensor must have the samples and planes of the other");
  STD_TORCH_CHECK(filter >= 1 && stride >= 1 && padding >= 0 && dilation >= 1 &&
                      g.Z == (g.D + 2 * padding - dilation * (filter - 1) - 1) / stride + 1,
                  "the unfolded tensor's depth is not that of the convolution");
  STD_TORCH_CHECK(g.channels % kUnfoldChannels == 0 && g.channels >= g.C * filter,
                  "the unfolded tensor must have room for ", g.C * filter, " channels");
  STD_TORCH_CHECK(g.plane * (g.channels / kUnfoldChannels) < (int64_t{1} << 31),
                  "a plane of the unfolded tensor is too large");
  check_dense(folded, "the folded tensor", folded.numel(), folded);
  check_dense(unfolded, "the unfolded tensor", unfolded.numel(), folded);
  return g;
}

int64_t blocks(int64_t threads) { return (threads + kUnfoldThreads - 1) / kUnfoldThreads; }

void unfold_depth_out(Tensor x, int64_t filter, int64_t stride, int64_t padding, int64_t dilation,
                      Tensor out) {
  const UnfoldGeometry g = geometry(x, out, filter, stride, padding, dilation);
  STD_TORCH_CHECK(x.scalar_type() == out.scalar_type(), "out must have the dtype of x");
  STD_TORCH_CHECK(aligned_to(out.data_ptr(), kVectorBytes), "out must be aligned to ", kVectorBytes,
                  " bytes");
  if (out.numel() == 0) return;
  const DeviceScope scope(x);
  dispatch_storage(dtype_of(x, "x"), [&](auto storage) {
    using T = decltype(storage);
    unfold_depth_kernel<T><<<row_grid(blocks(g.plane * (g.channels / kUnfoldChannels)), g.N * g.Z),
                             kUnfoldThreads, 0, scope.stream()>>>(
        static_cast<const T*>(x.data_ptr()), static_cast<T*>(out.data_ptr()), g);
  });
  check_launch("unfold_depth_kernel", {g.N, g.C, g.D, g.plane});
}

void fold_depth_out(Tensor du, int64_t filter, int64_t stride, int64_t padding, int64_t dilation,
                    Tensor dx) {
  const UnfoldGeometry g = geometry(dx, du, filter, stride, padding, dilation);
  const DType dtype = dtype_of(dx, "dx");
  STD_TORCH_CHECK(dtype_of(du, "du") == statistics_dtype(dtype),
                  "du must have the statistics dtype of dx");
  if (dx.numel() == 0) return;
  const DeviceScope scope(dx);
  dispatch_storage(dtype, [&](auto storage) {
    using T = decltype(storage);
    using S = statistics_t<T>;
    fold_depth_kernel<S, T>
        <<<row_grid(blocks(g.plane), g.N * g.D), kUnfoldThreads, 0, scope.stream()>>>(
            static_cast<const S*>(du.data_ptr()), static_cast<T*>(dx.data_ptr()), g);
  });
  check_launch("fold_depth_kernel", {g.N, g.C, g.D, g.plane});
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_unfold_depth_out", TORCH_BOX(&convnormpool::unfold_depth_out));
  m.impl("_fold_depth_out", TORCH_BOX(&convnormpool::fold_depth_out));
}
