// Host side of _act_moments_out.
#include "cuda/activation_moments.cuh"
#include "cuda/common/launch.cuh"

namespace convnormpool {
namespace {

constexpr int kMaxLanesLog2 = 5;

struct MomentsCall {
  const Tensor& y;
  DenseLayout layout;
  ActMomentsPartition partition;
  cudaStream_t stream;

  int64_t rows() const { return layout.N * layout.K; }
  void check(const char* kernel) const {
    check_launch(kernel, {layout.N, layout.K, layout.positions});
  }
};

unsigned group_blocks(int64_t rows, int lanes_log2) {
  const int64_t per_block = kMomentsThreads >> lanes_log2;
  return linear_grid((rows + per_block - 1) / per_block);
}

template <typename T, typename Fn>
void launch_rows(const MomentsCall& call, const Fn& fn, const MomentsOut<statistics_t<T>>& out) {
  constexpr int64_t kVector = kVectorBytes / sizeof(T);
  const int64_t positions = call.layout.positions;
  const T* y = static_cast<const T*>(call.y.data_ptr());
  const bool vectors = positions % kVector == 0;
  const RowAccess access = !vectors                      ? RowAccess::kStrided
                           : aligned_to(y, kVectorBytes) ? RowAccess::kWide
                                                         : RowAccess::kNarrow;
  if (positions <= kWarpRowPositions) {
    // Short rows share a warp: about four elements, or one vector, for a lane.
    const int64_t each = vectors ? kVector : 4;
    const int lanes_log2 = ceil_log2((positions + each - 1) / each, kMaxLanesLog2);
    activation_moments_warp_kernel<T, Fn>
        <<<group_blocks(call.rows(), lanes_log2), kMomentsThreads, 0, call.stream>>>(
            y, call.rows(), static_cast<int>(positions), access, lanes_log2, fn, out);
    return call.check("activation_moments_warp_kernel");
  }
  activation_moments_block_kernel<T, Fn>
      <<<row_grid(call.partition.pieces, call.rows()), kMomentsThreads, 0, call.stream>>>(
          y, call.rows(), positions, call.partition, access, fn, out);
  call.check("activation_moments_block_kernel");
}

template <typename T, int kVector, typename Fn>
void launch_channels(const MomentsCall& call, const ChannelTile& tile, const Fn& fn,
                     const MomentsOut<statistics_t<T>>& out) {
  // Within a thread's batch the kernel counts in 32 bits.
  STD_TORCH_CHECK(call.layout.K < (int64_t{1} << 24), "more than 2^24 channels");
  const T* y = static_cast<const T*>(call.y.data_ptr());
  const bool wide = aligned_to(y, kVectorAlignment<T, kVector>);
  activation_moments_channels_kernel<T, Fn, kVector>
      <<<row_grid(call.partition.pieces * tile.tiles, call.layout.N), kMomentsThreads, 0,
         call.stream>>>(y, call.layout.N, call.layout.K, call.layout.positions, tile,
                        call.partition, wide, fn, out);
  call.check("activation_moments_channels_kernel");
}

template <typename T, typename Fn>
void launch(const MomentsCall& call, const Fn& fn, const MomentsOut<statistics_t<T>>& out) {
  if (!call.layout.channels_last) {
    launch_rows<T>(call, fn, out);
  } else {
    const ChannelTile tile = channel_tile(call.layout.K);
    if (tile.vector == 4) {
      launch_channels<T, 4>(call, tile, fn, out);
    } else {
      launch_channels<T, 1>(call, tile, fn, out);
    }
  }
  if (call.partition.pieces == 1) return;
  const int lanes_log2 = ceil_log2(call.partition.pieces, kMaxLanesLog2);
  activation_moments_merge_kernel<<<group_blocks(call.rows(), lanes_log2), kMomentsThreads, 0,
                                    call.stream>>>(out.workspace, call.rows(),
                                                   call.layout.positions, call.partition,
                                                   lanes_log2, out.mean, out.m2);
  call.check("activation_moments_merge_kernel");
}

void act_moments_out(Tensor y, int64_t activation, Tensor mean, Tensor m2,
                     std::optional<Tensor> workspace) {
  check_activation(activation);
  const DenseLayout layout = dense_layout(y, "y");
  const DType dtype = dtype_of(y, "y");
  const DType statistics = statistics_dtype(dtype);
  const int64_t rows = layout.N * layout.K;
  check_statistics(mean, "mean", rows, statistics, y);
  check_statistics(m2, "m2", rows, statistics, y);
  if (rows == 0) return;
  const int64_t needed =
      act_moments_workspace(layout.N, layout.K, layout.positions, layout.channels_last);
  if (needed > 0) {
    STD_TORCH_CHECK(workspace && workspace->numel() >= needed, "the workspace must have ", needed,
                    " elements");
    check_statistics(*workspace, "workspace", workspace->numel(), statistics, y);
  }
  const DeviceScope scope(y);
  const MomentsCall call = {y, layout,
                            act_moments_partition(layout.K, layout.positions, layout.channels_last),
                            scope.stream()};
  dispatch_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    using S = statistics_t<T>;
    S* entries = needed > 0 ? static_cast<S*>(workspace->data_ptr()) : nullptr;
    const MomentsOut<S> out = {static_cast<S*>(mean.data_ptr()), static_cast<S*>(m2.data_ptr()),
                               entries};
    dispatch_activation(activation, [&](auto fn) { launch<T>(call, fn, out); });
  });
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_act_moments_out", TORCH_BOX(&convnormpool::act_moments_out));
}
