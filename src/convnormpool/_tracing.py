"""Traces a module's forward, and writes down what the traced code depends on."""

from __future__ import annotations

import copy
import enum
import inspect
import itertools
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._rewritten import Fused, Path, class_of, member

__all__ = ["LAYERS", "NotTraceable", "Tracer", "closed", "opaque"]


class NotTraceable(Exception):
    """Why a forward can't be rewritten, in words."""


_ENTRY = "_convnormpool_entry"
_AUTOCAST = ("cpu", "cuda")
_INTERNAL = frozenset(nn.Module().__dict__) - {"training", "_modules"}
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


def _plain(value: Any) -> bool:
    """Whether a value can be compared later with what it was, in copies of the model, too."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, itertools.chain(value, value.values())))
    return isinstance(value, _PLAIN)


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

    def __init__(self, leaf: Callable[[nn.Module], bool], *, switched: bool = False) -> None:
        super().__init__()
        self.leaf = leaf
        # Gradients off and autocast on meanwhile, instead of the other way round.
        self.switched = switched
        # By module and name: a copy of the value that forward code read, and that itself.
        self.reads: dict[tuple[Path, str], tuple[Any, Any]] = {}
        # By the same: what else was asked for, parameters and submodules and what is not there.
        self.members: dict[tuple[Path, str], type] = {}
        self.within: Path = ()
        self.listening = False

    def graph_of(self, root: nn.Module) -> tuple[fx.Graph, tuple[str, ...]]:
        """The graph and its inputs' names; each node's "scopes" are the modules it is called in."""
        state = torch.get_rng_state(), random.getstate()
        try:
            inputs = _required_inputs(class_of(root))
            with _NoChanges():  # type: ignore[no-untyped-call]
                # The first operation under a mode imports dynamo, which must not happen below:
                # torch.fx has replaced the functions of math there, and dynamo would keep those.
                torch.empty(0)
            with self._recording(root, inputs), _modes(self.switched), _NoChanges():  # type: ignore[no-untyped-call]
                self.ambient = _ambient()
                graph = self.trace(root)
        except NotTraceable:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise NotTraceable(f"its forward can't be traced: {lines[0]}") from error
        finally:
            # All that the forward did beside being traced is taken back.
            changed = [name for (_, name), values in self.reads.items() if _restore(*values)]
            drawn = random.getstate() != state[1] or not torch.get_rng_state().equal(state[0])
            torch.set_rng_state(state[0])
            random.setstate(state[1])
        if drawn:
            raise NotTraceable("its forward draws random numbers outside of modules")
        if changed:
            raise NotTraceable(f"its forward changes self.{changed[0]}")
        return graph, inputs

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
        if isinstance(a, dict) and not type(a).__module__.startswith(("builtins", "torch.fx.")):
            raise NotTraceable(f"its forward passes a {type(a).__name__}, which becomes a dict")
        with self._listen(False):
            return super().create_arg(a)

    def path_of_module(self, mod: nn.Module) -> str:
        with self._listen(False):
            return super().path_of_module(mod)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.leaf(m):
            return super().call_module(m, forward, args, kwargs)
        outside, self.within = self.within, (*self.within, self.path_of_module(m))
        try:
            return m.forward(*args, **kwargs)
        finally:
            self.within = outside

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _ambient() != self.ambient:
            raise NotTraceable(
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
                raise NotTraceable(f"its forward reads self.{name}, a {kind}, which may change")
            self.reads.setdefault((paths[module], name), (copy.deepcopy(value), value))

        def missed(module: nn.Module, name: str) -> None:
            if self.listening:
                with self._listen(False):
                    found = _named(member(module, name))
                self.members.setdefault((paths[module], name), found)

        try:
            for module in before:
                base = class_of(module)
                if base not in kinds:
                    kinds[base] = _recording_class(base, note, missed)
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


class _NoChanges(TorchDispatchMode):
    """Refuses what code outside of the graph would change for good, in each tensor there is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise NotTraceable("its forward changes tensors in a way that is not traced")
        return func(*args, **(kwargs or {}))


def _named(kind: type) -> type:
    """A class itself, or of one that parametrizations have made the one that it was made of."""
    return kind.__bases__[0] if kind.__name__.startswith("Parametrized") else kind


def _recording_class(
    base: type[nn.Module],
    note: Callable[[nn.Module, str, Any], None],
    missed: Callable[[nn.Module, str], None],
) -> type[nn.Module]:
    def read(self: Any, name: str) -> Any:
        try:
            value = base.__getattribute__(self, name)
        except AttributeError:
            # Parameters, buffers and submodules come from __getattr__, or nothing does.
            missed(self, name)
            raise
        if name not in _INTERNAL and name != "forward" and not name.startswith("__"):
            own = name in object.__getattribute__(self, "__dict__")
            if own or (_plain(value) and not callable(value)):
                note(self, name, value)
        return value

    def change(self: Any, name: str, *_: Any) -> None:
        if name.startswith("_tensor_constant"):  # what fx does with such a tensor
            raise NotTraceable("its forward uses a tensor that is no parameter and no buffer")
        raise NotTraceable(f"its forward sets self.{name}")

    space = {
        "__getattribute__": read, "__setattr__": change, "__delattr__": change,
        "_convnormpool_base": base,
    }  # fmt: skip
    kind = types.new_class(base.__name__, (base,), {}, lambda s: s.update(space))
    return cast("type[nn.Module]", kind)


def _ambient() -> tuple[Any, ...]:
    """What a context manager around operations may have changed, which a graph does not hold."""
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST
    ]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # checkpointing's
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.initial_seed())
    return (*modes, hooks, *autocast)


@contextmanager
def _modes(switched: bool) -> Iterator[None]:
    """Gradients on and autocast off, or ``switched``: what turns either shows in one of the two."""
    before = {device: torch.is_autocast_enabled(device) for device in _AUTOCAST}
    with torch.inference_mode(False), torch.set_grad_enabled(not switched):
        try:
            for device in before:
                torch.set_autocast_enabled(device, switched)
            yield
        finally:
            for device, enabled in before.items():
                torch.set_autocast_enabled(device, enabled)


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
    if kind.__call__ is not nn.Module.__call__:
        return "its class has a __call__ of its own"
    return ""


def opaque(module: nn.Module) -> bool:
    """Whether tracing takes a call of the module as one operation, whatever its forward does."""
    kinds = [c for c in class_of(module).__mro__ if c not in _CONTAINERS]
    return any(c.__module__.startswith(LAYERS) for c in kinds) or bool(closed(module))
