"""One and two spatial axes, and inputs without a batch, as functions and as modules."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, HALVES, Case, assert_accurate, run
from torch import Tensor, nn

import convnormpool
from convnormpool import conv_norm_pool, explain, reference

# Problems with three axes that are really of one or two.
FLAT: dict[int, tuple[Case, ...]] = {
    1: (
        Case("plain", (3, 4, 1, 1, 29), 16, (1, 1, 5), 4, padding=(0, 0, 2)),
        Case(
            "strided", (2, 6, 1, 1, 31), 8, (1, 1, 4), 2, (1, 1, 3), (0, 0, 1), (1, 1, 2), 2, "mish"
        ),
    ),
    2: (
        Case("plain", (3, 3, 1, 17, 19), 16, (1, 3, 3), 4, padding=(0, 1, 0)),
        Case(
            "strided", (2, 6, 1, 15, 14), 8, (1, 2, 3), 2, (1, 2, 1), (0, 1, 2), (1, 1, 2), 2, "elu"
        ),
    ),
}
EACH = [pytest.param(axes, case, id=f"{axes}d-{case}") for axes in FLAT for case in FLAT[axes]]


def flattened(function: Any, axes: int) -> Any:
    """``function`` on the last axes of what it is given."""

    def call(x: Tensor, w: Tensor, b: Tensor | None, **options: Any) -> Tensor:
        for name in ("stride", "padding", "dilation"):
            options[name] = options[name][-axes:]
        for _ in range(3 - axes):
            x, w = x.squeeze(2), w.squeeze(2)
        out: Tensor = function(x, w, b, **options)
        return out

    return call


@pytest.mark.parametrize(("axes", "case"), EACH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fewer_axes(axes: int, case: Case, dtype: torch.dtype, device: str, any_path: str) -> None:
    """Output and gradients are those of the same problem over three axes."""
    tensors, grad_out = case.tensors(dtype, device), case.grad_out(dtype, device)
    found = run(case, flattened(conv_norm_pool, axes), tensors, grad_out, path=any_path)
    like_eager = any_path == "eager" or None
    assert_accurate(case, found, tensors, grad_out, like_eager=like_eager)


@pytest.mark.parametrize("axes", FLAT)
def test_reference_is_the_library_convolution(axes: int, device: str) -> None:
    case = FLAT[axes][1]
    x, w, b, gamma, beta = case.tensors(torch.float64, device)
    assert x is not None and w is not None
    found = case.call(flattened(reference.conv_norm_pool, axes), [x, w, b, gamma, beta])
    convolution = {1: F.conv1d, 2: F.conv2d}[axes]
    for _ in range(3 - axes):
        x, w = x.squeeze(2), w.squeeze(2)
    options = {n: v[-axes:] if isinstance(v, tuple) else v for n, v in case.convolution.items()}
    y = reference.ACTIVATIONS[case.activation](convolution(x, w, b, **options))
    right = F.group_norm(y, case.num_groups, gamma, beta, case.eps).flatten(2).mean(dim=2)
    torch.testing.assert_close(found, right)


def layer_and_chain(axes: int, **options: Any) -> tuple[Any, nn.Sequential]:
    """A layer and the eager chain of modules, made from the same seed."""
    torch.manual_seed(3)
    layer = getattr(convnormpool, f"ConvNormPool{axes}d")(4, 8, 3, 2, **options)
    torch.manual_seed(3)
    options = {name: value for name, value in options.items() if name != "path"}
    conv = getattr(nn, f"Conv{axes}d")(4, 8, 3, **options)
    chain = nn.Sequential(conv, nn.Hardswish(), nn.GroupNorm(2, 8))
    return layer, chain


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": "same", "padding_mode": "replicate"}, {"padding": 1, "stride": 2}],
    ids=str,
)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_modules(axes: int, options: dict[str, Any], device: str, any_path: str) -> None:
    """The same initial values as the chain, the same results, batched or not."""
    layer, chain = layer_and_chain(axes, path=any_path, **options)
    layer, chain = layer.to(device), chain.to(device).double()
    x = torch.randn(3, 4, *(7, 8, 9)[:axes], device=device) * 3
    right = chain(x.double()).flatten(2).mean(dim=2)
    found = layer(x)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x[1]), found[1], rtol=1e-4, atol=1e-5)
    assert layer(x[1]).shape == (8,)
    assert explain(layer, x).path == explain(layer, x[1]).path
    assert repr(layer).startswith(f"ConvNormPool{axes}d(") and f"Conv{axes}d(4, 8" in repr(layer)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), found)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_hooks_without_a_batch(axes: int, device: str) -> None:
    layer, _ = layer_and_chain(axes)
    layer = layer.to(device)
    x = torch.randn(4, *(7, 8, 9)[:axes], device=device)
    plain, calls = layer(x), []
    layer.conv.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-5)
    assert calls == [1]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_without_a_batch(dtype: torch.dtype, device: str, path: str) -> None:
    case = replace(FLAT[2][0], input=(1, 3, 1, 17, 19))

    def unbatched(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return conv_norm_pool(x.squeeze(0), *args, **options).unsqueeze(0)

    tensors, grad_out = case.tensors(dtype, device), case.grad_out(dtype, device)
    found = run(case, unbatched, tensors, grad_out, path=path)
    assert_accurate(case, found, tensors, grad_out)


@pytest.mark.parametrize("axes", [1, 2])
def test_in_one_graph(axes: int, device: str) -> None:
    layer, _ = layer_and_chain(axes, padding=1)
    layer = layer.to(device)
    x = torch.randn(3, 4, *(9, 8)[:axes], device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_symbolic_extents(axes: int) -> None:
    """With "same" padding the number of positions of one axis is the input's own symbol."""
    layer, _ = layer_and_chain(axes, padding="same")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for x in (torch.randn(4, *(9, 8, 7)[:axes]), torch.randn(2, 4, *(6, 5, 9)[:axes])):
        grads = []
        for call in (layer, compiled):
            layer.zero_grad()
            call(x).square().sum().backward()
            grads.append([p.grad for p in layer.parameters()])
        torch.testing.assert_close(grads[1], grads[0])


def test_one_number_per_axis() -> None:
    x, w = torch.ones(2, 4, 9, 9), torch.ones(8, 4, 3, 3)
    for name in ("stride", "padding", "dilation"):
        with pytest.raises(ValueError, match=f"{name} must be one number or 2"):
            conv_norm_pool(x, w, num_groups=2, **{name: (1, 1, 1)})
    with pytest.raises(ValueError, match="input is too small along height"):
        conv_norm_pool(x, torch.ones(8, 4, 10, 3), num_groups=2)
    with pytest.raises(TypeError, match="explain takes a layer or a weight; got Conv2d"):
        explain(nn.Conv2d(4, 8, 3), x)
