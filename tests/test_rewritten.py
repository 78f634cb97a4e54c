"""What a rewritten forward takes for granted: of its inputs, of what may change, of classes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusion_models import Base, calls, counts_buffers, of_parameters, sample, with_forward
from torch import Tensor, nn

from convnormpool.fusion import fuse_

Forward = Callable[..., Any]


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


class Weighted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weights = {"one": 1.0, "two": 2.0}


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
    model, x = with_forward(forward, Weighted), sample("cpu").float()
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
