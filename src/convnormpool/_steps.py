"""What stands between a convolution and its mean: every operation, module or function, a Step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _AvgPoolNd

__all__ = [
    "Kept",
    "Layout",
    "Step",
    "asks_extents",
    "axis_of",
    "has_hooks",
    "is_shape",
    "step_of",
    "unknown_step",
]

# What each axis of a tensor still stands for: "n", "k" and the spatial axes 0, 1, 2; an axis that
# the mean has left at size one stands for nothing, a flattened one for several.
Layout = tuple[frozenset[object], ...]
Settings = tuple[tuple[str, Any], ...]
_ONE: frozenset[object] = frozenset()

_CONVOLUTIONS: tuple[type[_ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS: dict[type[nn.Module], int] = {
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
}  # fmt: skip
_POOL_CALLS = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
# Modules to (kind, the attributes that must have the defaults below).
_ACTIVATIONS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Hardswish: ("hardswish", ()),
    nn.Hardtanh: ("relu6", ("min_val", "max_val")),  # nn.ReLU6 is one
    nn.ReLU: ("relu", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.SiLU: ("silu", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Mish: ("mish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
}
# Calls to (kind, their parameters behind the input in order).
_ACTIVATION_CALLS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.hardswish: ("hardswish", ("inplace",)),
    F.relu: ("relu", ("inplace",)),
    F.relu_: ("relu", ()),
    torch.relu: ("relu", ()),
    torch.relu_: ("relu", ()),
    "relu": ("relu", ()),
    "relu_": ("relu", ()),
    F.relu6: ("relu6", ("inplace",)),
    F.hardtanh: ("relu6", ("min_val", "max_val", "inplace")),
    F.leaky_relu: ("leaky_relu", ("negative_slope", "inplace")),
    F.elu: ("elu", ("alpha", "inplace")),
    F.silu: ("silu", ("inplace",)),
    F.gelu: ("gelu", ("approximate",)),
    F.mish: ("mish", ("inplace",)),
    F.hardsigmoid: ("hardsigmoid", ("inplace",)),
}
_TAKEN: dict[str, dict[str, Any]] = {
    "relu6": {"min_val": 0, "max_val": 6},
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1},
}
# What a call has where it says nothing.
_DEFAULTS: dict[Any, dict[str, Any]] = {
    F.hardtanh: {"min_val": -1.0, "max_val": 1.0},
    F.gelu: {"approximate": "none"},
}
_OTHER_ACTIVATIONS = frozenset(
    ("celu", "glu", "hardshrink", "log_softmax", "logsigmoid", "prelu", "rrelu", "selu", "sigmoid",
     "softmax", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold")
)  # fmt: skip
_OTHER_NORMS = frozenset(("batch_norm", "instance_norm", "layer_norm", "rms_norm"))
_PASSED_ON = frozenset(("contiguous",))


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to see what goes into or out of the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


@dataclass(frozen=True)
class Kept:
    """What a rewritten forward takes for granted of a module: still true, or the original runs."""

    base: type[nn.Module]
    settings: Settings = ()
    methods: tuple[str, ...] = ("forward",)

    def problem(self, module: nn.Module) -> str:
        """Why the module's call is not its base's forward and nothing else; "" if it is."""
        if has_hooks(module):
            return "has hooks, which need the tensors between the steps"
        kind = type(module)
        if kind.__call__ is nn.Module.__call__:
            for name in self.methods:
                own = name in module.__dict__
                if own or getattr(kind, name) is not getattr(self.base, name):
                    break
            else:
                return ""
        return f"has a forward of its own, other than that of nn.{self.base.__name__}"

    def holds(self, module: nn.Module) -> bool:
        """Whether everything is still so."""
        if not isinstance(module, self.base) or self.problem(module):
            return False
        settings = self.settings
        return not settings or all(getattr(module, name) == value for name, value in settings)


@dataclass(frozen=True)
class Step:
    """One operation between a convolution and the mean over all positions.

    Attributes:
        kind: "convolution", "activation", "normalisation", "reduction", "reshape" or "nothing".
        label: what it is, in words.
        problem: why it can't be part of what is fused, or "".
        activation: the name that ``conv_norm_pool`` has for it.
        dims: spatial dimensions of a convolution.
        module: the module that is called.
        kept: what must stay as it is of that.
        axes: the layout behind a reduction or a reshape from that in front, None for anything else
            than the mean over some axes, or a layout that is not followed.
        parameters: (num_groups, weight, bias, eps) of a function's group normalisation.
    """

    kind: str
    label: str
    problem: str = ""
    activation: str = ""
    dims: int = 0
    module: str = ""
    kept: Kept | None = None
    axes: Callable[[Layout], Layout | None] | None = None
    parameters: tuple[Any, ...] = ()


def _activation(kind: str, settings: Mapping[str, Any], label: str) -> tuple[str, str]:
    """(the name that ``conv_norm_pool`` has for an activation, the problem)."""
    if kind == "gelu":
        approximate = settings.get("approximate", "none")
        known = {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate), "")
        return known, "" if known else f"{label} has approximate={approximate}"
    for name, value in _TAKEN.get(kind, {}).items():
        found = settings.get(name, value)
        if isinstance(found, fx.Node) or found != value:
            return kind, f"{label} has {name}={found}; only {value} is taken"
    return kind, ""


def _known(
    base: type[nn.Module], module: nn.Module, kind: str, settings: Settings = (), **more: Any
) -> Step:
    label = type(module).__name__.removeprefix("Parametrized")
    methods = ("forward", "_conv_forward") if kind == "convolution" else ("forward",)
    # A list may change in place.
    settings = tuple((n, list(v) if isinstance(v, list) else v) for n, v in settings)
    kept = Kept(base, settings, methods)
    problem = more.pop("problem", "") or kept.problem(module)
    if problem and not problem.startswith(label):
        problem = f"{label} {problem}"
    return Step(kind, label, problem, kept=kept, **more)


def _module_step(module: nn.Module) -> Step | None:
    """What calling a module is on the way from a convolution to the mean."""
    label = type(module).__name__
    if isinstance(module, _ConvNd):
        dims = len(module.kernel_size)
        if isinstance(module, _ConvTransposeNd):
            return Step("convolution", label, f"{label} is a transposed convolution", dims=dims)
        convolution = next((b for b in _CONVOLUTIONS if isinstance(module, b)), None)
        return (
            None if convolution is None else _known(convolution, module, "convolution", dims=dims)
        )
    for base, (kind, names) in _ACTIVATIONS.items():
        if isinstance(module, base):
            settings = {name: getattr(module, name) for name in names}
            name, problem = _activation(kind, settings, label)
            return _known(
                base, module, "activation", tuple(settings.items()),
                activation=name, problem=problem,
            )  # fmt: skip
    if isinstance(module, nn.GroupNorm):
        return _known(nn.GroupNorm, module, "normalisation")
    if isinstance(module, _NormBase | nn.LayerNorm | nn.RMSNorm | nn.LocalResponseNorm):
        return Step("normalisation", label, f"the normalisation is {label}, not GroupNorm")
    if isinstance(module, _DropoutNd):
        problem = f"{label} with p={module.p} stands in between" if module.p else ""
        base = next(c for c in type(module).__mro__ if c.__module__ == _DropoutNd.__module__)
        return _known(base, module, "nothing", (("p", module.p),), problem=problem)
    if isinstance(module, nn.Identity):
        return _known(nn.Identity, module, "nothing")
    for base, axes in _POOLS.items():
        if isinstance(module, base):
            size = module.output_size
            return _known(
                base, module, "reduction", (("output_size", size),),
                axes=_adaptive(axes, size), problem=_adaptive_problem(label, size),
            )  # fmt: skip
    if isinstance(module, _AdaptiveMaxPoolNd) and not _adaptive_problem(label, module.output_size):
        return Step("reduction", label, f"{label} takes the maximum, not the mean")
    if isinstance(module, nn.Flatten):
        ends = (module.start_dim, module.end_dim)
        return _known(
            nn.Flatten, module, "reshape", tuple(zip(("start_dim", "end_dim"), ends, strict=True)),
            axes=_flatten(*ends),
        )  # fmt: skip
    if type(module).__module__ == "torch.nn.modules.activation":
        return Step("activation", label, f"{label} is not among the activations that are taken")
    return None


def _arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """A call's arguments behind the tensor by name; None where there are others."""
    values = dict(zip(names, node.args[1:], strict=False))
    kwargs = {k: v for k, v in node.kwargs.items() if node.args or k not in ("input", "self")}
    if len(node.args) - 1 > len(names) or not set(kwargs) <= set(names):
        return None
    return {**values, **kwargs}


