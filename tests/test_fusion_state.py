"""Fused models whose forward code depends on, or changes, what the model holds."""

from __future__ import annotations

import copy
import gc
import linecache
from collections.abc import Callable
from typing import Any

import fusion_models
import pytest
import torch
import torch.nn.functional as F
from fusion_models import calls, chain, mean, sample
from torch import Tensor, nn

from convnormpool.fusion import fuse_


class Base(fusion_models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("offset", None)
        self.register_parameter("scale", None)
        self.register_module("extra", None)
        self.register_buffer("steps", torch.zeros(8))


class Optional(Base):
    def forward(self, x: Tensor) -> Tensor:
        out = self.pooled(x)
        if self.offset is not None:
            out = out + self.offset
        if self.scale is not None:
            out = out * self.scale
        if self.extra is not None:
            out = self.extra(out)
        if hasattr(self, "temperature"):
            out = out / self.temperature
        if isinstance(self.head, nn.Linear):
            out = self.head(out).exp()
        return out


class Settings(Base):
    """Reads what modules of PyTorch are set to."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        h = F.group_norm(F.silu(self.conv(x)), norm.num_groups, norm.weight, norm.bias, norm.eps)
        out = F.dropout(mean(h), self.drop.p, True)
        return out * 2 if self.head.training else out


def _linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(8, 8)


CHANGES: dict[str, tuple[type[Base], Callable[[Any], Any]]] = {
    "buffer": (Optional, lambda m: setattr(m, "offset", torch.ones(8))),
    "parameter": (Optional, lambda m: setattr(m, "scale", nn.Parameter(torch.full((8,), 3.0)))),
    "module": (Optional, lambda m: setattr(m, "extra", _linear())),
    "attribute": (Optional, lambda m: setattr(m, "temperature", 2.0)),
    "class": (Optional, lambda m: setattr(m, "head", nn.Identity())),
    "eps": (Settings, lambda m: setattr(m.norm, "eps", 1.0)),
    "groups": (Settings, lambda m: setattr(m.norm, "num_groups", 4)),
    "dropout": (Settings, lambda m: setattr(m.drop, "p", 1.0)),
    "mode": (Settings, lambda m: m.head.eval()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_forward_follows_what_it_looked_at(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, apply = CHANGES[change]
    model, x = kind(), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    made = calls(monkeypatch)
    torch.testing.assert_close(model(x), original(x))
    assert len(made) == 1
    for m in (model, original, copied := copy.deepcopy(model)):
        apply(m)
    torch.testing.assert_close(model(x), original(x))
    torch.testing.assert_close(copied(x), original(x))


@pytest.mark.parametrize("name", ["offset", "extra"])
def test_what_is_taken_away(name: str) -> None:
    model, x = Optional(), sample("cpu").float()
    model.offset, model.extra = torch.ones(8), _linear()
    original = copy.deepcopy(model)
    assert fuse_(model)
    for m in (model, original):
        setattr(m, name, None)
    torch.testing.assert_close(model(x), original(x))


class Counting(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.pooled(x) + self.steps


class Averaging(Base):
    def forward(self, x: Tensor) -> Tensor:
        out = self.pooled(x)
        self.steps.mul_(0.9).add_(out.detach().mean(0))
        return out - self.steps


class Warming(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x if self.steps.sum() > 4 else x * 2)


class Assigning(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.pooled(x)


class Clamping(Base):
    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.conv.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        return self.pooled(x)


class Recording(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        self.conv.last = h
        return mean(self.norm(F.silu(h)))


class ChangedInBetween(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.conv(x))
        self.norm.bias.detach().add_(1)
        return mean(self.norm(h))


class Seeded(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = F.dropout(x, 0.5)
        return self.pooled(x)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        (Counting, 1), (Averaging, 1), (Warming, 0), (Assigning, 0), (Clamping, 1),
        (Recording, 0), (ChangedInBetween, 0), (Seeded, 0),
    ],
)  # fmt: skip
def test_forward_that_changes_the_model(kind: type[Base], places: int) -> None:
    """``fuse_`` changes no tensor and no attribute, and each call changes what it did before."""
    model, x = kind(), sample("cpu").float()
    original = copy.deepcopy(model)
    assert len(fuse_(model)) == places
    assert not hasattr(model.conv, "last")
    for _ in range(3):
        for name, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        with torch.no_grad():
            torch.testing.assert_close(model(x), original(x))
        model.load_state_dict(original.state_dict())
        model.steps += 1
        original.steps += 1


def test_sources_go_with_their_models() -> None:
    """Nothing of a model that is gone is kept for tracebacks."""
    gc.collect()
    before = len(linecache.cache)
    for _ in range(5):
        fuse_(chain(nn.ReLU(), None))
    gc.collect()
    assert len(linecache.cache) <= before + 2


class TiedConvolutions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.conv
        self.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.pooled(x) + self.other(x).mean((2, 3, 4))
        return F.linear(F.linear(out, self.head.weight), self.weight)


@pytest.mark.parametrize("name", ["other", "weight"])
def test_ties_that_are_cut(name: str) -> None:
    model, x = TiedConvolutions(), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    torch.testing.assert_close(model(x), original(x))
    new = {"other": nn.Conv3d(3, 8, 3), "weight": nn.Parameter(torch.randn(8, 8))}[name]
    for m in (model, original):
        setattr(m, name, new)
    torch.testing.assert_close(model(x), original(x))


def test_setting_in_a_list() -> None:
    """What a list says later is seen."""
    model = chain(nn.ReLU(), None, pool=False).append(nn.AdaptiveAvgPool3d([1, 1, 1])).double()
    assert len(fuse_(model).fused) == 1
    model[-1].output_size[0] = 2
    assert model(sample("cpu")).shape[2:] == (2, 1, 1)
