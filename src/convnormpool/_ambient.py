"""What is around forward code while it is traced: modes, generators, and tensors that must stay."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NoChanges", "ambient", "generators", "modes", "set_generators"]

_AUTOCAST = ("cpu", "cuda")


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
def modes(switched: bool) -> Iterator[None]:
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
