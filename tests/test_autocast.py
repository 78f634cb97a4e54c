"""Rows about autocast: dtypes as the eager chain's, mixed parameters, checkpointing, scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import HALVES, Case, assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from convnormpool import ConvNormPool3d, conv_norm_pool, explain, reference

CASE = Case("small", (3, 3, 5, 7, 6), 16, (2, 3, 3), 4, padding=(1, 0, 1))
LOW = HALVES


def gradients(layer: ConvNormPool3d) -> list[Tensor | None]:
    return [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("given", ["float32", "low", "float64"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_row_output_dtype(low: torch.dtype, given: str, device: str, any_path: str) -> None:
    """Under autocast the output has the dtype in which the eager chain ends; so has its error."""
    dtype = low if given == "low" else getattr(torch, given)
    tensors = CASE.tensors(dtype, device)
    with torch.autocast(device, low):
        eager = CASE.call(reference.conv_norm_pool, tensors)
        out = CASE.call(conv_norm_pool, tensors, path=any_path)
    assert out.dtype == eager.dtype
    right = CASE.call(
        reference.conv_norm_pool, [None if t is None else t.double() for t in tensors]
    )
    own = (eager.double() - right).norm()
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else low).eps
    assert (out.double() - right).norm() <= 4 * max(own, eps * right.norm())


@pytest.mark.parametrize("low", LOW, ids=str)
def test_row_float32_module(low: torch.dtype, device: str, path: str) -> None:
    """A float32 module: on CUDA the output is float32, and every gradient is everywhere."""
    layer = ConvNormPool3d(3, 16, 3, path=path, device=device)
    x = torch.randn(2, 3, 5, 6, 7, device=device, requires_grad=True)
    with torch.autocast(device, low):
        out = layer(x)
        assert out.dtype == (torch.float32 if device == "cuda" else low)
    out.sum().backward()
    assert all(g is not None and g.dtype == torch.float32 for g in (x.grad, *gradients(layer)))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_row_checkpoint_inside_autocast(
    low: torch.dtype, reentrant: bool, device: str, path: str
) -> None:
    """torch.utils.checkpoint inside autocast: the same gradients as without."""
    layer = ConvNormPool3d(3, 16, 3, path=path, device=device)
    x = torch.randn(2, 3, 5, 6, 7, device=device, requires_grad=True)
    found = []
    for wrap in (False, True):
        x.grad = None
        layer.zero_grad()
        with torch.autocast(device, low):
            out = checkpoint(layer, x, use_reentrant=reentrant) if wrap else layer(x)
        out.float().square().sum().backward()
        found.append([out.detach(), x.grad, *gradients(layer)])
    assert_same_bits(*found)


def test_backward_outside_and_inside(device: str, path: str) -> None:
    """Where the backward is called does not matter."""
    x, w, *_ = CASE.tensors(torch.float32, device)
    assert x is not None and w is not None
    found = []
    for inside in (False, True):
        leaf = w.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out = conv_norm_pool(x, leaf, num_groups=4, path=path)
            if inside:
                out.float().square().sum().backward()
        if not inside:
            out.float().square().sum().backward()
        found.append([leaf.grad])
    assert_same_bits(*found)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_row_mixed_parameter_dtypes(dtype: torch.dtype, device: str, path: str) -> None:
    """Mixed dtypes are never read as other bits: float32 norm parameters count, others raise."""
    x, w, b, gamma, beta = CASE.tensors(dtype, device)
    assert gamma is not None and beta is not None and w is not None and b is not None
    same = CASE.call(conv_norm_pool, [x, w, b, gamma, beta], path=path)
    mixed = CASE.call(conv_norm_pool, [x, w, b, gamma.float(), beta], path=path)
    assert_same_bits([mixed], [same])
    for bad in (
        [x, w.float(), b, gamma, beta],
        [x, w, b.float(), gamma, beta],
        [x, w, b, gamma.double(), beta],
    ):
        with pytest.raises(TypeError, match="dtype"):
            CASE.call(conv_norm_pool, bad, path=path)


def test_disabled_autocast(device: str, any_path: str) -> None:
    tensors = CASE.tensors(torch.float32, device)
    wanted = CASE.call(conv_norm_pool, tensors, path=any_path)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        found = CASE.call(conv_norm_pool, tensors, path=any_path)
    assert_same_bits([found], [wanted])


def test_autocast_of_another_device(device: str, path: str) -> None:
    other = "cuda" if device == "cpu" else "cpu"
    tensors = CASE.tensors(torch.float32, device)
    wanted = CASE.call(conv_norm_pool, tensors, path=path)
    with torch.autocast(other, torch.bfloat16, enabled=other == "cpu" or torch.cuda.is_available()):
        assert_same_bits([CASE.call(conv_norm_pool, tensors, path=path)], [wanted])


def test_explain_under_autocast(device: str) -> None:
    layer = ConvNormPool3d(3, 16, 3, path="two_stage", device=device)
    x = torch.randn(2, 3, 5, 6, 7, device=device)
    with torch.autocast(device, torch.bfloat16):
        inside = explain(layer, x)
    assert inside.channels_last == explain(layer.bfloat16(), x.bfloat16()).channels_last


def test_grad_scaler(device: str) -> None:
    """Scaled losses of float16 autocast unscale to ordinary gradients, and training goes on."""
    layer = ConvNormPool3d(3, 16, 3, device=device)
    x = torch.randn(4, 3, 5, 6, 7, device=device)
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    scaler: Any = torch.amp.GradScaler(device, init_scale=2.0**10)
    before = [p.detach().clone() for p in layer.parameters()]
    with torch.autocast(device, torch.float16):
        out = layer(x)
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimiser)
    scaler.update()
    assert scaler.get_scale() == 2.0**10  # no Inf was found
    after = list(layer.parameters())
    assert all(
        p.isfinite().all() and not torch.equal(p, q) for p, q in zip(after, before, strict=True)
    )
