"""What fuse_ refuses, and why; forward code of which it has seen one course."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusion_models import (
    Block,
    Pooled,
    Spelled,
    calls,
    chain,
    fused,
    mean,
    sample,
)
from torch import Tensor, nn

from convnormpool.fusion import FusionReport, fuse_


class Hooked(nn.Conv3d):
    """A convolution that does more than one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Inherits(nn.Conv3d):
    """A convolution that is one."""

    def __init__(self) -> None:
        super().__init__(3, 8, 3, padding_mode="reflect", padding=1, groups=1)


def test_subclasses_that_compute_the_same() -> None:
    fused(nn.Sequential(Inherits(), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool3d(1)), sample("cpu"))


def swapped(first: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *list(chain(nn.ReLU(), None))[1:])


def own_forward() -> nn.Sequential:
    model = chain(nn.ReLU(), None)
    model[1].forward = torch.sigmoid
    return model


def hooked(which: int, register: str = "register_forward_hook") -> nn.Sequential:
    model = nn.Sequential(chain(nn.ReLU(), None, pool=False), *list(chain())[1:])
    place = [*model[0], model[0], model[1]][which]
    getattr(place, register)(lambda *_: None)
    return model


class NoGrad(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.block(x)
        out: Tensor = self.head(x.mean(dim=(2, 3, 4)))
        return out


class NoAutocast(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class DependsOnGradients(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.is_grad_enabled() else 2)


class Checkpointed(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        out: Tensor = self.head(x.mean(dim=(2, 3, 4)))
        return out


class Ordered(Pooled):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return OrderedDict(out=super().forward(x))


class Branches(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x)


class Counts(Pooled):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Remembers(Pooled):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x)


class Draws(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand(()) < 2 else x


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: chain(None, nn.ReLU()), "activation comes after the normalisation"),
        (lambda: Pooled(Block(("conv", "norm", "act"))), "comes after"),
        (lambda: chain(nn.ReLU(), nn.SiLU(), None), "more than one activation"),
        (lambda: chain(nn.ReLU(), None, None), "more than one normalisation"),
        (lambda: chain(nn.ReLU(), nn.BatchNorm3d(8)), "BatchNorm3d, not GroupNorm"),
        (lambda: chain(nn.ReLU(), nn.InstanceNorm3d(8)), "InstanceNorm3d, not GroupNorm"),
        (lambda: chain(nn.PReLU(), None), "PReLU is not among"),
        (lambda: chain(nn.LeakyReLU(0.2), None), "negative_slope=0.2; only 0.01"),
        (lambda: chain(nn.ELU(2.0), None), "alpha=2.0; only 1"),
        (lambda: chain(nn.Hardtanh(), None), "min_val=-1.0; only 0"),
        (lambda: chain(nn.ReLU(), nn.Dropout3d(0.3), None), "Dropout3d with p=0.3"),
        (lambda: Spelled(mean, F.hardtanh), "min_val=-1.0"),
        (lambda: Spelled(mean, F.dropout), "dropout stands in between"),
        (lambda: Spelled(mean, torch.sigmoid), "sigmoid is not among"),
        (lambda: swapped(nn.ConvTranspose3d(3, 8, 3)), "transposed"),
        (lambda: swapped(Hooked(3, 8, 3)), "forward of its own"),
        (lambda: swapped(nn.LazyConv3d(8, 3)), "has hooks"),
        (own_forward, "ReLU has a forward of its own"),
        (lambda: hooked(0), "Conv3d has hooks"),
        (lambda: hooked(1, "register_forward_pre_hook"), "ReLU has hooks"),
        (lambda: hooked(2, "register_full_backward_hook"), "GroupNorm has hooks"),
        (lambda: hooked(3), "Sequential 0 has hooks"),
        (lambda: hooked(4, "register_full_backward_pre_hook"), "AdaptiveAvgPool3d has hooks"),
        (lambda: swapped(nn.utils.weight_norm(nn.Conv3d(3, 8, 3))), "Conv3d has hooks"),
        (lambda: Spelled(lambda h: h.mean((2, 3))), "all of them"),
        (lambda: Spelled(lambda h: h.mean((1, 2, 3, 4))), "all of them"),
        (lambda: Spelled(lambda h: h.mean()), "all of them"),
        (lambda: Spelled(lambda h: h.mean((2, 3, 4), dtype=torch.float64)), "arguments other"),
        (lambda: Spelled(lambda h: h.mean("H")), "dimensions by name"),
        (lambda: Spelled(nn.AdaptiveAvgPool3d(2)), "pools to 2, not to one position"),
        (lambda: Spelled(lambda h: mean(h) + h.amax((2, 3, 4))), "GroupNorm is also used by amax"),
        (lambda: Spelled(lambda h: (mean(h), h)), "GroupNorm is returned"),
        (lambda: Spelled(nn.AdaptiveMaxPool3d(1)), "takes the maximum"),
        (lambda: Spelled(lambda h: mean(h + 1)), "add stands in between"),
        (
            lambda: nn.Sequential(
                *chain(nn.ReLU(), None, pool=False), nn.AvgPool3d(4), nn.Flatten()
            ),
            "AvgPool3d averages windows",
        ),
        (lambda: NoGrad(Block()), "has a part with other gradient"),
        (lambda: NoAutocast(Block()), "has a part with other gradient"),
        (lambda: DependsOnGradients(Block()), "depends on whether gradients"),
        (lambda: Checkpointed(Block()), "or checkpoint modes"),
        (lambda: Ordered(Block()), "passes a OrderedDict"),
        (lambda: Spelled(lambda h: mean(h) * h.size(2)), "GroupNorm is also used by size"),
        (lambda: Branches(Block()), "can't be traced"),
        (lambda: Counts(Block()), "sets self.calls"),
        (lambda: Remembers(Block()), "changes self.seen"),
        (lambda: Draws(Block()), "draws random numbers"),
        (lambda: torch.fx.symbolic_trace(Pooled(Block())), "its forward is generated"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refused_with_the_reason(build: Callable[[], nn.Module], reason: str) -> None:
    """And nothing of the model is touched."""
    model = build()
    before = [(type(m), repr(m.__dict__)) for m in model.modules()]
    report = fuse_(model)
    assert not report and [reason in place.reason for place in report.refused] == [True], report
    assert reason in str(report)
    assert [(type(m), repr(m.__dict__)) for m in model.modules()] == before


def test_windows_between_blocks_are_not_mentioned() -> None:
    """What goes on is no head, whose author may have taken it for one that is fused."""
    first = nn.Sequential(*chain(nn.ReLU(), None, pool=False), nn.AvgPool3d(2))
    report = fuse_(nn.Sequential(*first, nn.Conv3d(8, 3, 1), *chain(nn.ReLU(), None)))
    assert len(report) == 1 and not report.refused


def test_not_mentioned_where_nothing_looks_like_it() -> None:
    model = nn.Sequential(
        nn.Conv3d(3, 8, 3), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv3d(8, 8, 3), nn.ReLU(),
        nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1),
    )  # fmt: skip
    assert fuse_(model) == FusionReport() and fuse_(nn.Linear(2, 2)) == FusionReport()
    with pytest.raises(TypeError, match="model must be"):
        fuse_("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp32_precision must be"):
        fuse_(model, fp32_precision="high")


class Modes(nn.Module):
    """Forward code whose course depends on the mode, an input that is seldom given, a setting."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.group_norm(F.relu(self.conv(x)), 2, self.norm.weight, self.norm.bias, eps=1e-3)
        if mask is not None:
            h = h * mask
        pooled = h.mean((2, 3, 4))
        return pooled * self.scale if self.training else pooled


def test_forward_that_depends_on_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode has its own code; what was not traced runs the original."""
    model = Modes().to(device)
    x = sample(device).float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    made = calls(monkeypatch)
    ones = x.new_ones(1)
    for training in (True, False):
        model.train(training), original.train(training)
        assert torch.equal(model(x, ones), original(x, ones))
        assert torch.equal(model(x, mask=None), original(x)) and not made[2 * (not training) :]
        torch.testing.assert_close(model(x), original(x))
        torch.testing.assert_close(model(x=x), original(x))
    assert len(made) == 4
    model.train(), original.train()
    model.scale = original.scale = 3.0
    assert torch.equal(model(x), original(x)) and len(made) == 4
