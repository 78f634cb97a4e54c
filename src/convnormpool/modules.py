"""The layer as a module, over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import _has_any_global_hook

from . import _checks, planner, reference
from ._convolution import autocast_enabled, convolve, pad_behind, three_axes
from ._steps import has_hooks
from .functional import conv_norm_pool, convolution_call
from .planner import Convolution, Decision

# To torch.fx a call of the layer is one operation, as that of a convolution is.
torch.fx.wrap("conv_norm_pool")

__all__ = ["ConvNormPool1d", "ConvNormPool2d", "ConvNormPool3d", "explain"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_HOOKS_REASON = (
    "hooks on conv or group_norm, or a forward of their own, need the tensors between the steps"
)


class _Precise(_ConvNd):
    """A convolution whose precision PyTorch's global settings don't decide."""

    fp32_precision = "ieee"

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = _padded(input, self)
        return convolve(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            self.fp32_precision,
        )  # fmt: skip


class _Conv1d(_Precise, nn.Conv1d):
    pass


class _Conv2d(_Precise, nn.Conv2d):
    pass


class _Conv3d(_Precise, nn.Conv3d):
    pass


# Who may take the convolution of a submodule; a subclass that has another is called.
_CONV_FORWARDS = tuple(kind._conv_forward for kind in (_Precise, nn.Conv1d, nn.Conv2d, nn.Conv3d))


class _ConvNormPool(nn.Module):
    """The layer over as many axes as ``_convolution`` has."""

    _axes: int
    _convolution: Callable[..., _Precise]

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
        axes = self._axes
        kernel = _checks.per_axis("kernel_size", kernel_size, 1, axes)
        strides = _checks.per_axis("stride", stride, 1, axes)
        dilations = _checks.per_axis("dilation", dilation, 1, axes)
        _checks.module_arguments(in_channels, out_channels, groups)
        _checks.num_groups(num_groups, out_channels, "output channels (it is 4 unless given)")
        eps = _checks.epsilon(eps)
        _checks.choice("padding_mode", padding_mode, get_args(PaddingMode))
        _checks.choice("activation", activation, reference.ACTIVATIONS)
        _checks.choice("fp32_precision", fp32_precision, _checks.PRECISIONS)
        _checks.choice("path", path, _checks.PATHS)
        paddings = _checks.padding(padding, strides)
        self.conv = self._convolution(
            in_channels, out_channels, kernel, strides,
            paddings, dilations, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        self.conv.fp32_precision = fp32_precision
        self.group_norm = nn.GroupNorm(num_groups, out_channels, eps, affine, device, dtype)
        self.activation = activation
        self.path = path

    def forward(self, input: Tensor) -> Tensor:
        """One value per channel; see :func:`convnormpool.conv_norm_pool`."""
        conv, norm = self.conv, self.group_norm
        if self._takes_hooks(conv, norm):
            batched = input.dim() != self._axes + 1
            h = reference.ACTIVATIONS[self.activation](conv(input if batched else input[None]))
            pooled: Tensor = norm(h).flatten(2).mean(dim=2)
            return pooled if batched else pooled.squeeze(0)
        return call(
            input, conv, num_groups=norm.num_groups, norm_weight=norm.weight, norm_bias=norm.bias,
            eps=norm.eps, activation=self.activation, fp32_precision=_precision(conv),
            path=self.path,
        )  # fmt: skip

    @property
    def fp32_precision(self) -> str:
        """ "ieee" or "tf32": how float32 products are formed."""
        return _precision(self.conv)

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        _checks.choice("fp32_precision", value, _checks.PRECISIONS)
        self.conv.fp32_precision = value

    def _takes_hooks(self, conv: _ConvNd, norm: nn.Module) -> bool:
        """Whether the submodules have to be called, which only the eager path does."""
        if (
            _is_plain(conv, self._convolution)
            and type(conv)._conv_forward in _CONV_FORWARDS
            and "_conv_forward" not in conv.__dict__
            and _is_plain(norm, nn.GroupNorm)
            and not _has_any_global_hook()
        ):
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


class ConvNormPool3d(_ConvNormPool):
    """``Conv3d -> activation -> GroupNorm -> mean over D, H, W``.

    (N, C, D, H, W) to (N, K), and one sample (C, D, H, W) to (K,). The submodules ``conv`` (an
    ``nn.Conv3d``) and ``group_norm`` (an ``nn.GroupNorm``) hold the parameters, with the names and,
    from the same seed, the initial values that they have in the same chain of modules. Forward and
    backward hooks on them need the tensors between the steps, so while there are any, or one has
    a forward of its own, the layer takes the eager path and calls the submodules.

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

    _axes = 3
    _convolution = _Conv3d
    conv: _Conv3d


