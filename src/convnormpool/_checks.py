"""Argument checks. Each failure names the argument, what it was and what is allowed.

Of tensors only the shape, the dtype and the device are looked at. Sizes may be symbolic here: under
torch.compile and torch.export the same checks run on fakes.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

__all__ = [
    "choice",
    "convolution_arguments",
    "convolution_operator",
    "epsilon",
    "group_norm_arguments",
    "integer",
    "is_tensor",
    "layer_tensors",
    "module_arguments",
    "moments_input",
    "norm_parameters",
    "num_groups",
    "padding",
    "per_axis",
    "same_shape",
    "statistics",
]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
PRECISIONS = ("ieee", "tf32")
PATHS = ("auto", "fused", "two_stage", "eager")
_AXES = ("depth", "height", "width")


_Result = TypeVar("_Result")


class Facts(NamedTuple):
    """What the checks look at of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        """The number of dimensions, as a tensor has it."""
        return len(self.shape)


Described: TypeAlias = Tensor | Facts
# Classes of most arguments beside tensors: their values are what is remembered.
_VALUES = frozenset({type(None), int, float, str, torch.dtype})


def remembered(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """``function`` of tensors' facts and of plain values, which is not run twice for the same ones.

    A call takes longer to check than to dispatch. What can't be hashed, such as a symbolic size, is
    not remembered, and an error is found anew every time.
    """
    cached = functools.lru_cache(maxsize=4096, typed=True)(function)

    @functools.wraps(function)
    def call(*args: Any) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args)
        facts: list[Any] = []
        for a in args:
            if type(a) in _VALUES:
                facts.append(a)
            elif isinstance(a, Tensor):
                if a.layout is not torch.strided:
                    return function(*args)
                facts.append(Facts(a.shape, a.dtype, a.device))
            elif isinstance(a, tuple | list):
                if any(type(value) is not int for value in a):
                    return function(*args)  # equal to an integer, or not, and yet no integer
                facts.append(tuple(a))
            else:
                facts.append(a)
        try:
            return cached(*facts)
        except TypeError:
            return function(*args)

    return call


def choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """``value`` must be one of ``allowed``."""
    if not isinstance(value, str) or value not in tuple(allowed):
        shown = "a tensor" if isinstance(value, Tensor | Facts) else repr(value)
        module = " (a name, not a module)" if isinstance(value, torch.nn.Module) else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}{module}; got {shown}")


def _dtype(name: str, tensor: Described) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16; got {tensor.dtype}")


def _like(name: str, tensor: Described, input: Described) -> None:
    if tensor.device != input.device:
        raise ValueError(
            f"{name} must be on the input's device {input.device}; it is on {tensor.device}"
        )
    if tensor.dtype != input.dtype:
        raise TypeError(
            f"{name} must have the input's dtype {input.dtype}; it has {tensor.dtype} "
            "(torch.autocast converts both)"
        )


def same_shape(name: str, tensor: Described, shape: Sequence[int]) -> None:
    """``tensor`` must have that shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(tensor.shape)}")


def moments_input(y: Described, activation: str) -> None:
    """What ``act_moments`` takes: (N, K, *) with at least one position."""
    from .reference import ACTIVATIONS

    _dtype("y", y)
    if y.dim() < 2:
        raise ValueError(f"y must be (N, channels, ...); got shape {tuple(y.shape)}")
    if any(extent == 0 for extent in y.shape[2:]):
        raise ValueError(f"y must have at least one position; got shape {tuple(y.shape)}")
    choice("activation", activation, ACTIVATIONS)


def statistics(tensors: Mapping[str, Described], shape: Sequence[int], like: Described) -> None:
    """Moments or their gradients: of that shape, of the statistics dtype of ``like``."""
    wanted = torch.float64 if like.dtype == torch.float64 else torch.float32
    for name, tensor in tensors.items():
        same_shape(name, tensor, shape)
        if tensor.dtype != wanted:
            raise TypeError(f"{name} must be {wanted} for {like.dtype}; it has {tensor.dtype}")
        if tensor.device != like.device:
            raise ValueError(f"{name} must be on {like.device}; it is on {tensor.device}")


def integer(name: str, value: Any) -> int:
    """``value`` as an integer, which it must be; a symbolic one stays as it is."""
    if isinstance(value, torch.SymInt):
        return cast("int", value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:  # an array of several, which has an __index__, too
        raise TypeError(f"{name} must be an integer; got {value!r}") from None


def per_axis(name: str, value: Any, least: int, axes: int) -> tuple[int, ...]:
    """One integer per axis, from one for all or one each, each at least ``least``."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * axes
    if len(values) != axes:
        raise ValueError(f"{name} must be one number or {axes}; got {value!r}")
    values = tuple(integer(name, v) for v in values)
    _each(name, values, least)
    return values


def is_tensor(name: str, value: Any) -> None:
    """``value`` must be a tensor."""
    if not isinstance(value, Tensor | Facts):
        raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor; its layout is {value.layout}")


def _each(name: str, values: Sequence[int], least: int) -> None:
    if any(value < least for value in values):
        raise ValueError(f"{name} must be at least {least} on every axis; got {tuple(values)}")
    if any(value >= 2**31 for value in values):
        raise ValueError(f"{name} must be below 2**31 on every axis; got {tuple(values)}")


