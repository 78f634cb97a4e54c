"""Traces a module's forward, and writes down what the traced code depends on."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn

from ._ambient import NoChanges, Snapshot, ambient, generators, modes, set_generators
from ._rewritten import (
    Fused,
    Listing,
    Path,
    class_of,
    derived_class,
    first_names,
    member,
    remember_forward,
)
from ._watch import TracedTensor, Watch, written_by_user

__all__ = ["LAYERS", "NotTraceable", "Tracer", "closed", "opaque"]


class NotTraceable(Exception):
    """Why a forward can't be rewritten, in words."""


_ENTRY = "_convnormpool_entry"
_INTERNAL = frozenset(nn.Module().__dict__) - {"training", "_modules"}
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def _plain(value: Any) -> bool:
    """Whether a value can be compared later with what it was, in copies of the model, too."""
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        return all(map(_plain, value))
    if type(value) in (dict, collections.OrderedDict):
        return all(map(_plain, itertools.chain(value, value.values())))
    if isinstance(value, type):  # which may be somebody's settings
        return value.__module__.startswith(("builtins", "torch"))
    return isinstance(value, _PLAIN) and not isinstance(value, list | tuple | set | dict)


def _restore(before: Any, value: Any) -> bool:
    """Whether a value is no longer equal to its copy from before; if so it becomes that again."""
    if _plain(value) and before == value:
        return False
    if isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    return True


