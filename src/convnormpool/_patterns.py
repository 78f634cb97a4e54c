"""Recognises convolution, activation, group normalisation and global mean in a traced forward.

One matcher walks from each convolution along the steps that use its output, and follows on the way
which axes are left (a ``Layout``), so that every spelling of the mean is the same to it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from ._steps import Layout, Step, asks_extents, axis_of, is_shape, step_of, unknown_step

__all__ = ["Chain", "chains"]


@dataclass(frozen=True)
class Chain:
    """What follows a convolution up to the mean, and why it is not what it looks like, or ""."""

    nodes: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    layout: Layout
    problem: str

    @property
    def activation(self) -> str:
        return next((s.activation for s in self.steps if s.kind == "activation"), "identity")

    @property
    def normalisation(self) -> Step:
        return next(s for s in self.steps if s.kind == "normalisation")

    @property
    def extents(self) -> tuple[fx.Node, ...]:
        """What asks one of the tensors in between for its extents, which the result has, too."""
        users = (user for node in self.nodes[:-1] for user in node.users)
        return tuple(user for user in users if user not in self.nodes)

    def __str__(self) -> str:
        return " -> ".join(step.label for step in self.steps if step.kind != "nothing")


def _takes(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call's tensor is that node's output, and nothing else of it is."""
    tensor = user.args[0] if user.args else user.kwargs.get("input")
    rest = [*user.args[1:], *(v for k, v in user.kwargs.items() if k != "input" or user.args)]
    return tensor is node and node not in rest


# Functions that change their first argument, beside those with an underscore at the end.
_IN_PLACE = frozenset(f.__name__ for f in (
    operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor, operator.setitem,
))  # fmt: skip

_Found = tuple[list[fx.Node], list[Step], Layout]


def _walk(
    node: fx.Node, layout: Layout, modules: Mapping[str, nn.Module], unknown: int = 0
) -> _Found | None:
    """The nodes behind ``node`` up to where the mean is complete, or as far as it goes.

    ``unknown``: how many calls on the way may be none of the steps.
    """
    for user in node.users:
        step = step_of(user, modules) if _takes(user, node) else None
        left = unknown
        if step is None and unknown:
            step, left = unknown_step(user, modules), unknown - 1
        if step is None or step.kind == "convolution":
            continue
        behind: Layout | None = layout
        reduces = step.kind == "reduction"
        if step.axes is not None:
            behind = step.axes(layout)
        if reduces and (step.problem or behind is None):
            return [user], [step], layout
        if behind is None:
            continue
        if not any(axis & {0, 1, 2} for axis in behind):
            return [user], [step], behind
        rest = _walk(user, behind, modules, left)
        if rest is not None:
            return [user, *rest[0]], [step, *rest[1]], rest[2]
        if reduces:
            return [user], [step], behind
    return None


def _order_problem(steps: list[Step]) -> str:
    """Why the steps are not activation, normalisation, mean in this order."""
    kinds = [step.kind for step in steps if step.kind != "nothing"]
    if kinds.count("normalisation") > 1:
        return "there is more than one normalisation"
    behind = kinds[kinds.index("normalisation") + 1 :]
    if "activation" in behind:
        return "the activation comes after the normalisation"
    in_front = kinds[1 : kinds.index("normalisation")]
    if in_front.count("activation") > 1:
        return "there is more than one activation"
    if set(in_front) - {"activation"}:
        return "the tensor is reshaped or averaged before the normalisation"
    return ""


def _use_problem(nodes: list[fx.Node], steps: list[Step]) -> str:
    """Why a tensor between the steps is still needed."""
    for node, step, following in zip(nodes, steps, nodes[1:], strict=False):
        for asked in following.all_input_nodes:
            source = asked
            while is_shape(source) or axis_of(source) is not None:
                source = source.all_input_nodes[0]
            if source is not asked and source not in nodes:
                return f"{following.target} takes extents of another tensor"
        others = [user for user in node.users if user is not following and not asks_extents(user)]
        if others:
            use = "returned" if others[0].op == "output" else f"also used by {others[0].target}"
            return f"the output of {step.label} is {use}"
    return ""


def _changes_tensor(node: fx.Node) -> bool:
    """Whether a node changes a parameter or a buffer, or what may be a view of one."""
    name = str(getattr(node.target, "__name__", node.target))
    if node.op not in ("call_function", "call_method") or not (
        (name.endswith("_") and not name.endswith("__"))
        or name in _IN_PLACE
        or node.kwargs.get("inplace")
        or node.kwargs.get("out") is not None
    ):
        return False
    behind, seen = list(node.all_input_nodes), set(node.all_input_nodes)
    while behind:
        source = behind.pop()
        if source.op == "get_attr":
            return True
        new = set(source.all_input_nodes) - seen
        behind += new
        seen |= new
    return False


def _only_computes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def _change_problem(
    nodes: list[fx.Node], steps: list[Step], modules: Mapping[str, nn.Module]
) -> str:
    """Why the normalisation's parameters can't be read as early as the convolution's are."""
    last = next(n for n, step in zip(nodes, steps, strict=True) if step.kind == "normalisation")
    node = nodes[0]
    while node is not last:
        node = node.next
        if node in nodes:
            continue
        if _changes_tensor(node):
            return f"{node.target} changes a tensor before the normalisation"
        if node.op == "call_module" and not _only_computes(modules[str(node.target)]):
            return f"{node.target} is called before the normalisation, which it may change"
    return ""


def chains(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Iterator[Chain]:
    """Each convolution of a graph that leads through a normalisation to a mean."""
    for node in graph.nodes:
        first = step_of(node, modules)
        if first is None or first.kind != "convolution":
            continue
        layout: Layout = (frozenset("n"), frozenset("k"))
        layout += tuple(frozenset([axis]) for axis in range(first.dims))
        found = _walk(node, layout, modules)
        if found is None:
            # With something in between it is no place, but its user may have taken it for one.
            found = _walk(node, layout, modules, unknown=1)
        if found is None or all(step.kind != "normalisation" for step in found[1]):
            continue
        nodes, steps = [node, *found[0]], [first, *found[1]]
        problem = next((step.problem for step in steps if step.problem), "")
        used = "" if any(step.kind == "unknown" for step in steps) else _use_problem(nodes, steps)
        if used and not any(s.kept or s.parameters for s in steps if s.kind == "normalisation"):
            continue  # nothing but a convolution whose features are pooled, too
        problem = problem or _order_problem(steps) or used or _change_problem(nodes, steps, modules)
        if not problem and any(axis & {0, 1, 2} for axis in found[2]):
            problem = (
                f"{steps[-1].label} does not run over just the spatial dimensions, all of them"
            )
        yield Chain(tuple(nodes), tuple(steps), found[2], problem)
