"""The layer on every path: output and all gradients against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CASES,
    DTYPES,
    Case,
    assert_accurate,
    assert_same_bits,
    check,
    has_wgmma,
    kernel_gradients,
    kernel_moments,
    ours,
    run,
    variant,
)

from convnormpool import _kernels, conv_norm_pool, explain, ops, planner, reference

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


# Rows of a sample: whole items of four, one, two and three beyond them, and fewer than four. Output
# planes: fewer than the filter's, and each residue of a division by four. Columns: one tile and
# more, tiles that begin before the outputs do, rows that no tensor copy takes. Masked channels.
WINDOWS = (
    Case("quads", (7, 3, 7, 7, 32), 16, (4, 4, 4)),
    Case("rest_1", (9, 3, 8, 8, 32), 16, (4, 4, 4)),
    Case("rest_2", (5, 3, 9, 9, 32), 7, (4, 4, 4)),
    Case("rest_3", (6, 3, 10, 6, 32), 17, (4, 4, 4), activation="gelu"),
    Case("one_plane", (3, 3, 4, 8, 16), 24, (4, 4, 4)),
    Case("smallest", (6, 3, 4, 4, 8), 1, (4, 4, 4)),
    Case("all_padded", (5, 3, 5, 33, 40), 16, (4, 4, 4), padding=(3, 2, 1)),
    Case("wide", (3, 3, 6, 9, 96), 257, (4, 4, 4), padding=(0, 1, 3)),
    Case("no_bias", (4, 3, 11, 12, 64), 16, (4, 4, 4), padding=(1, 0, 2), bias=False),
    Case("odd_rows", (4, 3, 7, 9, 29), 16, (4, 4, 4)),
    Case("rows_28", (5, 3, 6, 8, 28), 16, (4, 4, 4), padding=(1, 0, 0)),
    Case("rows_30", (3, 3, 8, 7, 30), 24, (4, 4, 4), activation="gelu"),
    Case("pairs", (4, 3, 7, 9, 36), 16, (4, 4, 4), activation="silu"),
    Case("one_channel", (257, 1, 6, 11, 24), 16, (3, 3, 3), padding=(1, 1, 1)),
    Case("one_channel_wide", (3, 1, 12, 20, 48), 32, (3, 3, 3), activation="mish"),
    Case("three_channels", (9, 3, 9, 11, 16), 17, (3, 3, 3), padding=(1, 1, 1)),
    Case("three_channels_flat", (9, 3, 3, 6, 64), 16, (3, 3, 3), activation="relu"),
)


def check_kernel(case: Case, kind: str, sm_90a: bool, expected: str) -> None:
    dtype = getattr(torch, kind, torch.float32)
    x, w, b, *_ = case.tensors(dtype, "cuda")
    assert x is not None and w is not None
    kernel, *found = kernel_moments(case, x, w, b, "tf32" if kind == "tf32" else "ieee", sm_90a)
    assert kernel == expected
    bias = None if b is None else b.double()
    y = torch.nn.functional.conv3d(x.double(), w.double(), bias, **case.convolution)
    # Tensor cores cut off what falls out of an accumulator, once for each of up to 77 products that
    # an output adds up (a 7x7x7 filter's over three channels); M2 takes an output's error twice.
    # tf32 rounds like float16.
    eps = torch.finfo(torch.float32).eps * 256
    if kind == "tf32":
        eps = torch.finfo(torch.float16).eps * 4
    for a, right in zip(found, reference.act_moments(y, case.activation), strict=True):
        assert (a - right).norm() <= eps * right.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("sm_90a", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_window_kernels(case: Case, kind: str, sm_90a: bool) -> None:
    """The kernel of compute capability 9.0 where device, build and rows allow it, or the other."""
    element_size = 4 if kind in ("ieee", "tf32") else 2
    sm_90a = sm_90a and has_wgmma()
    by_wgmma = sm_90a and case.input[4] * element_size % 16 == 0
    check_kernel(case, kind, sm_90a, "wgmma" if by_wgmma else "mma.sync")


# Filters that no kernel is compiled for: odd and even extents from 1 to 8, and channels to 16. Rows
# that end within a block's, one and several segments, slabs, tiles of channels.
TAPS = (
    Case("two_channels", (3, 2, 7, 17, 40), 32, (3, 3, 3)),
    Case("four_channels", (5, 4, 9, 11, 20), 16, (3, 3, 3), padding=(1, 1, 1)),
    Case("eight_channels", (3, 8, 5, 9, 33), 24, (3, 3, 3), padding=(1, 0, 1)),
    Case("sixteen_channels", (3, 16, 4, 9, 17), 7, (2, 2, 2), activation="relu"),
    Case("kernel_5", (3, 1, 12, 14, 30), 16, (5, 5, 5), padding=(2, 2, 2)),
    Case("kernel_7", (2, 3, 9, 12, 40), 17, (7, 7, 7), padding=(3, 3, 3)),
    Case("kernel_8", (2, 1, 9, 9, 12), 1, (8, 8, 8), padding=(3, 7, 4)),
    Case("flat", (9, 3, 1, 19, 33), 64, (1, 3, 3), padding=(0, 1, 1)),
    Case("pointwise", (4, 2, 3, 5, 9), 16, (1, 1, 1), activation="gelu"),
    Case("mixed", (7, 1, 70, 9, 11), 257, (2, 5, 4), activation="silu", bias=False),
)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["ieee", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", TAPS, ids=str)
def test_taps_kernel(case: Case, kind: str) -> None:
    check_kernel(case, kind, has_wgmma(), "mma.sync")


def has_fused_gradients() -> bool:
    return torch.cuda.get_device_capability() in ((9, 0), *((10, minor) for minor in range(4)))


# For each case gradients of samples that differ by orders of magnitude. Whatever is scaled for one
# of them, the others lose no digits.
GRADIENTS = (
    *(case for case in WINDOWS if case.name not in ("quads", "wide", "one_channel")),
    Case("two_tiles", (5, 3, 5, 7, 32), 24, (4, 4, 4), padding=(1, 2, 3)),
    Case("one_filter", (3, 1, 4, 5, 16), 1, (3, 3, 3), padding=(2, 2, 2)),
    Case("seven_filters", (3, 3, 20, 6, 72), 7, (3, 3, 3), padding=(0, 1, 2), activation="gelu"),
    Case("deep", (2, 1, 67, 4, 24), 16, (3, 3, 3), padding=(1, 0, 1)),
    Case("many_samples", (133, 3, 4, 5, 8), 16, (4, 4, 4)),
)


def gradients_of(
    case: Case, kind: str
) -> tuple[Case, list[torch.Tensor | None], torch.Tensor, str]:
    """The case, its tensors, a gradient of the output, and the precision."""
    case = variant(case, num_groups=1)
    dtype = getattr(torch, kind, torch.float32)
    tensors, grad_out = case.tensors(dtype, "cuda"), case.grad_out(torch.float32, "cuda")
    sizes = torch.tensor([1.0, 1e-3, 30.0, 0.05, 1e-2], device="cuda")
    grad_out *= sizes[torch.arange(len(grad_out), device="cuda") % len(sizes)][:, None]
    return case, tensors, grad_out.to(dtype), "tf32" if kind == "tf32" else "ieee"


@pytest.mark.cuda
@pytest.mark.parametrize("sm_90a", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_window_gradients(case: Case, kind: str, sm_90a: bool) -> None:
    """The gradients' kernels of compute capability 9.0, or the others; each sample on its own."""
    if not has_fused_gradients():
        return
    case, tensors, grad_out, precision = gradients_of(case, kind)
    x, *rest = tensors
    assert x is not None
    sm_90a = sm_90a and has_wgmma()
    wgmma, found = kernel_gradients(case, tensors, grad_out, precision, sm_90a)
    assert wgmma == (sm_90a and x.shape[4] * x.element_size() % 16 == 0)
    assert_accurate(case, found, tensors, grad_out, precision=precision, like_eager=False)
    dx = found[1]
    assert dx is not None
    # Kernels for one of the gradients alone, where one forms both.
    for wanted in ((True, False, False), (False, True, True)):
        _, part = kernel_gradients(case, tensors, grad_out, precision, sm_90a, wanted)
        whole = [other if g is None else g for g, other in zip(part, found, strict=True)]
        assert_accurate(case, whole, tensors, grad_out, precision=precision, like_eager=False)
    for n in range(min(len(x), 5)):
        sample, grad = [x[n : n + 1], *rest], grad_out[n : n + 1]
        alone = variant(case, input=(1, *case.input[1:]))
        _, own = kernel_gradients(alone, sample, grad, precision, sm_90a)
        assert_accurate(alone, own, sample, grad, precision=precision, like_eager=False)
        # A sample's gradient does not depend on its batch.
        assert own[1] is not None and torch.equal(own[1], dx[n : n + 1])


