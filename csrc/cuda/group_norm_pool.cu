// Host side of _group_norm_pool_out and _group_norm_pool_backward_out.
#include "cuda/group_norm_pool.cuh"
#include "cuda/group_norm_pool_host.cuh"

namespace convnormpool {
namespace {

// Which instance of the kernels takes these moments.
bool is_float(const GroupNormPool& p) { return p.mean.dtype == DType::kFloat32; }

unsigned group_blocks(const GroupNormPool& p) {
  const int64_t per_block = kGroupThreads >> p.lanes_log2;
  return linear_grid((p.samples * p.groups + per_block - 1) / per_block);
}

void check(const char* kernel, const GroupNormPool& p) {
  check_launch(kernel, {p.samples, p.channels, p.groups});
}

void group_norm_pool_out(Tensor mean, Tensor m2, int64_t count, std::optional<Tensor> weight,
                         std::optional<Tensor> bias, int64_t num_groups, double eps, Tensor out,
                         Tensor group_mean, Tensor group_rstd) {
  const GroupNormPool p = group_norm_pool_of(mean, m2, weight, count, num_groups, eps);
  NormPool norm = norm_pool_of(p, bias, out, mean);
  check_statistics(group_mean, "group_mean", p.samples * p.groups, p.mean.dtype, mean);
  check_statistics(group_rstd, "group_rstd", p.samples * p.groups, p.mean.dtype, mean);
  norm.group_mean = typed(group_mean, "group_mean");
  norm.group_rstd = typed(group_rstd, "group_rstd");
  if (p.samples * p.channels == 0) return;
  const DeviceScope scope(mean);
  launch_group_norm_pool(norm, scope.stream());
}

void group_norm_pool_backward_out(Tensor grad_out, Tensor mean, Tensor m2,
                                  std::optional<Tensor> weight, int64_t count, int64_t num_groups,
                                  double eps, std::optional<Tensor> grad_mean,
                                  std::optional<Tensor> grad_m2, std::optional<Tensor> grad_weight,
                                  std::optional<Tensor> grad_bias) {
  const GroupNormPool p = group_norm_pool_of(mean, m2, weight, count, num_groups, eps);
  const int64_t numel = p.samples * p.channels;
  check_dense(grad_out, "grad_out", numel, mean);
  STD_TORCH_CHECK(grad_mean.has_value() == grad_m2.has_value(),
                  "grad_mean and grad_m2 must be given together");
  const TypedPointer d = typed(grad_out, "grad_out");
  const TypedPointer to_weight = typed(grad_weight, "grad_weight", p.channels, mean);
  const TypedPointer to_bias = typed(grad_bias, "grad_bias", p.channels, mean);
  const DeviceScope scope(mean);
  if (grad_mean && numel > 0) {
    check_statistics(*grad_mean, "grad_mean", numel, p.mean.dtype, mean);
    check_statistics(*grad_m2, "grad_m2", numel, p.mean.dtype, mean);
    launch_dependent(is_float(p) ? group_norm_pool_backward_kernel<true>
                                 : group_norm_pool_backward_kernel<false>,
                     group_blocks(p), kGroupThreads, 0, scope.stream(), p, d,
                     typed(*grad_mean, "grad_mean"), typed(*grad_m2, "grad_m2"));
    check("group_norm_pool_backward_kernel", p);
  }
  if ((grad_weight || grad_bias) && p.channels > 0) {
    // As many threads as there are samples to spread over them, in whole warps. Sums over an empty
    // batch are zero, so this runs for N = 0 too.
    const int64_t lanes = int64_t{1} << p.lanes_log2;
    const int samples_log2 = ceil_log2(p.samples, 10);
    const int64_t threads =
        std::clamp<int64_t>(lanes << samples_log2, kWarpThreads, kSampleThreads);
    const dim3 grid(linear_grid((p.channels / p.groups + lanes - 1) / lanes),
                    static_cast<unsigned>(std::min<int64_t>(p.groups, 65535)));
    launch_dependent(is_float(p) ? group_norm_pool_parameters_kernel<true>
                                 : group_norm_pool_parameters_kernel<false>,
                     grid, static_cast<unsigned>(threads), 0, scope.stream(), p, d, to_weight,
                     to_bias);
    check("group_norm_pool_parameters_kernel", p);
  }
}

}  // namespace

void launch_group_norm_pool(const NormPool& norm, cudaStream_t stream) {
  launch_dependent(is_float(norm.p) ? group_norm_pool_kernel<true> : group_norm_pool_kernel<false>,
                   group_blocks(norm.p), kGroupThreads, 0, stream, norm);
  check("group_norm_pool_kernel", norm.p);
}

}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_group_norm_pool_out", TORCH_BOX(&convnormpool::group_norm_pool_out));
  m.impl("_group_norm_pool_backward_out", TORCH_BOX(&convnormpool::group_norm_pool_backward_out));
}
