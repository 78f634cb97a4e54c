"""The layer on every path: output and all gradients against float64."""

from __future__ import annotations

import pytest
import torch
from helpers import CASES, DTYPES, Case, assert_same_bits, check, ours, run

from convnormpool import conv_norm_pool, explain, ops, reference

PLAIN = Case("plain", (3, 3, 5, 8, 9), 16, (3, 2, 3), 4, padding=(1, 0, 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case: Case, device: str, any_path: str) -> None:
    check(case, torch.float32, device, any_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in ("reference", "many_channels", "chunks")], ids=str
)
def test_other_dtypes(case: Case, dtype: torch.dtype, device: str, path: str) -> None:
    check(case, dtype, device, path)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_or_refused(case: Case, dtype: torch.dtype) -> None:
    """CUDA's fused kernel takes some of the cases, and refuses the others in words."""
    check(case, dtype, "cuda", "fused")


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_reference_filter(precision: str, device: str, path: str) -> None:
    """The filter that the project is about, in both precisions, in every storage type."""
    case = Case("reference", (2, 3, 7, 12, 33), 16, (4, 4, 4), 4)
    for dtype in DTYPES:
        asked = precision if device == "cuda" and dtype == torch.float32 else "ieee"
        check(case, dtype, device, path, precision=asked)


def test_tf32(device: str, path: str) -> None:
    """On CUDA as accurate as eager's tf32, elsewhere no different from "ieee"."""
    check(PLAIN, torch.float32, device, path, precision="tf32" if device == "cuda" else "ieee")


def test_precision_decides_nothing_on_cpu() -> None:
    x, w, b, *_ = PLAIN.tensors(torch.float32, "cpu")
    arguments = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, "hardswish")
    for path in ("fused", "two_stage"):
        ieee = ops.conv_act_moments(x, w, b, *arguments, "ieee", path)
        tf32 = ops.conv_act_moments(x, w, b, *arguments, "tf32", path)
        assert all(torch.equal(a, b) for a, b in zip(ieee, tf32, strict=True))


@pytest.mark.parametrize("name", ["slabs", "chunks"])
def test_cut_cases_are_cut(name: str) -> None:
    """The cases that are named for it do cut samples and batches on CPU."""
    case = next(c for c in CASES if c.name == name)
    x, w, *_ = case.tensors(torch.float32, "cpu")
    assert x is not None and w is not None
    decision = explain(w, x, **case.convolution, path="two_stage")
    if name == "slabs":
        assert decision.chunk_planes is not None and decision.chunk_samples == 1
    else:
        assert 1 < decision.chunk_samples < len(x)


def test_moments(device: str, path: str) -> None:
    """The operator's own results, in the statistics type, against the moments of eager's output."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w, b, *_ = PLAIN.tensors(dtype, device)
        assert x is not None and w is not None and b is not None
        y = torch.nn.functional.conv3d(x.double(), w.double(), b.double(), padding=(1, 0, 1))
        wanted = reference.act_moments(y, "hardswish")
        arguments = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, "hardswish", "ieee", path)
        found = ops.conv_act_moments(x, w, b, *arguments)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        # bfloat16 products are exact in float32; only CUDA's library rounds their sums.
        rounded = device == "cuda" and dtype == torch.bfloat16
        eps = torch.finfo(dtype if rounded else statistics).eps
        for a, right in zip(found, wanted, strict=True):
            assert a.dtype == statistics and a.shape == (3, 16)
            assert (a - right).norm() <= 16 * eps * right.norm()


def test_no_gradient_wanted(device: str, any_path: str) -> None:
    tensors = PLAIN.tensors(torch.float32, device)
    grad_out = PLAIN.grad_out(torch.float32, device)
    with torch.no_grad():
        without = PLAIN.call(conv_norm_pool, tensors, path=any_path)
    assert not without.requires_grad
    assert_same_bits([without], ours(PLAIN, tensors, grad_out, path=any_path)[:1])
    alone = run(PLAIN, conv_norm_pool, tensors, grad_out, (False,) * 5, path=any_path)
    assert_same_bits(alone, [without, *[None] * 5])