class Tracer(fx.Tracer):
    """Traces a module's forward, looking into some of its submodules; nothing of it is changed."""

    traced_func_name = _ENTRY
    # Otherwise forward code would compute with a buffer, and change it, while it is traced.
    proxy_buffer_attributes = True

    def __init__(
        self, leaf: Callable[[nn.Module], bool], *, gradients: bool = True, autocast: bool = False
    ) -> None:
        super().__init__()
        self.leaf = leaf
        # Which of them are on meanwhile.
        self.modes = gradients, autocast
        # By module and name: a copy of the value that forward code read, and that itself.
        self.reads: dict[tuple[Path, str], tuple[Any, Any]] = {}
        # By the same: what else was asked for, parameters and submodules and what is not there.
        self.members: dict[tuple[Path, str], type] = {}
        # Methods that were called, which an instance may have for itself later.
        self.methods: set[tuple[Path, str]] = set()
        # The names of the parameters or buffers that were gone through.
        self.listed: dict[tuple[Path, Listing], tuple[str | None, ...]] = {}
        self.within: Path = ()
        self.listening = False
        self.refusal = ""
        self.watch = Watch(self._note_refusal)

    def graph_of(self, root: nn.Module) -> tuple[fx.Graph, tuple[str, ...]]:
        """The graph and its inputs' names; each node's "scopes" are the modules it is called in."""
        state = generators()
        snapshot = Snapshot(root.modules())
        try:
            inputs = _required_inputs(class_of(root))
            with NoChanges(self.refuse):
                # The first operation under a mode imports dynamo, which must not happen below:
                # torch.fx has replaced the functions of math there, and dynamo would keep those.
                torch.empty(0)
            with self._recording(root, inputs), modes(*self.modes), NoChanges(self.refuse):
                self.ambient = ambient()
                with self.watch:
                    graph = self.trace(root)
                for node in reversed(graph.nodes):  # attributes that were asked for in vain
                    if node.target is getattr and not node.users:
                        graph.erase_node(node)
                self.watch.look()
        except Exception as error:
            if self.refusal:  # which the forward may have caught and answered by another error
                raise NotTraceable(self.refusal) from None
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise NotTraceable(f"its forward can't be traced: {lines[0]}") from error
        finally:
            # All that the forward did beside being traced is taken back.
            changed = [name for (_, name), values in self.reads.items() if _restore(*values)]
            drawn = set_generators(state)
            altered = snapshot.restore()
        if self.refusal:
            raise NotTraceable(self.refusal)
        if drawn:
            raise NotTraceable("its forward draws random numbers outside of modules")
        if changed or altered:
            raise NotTraceable(f"its forward changes self.{changed[0] if changed else altered}")
        return graph, inputs

    def _note_refusal(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def refuse(self, reason: str) -> NoReturn:
        """Ends the tracing, also where the forward catches the exception."""
        self._note_refusal(reason)
        raise NotTraceable(reason)

    @contextmanager
    def _listen(self, listening: bool) -> Iterator[None]:
        before, self.listening = self.listening, listening
        try:
            yield
        finally:
            self.listening = before

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        with self._listen(False):
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        kind = type(a)
        if isinstance(a, dict) and not kind.__module__.startswith(("builtins", "torch.fx.")):
            self.refuse(f"its forward passes a {kind.__name__}, which becomes a dict")
        plain = next((c for c in _AS_THEIR_BASE if issubclass(kind, c)), kind)
        known = plain is kind or kind.__module__.startswith("torch") or hasattr(a, "_fields")
        if not known:
            self.refuse(f"its forward passes a {kind.__name__}, which becomes a {plain.__name__}")
        made_anew = dataclasses.is_dataclass(kind) and (
            hasattr(kind, "__post_init__") or not all(f.init for f in dataclasses.fields(kind))
        )
        if made_anew or isinstance(a, enum.Flag):
            self.refuse(f"its forward passes a {kind.__name__}, which can't be written as code")
        with self._listen(False):
            return super().create_arg(a)

    def path_of_module(self, mod: nn.Module) -> str:
        with self._listen(False):
            return super().path_of_module(mod)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.leaf(m):
            if not class_of(m).__module__.startswith(LAYERS):
                self.watch.perhaps_none = True
            return super().call_module(m, forward, args, kwargs)
        outside, self.within = self.within, (*self.within, self.path_of_module(m))
        try:
            return m.forward(*args, **kwargs)
        finally:
            self.within = outside

    def proxy(self, node: fx.Node) -> TracedTensor:
        return TracedTensor(node, self)

    def to_bool(self, obj: Any) -> NoReturn:
        self.refuse("its forward can't be traced: what it does depends on values of tensors")

    def iter(self, obj: Any) -> NoReturn:
        self.refuse("its forward can't be traced: it goes through the parts of a tensor")

    def keys(self, obj: Any) -> NoReturn:
        self.refuse("its forward can't be traced: it asks for the keys of an input")

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if ambient() != self.ambient:
            self.refuse(
                "its forward has a part with other gradient, autocast or checkpoint modes, or seed"
            )
        node = super().create_node(*args, **kwargs)
        node.meta["scopes"] = self.within
        return node

    @contextmanager
    def _recording(self, root: nn.Module, inputs: tuple[str, ...]) -> Iterator[None]:
        """Meanwhile the modules write down what is read of them and refuse to be changed."""
        paths = {m: tuple(filter(None, name.split("."))) for name, m in root.named_modules()}
        before = {m: type(m) for m in paths if not isinstance(m, torch.jit.ScriptModule)}
        kinds: dict[type[nn.Module], type[nn.Module]] = {}

        def note(module: nn.Module, name: str, value: Any) -> None:
            if not self.listening:
                return
            if name == "_modules":
                value = tuple(value)
            elif not _plain(value):
                kind = type(value).__name__
                self.refuse(f"its forward reads self.{name}, a {kind}, which may change")
            self.reads.setdefault((paths[module], name), (copy.deepcopy(value), value))

        def missed(module: nn.Module, name: str) -> None:
            if self.listening:
                with self._listen(False):
                    found = _named(member(module, name))
                self.members.setdefault((paths[module], name), found)

        def used(module: nn.Module, name: str) -> None:
            if not self.listening:
                return
            if name in _TENSORS_OF:
                self.refuse(f"its forward reads self.{name}, whose values are not traced")
            static = inspect.getattr_static(class_of(module), name, None)
            if isinstance(static, functools._lru_cache_wrapper):
                self.refuse(f"its forward calls self.{name}(), which remembers results")
            self.methods.add((paths[module], name))

        def each(module: nn.Module, listing: Listing, prefix: str) -> Iterator[tuple[str, Any]]:
            with self._listen(False):
                names = [name for name in first_names(module, listing, sys.maxsize) if name]
            key = paths[module], listing
            for count, name in enumerate(names, start=1):
                if count > len(self.listed.get(key, ())):
                    self.listed[key] = tuple(names[:count])
                *within, last = name.split(".")
                owner = module
                with self._listen(False):
                    for part in within:
                        owner = owner._modules[part]  # type: ignore[assignment]
                    tensor = getattr(owner, last)
                yield f"{prefix}.{name}" if prefix else name, tensor
            self.listed[key] = (*names, None)

        try:
            for module in before:
                base = class_of(module)
                if base not in kinds:
                    remember_forward(base)
                    kinds[base] = _recording_class(self, base, note, missed, used, each)
                object.__setattr__(module, "__class__", kinds[base])
            space: dict[str, Any] = {"_convnormpool_listen": self._listen}
            names = ", ".join(inputs)
            exec(
                f"def {_ENTRY}(self, {names}):\n"
                f"    with _convnormpool_listen(True):\n        return self.forward({names})",
                space,
            )
            setattr(type(root), _ENTRY, space[_ENTRY])
            yield
        finally:
            for module, base in before.items():
                object.__setattr__(module, "__class__", base)


# Subclasses of these, a NumPy number among them, a graph's code does not spell as what they are.
_AS_THEIR_BASE: tuple[type, ...] = (bool, int, float, complex, str, list, tuple)
# Parts of a module that hold tensors themselves, for which there are no stand-ins.
_TENSORS_OF = frozenset(("_buffers", "_parameters", "state_dict"))


def _named(kind: type) -> type:
    """A class itself, or of one that parametrizations have made the one that it was made of."""
    return kind.__bases__[0] if kind.__name__.startswith("Parametrized") else kind


def _recording_class(
    tracer: Tracer,
    base: type[nn.Module],
    note: Callable[[nn.Module, str, Any], None],
    missed: Callable[[nn.Module, str], None],
    used: Callable[[nn.Module, str], None],
    each: Callable[[nn.Module, Listing, str], Iterator[tuple[str, Any]]],
) -> type[nn.Module]:
    def read(self: Any, name: str) -> Any:
        try:
            value = base.__getattribute__(self, name)
        except AttributeError:
            # Parameters, buffers and submodules come from __getattr__, or nothing does.
            missed(self, name)
            raise
        if name.startswith("__"):
            return value
        asked = written_by_user(sys._getframe(1))
        own = name in object.__getattribute__(self, "__dict__")
        if asked and (name in _TENSORS_OF or (callable(value) and not own)):
            used(self, name)
        if name in _INTERNAL or name == "forward":
            return value
        if own or (_plain(value) and not callable(value)) or (asked and _held(base, name)):
            note(self, name, value)
        return value

    def change(self: Any, name: str, *_: Any) -> None:
        if name.startswith("_tensor_constant"):  # what fx does with such a tensor
            tracer.refuse("its forward uses a tensor that is no parameter and no buffer")
        tracer.refuse(f"its forward sets self.{name}")

    def listing(method: str) -> Any:
        def named(
            self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Any]]:
            if tracer.listening:
                return each(self, (method, recurse, remove_duplicate), prefix)
            found: Iterator[tuple[str, Any]] = getattr(base, method)(
                self, prefix, recurse, remove_duplicate
            )
            return found

        return named

    space = {
        "__getattribute__": read, "__setattr__": change, "__delattr__": change,
        "_convnormpool_base": base, "__module__": base.__module__,
    }  # fmt: skip
    for method in ("named_buffers", "named_parameters"):
        if getattr(base, method) is getattr(nn.Module, method):
            space[method] = listing(method)
    return derived_class(base.__name__, (base,), space)


