"""Gradients: of every subset, in float64 by finite differences, twice, recomputed, checkpointed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import PARAMETERS, Case, assert_accurate, assert_same_bits, doubled, ours, run
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from convnormpool import ConvNormPool3d, conv_norm_pool, ops

CASE = Case("small", (2, 2, 3, 4, 4), 4, (2, 3, 2), 2, padding=(1, 0, 1))
TINY = Case("tiny", (2, 2, 2, 3, 3), 4, (2, 2, 1), 2, padding=(1, 0, 1))
SUBSETS = [s for s in itertools.product((False, True), repeat=5) if any(s)]
SLABS = Case("slabs", (1, 1, 40, 60, 60), 4, (3, 1, 1), 2, padding=(1, 0, 0))


def names(subset: tuple[bool, ...]) -> str:
    return "-".join(n for n, wanted in zip(PARAMETERS, subset, strict=True) if wanted)


@pytest.mark.parametrize("subset", SUBSETS, ids=names)
def test_row_only_some_gradients_wanted(subset: tuple[bool, ...], device: str, path: str) -> None:
    """All 31 subsets of requires_grad: the wanted ones, equal to the full run."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    full = ours(CASE, tensors, grad_out, path=path)
    some = run(CASE, conv_norm_pool, tensors, grad_out, subset, path=path)
    wanted = [g if take else None for g, take in zip(full[1:], subset, strict=True)]
    assert_same_bits(some, [full[0], *wanted])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "no_affine"])
def test_row_absent_parameters(bias: bool, affine: bool, device: str, path: str) -> None:
    """Affine off, bias off, in every combination."""
    case = replace(CASE, bias=bias, affine=affine)
    tensors = case.tensors(torch.float32, device)
    grad_out = case.grad_out(torch.float32, device)
    assert_accurate(case, ours(case, tensors, grad_out, path=path), tensors, grad_out)


@pytest.mark.parametrize("one", ["norm_weight", "norm_bias"])
def test_one_affine_parameter(one: str, device: str, path: str) -> None:
    x, w, b, gamma, _ = CASE.tensors(torch.float32, device)
    assert gamma is not None
    given = {one: gamma.requires_grad_()}
    out = conv_norm_pool(x, w, b, num_groups=2, path=path, **given)
    out.sum().backward()
    other = "norm_bias" if one == "norm_weight" else "norm_weight"
    both = {one: gamma, other: torch.full_like(gamma, float(other == "norm_weight"))}
    near = {"rtol": 1e-5, "atol": 1e-6}
    assert torch.allclose(out, conv_norm_pool(x, w, b, num_groups=2, path=path, **both), **near)
    assert gamma.grad is not None and gamma.grad.isfinite().all()


def smooth(case: Case) -> list[Tensor]:
    """Float64 tensors on CPU whose convolution keeps clear of hardswish's knees."""
    return [t.requires_grad_() for t in doubled(case.tensors(torch.float64, "cpu", spread=0.3))
            if t is not None]  # fmt: skip


@pytest.mark.parametrize("way", ["fused", "two_stage", "eager"])
@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, name="strided", stride=(2, 1, 2), dilation=(2, 1, 1)),
        replace(TINY, name="grouped", groups=2),
        replace(TINY, name="silu", activation="silu"),
    ],
    ids=str,
)
def test_gradcheck(case: Case, way: str) -> None:
    """The layer's float64 gradients against finite differences."""
    function = lambda *t: case.call(conv_norm_pool, t, path=way)  # noqa: E731
    assert gradcheck(function, smooth(case), fast_mode=way == "eager")


