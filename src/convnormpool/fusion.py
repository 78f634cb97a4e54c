"""Rewrites a user's model in place: convolution, activation, GroupNorm and global mean as one call.

A place is found by tracing forward code symbolically (torch.fx) and matching what stands there
(_patterns). Nothing of the model is replaced but the forward of the innermost module whose call
contains the place whole: that module gets a class derived from its own, whose forward runs the
traced code with the place as one call. Submodules, parameters, buffers, hooks and names stay.

Tracing sees one run of Python code, so what decided it is written down: the plain attributes that
forward code read, which parameters, buffers and submodules it found and which it did not, the
classes of the modules that were looked into, hooks, and whatever the place takes for granted of its
own modules. All that is compared at each call; where anything has changed since, the module's
original forward runs. Forward code that a graph can't stand for is refused: it asks for the types
of tensors, compares objects by identity, catches exceptions, draws random numbers (_watch), and
what it has changed of its modules meanwhile is put back (_ambient). What is not seen is a change of
global variables.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from . import _checks
from ._patterns import Chain, chains
from ._rewritten import (
    Code,
    Fused,
    Fusion,
    Path,
    Place,
    Variant,
    class_of,
    run_place,
    set_fusion,
    shared_members,
)
from ._steps import Kept, has_hooks
from ._tracing import LAYERS, NotTraceable, Tracer, closed, opaque

__all__ = ["FusedPlace", "FusionReport", "RefusedPlace", "fuse_", "unfuse_"]


@dataclass(frozen=True)
class FusedPlace:
    """A place that was rewritten.

    Attributes:
        name: the qualified name of its convolution.
        description: the steps that are one call now, and whose forward contains them.
    """

    name: str
    description: str


@dataclass(frozen=True)
class RefusedPlace:
    """A place that looks like the layer and was left as it is.

    Attributes:
        name: the qualified name of its convolution, or of the module whose forward it is in.
        reason: why, in words.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """What ``fuse_`` did. True where it rewrote something; its length is the number of places."""

    fused: tuple[FusedPlace, ...] = ()
    refused: tuple[RefusedPlace, ...] = ()

    def __len__(self) -> int:
        return len(self.fused)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} fused, {len(self.refused)} refused"]
        lines += [f"fused {place.name}: {place.description}" for place in self.fused]
        lines += [f"refused {place.name}: {place.reason}" for place in self.refused]
        return "\n".join(lines)


def fuse_(
    model: nn.Module,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    fp32_precision: str = "ieee",
) -> FusionReport:
    """Rewrites a model in place to use ``conv_norm_pool`` wherever it is equivalent.

    Looks for Conv1d, Conv2d or Conv3d, an activation, GroupNorm and the mean over all spatial
    dimensions, in ``nn.Sequential``, in blocks of any library, and in forward code. Parameters stay
    the same objects under the same names, so optimisers and checkpoints keep working; shapes and
    dtypes of results stay, too. Modules that are called several times are not changed themselves:
    each call is judged by itself. A fused place that gets an input without a batch dimension runs
    the original steps, as does a module with hooks or settings that have changed since. A second
    call leaves fused places as they are.

    A rewritten forward computes what the original does in its present modes and settings, and is
    copied and pickled with its module. Python code that does more than compute (prints, timers) is
    not repeated by it, and a later change of global variables is not seen. Inputs that are no
    tensors make the original forward run. A rewritten module's class is derived from its own:
    ``isinstance(module, Block)`` holds, ``type(module) is Block`` does not. Fused places have first
    derivatives in reverse mode; others raise. For TorchScript and torch.fx call ``unfuse_`` first.
    Not to be called while other threads run modules: torch.fx patches them meanwhile.

    Args:
        model: any module; it may itself be the block that is rewritten.
        filter: gets the qualified name of a place's convolution and the convolution, and says
            whether the place may be rewritten; None for all.
        fp32_precision: "ieee" or "tf32", how the fused places form float32 products on CUDA. As for
            ``conv_norm_pool``, PyTorch's global tf32 settings, which the original convolution
            followed, decide nothing.

    Returns:
        What was rewritten, and what looks like it but is not equivalent, with the reason.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an ``fp32_precision`` that there is not.
    """
    _is_module(model)
    _checks.choice("fp32_precision", fp32_precision, _checks.PRECISIONS)
    return _Fuser(model, filter, fp32_precision).run()


def unfuse_(model: nn.Module) -> int:
    """Takes back what ``fuse_`` did to a model: its modules get their own classes and forwards.

    Args:
        model: a module that ``fuse_`` was called on, or a part or a copy of it.

    Returns:
        The number of places taken back.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a module's class was replaced once more after ``fuse_``, as parametrizations
            and ``fully_shard`` do; that has to be taken back first.
    """
    _is_module(model)
    fused = [(name, m) for name, m in model.named_modules() if issubclass(type(m), Fused)]
    for name, module in fused:
        kind = type(module)
        if class_of(module) is kind:
            raise RuntimeError(
                f"{name or 'the model'} got another class after fuse_ ({kind.__name__}): "
                "undo that first, then call unfuse_"
            )
    return sum(set_fusion(module, None) for _, module in fused)


