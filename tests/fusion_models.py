"""Models to fuse, and what must hold of a fused one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import FACTOR_FLOAT64, error
from torch import Tensor, nn

from convnormpool.fusion import FusionReport, fuse_

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOL = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def sample(device: str, dims: int = 3, channels: int = 3) -> Tensor:
    """Wide enough for both knees of hardswish."""
    return torch.randn(2, channels, *(6, 7, 8)[:dims], dtype=torch.float64).to(device) * 4


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    torch.manual_seed(0)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(out))
    grads = (leaf.grad, *(p.grad for p in model.parameters()))
    return [out.detach(), *(g.clone() for g in grads if g is not None)]


def assert_equivalent(
    found: nn.Module, original: nn.Module, x: Tensor, dtype: torch.dtype = torch.float64
) -> None:
    """As near as eager's own error in float32 allows, scaled down for float64; the same shapes."""
    single = results(copy.deepcopy(original).float(), x.float())
    right = results(original.double(), x)
    ours = results(found.to(dtype), x.to(dtype))
    eps = torch.finfo(torch.float32).eps
    for mine, theirs, alone in zip(ours, right, single, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == dtype
        own = max(error(alone, theirs), eps * theirs.norm().item())
        assert error(mine, theirs) <= FACTOR_FLOAT64 * torch.finfo(dtype).eps / eps * own


def fused(
    model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float64, **more: Any
) -> FusionReport:
    """Fuses a model and shows that all but its forward is as before."""
    original = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    report = fuse_(model, **more)
    assert report, str(report)
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert_equivalent(model, original, x, dtype)
    return report


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the activation's name at each call of the layer in a fused place."""
    import convnormpool.modules as module

    made: list[str] = []
    real = module.conv_norm_pool

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(kwargs["activation"])
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "conv_norm_pool", counted)
    return made


def chain(*steps: nn.Module | None, dims: int = 3, pool: bool = True) -> nn.Sequential:
    """A convolution, the steps (None for GroupNorm), and the mean."""
    layers = [CONV[dims - 1](3, 8, 3), *(nn.GroupNorm(2, 8) if s is None else s for s in steps)]
    return nn.Sequential(*layers, *([POOL[dims - 1](1), nn.Flatten()] if pool else []))


def mean(h: Tensor) -> Tensor:
    return h.mean((2, 3, 4))


class Pooled(nn.Module):
    """A block and the mean in forward code."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x).mean(dim=(-3, -2, -1)))
        return out


class Spelled(nn.Module):
    """The chain in forward code, with a function for each of activation and mean."""

    def __init__(
        self, pool: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor] = F.relu6
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.act, self.pool = act, pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.act(self.conv(x))))


class Block(nn.Module):
    """An mmcv-like block: the order of its parts is a setting, two of them can be left out."""

    def __init__(self, order: tuple[str, ...] = ("conv", "act", "norm")) -> None:
        super().__init__()
        self.order = order
        self.conv = nn.Conv3d(3, 8, 3, padding="same", bias=False)
        self.norm_name = "gn"
        self.add_module(self.norm_name, nn.GroupNorm(4, 8))
        self.activate = nn.ReLU(inplace=True)
        self.with_norm = self.with_activation = True

    @property
    def norm(self) -> nn.Module:
        return self.get_submodule(self.norm_name)

    def forward(self, x: Tensor, activate: bool = True, norm: bool = True) -> Tensor:
        for part in self.order:
            if part == "conv":
                x = self.conv(x)
            elif part == "norm" and norm and self.with_norm:
                x = self.norm(x)
            elif part == "act" and activate and self.with_activation:
                x = self.activate(x)
        return x


class Head(nn.Module):
    """As in torchvision's video models: a classifier that pools its features."""

    def __init__(self) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout = nn.Dropout(0.0)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return out


class VideoClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU())
        self.layer = nn.Sequential(Block(), nn.Identity())
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.layer(x + 0.5)
        out: Tensor = self.head(x)
        return out


class Base(nn.Module):
    """The chain as a method, for forward code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)

    def pooled(self, x: Tensor) -> Tensor:
        return mean(self.norm(F.silu(self.conv(x))))


def with_forward(forward: Callable[..., Any], base: type[Base] = Base) -> Any:
    """An instance of a new class ``Model``."""
    return type("Model", (base,), {"forward": forward})()


def of_parameters(self: Any, x: Tensor) -> Tensor:
    first = next(self.parameters())
    out: Tensor = self.pooled(x.to(first.dtype)).to(first.device)
    return out


def counts_buffers(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.pooled(x) * (1 + len(list(self.buffers())))
    return out
