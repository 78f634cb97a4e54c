"""The planner: paths, reasons, chunks; the C++ that decides, asked about devices not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import CASES, Case

from convnormpool import ConvNormPool3d, Decision, _library, explain

plan = _library.plan
HOPPER = {"cuda": True, "major": 9, "minor": 0, "sm_count": 132, "l2_bytes": 60 << 20}
AMPERE = {"cuda": True, "major": 8, "minor": 0, "sm_count": 108, "l2_bytes": 40 << 20}
DEVICES: dict[str, dict[str, Any]] = {"cpu": {"cuda": False}, "hopper": HOPPER, "ampere": AMPERE}
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def ask(case: Case, device: dict[str, Any], requested: str | None = None, **more: str) -> Any:
    assert plan is not None and not isinstance(case.padding, str)
    problem = plan.Problem(
        input=case.input, filter=case.filter, stride=case.stride, padding=case.padding,
        dilation=case.dilation, groups=case.groups,
        dtype=getattr(plan.DType, more.get("dtype", "float32")),
        precision=getattr(plan.Precision, more.get("precision", "ieee")),
    )  # fmt: skip
    path = None if requested is None else getattr(plan.Path, requested)
    return plan.plan(problem, plan.Device(**device), path)


def sentence(text: str) -> bool:
    return len(text.split()) > 3 and "\n" not in text


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_reason_for_each_path_not_taken(case: Case, kind: str) -> None:
    assert plan is not None
    for requested in (None, "two_stage", "eager"):
        found = ask(case, DEVICES[kind], requested)
        names = ("fused", "two_stage", "eager")
        reasons = dict(zip(names, found.reason, strict=True))
        assert reasons.pop(found.path.name) == ""
        assert all(sentence(reason) for reason in reasons.values())
        assert requested in (None, found.path.name)
        assert found.kernel
        assert (found.backward_path != found.path) == bool(found.backward_reason)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_refusals(case: Case, kind: str) -> None:
    """A path that is asked for and can't run is refused with the sentence that "auto" gives."""
    automatic = ask(case, DEVICES[kind])
    if automatic.path.name == "fused":
        assert ask(case, DEVICES[kind], "fused").path.name == "fused"
    else:
        with pytest.raises(ValueError) as refusal:
            ask(case, DEVICES[kind], "fused")
        assert str(refusal.value) == automatic.reason[0]


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("samples", [1, 7, 1024, 100_000])
def test_chunks_bound_memory(samples: int, kind: str, dtype: str) -> None:
    """A chunk's output of the reference workload stays under 150 MiB, and is never empty."""
    case = Case("reference", (samples, 3, 16, 32, 32), 16, (4, 4, 4), 4)
    found = ask(case, DEVICES[kind], "two_stage", dtype=dtype)
    assert 1 <= found.chunk_samples <= samples
    assert 1 <= found.chunk_planes <= 13
    output = found.chunk_samples * 16 * 13 * 29 * 29 * SIZES[dtype]
    assert output <= 150 << 20


def test_large_samples_are_cut_into_slabs_on_cpu() -> None:
    case = Case("volume", (2, 4, 128, 128, 128), 32, (3, 3, 3), 8, padding=(1, 1, 1))
    found = ask(case, DEVICES["cpu"], "two_stage")
    assert found.chunk_samples == 1 and found.chunk_planes < 128
    assert ask(case, HOPPER, "two_stage").chunk_planes == 128


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_half_precision_layout(dtype: str) -> None:
    """Contiguous 16-bit conv3d may bypass cuDNN: on CUDA the two-stage path never runs it so."""
    for case in CASES:
        for device in (HOPPER, AMPERE):
            if not isinstance(case.padding, str):
                assert ask(case, device, "two_stage", dtype=dtype).channels_last


def test_same_problem_same_answer() -> None:
    """Pure functions: nothing is remembered between calls."""
    case, other = CASES[0], CASES[1]
    first = ask(case, HOPPER)
    ask(other, AMPERE)
    again = ask(case, HOPPER)
    for name in ("path", "backward_path", "reason", "kernel", "chunk_samples", "channels_last"):
        assert getattr(first, name) == getattr(again, name)


def test_explain_layer(device: str) -> None:
    layer = ConvNormPool3d(3, 16, 4, device=device)
    x = torch.empty(4, 3, 16, 32, 32, device=device)
    decision = explain(layer, x)
    assert isinstance(decision, Decision) and decision.path in ("fused", "two_stage")
    assert decision == explain(layer.conv.weight, x)
    text = str(decision)
    assert text.startswith(f"{decision.path}: {decision.kernel}")
    for path, reason in decision.reasons.items():
        assert f"not {path}: {reason}" in text


def test_explain_looks_at_no_data() -> None:
    """Shape, dtype and device only; batches of any size, with a "same" padding resolved."""
    layer = ConvNormPool3d(3, 16, 4, padding="same")
    assert explain(layer, torch.empty(1, 3, 5, 6, 7).expand(5000, -1, -1, -1, -1)).path == "fused"


def test_explicit_path_that_can_not_run() -> None:
    layer = ConvNormPool3d(64, 16, 3, path="fused")
    with pytest.raises(ValueError, match=r"path 'fused' can't run: \w.*64"):
        layer(torch.randn(1, 64, 4, 4, 4))
    with pytest.raises(ValueError, match=r"path 'fused' can't run: \w.*64"):
        explain(layer, torch.randn(1, 64, 4, 4, 4))
