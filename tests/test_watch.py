"""Forward code that asks a tensor for more than its values, or does more than compute."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import cProfile
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fusion_models import (
    Base,
    calls,
    counts_buffers,
    mean,
    of_parameters,
    sample,
    with_forward,
)
from torch import Tensor, nn

from convnormpool.fusion import fuse_

Forward = Callable[..., Any]
kind_of = type


class Settings:
    scale = 2.0


class Configured(Base):
    settings: ClassVar = types.SimpleNamespace(scale=2.0)
    options = Settings


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class Outputs(list[Tensor]):
    pass


def by_class(self: Any, x: Tensor) -> Tensor:
    for part in self.children():
        x = part(x * 9 if type(part) is nn.Conv3d else x)
    return mean(x)


def caught(self: Any, x: Tensor) -> Tensor:
    try:
        if x.mean() > 0:
            x = x * 9
    except Exception:
        return self.pooled(x)
    return self.pooled(x)


def matched(self: Any, x: Tensor) -> Tensor:
    match x:
        case Tensor():
            return self.pooled(x * 9)
    return self.pooled(x)


@functools.singledispatch
def scaled(x: Any) -> Any:
    return x * 9


@scaled.register
def _(x: Tensor) -> Tensor:
    return x


def suppressed(self: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        x = x + x.view(2, 8)
    return self.pooled(x)


def fails_and_goes_on(self: Any, x: Tensor) -> Tensor:
    try:
        x = x + x.view(2, 8)
    except RuntimeError:
        x = x * 2
    return self.pooled(x)


@dataclasses.dataclass
class Doubled:
    pooled: Tensor

    def __post_init__(self) -> None:
        self.pooled = self.pooled * 2


class Options(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()


class Task(enum.Enum):
    ONE = "one"


@functools.lru_cache
def of_device(tensor: Tensor) -> torch.device:
    return tensor.device


def sets_data(self: Any, x: Tensor) -> Tensor:
    self.conv.weight.data = torch.renorm(self.conv.weight.data, 2, 0, 0.1)
    return self.pooled(x)


def sets_an_element(self: Any, x: Tensor) -> Tensor:
    x[0] = 0
    return self.pooled(x)


REFUSED: dict[str, tuple[Forward, str]] = {
    "isinstance": (
        lambda self, x: self.pooled(x * 9 if isinstance(x, Tensor) else x), "type of a tensor",
    ),
    "of a parameter": (
        lambda self, x: self.pooled(x * 9 if isinstance(self.conv.weight, nn.Parameter) else x),
        "type of a tensor",
    ),
    "is_tensor": (lambda self, x: self.pooled(x * 9 if torch.is_tensor(x) else x), "the type"),
    "type": (by_class, "calls type()"),
    "class": (lambda self, x: self.pooled(x * len(self.conv.__class__.__name__)), "__class__"),
    "identity": (lambda self, x, y: self.pooled(x * 3 if x is y else x), "identity"),
    "unknown attribute": (
        lambda self, x: self.pooled(x if getattr(x, "mask", None) is None else x * 2), "for mask",
    ),
    "sets data": (sets_data, "sets data of a tensor"),
    "sets an element": (sets_an_element, "sets elements"),
    "length": (lambda self, x: self.pooled(x) * len(x), "the length of a tensor"),
    "goes through": (lambda self, x: [self.pooled(part[None]) for part in x], "parts of a tensor"),
    "caught": (caught, "depends on values of tensors"),
    "item": (
        lambda self, x: self.pooled(x) * max(float(p.abs().max()) for p in self.parameters()),
        "can't be traced",
    ),
    "state_dict": (
        lambda self, x: self.pooled(x) * self.state_dict()["conv.weight"].sum(), "self.state_dict",
    ),
    "registry": (lambda self, x: self.pooled(x) + self._parameters.get("none", 1), "_parameters"),
    "dict": (lambda self, x: self.pooled(x) * self.__dict__["training"], "__dict__"),
    "vars": (lambda self, x: self.pooled(x) * vars(self)["training"], "vars()"),
    "object of the class": (
        lambda self, x: self.pooled(x) * self.settings.scale, "self.settings, a SimpleNamespace",
    ),
    "numpy draws": (
        lambda self, x: self.pooled(x * 9 if np.random.rand() < 0.5 else x), "random numbers",
    ),
    "numpy number": (lambda self, x: self.pooled(x) * np.float64(2.5), "passes a float64"),
    "list of its own": (lambda self, x: Outputs([self.pooled(x)]), "passes a Outputs"),
    "inference mode": (
        lambda self, x: self.pooled(x * 3 if torch.is_inference_mode_enabled() else x),
        "is_inference_mode_enabled()",
    ),
    "deterministic": (
        lambda self, x: self.pooled(x * 3 if torch.are_deterministic_algorithms_enabled() else x),
        "are_deterministic_algorithms_enabled()",
    ),
    "compiling": (
        lambda self, x: self.pooled(x) * (2 if torch.compiler.is_compiling() else 1),
        "is_compiling()",
    ),
    "tracing": (
        lambda self, x: self.pooled(x) * (2 if torch.jit.is_tracing() else 1), "is_tracing()",
    ),
    "autocast's dtype": (
        lambda self, x: self.pooled(x).to(torch.get_autocast_dtype("cpu")), "get_autocast_dtype()",
    ),
    "class of settings": (
        lambda self, x: self.pooled(x) * self.options.scale, "self.options, a type",
    ),
    "match": (matched, "matches patterns"),
    "abstract class": (
        lambda self, x: self.pooled(x * 9 if isinstance(x, collections.abc.Container) else x),
        "type of a tensor",
    ),
    "dispatch": (lambda self, x: self.pooled(scaled(x)), "type of a tensor"),
    "callable": (lambda self, x: self.pooled(x * 9 if callable(x) else x), "calls callable()"),
    "getattr of the class": (
        lambda self, x: self.pooled(x * len(getattr(x, "__class__").__name__)),  # noqa: B009
        "type of a tensor",
    ),
    "type by another name": (lambda self, x: self.pooled(x * len(kind_of(x).__name__)), "kind_of"),
    "typename": (lambda self, x: self.pooled(x * len(torch.typename(x))), "reads typename"),
    "suppress": (suppressed, "reads suppress"),
    "exceptions": (fails_and_goes_on, "catches exceptions"),
    "modes": (
        lambda self, x: self.pooled(
            x * 3 if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") else x
        ),
        "depends on whether gradients",
    ),
    "dataclass": (lambda self, x: Doubled(self.pooled(x)), "passes a Doubled"),
    "flags": (lambda self, x: (self.pooled(x), Options.ONE | Options.TWO), "passes a Options"),
    "cached function": (lambda self, x: self.pooled(x).to(of_device(x)), "remembers results"),
    "gradient's function": (
        lambda self, x: self.pooled(x if x.grad_fn is None else x * 9), "for grad_fn",
    ),
    "keys that are no literals": (lambda self, x: {Task.ONE: self.pooled(x)}, "rewritten"),
    "autograd function": (lambda self, x: self.pooled(Reversed.apply(x)), "applies Reversed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case: str) -> None:
    forward, reason = REFUSED[case]
    report = fuse_(with_forward(forward, Configured))
    assert not report and [reason in place.reason for place in report.refused] == [True], report


def in_place(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    alias = x
    x += 1
    out = self.pooled(x)
    first = out
    out *= 2
    return first + alias.mean()


def unpacks(self: Any, x: Tensor) -> Tensor:
    one, other = x.chunk(2)
    samples, _, _, _, _ = x.shape
    return self.pooled(x) * (one.mean() - other.mean()) / samples


def shape_before(self: Any, x: Tensor) -> Tensor:
    out = self.pooled(x)
    shape, transposed = out.shape, out.T
    out.unsqueeze_(0)
    return out.reshape(shape) + transposed.sum()


def under_a_name(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.profiler.record_function("forward"):
        return self.pooled(x)


FUSED: dict[str, Forward] = {
    "record_function": under_a_name,
    "shape before a change": shape_before,
    "flag": lambda self, x: self.pooled(x * 2 if self.training is True else x),
    "asks for nothing": lambda self, x: (self.conv(x).dtype, self.pooled(x))[1],
    "in place": in_place,
    "unpacks": unpacks,
    "parameters": of_parameters,
    "buffers": counts_buffers,
    "known attribute": lambda self, x: self.pooled(x if hasattr(x, "mean") else x * 2),
    "classes of modules": lambda self, x: self.pooled(
        x * 2 if isinstance(self.conv, nn.Conv3d) else x
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_and_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = with_forward(FUSED[case]), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    made = calls(monkeypatch)
    torch.testing.assert_close(model(x), original(x))
    assert made == ["silu"]


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor | None:
        return self.fc(x) if self.training else None


class Two(Base):
    def __init__(self) -> None:
        super().__init__()
        self.aux = Auxiliary()

    def forward(self, x: Tensor) -> Any:
        out = self.pooled(x)
        more = self.aux(out)
        return out if more is None else (out, more)


def test_a_module_that_may_return_none() -> None:
    model, x = Two(), sample("cpu").float()
    original = copy.deepcopy(model)
    fuse_(model)
    for training in (True, False):
        torch.testing.assert_close(model.train(training)(x), original.train(training)(x))


class Moves(nn.Module):
    """Changes another module's parameter, in a forward that can't be traced."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = [norm]

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError
        with torch.no_grad():
            self.norm[0].bias.add_(1)
        return x


