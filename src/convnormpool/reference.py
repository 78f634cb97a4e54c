"""The layer in plain PyTorch: oracle, baseline of the benchmarks, and last resort.

``conv_norm_pool`` here is what the package's layer is equivalent to. The other functions are the
operators' formulas in PyTorch, for devices that have no compiled operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._convolution import convolve

__all__ = [
    "ACTIVATIONS",
    "act_moments",
    "act_moments_backward",
    "conv_norm_pool",
    "group_norm_pool",
    "group_norm_pool_backward",
    "statistics_dtype",
]


def _hardsigmoid(x: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == torch.float64:
        # PyTorch's kernels have 1/6 in float32 there, which is no oracle. The same knees.
        return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 6 + 0.5))
    return F.hardsigmoid(x)


def _hardswish(x: Tensor) -> Tensor:
    if x.is_cuda and x.dtype == torch.float64:
        return x * _hardsigmoid(x)
    return F.hardswish(x)


def _identity(x: Tensor) -> Tensor:
    return x


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# The order is the code that crosses to the compiled operators (csrc/activation.h).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish": _hardswish,
    "identity": _identity,
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "mish": F.mish,
    "hardsigmoid": _hardsigmoid,
}


_aten = torch.ops.aten

# (gradient, input) to the gradient of the input; an operator's kernel runs below autograd.
_BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hardswish": _aten.hardswish_backward,
    "identity": lambda g, x: g,
    "relu": lambda g, x: _aten.threshold_backward(g, x, 0),
    "relu6": lambda g, x: _aten.hardtanh_backward(g, x, 0, 6),
    "leaky_relu": lambda g, x: _aten.leaky_relu_backward(g, x, 0.01, False),
    "elu": lambda g, x: _aten.elu_backward(g, 1, 1, 1, False, x),
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
    "mish": _aten.mish_backward,
    "hardsigmoid": _aten.hardsigmoid_backward,
}


def conv_norm_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "hardswish",
    fp32_precision: str | None = None,
) -> Tensor:
    """``mean(group_norm(activation(conv(input))))`` with PyTorch's operators.

    The weight's spatial axes, one to three, say which convolution. The shapes below have three;
    with two, D and T fall away, with one H and R too.

    Args:
        input: (N, C, D, H, W), or one sample (C, D, H, W).
        weight: (K, C // groups, T, R, S).
        bias: (K,) or None.
        num_groups: groups of the normalisation; divides K.
        norm_weight: (K,) or None.
        norm_bias: (K,) or None.
        eps: added to the variance.
        stride: of the convolution, per axis or one for all.
        padding: of the convolution with zeros, or "same" or "valid".
        dilation: of the convolution.
        groups: of the convolution.
        activation: one of ``ACTIVATIONS``.
        fp32_precision: "ieee" or "tf32" decides how a CUDA convolution of float32 tensors, and its
            gradients, form their products; None leaves it to PyTorch's global settings.

    Returns:
        (N, K) or for one sample (K,), in the dtype that PyTorch's operators give.
    """
    batched = input.dim() == weight.dim()
    x = input if batched else input.unsqueeze(0)
    y = convolve(x, weight, bias, stride, padding, dilation, groups, fp32_precision)
    y = F.group_norm(ACTIVATIONS[activation](y), num_groups, norm_weight, norm_bias, eps)
    y = y.mean(dim=tuple(range(2, y.dim())))
    return y if batched else y.squeeze(0)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def act_moments(y: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of ``activation(y)`` over all but the first two dims."""
    h = ACTIVATIONS[activation](y.flatten(2).to(statistics_dtype(y.dtype)))
    mean = h.mean(dim=2)
    return mean, (h - mean.unsqueeze(2)).square().sum(dim=2)


def act_moments_backward(
    grad_mean: Tensor, grad_m2: Tensor, y: Tensor, mean: Tensor, activation: str
) -> Tensor:
    """The gradient of y, in the statistics dtype."""
    per_row = (*mean.shape, *(1 for _ in y.shape[2:]))
    positions = y.shape[2:].numel()
    z = y.to(mean.dtype)
    centred = ACTIVATIONS[activation](z) - mean.view(per_row)
    dh = (grad_mean / positions).view(per_row) + 2 * grad_m2.view(per_row) * centred
    return _BACKWARDS[activation](dh, z)


def _grouped(
    mean: Tensor, m2: Tensor, count: int, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean - group mean) as (N, G, J), group mean and 1/sqrt(var + eps) as (N, G), float64."""
    channels = mean.shape[1] // num_groups
    m = mean.double().unflatten(1, (num_groups, channels))
    group_mean = m.mean(dim=2)
    centred = m - group_mean.unsqueeze(2)
    total = m2.double().reshape(m.shape).sum(dim=2) + count * centred.square().sum(dim=2)
    variance = total / (count * channels)
    nan = torch.full_like(variance, float("nan"))
    variance = torch.where(variance.isfinite(), variance, nan)
    return centred, group_mean, (variance + eps).rsqrt()


def group_norm_pool(
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The group normalisation's channel means from the channels' moments."""
    centred, group_mean, rstd = _grouped(mean, m2, count, num_groups, eps)
    out = (centred * rstd.unsqueeze(2)).flatten(1)
    if weight is not None:
        out = out * weight.double()
    if bias is not None:
        out = out + bias.double()
    return out.to(dtype), group_mean.to(mean.dtype), rstd.to(mean.dtype)


def group_norm_pool_backward(
    grad_out: Tensor,
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    num_groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(grad_mean, grad_m2) in mean's dtype, (grad_weight, grad_bias) in float64."""
    centred, _, rstd = _grouped(mean, m2, count, num_groups, eps)
    channels = centred.shape[2]
    r = rstd.unsqueeze(2)
    d = grad_out.double()
    scaled = (d if weight is None else d * weight.double()).reshape(centred.shape)
    p = scaled.sum(dim=2, keepdim=True)
    q = (scaled * centred).sum(dim=2, keepdim=True)
    grad_m2 = (-(r**3) * q / (2 * count * channels)).expand_as(centred)
    grad_mean = scaled * r - r * p / channels - r**3 * q * centred / channels
    grad_weight = (d.reshape(centred.shape) * centred * r).flatten(1).sum(dim=0)
    return (
        grad_mean.reshape(mean.shape).to(mean.dtype),
        grad_m2.reshape(mean.shape).to(mean.dtype),
        grad_weight,
        d.sum(dim=0),
    )
