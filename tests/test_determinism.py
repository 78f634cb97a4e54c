"""The same bits from run to run and on any number of threads; on the fused path in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import CASES, DTYPES, Case, Tensors, assert_same_bits, fused_takes, ours

from convnormpool import explain

BY_NAME = {case.name: case for case in CASES}
CHOSEN = [BY_NAME[name] for name in ("padded", "strided", "wide_input", "slabs", "chunks")]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def problem(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensors, torch.Tensor]:
    return case.tensors(dtype, device), case.grad_out(dtype, device)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_runs_are_equal(case: Case, device: str, path: str) -> None:
    if case.name == "wide_input" and path == "fused":
        path = "auto"
    tensors, grad_out = problem(case, torch.float32, device)
    first = ours(case, tensors, grad_out, path=path)
    assert_same_bits(first, ours(case, tensors, grad_out, path=path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_batch_does_not_matter(case: Case, dtype: torch.dtype, fused_device: str) -> None:
    """On the fused path a sample's output and input gradient are those of the sample alone."""
    tensors, grad_out = problem(case, dtype, fused_device)
    x, *parameters = tensors
    assert x is not None
    if not fused_takes(case, tensors):
        return  # its refusal is checked where every case runs on every path
    whole = ours(case, tensors, grad_out, path="fused")
    gradients = explain(parameters[0], x, **case.convolution).backward
    for n in {0, len(x) - 1}:
        alone = ours(case, [x[n : n + 1], *parameters], grad_out[n : n + 1], path="fused")
        # Gradients may come from the library, whose algorithm depends on the batch.
        results = 2 if gradients == "fused" else 1
        assert_same_bits(alone[:results], [t[n : n + 1] for t in whole[:results] if t is not None])


@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["fused", "two_stage"])
def test_threads_do_not_matter(case: Case, dtype: torch.dtype, way: str, threads: None) -> None:
    """Row of the CPU path: bit-equal results, gradients too, for any number of threads."""
    if case.name == "wide_input" and way == "fused":
        way = "auto"
    tensors, grad_out = problem(case, dtype, "cpu")
    torch.set_num_threads(1)
    wanted = ours(case, tensors, grad_out, path=way)
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert_same_bits(ours(case, tensors, grad_out, path=way), wanted)
        assert torch.get_num_threads() == count


def test_concurrent_calls(device: str, path: str) -> None:
    """Several Python threads at once each get what they get alone."""
    case = BY_NAME["strided"]
    problems = [problem(case, torch.float32, device) for _ in range(6)]
    wanted = [ours(case, *p, path=path) for p in problems]
    with ThreadPoolExecutor(3) as executor:
        calls = [executor.submit(ours, case, *p, path=path) for p in problems]
        for call, right in zip(calls, wanted, strict=True):
            assert_same_bits(call.result(), right)
