// The contract of every operator that the compiled libraries implement.
//
// The public operators (convnormpool::act_moments, group_norm_pool, conv_act_moments and their
// backwards) are defined and implemented in Python: that side checks arguments, asks the planner,
// allocates and runs library convolutions. The operators below are what it calls. They allocate
// nothing, only write into the tensors they are given, and are registered once per device:
// csrc/cpu/*.cpp for CPU, csrc/cuda/*.cu for CUDA. Their schemas stand in src/convnormpool/ops.py.
//
// Rules that hold for all of them
//   - Extents are named N C D H W (input), K T R S (filter), Z P Q (output).
//   - Storage types: float64, float32, float16, bfloat16. Accumulation and statistics are float64
//     for float64 and float32 for the others ("statistics type" below); merges across threads,
//     pieces or channels are float64 or by Chan's rule, always in one fixed order.
//   - Deterministic and batch-invariant: a sample's results depend on that sample (and the
//     parameters) alone, not on N, its place in the batch, the number of threads, the alignment of
//     pointers, the stream or the launch. Sums over samples and channels are in one fixed order: on
//     the CPU theirs, on CUDA that of strided parts which a fixed tree joins. Those over samples
//     depend on N; on CUDA, in the gradients of w and b, on the device's number of SMs, too.
//   - No atomics on floating-point values, no global state, no synchronisation.
//   - Empty tensors are legal: nothing is launched where there is nothing to write; sums over an
//     empty batch are zero.
//   - 64-bit offsets everywhere.
//   - CUDA: the tensors' device is made current for the call, work goes to its current stream, and
//     every launch is checked.
//
// _act_moments_out(Tensor y, int activation, Tensor(a!) mean, Tensor(b!) m2, Tensor(c!)? workspace)
//   y (N, K, *) dense, either channels-first (contiguous) or channels-last (channel stride 1, the
//   spatial positions in order); mean, m2 (N, K) statistics type, contiguous.
//     mean[n,k] = mean over positions of a(y[n,k,:])
//     m2[n,k]   = sum over positions of (a(y[n,k,:]) - mean[n,k])^2
//   workspace: statistics type, at least act_moments_workspace elements as the planner computes it
//   (CUDA only; none when that is 0 and on CPU).
//
// _act_moments_backward_out(Tensor y, Tensor mean, Tensor grad_mean, Tensor grad_m2, int
// activation,
//                           Tensor(a!) dy)
//   dy[n,k,s] = (grad_mean[n,k] / positions + 2 * grad_m2[n,k] * (a(y) - mean[n,k])) * a'(y)
//   dy has y's sizes and layout and either y's dtype or the statistics type; it may be y itself.
//
// _group_norm_pool_out(Tensor mean, Tensor m2, int count, Tensor? weight, Tensor? bias,
//                      int num_groups, float eps, Tensor(a!) out, Tensor(b!) group_mean,
//                      Tensor(c!) group_rstd)
//   mean, m2 (N, K), one statistics type; weight, bias (K,), any of the four dtypes each; out (N,
//   K) of any of the four dtypes; group_mean, group_rstd (N, num_groups) statistics type. count is
//   the number of positions that each (mean, m2) stands for.
//     group_mean = mean over the group's channels of mean
//     var        = (sum m2 + count * sum (mean - group_mean)^2) / (count * channels per group)
//     group_rstd = 1 / sqrt(var + eps)
//     out        = weight * (mean - group_mean) * group_rstd + bias
//   All in float64. A variance that is not finite (m2 overflowed, or NaN or
//   Inf came in) makes group_rstd and out NaN for that group: never a wrong finite value.
//
// _group_norm_pool_backward_out(Tensor grad_out, Tensor mean, Tensor m2, Tensor? weight, int count,
//                               int num_groups, float eps, Tensor(a!)? grad_mean,
//                               Tensor(b!)? grad_m2, Tensor(c!)? grad_weight, Tensor(d!)?
//                               grad_bias)
//   With d = grad_out (any of the four dtypes, contiguous), mu and r recomputed in float64 from
//   mean and m2, P = sum over the group's channels of weight * d, Q = sum of weight * d * (mean -
//   mu), J channels per group:
//     grad_m2   = -r^3 * Q / (2 * count * J)               one value per group, written per channel
//     grad_mean = weight * d * r - r * P / J - r^3 * Q * (mean - mu) / J
//     grad_weight[k] = sum over n of d * (mean - mu) * r                  (K,)
//     grad_bias[k]   = sum over n of d                                    (K,)
//   grad_mean, grad_m2 statistics type, given together or not at all; grad_weight, grad_bias any of
//   the four dtypes, rounded once from float64.
//   With one channel per group grad_mean and grad_m2 are exactly zero.
//
// _conv_act_moments_out(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation,
//                       int groups, int activation, int precision, bool wgmma, Tensor(a!) mean,
//                       Tensor(b!) m2, Tensor(c!)? workspace)
//   The fused direct convolution: moments of a(conv3d(x, w, b)) with no convolution output in
//   memory. x (N, C, D, H, W) contiguous, w (K, C/groups, T, R, S) contiguous, b (K,), one dtype.
//   precision is the code of csrc/problem.h and matters for float32 only. Only called with problems
//   that the planner's fused path accepts on that device; wgmma, the workspace and x's alignment
//   are the planner's, too.
//
// _conv_norm_pool_out(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation,
//                     int groups, int activation, int precision, bool wgmma, Tensor? norm_weight,
//                     Tensor? norm_bias, int num_groups, float eps, Tensor(a!) out,
//                     Tensor(b!) mean, Tensor(c!) m2, Tensor(d!)? workspace)        CUDA only
//   _conv_act_moments_out and then _group_norm_pool_out of its mean and m2: the same bits, but
//   fewer launches, and no group_mean and group_rstd.
//
// _conv_act_moments_backward_out(Tensor x, Tensor w, Tensor? b, Tensor mean, Tensor m2,
//                                Tensor grad_mean, Tensor grad_m2, int[] stride, int[] padding,
//                                int[] dilation, int groups, int activation, int precision,
//                                bool wgmma, Tensor(a!)? dx, Tensor(b!)? dw, Tensor(c!)? db,
//                                Tensor(d!)? workspace)
//   Recomputes y, forms dy as above (m2 bounds it where it is scaled), and writes the wanted ones
//   of dx (x's sizes and dtype), dw (w's) and db (K,), each rounded once. dx is batch-invariant; dw
//   and db are summed in a fixed order that does not depend on the number of threads. wgmma, the
//   workspace and x's alignment are the planner's, as above.
//
// _to_channels_last_out(Tensor x, Tensor(a!) out)                                      CUDA only
//   out, a channels-last tensor of x's sizes and dtype, receives contiguous x (N, C, *).
//
// _unfold_depth_out(Tensor x, int filter, int stride, int padding, int dilation, Tensor(a!) out)
//                                                                                      CUDA only
//   out (N, Z, H, W, channels) contiguous, of x's dtype, receives x (N, C, D, H, W) contiguous:
//     out[n,z,h,w,c*filter + t] = x[n, c, z*stride - padding + t*dilation, h, w]
//   and zero where that plane lies outside x and in channels from C*filter on. channels is a
//   multiple of 4.
//
// _fold_depth_out(Tensor du, int filter, int stride, int padding, int dilation, Tensor(a!) dx)
//                                                                                      CUDA only
//   The transpose: dx (N, C, D, H, W) contiguous, of any of the four dtypes, receives the sums, t
//   in order, of du (N, Z, H, W, channels) in the statistics type of dx, rounded once.
#pragma once
