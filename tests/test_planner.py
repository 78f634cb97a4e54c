"""The planner: paths, reasons, chunks; the C++ that decides, asked about devices not here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import CASES, Case

from convnormpool import ConvNormPool3d, Decision, _library, explain, planner

plan = _library.plan
HOPPER = {"cuda": True, "major": 9, "minor": 0, "sm_count": 132, "l2_bytes": 60 << 20}
HOPPER |= {"sm_90a": True}
PLAIN_HOPPER = HOPPER | {"sm_90a": False}
AMPERE = {"cuda": True, "major": 8, "minor": 0, "sm_count": 108, "l2_bytes": 40 << 20}
HOPPER_FACTS = {name: value for name, value in HOPPER.items() if name != "cuda"}
PLAIN_HOPPER_FACTS = {name: value for name, value in PLAIN_HOPPER.items() if name != "cuda"}
BLACKWELL = HOPPER | {"major": 10, "sm_count": 148}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"cuda": False},
    "hopper": HOPPER,
    "hopper_without_code": PLAIN_HOPPER,
    "ampere": AMPERE,
    "blackwell": BLACKWELL,
}
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def problem_of(case: Case, dtype: str, precision: str) -> Any:
    assert plan is not None and not isinstance(case.padding, str)
    return plan.Problem(
        input=case.input, filter=case.filter, stride=case.stride, padding=case.padding,
        dilation=case.dilation, groups=case.groups, dtype=getattr(plan.DType, dtype),
        precision=getattr(plan.Precision, precision),
    )  # fmt: skip


def ask(case: Case, device: dict[str, Any], requested: str | None = None, **more: str) -> Any:
    assert plan is not None
    problem = problem_of(case, more.get("dtype", "float32"), more.get("precision", "ieee"))
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


WINDOWS = (
    Case("reference", (1024, 3, 16, 32, 32), 16, (4, 4, 4)),
    Case("narrow", (5, 3, 4, 4, 8), 1, (4, 4, 4)),
    Case("padded", (3, 3, 9, 11, 40), 257, (4, 4, 4), padding=(3, 2, 1)),
    Case("one_channel", (3, 1, 12, 20, 48), 32, (3, 3, 3), padding=(1, 1, 1)),
    Case("three_channels", (9, 3, 5, 6, 64), 24, (3, 3, 3), padding=(0, 1, 2)),
)


def pieces(case: Case, dtype: str) -> int:
    """Output rows times tiles of 32 columns, which begin at multiples of 16 bytes of x."""
    rows = case.input[3] + 2 * case.padding[1] - case.kernel[1] + 1
    columns = case.input[4] + 2 * case.padding[2] - case.kernel[2] + 1
    step = 16 // SIZES[dtype]
    first = next(c for c in range(0, -step, -1) if (c - case.padding[2]) % step == 0)
    return rows * -(-(columns - first) // 32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [27, 28, 30, 31, 32, 34])
def test_portable_alignment(width: int, dtype: str) -> None:
    """What x must be aligned to: 16 bytes for short rows of 32, a pair of elements for shorter."""
    found = ask(Case("row", (3, 3, 6, 7, width), 16, (4, 4, 4)), AMPERE, dtype=dtype)
    expected = {32: 16, 30: 2 * SIZES[dtype], 28: 2 * SIZES[dtype]}.get(width, SIZES[dtype])
    assert found.path.name == "fused" and found.alignment == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_hopper_kernel(case: Case, dtype: str) -> None:
    """Compute capability 9.0 has its own kernel, in builds with code for it."""
    for precision in ("ieee", "tf32"):
        found = ask(case, HOPPER, dtype=dtype, precision=precision)
        assert found.path.name == "fused" and found.wgmma and found.kernel_reason == ""
        assert found.kernel == "direct convolution with statistics by wgmma"
        assert found.alignment == 16
        assert found.workspace == 2 * case.input[0] * pieces(case, dtype) * case.outputs
    if case.name == "reference":
        assert 4 * found.workspace < 8 << 20
    for device in (AMPERE, BLACKWELL, PLAIN_HOPPER):
        found = ask(case, device, dtype=dtype)
        assert found.path.name == "fused" and not found.wgmma
        assert found.kernel == "direct convolution with statistics by mma.sync"
        assert found.alignment == (16 if case.name == "reference" else SIZES[dtype])
        assert (found.kernel_reason != "") == (device is PLAIN_HOPPER)
    assert found.kernel_reason.startswith("this build has no code for sm_90a; ")
    assert sentence(found.kernel_reason)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_hopper_gradients(case: Case, dtype: str) -> None:
    """They have kernels of their own there, whose sums and dx in float wait in the workspace."""
    assert plan is not None
    n, channels, *extents = case.input
    rows = case.input[3] + 2 * case.padding[1] - case.kernel[1] + 1
    tiles = -(-case.outputs // 16)
    for precision in ("ieee", "tf32"):
        found = ask(case, HOPPER, dtype=dtype, precision=precision)
        assert found.backward_path.name == "fused"
        assert found.backward_wgmma and found.backward_kernel_reason == ""
        columns = pieces(case, dtype) // rows
        blocks = min(n * columns * -(-rows // 4), max(1, HOPPER["sm_count"] // tiles))
        warpgroups = 2 if (dtype, precision) == ("float32", "ieee") else 3
        sums = tiles * 16 * (math.prod(case.filter[1:]) + 4)
        if warpgroups == 3:
            # That for hardswish: fours of the rows of all samples, for each tile of channels alone.
            quads = columns * -(-n * (rows if rows > 2 else 4) // 4)
            blocks = max(blocks, min(quads, HOPPER["sm_count"]))
        alone = blocks * warpgroups
        # One kernel may form both, with a block of two warpgroups for two pieces of samples or, in
        # float32's own precision, for one.
        depth = extents[0] + 2 * case.padding[0] + 1
        most = n * (depth // 10 + 2) * (extents[2] // 24 + 2)
        most = -(-most // (1 if warpgroups == 2 else 2))
        both = max(alone, 2 * min(most, HOPPER["sm_count"]))
        rounded = tiles > 1 and dtype != "float32"
        total = n * channels * math.prod(extents) if rounded else 0
        wanted = [(False, False), (True, False), (False, True), (True, True)]
        assert [workspace(case, dtype, precision, *w) for w in wanted] == [
            0, total, sums * alone, total + sums * both,
        ]  # fmt: skip
    for device in (AMPERE, BLACKWELL, PLAIN_HOPPER):
        found = ask(case, device, dtype=dtype)
        assert not found.backward_wgmma
        assert (found.backward_kernel_reason != "") == (device is PLAIN_HOPPER)


def workspace(case: Case, dtype: str, precision: str, input: bool, filter: bool) -> int:
    """What the gradients by wgmma need."""
    assert plan is not None
    size: int = plan.conv_act_moments_backward_workspace(
        problem_of(case, dtype, precision), plan.Device(**HOPPER), True, input, filter
    )
    return size


def test_gradients_beyond_the_hopper_kernel() -> None:
    """Planes of x beyond 32-bit counts: the forward is by wgmma, the gradients are not."""
    case = Case("plane", (1, 1, 3, 1 << 16, 1 << 15), 1, (3, 3, 3))
    found = ask(case, HOPPER)
    assert found.wgmma and found.backward_path.name == "fused" and not found.backward_wgmma
    assert "beyond the counts of the gradients by wgmma" in found.backward_kernel_reason


@pytest.mark.parametrize(("dtype", "width"), [("float32", 34), ("float16", 36), ("bfloat16", 33)])
def test_rows_that_the_hopper_kernel_refuses(dtype: str, width: int) -> None:
    found = ask(Case("rows", (5, 3, 4, 9, width), 16, (4, 4, 4)), HOPPER, dtype=dtype)
    assert found.path.name == "fused" and not found.wgmma and not found.backward_wgmma
    assert found.kernel.endswith("by mma.sync")
    assert found.backward_kernel_reason == found.kernel_reason
    assert "a multiple of 16 bytes" in found.kernel_reason
    assert str(width * SIZES[dtype]) in found.kernel_reason


@pytest.mark.parametrize("width", [31, 32])
def test_the_batch_decides_no_kernel(width: int) -> None:
    """A sample's bits do not depend on its batch."""
    for samples in (1, 2, 1023, 10**6, 10**8):
        case = Case("batch", (samples, 3, 16, 32, width), 16, (4, 4, 4))
        assert ask(case, HOPPER, dtype="float16").wgmma == (width == 32)