class MovedInBetween(Base):
    def __init__(self) -> None:
        super().__init__()
        self.moves = Moves(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.conv(x))
        y = self.moves(x)
        return mean(self.norm(h)) + y.mean()


def test_a_module_that_changes_parameters_in_between() -> None:
    report = fuse_(MovedInBetween())
    assert not report and "may change" in report.refused[0].reason


class OldModules(Base):
    def named_modules(self, memo: Any = None, prefix: str = "") -> Any:  # type: ignore[override]
        yield from super().named_modules(memo, prefix)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x)


class OldSignature(Base):
    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x)


@pytest.mark.parametrize("kind", [OldModules, OldSignature])
def test_methods_with_other_signatures(kind: type[Base]) -> None:
    """It may refuse, but raises nothing."""
    model, x = kind(), sample("cpu").float()
    original = copy.deepcopy(model)
    fuse_(model)
    torch.testing.assert_close(model(x), original(x))


def test_beside_a_profiler() -> None:
    profile = cProfile.Profile()
    profile.enable()
    try:
        assert fuse_(with_forward(lambda self, x: self.pooled(x)))
        sample("cpu")
    finally:
        profile.disable()
    assert any(
        entry.code.co_name == "sample"
        for entry in profile.getstats()
        if hasattr(entry.code, "co_name")
    )
