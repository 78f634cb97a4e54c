"""The operators ``torch.ops.convnormpool.*``: implementations, fakes, autograd and vmap rules.

Moments are the interface. Whatever computes the convolution hands over the mean and the sum of
squared deviations (M2) of every channel of every sample; whatever normalises and pools needs
nothing else:

``act_moments(y, activation)``
    y (N, K, *) to mean and M2 (N, K) of ``activation(y)``.
``conv_act_moments(x, w, b, stride, padding, dilation, groups, activation, precision, path)``
    The same of a convolution's output, which no path but the eager one keeps in memory.
``group_norm_pool(mean, m2, count, weight, bias, num_groups, eps, dtype)``
    The group normalisation's channel means (N, K) in ``dtype``, a name such as "float16" (that of
    the moments unless given); group mean and 1/sqrt(var + eps) (N, G).

Statistics are float64 for float64 tensors and float32 otherwise. The operators check what they are
given, take any strides, and are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks, _kernels, _library, _paths, planner, reference
from ._checks import Described
from ._schemas import LIBRARY
from .reference import statistics_dtype

__all__ = [
    "act_moments",
    "act_moments_backward",
    "conv_act_moments",
    "conv_act_moments_backward",
    "group_norm_pool",
    "group_norm_pool_backward",
]

act_moments = torch.ops.convnormpool.act_moments
act_moments_backward = torch.ops.convnormpool.act_moments_backward
conv_act_moments = torch.ops.convnormpool.conv_act_moments
conv_act_moments_backward = torch.ops.convnormpool.conv_act_moments_backward
group_norm_pool = torch.ops.convnormpool.group_norm_pool
group_norm_pool_backward = torch.ops.convnormpool.group_norm_pool_backward


def _implements(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the implementation of an operator for every device, autocast off inside it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def implementation(*args: Any, **kwargs: Any) -> Any:
            if not torch._C._is_any_autocast_enabled():
                return function(*args, **kwargs)
            device_type = next(a.device.type for a in args if isinstance(a, Tensor))
            with torch.autocast(device_type, enabled=False):
                return function(*args, **kwargs)

        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"convnormpool::{name}", function, lib=LIBRARY)
        return function

    return register


def _statistics(like: Tensor, rows: Sequence[Any]) -> Tensor:
    return like.new_empty(rows, dtype=statistics_dtype(like.dtype))


# --- act_moments ----------------------------------------------------------------------------------


@_implements("act_moments")
def _act_moments(y: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _checks.moments_input(y, activation)
    mean = _statistics(y, y.shape[:2])
    m2 = torch.empty_like(mean)
    _kernels.act_moments(_kernels.dense(y), activation, mean, m2)
    return mean, m2


@_fake("act_moments")
def _act_moments_fake(y: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _checks.moments_input(y, activation)
    mean = _statistics(y, y.shape[:2])
    return mean, torch.empty_like(mean)


@_implements("act_moments_backward")
def _act_moments_backward(
    grad_mean: Tensor, grad_m2: Tensor, y: Tensor, mean: Tensor, activation: str
) -> Tensor:
    _checks.moments_input(y, activation)
    statistics = {"grad_mean": grad_mean, "grad_m2": grad_m2, "mean": mean}
    _checks.statistics(statistics, tuple(y.shape[:2]), y)
    dense = _kernels.dense(y)
    dy = torch.empty_like(dense)
    rows = (mean.contiguous(), grad_mean.contiguous(), grad_m2.contiguous())
    _kernels.act_moments_backward(dense, *rows, activation, dy)
    return dy if dense is y else torch.empty_like(y).copy_(dy)


@_fake("act_moments_backward")
def _act_moments_backward_fake(
    grad_mean: Tensor, grad_m2: Tensor, y: Tensor, mean: Tensor, activation: str
) -> Tensor:
    return torch.empty_like(y)


# --- group_norm_pool ------------------------------------------------------------------------------


@_implements("group_norm_pool")
def _group_norm_pool(
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    dtype: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.group_norm_arguments(mean, m2, count, weight, bias, num_groups, eps, dtype)
    result = mean.dtype if dtype is None else getattr(torch, dtype)
    if not _library.loaded_for(mean.device.type):
        return reference.group_norm_pool(mean, m2, count, weight, bias, num_groups, eps, result)
    moments = (mean.contiguous(), m2.contiguous())
    return _kernels.group_norm_pool(*moments, count, weight, bias, num_groups, eps, result)


@_fake("group_norm_pool")
def _group_norm_pool_fake(
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    dtype: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.group_norm_arguments(mean, m2, count, weight, bias, num_groups, eps, dtype)
    result = mean.dtype if dtype is None else getattr(torch, dtype)
    out = mean.new_empty(mean.shape, dtype=result)
    group_mean = mean.new_empty((mean.shape[0], num_groups))
    return out, group_mean, torch.empty_like(group_mean)


@_implements("group_norm_pool_backward")
def _group_norm_pool_backward(
    grad_out: Tensor,
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.group_norm_arguments(mean, m2, count, weight, bias, num_groups, eps, None)
    _checks.same_shape("grad_out", grad_out, mean.shape)
    grads = _group_norm_pool_grads(mean, weight, bias, output_mask)
    if not _library.loaded_for(mean.device.type):
        found = reference.group_norm_pool_backward(
            grad_out, mean, m2, count, weight, num_groups, eps
        )
        for grad, value in zip(grads, found, strict=True):
            if grad.numel():
                grad.copy_(value)
        return grads
    moments, per_weight, per_bias = output_mask
    wanted = (
        grads[0] if moments else None, grads[1] if moments else None,
        grads[2] if per_weight else None, grads[3] if per_bias else None,
    )  # fmt: skip
    _kernels.group_norm_pool_backward(
        grad_out, mean.contiguous(), m2.contiguous(), weight, count, num_groups, eps, wanted
    )
    return grads


def _group_norm_pool_grads(
    mean: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the gradients; an unwanted one has no elements."""
    moments, per_weight, per_bias = output_mask
    rows = mean.shape if moments else (0,)
    k = mean.shape[1]

    def parameter(given: Tensor | None, wanted: bool) -> Tensor:
        dtype = mean.dtype if given is None else given.dtype
        return mean.new_empty((k if wanted else 0,), dtype=dtype)

    return (
        mean.new_empty(rows),
        mean.new_empty(rows),
        parameter(weight, per_weight),
        parameter(bias, per_bias),
    )