def test_counts_beyond_the_hopper_kernel() -> None:
    """Its items are counted in 32 bits; the portable kernel goes on."""
    case = Case("tall", (10**6, 1, 1, 10**5, 8), 1, (3, 3, 3), padding=(1, 1, 1))
    found = ask(case, HOPPER)
    assert found.path.name == "fused" and not found.wgmma
    assert found.kernel_reason == "the problem's extents are beyond the wgmma kernel's counts"


@pytest.mark.parametrize(
    ("channels", "kernel"),
    [(2, (3, 3, 3)), (4, (4, 4, 4)), (1, (5, 5, 5)), (3, (1, 3, 3))],
    ids=str,
)
def test_filters_of_any_extents(channels: int, kernel: tuple[int, int, int]) -> None:
    """They have a forward kernel on every device, and the library's gradients."""
    case = Case("taps", (5, channels, 9, 10, 11), 16, kernel)
    for device in (HOPPER, AMPERE, BLACKWELL):
        found = ask(case, device)
        assert found.path.name == "fused" and not found.wgmma
        assert found.kernel.endswith("statistics for filters of any extents by mma.sync")
        assert found.backward_path.name == "two_stage"
        assert "compiled for filters" in found.backward_reason
    assert "compiled for filters" in ask(case, HOPPER).kernel_reason


