"""torch.func: vmap over inputs and parameters, gradients, per-sample gradients, jvp's error."""

from __future__ import annotations

import pytest
import torch
from helpers import Case
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

from convnormpool import ConvNormPool3d, conv_norm_pool, ops, reference

CASE = Case("small", (2, 3, 4, 5, 6), 8, (2, 3, 3), 4, padding=(1, 0, 1))
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def tensors(device: str) -> list[Tensor]:
    return [t for t in CASE.tensors(torch.float32, device) if t is not None]


def layer(path: str, *given: Tensor) -> Tensor:
    return CASE.call(conv_norm_pool, given, path=path)


def test_vmap_over_inputs(device: str, path: str) -> None:
    """The mapped dimension joins the batch, wherever it is."""
    x, *rest = tensors(device)
    xs = torch.stack([x, x * 2, x - 1], dim=3)
    found = vmap(lambda x: layer(path, x, *rest), in_dims=3)(xs)
    wanted = torch.stack([layer(path, x, *rest) for x in xs.unbind(3)])
    assert torch.allclose(found, wanted, **NEAR)


@pytest.mark.parametrize("which", range(1, 5), ids=["w", "b", "gamma", "beta"])
def test_vmap_over_parameters(which: int, device: str, path: str) -> None:
    """An ensemble: parameters mapped, the input not."""
    given = tensors(device)
    stacked = torch.stack([given[which], given[which] * 2])

    def one(value: Tensor) -> Tensor:
        return layer(path, *given[:which], value, *given[which + 1 :])

    found = vmap(one)(stacked)
    assert torch.allclose(found, torch.stack([one(v) for v in stacked]), **NEAR)


def test_grad(device: str, any_path: str) -> None:
    """torch.func.grad of every argument, as autograd in float64."""
    given = tensors(device)
    found = grad(lambda *t: layer(any_path, *t).square().sum(), argnums=tuple(range(5)))(*given)
    leaves = [t.double().requires_grad_() for t in given]
    CASE.call(reference.conv_norm_pool, leaves).square().sum().backward()
    for a, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None and torch.allclose(a.double(), leaf.grad, rtol=1e-3, atol=1e-4)


def test_per_sample_gradients(device: str, path: str) -> None:
    """vmap(grad) over samples gives each what autograd gives it alone."""
    module = ConvNormPool3d(3, 8, (2, 3, 3), 4, path=path, device=device)
    parameters = dict(module.named_parameters())
    x = torch.randn(3, 3, 4, 5, 6, device=device)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        out: Tensor = functional_call(module, parameters, (sample.unsqueeze(0),))
        return out.square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for n in range(3):
        module.zero_grad()
        module(x[n : n + 1]).square().sum().backward()
        for name, p in module.named_parameters():
            assert p.grad is not None and torch.allclose(found[name][n], p.grad, **NEAR), name


def test_vjp_and_value(device: str, path: str) -> None:
    given = tensors(device)
    out, pull = vjp(lambda *t: layer(path, *t), *given)
    wanted = layer(path, *given)
    assert torch.allclose(out, wanted, **NEAR)
    assert [g.shape for g in pull(torch.ones_like(out))] == [t.shape for t in given]
    _, value = grad_and_value(lambda *t: layer(path, *t).sum())(*given)
    assert torch.allclose(value, wanted.sum(), **NEAR)


def test_jvp_is_refused(device: str, any_path: str) -> None:
    """Forward mode: the eager path has it, the others say that they don't."""
    given = tuple(tensors(device))
    tangents = tuple(torch.randn_like(t) for t in given)
    if any_path == "eager" and device == "cpu":
        jvp(lambda *t: layer(any_path, *t), given, tangents)
    elif any_path != "eager":
        with pytest.raises(RuntimeError, match=r"jvp|forward"):
            jvp(lambda *t: layer(any_path, *t), given, tangents)


def test_jacfwd(device: str, any_path: str) -> None:
    """Through the eager path the Jacobian that jacrev finds; the others refuse it."""
    x, *rest = tensors(device)
    if any_path != "eager":
        with pytest.raises(RuntimeError, match=r"jvp|forward"):
            jacfwd(lambda x: layer(any_path, x, *rest))(x)
    elif device == "cpu":
        found, wanted = (j(lambda x: layer("eager", x, *rest))(x) for j in (jacfwd, jacrev))
        assert torch.allclose(found, wanted, **NEAR)


def test_jacobian(device: str, path: str) -> None:
    """jacrev, which maps over the rows of the output, as row by row."""
    x, *rest = tensors(device)
    found = jacrev(lambda x: layer(path, x, *rest))(x)
    leaf = x.clone().requires_grad_()
    out = layer(path, leaf, *rest)
    rows = [torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in out.flatten()]
    assert torch.allclose(found.flatten(0, 1), torch.stack(rows), **NEAR)


@pytest.mark.parametrize("record", [True, False], ids=["grad", "no_grad"])
def test_dual_numbers_are_refused(record: bool, device: str, path: str) -> None:
    """torch.autograd.forward_ad: an error, never a tangent that is lost."""
    x, *rest = tensors(device)
    with torch.set_grad_enabled(record), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"jvp|forward"):
            layer(path, dual, *rest)


def test_gradient_of_a_gradient_is_refused(device: str, any_path: str) -> None:
    """torch.func.grad twice: right through the eager path, otherwise the one clear error."""
    x, *rest = tensors(device)
    inner = grad(lambda x: layer(any_path, x, *rest).square().sum())
    if any_path == "eager":
        assert grad(lambda x: inner(x).sum())(x).isfinite().all()
        return
    with pytest.raises(RuntimeError, match="can't be differentiated again"):
        grad(lambda x: inner(x).sum())(x)


def test_vmap_of_the_operators(device: str) -> None:
    """Batched moments and rows in every position that a rule has to fold."""
    y = torch.randn(2, 3, 8, 5, device=device)
    found = vmap(lambda y: ops.act_moments(y, "hardswish"), in_dims=1)(y)
    for i, alone in enumerate(y.unbind(1)):
        for a, b in zip(found, ops.act_moments(alone, "hardswish"), strict=True):
            assert torch.allclose(a[i], b, **NEAR)
    mean, m2 = torch.randn(4, 3, 8, device=device), torch.rand(3, 8, device=device)
    gamma = torch.randn(8, device=device)
    rows = vmap(lambda mean: ops.group_norm_pool(mean, m2, 5, gamma, None, 2, 1e-5)[0])(mean)
    one_by_one = [ops.group_norm_pool(m, m2, 5, gamma, None, 2, 1e-5)[0] for m in mean]
    assert torch.allclose(rows, torch.stack(one_by_one), **NEAR)
