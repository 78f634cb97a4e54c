// Host side of _act_moments_backward_out.
#include "cuda/activation_moments_backward.cuh"
#include "cuda/common/launch.cuh"

namespace convnormpool {
namespace {

// Positions of a channels-last thread; a small number gives small tensors enough blocks.
constexpr int kPositionsEach = 32;

struct BackwardCall {
  DenseLayout layout;
  cudaStream_t stream;

  void check(const char* kernel) const {
    check_launch(kernel, {layout.N, layout.K, layout.positions});
  }
};

// dy needs no test of its own layout: y's vectors of 16 bytes are aligned ones of dy, whose
// elements are as wide or wider.
template <typename T, typename Fn>
void launch_rows(const BackwardCall& call, const GradientTensors<T>& tensors, const Fn& fn) {
  constexpr int64_t kVector = kVectorBytes / sizeof(T);
  const int64_t rows = call.layout.N * call.layout.K, positions = call.layout.positions;
  const bool vectors = aligned_to(tensors.y, kVectorBytes) && aligned_to(tensors.dy, kVectorBytes);
  const int lanes_log2 = ceil_log2((positions + kVector - 1) / kVector, 8);
  const int64_t per_block = kBackwardThreads >> lanes_log2;
  const int64_t pieces = (positions + kBackwardPiece - 1) / kBackwardPiece;
  activation_moments_backward_rows_kernel<T, Fn>
      <<<row_grid(pieces, (rows + per_block - 1) / per_block), kBackwardThreads, 0, call.stream>>>(
          tensors, rows, positions, lanes_log2, vectors, fn);
  call.check("activation_moments_backward_rows_kernel");
}

template <typename T, int kVector, typename Fn>
void launch_channels(const BackwardCall& call, const ChannelTile& tile,
                     const GradientTensors<T>& tensors, const Fn& fn) {
  const int64_t piece = static_cast<int64_t>(tile.rows) * kPositionsEach;
  const int64_t pieces = (call.layout.positions + piece - 1) / piece;
  const bool vectors =
      aligned_to(tensors.y, kVectorAlignment<T, kVector>) && aligned_to(tensors.dy, kVectorBytes);
  activation_moments_backward_channels_kernel<T, Fn, kVector>
      <<<row_grid(pieces * tile.tiles, call.layout.N), kMomentsThreads, 0, call.stream>>>(
          tensors, call.layout.N, call.layout.K, call.layout.positions, tile, kPositionsEach,
          vectors, fn);
  call.check("activation_moments_backward_channels_kernel");
}

void act_moments_backward_out(Tensor y, Tensor mean, Tensor grad_mean, Tensor grad_m2,
                              int64_t activation, Tensor dy) {
  check_activation(activation);
  const DenseLayout layout = dense_layout(y, "y");
  const DType dtype = dtype_of(y, "y"), dy_dtype = dtype_of(dy, "dy");
  const DType statistics = statistics_dtype(dtype);
  const int64_t rows = layout.N * layout.K;
  check_statistics(mean, "mean", rows, statistics, y);
  check_statistics(grad_mean, "grad_mean", rows, statistics, y);
  check_statistics(grad_m2, "grad_m2", rows, statistics, y);
  const DenseLayout dy_layout = dense_layout(dy, "dy");
  STD_TORCH_CHECK(dy.get_device_index() == y.get_device_index() && dy_layout.N == layout.N &&
                      dy_layout.K == layout.K && dy_layout.positions == layout.positions &&
                      dy_layout.channels_last == layout.channels_last,
                  "dy must have the device, sizes and layout of y");
  STD_TORCH_CHECK(dy_dtype == dtype || dy_dtype == statistics,
                  "dy must have the dtype of y or of mean");
  if (rows == 0 || layout.positions == 0) return;
  const DeviceScope scope(y);
  const BackwardCall call = {layout, scope.stream()};
  dispatch_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    using S = statistics_t<T>;
    const GradientTensors<T> tensors = {static_cast<const T*>(y.data_ptr()),
                                        dy.data_ptr(),
                                        dy_dtype == statistics,
                                        static_cast<const S*>(mean.data_ptr()),
                                        static_cast<const S*>(grad_mean.data_ptr()),
                                        static_cast<const S*>(grad_m2.data_ptr()),
                                        S(1) / static_cast<S>(layout.positions)};
    dispatch_activation(activation, [&](auto fn) {
      if (!layout.channels_last) return launch_rows(call, tensors, fn);
      const ChannelTile tile = channel_tile(layout.K);
      if (tile.vector == 4) return launch_channels<T, 4>(call, tile, tensors, fn);
      launch_channels<T, 1>(call, tile, tensors, fn);
    });
  });
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_act_moments_backward_out", TORCH_BOX(&convnormpool::act_moments_backward_out));
}
