// Host side of _to_channels_last_out.
#include "cuda/channels_last.cuh"
#include "cuda/common/launch.cuh"

namespace convnormpool {
namespace {

template <int kSize>
void launch(const DenseLayout& layout, const void* x, void* out, cudaStream_t stream) {
  constexpr int kUnit = kSize < kTransposeUnitBytes ? kTransposeUnitBytes / kSize : 1;
  const TransposeTile tile = transpose_tile(layout.K, layout.positions, kSize);
  const bool wide_in = aligned_to(x, kUnit * kSize) && layout.positions % kUnit == 0;
  const bool whole_units = tile.channel_tiles == 1
                               ? layout.K * layout.positions % kUnit == 0
                               : layout.K % kUnit == 0 && tile.channels % kUnit == 0;
  const bool wide_out = aligned_to(out, kUnit * kSize) && whole_units;
  to_channels_last_kernel<kSize>
      <<<row_grid(tile.position_tiles * tile.channel_tiles, layout.N), kTransposeThreads, 0,
         stream>>>(x, out, layout.N, layout.K, layout.positions, tile, wide_in, wide_out);
  check_launch("to_channels_last_kernel", {layout.N, layout.K, layout.positions});
}

void to_channels_last_out(Tensor x, Tensor out) {
  const DenseLayout layout = dense_layout(x, "x"), target = dense_layout(out, "out");
  STD_TORCH_CHECK(!layout.channels_last, "x must be contiguous");
  STD_TORCH_CHECK(target.channels_last || layout.K == 1 || layout.positions == 1,
                  "out must be channels-last");
  STD_TORCH_CHECK(
      target.N == layout.N && target.K == layout.K && target.positions == layout.positions &&
          out.scalar_type() == x.scalar_type() && out.get_device_index() == x.get_device_index(),
      "out must have the sizes, dtype and device of x");
  if (layout.N * layout.K * layout.positions == 0) return;
  const DeviceScope scope(x);
  const cudaStream_t stream = scope.stream();
  const void* source = x.data_ptr();
  switch (x.element_size()) {
    case 1:
      return launch<1>(layout, source, out.data_ptr(), stream);
    case 2:
      return launch<2>(layout, source, out.data_ptr(), stream);
    case 4:
      return launch<4>(layout, source, out.data_ptr(), stream);
    case 8:
      return launch<8>(layout, source, out.data_ptr(), stream);
    default:
      STD_TORCH_CHECK(false, "elements of ", x.element_size(), " bytes are not supported");
  }
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_to_channels_last_out", TORCH_BOX(&convnormpool::to_channels_last_out));
}
