"""Submodules that do something of their own: they are called, on the eager path."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from convnormpool import ConvNormPool3d, explain


class Tripled(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


class Negated(nn.Conv3d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, -weight, bias)


class Squared(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


class Adapted(nn.Module):
    """A convolution with another beside it, as fine-tuning libraries wrap it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Conv3d(3, 8, 3)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.base(input) + self.beside(input)
        return out


def own_forward(layer: ConvNormPool3d) -> None:
    """On the instance, as libraries do that move weights to the device before each call."""
    inner = layer.conv.forward
    layer.conv.forward = lambda input: inner(input) + 1  # type: ignore[method-assign]


def subclass_of_conv(layer: ConvNormPool3d) -> None:
    layer.conv = Tripled(3, 8, 3)


def subclass_with_another_convolution(layer: ConvNormPool3d) -> None:
    layer.conv = Negated(3, 8, 3)


def subclass_of_norm(layer: ConvNormPool3d) -> None:
    layer.group_norm = Squared(4, 8)


def wrapped_conv(layer: ConvNormPool3d) -> None:
    layer.conv = Adapted(layer.conv)


def patched_on_the_instance(layer: ConvNormPool3d) -> None:
    def twice(conv: nn.Conv3d, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return 2 * nn.functional.conv3d(x, w, b)

    layer.conv._conv_forward = MethodType(twice, layer.conv)


def no_norm(layer: ConvNormPool3d) -> None:
    layer.group_norm = nn.Identity()


CHANGES = (
    own_forward,
    subclass_of_conv,
    subclass_with_another_convolution,
    subclass_of_norm,
    wrapped_conv,
    patched_on_the_instance,
    no_norm,
)


def sample(device: str) -> Tensor:
    return torch.randn(2, 3, 5, 6, 7, device=device)


def called(layer: ConvNormPool3d, x: Tensor) -> Tensor:
    """What calling the submodules one after the other gives."""
    h: Tensor = layer.group_norm(nn.functional.hardswish(layer.conv(x)))
    return h.mean(dim=(2, 3, 4))


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_own_forward_is_called(change: Callable[[ConvNormPool3d], None], device: str) -> None:
    """And explain says so; a path that is asked for and can't is an error."""
    layer = ConvNormPool3d(3, 8, 3)
    change(layer)
    layer.to(device)
    x = sample(device)
    assert torch.allclose(layer(x), called(layer, x), rtol=1e-4, atol=1e-5)
    assert "forward of their own" in explain(layer, x).reasons["fused"]
    layer.path = "two_stage"
    with pytest.raises(ValueError, match="forward of their own"):
        layer(x)


def test_replaced_by_the_like(device: str) -> None:
    """A plain convolution and normalisation in their places are read as the first ones were."""
    layer = ConvNormPool3d(3, 8, 3).to(device)
    x = sample(device)
    path = explain(layer, x).path
    layer.conv, layer.group_norm = nn.Conv3d(3, 8, 3), nn.GroupNorm(2, 8)
    layer.to(device)
    assert explain(layer, x).path == path and layer.fp32_precision == "ieee"
    assert torch.allclose(layer(x), called(layer, x), rtol=1e-4, atol=1e-5)
    assert "GroupNorm(2, 8" in repr(layer)


def test_hooks_on_all_modules(device: str) -> None:
    """PyTorch's global hooks see the submodules, too."""
    layer = ConvNormPool3d(3, 8, 3).to(device)
    x = sample(device)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        layer(x)
    finally:
        handle.remove()
    assert seen == [layer.conv, layer.group_norm, layer]
    assert explain(layer, x).path != "eager"