def test_filters_beyond_shared_memory() -> None:
    """What a block may have differs between devices."""
    case = Case("taps", (5, 8, 9, 10, 11), 16, (5, 5, 5))
    assert ask(case, HOPPER, dtype="float16").path.name == "fused"
    assert ask(case, AMPERE, dtype="float16").path.name == "fused"
    found = ask(case, AMPERE | {"minor": 6}, dtype="float16")
    assert found.path.name == "two_stage"
    assert "bytes of shared memory" in found.reason[0]
    for beyond in (Case("wide", (5, 1, 9, 10, 11), 16, (3, 3, 9)),
                   Case("many", (5, 17, 9, 10, 11), 16, (3, 3, 3))):  # fmt: skip
        assert "at most 8 on each axis over at most 16" in ask(beyond, HOPPER).reason[0]


def test_only_the_fused_path_has_the_hopper_kernel() -> None:
    for requested in ("two_stage", "eager"):
        found = ask(WINDOWS[0], HOPPER, requested)
        assert not found.wgmma and found.kernel_reason == "" and found.workspace == 0
    strided = Case("strided", (2, 3, 16, 32, 32), 16, (4, 4, 4), stride=(1, 1, 2))
    found = ask(strided, HOPPER)
    assert found.path.name == "two_stage" and found.kernel_reason == ""


def test_explain_says_why_not_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "loaded_for", lambda device_type: True)
    conv = planner.Convolution((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, "hardswish", "ieee")

    def explained(case: Case, facts: dict[str, Any]) -> str:
        monkeypatch.setattr(planner, "_device_facts", lambda *_: facts)
        problem = (case.input, case.filter, conv, torch.float32, "cuda", 0, "auto")
        return str(planner._plan.__wrapped__(*problem))

    text = explained(WINDOWS[0], PLAIN_HOPPER_FACTS)
    assert "by mma.sync" in text and "gradients" not in text
    assert "not wgmma: this build has no code for sm_90a" in text
    text = explained(WINDOWS[0], HOPPER_FACTS)
    assert "statistics by wgmma\ngradients by wgmma\n" in text and "not wgmma" not in text
    text = explained(Case("plane", (1, 1, 3, 1 << 16, 1 << 15), 1, (3, 3, 3)), HOPPER_FACTS)
    assert "statistics by wgmma\n" in text
    assert "\nnot gradients by wgmma: the problem's extents are beyond" in text


def test_same_problem_same_answer() -> None:
    """Pure functions: nothing is remembered between calls."""
    case, other = CASES[0], CASES[1]
    first = ask(case, HOPPER)
    ask(other, AMPERE)
    again = ask(case, HOPPER)
    names = ("path", "backward_path", "reason", "kernel", "chunk_samples", "channels_last")
    names += ("wgmma", "kernel_reason", "workspace", "alignment")
    for name in (*names, "backward_wgmma", "backward_kernel_reason"):
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