def _constant(value: Any) -> bool:
    return not any(
        isinstance(v, fx.Node) for v in (value if isinstance(value, tuple | list) else (value,))
    )


def _call_step(node: fx.Node) -> Step | None:
    """The same of a function or a method."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in _ACTIVATION_CALLS:
        kind, names = _ACTIVATION_CALLS[target]
        found = _arguments(node, names)
        if found is None:
            return None
        known, problem = _activation(kind, {**_DEFAULTS.get(target, {}), **found}, name)
        return Step("activation", name, problem, activation=known)
    if name in _OTHER_ACTIVATIONS:
        return Step("activation", name, f"{name} is not among the activations that are taken")
    if target in (F.group_norm, torch.group_norm):
        return _group_norm_call(node)
    if name in _OTHER_NORMS:
        return Step("normalisation", name, f"the normalisation is {name}, not group_norm")
    if name == "mean" and target in (torch.mean, "mean"):
        found = _arguments(node, ("dim", "keepdim"))
        if found is None or not all(map(_constant, found.values())):
            return Step("reduction", "mean", "the mean has arguments other than dim and keepdim")
        dim = found.get("dim")
        axes: Any = (dim,) if isinstance(dim, int | str) else dim
        if any(not isinstance(axis, int) for axis in axes or ()):
            return Step("reduction", "mean", "the mean is over dimensions by name")
        return Step("reduction", "mean", axes=_mean(axes, bool(found.get("keepdim", False))))
    if target in _POOL_CALLS:
        size = (_arguments(node, ("output_size",)) or {}).get("output_size")
        problem = _adaptive_problem(name, size) if _constant(size) else f"{name}'s size varies"
        return Step("reduction", name, problem, axes=_adaptive(_POOL_CALLS[target], size))
    if target in (torch.flatten, "flatten"):
        found = _arguments(node, ("start_dim", "end_dim"))
        if found is None or not all(isinstance(v, int) for v in found.values()):
            return None
        return Step(
            "reshape", name, axes=_flatten(found.get("start_dim", 0), found.get("end_dim", -1))
        )
    if target in ("view", "reshape", torch.reshape):
        sizes = [v for a in node.args[1:] for v in (a if isinstance(a, tuple | list) else (a,))]
        if [axis_of(size) for size in sizes[:-1]] != [0, 1] or sizes[-1] != -1:
            return None
        return Step("reshape", name, axes=_flatten(2, -1))
    if target in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout):
        found = _arguments(node, ("p", "training", "inplace")) or {}
        active = found.get("p", 0.5) != 0 and found.get("training", True) is not False
        return Step("nothing", name, f"{name} stands in between" if active else "")
    if target in _PASSED_ON and not node.args[1:] and not node.kwargs:
        return Step("nothing", name)
    return None


def _group_norm_call(node: fx.Node) -> Step:
    names = ("num_groups", "weight", "bias", "eps", "cudnn_enabled")
    found = _arguments(node, names) or {}
    values = (
        found.get("num_groups"),
        found.get("weight"),
        found.get("bias"),
        found.get("eps", 1e-5),
    )
    for value in values:
        if isinstance(value, fx.Node) and value.op != "get_attr":
            return Step("normalisation", "group_norm", "group_norm's arguments are computed")
    return Step("normalisation", "group_norm", parameters=values)


def _mean(dims: tuple[int, ...] | None, keepdim: bool) -> Callable[[Layout], Layout | None]:
    def axes(layout: Layout) -> Layout | None:
        taken = {
            d % len(layout) for d in dims or range(len(layout)) if -len(layout) <= d < len(layout)
        }
        if any(layout[d] & {"n", "k"} for d in taken) or (dims and len(taken) != len(dims)):
            return None
        kept = (frozenset() if d in taken else axis for d, axis in enumerate(layout))
        return tuple(axis for d, axis in enumerate(kept) if keepdim or d not in taken)

    return axes


def _adaptive_problem(label: str, size: Any) -> str:
    sizes = size if isinstance(size, tuple | list) else (size,)
    if all(value in (1, None) for value in sizes):
        return ""
    return f"{label} pools to {size}, not to one position"


def _adaptive(dims: int, size: Any) -> Callable[[Layout], Layout | None]:
    sizes = tuple(size) if isinstance(size, tuple | list) else (size,) * dims

    def axes(layout: Layout) -> Layout | None:
        if len(layout) != 2 + dims or len(sizes) != dims:
            return None
        pairs = zip(layout[2:], sizes, strict=True)
        return (
            *layout[:2],
            *(axis if size is None else _ONE for axis, size in pairs),
        )

    return axes


def _flatten(start: int, end: int) -> Callable[[Layout], Layout | None]:
    def axes(layout: Layout) -> Layout | None:
        first, last = start % len(layout), end % len(layout)
        merged = _ONE.union(*layout[first : last + 1])
        if first > last or (merged & {"n", "k"} and len(merged) > 1):
            return None
        return (*layout[:first], merged, *layout[last + 1 :])

    return axes


def is_shape(node: Any) -> bool:
    """Whether a node is a tensor's shape, or the first two of its extents."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is operator.getitem:
        return is_shape(node.args[0]) and bool(node.args[1] == slice(None, 2, None))
    if node.target is getattr:
        return node.args[1:] == ("shape",)
    return node.target == "size" and len(node.args) == 1 and not node.kwargs