def layer_tensors(input: Described, weight: Described) -> int:
    """The number of spatial axes of a layer's input, batched or not, and weight."""
    is_tensor("input", input)
    is_tensor("weight", weight)
    _dtype("input", input)
    _dtype("weight", weight)
    axes = weight.dim() - 2
    if axes not in (1, 2, 3):
        raise ValueError(
            "weight must be (K, C // groups, T, R, S), or the same without T or without T and R; "
            f"got shape {tuple(weight.shape)}"
        )
    if input.dim() not in (axes + 1, axes + 2):
        extents = ", ".join("DHW"[-axes:])
        raise ValueError(
            f"input must be {axes + 2}-D (N, C, {extents}), or unbatched {axes + 1}-D, with a "
            f"{axes + 2}-D weight; got shape {tuple(input.shape)}"
        )
    return axes


def convolution_operator(
    input: Described,
    weight: Described,
    bias: Described | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """What the operators take, whose convolutions have three axes."""
    if input.dim() != 5 or weight.dim() != 5:
        raise ValueError(
            "input must be 5-D (N, C, D, H, W) and weight 5-D (K, C // groups, T, R, S); got "
            f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    _dtype("input", input)
    for name, values in (("stride", stride), ("padding", padding), ("dilation", dilation)):
        if len(values) != 3:
            raise ValueError(f"{name} must be three numbers; got {tuple(values)}")
    convolution_arguments(input, weight, bias, stride, padding, dilation, groups)


def convolution_arguments(
    input: Described,
    weight: Described,
    bias: Described | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """What a convolution over the axes of a weight (K, C // groups, *kernel) takes."""
    _like("weight", weight, input)
    _each("stride", stride, 1)
    _each("padding", padding, 0)
    _each("dilation", dilation, 1)
    integer("groups", groups)
    channels, outputs = input.shape[1], weight.shape[0]
    if groups < 1 or channels % groups or outputs % groups:
        raise ValueError(
            f"groups must be at least 1 and divide the {channels} input and {outputs} output "
            f"channels; got {groups}"
        )
    if outputs < 1 or channels < 1:
        raise ValueError(
            f"input and weight must have channels; got {channels} input and {outputs} output ones"
        )
    if weight.shape[1] * groups != channels:
        raise ValueError(
            f"input has {channels} channels, but weight of shape {tuple(weight.shape)} with groups "
            f"{groups} takes {weight.shape[1] * groups}"
        )
    axes = weight.dim() - 2
    for axis, name in enumerate(_AXES[-axes:]):
        extent, kernel = input.shape[2 + axis], weight.shape[2 + axis]
        if kernel < 1:
            raise ValueError(f"weight must be at least 1 along {name}; got {kernel}")
        reach = dilation[axis] * (kernel - 1) + 1
        padded = extent + 2 * padding[axis]
        if extent < 1 or padded < reach:
            raise ValueError(
                f"input is too small along {name}: the kernel reaches over {reach} "
                f"elements, the padded input has {padded} ({extent} of its own)"
            )
    if bias is not None:
        is_tensor("bias", bias)
        same_shape("bias", bias, (outputs,))
        _like("bias", bias, input)


def num_groups(value: int, channels: int, what: str = "output channels") -> None:
    """``value`` must divide the channels."""
    integer("num_groups", value)
    if value < 1 or channels % value:
        raise ValueError(
            f"num_groups must be at least 1 and divide the {channels} {what}; got {value}"
        )


def norm_parameters(
    norm_weight: Described | None,
    norm_bias: Described | None,
    channels: int,
    like: Described,
) -> None:
    """Affine parameters: (K,), on the device of ``like``, of a floating dtype."""
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None:
            is_tensor(name, tensor)
            _dtype(name, tensor)
            same_shape(name, tensor, (channels,))
            if tensor.device != like.device:
                raise ValueError(
                    f"{name} must be on the input's device {like.device}; it is on {tensor.device}"
                )


@remembered
def group_norm_arguments(
    mean: Described,
    m2: Described,
    count: int,
    weight: Described | None,
    bias: Described | None,
    groups: int,
    eps: float,
    dtype: str | None,
) -> None:
    """What ``group_norm_pool`` takes."""
    if mean.dim() != 2 or mean.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"mean must be (N, channels) in float32 or float64; got {tuple(mean.shape)} in "
            f"{mean.dtype}"
        )
    same_shape("m2", m2, mean.shape)
    _like("m2", m2, mean)
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}")
    num_groups(groups, mean.shape[1], "channels")
    norm_parameters(weight, bias, mean.shape[1], mean)
    epsilon(eps)
    if dtype is not None:
        choice("dtype", dtype, DTYPE_NAMES.values())


def epsilon(eps: Any) -> float:
    """``eps`` as a float, NumPy's numbers too; a number of at least zero that float64 holds."""
    if not isinstance(eps, numbers.Real):
        raise TypeError(f"eps must be a number; got {eps!r}")
    try:
        value = float(eps)
    except OverflowError:
        raise ValueError("eps must be a number that float64 holds; got a larger one") from None
    if not value >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    return value


def padding(value: Any, stride: Sequence[int]) -> str | tuple[int, ...]:
    """Integers of at least zero, or "valid", or with stride 1 "same"."""
    if not isinstance(value, str):
        return per_axis("padding", value, 0, len(stride))
    choice("padding", value, ("same", "valid"))
    if value == "same" and any(s != 1 for s in stride):
        raise ValueError(f"padding 'same' needs stride 1; got stride {tuple(stride)}")
    return value


def module_arguments(
    in_channels: int,
    out_channels: int,
    groups: int,
) -> None:
    """What a layer is made of."""
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        if integer(name, value) < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    integer("groups", groups)
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"groups must be at least 1 and divide the {in_channels} input and {out_channels} "
            f"output channels; got {groups}"
        )
