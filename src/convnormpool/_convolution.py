"""Library convolutions whose precision is an argument.

PyTorch decides by global settings whether a float32 convolution may use tf32 (CUDA) or bfloat16
(CPU). A layer that promises float32 can't leave it to those, so every convolution and every
gradient of one goes through here. ``aten::_convolution`` takes the choice as an argument, and the
input gradient is itself a convolution; only the weight gradient has no such argument and runs under
the global settings, set and restored with a lock held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _checks
from ._schemas import LIBRARY

__all__ = [
    "autocast_enabled",
    "channels_last",
    "convolve",
    "forward",
    "input_grad",
    "output_extents",
    "pad_behind",
    "padding_per_axis",
    "settings",
    "settings_may_interfere",
    "three_axes",
    "weight_grad",
    "without_autocast",
]

_settings_lock = threading.RLock()
# What restores the settings that a thread has changed just now.
_restores: list[Callable[[], None]] = []


def _after_fork() -> None:
    """A forked child has none of its parent's threads: neither their lock nor their settings."""
    global _settings_lock
    _settings_lock = threading.RLock()
    while _restores:
        _restores.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

# What a convolution on that kind of device looks at. oneDNN's convolutions follow the setting of
# matrix products as well as their own.
_PRECISION_KEYS = {
    "cuda": (("cuda", "conv"),),
    "cpu": (("mkldnn", "conv"), ("mkldnn", "matmul")),
}


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; "meta" knows none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off for a kind of device."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def padding_per_axis(
    kernel: Sequence[int], padding: int | Sequence[int] | str, dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding of both sides, and the zeros that "same" with an odd total adds behind.

    As in nn.Conv3d, the extra zero comes last.
    """
    none = (0,) * len(kernel)
    if padding == "valid":
        return none, none
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(t // 2 for t in total), tuple(t % 2 for t in total)
    return _checks.per_axis("padding", padding, 0, len(kernel)), none


def pad_behind(input: Tensor, behind: Sequence[int]) -> Tensor:
    """The input with that many zeros behind each axis."""
    if not any(behind):
        return input
    return F.pad(input, [side for extra in reversed(behind) for side in (0, extra)])


def three_axes(tensor: Tensor) -> Tensor:
    """An input or a weight of fewer axes with ones of size one before them."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor


def output_extents(
    input: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The output's extent along each axis, from the input's and the kernel's."""
    return tuple(
        (extent + 2 * p - d * (k - 1) - 1) // s + 1
        for extent, k, s, p, d in zip(input, kernel, stride, padding, dilation, strict=True)
    )


def least_strides(
    input: Sequence[int], kernel: Sequence[int], stride: Sequence[int], *more: Sequence[int]
) -> tuple[int, ...]:
    """Strides of the same convolution, none beyond the filter's last place in the input.

    Where there is one output a stride says nothing, but oneDNN's gradients crash with long ones
    (seen with PyTorch 2.14.1). Arguments as ``output_extents`` takes them.
    """
    places = output_extents(input, kernel, (1,) * len(stride), *more)
    return tuple(map(min, stride, places))


def _get_precision(backend: str, operator: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operator))


def _set_precision(backend: str, operator: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operator, value)


def settings_may_interfere(input: Tensor) -> bool:
    """Whether global settings could decide the precision of a convolution of ``input``."""
    if input.dtype != torch.float32 or autocast_enabled(input.device.type):
        return False
    if input.is_cpu and not torch.compiler.is_compiling():
        return any(_get_precision(*key) not in ("none", "ieee") for key in _PRECISION_KEYS["cpu"])
    return input.is_cuda


@contextmanager
def settings(device_type: str, allow_tf32: bool) -> Iterator[None]:
    """PyTorch's global convolution settings as this package needs them, restored afterwards.

    On CUDA: deterministic, no timing-based choice of algorithm, tf32 as asked. On CPU: float32 at
    full precision. The lock keeps this package's own threads apart. Only the per-operator settings
    are touched: reading ``allow_tf32`` raises where the user has set both kinds.
    """
    cuda = device_type == "cuda"
    wanted = "tf32" if allow_tf32 and cuda else "ieee"
    changed: list[tuple[str, str, str]] = []
    with _settings_lock:
        deterministic = torch._C._get_cudnn_deterministic()
        benchmark = torch._C._get_cudnn_benchmark()

        def restore() -> None:
            for backend, operator, value in changed:
                _set_precision(backend, operator, value)
            if cuda:
                torch._C._set_cudnn_deterministic(deterministic)
                torch._C._set_cudnn_benchmark(benchmark)

        _restores.append(restore)
        try:
            for backend, operator in _PRECISION_KEYS.get(device_type, ()):
                found = _get_precision(backend, operator)
                if found != wanted and (cuda or found != "none"):
                    # A setting equal to its backend's is taken to be inherited, and stays so.
                    inherited = found == _get_precision(backend, "all")
                    changed.append((backend, operator, "none" if inherited else found))
                    _set_precision(backend, operator, wanted)
            if cuda:
                torch._C._set_cudnn_deterministic(True)
                torch._C._set_cudnn_benchmark(False)
            yield
        finally:
            _restores.remove(restore)
            restore()


def channels_last(dims: int) -> torch.memory_format:
    """The channels-last format of tensors with that many dimensions, four or five."""
    return torch.channels_last if dims == 4 else torch.channels_last_3d


def forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    allow_tf32: bool,
    *,
    transposed: bool = False,
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    """One library convolution over any number of axes, deterministic, without autotuning."""
    output_padding = output_padding or (0,) * len(stride)
    y: Tensor = torch.ops.aten._convolution(
        x, w, b, stride, padding, dilation, transposed, output_padding, groups,
        False, True, True, allow_tf32,
    )  # fmt: skip
    return y


