"""Plain calls that spare the operators' dispatch: the same bits, and who gets the operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import DTYPES, Case, assert_accurate, assert_same_bits, ours, run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from convnormpool import _autograd, conv_norm_pool, explain

CASE = Case("direct", (3, 3, 5, 6, 16), 16, (3, 3, 3), 4)
FORWARD = {"convnormpool::conv_act_moments", "convnormpool::group_norm_pool"}
BACKWARD = {f"{name}_backward" for name in FORWARD}
Make = Callable[[], Any]


class Dispatched(TorchDispatchMode):
    """The names of the operators that reach a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """The same, of a mode for functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "_qualified_op_name", ""))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor of another class, which notes what is called."""

    names: set[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.add(getattr(func, "_qualified_op_name", ""))
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def no_operators() -> Iterator[None]:
    """The layer can't reach its operators meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_autograd, "ops", None)
        yield


def results(
    tensors: list[Tensor | None], grad_out: Tensor, path: str, during: Make, after: Make
) -> list[Tensor | None]:
    """Output and gradients, with one context around the forward and one around the backward."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    with during():
        out = CASE.call(conv_norm_pool, leaves, path=path)
    with after():
        grads = torch.autograd.grad(out, [t for t in leaves if t is not None], grad_out)
    return [out.detach(), *grads]


@pytest.mark.parametrize(
    ("dtype", "low"),
    [*((dtype, None) for dtype in DTYPES), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_same_bits(dtype: torch.dtype, low: torch.dtype | None, device: str, path: str) -> None:
    """Straight to the compiled operators or through the public ones, forward and backward."""
    tensors = CASE.tensors(dtype, device)
    x, w, *_ = tensors
    assert x is not None and w is not None
    with torch.autocast(device, low) if low else nullcontext():
        way = path if explain(w, x).path == "fused" else "two_stage"
        grad_out = torch.randn_like(CASE.call(conv_norm_pool, tensors, path=way))
        wanted = results(tensors, grad_out, way, Dispatched, Dispatched)
        contexts = (nullcontext, no_operators)
        for during, after in itertools.product(contexts, contexts):
            assert_same_bits(results(tensors, grad_out, way, during, after), wanted)
        with torch.no_grad(), no_operators():
            assert_same_bits([CASE.call(conv_norm_pool, tensors, path=way)], wanted[:1])


# Channels and groups over the three kinds of kernels: wgmma, mma.sync and the taps.
TAILS = [
    Case(f"{name}_{channels}_{num_groups}", (samples, *volume), channels, filter, num_groups)
    for name, volume, filter in (
        ("wgmma", (3, 5, 9, 32), (4, 4, 4)),
        ("window", (1, 4, 5, 37), (3, 3, 3)),
        ("taps", (2, 4, 20, 13), (1, 5, 3)),
    )
    for samples, channels, num_groups in (
        (1, 1, 1),
        (3, 7, 7),
        (130, 16, 4),
        (3, 24, 2),
        (2, 257, 1),
    )
]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", TAILS, ids=str)
def test_one_launch_behind_the_convolution(case: Case, dtype: torch.dtype, precision: str) -> None:
    """It merges and normalises; behind the operator of the moments two do."""
    tensors = case.tensors(dtype, "cuda")

    def call() -> Tensor:
        return case.call(conv_norm_pool, tensors, path="fused", fp32_precision=precision)

    with torch.no_grad(), Dispatched():
        wanted = call()
    with torch.no_grad(), no_operators():
        # What stands in memory that is used again is neither read nor left there.
        torch.full((1 << 22,), torch.nan, device="cuda")
        assert_same_bits([call()], [wanted])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for _ in range(2):
            captured.fill_(torch.nan)
            graph.replay()
            assert_same_bits([captured.clone()], [wanted])


def test_subsets_of_gradients(device: str, path: str) -> None:
    """As by the operators, and equal to the full run.

    To the last bit, but for what a kernel of the convolution's gradients forms on CUDA: which one
    runs depends on the subset. Each of those is as near to float64 as the full run has to be.
    """
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    full = ours(CASE, tensors, grad_out, path=path)
    for subset in itertools.product((False, True), repeat=5):
        if any(subset):
            with no_operators():
                some = run(CASE, conv_norm_pool, tensors, grad_out, subset, path=path)
            with Dispatched() as mode:
                wanted = run(CASE, conv_norm_pool, tensors, grad_out, subset, path=path)
            assert mode.names >= FORWARD | {"convnormpool::group_norm_pool_backward"}
            assert_same_bits(some, wanted)
            filled = [f if w is None else w for w, f in zip(wanted, full, strict=True)]
            assert [w is None for w in wanted[1:]] == [not take for take in subset]
            if device == "cpu" or path == "two_stage":
                assert_same_bits(filled, full)
            else:
                assert_same_bits([filled[0], *filled[4:]], [full[0], *full[4:]])
                assert_accurate(CASE, filled, tensors, grad_out)


def test_modes_see_the_operators(device: str, path: str) -> None:
    """In the forward, in the backward, and in both."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    for mode in (Dispatched, Called):
        forward, backward = mode(), mode()
        results(tensors, grad_out, path, lambda mode=forward: mode, nullcontext)
        assert forward.names >= FORWARD
        results(tensors, grad_out, path, nullcontext, lambda mode=backward: mode)
        assert mode is Called or backward.names >= BACKWARD


@pytest.mark.parametrize("which", range(5))
def test_subclasses_see_the_operators(which: int, device: str, path: str) -> None:
    tensors = CASE.tensors(torch.float32, device)
    wanted = CASE.call(conv_norm_pool, tensors, path=path)
    given = tensors[which]
    assert given is not None
    Subclass.names = set()
    tensors[which] = given.as_subclass(Subclass)
    found = CASE.call(conv_norm_pool, tensors, path=path)
    assert "convnormpool::conv_act_moments" in Subclass.names or which > 2
    assert_same_bits([found.as_subclass(Tensor)], [wanted])


def test_gradients_in_batches(device: str, path: str) -> None:
    """is_grads_batched maps over the backward of a plain call."""
    tensors = CASE.tensors(torch.float32, device)
    leaves = [t.requires_grad_() for t in tensors if t is not None]
    out = CASE.call(conv_norm_pool, leaves, path=path)
    rows = torch.randn(3, *out.shape, device=device)
    found = torch.autograd.grad(out, leaves, rows, retain_graph=True, is_grads_batched=True)
    for i, row in enumerate(rows):
        alone = torch.autograd.grad(out, leaves, row, retain_graph=True)
        assert_same_bits([g[i] for g in found], alone)


def test_gradient_that_is_expanded_or_strided(device: str, path: str) -> None:
    tensors = CASE.tensors(torch.float32, device)
    leaves = [t.requires_grad_() for t in tensors if t is not None]
    out = CASE.call(conv_norm_pool, leaves, path=path)
    for given in (
        torch.randn((), device=device).expand(out.shape),
        torch.randn(out.shape[::-1], device=device).t(),
    ):
        found = torch.autograd.grad(out, leaves, given, retain_graph=True)
        wanted = torch.autograd.grad(out, leaves, given.contiguous(), retain_graph=True)
        assert_same_bits(found, wanted)


def test_negated_views(device: str, path: str) -> None:
    """A tensor whose sign is a bit of its own: what is read is its value."""
    x, w, *rest = CASE.tensors(torch.float32, device)
    assert x is not None and w is not None
    wanted = CASE.call(conv_norm_pool, [-x, -w, *rest], path=path)
    views = [torch._neg_view(x), torch._neg_view(w), *rest]
    assert_same_bits([CASE.call(conv_norm_pool, views, path=path)], [wanted])


def test_the_path_is_that_of_the_forward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward does not look at the environment again."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    wanted = ours(CASE, tensors, grad_out)

    @contextmanager
    def elsewhere() -> Iterator[None]:
        monkeypatch.setenv("CONVNORMPOOL_PATH", "two_stage")
        yield
        monkeypatch.delenv("CONVNORMPOOL_PATH")

    assert_same_bits(results(tensors, grad_out, "auto", nullcontext, elsewhere), wanted)


@pytest.mark.parametrize("path", ["fused", "two_stage"])
def test_strided_saved_tensors(path: str) -> None:
    """A hook on saved tensors may give them out with other strides."""
    case = Case("strided", (2, 3, 4, 5, 6), 8, (2, 2, 2), 2)
    tensors = [t for t in case.tensors(torch.float32, "cpu") if t is not None]
    convolution = {"num_groups": case.num_groups, "path": path}

    def gradients(strided: bool) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        x, w, b, gamma, beta = leaves
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach(), lambda t: torch.stack([t, t], -1)[..., 0] if strided else t
        ):
            out = conv_norm_pool(x, w, b, norm_weight=gamma, norm_bias=beta, **convolution)
        return torch.autograd.grad(out.square().sum(), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("path", ["fused", "two_stage"])
def test_zeros_without_memory_as_gradient(path: str) -> None:
    case = Case("zeros", (2, 3, 4, 5, 6), 8, (2, 2, 2), 2)
    leaves = [t.requires_grad_() for t in case.tensors(torch.float32, "cpu") if t is not None]
    x, w, b, gamma, beta = leaves
    out = conv_norm_pool(
        x, w, b, num_groups=case.num_groups, norm_weight=gamma, norm_bias=beta, path=path
    )
    zeros = torch._efficientzerotensor(out.shape, dtype=out.dtype, device=out.device)
    assert not any(grad.any() for grad in torch.autograd.grad(out, leaves, zeros))
