"""The GroupNorm epilogue and its backward, by themselves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES
from torch import Tensor

from convnormpool import _library, ops
from convnormpool._checks import DTYPE_NAMES

GROUPINGS = [(48, 16), (12, 4), (7, 1), (30, 6), (257, 1), (16, 4), (8, 8), (1, 1)]
POSITIONS = 24
EPS = 1e-5

_compiled = torch.ops.convnormpool


def moments(h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean = h.mean(dim=2)
    return mean.to(dtype), (h - mean.unsqueeze(2)).square().sum(dim=2).to(dtype)


def problem(channels: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Activations (N, K, S), weight and bias, in float64."""
    h = torch.randn(3, channels, POSITIONS, dtype=torch.float64, device=device) + 1
    weight, bias = torch.randn(2, channels, dtype=torch.float64, device=device)
    return h, weight, bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "groups"), GROUPINGS)
def test_forward(channels: int, groups: int, dtype: torch.dtype, device: str) -> None:
    """cases.md, "channels per group not a power of two": as eager."""
    h, weight, bias = problem(channels, device)
    out, group_mean, rstd = ops.group_norm_pool(
        *moments(h, dtype), POSITIONS, weight.to(dtype), bias.to(dtype), groups, EPS
    )
    right = F.group_norm(h, groups, weight, bias, EPS).mean(dim=2)
    eps = torch.finfo(dtype).eps
    # Everything is float64 inside: the roundings are those of mean, M2, weight, bias and out.
    assert (out - right).norm() <= 8 * eps * (right.norm() + weight.norm() + bias.norm())
    grouped = h.unflatten(1, (groups, -1)).flatten(2)
    # In float64 the oracle's own sums, of up to 6,000 terms, round as well.
    near = {"rtol": 32 * eps, "atol": 32 * eps}
    assert torch.allclose(group_mean.double(), grouped.mean(dim=2), **near)
    right_rstd = (grouped.var(dim=2, unbiased=False) + EPS).rsqrt()
    assert torch.allclose(rstd.double(), right_rstd, **near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "groups"), GROUPINGS)
def test_backward(channels: int, groups: int, dtype: torch.dtype, device: str) -> None:
    """Against autograd through the whole activations, by the chain rule of the moments."""
    h, weight, bias = (t.requires_grad_() for t in problem(channels, device))
    d = torch.randn(3, channels, dtype=torch.float64, device=device)
    F.group_norm(h, groups, weight, bias, EPS).mean(dim=2).backward(d)
    mean, m2 = moments(h.detach(), dtype)
    grads = ops.group_norm_pool_backward(
        d, mean, m2, POSITIONS, weight.detach().to(dtype), bias.detach().to(dtype), groups, EPS,
        (True, True, True),
    )  # fmt: skip
    grad_mean, grad_m2, grad_weight, grad_bias = (g.double() for g in grads)
    deviations = h.detach() - mean.double().unsqueeze(2)
    dh = grad_mean.unsqueeze(2) / POSITIONS + 2 * grad_m2.unsqueeze(2) * deviations
    eps = torch.finfo(dtype).eps
    size = (d * weight.detach()).norm() / POSITIONS**0.5
    for found, right, scale in (
        (dh, h.grad, size),
        (grad_weight, weight.grad, d.norm()),
        (grad_bias, bias.grad, 0),
    ):
        assert right is not None
        assert (found - right).norm() <= 16 * eps * (right.norm() + scale)


@pytest.mark.parametrize("parameter", DTYPES, ids=str)
@pytest.mark.parametrize("result", DTYPES, ids=str)
def test_mixed_dtypes(result: torch.dtype, parameter: torch.dtype, device: str) -> None:
    """Results are rounded once from float64, whatever the parameters' dtype."""
    h, weight, bias = problem(12, device)
    mean, m2 = moments(h, torch.float32)
    weight, bias = weight.to(parameter), bias.to(parameter)
    arguments = (mean, m2, POSITIONS, weight, bias, 4, EPS)
    out = ops.group_norm_pool(*arguments, DTYPE_NAMES[result])[0]
    wide = ops.group_norm_pool(*arguments, "float64")[0]
    assert out.dtype == result and torch.equal(out, wide.to(result))

    d = torch.randn(3, 12, device=device).to(result)
    grads = ops.group_norm_pool_backward(d, *arguments, (False, True, True))
    wide_grads = ops.group_norm_pool_backward(
        d, mean, m2, POSITIONS, weight.double(), bias.double(), 4, EPS, (False, True, True)
    )
    for found, right in zip(grads[2:], wide_grads[2:], strict=True):
        assert found.dtype == parameter and torch.equal(found, right.to(parameter))


@pytest.mark.parametrize(
    "mask", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str
)
def test_masks(mask: tuple[int, int, int], device: str) -> None:
    """A wanted gradient is that of the full call; an unwanted one has no elements."""
    h, weight, bias = problem(12, device)
    mean, m2 = moments(h, torch.float32)
    d = torch.randn(3, 12, device=device)
    arguments = (d, mean, m2, POSITIONS, weight.float(), bias.float(), 4, EPS)
    full = ops.group_norm_pool_backward(*arguments, (True, True, True))
    some = ops.group_norm_pool_backward(*arguments, tuple(map(bool, mask)))
    for wanted, found, right in zip((mask[0], *mask), some, full, strict=True):
        assert torch.equal(found, right) if wanted else found.numel() == 0


