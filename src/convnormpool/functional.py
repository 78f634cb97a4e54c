"""The layer as a function, and what the planner makes of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks, _direct, planner, reference
from ._autograd import ConvNormPool
from ._checks import Described, Facts
from ._convolution import (
    autocast_enabled,
    output_extents,
    pad_behind,
    padding_per_axis,
    three_axes,
)
from .planner import Convolution
from .reference import statistics_dtype

__all__ = ["conv_norm_pool"]


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
    fp32_precision: str = "ieee",
    path: str = "auto",
) -> Tensor:
    """Convolution, activation, group normalisation, and the mean over all positions.

    Equivalent to ``group_norm(activation(conv(input))).mean(dim=spatial_axes)`` (see
    :func:`convnormpool.reference.conv_norm_pool`), without keeping the convolution's output. Group
    normalisation is affine per channel (Wu and He, 2018) and the mean is linear, so the mean and
    the sum of squared deviations of every channel are enough; they are merged by the rule of Chan,
    Golub and LeVeque (1983).

    The weight's spatial axes, one to three, say which convolution. The shapes below have three;
    with two, D and T fall away, with one H and R too.

    Args:
        input: (N, C, D, H, W), or one sample (C, D, H, W); float64, float32, float16 or bfloat16;
            any strides.
        weight: (K, C // groups, T, R, S), of the input's dtype.
        bias: (K,) of the input's dtype, or None.
        num_groups: groups of the normalisation; divides K.
        norm_weight: (K,) or None for ones; of the input's dtype or float32.
        norm_bias: (K,) or None for zeros; of the input's dtype or float32.
        eps: added to the variance, at least 0.
        stride: of the convolution, one number or one per axis.
        padding: zeros on both sides, one number or one per axis, or "same" or "valid".
        dilation: of the convolution, one number or one per axis.
        groups: of the convolution; divides C and K.
        activation: "hardswish", "identity", "relu", "relu6", "leaky_relu", "elu", "silu", "gelu",
            "gelu_tanh", "mish" or "hardsigmoid", with PyTorch's default parameters.
        fp32_precision: "ieee" keeps float32 products at float32 accuracy; "tf32" allows CUDA
            devices to round float32 operands to tf32. PyTorch's global settings decide nothing.
            The fused CUDA kernels scale neighbouring inputs alike: beside one that is more than
            1e6 times as large, an input loses digits.
        path: "auto", or the one to use: "fused", "two_stage" or "eager".

    Returns:
        (N, K), or for one sample (K,), in the input's dtype; under autocast in the dtype in which
        the same chain of PyTorch's operators ends.

    Raises:
        TypeError: a dtype that is not taken, or dtypes that don't go together.
        ValueError: any other argument that makes no sense, or a path that can't run.
    """
    requested = planner.requested_path(path)
    axes = _checks.layer_tensors(input, weight)
    batched = input.dim() == axes + 2
    if not batched:
        input = input.unsqueeze(0)
    if type(eps) is not float:
        eps = _checks.epsilon(eps)
    given = (input, weight, bias, norm_weight, norm_bias)
    autocast = autocast_enabled(input.device.type)
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        # torch.jit.trace keeps the operators' integers, such as a count, as constants.
        if requested not in ("auto", "eager"):
            raise ValueError(f"path {path!r} can't run: torch.jit.trace needs the eager path")
        requested = "eager"
    tensors, dtype = _autocast(*given) if autocast else (given, input.dtype)
    # What is watched may be a fake, of which the planner knows nothing.
    plan_for = None if _direct.watched(tensors) else requested
    convolution = (stride, padding, dilation, groups, activation, fp32_precision)
    try:
        call, plan = _settle(*tensors, num_groups, eps, dtype, plan_for, *convolution)
    except ValueError as error:
        if batched:
            raise
        raise ValueError(f"{error} (the input was taken for one sample without a batch)") from None
    pooled: Tensor
    if requested == "eager":
        pooled = reference.conv_norm_pool(
            *given[:3], num_groups=num_groups, norm_weight=norm_weight, norm_bias=norm_bias,
            eps=eps, stride=stride, padding=padding, dilation=dilation, groups=groups,
            activation=activation, fp32_precision=None if autocast else fp32_precision,
        )  # fmt: skip
        return pooled if batched else pooled.squeeze(0)
    x, w, b, norm_weight, norm_bias = tensors
    x, w = three_axes(pad_behind(x, call.behind)), three_axes(w)
    if plan is not None:
        pooled = _direct.run((x, w, b, norm_weight, norm_bias), plan)
        return pooled if batched else pooled.squeeze(0)
    run = ConvNormPool.apply if _needs_autograd(tensors) else ConvNormPool.forward
    pooled = run(
        x, w, b, norm_weight, norm_bias, num_groups, eps, call.positions, dtype, call.stride,
        call.padding, call.dilation, groups, activation, fp32_precision, requested,
    )[0]  # fmt: skip
    return pooled if batched else pooled.squeeze(0)


class Call(NamedTuple):
    """A call's convolution, over three axes: the missing ones have stride 1 and so on.

    Attributes:
        stride: per axis.
        padding: per axis, on both sides.
        dilation: per axis.
        behind: per axis of the input as it was given, zeros to add behind it.
        positions: of the output.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    behind: tuple[int, ...]
    positions: int


def convolution_call(
    input: Described,
    weight: Described,
    bias: Described | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    activation: str,
    fp32_precision: str,
) -> Call:
    """The convolution of a batched call, its arguments checked."""
    axes = weight.dim() - 2
    strides = _checks.per_axis("stride", stride, 1, axes)
    dilations = _checks.per_axis("dilation", dilation, 1, axes)
    _checks.choice("activation", activation, reference.ACTIVATIONS)
    _checks.choice("fp32_precision", fp32_precision, _checks.PRECISIONS)
    sides = _checks.padding(padding, strides)
    kernel = weight.shape[2:]
    paddings, behind = padding_per_axis(kernel, sides, dilations)
    padded = [extent + extra for extent, extra in zip(input.shape[2:], behind, strict=True)]
    whole = Facts((*input.shape[:2], *padded), input.dtype, input.device)
    _checks.convolution_arguments(whole, weight, bias, strides, paddings, dilations, groups)
    positions = math.prod(output_extents(padded, kernel, strides, paddings, dilations))
    ones, zeros = (1,) * (3 - axes), (0,) * (3 - axes)
    return Call((*ones, *strides), (*zeros, *paddings), (*ones, *dilations), behind, positions)


@_checks.remembered
def _settle(
    input: Described,
    weight: Described,
    bias: Described | None,
    norm_weight: Described | None,
    norm_bias: Described | None,
    num_groups: int,
    eps: float,
    dtype: torch.dtype,
    path: str | None,
    *convolution: Any,
) -> tuple[Call, _direct.Plan | None]:
    """All that a batched call's arguments say, once they are checked.

    With a path also the plan by which it runs without the operators, if there is one.
    """
    call = convolution_call(input, weight, bias, *convolution)
    _checks.norm_parameters(norm_weight, norm_bias, weight.shape[0], input)
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None and tensor.dtype not in (input.dtype, statistics_dtype(input.dtype)):
            raise TypeError(
                f"{name} must have the input's dtype {input.dtype} or float32; it has "
                f"{tensor.dtype}"
            )
    _checks.num_groups(num_groups, weight.shape[0])
    _checks.epsilon(eps)
    if path is None:
        return call, None
    *_, groups, activation, precision = convolution
    conv = Convolution(call.stride, call.padding, call.dilation, groups, activation, precision)
    ones = (1,) * (5 - weight.dim())
    extents = map(operator.add, input.shape[2:], call.behind)
    x = Facts((*input.shape[:2], *ones, *extents), input.dtype, input.device)
    w = Facts((*weight.shape[:2], *ones, *weight.shape[2:]), weight.dtype, weight.device)
    return call, _direct.plan(x, w, conv, path, call.positions, num_groups, eps, dtype)


def _autocast(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> tuple[_direct.Tensors, torch.dtype]:
    """The tensors as autocast gives them to the eager chain, and the dtype in which that ends.

    Autocast converts what a convolution takes to its dtype, float64 excepted. On CUDA it runs group
    normalisation in float32; on CPU that keeps the convolution's dtype.
    """
    device_type = input.device.type
    low = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(tensor, Tensor) or tensor.dtype not in _checks.DTYPES:
            return tensor  # for the checks to refuse
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    x, w, b = cast(input, low), cast(weight, low), cast(bias, low)
    assert x is not None and w is not None
    if device_type == "cpu":
        return (x, w, b, norm_weight, norm_bias), x.dtype
    norm = (cast(norm_weight, torch.float32), cast(norm_bias, torch.float32))
    return (x, w, b, *norm), torch.float64 if x.dtype == torch.float64 else torch.float32


def _needs_autograd(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a derivative may be asked for; without, the function's overhead is saved."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    # autograd.Function, which has no jvp, refuses forward derivatives; here they would be lost.
    return (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
