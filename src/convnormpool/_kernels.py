"""Thin calls of the compiled operators, or of the reference's formulas where none are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library, reference
from .planner import Convolution, Decision

__all__ = [
    "act_moments",
    "act_moments_backward",
    "conv_act_moments",
    "conv_act_moments_backward",
    "conv_norm_pool",
    "dense",
    "dense_like",
    "group_norm_pool",
    "group_norm_pool_backward",
    "to_channels_last",
]

_compiled = torch.ops.convnormpool
_ACTIVATION_CODE = {name: code for code, name in enumerate(reference.ACTIVATIONS)}
_PRECISION_CODE = {"ieee": 0, "tf32": 1}


def dense(y: Tensor) -> Tensor:
    """y, or a copy of it, in a layout that the reduction kernels take."""
    if y.is_contiguous() or y.movedim(1, -1).is_contiguous():
        return y
    return y.contiguous()


def act_moments(y: Tensor, activation: str, mean: Tensor, m2: Tensor) -> None:
    """Writes the moments of a dense y into contiguous mean and m2."""
    if not _library.loaded_for(y.device.type):
        for out, value in zip((mean, m2), reference.act_moments(y, activation), strict=True):
            out.copy_(value)
        return
    workspace = None
    if y.is_cuda and _library.plan is not None:
        last = not y.is_contiguous()
        size = _library.plan.act_moments_workspace(*y.shape[:2], y.shape[2:].numel(), last)
        workspace = mean.new_empty(size) if size else None
    _compiled._act_moments_out(y, _ACTIVATION_CODE[activation], mean, m2, workspace)


def act_moments_backward(
    y: Tensor, mean: Tensor, grad_mean: Tensor, grad_m2: Tensor, activation: str, dy: Tensor
) -> None:
    """Writes the gradient of a dense y into dy, of y's layout; dy may be y itself."""
    if not _library.loaded_for(y.device.type):
        dy.copy_(reference.act_moments_backward(grad_mean, grad_m2, y, mean, activation))
        return
    code = _ACTIVATION_CODE[activation]
    _compiled._act_moments_backward_out(y, mean, grad_mean, grad_m2, code, dy)


def dense_like(parameter: Tensor) -> Tensor:
    """Room for a parameter's gradient."""
    # Axes of one element may have any stride, and DistributedDataParallel compares it.
    if parameter.is_contiguous():
        return torch.empty_like(parameter)
    return parameter.new_empty(parameter.shape)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(x: Tensor, alignment: int) -> Tensor:
    """x, or a copy of it, contiguous and aligned to so many bytes.

    Not another kernel instead: a sample's bits would depend on where it lies in memory.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % alignment else x


def _forward_arguments(
    x: Tensor, w: Tensor, b: Tensor | None, conv: Convolution, decision: Decision
) -> tuple[Any, ...]:
    """What the fused operators of the forward take first."""
    return (
        _aligned(x, decision.alignment), w.contiguous(), _contiguous(b),
        conv.stride, conv.padding, conv.dilation, conv.groups, _ACTIVATION_CODE[conv.activation],
        _PRECISION_CODE[conv.precision], decision.wgmma,
    )  # fmt: skip


def conv_act_moments(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    mean: Tensor,
    m2: Tensor,
) -> None:
    """The fused convolution and statistics."""
    workspace = mean.new_empty(decision.workspace) if decision.workspace else None
    arguments = _forward_arguments(x, w, b, conv, decision)
    _compiled._conv_act_moments_out(*arguments, mean, m2, workspace)


def conv_norm_pool(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    mean: Tensor,
    m2: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """The fused convolution and statistics on CUDA, and the normalised output in ``dtype``."""
    out = mean.new_empty(mean.shape, dtype=dtype)
    workspace = mean.new_empty(decision.workspace) if decision.workspace else None
    _compiled._conv_norm_pool_out(
        *_forward_arguments(x, w, b, conv, decision), _contiguous(weight), _contiguous(bias),
        num_groups, eps, out, mean, m2, workspace,
    )  # fmt: skip
    return out


def conv_act_moments_backward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    moments: tuple[Tensor, Tensor, Tensor],
    m2: Tensor,
    wanted: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """The fused gradients of (x, w, b), given (mean, grad_mean, grad_m2)."""
    mean, grad_mean, grad_m2 = moments
    dx, dw, db = wanted
    workspace = decision.gradient_workspace(dx is not None, dw is not None or db is not None)
    alignment = decision.alignment if decision.gradients_wgmma else 1
    _compiled._conv_act_moments_backward_out(
        _aligned(x, alignment), w.contiguous(), _contiguous(b), mean, m2, grad_mean, grad_m2,
        conv.stride, conv.padding, conv.dilation, conv.groups, _ACTIVATION_CODE[conv.activation],
        _PRECISION_CODE[conv.precision], decision.gradients_wgmma, dx, dw, db,
        mean.new_empty(workspace) if workspace else None,
    )  # fmt: skip


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
    """The output in ``dtype``, and the groups' mean and 1/sqrt(var + eps)."""
    out = mean.new_empty(mean.shape, dtype=dtype)
    group_mean = mean.new_empty((mean.shape[0], num_groups))
    group_rstd = torch.empty_like(group_mean)
    _compiled._group_norm_pool_out(
        mean, m2, count, _contiguous(weight), _contiguous(bias), num_groups, eps, out, group_mean,
        group_rstd,
    )  # fmt: skip
    return out, group_mean, group_rstd


def group_norm_pool_backward(
    grad_out: Tensor,
    mean: Tensor,
    m2: Tensor,
    weight: Tensor | None,
    count: int,
    num_groups: int,
    eps: float,
    wanted: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Writes the wanted gradients of (mean, m2, weight, bias)."""
    _compiled._group_norm_pool_backward_out(
        grad_out.contiguous(), mean, m2, _contiguous(weight), count, num_groups, eps, *wanted
    )


def to_channels_last(x: Tensor) -> Tensor:
    """x (N, C, D, H, W) in channels_last_3d; x itself where it already is."""
    layout = torch.channels_last_3d
    if x.is_contiguous(memory_format=layout):
        return x
    if not (x.is_cuda and x.is_contiguous() and _library.loaded_for("cuda")):
        return x.contiguous(memory_format=layout)
    out = torch.empty_like(x, memory_format=layout)
    _compiled._to_channels_last_out(x, out)
    return out


def unfold_depth(
    x: Tensor, filter: int, stride: int, padding: int, dilation: int, channels: int, planes: int
) -> Tensor:
    """x (N, C, D, H, W) as (N * planes, channels, H, W), channels last; ``csrc/ops.h`` has how."""
    n, _, _, height, width = x.shape
    out = x.new_empty((n, planes, height, width, channels))
    _compiled._unfold_depth_out(x.contiguous(), filter, stride, padding, dilation, out)
    return out.flatten(0, 1).permute(0, 3, 1, 2)


def fold_depth(
    du: Tensor, filter: int, stride: int, padding: int, dilation: int, dx: Tensor
) -> None:
    """Writes into dx (N, C, D, H, W) the sums of du (N * planes, channels, H, W)."""
    rows = du.permute(0, 2, 3, 1).contiguous()
    _compiled._fold_depth_out(
        rows.unflatten(0, (dx.shape[0], -1)), filter, stride, padding, dilation, dx
    )
