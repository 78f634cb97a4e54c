"""The operators' registrations: opcheck, fakes and the meta device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from convnormpool import ConvNormPool3d, conv_norm_pool, ops
from convnormpool._checks import DTYPE_NAMES

PLAIN = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, "hardswish", "ieee")
MASK = (True, True, True)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}
MODES = list(itertools.product((False, True), LAYOUTS))

Make = Callable[..., Tensor]


def maker(device: str, grad: bool, layout: str) -> Make:
    def make(*shape: int, grad: bool = grad, dtype: torch.dtype = torch.float32) -> Tensor:
        t = torch.randn(shape, device=device, dtype=dtype)
        if t.dim() == 5:
            t = t.contiguous(memory_format=LAYOUTS[layout])
        return t.requires_grad_(grad)

    return make


def convolution(make: Make) -> tuple[Tensor, Tensor, Tensor]:
    return make(2, 3, 4, 5, 6), make(8, 3, 3, 2, 3), make(8)


def arguments(name: str, make: Make, way: str = "auto") -> tuple[Any, ...]:
    """A call of the operator of that name."""
    rows = lambda: make(2, 8)  # noqa: E731
    if name == "act_moments":
        return (make(2, 8, 3, 4, 5), "hardswish")
    if name == "act_moments_backward":
        return (rows(), rows(), make(2, 8, 3, 4, 5), rows(), "hardswish")
    if name == "group_norm_pool":
        return (rows(), rows().detach().abs(), 60, make(8), make(8), 4, 1e-5, "float32")
    if name == "group_norm_pool_backward":
        return (rows(), rows(), rows().detach().abs(), 60, make(8), make(8), 4, 1e-5, MASK)
    if name == "conv_act_moments":
        return (*convolution(make), *PLAIN, way)
    m2 = rows().detach().abs()
    return (rows(), rows(), *convolution(make), rows(), m2, *PLAIN, way, MASK)


DIFFERENTIABLE = ("act_moments", "group_norm_pool", "conv_act_moments")


@pytest.mark.parametrize(("grad", "layout"), MODES)
@pytest.mark.parametrize("name", ops.__all__)
def test_opcheck(name: str, grad: bool, layout: str, device: str) -> None:
    """All four of opcheck's tests, gradients on and off, both layouts."""
    make = maker(device, grad and name in DIFFERENTIABLE, layout)
    opcheck(getattr(ops, name), arguments(name, make))


@pytest.mark.parametrize("name", ["conv_act_moments", "conv_act_moments_backward"])
def test_opcheck_paths(name: str, device: str, path: str) -> None:
    make = maker(device, name in DIFFERENTIABLE, "contiguous")
    opcheck(getattr(ops, name), arguments(name, make, path))


def test_opcheck_weight_gradient(device: str) -> None:
    """The operator that keeps a weight gradient's settings out of compiled code."""
    make = maker(device, False, "contiguous")
    dy, x = make(2, 8, 4, 4, 6), make(2, 3, 4, 5, 6)
    convolution = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, False)
    opcheck(torch.ops.convnormpool.conv_weight_grad, (dy, x, (8, 3, 3, 2, 3), *convolution))


def compiled_arguments(name: str, make: Make) -> tuple[Any, ...]:
    """A call of the operator of that name that a compiled library implements."""
    rows = lambda: make(2, 8)  # noqa: E731
    groups = lambda: make(2, 4)  # noqa: E731
    plain = (*PLAIN[:4], 0, 0)
    if name == "_act_moments_out":
        return (make(2, 8, 3, 4, 5), 0, rows(), rows(), None)
    if name == "_act_moments_backward_out":
        return (make(2, 8, 3, 4, 5), rows(), rows(), rows(), 0, make(2, 8, 3, 4, 5))
    if name == "_group_norm_pool_out":
        norm = (60, make(8), make(8), 4, 1e-5)
        return (rows(), rows().abs(), *norm, rows(), groups(), groups())
    if name == "_group_norm_pool_backward_out":
        norm = (make(8), 60, 4, 1e-5)
        return (rows(), rows(), rows().abs(), *norm, rows(), rows(), make(8), make(8))
    if name == "_conv_act_moments_out":
        return (*convolution(make), *plain, False, rows(), rows(), None)
    if name == "_conv_act_moments_backward_out":
        moments = (rows(), rows().abs(), rows(), rows())
        return (*convolution(make), *moments, *plain, False, *convolution(make), None)
    # x or its gradient (N, C, D, H, W) and its planes, for a filter of 3 along the depth.
    x, planes = make(2, 3, 6, 4, 5), make(2, 6, 4, 5, 12).contiguous()
    if name == "_to_channels_last_out":
        return (x, torch.empty_like(x, memory_format=torch.channels_last_3d))
    return (x, 3, 1, 1, 1, planes) if name == "_unfold_depth_out" else (planes, 3, 1, 1, 1, x)


