"""Row about CUDA graphs: captured, changed in place, replayed."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same_bits, ours
from torch import Tensor, nn

from convnormpool import ConvNormPool3d, conv_norm_pool

pytestmark = pytest.mark.cuda

CASE = Case("graph", (8, 3, 6, 16, 16), 16, (3, 3, 3), 4)


def changed(tensors: list[Tensor]) -> None:
    """New values in the same memory."""
    with torch.no_grad():
        for t in tensors:
            t.copy_(torch.randn_like(t) * t.std() + t.mean())


def warm(function: object) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_capture_forward(dtype: torch.dtype, precision: str, device: str, path: str) -> None:
    """Change x, w, gamma in place and replay: the new values' result."""
    tensors = [t for t in CASE.tensors(dtype, "cuda") if t is not None]
    way = path

    def call() -> Tensor:
        return CASE.call(conv_norm_pool, tensors, path=way, fp32_precision=precision)

    warm(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        changed(tensors)
        graph.replay()
        assert_same_bits([out.clone()], [call()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_capture_forward_and_backward(dtype: torch.dtype, device: str, path: str) -> None:
    tensors = [t.requires_grad_() for t in CASE.tensors(dtype, "cuda") if t is not None]
    grad_out = CASE.grad_out(dtype, "cuda")
    way = path

    def call() -> list[Tensor]:
        out = CASE.call(conv_norm_pool, tensors, path=way)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad_out)]

    warm(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for _ in range(3):
        changed([*tensors, grad_out])
        graph.replay()
        found = [t.clone() for t in results]
        assert_same_bits(found, ours(CASE, tensors, grad_out, path=way))


def test_graphed_callables() -> None:
    """``torch.cuda.make_graphed_callables`` of a model with the layer in it."""
    model = nn.Sequential(ConvNormPool3d(3, 16, 3), nn.Linear(16, 5)).cuda()
    x = torch.randn(8, 3, 6, 16, 16, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(2):
        fresh = torch.randn_like(x).requires_grad_()
        graphed(fresh).square().sum().backward()
        assert fresh.grad is not None
        other = fresh.detach().clone().requires_grad_()
        h = nn.functional.linear(
            conv_norm_pool(
                other, model[0].conv.weight, model[0].conv.bias, num_groups=4,
                norm_weight=model[0].group_norm.weight, norm_bias=model[0].group_norm.bias,
            ),
            model[1].weight,
            model[1].bias,
        )  # fmt: skip
        h.square().sum().backward()
        assert other.grad is not None
        assert torch.allclose(fresh.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_two_graphs_interleaved() -> None:
    """Graphs of two models share nothing."""
    layers = [ConvNormPool3d(3, 16, 3).cuda(), ConvNormPool3d(3, 8, 2).cuda()]
    x = torch.randn(8, 3, 6, 16, 16, device="cuda")
    graphs, outputs = [], []
    with torch.no_grad():
        for layer in layers:
            warm(lambda layer=layer: layer(x))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs.append(layer(x))
            graphs.append(graph)
        for _ in range(3):
            changed([x, *(p for layer in layers for p in layer.parameters())])
            for graph in graphs:
                graph.replay()
            for layer, out in zip(layers, outputs, strict=True):
                assert torch.equal(out, layer(x))


def test_reduce_overhead_mode() -> None:
    """torch.compile's own graphs."""
    model = nn.Sequential(ConvNormPool3d(3, 16, 3), nn.Linear(16, 5)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(4, 3, 6, 8, 8, device="cuda")
        found = [g.clone() for g in torch.autograd.grad(compiled(x).sum(), model.parameters())]
        wanted = torch.autograd.grad(model(x).sum(), model.parameters())
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
