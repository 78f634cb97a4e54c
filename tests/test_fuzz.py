"""Random problems on every path; CONVNORMPOOL_FUZZ says how many a path (30 unless given)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, Case, check

from convnormpool import reference

COUNT = int(os.environ.get("CONVNORMPOOL_FUZZ", "30"))
BATCH = 10


def axis(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Extent, kernel, stride, padding, dilation of one axis, with at least one output."""
    kernel, stride, dilation = rng.randint(1, 5), rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 2))
    padding = rng.randint(0, kernel)
    reach = dilation * (kernel - 1) + 1
    least = max(1, reach - 2 * padding)
    return rng.randint(least, least + 7), kernel, stride, padding, dilation


# Axes with which oneDNN's weight gradient corrupts memory, in eager PyTorch too.
def bad_depth(extent: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    return stride > 1 and 2 * padding >= kernel


def bad_height(extent: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    # bfloat16's, where all rows and the padding on both sides are in one window
    return stride > 1 and extent + padding < dilation * (kernel - 1) + 1


def axis_without(
    rng: random.Random, bad: Callable[[int, int, int, int, int], bool]
) -> tuple[int, int, int, int, int]:
    while True:
        found = axis(rng)
        if not bad(*found):
            return found


def problem(rng: random.Random) -> Case:
    axes = axis_without(rng, bad_depth), axis_without(rng, bad_height), axis(rng)
    extent, kernel, stride, padding, dilation = zip(*axes, strict=True)
    groups = rng.choice((1, 1, 1, 2, 3))
    channels, outputs = groups * rng.choice((1, 1, 2, 3, 5, 17)), groups * rng.randint(1, 12)
    if rng.random() < 0.15:
        groups, outputs = channels, channels * rng.choice((1, 2))
    divisors = [d for d in range(1, outputs + 1) if outputs % d == 0]
    # One channel per group has no gradient to be relatively right about: it is tested by itself.
    num_groups = rng.choice(divisors[:-1] or [1])
    return Case(
        "fuzz", (rng.randint(1, 5), channels, *extent), outputs, kernel, num_groups,
        stride, padding, dilation, groups, rng.choice(list(reference.ACTIVATIONS)),
        rng.choice((1e-5, 1e-3, 1e-8)), rng.random() < 0.7, rng.random() < 0.7,
    )  # fmt: skip


@pytest.mark.parametrize("batch", range(-(-COUNT // BATCH)))
def test_random_problems(batch: int, device: str, path: str) -> None:
    rng = random.Random(torch.initial_seed())
    for _ in range(min(BATCH, COUNT - batch * BATCH)):
        case = problem(rng)
        dtype = rng.choice(DTYPES)
        if case.num_groups == case.outputs:  # nothing but one channel
            continue
        if case.activation == "hardsigmoid" and dtype == torch.float64:
            dtype = torch.float32  # PyTorch's own derivative is float32's
        try:
            check(case, dtype, device, path)
        except AssertionError as failure:
            raise AssertionError(f"{case!r} in {dtype}: {failure}") from failure
