"""Every activation, value and derivative, as PyTorch's: at kinks, far out, and in every path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import DTYPES, Case, check
from torch import Tensor

from convnormpool import _library, ops, reference

NAMES = tuple(reference.ACTIVATIONS)
CASE = Case("activation", (2, 3, 4, 6, 7), 16, (3, 2, 3), 4, padding=(1, 0, 1))
FAR = (1e-30, 0.5, 1.0, 2.9999, 3.0, 3.0001, 6.0, 6.0001, 8.0, 12.0, 50.0, 104.0, 1e4, 6e4)


def points(dtype: torch.dtype, device: str) -> Tensor:
    """Kinks, their neighbours, and values where exponentials overflow and underflow."""
    positive = torch.tensor((0.0, *FAR), dtype=torch.float64)
    return torch.cat((-positive, positive)).to(device, dtype).view(1, -1, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(name: str, dtype: torch.dtype, device: str) -> None:
    """The mean of one position is the activation itself."""
    y = points(dtype, device)
    mean, m2 = ops.act_moments(y, name)
    right = reference.ACTIVATIONS[name](y.double())[..., 0]
    eps = torch.finfo(mean.dtype).eps
    # Cancellation between terms of y's size near a root, as at hardswish's -3 and gelu's tail.
    size = right.abs() + y[..., 0].double().abs().clamp(max=8)
    assert ((mean - right).abs() <= 4 * eps * size).all()
    assert not m2.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_derivatives(name: str, dtype: torch.dtype, device: str) -> None:
    y = points(dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.ones(y.shape[:2], dtype=wide, device=device)
    found = ops.act_moments_backward(rows, torch.zeros_like(rows), y, rows, name)
    z = y.double().requires_grad_()
    (right,) = torch.autograd.grad(reference.ACTIVATIONS[name](z).sum(), z)
    eps = torch.finfo(wide).eps
    # y·a'' of a smooth activation magnifies the argument's rounding by up to its knee.
    allowed = 4 * eps * (1 + y.double().abs().clamp(max=8)) + torch.finfo(dtype).eps
    if name == "hardsigmoid":
        allowed = allowed + torch.finfo(torch.float32).eps  # PyTorch's 1/6 is always float32's
    assert ((found - right).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["hardswish", "relu", "relu6", "leaky_relu", "elu", "hardsigmoid"])
def test_kinks_are_exact(name: str, device: str) -> None:
    """At a kink PyTorch takes one of the sides; so does the package, for float32 in float32."""
    y = torch.tensor([-3.0, 0.0, 3.0, 6.0, -0.0], device=device).view(1, 5, 1)
    rows = torch.ones(1, 5, device=device)
    found = ops.act_moments_backward(rows, torch.zeros_like(rows), y, rows, name)
    z = y.clone().requires_grad_()
    (right,) = torch.autograd.grad(reference.ACTIVATIONS[name](z).sum(), z)
    assert torch.allclose(found, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_not_finite(name: str, device: str) -> None:
    """NaN stays NaN, and infinities go where PyTorch sends them."""
    y = torch.tensor([math.nan, math.inf, -math.inf], device=device).view(1, 3, 1)
    mean, m2 = ops.act_moments(y, name)
    right = reference.ACTIVATIONS[name](y)[..., 0]
    finite = right.isfinite()
    assert mean[0, 0].isnan() and m2[0, 0].isnan()
    assert torch.allclose(mean[finite], right[finite], atol=1e-6)
    # A mean that is infinite has no deviations from it.
    assert not mean[~finite].isfinite().any() and not m2[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_layer(name: str, dtype: torch.dtype, device: str, path: str) -> None:
    check(replace(CASE, activation=name), dtype, device, path)


@pytest.mark.parametrize("name", NAMES)
def test_many_positions(name: str, device: str) -> None:
    """Whole vectors and their tails, both layouts, against the reference."""
    y = torch.randn(2, 7, 11, 13, device=device) * 3
    for t in (y, y.contiguous(memory_format=torch.channels_last)):
        mean, m2 = ops.act_moments(t, name)
        right_mean, right_m2 = reference.act_moments(y.double(), name)
        assert torch.allclose(mean.double(), right_mean, rtol=1e-5, atol=1e-6)
        assert torch.allclose(m2.double(), right_m2, rtol=1e-5, atol=1e-6)


def test_names_agree_with_the_compiled_codes() -> None:
    assert _library.plan is not None
    assert tuple(_library.plan.activation_names()) == NAMES
