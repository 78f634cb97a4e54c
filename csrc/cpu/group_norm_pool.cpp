// GroupNorm and mean from the moments, and the backward: csrc/ops.h has the formulas. All of it is
// double arithmetic over N * K numbers, channels and samples in order.
#include "common.h"

namespace convnormpool {
namespace cpu {
namespace {

// Below this many channels of all samples a second thread does not pay.
constexpr int64_t kGrainElements = 8192;

struct Group {
  double mean;
  double rstd;
};

// The statistics of the channels [0, channels) at mean and m2, each standing for count positions.
template <typename T>
Group group_statistics(const T* mean, const T* m2, int64_t channels, int64_t count, double eps) {
  double sum = 0;
  for (int64_t j = 0; j < channels; ++j) sum += static_cast<double>(mean[j]);
  const double mu = sum / static_cast<double>(channels);
  double within = 0;
  double between = 0;
  for (int64_t j = 0; j < channels; ++j) {
    const double d = static_cast<double>(mean[j]) - mu;
    within += static_cast<double>(m2[j]);
    between += d * d;
  }
  const double positions = static_cast<double>(count);
  const double variance =
      (within + positions * between) / (positions * static_cast<double>(channels));
  if (!std::isfinite(variance)) return {mu, std::nan("")};
  return {mu, 1.0 / std::sqrt(variance + eps)};
}

struct Parameter {
  const void* data = nullptr;
  ScalarType dtype = ScalarType::Float;

  Parameter(const std::optional<Tensor>& t, const char* name, int64_t channels) {
    if (!t.has_value()) return;
    check_dense(*t, name, t->scalar_type(), channels);
    data = t->const_data_ptr();
    dtype = t->scalar_type();
  }
};

void check_groups(const Tensor& mean, int64_t count, int64_t num_groups) {
  STD_TORCH_CHECK(mean.dim() == 2, "mean must have two dimensions");
  STD_TORCH_CHECK(num_groups > 0 && mean.size(1) % num_groups == 0,
                  "num_groups must divide the number of channels");
  STD_TORCH_CHECK(count > 0, "count must be positive");
}

template <typename T>
void group_norm_pool(const Tensor& mean, const Tensor& m2, int64_t count, const Parameter& weight,
                     const Parameter& bias, int64_t num_groups, double eps, const Tensor& out,
                     const Tensor& group_mean, const Tensor& group_rstd) {
  const int64_t samples = mean.size(0);
  const int64_t channels = mean.size(1);
  const int64_t per_group = channels / num_groups;
  const T* mean_data = input_data<T>(mean);
  const T* m2_data = input_data<T>(m2);
  T* group_mean_data = output_data<T>(group_mean);
  T* group_rstd_data = output_data<T>(group_rstd);
  void* out_data = out.mutable_data_ptr();
  const ScalarType out_dtype = out.scalar_type();

  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, channels));
  torch::stable::parallel_for(0, samples, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t first = n * channels + g * per_group;
        const Group s = group_statistics(mean_data + first, m2_data + first, per_group, count, eps);
        group_mean_data[n * num_groups + g] = static_cast<T>(s.mean);
        group_rstd_data[n * num_groups + g] = static_cast<T>(s.rstd);
        for (int64_t j = 0; j < per_group; ++j) {
          const int64_t k = g * per_group + j;
          const double scale = element(weight.data, weight.dtype, k, 1.0);
          const double shift = element(bias.data, bias.dtype, k, 0.0);
          const double centred = static_cast<double>(mean_data[first + j]) - s.mean;
          set_element(out_data, out_dtype, first + j, scale * centred * s.rstd + shift);
        }
      }
    }
  });
}

// The gradients of the moments of sample n.
template <typename T>
void moments_gradient(const T* mean, const T* m2, const Parameter& weight, const void* grad_out,
                      ScalarType grad_dtype, int64_t n, int64_t channels, int64_t count,
                      int64_t num_groups, double eps, T* grad_mean, T* grad_m2) {
  const int64_t per_group = channels / num_groups;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = n * channels + g * per_group;
    if (per_group == 1) {
      grad_mean[first] = T(0);
      grad_m2[first] = T(0);
      continue;
    }
    const Group s = group_statistics(mean + first, m2 + first, per_group, count, eps);
    const auto weighted = [&](int64_t j) {
      return element(weight.data, weight.dtype, g * per_group + j, 1.0) *
             element(grad_out, grad_dtype, first + j);
    };
    double p = 0;
    double q = 0;
    for (int64_t j = 0; j < per_group; ++j) {
      p += weighted(j);
      q += weighted(j) * (static_cast<double>(mean[first + j]) - s.mean);
    }
    const double size = static_cast<double>(per_group);
    const double cubed = s.rstd * s.rstd * s.rstd;
    const T m2_gradient = static_cast<T>(-cubed * q / (2.0 * static_cast<double>(count) * size));
    for (int64_t j = 0; j < per_group; ++j) {
      const double centred = static_cast<double>(mean[first + j]) - s.mean;
      grad_mean[first + j] =
          static_cast<T>(weighted(j) * s.rstd - s.rstd * p / size - cubed * q * centred / size);
      grad_m2[first + j] = m2_gradient;
    }
  }
}