def _held(kind: type, name: str) -> bool:
    """Whether a class holds an object under a name that may change without being set anew."""
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, type):
        return True
    return not (value is None or callable(value) or hasattr(type(value), "__get__"))


def _required_inputs(kind: type[nn.Module]) -> tuple[str, ...]:
    """The inputs that a forward always gets; all others have their defaults when it is traced."""
    found = []
    for parameter in list(inspect.signature(kind.forward).parameters.values())[1:]:
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            raise NotTraceable(f"its forward needs {parameter.name} by name")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found.append(parameter.name)
    if not found:
        raise NotTraceable("its forward has no inputs that it always gets")
    return tuple(found)


_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
LAYERS = ("torch.nn.", "torch.ao.nn.", "convnormpool.")


def closed(module: nn.Module) -> str:
    """Why a module's forward is not Python code of its class, or ""."""
    kind = class_of(module)
    if isinstance(module, fx.GraphModule | torch.jit.ScriptModule):
        return "its forward is generated; fuse_ the model that it was made of"
    if issubclass(kind, Fused):
        return "its class was replaced after fuse_"
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    own = kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl
    if own:
        return "its class has a __call__ of its own"
    return ""


def opaque(module: nn.Module) -> bool:
    """Whether tracing takes a call of the module as one operation, whatever its forward does."""
    kinds = [c for c in class_of(module).__mro__ if c not in _CONTAINERS]
    return any(c.__module__.startswith(LAYERS) for c in kinds) or bool(closed(module))
