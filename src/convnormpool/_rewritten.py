"""What a rewritten module carries: the class, its forward, and what must hold for that.

Pickles name functions of this module.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import itertools
import linecache
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from ._convolution import autocast_enabled
from ._steps import Kept, has_hooks
from .modules import call

__all__ = [
    "Absent",
    "Code",
    "Fused",
    "Fusion",
    "Path",
    "Place",
    "Variant",
    "class_of",
    "derived_class",
    "first_names",
    "member",
    "remember_forward",
    "run_place",
    "set_fusion",
    "shared_members",
    "unpack",
]

Path = tuple[str, ...]
# Of named_parameters or named_buffers: the method, recurse, remove_duplicate.
Listing = tuple[str, bool, bool]


class Code:
    """A generated function. Copies share it; it is pickled as its source."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        self.source = source
        self.names = names
        file = f"<convnormpool.fuse_ {next(self._numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        weakref.finalize(self, linecache.cache.pop, file, None).atexit = False
        space = dict(names)
        exec(compile(source, file, "exec"), space)
        self.function: Callable[..., Any] = space["forward"]

    @classmethod
    def of(cls, graph: fx.Graph) -> Code:
        """The code of a traced graph, a function of the module and the graph's inputs."""
        code = graph.python_code("self")
        return cls(code.src.lstrip(), dict(code.globals))

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        modules = {k: v.__name__ for k, v in self.names.items() if isinstance(v, types.ModuleType)}
        others = {k: v for k, v in self.names.items() if k not in modules}
        return _load_code, (self.source, modules, others)


def _load_code(source: str, modules: dict[str, str], others: dict[str, Any]) -> Code:
    imported = {name: importlib.import_module(module) for name, module in modules.items()}
    return Code(source, {**imported, **others})


@dataclass(frozen=True)
class Place:
    """One call of ``conv_norm_pool``, and the steps that were there before."""

    convolution: str
    dims: int
    activation: str
    trailing: int
    adaptive: bool
    fp32_precision: str
    before: Code


@dataclass(frozen=True)
class Variant:
    """A rewritten forward, and what must hold for it to be the original's equivalent."""

    code: Code
    inputs: tuple[str, ...]
    scopes: tuple[tuple[Path, type[nn.Module]], ...]
    kept: tuple[tuple[Path, Kept], ...]
    reads: tuple[tuple[Path, str, Any], ...]
    members: tuple[tuple[Path, str, type], ...]
    methods: tuple[tuple[Path, str], ...]
    listed: tuple[tuple[Path, Listing, tuple[str | None, ...]], ...]
    shared: tuple[tuple[Path, Path], ...]

    def holds(self, root: nn.Module) -> bool:
        """Whether everything is as it was when the forward was traced."""
        for path, base in self.scopes:
            module = _at(root, path)
            if module is None or class_of(module) is not base or has_hooks(module):
                return False
            if "forward" in module.__dict__ or not _has_its_forward(base):
                return False
        for path, kept in self.kept:
            module = _at(root, path)
            if module is None or not kept.holds(module):
                return False
        for path, name, value in self.reads:
            module = _at(root, path)
            if module is None:
                return False
            now = _read(module, name)
            if type(now) is not type(value) or now != value:
                return False
            if isinstance(value, dict) and list(now) != list(value):
                return False
        for path, name, kind in self.members:
            module = _at(root, path)
            if module is None or not issubclass(member(module, name), kind):
                return False
        for path, name in self.methods:
            module = _at(root, path)
            if module is None or name in module.__dict__:
                return False
        for path, listing, names in self.listed:
            module = _at(root, path)
            if module is None or first_names(module, listing, len(names)) != names:
                return False
        return all(_held(root, one) is _held(root, other) for one, other in self.shared)


@dataclass(frozen=True)
class Fusion:
    """All of a rewritten module: one forward for each mode that the original distinguishes."""

    places: tuple[Place, ...]
    variants: tuple[Variant, ...]