def _is_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")


class _Fuser:
    """One call of ``fuse_``."""

    def __init__(
        self,
        model: nn.Module,
        filter: Callable[[str, nn.Module], bool] | None,
        fp32_precision: str,
    ) -> None:
        self.model = model
        self.filter = filter
        self.fp32_precision = fp32_precision
        self.graphs: dict[nn.Module, fx.Graph] = {}
        self.reasons: dict[nn.Module, str] = {}
        self.fused: dict[FusedPlace, None] = {}
        self.refused: dict[RefusedPlace, None] = {}

    def run(self) -> FusionReport:
        modules = list(self.model.named_modules())
        fusions: list[tuple[nn.Module, Fusion]] = []
        if any(isinstance(module, _ConvNd) for _, module in modules):
            self._trace(self.model)
            for name, module in modules:
                fusion = self._fuse(name, module)
                if fusion is not None:
                    fusions.append((module, fusion))
        for module, fusion in fusions:
            set_fusion(module, fusion)
        return FusionReport(tuple(self.fused), tuple(self.refused))

    def _trace(self, module: nn.Module) -> None:
        """Traces a module's forward, after those that it may call."""
        if module in self.reasons:
            return
        self.reasons[module] = closed(module)
        for part in module.children():
            self._trace(part)
        if opaque(module) or class_of(module).forward is nn.Module.forward:
            return
        try:
            self.graphs[module], _ = Tracer(self._untraced).graph_of(module)
        except Exception as error:
            self.reasons[module] = _words(error)

    def _untraced(self, module: nn.Module) -> bool:
        return bool(self.reasons.get(module, True)) or opaque(module)

    def _fuse(self, prefix: str, root: nn.Module) -> Fusion | None:
        """The new forward of a module in which there is something to fuse."""
        shown = f"{prefix} ({class_of(root).__name__})" if prefix else class_of(root).__name__
        try:
            modules = dict(root.named_modules(remove_duplicate=False))
        except Exception as error:  # of a named_modules of its own
            self.refused[RefusedPlace(prefix or shown, _words(error))] = None
            return None
        old: Fusion | None = root.__dict__.get("_convnormpool_fusion")
        if old is not None and not any(variant.holds(root) for variant in old.variants):
            old = None  # of what the module was once
        before = {p.convolution: p.fp32_precision for p in old.places} if old else {}
        precisions = dict(before)
        if root not in self.graphs:
            if self.reasons[root] and _looks_alike(root, modules.values()):
                self.refused[RefusedPlace(prefix or shown, self.reasons[root])] = None
            return None
        scopes: set[str] = set()
        fused: list[FusedPlace] = []
        for chain, within, problem in self._candidates(prefix, root, modules, before):
            key = chain.steps[0].module
            name = f"{prefix}.{key}".lstrip(".")
            if problem:
                self.refused[RefusedPlace(name, problem)] = None
                continue
            scopes.update(within)
            if key in before:
                self.refused[RefusedPlace(name, "it is fused already")] = None
            elif key not in precisions:  # a convolution that is called twice is one place
                precisions[key] = self.fp32_precision
                fused.append(FusedPlace(name, f"{chain} in the forward of {shown}"))
        if not fused:
            return None
        places: list[Place] = []
        try:
            variants = [self._variant(root, precisions, scopes, places)]
        except Exception as error:
            self.refused.update({RefusedPlace(place.name, _words(error)): None for place in fused})
            return None
        if any(name == "training" for _, name, _ in variants[0].reads):
            # Where that can't be traced the original forward runs in that mode.
            with _other_mode(root), suppress(NotTraceable):
                variants.append(self._variant(root, precisions, scopes, places))
        self.fused.update(dict.fromkeys(fused))
        return Fusion(tuple(places), tuple(variants))

    def _candidates(
        self, prefix: str, root: nn.Module, modules: dict[str, nn.Module], already: Container[str]
    ) -> Iterator[tuple[Chain, list[str], str]]:
        """Chains in a module's own forward, the submodules they pass through, and what is wrong."""
        chosen: dict[str, bool] = {}  # by the filter, which is asked once for a convolution
        for chain in chains(self.graphs[root], modules):
            called_in = [node.meta["scopes"] for node in chain.nodes]
            if all(called_in) and len({path[0] for path in called_in}) == 1:
                continue  # whole within one submodule, whose own turn it is
            within = sorted({scope for path in called_in for scope in path})
            problem = chain.problem
            for scope in within:
                if has_hooks(modules[scope]):
                    kind = type(modules[scope]).__name__
                    problem = (
                        problem or f"{kind} {scope} has hooks, which need what goes through it"
                    )
            key = chain.steps[0].module
            if not problem and key not in already and self.filter is not None:
                if key not in chosen:
                    name = f"{prefix}.{key}".lstrip(".")
                    chosen[key] = bool(self.filter(name, modules[key]))
                problem = "" if chosen[key] else "the filter left it out"
            yield chain, within, problem

    def _variant(
        self, root: nn.Module, precisions: dict[str, str], scopes: set[str], places: list[Place]
    ) -> Variant:
        """The forward as it is in the modules' present modes, with calls of the places in it."""
        modules = dict(root.named_modules(remove_duplicate=False))
        inlined = {modules[scope] for scope in scopes}
        tracer = Tracer(lambda m: m not in inlined)
        graph, inputs = tracer.graph_of(root)
        for modes in ((False, False), (False, True), (True, True)):
            other = Tracer(lambda m: m not in inlined, gradients=modes[0], autocast=modes[1])
            again, _ = other.graph_of(root)
            if again.python_code("self").src != graph.python_code("self").src:
                raise NotTraceable(
                    "its forward is not the same in every trace: it depends on whether gradients "
                    "or autocast are on, or it draws numbers"
                )
        kept: dict[str, Kept] = {}
        found = [c for c in chains(graph, modules) if c.steps[0].module in precisions]
        found = [chain for chain in found if not chain.problem]
        for chain in found:
            precision = precisions[chain.steps[0].module]
            places.append(_rewrite(graph, chain, len(places), precision))
            kept.update({step.module: step.kept for step in chain.steps if step.kept})
        return Variant(
            Code.of(graph),
            inputs,
            tuple((_path(scope), class_of(modules[scope])) for scope in sorted(scopes)),
            tuple((_path(name), value) for name, value in kept.items()),
            tuple((path, name, copied) for (path, name), (copied, _) in tracer.reads.items()),
            tuple((path, name, kind) for (path, name), kind in tracer.members.items()),
            tuple(sorted(tracer.methods)),
            tuple((path, listing, names) for (path, listing), names in tracer.listed.items()),
            tuple(shared_members(root)),
        )


