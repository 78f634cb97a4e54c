"""The layer as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _checks, planner, reference
from ._convolution import autocast_enabled, conv3d, resolve_padding
from .functional import conv_norm_pool
from .planner import Convolution, Decision

__all__ = ["ConvNormPool3d", "explain"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_HOOKS_REASON = "hooks on conv or group_norm need the tensors between the steps"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Conv3d(nn.Conv3d):
    """An ``nn.Conv3d`` whose precision PyTorch's global settings don't decide."""

    fp32_precision = "ieee"

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = _pad(input, self), (0, 0, 0)
        return conv3d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            self.fp32_precision,
        )  # fmt: skip


class ConvNormPool3d(nn.Module):
    """``Conv3d -> activation -> GroupNorm -> mean over D, H, W``, (N, C, D, H, W) to (N, K).

    The submodules ``conv`` (an ``nn.Conv3d``) and ``group_norm`` (an ``nn.GroupNorm``) hold the
    parameters, with the names and, from the same seed, the initial values that they have in the
    same chain of modules. Forward and backward hooks on them need the tensors between the steps, so
    while there are any the layer takes the eager path and calls the submodules.

    Args:
        in_channels: C.
        out_channels: K.
        kernel_size: (T, R, S), or one number for all.
        num_groups: groups of the normalisation; divides K.
        bias: whether the convolution has one.
        stride: of the convolution.
        padding: of the convolution, numbers or "same" or "valid".
        dilation: of the convolution.
        groups: of the convolution.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        activation: see :func:`convnormpool.conv_norm_pool`.
        eps: of the normalisation.
        affine: whether the normalisation has a weight and a bias per channel.
        fp32_precision: "ieee" or "tf32", see :func:`convnormpool.conv_norm_pool`.
        path: "auto", "fused", "two_stage" or "eager".
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an argument that makes no sense.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        num_groups: int = 4,
        bias: bool = True,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: PaddingMode = "zeros",
        activation: str = "hardswish",
        eps: float = 1e-5,
        affine: bool = True,
        fp32_precision: str = "ieee",
        path: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kernel = _checks.per_axis("kernel_size", kernel_size, 1)
        strides = _checks.per_axis("stride", stride, 1)
        dilations = _checks.per_axis("dilation", dilation, 1)
        _checks.module_arguments(in_channels, out_channels, groups)
        _checks.num_groups(num_groups, out_channels)
        _checks.epsilon(eps)
        _checks.choice("padding_mode", padding_mode, get_args(PaddingMode))
        _checks.choice("activation", activation, reference.ACTIVATIONS)
        _checks.choice("fp32_precision", fp32_precision, _checks.PRECISIONS)
        _checks.choice("path", path, _checks.PATHS)
        paddings = _checks.padding(padding, strides)
        self.conv = _Conv3d(
            in_channels, out_channels, kernel, strides,
            paddings, dilations, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self.conv.fp32_precision = fp32_precision
        self.group_norm = nn.GroupNorm(num_groups, out_channels, eps, affine, device, dtype)
        self.activation = activation
        self.path = path

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, D, H, W) to (N, K); see :func:`convnormpool.conv_norm_pool`."""
        if self._takes_hooks():
            h = reference.ACTIVATIONS[self.activation](self.conv(input))
            pooled: Tensor = self.group_norm(h).mean(dim=(2, 3, 4))
            return pooled
        conv, norm = self.conv, self.group_norm
        padding = conv.padding
        if conv.padding_mode != "zeros":
            input = _pad(input, conv)
            padding = (0, 0, 0)
        return conv_norm_pool(
            input,
            conv.weight,
            conv.bias,
            num_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            stride=conv.stride,
            padding=padding,
            dilation=conv.dilation,
            groups=conv.groups,
            activation=self.activation,
            fp32_precision=self.fp32_precision,
            path=self.path,
        )

    @property
    def fp32_precision(self) -> str:
        """ "ieee" or "tf32": how float32 products are formed."""
        return self.conv.fp32_precision

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        _checks.choice("fp32_precision", value, _checks.PRECISIONS)
        self.conv.fp32_precision = value

    def _takes_hooks(self) -> bool:
        """Whether there are hooks on the submodules, which only the eager path can run."""
        if not any(getattr(m, hooks) for m in (self.conv, self.group_norm) for hooks in _HOOKS):
            return False
        if self.path not in ("auto", "eager"):
            raise ValueError(f"path {self.path!r} can't run: {_HOOKS_REASON}")
        return True

    def extra_repr(self) -> str:
        """What the submodules' own representations don't say."""
        return (
            f"activation={self.activation!r}, fp32_precision={self.fp32_precision!r}, "
            f"path={self.path!r}"
        )


def _pad(input: Tensor, conv: nn.Conv3d) -> Tensor:
    """The input padded as a convolution's padding_mode says."""
    return F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)


def explain(
    module: ConvNormPool3d | Tensor,
    input: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "hardswish",
    fp32_precision: str = "ieee",
    path: str = "auto",
) -> Decision:
    """Which path and kernel would take this, and for each path not taken one sentence why.

    Args:
        module: a layer; or a convolution's weight, and then the arguments of
            :func:`convnormpool.conv_norm_pool` count.
        input: (N, C, D, H, W); only its shape, dtype and device are looked at.
        stride: as for ``conv_norm_pool``; ignored with a layer, like all that follow.
        padding: likewise.
        dilation: likewise.
        groups: likewise.
        activation: likewise.
        fp32_precision: likewise.
        path: likewise.

    Returns:
        The decision; ``print`` shows it in words.

    Raises:
        ValueError: a path that can't run, or arguments that make no sense.
    """
    if isinstance(module, ConvNormPool3d):
        conv = module.conv
        if conv.padding_mode != "zeros":
            input = _pad(input, conv)
        if module._takes_hooks():
            reasons = {"fused": _HOOKS_REASON, "two_stage": _HOOKS_REASON}
            return Decision(
                "eager", "PyTorch's operators", "eager", len(input), None, False, 0, 0, reasons
            )
        weight = conv.weight
        stride, dilation, groups = conv.stride, conv.dilation, conv.groups
        padding = conv.padding if conv.padding_mode == "zeros" else 0
        activation = module.activation
        fp32_precision, path = module.fp32_precision, module.path
    else:
        weight = module
    strides = _checks.per_axis("stride", stride, 1)
    dilation = _checks.per_axis("dilation", dilation, 1)
    _checks.choice("activation", activation, reference.ACTIVATIONS)
    _checks.choice("fp32_precision", fp32_precision, _checks.PRECISIONS)
    padding = _checks.padding(padding, strides)
    _checks.convolution_tensors(input, weight)
    input, padding = resolve_padding(input, weight.shape[2:], padding, dilation)
    if autocast_enabled(input.device.type):
        low = torch.get_autocast_dtype(input.device.type)
        input, weight = (t if t.dtype == torch.float64 else t.to(low) for t in (input, weight))
    _checks.convolution_arguments(input, weight, None, strides, padding, dilation, groups)
    convolution = Convolution(strides, padding, dilation, groups, activation, fp32_precision)
    return planner.decide(input, weight, convolution, path)
