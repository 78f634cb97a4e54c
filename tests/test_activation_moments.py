"""The reduction kernel and its backward, by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DTYPES, HALVES
from torch import Tensor

from convnormpool import _kernels, _library, ops, reference

SHAPES = [
    (2, 5, 3, 4, 5),
    (3, 7, 1),
    (1, 1, 7, 1, 9),
    (2, 16, 1033),
    (4, 3, 8, 8),
    (2, 33, 2, 3, 5),
]
LAYOUTS = ("contiguous", "channels_last")

_compiled = torch.ops.convnormpool


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, layout: str = "contiguous"
) -> Tensor:
    y = (torch.randn(shape, dtype=torch.float64) * 3).to(device, dtype)
    return y if layout == "contiguous" else y.movedim(1, -1).contiguous().movedim(-1, 1)


def statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_moments(found: tuple[Tensor, Tensor], y: Tensor, factor: float = 8) -> None:
    """Moments of hardswish(y) within a few roundings of the statistics type.

    The mean's rounding is relative to y's size, since near -3 hardswish is small by cancellation;
    that of M2 to itself, and through the mean's error to the square of eps times that size.
    """
    mean, m2 = found
    right_mean, right_m2 = reference.act_moments(y.double(), "hardswish")
    assert mean.dtype == m2.dtype == statistics(y.dtype)
    eps = torch.finfo(mean.dtype).eps
    count = y[0, 0].numel()
    size = y.double().square().flatten(2).mean(dim=2).sqrt()
    assert ((mean - right_mean).abs() <= factor * eps * size).all()
    allowed = factor * eps * right_m2 + count * (factor * eps * size).square()
    assert ((m2 - right_m2).abs() <= allowed).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> None:
    y = sample(shape, dtype, device, layout)
    assert_moments(ops.act_moments(y, "hardswish"), y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> None:
    y = sample(shape, dtype, device, layout)
    mean, _ = ops.act_moments(y, "hardswish")
    grad_mean, grad_m2 = torch.randn_like(mean), torch.randn_like(mean)
    dy = ops.act_moments_backward(grad_mean, grad_m2, y, mean, "hardswish")
    z = y.double().requires_grad_()
    h = reference.ACTIVATIONS["hardswish"](z)
    per_row = (*mean.shape, *(1 for _ in shape[2:]))
    total = (h.flatten(2).mean(dim=2) * grad_mean).sum()
    # M2's derivative with the mean as it was given.
    total = total + ((h - mean.double().view(per_row)).square() * grad_m2.view(per_row)).sum()
    (right,) = torch.autograd.grad(total, z)
    # The terms cancel, so rounding is relative to their sizes; hardswish' is at most 1.5.
    size = grad_mean.abs().view(per_row) + 2 * grad_m2.abs().view(per_row) * (
        h.detach().abs() + mean.abs().view(per_row)
    )
    eps = torch.finfo(statistics(dtype)).eps + torch.finfo(dtype).eps / 2
    assert dy.dtype == dtype and dy.stride() == y.stride()
    assert ((dy - right).abs() <= 4 * eps * size * 1.5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_written(dtype: torch.dtype, device: str) -> None:
    """Poisoned outputs: the compiled operators write all of what they are given."""
    y = sample((3, 5, 4, 7), dtype, device)
    mean = torch.full((3, 5), math.nan, dtype=statistics(dtype), device=device)
    m2 = mean.clone()
    _kernels.act_moments(y, "hardswish", mean, m2)
    assert_moments((mean, m2), y)
    for result in {dtype, statistics(dtype)}:
        dy = torch.full_like(y, math.nan, dtype=result)
        _kernels.act_moments_backward(y, mean, mean, m2, "hardswish", dy)
        assert dy.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_in_place(dtype: torch.dtype, device: str) -> None:
    """dy may be y itself."""
    y = sample((2, 5, 6, 7), dtype, device)
    mean, m2 = ops.act_moments(y, "hardswish")
    apart = torch.full_like(y, math.nan)
    _kernels.act_moments_backward(y, mean, mean, m2, "hardswish", apart)
    _kernels.act_moments_backward(y, mean, mean, m2, "hardswish", y)
    assert torch.equal(y, apart)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_misaligned(layout: str, dtype: torch.dtype, offset: int, device: str) -> None:
    """Any alignment of the pointer gives the same bits, and nothing is written past the ends."""
    y = sample((2, 16, 4, 9), dtype, device, layout)
    room = torch.full((y.numel() + 16,), math.nan, dtype=dtype, device=device)
    shifted = room[offset:].as_strided(y.shape, y.stride()).copy_(y)
    mean, m2 = ops.act_moments(y, "hardswish")
    again = ops.act_moments(shifted, "hardswish")
    assert torch.equal(mean, again[0]) and torch.equal(m2, again[1])
    dy = ops.act_moments_backward(mean, m2, y, mean, "hardswish")
    _kernels.act_moments_backward(shifted, mean, mean, m2, "hardswish", shifted)
    assert torch.equal(shifted, dy)
    assert room[:offset].isnan().all() and room[offset + y.numel() :].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("ratio", [10, 100, 1000])
def test_mean_far_from_zero(ratio: int, dtype: torch.dtype, layout: str, device: str) -> None:
    """The deviations survive a mean many times as large."""
    y = sample((2, 16, 3001), dtype, device, layout) / 3 + ratio
    mean, m2 = ops.act_moments(y, "hardswish")
    right_mean, right_m2 = reference.act_moments(y.double(), "hardswish")
    eps = torch.finfo(dtype).eps
    # In float64 the oracle's own sums round as well.
    assert ((mean - right_mean).abs() <= 16 * eps * ratio).all()
    # Deviations near 1, each off by eps * ratio at random; a sum of n terms by eps * sqrt(n).
    root = math.sqrt(3001)
    relative = eps * (16 + ratio / root + (root if dtype == torch.float64 else 0))
    assert ((m2 - right_m2).abs() <= 4 * relative * right_m2).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_rows(dtype: torch.dtype, device: str) -> None:
    """Rows of one value have that mean, and an M2 of nothing but its rounding; never negative."""
    y = torch.tensor([5.0, -1.5, 0.1, 200.0]).to(device, dtype).view(1, 4, 1).expand(2, 4, 999)
    mean, m2 = ops.act_moments(y.contiguous(), "hardswish")
    value = reference.ACTIVATIONS["hardswish"](y[..., 0].double())
    eps = torch.finfo(mean.dtype).eps
    assert ((mean - value).abs() <= 2 * eps * value.abs()).all()
    assert (m2 >= 0).all() and (m2 <= 999 * (2 * eps * value).square()).all()


def test_rows_are_independent(device: str) -> None:
    """A sample has the same bits alone and in any batch."""
    for layout in LAYOUTS:
        y = sample((9, 16, 5, 13), torch.float32, device, layout)
        mean, m2 = ops.act_moments(y, "hardswish")
        for n in range(9):
            alone = ops.act_moments(y[n : n + 1], "hardswish")
            assert torch.equal(alone[0][0], mean[n]) and torch.equal(alone[1][0], m2[n])


def test_empty_batch(device: str) -> None:
    y = torch.empty(0, 4, 3, 3, device=device)
    mean, m2 = ops.act_moments(y, "hardswish")
    assert mean.shape == m2.shape == (0, 4)
    assert ops.act_moments_backward(mean, m2, y, mean, "hardswish").shape == y.shape


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_accumulate_in_float32(dtype: torch.dtype, device: str) -> None:
    """Sums and squares that float16 can't hold."""
    y = (300 + 1700 * torch.rand(2, 3, 4096)).to(device, dtype)
    found = ops.act_moments(y, "hardswish")
    assert found[1].isfinite().all() and (found[1] > 65504).all()
    assert_moments(found, y)


def test_operators_reject_what_they_would_read_past(device: str) -> None:
    """The compiled operators check sizes themselves: they are reachable as torch.ops."""
    assert _library.loaded_for(device)
    y, good, bad = (torch.zeros(s, device=device) for s in ((2, 3, 4), (2, 3), (2, 2)))
    with pytest.raises(RuntimeError):
        _compiled._act_moments_out(y, 0, bad, good, None)
    with pytest.raises(RuntimeError):
        _compiled._act_moments_out(y, 99, good, good.clone(), None)
    with pytest.raises(RuntimeError):
        _compiled._act_moments_backward_out(y, bad, good, good, 0, y.clone())
    with pytest.raises(RuntimeError):
        _compiled._act_moments_backward_out(y, good, good, good, 0, y[:1].clone())