def test_gradcheck_of_the_operators() -> None:
    y = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    mean, rest = torch.randn(2, 4), torch.rand(2, 4) + 1
    gamma, beta = torch.randn(2, 4)
    rows = [t.double().requires_grad_() for t in (mean, rest, gamma, beta)]
    assert gradcheck(lambda y: ops.act_moments(y, "mish"), (y,))
    assert gradcheck(
        lambda mean, m2, gamma, beta: ops.group_norm_pool(mean, m2, 7, gamma, beta, 2, 1e-5)[0],
        rows,
    )
    x, w, b, *_ = smooth(TINY)
    arguments = ((1, 1, 1), (1, 0, 1), (1, 1, 1), 1, "hardswish", "ieee", "two_stage")
    assert gradcheck(lambda *t: ops.conv_act_moments(*t, *arguments), (x, w, b))


def test_row_double_backward(device: str, any_path: str) -> None:
    """create_graph=True: right through the eager path, otherwise one clear error."""
    tensors = CASE.tensors(torch.float64, device)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    out = CASE.call(conv_norm_pool, leaves, path=any_path)
    (dx,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    if any_path != "eager":
        with pytest.raises(RuntimeError, match=r"can't be differentiated again.*path='eager'"):
            dx.sum().backward()
        return
    assert gradgradcheck(
        lambda *t: CASE.call(conv_norm_pool, t, path="eager"), smooth(CASE), fast_mode=True
    )


def test_create_graph_without_a_second_derivative(device: str, any_path: str) -> None:
    """Wanting the graph alone changes no gradient."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    out = CASE.call(conv_norm_pool, leaves, path=any_path)
    grads = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    wanted = ours(CASE, tensors, grad_out, path=any_path)[1:]
    if any_path == "eager":  # PyTorch takes other formulas then
        for a, b in zip(grads, wanted, strict=True):
            assert b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    else:
        assert_same_bits(grads, wanted)


def test_row_double_backward_of_the_operators(device: str) -> None:
    """Never silently a constant: the operators' gradients can't be differentiated either."""
    y = torch.randn(2, 4, 9, device=device, requires_grad=True)
    (dy,) = torch.autograd.grad(ops.act_moments(y, "hardswish")[1].sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiat"):
        (dy.sum() + y.sum()).backward()
    mean = torch.randn(2, 4, device=device, requires_grad=True)
    out = ops.group_norm_pool(mean, mean.detach() ** 2, 9, None, None, 2, 1e-5)[0]
    (grad,) = torch.autograd.grad(out[0, 0], mean, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiat"):
        (grad.sum() + mean.sum()).backward()


def test_backward_twice(device: str, path: str) -> None:
    """A retained graph gives the same gradients again; a freed one says so."""
    tensors = CASE.tensors(torch.float32, device)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    out = CASE.call(conv_norm_pool, leaves, path=path).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert_same_bits(first, torch.autograd.grad(out, leaves))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


@pytest.mark.parametrize("which", range(5), ids=PARAMETERS)
def test_in_place_edit_raises(which: int, device: str, path: str) -> None:
    """A tensor that the backward needs and that was written to since is an error."""
    leaves = [
        None if t is None else t.requires_grad_() for t in CASE.tensors(torch.float32, device)
    ]
    out = CASE.call(conv_norm_pool, leaves, path=path)
    with torch.no_grad():
        edited = leaves[which]
        assert edited is not None
        edited += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpoint(reentrant: bool, device: str, any_path: str) -> None:
    layer = ConvNormPool3d(2, 4, (2, 3, 2), 2, path=any_path, device=device)
    x = torch.randn(2, 2, 3, 4, 4, device=device, requires_grad=True)
    layer(x).square().sum().backward()
    wanted = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_bits([x.grad, *(p.grad for p in layer.parameters())], wanted)


def test_gradients_of_cut_samples(device: str) -> None:
    """Samples that are cut into slabs on CPU, and no gradient but the weight's wanted."""
    tensors = SLABS.tensors(torch.float32, device)
    grad_out = SLABS.grad_out(torch.float32, device)
    full = ours(SLABS, tensors, grad_out, path="two_stage")
    assert_accurate(SLABS, full, tensors, grad_out)
    wanted = (False, True, False, False, False)
    alone = run(SLABS, conv_norm_pool, tensors, grad_out, wanted, path="two_stage")
    assert_same_bits(alone[2:3], full[2:3])
