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
from fusion_models import calls, mean, sample
from torch import Tensor, nn

from convnormpool.fusion import fuse_

Forward = Callable[..., Any]
kind_of = type


class Settings:
    scale = 2.0


class Base(nn.Module):
    settings: ClassVar = types.SimpleNamespace(scale=2.0)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.scale = 1.0
        self.options = Settings
        self.weights = {"one": 1.0, "two": 2.0}

    def pooled(self, x: Tensor) -> Tensor:
        return mean(self.norm(F.silu(self.conv(x))))


def with_forward(forward: Forward) -> Any:
    return type("Model", (Base,), {"forward": forward})()


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
    "dict": (lambda self, x: self.pooled(x) * self.__dict__["scale"], "__dict__"),
    "vars": (lambda self, x: self.pooled(x) * vars(self)["scale"], "vars()"),
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
    report = fuse_(with_forward(forward))
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


def of_parameters(self: Any, x: Tensor) -> Tensor:
    first = next(self.parameters())
    return self.pooled(x.to(first.dtype)).to(first.device)


def counts_buffers(self: Any, x: Tensor) -> Tensor:
    return self.pooled(x) * (1 + len(list(self.buffers())))


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


def test_too_many_values_to_unpack() -> None:
    def forward(self: Any, pair: Tensor) -> Tensor:
        one, other = pair
        return self.pooled(one[None] + other)

    model = with_forward(forward)
    assert fuse_(model)
    with pytest.raises(ValueError, match="too many values to unpack"):
        model(torch.randn(3, 3, 6, 7, 8))


def masked(self: Any, x: Any, mask: Any) -> Tensor:
    if x is None:
        x = torch.ones(2, 3, 6, 7, 8)
    return self.pooled(x if mask is None else x * mask)


@pytest.mark.parametrize("inputs", [(1, None), (None, 1), (1, 2.0), (1, 1)])
def test_what_is_no_tensor(
    inputs: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original forward runs: what it asked of the inputs was answered as for tensors."""
    x = sample("cpu").float()
    given = [x if value == 1 else value for value in inputs]
    model = with_forward(masked)
    original = copy.deepcopy(model)
    assert fuse_(model)
    made = calls(monkeypatch)
    torch.testing.assert_close(model(*given), original(*given))
    assert len(made) == all(isinstance(value, Tensor) for value in given)


def scaled_by_the_first(self: Any, x: Tensor) -> Tensor:
    return self.pooled(x) * next(self.parameters()).mean()


def _circular(module: Any) -> None:
    def forward(self: nn.Conv3d, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv3d(F.pad(x, (1,) * 6, mode="circular"), w, b)

    module.conv._conv_forward = types.MethodType(forward, module.conv)


def _patched(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next(c for c in type(module).__mro__ if c.__name__ == "Model")
    monkeypatch.setattr(kind, "forward", lambda self, x: self.pooled(x) * 2)


def first_weight(self: Any, x: Tensor) -> Tensor:
    return self.pooled(x) * next(iter(self.weights.values()))


def _reversed(module: Any) -> None:
    module.weights = dict(reversed(module.weights.items()))


CHANGES: dict[str, tuple[Forward, Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "dtype": (of_parameters, lambda m, _: m.double()),
    "first parameter": (
        scaled_by_the_first,
        lambda m, _: m.register_parameter("own", nn.Parameter(torch.full((1,), 5.0))),
    ),
    "order": (first_weight, lambda m, _: _reversed(m)),
    "buffers": (counts_buffers, lambda m, _: m.register_buffer("more", torch.ones(1))),
    "method": (
        lambda self, x: self.pooled(x),
        lambda m, _: setattr(m, "pooled", lambda x: Base.pooled(m, x) * 9),
    ),
    "convolution": (lambda self, x: self.pooled(x), lambda m, _: _circular(m)),
    "class": (lambda self, x: self.pooled(x), _patched),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
def test_what_changes_after_fusing(
    change: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, apply = CHANGES[change]
    model, x = with_forward(forward), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    if copied:
        model = copy.deepcopy(model)
    torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        apply(m, monkeypatch)
    torch.testing.assert_close(model(x), original(x))


def test_patched_before_fusing() -> None:
    model = with_forward(lambda self, x: self.pooled(x))
    _circular(model)
    report = fuse_(model)
    assert not report and "a forward of its own" in report.refused[0].reason


def test_a_register_of_classes() -> None:
    """Classes that keep one are not told of those that tracing and rewriting make."""
    registered: list[str] = []

    class Registered(Base):
        def __init_subclass__(cls, *, name: str) -> None:
            registered.append(name)

    class Own(Registered, name="own"):
        def forward(self, x: Tensor) -> Tensor:
            return self.pooled(x)

    model, x = Own(), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model) and isinstance(model, Own)
    torch.testing.assert_close(model(x), original(x))
    assert registered == ["own"]


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


class Slotted(nn.Module):
    __slots__ = ("kept",)

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


class Scaled(nn.Module):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 2

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


@pytest.mark.parametrize("kind", [Slotted, Scaled])
def test_parts_of_other_classes(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout than nn.Module's, or another call: the place around them is fused."""
    model, x = with_forward(lambda self, x: self.pooled(self.part(x))), sample("cpu").float()
    model.part = kind()
    original = copy.deepcopy(model)
    assert fuse_(model)
    made = calls(monkeypatch)
    torch.testing.assert_close(model(x), original(x))
    assert made == ["silu"]


def test_errors_of_a_filter_are_its_own() -> None:
    def broken(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError, match="conv"):
        fuse_(with_forward(lambda self, x: self.pooled(x)), filter=broken)
