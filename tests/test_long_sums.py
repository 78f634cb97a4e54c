"""What the CPU kernels lose in sums of thousands of terms, against derived bounds."""

from __future__ import annotations

import math

import pytest
import torch

from convnormpool import ops


@pytest.mark.parametrize("bias", [0.0, 1000.0])
def test_long_sums(bias: float) -> None:
    """A sum of thousands of products is as inexact as its chains of 128 and the chain of those.

    The i-th addition of n is off by at most eps / 2 / sqrt(3) of what it adds up to, which is the
    root of i / n of the sum, both in the root of the mean square: n of them by eps sqrt(n / 24).
    A large bias is added once, at the end.
    """
    x, w = torch.randn(64, 32, 5, 5, 5), torch.randn(16, 32, 5, 5, 5)
    # The mean over the only position is the output itself.
    arguments = ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, "identity", "ieee", "fused")
    found, _ = ops.conv_act_moments(x, w, torch.full((16,), bias), *arguments)
    rows, filters = x.double().flatten(1), w.double().flatten(1)
    right = rows @ filters.T + bias
    chains = -(-rows.shape[1] // 128)
    squares = (rows.square() @ filters.square().T).mean() * (128 + chains) / 24
    bound = squares + (right.square().mean() / 12 if bias else 0.0)
    error = (found - right).square().mean().sqrt()
    assert error <= torch.finfo(torch.float32).eps * bound.sqrt()


@pytest.mark.parametrize("background", [None, 1.7])
def test_large_planes(background: float | None) -> None:
    """The moments over a plane are as inexact as their chains of 16 and the rounding at the end.

    In a chain of n the i-th addition is off by at most eps / 2 of i / n of the sum, all of them by
    eps n / 4: by so much where the errors of all chains are alike, as where a background is.
    """
    x, w = torch.randn(1, 1, 1, 2048, 2048), torch.ones(1, 1, 1, 1, 1)
    if background is not None:
        x[..., :1024] = background
    arguments = ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, "hardswish", "ieee", "fused")
    mean, m2 = ops.conv_act_moments(x, w, None, *arguments)
    y = torch.nn.functional.hardswish(x).double()
    bound = torch.finfo(torch.float32).eps * (16 / 4 + 0.5)
    assert (mean - y.mean()).abs().item() <= bound * y.std()
    assert (m2 / y.numel() - y.var(unbiased=False)).abs().item() <= bound * y.var()


def test_bias_gradient_of_large_planes() -> None:
    """Terms of both signs in chains of 16, the rest in float64: twice that, 32 sums being few."""
    x, w = torch.randn(1, 1, 1, 512, 512), torch.randn(32, 1, 1, 1, 1)
    zeros, halves = torch.zeros(1, 32), torch.full((1, 32), 0.5)
    arguments = ((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, "identity", "ieee", "fused")
    # dy is 2 grad_m2 (y - mean), with these y itself.
    *_, found = ops.conv_act_moments_backward(
        zeros, halves, x, w, torch.zeros(32), zeros, zeros, *arguments, (False, False, True)
    )
    y = (w * x).double().flatten(1)
    error = ((found - y.sum(1)) / y.square().sum(1).sqrt()).square().mean().sqrt()
    assert error <= 2 * torch.finfo(torch.float32).eps * math.sqrt((16 + 2) / 24)