def axis_of(node: Any) -> object:
    """The axis whose extent a node is; None where it is something else."""
    if not isinstance(node, fx.Node) or len(node.args) != 2:
        return None
    of_shape = node.target is operator.getitem and is_shape(node.args[0])
    return node.args[1] if node.target == "size" or of_shape else None


def asks_extents(node: fx.Node) -> bool:
    """Whether what a node wants of a tensor is how many samples and channels it has."""
    if is_shape(node):
        return all(asks_extents(user) for user in node.users)
    axis = axis_of(node)
    return axis in (0, 1) or (isinstance(axis, int) and not node.users)


_WINDOWS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def unknown_step(node: fx.Node, modules: Mapping[str, nn.Module]) -> Step | None:
    """A call that is none of the steps, which may keep what is around it from being fused."""
    if node.op not in ("call_module", "call_function", "call_method") or is_shape(node):
        return None
    module = modules[str(node.target)] if node.op == "call_module" else None
    target = node.target if module is None else type(module)
    label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    windows = isinstance(module, _AvgPoolNd) or target in _WINDOWS
    if windows and any(_flattens(user, modules) for user in node.users):
        return Step("reduction", label, f"{label} averages windows, not all positions at once")
    return Step("unknown", label, f"{label} stands in between and is none of the known steps")


def _flattens(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a call might take the axes away that a pool has left at size one."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.Flatten)
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in ("flatten", "view", "reshape", "squeeze")


def step_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> Step | None:
    """What a node of a traced graph is on the way from a convolution to the mean, if anything."""
    if node.op == "call_module":
        step = _module_step(modules[str(node.target)])
        return None if step is None else replace(step, module=str(node.target))
    return _call_step(node) if node.op in ("call_function", "call_method") else None
