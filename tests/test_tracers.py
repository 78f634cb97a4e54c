"""torch.jit.trace and torch.fx on models that contain the layer."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from convnormpool import ConvNormPool1d, ConvNormPool2d, ConvNormPool3d, conv_norm_pool

LAYERS: list[Any] = [ConvNormPool1d, ConvNormPool2d, ConvNormPool3d]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_jit_trace_keeps_no_sizes(axes: int, gradients: bool) -> None:
    """Traced, saved and loaded, and right for other sizes than those of the example."""
    layer = LAYERS[axes - 1](2, 8, 4, padding="same")
    x = torch.randn(5, 2, *(11, 9, 8)[:axes])
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(layer, torch.randn(3, 2, *(6,) * axes))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        torch.testing.assert_close(torch.jit.load(file)(x), layer(x))
    layer.path = "two_stage"
    with pytest.raises(ValueError, match=r"torch\.jit\.trace needs the eager path"):
        torch.jit.trace(layer, x)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_fx(axes: int) -> None:
    """The layer's call is one node; its parameters stay the model's."""
    layer = LAYERS[axes - 1](2, 8, 3, padding=1, padding_mode="reflect")
    model = nn.Sequential(layer, nn.Linear(8, 2))
    graph = torch.fx.symbolic_trace(model)
    assert any(node.target is conv_norm_pool for node in graph.graph.nodes)
    x = torch.randn(5, 2, *(11, 9, 8)[:axes])
    for found in (graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(found(x), model(x))
    graph(x).sum().backward()
    assert layer.conv.weight.grad is not None
