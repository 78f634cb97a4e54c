"""What tracing leaves behind: nothing, whatever a forward does to its modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fusion_models import Base, sample
from torch import Tensor, nn

from convnormpool.fusion import fuse_


class Damaged(Base):
    """What tracing its forward would leave behind."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.scale = act, 1.0
        self.parts = nn.ModuleList([nn.Identity()])

    @functools.cached_property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @functools.cached_property
    def factor(self) -> float:
        return self.scale * 2

    @functools.lru_cache  # noqa: B019
    def remembered(self) -> torch.dtype:
        return self.conv.weight.dtype

    def forward(self, x: Tensor) -> Any:
        return getattr(self, f"do_{self.act}")(x)

    def do_cached(self, x: Tensor) -> Tensor:
        return self.pooled(x.to(self.device))

    def do_value(self, x: Tensor) -> Tensor:
        return self.pooled(x) * self.factor

    def do_remember(self, x: Tensor) -> Tensor:
        return self.pooled(x.to(self.remembered()))

    def do_buffer(self, x: Tensor) -> Tensor:
        if not hasattr(self, "pe"):
            self.register_buffer("pe", torch.ones(1))
        return self.pooled(x)

    def do_double(self, x: Tensor) -> Tensor:
        self.norm.double().float()
        self.conv.double()
        return self.pooled(x)

    def do_append(self, x: Tensor) -> Tensor:
        self.parts.append(nn.Identity())
        return self.pooled(x)

    def do_hook(self, x: Tensor) -> Tensor:
        self.parts.register_forward_hook(lambda *_: None)
        return self.pooled(x)

    def do_dict(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "last", x)
        return self.pooled(x)


DAMAGES = [name.removeprefix("do_") for name in vars(Damaged) if name.startswith("do_")]


@pytest.mark.parametrize("act", DAMAGES)
def test_nothing_is_left_behind(act: str) -> None:
    model, x = Damaged(act), sample("cpu").float()
    before = [
        (m, dict(m.__dict__), len(m._modules), len(m._forward_hooks)) for m in model.modules()
    ]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert not fuse_(model)
    for module, attributes, parts, hooks in before:
        assert module.__dict__ == attributes
        assert len(module._modules) == parts and len(module._forward_hooks) == hooks
    assert {k: v.dtype for k, v in model.state_dict().items()} == {
        k: v.dtype for k, v in state.items()
    }
    assert all(p.requires_grad for p in model.parameters())
    if act != "double":
        assert isinstance(model(x), Tensor)
