// Host side of _conv_act_moments_backward_out: the fused gradients of the direct convolution with
// statistics.
#include <vector>

#include "cuda/conv_activation_moments_backward_launch.cuh"
#include "cuda/conv_activation_moments_backward_sums.cuh"
#include "cuda/conv_activation_moments_host.cuh"
#ifdef CONVNORMPOOL_SM_90A
#include "cuda/conv_activation_moments_backward_wgmma_launch.cuh"
#endif

namespace convnormpool {
namespace {

void launch_sums(const BackwardSum& first, const BackwardSum& second, int64_t K, DType dtype,
                 cudaStream_t stream) {
  dispatch_storage(dtype, [&](auto element) {
    launch_dependent(sum_backward_kernel<decltype(element)>,
                     linear_grid(int64_t{first.blocks} + second.blocks), kBackwardSumThreads, 0,
                     stream, first, second, static_cast<int32_t>(K));
  });
  check_launch("sum_backward_kernel", {K, first.length, first.count, second.count});
}

void zero(const std::optional<Tensor>& tensor, cudaStream_t stream) {
  if (!tensor || tensor->numel() == 0) return;
  const cudaError_t error = cudaMemsetAsync(
      tensor->data_ptr(), 0, static_cast<size_t>(tensor->numel() * tensor->element_size()), stream);
  STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
}

void conv_act_moments_backward_out(Tensor x, Tensor w, std::optional<Tensor> b, Tensor mean,
                                   Tensor m2, Tensor grad_mean, Tensor grad_m2,
                                   std::vector<int64_t> stride, std::vector<int64_t> padding,
                                   std::vector<int64_t> dilation, int64_t groups,
                                   int64_t activation, int64_t precision, bool wgmma,
                                   std::optional<Tensor> dx, std::optional<Tensor> dw,
                                   std::optional<Tensor> db, std::optional<Tensor> workspace) {
  const Problem p = problem_of(x, w, stride, padding, dilation, groups, precision);
  check_activation(activation);
  const DeviceScope scope(x);
  const DeviceFacts facts;
  std::string refusal = backward_refusal(p, facts.major, facts.minor);
  if (refusal.empty() && wgmma) {
    STD_TORCH_CHECK(wgmma_device(facts.major, facts.minor),
                    "the gradients by wgmma need compute capability 9.0, not ", facts.major, '.',
                    facts.minor);
    refusal = wgmma_backward_refusal(p, kWgmmaCompiled);
  }
  STD_TORCH_CHECK(refusal.empty(), refusal);
  check_operands(p, x, w, b);
  check_statistics(mean, "mean", p.N * p.K, DType::kFloat32, x);
  check_statistics(m2, "m2", p.N * p.K, DType::kFloat32, x);
  check_statistics(grad_mean, "grad_mean", p.N * p.K, DType::kFloat32, x);
  check_statistics(grad_m2, "grad_m2", p.N * p.K, DType::kFloat32, x);
  const TypedPointer dx_out = typed(dx, "dx", x.numel(), x);
  const TypedPointer dw_out = typed(dw, "dw", w.numel(), x);
  const TypedPointer db_out = typed(db, "db", p.K, x);
  STD_TORCH_CHECK(!dx || dx_out.dtype == p.dtype, "dx must have the dtype of x");
  const bool input_gradient = dx.has_value(), filter_gradient = dw.has_value() || db.has_value();
  if (p.N == 0 || p.K == 0) {
    zero(dx, scope.stream());
    zero(dw, scope.stream());
    zero(db, scope.stream());
    return;
  }
  if (wgmma) {
    STD_TORCH_CHECK(aligned_to(x.data_ptr(), kWgmmaAlignment), "x must be aligned to ",
                    kWgmmaAlignment, " bytes");
    STD_TORCH_CHECK(!dx || aligned_to(dx->data_ptr(), kWgmmaAlignment), "dx must be aligned to ",
                    kWgmmaAlignment, " bytes");
  }
  const BackwardWorkspace floats =
      backward_workspace(p, facts.sm_count, wgmma, input_gradient, filter_gradient);
  float* space = nullptr;
  if (floats.total() > 0) {
    STD_TORCH_CHECK(workspace.has_value(), "workspace is missing");
    STD_TORCH_CHECK(workspace->numel() >= floats.total(), "workspace must have ", floats.total(),
                    " elements, not ", workspace->numel());
    check_statistics(*workspace, "workspace", workspace->numel(), DType::kFloat32, x);
    space = static_cast<float*>(workspace->data_ptr());
    STD_TORCH_CHECK(aligned_to(space, kWgmmaAlignment), "workspace must be aligned to ",
                    kWgmmaAlignment, " bytes");
  }
  float* const filter_partial = space + floats.dx_sum;
  float* const bias_partial = filter_partial + floats.filter;
  const auto statistics = [](const Tensor& t) { return static_cast<const float*>(t.data_ptr()); };
  const void* const bias = b ? b->data_ptr() : nullptr;

  BackwardSums sums = backward_sums(p, facts.sm_count, wgmma);
#ifdef CONVNORMPOOL_SM_90A
  if (wgmma) {
    const WgmmaBackwardLaunch launch{p,
                                     x.data_ptr(),
                                     w.data_ptr(),
                                     bias,
                                     statistics(mean),
                                     statistics(m2),
                                     statistics(grad_mean),
                                     statistics(grad_m2),
                                     dx_out.data,
                                     space,
                                     filter_partial,
                                     bias_partial,
                                     activation,
                                     facts.sm_count,
                                     scope.stream()};
    dispatch_operand<WgmmaOperand>(p, [&](auto operand) {
      constexpr WgmmaOperand kOperand = decltype(operand)::value;
      if (filter_gradient && input_gradient) {
        if (const int64_t groups = launch_wgmma_both<kOperand>(launch); groups > 0) {
          sums = {groups, groups * 4};
          return;
        }
      }
      if (filter_gradient) {
        const int64_t groups = launch_wgmma_filter<kOperand>(launch);
        sums = {groups, groups * 4};
      }
      if (input_gradient) launch_wgmma_input<kOperand>(launch);
    });
  }
#endif
  if (!wgmma) {
    BackwardLaunch launch{window_kernel(p), {}, false, 0, activation, scope.stream()};
    BackwardParameters& parameters = launch.parameters;
    parameters.x = x.data_ptr();
    parameters.w = w.data_ptr();
    parameters.bias = bias;
    parameters.mean = statistics(mean);
    parameters.grad_mean = statistics(grad_mean);
    parameters.grad_m2 = statistics(grad_m2);
    parameters.dx = dx_out.data;
    parameters.dx_sum = p.dtype == DType::kFloat32 ? static_cast<float*>(dx_out.data) : space;
    parameters.filter_partial = filter_partial;
    parameters.bias_partial = bias_partial;
    parameters.N = static_cast<int32_t>(p.N);
    for (const bool input : {false, true}) {
      if (!(input ? input_gradient : filter_gradient)) continue;
      launch.input_gradient = input;
      launch.blocks = backward_blocks(p, facts.sm_count, input);
      parameters.geometry = backward_geometry_of(p, input);
      dispatch_operand<WindowOperand>(
          p, [&](auto operand) { launch_backward<decltype(operand)::value>(launch); });
    }
  }
  const BackwardSum filter_sum =
      backward_sum(filter_partial, sums.filter, p.K, p.C * p.T * p.R * p.S, dw_out.data);
  const BackwardSum bias_sum = backward_sum(bias_partial, sums.bias, p.K, 1, db_out.data);
  if (dw && db && dw_out.dtype == db_out.dtype) {
    launch_sums(filter_sum, bias_sum, p.K, dw_out.dtype, scope.stream());
    return;
  }
  if (dw) launch_sums(filter_sum, {}, p.K, dw_out.dtype, scope.stream());
  if (db) launch_sums(bias_sum, {}, p.K, db_out.dtype, scope.stream());
}

}  // namespace
}  // namespace convnormpool

STABLE_TORCH_LIBRARY_IMPL(convnormpool, CUDA, m) {
  m.impl("_conv_act_moments_backward_out", TORCH_BOX(&convnormpool::conv_act_moments_backward_out));
}
