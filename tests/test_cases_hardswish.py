"""The rows of known faults about hardswish, on every path."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, Case, assert_accurate, assert_same_bits, check, ours
from torch import Tensor

from convnormpool import conv_norm_pool, ops

# An identity: every output channel is its input channel.
IDENTITY = Case("identity", (2, 4, 3, 3, 3), 4, (1, 1, 1), 2, groups=4, bias=False, affine=False)
SMALL = Case("small", (3, 3, 5, 7, 6), 16, (2, 3, 3), 4, padding=(1, 0, 1))


def knees(dtype: torch.dtype, device: str) -> Tensor:
    """Integers from -4 to 4 in every row, in another order in each."""
    rows = [torch.randperm(27) % 9 - 4 for _ in range(8)]
    return torch.stack(rows).view(IDENTITY.input).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_gradient_at_the_knees(dtype: torch.dtype, device: str, any_path: str) -> None:
    """The gradient at exactly -3 and 3: 0 at -3, 1 at 3, as the installed torch."""
    x = knees(dtype, device)
    tensors = [x, torch.ones(4, 1, 1, 1, 1).to(x), None, None, None]
    grad_out = IDENTITY.grad_out(dtype, device)
    found = ours(IDENTITY, tensors, grad_out, path=any_path)
    assert_accurate(IDENTITY, found, tensors, grad_out, like_eager=any_path == "eager" or None)
    dx = found[1]
    assert dx is not None and not dx[x <= -3].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_derivative_values(dtype: torch.dtype, device: str) -> None:
    """The same in the operator, where nothing else is in the way: hardswish' by itself."""
    x = torch.arange(-4, 5).to(device, dtype).view(1, 9, 1)
    zero, one = torch.zeros(1, 9, device=device), torch.ones(1, 9, device=device)
    if dtype == torch.float64:
        zero, one = zero.double(), one.double()
    found = ops.act_moments_backward(one, zero, x, zero, "hardswish")
    z = x.double().requires_grad_()
    F.hardswish(z).sum().backward()
    assert z.grad is not None
    assert ((found - z.grad).abs() <= torch.finfo(dtype).eps).all()
    assert found.flatten()[[0, 1, 7, 8]].tolist() == [0, 0, 1, 1]


def test_row_knees_never_tested_wide(device: str, path: str) -> None:
    """x·8: most values are beyond the knees."""
    tensors = SMALL.tensors(torch.float32, device, spread=8)
    grad_out = SMALL.grad_out(torch.float32, device)
    assert_accurate(SMALL, ours(SMALL, tensors, grad_out, path=path), tensors, grad_out)


def test_row_knees_never_tested_zero(device: str, path: str) -> None:
    """b = -30: y is 0 everywhere, the output beta, and no gradient reaches x, w, b."""
    tensors = SMALL.tensors(torch.float32, device)
    b, beta = tensors[2], tensors[4]
    assert b is not None and beta is not None
    b.fill_(-30)
    out, dx, dw, db, dgamma, dbeta = ours(
        SMALL, tensors, SMALL.grad_out(torch.float32, device), path=path
    )
    assert out is not None and torch.allclose(out, beta.expand(3, 16), rtol=1e-6)
    assert not any(t is None or t.any() for t in (dx, dw, db, dgamma))
    assert dbeta is not None and dbeta.any()


def test_row_knees_never_tested_identity(device: str, path: str) -> None:
    """b = +30: hardswish is the identity."""
    tensors = SMALL.tensors(torch.float32, device)
    b = tensors[2]
    assert b is not None
    b.fill_(30)
    grad_out = SMALL.grad_out(torch.float32, device)
    found = ours(SMALL, tensors, grad_out, path=path)
    assert_accurate(SMALL, found, tensors, grad_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_row_fmax_swallows_nan(
    poison: float, dtype: torch.dtype, device: str, any_path: str
) -> None:
    """NaN in one sample of three: that sample NaN, the others bit-equal to a clean run.

    So with Inf, whose variance is none; -Inf alone is hardswish's 0 · -Inf, as eager.
    """
    tensors = SMALL.tensors(dtype, device)
    x = tensors[0]
    assert x is not None
    clean = SMALL.call(conv_norm_pool, tensors, path=any_path)
    x[1, :, 2, 3, 4] = poison
    out = SMALL.call(conv_norm_pool, tensors, path=any_path)
    assert out[1].isnan().all()
    assert_same_bits([out[::2].contiguous()], [clean[::2].contiguous()])


def test_nan_gradients_stay_in_their_sample(device: str, path: str) -> None:
    """x's gradient of the other samples is that of a clean run."""
    tensors = SMALL.tensors(torch.float32, device)
    x = tensors[0]
    assert x is not None
    grad_out = SMALL.grad_out(torch.float32, device)
    clean = ours(SMALL, tensors, grad_out, path=path)[1]
    x[1, 0, 2, 3, 4] = math.nan
    dx, dw = ours(SMALL, tensors, grad_out, path=path)[1:3]
    assert clean is not None and dx is not None and dw is not None
    assert dx[1].isnan().any() and dw.isnan().any()
    assert_same_bits([dx[::2].contiguous()], [clean[::2].contiguous()])


def test_negative_infinity(device: str, path: str) -> None:
    """-Inf in front of the activation alone, through an identity: as eager."""
    x = torch.randn(IDENTITY.input, device=device)
    x[0, 1, 1, 1, 1] = -math.inf
    tensors = [x, torch.ones(4, 1, 1, 1, 1, device=device), None, None, None]
    out = IDENTITY.call(conv_norm_pool, tensors, path=path)
    eager = F.group_norm(F.hardswish(x.double()), 2).mean(dim=(2, 3, 4))
    assert torch.equal(out.isnan(), eager.isnan())
    assert torch.allclose(out.double(), eager, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_row_never_negative(device: str, path: str) -> None:
    """hardswish(-1.5) = -0.375."""
    mean, m2 = ops.act_moments(torch.full((1, 1, 7), -1.5, device=device), "hardswish")
    assert mean.item() == -0.375 and m2.item() == 0
    check(SMALL, torch.float32, device, path)
    x = torch.full((1, 1, 2, 2, 2), -1.5, device=device)
    x[..., 0] = -1.0  # hardswish(-1) = -1/3: smaller in size, so above the mean
    w = torch.ones(2, 1, 1, 1, 1, device=device)
    w[1] = 0
    out = conv_norm_pool(x, w, num_groups=1, path=path)
    assert out[0, 0] < 0 < out[0, 1]
