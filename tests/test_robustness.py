"""Magnitudes, hostile values and odd sizes: a finite result is never a wrong one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    HALVES,
    Case,
    assert_accurate,
    assert_same_bits,
    doubled,
    ours,
    run_convolution_grads,
    variant,
)
from torch import Tensor

from convnormpool import conv_norm_pool, reference

SMALL = Case("small", (3, 3, 5, 7, 6), 16, (2, 3, 3), 4, padding=(1, 0, 1))
LINEAR = Case("linear", (3, 3, 5, 7, 6), 16, (2, 3, 3), 4, activation="identity", eps=0.0)


def forward_error(case: Case, tensors: list[Tensor | None], path: str) -> tuple[Tensor, Tensor]:
    """The result and, per element, its error relative to the largest of its sample."""
    out = case.call(conv_norm_pool, tensors, path=path).double()
    right = case.call(reference.conv_norm_pool, doubled(tensors))
    return out, (out - right).abs() / right.abs().amax(dim=1, keepdim=True)


def scaled(case: Case, x_scale: Tensor | float, device: str) -> list[Tensor | None]:
    """No bias: what scales x scales y; no beta, which would hide an error."""
    x, w, _, gamma, _ = case.tensors(torch.float32, device)
    assert x is not None
    return [x * x_scale, w, None, gamma, None]


@pytest.mark.parametrize("exponent", [-15, -10, -4, 4, 10, 15])
def test_scale_of_the_input(exponent: int, device: str, path: str) -> None:
    """Without eps the normalisation forgets the scale: 1e-15 to 1e15 are all as good as 1."""
    tensors = scaled(LINEAR, 10.0**exponent, device)
    out, relative = forward_error(LINEAR, tensors, path)
    # Means over 120 positions, each with float32's rounding at the size of a deviation.
    assert out.isfinite().all() and (relative <= 1e-4).all()


def test_scales_differ_between_samples(device: str, path: str) -> None:
    """Samples of 1e-12, 1 and 1e12 in one batch do not disturb each other."""
    scales = torch.tensor([1e-12, 1.0, 1e12], device=device).view(3, 1, 1, 1, 1)
    tensors = scaled(LINEAR, scales, device)
    out, relative = forward_error(LINEAR, tensors, path)
    assert out.isfinite().all() and (relative <= 1e-4).all()


@pytest.mark.parametrize("exponent", [17, 18, 19, 20, 25, 30, 37])
def test_overflow_is_nan_or_right(exponent: int, device: str, path: str) -> None:
    """Where M2 overflows float32 the result is NaN (or float64's), never a wrong finite value."""
    tensors = scaled(LINEAR, 10.0**exponent, device)
    out, relative = forward_error(LINEAR, tensors, path)
    assert (out.isnan() | (relative <= 1e-4)).all()


@pytest.mark.parametrize("exponent", [-20, -30, -38, -42])
def test_tiny_and_subnormal(exponent: int, device: str, path: str) -> None:
    """With eps a vanishing input gives beta; nothing divides by zero."""
    tensors = SMALL.tensors(torch.float32, device)
    x, b = tensors[0], tensors[2]
    assert x is not None and b is not None
    x *= 10.0**exponent
    b.zero_()
    grad_out = SMALL.grad_out(torch.float32, device)
    found = ours(SMALL, tensors, grad_out, path=path)
    assert all(t is not None and t.isfinite().all() for t in found)
    assert_accurate(SMALL, found, tensors, grad_out)


def test_zero_input_without_eps(device: str, path: str) -> None:
    """0/0 is NaN as in eager, not an exception and not a number."""
    case = Case("zero", (2, 3, 4, 4, 4), 8, (3, 3, 3), 2, eps=0.0, bias=False, affine=False)
    x, w, *_ = case.tensors(torch.float32, device)
    assert x is not None
    out = case.call(conv_norm_pool, [torch.zeros_like(x), w, None, None, None], path=path)
    eager = case.call(reference.conv_norm_pool, [torch.zeros_like(x), w, None, None, None])
    assert torch.equal(out.isnan(), eager.isnan())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("which", range(1, 5), ids=["w", "b", "gamma", "beta"])
def test_hostile_parameters(which: int, poison: float, device: str, path: str) -> None:
    """NaN or Inf in one parameter: not finite where float64 eager isn't, as eager elsewhere."""
    tensors = SMALL.tensors(torch.float32, device)
    hit = tensors[which]
    assert hit is not None
    hit.flatten()[5 if hit.dim() == 1 else 5 * hit[0].numel()] = poison
    out = SMALL.call(conv_norm_pool, tensors, path=path)
    right = SMALL.call(reference.conv_norm_pool, doubled(tensors))
    assert torch.equal(out.isfinite(), right.isfinite())
    kept = right.isfinite()
    assert torch.allclose(out.double()[kept], right[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes",
    [
        {"stride": (1, 1, 3)},
        {"stride": (1, 4, 1)},
        {"stride": (3, 1, 1)},
        {"dilation": (1, 1, 5)},
        {"kernel": (1, 1, 1), "stride": (2, 2, 2)},
    ],
    ids=str,
)
def test_unread_positions(changes: dict[str, Any], poison: float, device: str, path: str) -> None:
    """What no output depends on comes into no result."""
    case = Case("unread", (2, 3, 7, 7, 7), 8, (2, 2, 2), 2)
    case = variant(case, **changes)
    x, *parameters = case.tensors(torch.float32, device)
    w = parameters[0]
    assert x is not None and w is not None
    ones = torch.ones_like(x), torch.ones_like(w)
    taps = torch.nn.functional.conv3d(*ones, None, **case.convolution)
    reads, _ = run_convolution_grads(case, *ones, torch.ones_like(taps))
    assert (reads == 0).any()
    grad_out = case.grad_out(torch.float32, device)
    found = ours(case, [x.masked_fill(reads == 0, poison), *parameters], grad_out, path=path)
    assert_accurate(case, found, [x.masked_fill(reads == 0, 0.0), *parameters], grad_out)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_near_their_largest(dtype: torch.dtype, device: str, path: str) -> None:
    """Outputs of the convolution up to 6e4, products of 1e5 and more inside."""
    tensors = SMALL.tensors(dtype, device, spread=4000)
    b = tensors[2]
    assert b is not None
    b.zero_()
    grad_out = SMALL.grad_out(dtype, device)
    found = ours(SMALL, tensors, grad_out, path=path)
    assert_accurate(SMALL, found, tensors, grad_out)


def test_large_gradients(device: str, path: str) -> None:
    """Gradients are linear in dy: 2**40 times as large, to the bit where nothing overflows."""
    tensors = SMALL.tensors(torch.float32, device)
    grad_out = SMALL.grad_out(torch.float32, device)
    once = ours(SMALL, tensors, grad_out, path=path)[1:]
    for power in (2.0**40, 2.0**-40):
        found = ours(SMALL, tensors, grad_out * power, path=path)[1:]
        assert_same_bits(found, [None if t is None else t * power for t in once])


def test_zero_gradient(device: str, path: str) -> None:
    tensors = SMALL.tensors(torch.float32, device)
    found = ours(SMALL, tensors, torch.zeros(3, 16, device=device), path=path)[1:]
    assert not any(t is None or t.any() for t in found)


@pytest.mark.parametrize("width", [1, 2, 5, 15, 16, 17, 29, 31, 33, 64])
@pytest.mark.parametrize("outputs", [1, 7, 16, 24])
def test_odd_sizes(width: int, outputs: int, device: str, path: str) -> None:
    """Every tail of a vector and of a tile of channels."""
    case = Case("odd", (2, 2, 3, 4, width), outputs, (2, 2, 3), 1, padding=(0, 1, 1))
    tensors = case.tensors(torch.float32, device)
    out = case.call(conv_norm_pool, tensors, path=path)
    right = case.call(reference.conv_norm_pool, doubled(tensors))
    assert torch.allclose(out.double(), right, rtol=1e-4, atol=1e-4)
