"""The rows of known faults about the convolution, on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    DTYPES,
    HALVES,
    RESULTS,
    Case,
    assert_accurate,
    check,
    error,
    oracle,
    ours,
)
from torch import Tensor, nn

from convnormpool import ConvNormPool3d, _convolution, conv_norm_pool, explain

AXES: dict[str, Any] = {
    "kernel": (2, 3, 5),
    "stride": (1, 2, 3),
    "padding": (0, 1, 2),
    "dilation": (1, 1, 2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [(4, 4, 4), (2, 3, 4), (3, 1, 5), (6, 2, 1)], ids=str)
def test_row_same_padding_with_an_even_kernel(
    kernel: tuple[int, int, int], device: str, path: str
) -> None:
    """padding="same" is asymmetric where a kernel is even, as in nn.Conv3d."""
    case = Case("same", (2, 3, 5, 6, 7), 16, kernel, 4, padding="same")
    for dtype in (torch.float64, torch.float32):
        tensors = case.tensors(dtype, device)
        grad_out = case.grad_out(dtype, device)
        found = ours(case, tensors, grad_out, path=path)
        assert_accurate(case, found, tensors, grad_out)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_same_padding_with_dilation(device: str, path: str) -> None:
    layer = ConvNormPool3d(
        3, 8, (2, 4, 3), 2, padding="same", dilation=(3, 1, 2), path=path, device=device
    )
    x = torch.randn(2, 3, 5, 6, 7, device=device)
    chain = nn.Sequential(layer.conv, nn.Hardswish(), layer.group_norm)
    right = chain.double()(x.double()).mean(dim=(2, 3, 4))
    assert torch.allclose(layer.float()(x).double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 6], ids=["dense", "grouped", "depthwise"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_every_axis_different(groups: int, dtype: torch.dtype, device: str, path: str) -> None:
    """k = (2,3,5), stride (1,2,3), padding (0,1,2), dilation (1,1,2), grouped and depthwise."""
    case = Case("axes", (2, 6, 5, 8, 13), 12, num_groups=4, groups=groups, **AXES)
    check(case, dtype, device, path)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_row_half_precision_slow_path(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two-stage path gives no library a contiguous 16-bit 3-D convolution."""
    seen: list[tuple[Tensor, Tensor]] = []
    forward = _convolution.forward

    def recording(x: Tensor, w: Tensor, *args: Any, **more: Any) -> Tensor:
        seen.append((x, w))
        return forward(x, w, *args, **more)

    monkeypatch.setattr(_convolution, "forward", recording)
    case = Case("half", (3, 4, 5, 6, 7), 16)
    ours(case, case.tensors(dtype, device), case.grad_out(dtype, device), path="two_stage")
    assert seen
    for tensor in (t for pair in seen for t in pair):
        wide = tensor.dtype == torch.float32
        assert wide or tensor.movedim(1, -1).is_contiguous()


def test_weight_gradient_that_the_library_gets_wrong(device: str, path: str) -> None:
    """oneDNN's is wrong with a strided, widely padded depth; eager's, so it is no measure here."""
    case = Case(
        "onednn", (4, 3, 4, 7, 2), 3, (4, 4, 5), 1,
        stride=(2, 1, 2), padding=(3, 0, 3), dilation=(1, 2, 1),
    )  # fmt: skip
    tensors = case.tensors(torch.float32, device)
    grad_out = case.grad_out(torch.float32, device)
    found = ours(case, tensors, grad_out, path=path)
    for name, a, b in zip(RESULTS, found, oracle(case, tensors, grad_out), strict=True):
        assert a is not None and b is not None
        assert error(a, b) <= 1e-5 * b.norm().item(), name


def test_row_empty_batch(device: str, path: str) -> None:
    """x (0,3,8,8,8): output (0, C); gradients zero, of the right shape."""
    case = Case("empty", (0, 3, 8, 8, 8), 16)
    for dtype in DTYPES:
        tensors = case.tensors(dtype, device)
        found = ours(case, tensors, case.grad_out(dtype, device), path=path)
        assert found[0] is not None and found[0].shape == (0, 16) and found[0].dtype == dtype
        for grad, tensor in zip(found[1:], tensors, strict=True):
            assert grad is not None and tensor is not None
            assert grad.dtype == dtype and torch.equal(grad, torch.zeros_like(tensor))


def test_one_value(device: str, path: str) -> None:
    """The smallest problem that there is; eager PyTorch refuses it."""
    x = torch.randn(1, 1, 1, 1, 1, device=device)
    w = torch.randn(1, 1, 1, 1, 1, device=device)
    assert conv_norm_pool(x, w, num_groups=1, path=path).tolist() == [[0.0]]


def test_explained_kernels_are_the_ones_that_run(device: str) -> None:
    """``explain`` and the call agree on what a path refuses."""
    w, x = torch.randn(8, 40, 2, 2, 2, device=device), torch.randn(2, 40, 4, 4, 4, device=device)
    decision = explain(w, x)
    assert decision.path == "two_stage" and decision.reasons["fused"]
    with pytest.raises(ValueError, match="fused"):
        conv_norm_pool(x, w, num_groups=2, path="fused")