def _output_padding(
    size: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """What a transposed convolution of ``out`` lacks to give ``size``."""
    return [
        size[i] - ((out[i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1)
        for i in range(len(size))
    ]


def input_grad(
    dy: Tensor,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    allow_tf32: bool,
) -> Tensor:
    """The gradient of a convolution's input, of spatial extents ``size``.

    With stride 1 it is an ordinary convolution with the flipped filter, for which libraries have
    their best kernels; otherwise a transposed one.
    """
    kernel = w.shape[2:]
    stride = least_strides(size, kernel, stride, padding, dilation)
    full = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    if groups == 1 and all(s == 1 for s in stride) and all(p >= 0 for p in full):
        flipped = w.flip(list(range(2, w.dim()))).transpose(0, 1).contiguous()
        if w.dim() > 3 and dy.movedim(1, -1).is_contiguous():
            flipped = flipped.contiguous(memory_format=channels_last(w.dim()))
        return forward(dy, flipped, None, stride, full, dilation, 1, allow_tf32)
    extra = _output_padding(size, dy.shape[2:], kernel, stride, padding, dilation)
    return forward(
        dy, w, None, stride, padding, dilation, groups, allow_tf32,
        transposed=True, output_padding=extra,
    )  # fmt: skip


def weight_grad(
    dy: Tensor,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's weight, of sizes ``size``; call it within ``settings``."""
    if x.is_cpu and stride[0] > 1 and padding[0] > 0:
        # oneDNN's weight gradient is wrong, and writes where it should not, for some large paddings
        # of the first axis together with a stride (seen with PyTorch 2.14.1).
        x = F.pad(x, [0, 0] * (len(stride) - 1) + [padding[0]] * 2)
        padding = (0, *padding[1:])
    stride = least_strides(x.shape[2:], size[2:], stride, padding, dilation)
    # Only the sizes and dtype of the weight are looked at.
    w = x.new_empty(1).expand(size)
    grads = torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, padding, dilation, False, (0,) * len(stride), groups,
        (False, True, False),
    )  # fmt: skip
    grad: Tensor = grads[1].contiguous()
    return grad


def _conv_weight_grad(
    dy: Tensor,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    allow_tf32: bool,
) -> Tensor:
    with settings(x.device.type, allow_tf32):
        return weight_grad(dy, x, size, stride, padding, dilation, groups)


def _conv_weight_grad_fake(dy: Tensor, x: Tensor, size: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty(size)


LIBRARY.impl("conv_weight_grad", _conv_weight_grad, "CompositeExplicitAutograd")
torch.library.register_fake("convnormpool::conv_weight_grad", _conv_weight_grad_fake, lib=LIBRARY)


class _Convolution(torch.autograd.Function):
    """A convolution, or a transposed one, whose gradients of every order keep its precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        allow_tf32: bool,
        size: tuple[int, ...] | None,
    ) -> Tensor:
        # CUDA convolutions take their precision as an argument, and compiled code takes no lock.
        with settings("cpu", allow_tf32) if x.is_cpu else nullcontext():
            if size is None:
                return forward(x, w, None, stride, padding, dilation, groups, allow_tf32)
            return input_grad(x, w, size, stride, padding, dilation, groups, allow_tf32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *ctx.arguments, ctx.size = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            size = tuple(x.shape[2:]) if ctx.size is None else None
            grad_x = _Convolution.apply(grad, w, *ctx.arguments, size)
        if ctx.needs_input_grad[1]:
            dy, image = (grad, x) if ctx.size is None else (x, grad)
            grad_w = _WeightGrad.apply(dy, image, tuple(w.shape), *ctx.arguments)
        return grad_x, grad_w, None, None, None, None, None, None


class _WeightGrad(torch.autograd.Function):
    """The weight gradient, bilinear in the output's gradient and the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        size: Sequence[int],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        allow_tf32: bool,
    ) -> Tensor:
        grad: Tensor = torch.ops.convnormpool.conv_weight_grad(
            dy, x, size, stride, padding, dilation, groups, allow_tf32
        )
        return grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, x, _, *ctx.arguments = inputs
        ctx.save_for_backward(dy, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dy, x = ctx.saved_tensors
        grad_dy = grad_x = None
        if ctx.needs_input_grad[0]:
            grad_dy = _Convolution.apply(x, grad, *ctx.arguments, None)
        if ctx.needs_input_grad[1]:
            grad_x = _Convolution.apply(dy, grad, *ctx.arguments, tuple(x.shape[2:]))
        return grad_dy, grad_x, None, None, None, None, None, None


_LIBRARY_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolve(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    fp32_precision: str | None,
) -> Tensor:
    """``F.conv1d``, ``conv2d`` or ``conv3d`` at the given precision, in all its gradients too.

    ``fp32_precision`` None leaves the precision to PyTorch's global settings.
    """
    axes = w.dim() - 2
    if fp32_precision is None or not settings_may_interfere(x):
        return _LIBRARY_CONVOLUTIONS[axes](x, w, b, stride, padding, dilation, groups)
    if x.dim() == axes + 1:
        args = (x.unsqueeze(0), w, b, stride, padding, dilation, groups, fp32_precision)
        return convolve(*args).squeeze(0)
    stride = _checks.per_axis("stride", stride, 1, axes)
    dilation = _checks.per_axis("dilation", dilation, 1, axes)
    padding, behind = padding_per_axis(w.shape[2:], padding, dilation)
    arguments = (stride, padding, dilation, groups, fp32_precision == "tf32")
    y: Tensor = _Convolution.apply(pad_behind(x, behind), w, *arguments, None)
    return y if b is None else y + b.view(-1, *(1,) * axes)
