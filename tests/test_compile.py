"""torch.compile and torch.export: whole graphs, no recompiles, the results of the plain call."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Case
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import make_boxed_compiler

from convnormpool import ConvNormPool3d, conv_norm_pool

CASE = Case("small", (2, 3, 4, 5, 6), 8, (2, 3, 3), 4, padding=(1, 0, 1))
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """The layer inside something larger."""

    def __init__(self, path: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 6, 1, dtype=dtype)
        self.layer = ConvNormPool3d(6, 8, 3, 4, padding="same", path=path, dtype=dtype)
        self.head = nn.Linear(8, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.layer(torch.relu(self.stem(x)))))
        return out


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    out.square().sum().backward()
    found = [out, leaf.grad, *(p.grad for p in model.parameters())]
    return [t.detach().clone() for t in found if t is not None]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, **NEAR)


@pytest.mark.parametrize("record", [True, False], ids=["grad", "no_grad"])
def test_compiled_code_calls_the_operators(record: bool, device: str, path: str) -> None:
    """And not the eager path, which would give the same results."""
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model = Model(path).to(device)
    backend = aot_autograd(fw_compiler=make_boxed_compiler(note))
    x = torch.randn(2, 3, 5, 6, 7, device=device)
    with torch.set_grad_enabled(record):
        torch.compile(model, fullgraph=True, backend=backend)(x)
    assert "convnormpool.conv_act_moments.default" in called
    assert not any("group_norm.default" in name for name in called)


def test_model_in_one_graph(device: str, any_path: str) -> None:
    """fullgraph, forward and gradients, as traced; what is generated is another test's."""
    model = Model(any_path).to(device)
    x = torch.randn(2, 3, 5, 6, 7, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_near(gradients(compiled, model, x), gradients(model, model, x))
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), **NEAR)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_generated_code(mode: str, device: str) -> None:
    """The default backend; what ``reduce-overhead`` captures is replayed from the third call on."""
    model = Model("auto").to(device)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(1 if mode == "default" else 4):
        x = torch.randn(2, 3, 5, 6, 7, device=device)
        assert_near(gradients(compiled, model, x), gradients(model, model, x))


def test_no_recompiles_over_batch_sizes(device: str) -> None:
    """One graph for every batch with dynamic=True, gradients included."""
    model = ConvNormPool3d(3, 8, 3, 4).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (2, 3, 7, 16):
            x = torch.randn(batch, 3, 5, 6, 7, device=device)
            assert_near(gradients(compiled, model, x), gradients(model, model, x))


@pytest.mark.parametrize("padding", ["same", "valid", 1])
def test_function(padding: Any, device: str) -> None:
    """``conv_norm_pool`` itself, without bias and norm, with an even kernel."""
    x, w, *_ = CASE.tensors(torch.float32, device)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return conv_norm_pool(x, w, num_groups=4, padding=padding)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, w), call(x, w), **NEAR)


def test_gradient_transform(device: str) -> None:
    """torch.compile(torch.func.grad(f)): the right gradients or a loud error, never silent zeros.

    PyTorch 2.11 does not trace it on CUDA.
    """
    given = [t for t in CASE.tensors(torch.float32, device) if t is not None]

    def loss(*t: Tensor) -> Tensor:
        return CASE.call(conv_norm_pool, t).square().sum()

    gradient = torch.func.grad(loss, argnums=tuple(range(5)))
    wanted = gradient(*given)
    assert all(g.any() for g in wanted)
    try:
        found = torch.compile(gradient, backend="aot_eager")(*given)
    except torch._dynamo.exc.TorchDynamoException:
        return
    assert_near(list(found), list(wanted))


def test_autocast(device: str) -> None:
    model = ConvNormPool3d(3, 8, 3, 4).to(device)
    x = torch.randn(2, 3, 5, 6, 7, device=device)

    def low(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            out: Tensor = model(x)
            return out

    found, wanted = torch.compile(low, fullgraph=True, backend="aot_eager")(x), low(x)
    assert found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=0.02, atol=0.02)


def test_errors_keep_their_words(device: str) -> None:
    compiled = torch.compile(
        lambda x, w: conv_norm_pool(x, w, num_groups=3), backend="aot_eager", fullgraph=True
    )
    x, w = torch.randn(2, 3, 4, 4, 4, device=device), torch.randn(8, 3, 3, 3, 3, device=device)
    with pytest.raises(Exception, match="num_groups must be at least 1 and divide"):
        compiled(x, w)


def test_export_with_a_dynamic_batch(device: str) -> None:
    """A program that runs at other batch sizes, and holds the package's operators."""
    model = Model("auto").to(device).eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    x = torch.randn(3, 3, 5, 6, 7, device=device)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}})
    targets = {str(node.target) for node in program.graph.nodes}
    assert "convnormpool.conv_act_moments.default" in targets
    assert "convnormpool.group_norm_pool.default" in targets
    for samples in (1, 3, 8):
        x = torch.randn(samples, 3, 5, 6, 7, device=device)
        assert torch.allclose(program.module()(x), model(x), **NEAR)


def test_exported_program_is_saved_and_differentiated(device: str) -> None:
    """What is loaded again gives eager's output and gradients, at another batch size."""
    model = Model("auto").to(device)
    batch = torch.export.Dim("batch", min=1, max=4096)
    example = torch.randn(3, 3, 5, 6, 7, device=device)
    stored = io.BytesIO()
    torch.export.save(
        torch.export.export(model, (example,), dynamic_shapes={"x": {0: batch}}), stored
    )
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    x = torch.randn(5, 3, 5, 6, 7, device=device)
    assert_near(gradients(loaded, loaded, x), gradients(model, model, x))


def test_pinned_path_is_refused_when_it_runs(device: str) -> None:
    """Compiled code asks the planner when it runs: the refusal is the planner's sentence."""
    layer = ConvNormPool3d(64, 8, 3, path="fused").to(device)
    compiled = torch.compile(layer, backend="aot_eager")
    with pytest.raises(ValueError, match="path 'fused' can't run"):
        compiled(torch.randn(1, 64, 4, 4, 4, device=device))
