"""fuse_ on the blocks of MONAI as it comes from PyPI."""

from __future__ import annotations

import pytest
import torch
from fusion_models import Pooled, fused, sample
from monai.networks.blocks import Convolution
from torch import nn

from convnormpool import fuse_


def block(order: str = "AN") -> Convolution:
    norm = ("group", {"num_groups": 4})
    return Convolution(3, 3, 8, adn_ordering=order, act="RELU", norm=norm)


@pytest.mark.parametrize(
    "around", [lambda part: nn.Sequential(part, nn.AdaptiveAvgPool3d(1)), Pooled]
)
def test_activation_before_norm(around: type[nn.Module], device: str) -> None:
    """Followed by a mean in a Sequential and in forward code; the block itself stays as it is."""
    x = sample(device)
    model = around(block()).to(device)
    part = next(model.children())
    features = part(x.float())
    report = fused(model, x)
    assert report.fused[0].name.endswith(".conv")
    assert torch.equal(part.float()(x.float()), features)


@pytest.mark.parametrize("order", ["NA", "NDA"])
def test_norm_before_activation(order: str) -> None:
    report = fuse_(nn.Sequential(block(order), nn.AdaptiveAvgPool3d(1)))
    assert not report and "comes after" in report.refused[0].reason
