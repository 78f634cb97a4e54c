"""Weights that are computed: parametrizations, and hooks that set ``weight`` before each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from convnormpool import ConvNormPool3d, explain

STEPS = 3
Wrap = Callable[[nn.Module], object]


class Chain(nn.Module):
    """The same layer as modules of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3, padding=1)
        self.group_norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.group_norm(nn.functional.hardswish(self.conv(x))).mean(dim=(2, 3, 4))
        return pooled


def pruned(conv: nn.Module) -> None:
    prune.l1_unstructured(conv, "weight", amount=0.5)


PARAMETRIZED: tuple[Wrap, ...] = (
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
)
# These register a forward pre-hook; two are the older functions of the same names.
HOOKED: tuple[Wrap, ...] = (nn.utils.weight_norm, nn.utils.spectral_norm, pruned)


def trained(model: nn.Module, device: str) -> dict[str, Tensor]:
    """The state after a few steps, in which spectral_norm's own vectors move once per call."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(2, 3, 4, 5, 6, generator=generator).to(device)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def both(wrap: Wrap, device: str) -> tuple[ConvNormPool3d, Chain]:
    models = (ConvNormPool3d(3, 8, 3, 4, padding=1), Chain())
    for model in models:
        model.load_state_dict(models[1].state_dict())
        torch.manual_seed(1)
        wrap(model.conv)
        model.to(device)
    return models


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "wrap", [*PARAMETRIZED, *HOOKED], ids=lambda f: f"{f.__module__}.{f.__name__}"
)
def test_training_as_the_chain(wrap: Wrap, device: str) -> None:
    """Parameters and buffers move as the eager chain's, by the same names."""
    layer, chain = both(wrap, device)
    found = trained(layer, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted = trained(chain, device)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
    path = explain(layer, torch.randn(2, 3, 4, 5, 6, device=device)).path
    assert (path == "eager") == (wrap in HOOKED)


@pytest.mark.parametrize("wrap", PARAMETRIZED[:2], ids=lambda f: f.__name__)
def test_compiled(wrap: Wrap, device: str) -> None:
    """In one graph, with gradients of the originals."""
    layer, _ = both(wrap, device)
    layer.eval()
    x = torch.randn(2, 3, 4, 5, 6, device=device)
    found = []
    torch._dynamo.reset()
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        call(x).square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_norm_parameters_and_removal(device: str) -> None:
    """The normalisation's weight may be computed, too; taken back, the layer is as it was."""
    layer, _ = both(lambda conv: None, device)
    x = torch.randn(2, 3, 4, 5, 6, device=device)
    plain = layer(x)
    parametrize.register_parametrization(layer.group_norm, "weight", nn.Softplus())
    wanted = plain * nn.functional.softplus(torch.ones(()))
    assert torch.allclose(layer(x), wanted, rtol=1e-4, atol=1e-6)
    parametrize.remove_parametrizations(layer.group_norm, "weight", leave_parametrized=False)
    assert torch.equal(layer(x), plain)


def test_explain_only_looks(device: str) -> None:
    """Spectral norm's vectors, which each look at the weight in training improves, stay."""
    layer = ConvNormPool3d(3, 8, 3).to(device)
    parametrizations.spectral_norm(layer.conv)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    explain(layer, torch.randn(2, 3, 4, 5, 6, device=device))
    assert layer.conv.parametrizations.weight.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