ON_CPU = (
    "_act_moments_out",
    "_act_moments_backward_out",
    "_group_norm_pool_out",
    "_group_norm_pool_backward_out",
    "_conv_act_moments_out",
    "_conv_act_moments_backward_out",
)
ON_CUDA = (
    "_group_norm_pool_out",
    "_group_norm_pool_backward_out",
    "_to_channels_last_out",
    "_unfold_depth_out",
    "_fold_depth_out",
)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("cpu", name) for name in ON_CPU),
        *(pytest.param("cuda", name, marks=pytest.mark.cuda) for name in ON_CUDA),
    ],
)
def test_opcheck_compiled(where: str, name: str) -> None:
    """What writes into given tensors writes into those that its schema says."""
    make = maker(where, False, "contiguous")
    opcheck(getattr(torch.ops.convnormpool, name), compiled_arguments(name, make))


@pytest.mark.parametrize("name", ON_CPU[:2])
def test_opcheck_compiled_channels_last(name: str) -> None:
    make = maker("cpu", False, "channels_last_3d")
    opcheck(getattr(torch.ops.convnormpool, name), compiled_arguments(name, make))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_dtypes(name: str, dtype: torch.dtype, device: str) -> None:
    make = maker(device, True, "contiguous")
    args = arguments(name, make)
    if name == "group_norm_pool":
        parameters = [t.detach().to(dtype).requires_grad_() for t in args[3:5]]
        args = (*args[:3], *parameters, *args[5:7], DTYPE_NAMES[dtype])
    else:
        args = tuple(
            t.detach().to(dtype).requires_grad_() if isinstance(t, Tensor) else t for t in args
        )
    # Finite differences of 16 bits say nothing; opcheck only compares compiled with eager.
    opcheck(getattr(ops, name), args, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ops.__all__)
def test_fakes_match(name: str, layout: str, device: str) -> None:
    """Sizes, dtypes and strides of a fake are those of the real result."""
    args = arguments(name, maker(device, False, layout))
    real = getattr(ops, name)(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        faked = getattr(ops, name)(*fakes)
    one = isinstance(real, Tensor)
    for a, b in zip([real] if one else real, [faked] if one else faked, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.device.type == b.device.type


@pytest.mark.parametrize("name", ops.__all__)
def test_meta(name: str) -> None:
    args = arguments(name, maker("meta", False, "contiguous"))
    found = getattr(ops, name)(*args)
    assert all(t.is_meta for t in ([found] if isinstance(found, Tensor) else found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_layer_on_meta(dtype: torch.dtype) -> None:
    """Shapes without data or memory: a layer that no machine here could run."""
    layer = ConvNormPool3d(3, 64, 7, 8, stride=2, padding=3, device="meta", dtype=dtype)
    x = torch.empty(4096, 3, 512, 512, 512, device="meta", dtype=dtype, requires_grad=True)
    out = layer(x)
    assert out.is_meta and out.shape == (4096, 64) and out.dtype == dtype
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.is_meta


def test_fake_layer_checks_its_arguments(device: str) -> None:
    """Errors of the call itself come from fakes, too."""
    with FakeTensorMode():
        x, w = torch.empty(2, 3, 4, 5, 6, device=device), torch.empty(8, 3, 3, 3, 3, device=device)
        assert conv_norm_pool(x, w, num_groups=4).shape == (2, 8)
        with pytest.raises(ValueError, match="num_groups"):
            conv_norm_pool(x, w, num_groups=3)
        with pytest.raises(ValueError, match="channels"):
            conv_norm_pool(x[:, :2], w, num_groups=4)


@pytest.mark.parametrize("name", ops.__all__)
def test_operators_are_tagged(name: str) -> None:
    assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags
