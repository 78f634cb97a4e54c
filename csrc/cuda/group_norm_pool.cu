// Host side of _group_norm_pool_out and _group_norm_pool_backward_out.
#include "cuda/common/launch.cuh"
#include "cuda/group_norm_pool.cuh"

namespace convnormpool {
namespace {

// What both operators are given, checked.
GroupNormPool problem(const Tensor& mean, const Tensor& m2, const std::optional<Tensor>& weight,
                      int64_t count, int64_t num_groups, double eps) {
  STD_TORCH_CHECK(mean.is_cuda() && mean.dim() == 2, "mean must be a CUDA tensor (N, K)");
  const DType dtype = dtype_of(mean, "mean");
  STD_TORCH_CHECK(dtype == statistics_dtype(dtype), "mean must be float32 or float64");
  const int64_t samples = mean.size(0), channels = mean.size(1);
  check_statistics(mean, "mean", samples * channels, dtype, mean);
  check_statistics(m2, "m2", samples * channels, dtype, mean);
  STD_TORCH_CHECK(num_groups > 0 && channels % num_groups == 0, "num_groups ", num_groups,
                  " does not divide the ", channels, " channels");
  STD_TORCH_CHECK(count > 0, "count must be positive, not ", count);
  GroupNormPool p = {};
  p.mean = typed(mean, "mean");
  p.m2 = typed(m2, "m2");
  p.weight = typed(weight, "weight", channels, mean);
  p.samples = samples;
  p.channels = channels;
  p.groups = num_groups;
  p.count = static_cast<double>(count);
  p.eps = eps;
  p.lanes_log2 = ceil_log2(p.channels / p.groups, kMaxGroupLanesLog2);
  return p;
}

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
  const GroupNormPool p = problem(mean, m2, weight, count, num_groups, eps);
  const TypedPointer shift = typed(bias, "bias", p.channels, mean);
  check_dense(out, "out", p.samples * p.channels, mean);
  check_statistics(group_mean, "group_mean", p.samples * p.groups, p.mean.dtype, mean);
  check_statistics(group_rstd, "group_rstd", p.samples * p.groups, p.mean.dtype, mean);
  if (p.samples * p.channels == 0) return;
  const DeviceScope scope(mean);
  group_norm_pool_kernel<<<group_blocks(p), kGroupThreads, 0, scope.stream()>>>(
      p, shift, typed(out, "out"), typed(group_mean, "group_mean"),
      typed(group_rstd, "group_rstd"));
  check("group_norm_pool_kernel", p);
}

void group_norm_pool_backward_out(Tensor grad_out, Tensor mean, Tensor m2,
                                  std::optional<Tensor> weight, int64_t count, int64_t num_groups,
                                  double eps, std::optional<Tensor> grad_mean,
                                  std::optional<Tensor> grad_m2, std::optional<Tensor> grad_weight,
                                  std::optional<Tensor> grad_bias) {
  const GroupNormPool p = problem(mean, m2, weight, count, num_groups, eps);
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
    group_norm_pool_backward_kernel<<<group_blocks(p), kGroupThreads, 0, scope.stream()>>>(
        p, d, typed(*grad_mean, "grad_mean"), typed(*grad_m2, "grad_m2"));
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
    group_norm_pool_parameters_kernel<<<grid, static_cast<unsigned>(threads), 0, scope.stream()>>>(
        p, d, to_weight, to_bias);
    check("group_norm_pool_parameters_kernel", p);
  }
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_group_norm_pool_out", TORCH_BOX(&convnormpool::group_norm_pool_out));
  m.impl("_group_norm_pool_backward_out", TORCH_BOX(&convnormpool::group_norm_pool_backward_out));
}