def test_without_parameters(device: str) -> None:
    h, _, _ = problem(12, device)
    mean, m2 = moments(h, torch.float64)
    ones, zeros = torch.ones(12).to(mean), torch.zeros(12).to(mean)
    bare = ops.group_norm_pool(mean, m2, POSITIONS, None, None, 4, EPS)
    given = ops.group_norm_pool(mean, m2, POSITIONS, ones, zeros, 4, EPS)
    assert all(torch.equal(a, b) for a, b in zip(bare, given, strict=True))


def test_one_channel_per_group(device: str) -> None:
    """cases.md, "one channel per group": beta exactly, no gradient for the moments."""
    h, weight, bias = problem(8, device)
    for dtype in (torch.float64, torch.float32):
        mean, m2 = moments(h, dtype)
        gamma, beta = weight.to(dtype), bias.to(dtype)
        out = ops.group_norm_pool(mean, m2, POSITIONS, gamma, beta, 8, EPS)[0]
        assert torch.equal(out, beta.expand(3, 8))
        grads = ops.group_norm_pool_backward(
            torch.randn_like(out), mean, m2, POSITIONS, gamma, beta, 8, EPS, (True, True, True)
        )
        assert not grads[0].any() and not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_eps_and_constant_group(dtype: torch.dtype, device: str) -> None:
    """cases.md, "eps rounded to the storage type": beta, not NaN."""
    mean = torch.full((2, 8), 3.0, device=device)
    weight, bias = torch.randn(2, 8).to(device, dtype)
    arguments = (mean, torch.zeros_like(mean), POSITIONS, weight, bias, 2, 1e-12)
    out = ops.group_norm_pool(*arguments, DTYPE_NAMES[dtype])[0]
    assert torch.equal(out, bias.expand(2, 8))
    grads = ops.group_norm_pool_backward(out, *arguments, (True, True, True))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["mean", "m2"])
def test_not_finite(where: str, poison: float, device: str) -> None:
    """A variance that is not finite makes its own group NaN and no other."""
    h, weight, bias = (t.float() for t in problem(12, device))
    mean, m2 = moments(h, torch.float32)
    clean = ops.group_norm_pool(mean, m2, POSITIONS, weight, bias, 4, EPS)
    (mean if where == "mean" else m2)[1, 4] = poison
    out, _, rstd = ops.group_norm_pool(mean, m2, POSITIONS, weight, bias, 4, EPS)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[1, 3:6] = True
    assert torch.equal(out.isnan(), hit) and torch.equal(out[~hit], clean[0][~hit])
    assert torch.equal(rstd.isnan(), hit[:, ::3])


def test_moments_that_nearly_overflow(device: str) -> None:
    """Sums over a group of what float32 just holds are float64's."""
    mean = torch.tensor([[1e18, -1e18, 3e18, 0.0]], device=device)
    m2 = torch.full((1, 4), 3e38, device=device)
    out, _, rstd = ops.group_norm_pool(mean, m2, POSITIONS, None, None, 1, EPS)
    wide = ops.group_norm_pool(mean.double(), m2.double(), POSITIONS, None, None, 1, EPS)
    assert out.isfinite().all() and torch.equal(out, wide[0].float())
    assert torch.equal(rstd, wide[2].float())


def test_every_element_is_written(device: str) -> None:
    """Poisoned outputs of the compiled operators."""
    assert _library.loaded_for(device)
    h, weight, bias = problem(12, device)
    mean, m2 = moments(h, torch.float32)

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, device=device)

    results = [poisoned(3, 12), poisoned(3, 4), poisoned(3, 4)]
    _compiled._group_norm_pool_out(mean, m2, POSITIONS, weight, bias, 4, EPS, *results)
    right = ops.group_norm_pool(mean, m2, POSITIONS, weight, bias, 4, EPS)
    assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))
    grads = [poisoned(3, 12), poisoned(3, 12), poisoned(12), poisoned(12)]
    _compiled._group_norm_pool_backward_out(
        poisoned(3, 12).fill_(1), mean, m2, weight, POSITIONS, 4, EPS, *grads
    )
    assert all(grad.isfinite().all() for grad in grads)


def test_empty_batch(device: str) -> None:
    """Nothing to normalise; sums over no samples are zero."""
    mean = torch.empty(0, 8, device=device)
    weight = torch.ones(8, device=device)
    assert ops.group_norm_pool(mean, mean, 5, weight, weight, 2, EPS)[0].shape == (0, 8)
    grads = ops.group_norm_pool_backward(
        mean, mean, mean, 5, weight, weight, 2, EPS, (True, True, True)
    )
    assert grads[0].shape == (0, 8)
    assert torch.equal(grads[2], torch.zeros_like(weight))
    assert torch.equal(grads[3], torch.zeros_like(weight))


def test_operators_reject_what_they_would_read_past(device: str) -> None:
    """The compiled operators check sizes themselves: they are reachable as torch.ops."""
    good, short = torch.zeros(2, 8, device=device), torch.zeros(2, 7, device=device)
    stats = [torch.zeros(2, 4, device=device) for _ in range(2)]
    with pytest.raises(RuntimeError):
        _compiled._group_norm_pool_out(good, short, 5, None, None, 4, EPS, good.clone(), *stats)
    with pytest.raises(RuntimeError):
        _compiled._group_norm_pool_out(good, good, 5, short[0], None, 4, EPS, good.clone(), *stats)
    with pytest.raises(RuntimeError):
        _compiled._group_norm_pool_out(good, good, 5, None, None, 3, EPS, good.clone(), *stats)
