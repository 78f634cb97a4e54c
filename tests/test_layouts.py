"""Row "inputs that are not contiguous": each has the results of its contiguous copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import Case, assert_same_bits, ours
from torch import Tensor

from convnormpool import conv_norm_pool, ops

CASE = Case("layouts", (3, 4, 5, 6, 8), 16, (3, 2, 3), 4, padding=(1, 0, 1))


def transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def reversed_axes(t: Tensor) -> Tensor:
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def sliced(t: Tensor) -> Tensor:
    room = torch.full([2 * extent + 1 for extent in t.shape], torch.nan, dtype=t.dtype)
    view = room.to(t.device)[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def offset(t: Tensor) -> Tensor:
    room = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    return room[1:].view(t.shape).copy_(t)


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last_3d) if t.dim() == 5 else t


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


LAYOUTS = (transposed, reversed_axes, sliced, offset, channels_last, expanded)
Layout = Callable[[Tensor], Tensor]


def arranged(tensor: Tensor | None, layout: Layout) -> Tensor | None:
    if tensor is None or (layout is transposed and tensor.dim() < 2):
        return tensor
    return layout(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_row_not_contiguous(layout: Layout, dtype: torch.dtype, device: str, path: str) -> None:
    """Transposed, sliced, expanded, offset by one element, channels_last_3d: all five tensors."""
    tensors = [arranged(t, layout) for t in CASE.tensors(dtype, device)]
    grad_out = CASE.grad_out(dtype, device)
    plain = [None if t is None else t.contiguous().clone() for t in tensors]
    found = ours(CASE, tensors, grad_out, path=path)
    assert_same_bits(found, ours(CASE, plain, grad_out, path=path))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_row_gradient_not_contiguous(layout: Layout, device: str, path: str) -> None:
    """dy transposed, sliced, expanded, misaligned."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = arranged(CASE.grad_out(torch.float32, device), layout)
    assert grad_out is not None
    found = ours(CASE, tensors, grad_out, path=path)
    assert_same_bits(found, ours(CASE, tensors, grad_out.contiguous().clone(), path=path))


def test_row_gradient_expanded_from_a_scalar(device: str, path: str) -> None:
    """``out.sum().backward()``."""
    tensors = CASE.tensors(torch.float32, device)
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    CASE.call(conv_norm_pool, leaves, path=path).sum().backward()
    wanted = ours(CASE, tensors, torch.ones(3, 16, device=device), path=path)[1:]
    assert_same_bits([None if t is None else t.grad for t in leaves], wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_moments_of_any_layout(layout: Layout, device: str) -> None:
    y = layout(torch.randn(3, 4, 5, 6, 8, device=device))
    found = ops.act_moments(y, "hardswish")
    wanted = ops.act_moments(y.contiguous().clone(), "hardswish")
    if layout is channels_last:  # its own kernel, its own order of 240 terms
        near = {"rtol": 1e-6, "atol": 1e-6}
        assert all(torch.allclose(a, b, **near) for a, b in zip(found, wanted, strict=True))
    else:
        assert_same_bits(found, wanted)
    dy = ops.act_moments_backward(found[0], found[1], y, found[0], "hardswish")
    right = ops.act_moments_backward(
        found[0], found[1], y.contiguous().clone(), found[0], "hardswish"
    )
    assert dy.stride() == torch.empty_like(y).stride() and torch.equal(dy, right)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_epilogue_of_any_layout(layout: Layout, device: str) -> None:
    mean, m2 = layout(torch.randn(3, 8, device=device)), layout(torch.rand(3, 8, device=device))
    d, (gamma, beta) = layout(torch.randn(3, 8, device=device)), torch.randn(2, 8, device=device)
    given = (mean, m2, 9, arranged(gamma, layout), arranged(beta, layout), 2, 1e-5)
    plain = tuple(t.contiguous().clone() if isinstance(t, Tensor) else t for t in given)
    assert_same_bits(ops.group_norm_pool(*given), ops.group_norm_pool(*plain))
    mask = (True, True, True)
    assert_same_bits(
        ops.group_norm_pool_backward(d, *given, mask),
        ops.group_norm_pool_backward(d.contiguous().clone(), *plain, mask),
    )


def test_input_is_left_alone(device: str, path: str) -> None:
    """Nothing that the caller gave is written to, forward or backward."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    before = [None if t is None else t.clone() for t in (*tensors, grad_out)]
    ours(CASE, tensors, grad_out, path=path)
    assert_same_bits([*tensors, grad_out], before)