template <typename T>
void group_norm_pool_backward(const Tensor& grad_out, const Tensor& mean, const Tensor& m2,
                              const Parameter& weight, int64_t count, int64_t num_groups,
                              double eps, const std::optional<Tensor>& grad_mean,
                              const std::optional<Tensor>& grad_m2,
                              const std::optional<Tensor>& grad_weight,
                              const std::optional<Tensor>& grad_bias) {
  const int64_t samples = mean.size(0);
  const int64_t channels = mean.size(1);
  const int64_t per_group = channels / num_groups;
  const T* mean_data = input_data<T>(mean);
  const T* m2_data = input_data<T>(m2);
  const void* grad_data = grad_out.const_data_ptr();
  const ScalarType grad_dtype = grad_out.scalar_type();

  if (grad_mean.has_value()) {
    T* grad_mean_data = output_data<T>(*grad_mean);
    T* grad_m2_data = output_data<T>(*grad_m2);
    const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, channels));
    torch::stable::parallel_for(0, samples, grain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        moments_gradient(mean_data, m2_data, weight, grad_data, grad_dtype, n, channels, count,
                         num_groups, eps, grad_mean_data, grad_m2_data);
      }
    });
  }
  if (!grad_weight.has_value() && !grad_bias.has_value()) return;

  // One group of channels per item: its statistics once per sample, its sums in registers' reach.
  const int64_t grain =
      std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, samples * per_group));
  torch::stable::parallel_for(0, num_groups, grain, [&](int64_t begin, int64_t end) {
    std::vector<double> weight_sum(static_cast<size_t>(per_group));
    std::vector<double> bias_sum(static_cast<size_t>(per_group));
    for (int64_t g = begin; g < end; ++g) {
      std::fill(weight_sum.begin(), weight_sum.end(), 0.0);
      std::fill(bias_sum.begin(), bias_sum.end(), 0.0);
      for (int64_t n = 0; n < samples; ++n) {
        const int64_t first = n * channels + g * per_group;
        const Group s = group_statistics(mean_data + first, m2_data + first, per_group, count, eps);
        for (int64_t j = 0; j < per_group; ++j) {
          const double d = element(grad_data, grad_dtype, first + j);
          weight_sum[j] += d * (static_cast<double>(mean_data[first + j]) - s.mean) * s.rstd;
          bias_sum[j] += d;
        }
      }
      for (int64_t j = 0; j < per_group; ++j) {
        const int64_t k = g * per_group + j;
        if (grad_weight.has_value()) {
          set_element(grad_weight->mutable_data_ptr(), grad_weight->scalar_type(), k,
                      weight_sum[j]);
        }
        if (grad_bias.has_value()) {
          set_element(grad_bias->mutable_data_ptr(), grad_bias->scalar_type(), k, bias_sum[j]);
        }
      }
    }
  });
}

void group_norm_pool_out(Tensor mean, Tensor m2, int64_t count, std::optional<Tensor> weight,
                         std::optional<Tensor> bias, int64_t num_groups, double eps, Tensor out,
                         Tensor group_mean, Tensor group_rstd) {
  check_groups(mean, count, num_groups);
  const ScalarType dtype = mean.scalar_type();
  const int64_t samples = mean.size(0);
  const int64_t channels = mean.size(1);
  check_dense(mean, "mean", statistics_dtype(dtype), samples * channels);
  check_dense(m2, "m2", dtype, samples * channels);
  check_dense(out, "out", out.scalar_type(), samples * channels);
  check_dense(group_mean, "group_mean", dtype, samples * num_groups);
  check_dense(group_rstd, "group_rstd", dtype, samples * num_groups);
  const Parameter scale(weight, "weight", channels);
  const Parameter shift(bias, "bias", channels);
  if (dtype == ScalarType::Double) {
    group_norm_pool<double>(mean, m2, count, scale, shift, num_groups, eps, out, group_mean,
                            group_rstd);
  } else {
    group_norm_pool<float>(mean, m2, count, scale, shift, num_groups, eps, out, group_mean,
                           group_rstd);
  }
}

void group_norm_pool_backward_out(Tensor grad_out, Tensor mean, Tensor m2,
                                  std::optional<Tensor> weight, int64_t count, int64_t num_groups,
                                  double eps, std::optional<Tensor> grad_mean,
                                  std::optional<Tensor> grad_m2, std::optional<Tensor> grad_weight,
                                  std::optional<Tensor> grad_bias) {
  check_groups(mean, count, num_groups);
  const ScalarType dtype = mean.scalar_type();
  const int64_t samples = mean.size(0);
  const int64_t channels = mean.size(1);
  check_dense(mean, "mean", statistics_dtype(dtype), samples * channels);
  check_dense(m2, "m2", dtype, samples * channels);
  check_dense(grad_out, "grad_out", grad_out.scalar_type(), samples * channels);
  STD_TORCH_CHECK(grad_mean.has_value() == grad_m2.has_value(),
                  "grad_mean and grad_m2 must be given together");
  if (grad_mean.has_value()) {
    check_dense(*grad_mean, "grad_mean", dtype, samples * channels);
    check_dense(*grad_m2, "grad_m2", dtype, samples * channels);
  }
  if (grad_weight.has_value()) {
    check_dense(*grad_weight, "grad_weight", grad_weight->scalar_type(), channels);
  }
  if (grad_bias.has_value()) {
    check_dense(*grad_bias, "grad_bias", grad_bias->scalar_type(), channels);
  }
  const Parameter scale(weight, "weight", channels);
  if (dtype == ScalarType::Double) {
    group_norm_pool_backward<double>(grad_out, mean, m2, scale, count, num_groups, eps, grad_mean,
                                     grad_m2, grad_weight, grad_bias);
  } else {
    group_norm_pool_backward<float>(grad_out, mean, m2, scale, count, num_groups, eps, grad_mean,
                                    grad_m2, grad_weight, grad_bias);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CPU, m) {
  m.impl("_group_norm_pool_out", TORCH_BOX(&group_norm_pool_out));
  m.impl("_group_norm_pool_backward_out", TORCH_BOX(&group_norm_pool_backward_out));
}

}  // namespace cpu
}  // namespace convnormpool