@pytest.mark.cuda
@pytest.mark.parametrize("sm_90a", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("kind", ["ieee", "tf32", "float16", "bfloat16"])
def test_window_gradients_repeat(kind: str, sm_90a: bool) -> None:
    """The same bits again, and whichever of the gradients are wanted that the same kernels form.

    One kernel may form the gradients of the input and of the filter together, others each alone.
    """
    if not has_fused_gradients():
        return
    for name in ("many_samples", "two_tiles", "seven_filters"):
        case = next(case for case in GRADIENTS if case.name == name)
        case, tensors, grad_out, precision = gradients_of(case, kind)
        arguments = (case, tensors, grad_out, precision, sm_90a and has_wgmma())
        for wanted in product((True, False), repeat=3):
            if not any(wanted):
                continue
            _, found = kernel_gradients(*arguments, wanted)
            _, more = kernel_gradients(*arguments, (wanted[0], any(wanted[1:]), any(wanted[1:])))
            right = [g if want else None for g, want in zip(more[1:4], wanted, strict=True)]
            assert_same_bits(found[1:4], right)


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_place_in_memory_does_not_matter(dtype: torch.dtype, offset: int) -> None:
    """Input that lies where a kernel can't load it from is copied: same kernel, same bits."""
    for case in (c for c in WINDOWS if c.name in ("rest_1", "odd_rows", "three_channels_flat")):
        tensors, grad_out = case.tensors(dtype, "cuda"), case.grad_out(dtype, "cuda")
        x = tensors[0]
        assert x is not None
        memory = torch.full((x.numel() + 8,), torch.nan, device="cuda", dtype=dtype)
        moved = memory[offset : offset + x.numel()].view(x.shape).copy_(x)
        assert moved.storage_offset() == offset
        results = [ours(case, [t, *tensors[1:]], grad_out, path="fused") for t in (moved, x)]
        fused = explain(tensors[1], x, **case.convolution).backward == "fused"
        compared = 4 if fused else 1  # a library may choose by alignment
        assert_same_bits(results[0][:compared], results[1][:compared])


@pytest.mark.cuda
def test_compiled_operator_refuses() -> None:
    """What the planner would not have asked for is an error and no result."""
    w = torch.randn(16, 3, 4, 4, 4, device="cuda")
    memory = torch.randn(2 * 3 * 5 * 6 * 32 + 8, device="cuda")
    mean, m2, workspace = (torch.empty(n, device="cuda") for n in (32, 32, 4096))

    def call(x: torch.Tensor) -> None:
        torch.ops.convnormpool._conv_act_moments_out(
            x, w, None, (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, 0, 0, True, mean.view(2, 16),
            m2.view(2, 16), workspace,
        )  # fmt: skip

    def layer(x: torch.Tensor, num_groups: int = 4) -> None:
        rows = mean.view(2, 16)
        torch.ops.convnormpool._conv_norm_pool_out(
            x, w, None, (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, 0, 0, True, None, None, num_groups,
            1e-5, torch.empty_like(rows), rows, m2.view(2, 16), workspace,
        )  # fmt: skip

    def gradients(x: torch.Tensor) -> None:
        rows = mean.view(2, 16)
        torch.ops.convnormpool._conv_act_moments_backward_out(
            x, w, None, rows, rows, rows, rows, (1, 1, 1), (0, 0, 0), (1, 1, 1), 1, 0, 0, True,
            torch.empty_like(x), None, None, None,
        )  # fmt: skip

    odd = memory[: 2 * 3 * 5 * 6 * 30].view(2, 3, 5, 6, 30)
    moved = memory[1:-7].view(2, 3, 5, 6, 32)
    with pytest.raises(RuntimeError, match="num_groups 5 does not divide"):
        layer(memory[:-8].view(2, 3, 5, 6, 32), 5)
    for operator in (call, layer, gradients):
        if has_wgmma():
            with pytest.raises(RuntimeError, match="x must be aligned to 16 bytes"):
                operator(moved)
            with pytest.raises(RuntimeError, match="rows of x of a multiple of 16 bytes"):
                operator(odd)
            operator(memory[:-8].view(2, 3, 5, 6, 32))
        else:
            with pytest.raises(RuntimeError, match=r"capability 9\.0|no code for sm_90a"):
                operator(memory[:-8].view(2, 3, 5, 6, 32))


def test_kernels_get_aligned_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made beside the compiled operator, on whatever device."""
    case = Case("aligned", (2, 3, 4, 5, 6))
    x, w, *_ = case.tensors(torch.float32, "cpu")
    assert x is not None and w is not None
    seen: list[torch.Tensor] = []
    operator = SimpleNamespace(
        _conv_act_moments_out=lambda x, *_: seen.append(x),
        _conv_act_moments_backward_out=lambda x, *_: seen.append(x),
    )
    monkeypatch.setattr(_kernels, "_compiled", operator)
    memory = torch.zeros(x.numel() + 64)
    start = -memory.data_ptr() % 64 // 4
    for offset, copied in ((0, False), (1, True), (2, True), (4, False)):
        given = memory[start + offset :][: x.numel()].view(x.shape).copy_(x)
        conv = planner.Convolution((1, 1, 1), (0, 0, 0), (1, 1, 1), 1, "hardswish", "ieee")
        decision = replace(planner.decide(x, w, conv), alignment=16)
        _kernels.conv_act_moments(given, w, None, conv, decision, x, x)
        assert (seen[-1].data_ptr() != given.data_ptr()) == copied
        assert torch.equal(seen[-1], x)
        for wgmma in (False, True):
            decision = replace(decision, gradients_wgmma=wgmma)
            nothing = (None, None, None)
            _kernels.conv_act_moments_backward(
                given, w, None, conv, decision, (x, x, x), x, nothing
            )
            assert (seen[-1].data_ptr() != given.data_ptr()) == (copied and wgmma)
            assert torch.equal(seen[-1], x)


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