class Fused:
    """Mixed into the class of a rewritten module."""

    _convnormpool_base: ClassVar[type[nn.Module]]
    # Stands on the class for instances that a method of the original creates, slices for one.
    _convnormpool_fusion: Fusion | None = None

    @property
    def _convnormpool_module(self) -> Any:
        """The module itself, as a traced graph can name it."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(2, int(protocol)))
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new, (type(self)._convnormpool_base, *arguments[1:]), *rest)
        return (function, arguments, *rest)


def _new(base: type[nn.Module], *arguments: Any) -> nn.Module:
    kind = _fused_class(base)
    return kind.__new__(kind, *arguments)


_fused_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fused_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of rewritten modules that had ``base``; one for each."""
    if base in _fused_classes:
        return _fused_classes[base]
    original = remember_forward(base)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        fusion = self._convnormpool_fusion
        if base.forward is not original:
            return base.forward(self, *args, **kwargs)
        # What a forward asks of an input was answered as for a tensor.
        tensors = all(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        if fusion is not None and tensors and not nn.modules.module._has_any_global_hook():
            for variant in fusion.variants:
                names = variant.inputs[len(args) :]
                if len(args) + len(kwargs) != len(variant.inputs) or set(names) != set(kwargs):
                    continue
                if variant.holds(self):
                    return variant.code.function(self, *args, *(kwargs[name] for name in names))
        return original(self, *args, **kwargs)

    space = {"forward": forward, "_convnormpool_base": base, "__module__": base.__module__}
    kind = derived_class(f"Fused{base.__name__}", (Fused, base), space)
    _fused_classes[base] = kind
    return kind


def derived_class(name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type[nn.Module]:
    """A class of which those that it is derived from are not told: some keep a register of them."""
    kind: Any = type.__new__(type(bases[-1]), name, (nn.Module,), space)
    try:
        kind.__bases__ = bases
    except TypeError:  # they have another layout, by __slots__ or a built-in class
        return types.new_class(name, bases, {}, lambda s: s.update(space))
    return cast("type[nn.Module]", kind)


# By class, what its instances' forward was when it was traced.
_forwards: dict[type[nn.Module], Any] = {}


def remember_forward(kind: type[nn.Module]) -> Any:
    """The forward of a class, which is from here on looked for."""
    return _forwards.setdefault(kind, kind.forward)


def _has_its_forward(kind: type[nn.Module]) -> bool:
    return _forwards.get(kind, kind.forward) is kind.forward


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a module has, or had before it was rewritten."""
    base: type[nn.Module] = type(module).__dict__.get("_convnormpool_base", type(module))
    return base


def set_fusion(module: nn.Module, fusion: Fusion | None) -> int:
    """Rewrites a module, or takes it back; the number of places that it had."""
    before = module.__dict__.pop("_convnormpool_fusion", None)
    base = class_of(module)
    object.__setattr__(module, "__class__", base if fusion is None else _fused_class(base))
    if fusion is not None:
        module.__dict__["_convnormpool_fusion"] = fusion
    return 0 if before is None else len({place.convolution for place in before.places})


def _at(root: nn.Module, path: Path) -> nn.Module | None:
    module: nn.Module | None = root
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


def _held(root: nn.Module, path: Path) -> nn.Module | Tensor | None:
    """The submodule, parameter or buffer of that qualified name."""
    module, name = _at(root, path[:-1]), path[-1]
    if module is None:
        return None
    for registry in (module._parameters, module._buffers, module._modules):
        if name in registry:
            return registry[name]
    return None


def shared_members(root: nn.Module) -> Iterator[tuple[Path, Path]]:
    """The second and later names of what a module has under several, each with the first.

    A traced graph has only the first one.
    """
    first: dict[Any, str] = {}
    own = {name for name, _ in root.named_modules()}
    for found in (root.named_modules, root.named_parameters, root.named_buffers):
        for name, value in found(remove_duplicate=False):
            within = name.rpartition(".")[0]
            if first.setdefault(value, name) != name and within in own:
                yield tuple(first[value].split(".")), tuple(name.split("."))


def _read(module: nn.Module, name: str) -> Any:
    return tuple(module._modules) if name == "_modules" else getattr(module, name, None)


def first_names(module: nn.Module, listing: Listing, count: int) -> tuple[str | None, ...]:
    """The first names of a module's parameters or buffers, and None behind the last."""
    method, recurse, remove_duplicate = listing
    found = getattr(module, method)(recurse=recurse, remove_duplicate=remove_duplicate)
    names = itertools.chain((name for name, _ in found), (None,))
    return tuple(itertools.islice(names, count))


def unpack(values: Iterable[Any], count: int) -> tuple[Any, ...]:
    """What ``a, b = values`` gives, and raises."""
    found = tuple(values)
    if len(found) != count:
        problem = "not enough" if len(found) < count else "too many"
        raise ValueError(f"{problem} values to unpack (expected {count})")
    return found


class Absent:
    """In the place of a class: there is no such member."""


def member(module: nn.Module, name: str) -> type:
    """The class of what a module has under a name, of parameters and buffers just ``Tensor``."""
    for registry in (module._parameters, module._buffers, module._modules, module.__dict__):
        if name in registry:
            value = registry[name]
            if isinstance(value, nn.Module):
                return class_of(value)
            return Tensor if isinstance(value, Tensor) else type(value)
    # A parametrized tensor is a property, which is not to be computed just for this.
    if hasattr(type(module), name):
        return Tensor
    # Never true, but torch.compile guards this and not that a name is in __dict__.
    return object if hasattr(module, name) else Absent


def run_place(
    module: Any,
    index: int,
    input: Tensor,
    conv: _ConvNd,
    norm: nn.GroupNorm | tuple[int, Tensor | None, Tensor | None, float],
) -> Tensor:
    """What a rewritten forward calls: the place's result in the shape that its mean gives."""
    place: Place = module._convnormpool_fusion.places[index]
    if input.dim() != place.dims + 2:
        result: Tensor = place.before.function(module, input)
        return result
    if not isinstance(norm, tuple):
        norm = (norm.num_groups, norm.weight, norm.bias, norm.eps)
    num_groups, norm_weight, norm_bias, eps = norm
    pooled = call(
        input, conv, num_groups=num_groups, norm_weight=norm_weight, norm_bias=norm_bias, eps=eps,
        activation=place.activation, fp32_precision=place.fp32_precision,
    )  # fmt: skip
    if place.adaptive and autocast_enabled(input.device.type):
        # Autocast has a dtype for some of these, which the result must have, too.
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[place.dims - 1]
        pooled = pool(_with_ones(pooled, place.dims), 1).flatten(1)
    return _with_ones(pooled, place.trailing)


def _with_ones(tensor: Tensor, axes: int) -> Tensor:
    return tensor.reshape(tensor.shape + (1,) * axes) if axes else tensor
