"""The rows of known faults about statistics (variance, eps, ranges), on every path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    DTYPES,
    PARAMETERS,
    RESULTS,
    Case,
    Tensors,
    assert_accurate,
    check,
    eager_errors,
    error,
    oracle,
    ours,
)

from convnormpool import ops

LARGE_MEAN = Case("large_mean", (2, 3, 8, 16, 16), 16, (4, 4, 4), 4)
SMALL = Case("small", (3, 3, 5, 7, 6), 16, (2, 3, 3), 4, padding=(1, 0, 1))
GROUPINGS = [(48, 16), (12, 4), (7, 1), (30, 6), (257, 1)]


def large_mean(level: float, device: str) -> Tensors:
    case = LARGE_MEAN
    x = torch.rand(case.input)
    w, b = 0.01 * torch.randn(case.filter), level + 0.01 * torch.randn(16)
    gamma, beta = torch.randn(2, 16)
    return [t.to(device) for t in (x, w, b, gamma, beta)]


@pytest.mark.parametrize(("level", "known"), [(10, 1.2e-5), (100, 2.6e-4), (1000, 1.5e-3)])
def test_row_variance_cancels(level: float, known: float, device: str, path: str) -> None:
    """Variance by E[y²]-E[y]² cancels: an error no larger than eager's own, here or as known."""
    case = LARGE_MEAN
    tensors = large_mean(level, device)
    grad_out = case.grad_out(torch.float32, device)
    found = ours(case, tensors, grad_out, path=path)
    own = eager_errors(case, tensors, grad_out, "ieee")
    right = oracle(case, tensors, grad_out)
    for name, a, b, peer in zip(RESULTS, found, right, own, strict=True):
        assert a is not None and b is not None
        # Rounding y to eps * level spoils the gradients of eager and of us alike, so there the two
        # errors are independent and of one size.
        factor = 1 if name == "out" else 4
        assert error(a, b) <= factor * max(peer, known * b.norm().item()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_variance_slightly_negative(dtype: torch.dtype, device: str, path: str) -> None:
    """w = 0, b = 5: the output is beta; all gradients finite."""
    tensors = SMALL.tensors(dtype, device)
    x, w, b, _, beta = tensors
    assert x is not None and w is not None and b is not None and beta is not None
    w.zero_()
    b.fill_(5)
    found = ours(SMALL, tensors, SMALL.grad_out(dtype, device), path=path)
    out = found[0]
    assert out is not None
    # Moments are float32 or better: hardswish(5) and its mean round, magnified by 1/sqrt(eps).
    statistics = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    allowed = 4 * (torch.finfo(dtype).eps + statistics * 5 / math.sqrt(SMALL.eps))
    assert ((out - beta).double().abs() <= allowed * (1 + beta.double().abs())).all()
    assert all(t is not None and t.isfinite().all() for t in found)


def test_row_eps_rounded_to_the_storage_type(device: str, path: str) -> None:
    """fp16 tensors, eps = 1e-12, a constant group: beta, not NaN."""
    case = replace(SMALL, eps=1e-12)
    tensors = case.tensors(torch.float16, device)
    x, w, b, _, beta = tensors
    assert x is not None and w is not None and b is not None and beta is not None
    w.zero_()
    b.fill_(3)  # hardswish(3) = 3 exactly
    found = ours(case, tensors, case.grad_out(torch.float16, device), path=path)
    assert found[0] is not None and torch.equal(found[0], beta.expand(3, 16))
    # 1/sqrt(eps) is 1e6: x's gradient is zero times that, the weight's and bias's overflow float16.
    assert not any(t is None or t.isnan().any() for t in found)


@pytest.mark.parametrize(("channels", "groups"), GROUPINGS)
def test_row_channels_per_group(channels: int, groups: int, device: str, path: str) -> None:
    """Channels per group not a power of two: as eager."""
    case = replace(SMALL, outputs=channels, num_groups=groups)
    check(case, torch.float32, device, path)


def test_row_one_channel_per_group(device: str, path: str) -> None:
    """G = C: the output is beta exactly, and the gradients of x, w, b and gamma are zero."""
    case = replace(SMALL, num_groups=16)
    for dtype in DTYPES:
        tensors = case.tensors(dtype, device)
        beta = tensors[4]
        assert beta is not None
        found = ours(case, tensors, case.grad_out(dtype, device), path=path)
        for name, result in zip(RESULTS, found, strict=True):
            assert result is not None
            if name == "out":
                assert torch.equal(result, beta.expand(3, 16))
            elif name != "dbeta":
                assert not result.any(), name


@pytest.mark.parametrize("level", [300.0, 2000.0])
def test_row_float16_overflow(level: float, device: str, path: str) -> None:
    """y around 300…2000: squares and sums overflow float16, the results do not."""
    tensors = SMALL.tensors(torch.float16, device)
    b = tensors[2]
    assert b is not None
    b += level
    grad_out = SMALL.grad_out(torch.float16, device)
    found = ours(SMALL, tensors, grad_out, path=path)
    assert all(t is not None and t.isfinite().all() for t in found)
    assert_accurate(SMALL, found, tensors, grad_out)


def test_row_float16_gradients_underflow(device: str, path: str) -> None:
    """dy = randn / (1024·16) in fp16: relative error at most 2e-2; eager gives exactly 0."""
    case = Case("underflow", (4, 3, 8, 16, 16), 16, (4, 4, 4), 4)
    tensors = case.tensors(torch.float16, device)
    grad_out = (torch.randn(4, 16) / (1024 * 16)).to(device, torch.float16)
    # What a float16 gradient itself can't hold is no fault of the sums: the weight and bias
    # gradients are sums over all positions, and x's is looked at scaled up by the norm's weight.
    gamma = tensors[3]
    assert gamma is not None
    gamma *= 64
    found = ours(case, tensors, grad_out, path=path)
    right = oracle(case, tensors, grad_out)
    for name, a, b in zip(("out", *PARAMETERS), found, right, strict=True):
        assert a is not None and b is not None
        step = torch.finfo(torch.float16)
        unresolved = step.smallest_normal * step.eps / 2 * math.sqrt(b.numel())
        assert error(a, b) <= 2e-2 * b.norm().item() + unresolved, name
        assert a.any(), name


def test_row_saved_statistics(device: str, path: str) -> None:
    """bf16 input, float32 parameters: what is saved for the backward is float32."""
    tensors = SMALL.tensors(torch.bfloat16, device)
    mixed = [*tensors[:3], *(t.float() for t in tensors[3:] if t is not None)]
    grad_out = SMALL.grad_out(torch.bfloat16, device)
    found = ours(SMALL, mixed, grad_out, path=path)
    # Eager group_norm takes no such mixture on CUDA.
    assert_accurate(SMALL, found, mixed, grad_out, like_eager=False)
    assert [t.dtype for t in found if t is not None] == [torch.bfloat16] * 4 + [torch.float32] * 2
    x, w, b, *_ = (None if t is None else t.requires_grad_() for t in mixed)
    arguments = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, "hardswish", "ieee", path)
    assert all(t.dtype == torch.float32 for t in ops.conv_act_moments(x, w, b, *arguments))