class ConvNormPool2d(_ConvNormPool):
    """``Conv2d -> activation -> GroupNorm -> mean over H, W``, (N, C, H, W) to (N, K).

    :class:`ConvNormPool3d` over two axes, by the same kernels: its arguments, its submodules.
    """

    _axes = 2
    _convolution = _Conv2d
    conv: _Conv2d


class ConvNormPool1d(_ConvNormPool):
    """``Conv1d -> activation -> GroupNorm -> mean over W``, (N, C, W) to (N, K).

    :class:`ConvNormPool3d` over one axis, by the same kernels: its arguments, its submodules.
    """

    _axes = 1
    _convolution = _Conv1d
    conv: _Conv1d


def _precision(conv: nn.Module) -> str:
    """How a convolution forms float32 products; an nn.Conv that someone put there doesn't say."""
    return getattr(conv, "fp32_precision", "ieee")


def _is_plain(module: nn.Module, kind: Any) -> bool:
    """Whether a call of the module would do what one of its kind does, and nothing else."""
    own = "forward" in module.__dict__ or type(module).forward is not kind.forward
    return not (own or has_hooks(module))


def _padded(input: Tensor, conv: _ConvNd) -> tuple[Tensor, str | int | Sequence[int]]:
    """The input, padded where padding_mode asks for other values than zeros, and the zeros left."""
    if conv.padding_mode == "zeros":
        return input, conv.padding
    return F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0


def _weight_as_it_is(conv: _ConvNd) -> Tensor:
    """A convolution's weight, of which parametrizations learn nothing: spectral norm in training
    improves its vectors at each look."""
    parts = [m for m in getattr(conv, "parametrizations", nn.Identity()).modules() if m.training]
    try:
        for part in parts:
            part.training = False
        return conv.weight
    finally:
        for part in parts:
            part.training = True


def call(input: Tensor, conv: _ConvNd, **rest: Any) -> Tensor:
    """``conv_norm_pool`` with a module's convolution, and the rest of its arguments."""
    input, padding = _padded(input, conv)
    return conv_norm_pool(
        input, conv.weight, conv.bias, stride=conv.stride, padding=padding,
        dilation=conv.dilation, groups=conv.groups, **rest,
    )  # fmt: skip


def explain(
    module: nn.Module | Tensor,
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
        module: a layer of this package; or a convolution's weight, and then the arguments of
            :func:`convnormpool.conv_norm_pool` count.
        input: as the layer takes it; only its shape, dtype and device are looked at.
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
        TypeError: a module that is not this package's.
        ValueError: a path that can't run, or arguments that make no sense.
    """
    _checks.is_tensor("input", input)
    if isinstance(module, _ConvNormPool):
        conv = module.conv
        if module._takes_hooks(conv, module.group_norm):
            reasons = {"fused": _HOOKS_REASON, "two_stage": _HOOKS_REASON}
            samples = len(input) if input.dim() == module._axes + 2 else 1
            return Decision(
                "eager", "PyTorch's operators", "eager", samples, None, False, 0, 0, reasons
            )
        input, padding = _padded(input, conv)
        weight = _weight_as_it_is(conv)
        stride, dilation, groups = conv.stride, conv.dilation, conv.groups
        activation = module.activation
        fp32_precision, path = module.fp32_precision, module.path
    elif isinstance(module, Tensor):
        weight = module
    else:
        raise TypeError(f"explain takes a layer or a weight; got {type(module).__name__}")
    if input.dim() == _checks.layer_tensors(input, weight) + 1:
        input = input.unsqueeze(0)
    if autocast_enabled(input.device.type):
        low = torch.get_autocast_dtype(input.device.type)
        input, weight = (t if t.dtype == torch.float64 else t.to(low) for t in (input, weight))
    call = convolution_call(
        input, weight, None, stride, padding, dilation, groups, activation, fp32_precision
    )
    convolution = Convolution(
        call.stride, call.padding, call.dilation, groups, activation, fp32_precision
    )
    x, w = three_axes(pad_behind(input, call.behind)), three_axes(weight)
    return planner.decide(x, w, convolution, path)