@_fake("group_norm_pool_backward")
def _group_norm_pool_backward_fake(
    grad_out: Tensor,
    mean: Tensor,
    m2: Tensor,
    count: int,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _group_norm_pool_grads(mean, weight, bias, output_mask)


# --- conv_act_moments -----------------------------------------------------------------------------


@_implements("conv_act_moments")
def _conv_act_moments(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    precision: str,
    path: str,
) -> tuple[Tensor, Tensor]:
    conv, decision = _decide(
        x, w, b, stride, padding, dilation, groups, activation, precision,
        planner.requested_path(path),
    )  # fmt: skip
    mean = _statistics(x, (x.shape[0], w.shape[0]))
    m2 = torch.empty_like(mean)
    if x.shape[0] > 0:
        _paths.moments(x, w, b, conv, decision, mean, m2)
    return mean, m2


@_fake("conv_act_moments")
def _conv_act_moments_fake(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    precision: str,
    path: str,
) -> tuple[Tensor, Tensor]:
    _checks.convolution_operator(x, w, b, stride, padding, dilation, groups)
    _checks.choice("activation", activation, reference.ACTIVATIONS)
    mean = _statistics(x, (x.shape[0], w.shape[0]))
    return mean, torch.empty_like(mean)


@_checks.remembered
def _decide(
    x: Described,
    w: Described,
    b: Described | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    precision: str,
    path: str,
) -> tuple[planner.Convolution, planner.Decision]:
    """The convolution, its arguments checked, and who computes it."""
    _checks.convolution_operator(x, w, b, stride, padding, dilation, groups)
    _checks.choice("activation", activation, reference.ACTIVATIONS)
    _checks.choice("precision", precision, _checks.PRECISIONS)
    per_axis = (tuple(stride), tuple(padding), tuple(dilation))
    conv = planner.Convolution(*per_axis, groups, activation, precision)
    return conv, planner.decide(x, w, conv, path)


def _conv_grads(
    x: Tensor, w: Tensor, b: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients; an unwanted one has no elements."""
    return (
        x.new_empty(x.shape if output_mask[0] else (0,)),
        _kernels.dense_like(w) if output_mask[1] else w.new_empty((0,)),
        w.new_empty((w.shape[0] if output_mask[2] else 0,)),
    )


@_implements("conv_act_moments_backward")
def _conv_act_moments_backward(
    grad_mean: Tensor,
    grad_m2: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    precision: str,
    path: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    conv, decision = _decide(
        x, w, b, stride, padding, dilation, groups, activation, precision,
        planner.requested_path(path),
    )  # fmt: skip
    statistics = {"grad_mean": grad_mean, "grad_m2": grad_m2, "mean": mean, "m2": m2}
    _checks.statistics(statistics, (x.shape[0], w.shape[0]), x)
    grads = _conv_grads(x, w, b, output_mask)
    if x.shape[0] == 0:
        for grad in grads:
            grad.zero_()
        return grads
    if not any(output_mask):
        return grads
    moments = (mean.contiguous(), grad_mean.contiguous(), grad_m2.contiguous())
    dx, dw, db = (g if mask else None for g, mask in zip(grads, output_mask, strict=True))
    _paths.gradients(x, w, b, conv, decision, moments, m2.contiguous(), (dx, dw, db))
    return grads


@_fake("conv_act_moments_backward")
def _conv_act_moments_backward_fake(
    grad_mean: Tensor,
    grad_m2: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    precision: str,
    path: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _conv_grads(x, w, b, output_mask)