def _words(error: Exception) -> str:
    """Why a module is left as it is; what it has made its own may raise anything."""
    if isinstance(error, NotTraceable):
        return str(error)
    return f"its forward can't be rewritten: {type(error).__name__}: {error}"


def _path(name: str) -> Path:
    return tuple(name.split("."))


@contextmanager
def _other_mode(root: nn.Module) -> Iterator[None]:
    """Training instead of evaluation or the other way round."""
    before = {module: module.training for module in root.modules()}
    try:
        for module in before:
            module.__dict__["training"] = not before[root]
        yield
    finally:
        for module, training in before.items():
            module.__dict__["training"] = training


def _rewrite(graph: fx.Graph, chain: Chain, index: int, fp32_precision: str) -> Place:
    """Puts one call in the place of a chain."""
    first, last = chain.nodes[0], chain.nodes[-1]
    tensor = first.args[0] if first.args else first.kwargs["input"]
    assert isinstance(tensor, fx.Node)
    before = fx.Graph()
    copies = {tensor: before.placeholder("input")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = before.node_copy(node, copied)
        return copies[node]

    before.output(copied(last))
    convolution, norm = chain.steps[0], chain.normalisation
    with graph.inserting_before(first):
        this, conv = (
            graph.create_node("get_attr", name)
            for name in ("_convnormpool_module", convolution.module)
        )
        parameters: Any = tuple(
            graph.create_node("get_attr", value.target) if isinstance(value, fx.Node) else value
            for value in norm.parameters
        )
        if norm.module:
            parameters = graph.create_node("get_attr", norm.module)
        arguments = (this, index, tensor, conv, parameters)
        call = graph.call_function(run_place, arguments)
    last.replace_all_uses_with(call)
    extents = chain.extents
    for node in extents:
        node.replace_input_with(node.all_input_nodes[0], call)
    for node in reversed(chain.nodes):
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for unused in inputs:
            if unused.op == "get_attr" and not unused.users:
                graph.erase_node(unused)
    for node in extents:
        _erase_unused(graph, node)
    return Place(
        convolution.module,
        convolution.dims,
        chain.activation,
        len(chain.layout) - 2,
        any(step.kind == "reduction" and "adaptive" in step.label.lower() for step in chain.steps),
        fp32_precision,
        Code.of(before),
    )


def _erase_unused(graph: fx.Graph, extent: fx.Node) -> None:
    """Takes out what asks for extents that nothing needs: those of axes that are no more."""
    for user in [u for u in extent.users if u.target is operator.getitem]:
        _erase_unused(graph, user)
    if not extent.users:
        graph.erase_node(extent)


def _looks_alike(module: nn.Module, parts: Collection[nn.Module]) -> bool:
    """Whether a forward that can't be traced may have held what is looked for."""
    if not all(any(isinstance(m, kind) for m in parts) for kind in (_ConvNd, nn.GroupNorm)):
        return False
    kinds = [c for c in class_of(module).__mro__ if not c.__module__.startswith(LAYERS)]
    functions = [inspect.unwrap(f) for c in kinds for f in vars(c).values() if callable(f)]
    names = {n for f in functions if hasattr(f, "__code__") for n in f.__code__.co_names}
    pools = [m for m in module.children() if type(m).__name__.startswith("AdaptiveAvgPool")]
    return bool(pools) or any(n == "mean" or n.startswith("adaptive_avg_pool") for n in names)
