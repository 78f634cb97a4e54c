"""Models to fuse, and what must hold of a fused one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
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
