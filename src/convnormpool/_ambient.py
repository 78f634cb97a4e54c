"""What is around forward code while it is traced: modes, generators, and tensors that must stay."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NoChanges", "Snapshot", "ambient", "generators", "modes", "set_generators"]

_AUTOCAST = ("cpu", "cuda")
# What a module has by names: tensors, submodules, hooks.
_REGISTRIES = frozenset(name for name, value in nn.Module().__dict__.items() if value is not None)


def ambient() -> tuple[Any, ...]:
    """What a context manager around operations may have changed, which a graph does not hold."""
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST
    ]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # checkpointing's
    on = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.initial_seed())
    return (*on, hooks, *autocast)


@contextmanager
def modes(gradients: bool, autocast: bool) -> Iterator[None]:
    """Gradients and autocast on or off, inference mode off."""
    before = {device: torch.is_autocast_enabled(device) for device in _AUTOCAST}
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        try:
            for device in before:
                torch.set_autocast_enabled(device, autocast)
            yield
        finally:
            for device, enabled in before.items():
                torch.set_autocast_enabled(device, enabled)


def generators() -> tuple[Any, ...]:
    """The states of the generators that anybody may draw from."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def set_generators(state: tuple[Any, ...]) -> bool:
    """Takes back what was drawn since; whether anything was."""
    now = generators()
    drawn = not now[0].equal(state[0]) or now[1] != state[1]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        numpy = sys.modules["numpy"]
        same = map(numpy.array_equal, now[2], state[2])
        drawn = not all(same) or drawn
        numpy.random.set_state(state[2])
    return drawn


class NoChanges(TorchDispatchMode):
    """Refuses what code outside of the graph would change for good, in each tensor there is."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.refuse("its forward changes tensors in a way that is not traced")
        return func(*args, **(kwargs or {}))


class Snapshot:
    """What modules hold, to be put back: attributes, registries, and which data a tensor has."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        self._registries: list[tuple[str, Any, Any]] = [
            (name, value, value.copy())
            for module, attributes in self._attributes
            for name, value in attributes.items()
            if isinstance(value, dict | set) and name in _REGISTRIES
        ]
        tensors = {
            id(t): t
            for module, _ in self._attributes
            for registry in (module._parameters, module._buffers)
            for t in registry.values()
            if t is not None and type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
        }
        self._tensors = [(t, t.data, t.requires_grad) for t in tensors.values()]

    def restore(self) -> str:
        """The name of something that has changed, or ""."""
        changed = ""
        for module, attributes in self._attributes:
            now = module.__dict__
            other = [
                n for n in (*now, *attributes) if now.get(n, now) is not attributes.get(n, now)
            ]
            if other:
                changed = changed or other[0]
                now.clear()
                now.update(attributes)
        for name, registry, before in self._registries:
            values = [list(r.values()) if isinstance(r, dict) else [] for r in (registry, before)]
            if list(registry) != list(before) or any(map(operator.is_not, *values)):
                changed = changed or name
                registry.clear()
                registry.update(before)
        for tensor, data, requires_grad in self._tensors:
            moved = tensor.dtype != data.dtype or tensor.shape != data.shape
            if moved or tensor.device != data.device or tensor.data_ptr() != data.data_ptr():
                changed = changed or "a tensor's data"
                tensor.data = data
            if tensor.requires_grad != requires_grad:
                changed = changed or "requires_grad"
                tensor.requires_grad_(requires_grad)
        return changed
