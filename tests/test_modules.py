"""``ConvNormPool3d`` as a module: row "module compatibility", hooks, padding modes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALVES
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from convnormpool import ConvNormPool3d, explain, reference

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "not_affine": {"affine": False},
    "grouped": {"groups": 2, "stride": (1, 2, 1), "padding": (1, 0, 1), "dilation": (1, 1, 2)},
}


class Chain(nn.Module):
    """The same layer as modules of PyTorch."""

    def __init__(self, *, bias: bool = True, affine: bool = True, **convolution: Any) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 16, 3, bias=bias, **convolution)
        self.group_norm = nn.GroupNorm(4, 16, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.group_norm(nn.functional.hardswish(self.conv(x))).mean(dim=(2, 3, 4))
        return pooled


def sample(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(2, 4, 6, 7, 8) * 3).to(device, dtype)


@pytest.mark.parametrize("options", OPTIONS)
def test_row_module_compatibility(options: str, device: str, any_path: str) -> None:
    """Same names, same initial values from the same seed, state_dict both ways, same results."""
    torch.manual_seed(17)
    eager = Chain(**OPTIONS[options])
    torch.manual_seed(17)
    layer = ConvNormPool3d(4, 16, 3, path=any_path, **OPTIONS[options])
    state = layer.state_dict()
    assert list(state) == list(eager.state_dict())
    for name, value in eager.state_dict().items():
        assert torch.equal(state[name], value), name
    with torch.no_grad():
        for p in eager.parameters():
            p.copy_(torch.randn_like(p))
    layer.load_state_dict(eager.state_dict())
    back = Chain(**OPTIONS[options])
    back.load_state_dict(layer.state_dict())
    x = sample(device)
    right = eager.to(device).double()(x.double())
    assert torch.allclose(layer.to(device)(x).double(), right, rtol=1e-4, atol=1e-4)


def test_row_deepcopy_and_pickle(device: str) -> None:
    layer = ConvNormPool3d(4, 16, 3, padding="same", activation="silu", path="two_stage").to(device)
    x = sample(device)
    wanted = layer(x)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for again in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stored, weights_only=False),
    ):
        assert torch.equal(again(x), wanted) and repr(again) == repr(layer)
        assert not any(a is b for a, b in zip(again.parameters(), layer.parameters(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_dtypes(dtype: torch.dtype, device: str, any_path: str) -> None:
    """.half(), .to(bf16), .double(), and back."""
    layer = ConvNormPool3d(4, 16, 3, path=any_path).to(device)
    x = sample(device)
    near = 0.05 if dtype in HALVES else 1e-4
    right = layer(x)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype and torch.allclose(out.float(), right, rtol=near, atol=near)
    assert ConvNormPool3d(4, 16, 3, dtype=dtype, device=device).conv.weight.dtype == dtype


def test_channels_last_parameters(device: str, path: str) -> None:
    layer = ConvNormPool3d(4, 16, 3, path=path).to(device)
    x = sample(device)
    right = layer(x)
    layer = layer.to(memory_format=torch.channels_last_3d)
    found = layer(x.contiguous(memory_format=torch.channels_last_3d))
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert layer.conv.weight.grad is not None


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes(mode: str, device: str, any_path: str) -> None:
    options: dict[str, Any] = {"padding": (1, 2, 0), "padding_mode": mode}
    layer, eager = ConvNormPool3d(4, 16, 3, path=any_path, **options), Chain(**options)
    eager.load_state_dict(layer.state_dict())
    # In float64 no output is so near to a kink that either slope could be right.
    x = sample(device, torch.float64).requires_grad_()
    layer.to(device).double()(x).square().sum().backward()
    z = x.detach().requires_grad_()
    eager.to(device).double()(z).square().sum().backward()
    assert x.grad is not None and z.grad is not None
    # PyTorch's own float64 hardswish on CUDA has 1/6 in float32.
    assert torch.allclose(x.grad, z.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations(wrap: Any, device: str) -> None:
    """The weight that is used is the parametrized one, and its originals get gradients."""
    layer = ConvNormPool3d(4, 16, 3).to(device)
    wrap(layer.conv)
    layer.eval()
    x = sample(device)
    right = reference.conv_norm_pool(
        x, layer.conv.weight, layer.conv.bias, num_groups=4,
        norm_weight=layer.group_norm.weight, norm_bias=layer.group_norm.bias,
    )  # fmt: skip
    out = layer(x)
    assert torch.allclose(out, right, rtol=1e-3, atol=1e-4)
    out.square().sum().backward()
    originals = layer.conv.parametrizations.weight.parameters()
    assert all(p.grad is not None and p.grad.any() for p in originals)


@pytest.mark.parametrize("which", ["conv", "group_norm"])
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_fire(register: str, which: str, device: str) -> None:
    """Hooks on the submodules fire, on the eager path, which explain says."""
    layer = ConvNormPool3d(4, 16, 3).to(device)
    x = sample(device)
    plain = layer(x)
    calls: list[nn.Module] = []

    def hook(module: nn.Module, *_: Any) -> None:
        calls.append(module)

    handle = getattr(getattr(layer, which), register)(hook)
    assert explain(layer, x).path == "eager" and "hooks" in str(explain(layer, x))
    out = layer(x)
    out.sum().backward()
    assert calls == [getattr(layer, which)]
    assert torch.allclose(out, plain, rtol=1e-4, atol=1e-5)
    forced = copy.copy(layer)
    forced.path = "two_stage"
    with pytest.raises(ValueError, match="hooks"):
        forced(x)
    handle.remove()
    layer(x)
    assert len(calls) == 1


def test_hooks_on_the_layer_itself(device: str) -> None:
    layer = ConvNormPool3d(4, 16, 3).to(device)
    shapes: list[tuple[int, ...]] = []
    layer.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    x = sample(device)
    layer(x)
    assert shapes == [(2, 16)] and explain(layer, x).path != "eager"


def test_repr() -> None:
    text = repr(ConvNormPool3d(4, 16, 3, activation="mish", fp32_precision="tf32", path="eager"))
    for word in (
        "ConvNormPool3d",
        "Conv3d(4, 16",
        "GroupNorm(4, 16",
        "'mish'",
        "'tf32'",
        "'eager'",
    ):
        assert word in text


def test_frozen_layer_needs_no_gradient(device: str, path: str) -> None:
    layer = ConvNormPool3d(4, 16, 3, path=path).to(device).requires_grad_(False)
    assert not layer(sample(device)).requires_grad


def test_training_step_learns(device: str) -> None:
    """A few steps of an optimiser lower the loss, as the eager chain's do."""
    losses = []
    for path in ("auto", "eager"):
        torch.manual_seed(5)
        model = nn.Sequential(ConvNormPool3d(4, 16, 3, path=path), nn.Linear(16, 2)).to(device)
        optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
        x, target = sample(device), torch.tensor([0, 1], device=device)
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(x), target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())
    # The output's spread over two samples is small, so is what ten steps gain.
    assert losses[0] < 0.69 and losses[0] == pytest.approx(losses[1], rel=2e-2)
