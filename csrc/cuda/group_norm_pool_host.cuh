// What the host sides of group normalisation and of the convolution before it share: the problem
// that the tensors state, and the launch.
#pragma once

#include <optional>

#include "cuda/common/launch.cuh"
#include "cuda/group_norm_pool_groups.cuh"

namespace convnormpool {

// What all operators are given, checked.
inline GroupNormPool group_norm_pool_of(const Tensor& mean, const Tensor& m2,
                                        const std::optional<Tensor>& weight, int64_t count,
                                        int64_t num_groups, double eps) {
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
  group_norm_pool_derive(p);
  return p;
}

// The normalisation of what p says into out, without the groups' statistics; checked.
inline NormPool norm_pool_of(const GroupNormPool& p, const std::optional<Tensor>& bias,
                             const Tensor& out, const Tensor& like) {
  check_dense(out, "out", p.samples * p.channels, like);
  return {p, typed(bias, "bias", p.channels, like), typed(out, "out"), {}, {}};
}

// Launches group_norm_pool_kernel for at least one element; all of its tensors were checked.
void launch_group_norm_pool(const NormPool& norm, cudaStream_t stream);

}  // namespace convnormpool
