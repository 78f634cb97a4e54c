"""The same bits from run to run and on any number of threads; on the fused path in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    CASES,
    DTYPES,
    Case,
    Tensors,
    assert_same_bits,
    fused_takes,
    has_wgmma,
    kernel_moments,
    ours,
)

from convnormpool import explain

BY_NAME = {case.name: case for case in CASES}
CHOSEN = [BY_NAME[name] for name in ("padded", "strided", "wide_input", "slabs", "chunks")]

# By what is left of a division of the output rows by four: none, one, two, three.
WINDOWS = (
    Case("quads", (300, 3, 6, 11, 32), 16, (4, 4, 4), activation="gelu"),
    Case("rest_1", (300, 3, 7, 12, 32), 16, (4, 4, 4)),
    Case("rest_2", (300, 3, 5, 7, 40), 24, (4, 4, 4), padding=(1, 1, 2)),
    Case("rest_3", (300, 1, 8, 7, 24), 16, (3, 3, 3), padding=(1, 1, 1)),
)


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


@pytest.mark.cuda
@pytest.mark.parametrize("sm_90a", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_batch_does_not_matter_to_kernels(case: Case, kind: str, sm_90a: bool) -> None:
    """Where rows of several samples share an item, and where blocks have several items."""
    dtype = getattr(torch, kind, torch.float32)
    precision = "tf32" if kind == "tf32" else "ieee"
    x, w, b, *_ = case.tensors(dtype, "cuda")
    assert x is not None and w is not None
    sm_90a = sm_90a and has_wgmma()
    kernel, *whole = kernel_moments(case, x, w, b, precision, sm_90a)
    for first, last in ((0, 1), (3, 4), (1, 3), (2, 9), (5, 200), (len(x) - 1, len(x))):
        part = kernel_moments(case, x[first:last], w, b, precision, sm_90a)
        assert part[0] == kernel
        assert_same_bits(part[1:], [t[first:last] for t in whole])
    assert_same_bits(kernel_moments(case, x, w, b, precision, sm_90a)[1:], whole)


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
