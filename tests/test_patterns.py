"""What fuse_ recognises: how a place may be spelled, and the blocks that libraries make of it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fusion_models import (
    POOL,
    Block,
    Pooled,
    Spelled,
    VideoClassifier,
    calls,
    chain,
    fused,
    mean,
    sample,
)
from torch import Tensor, nn

from convnormpool.fusion import fuse_

# In float64 PyTorch's own hardsigmoid has 1/6 in float32 in its backward.
DTYPES = {"hardsigmoid": torch.float32}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sequential(dims: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested, with a head behind it, in training and evaluation."""
    body = chain(nn.ReLU(inplace=True), None, dims=dims, pool=False)
    model = nn.Sequential(
        OrderedDict(body=body, pool=POOL[dims - 1](1), flat=nn.Flatten(1), fc=nn.Linear(8, 5))
    ).to(device)
    made = calls(monkeypatch)
    report = fused(model, sample(device, dims))
    assert made == ["relu"] and report.fused[0].name == "body.0" and not report.refused
    assert str(report).splitlines()[0] == "1 fused, 0 refused"
    assert "GroupNorm -> AdaptiveAvgPool" in str(report)
    assert type(body) is nn.Sequential and isinstance(model, nn.Sequential)
    model.eval()(sample(device, dims))
    assert made == ["relu"] * 2


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Hardswish(True), "hardswish"),
        (nn.Identity(), "identity"),
        (nn.Dropout(0.0), "identity"),
        (nn.ReLU6(), "relu6"),
        (nn.Hardtanh(0, 6), "relu6"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.ELU(), "elu"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Mish(), "mish"),
        (nn.Hardsigmoid(), "hardsigmoid"),
    ],
    ids=str,
)
def test_activation_modules(module: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    fused(chain(module, None, dims=1), sample("cpu", 1), DTYPES.get(name, torch.float64))
    assert made == [name]


@pytest.mark.parametrize(
    "act",
    [
        F.relu,
        torch.relu,
        lambda x: x.relu_(),
        F.relu6,
        lambda x: F.leaky_relu(x, 0.01, True),
        lambda x: F.elu(x, alpha=1.0),
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.mish(x, inplace=True),
        lambda x: F.dropout(F.hardswish(x), 0.0),
    ],
)
def test_activation_functions(act: Callable[[Tensor], Tensor]) -> None:
    fused(Spelled(mean, act), sample("cpu"))


def extents(h: Tensor) -> Tensor:
    n, k, _depth, _height, _width = h.shape
    samples, channels = h.shape[:2]
    return h.reshape(n, k, -1).mean(2).reshape((samples, channels, 1))


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: h.mean(dim=[-3, -2, -1]),
        lambda h: h.mean((4, 2, 3), keepdim=True),
        lambda h: torch.mean(h, dim=(2, 3, 4)),
        lambda h: torch.mean(input=h, dim=(2, 3, -1), keepdim=True).squeeze(),
        lambda h: h.flatten(2).mean(-1),
        lambda h: torch.flatten(h, start_dim=2).mean(2, True),
        lambda h: h.flatten(-3, -2).mean((2, 3)),
        lambda h: h.mean(-1).mean(-1).mean(-1),
        lambda h: h.mean(4, keepdim=True).contiguous().mean((2, 3)),
        lambda h: F.adaptive_avg_pool3d(h, (1, 1, 1)).reshape(-1, 8),
        lambda h: F.adaptive_avg_pool3d(h, (None, 1, 1)).mean(2),
        nn.AdaptiveAvgPool3d((1, 1, 1)),
        lambda h: h.view(h.size(0), h.size(1), -1).mean(-1),
        lambda h: h.mean((2, 3, 4), True).view(h.shape[0], -1) * h.size()[1],
        extents,
        lambda h: nn.functional.adaptive_avg_pool3d(h, output_size=1).squeeze(-1).flatten(1),
    ],
)
def test_spellings_of_the_mean(pool: Callable[[Tensor], Tensor], device: str) -> None:
    fused(Spelled(pool).to(device), sample(device))


class SingleConv(nn.Sequential):
    """A block in the manner of pytorch-3dunet, whose parts are named by a string."""

    def __init__(self, order: str) -> None:
        super().__init__()
        parts: dict[str, tuple[str, nn.Module]] = {
            "c": ("conv", nn.Conv3d(3, 8, 3, padding=1, bias=False)),
            "r": ("ReLU", nn.ReLU(inplace=True)),
            "g": ("groupnorm", nn.GroupNorm(4, 8)),
        }
        for letter in order:
            self.add_module(*parts[letter])


@pytest.mark.parametrize("block", [Block, lambda: SingleConv("crg")])
def test_blocks_of_libraries(block: Callable[[], nn.Module], device: str) -> None:
    """Followed by a mean in a Sequential and in forward code; the block itself stays as it is."""
    x = sample(device)
    for model in (nn.Sequential(block(), nn.AdaptiveAvgPool3d(1)), Pooled(block())):
        model.to(device)
        part = next(model.children())
        features = part(x.float())
        report = fused(model, x)
        assert report.fused[0].name.endswith(".conv")
        assert torch.equal(part.float()(x.float()), features)


def test_video_classifier(device: str) -> None:
    model = VideoClassifier().to(device)
    for mode in (True, False):
        copied = copy.deepcopy(model).train(mode)
        report = fused(copied, sample(device))
        assert [place.name for place in report.fused] == ["layer.0.conv"]
        assert copied.stem[1].num_batches_tracked == mode


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: h.view(h.size(0), 1, -1).mean(-1),
        lambda h: h.reshape(h.shape[0], 1, -1).mean(2),
        lambda h: h.view(h.size(0), h.size(1), h.size(2), -1).mean(-1),
        lambda h: h.flatten(2).view(h.size(0), h.size(1), h.size(-1)).mean(-1),
    ],
)
def test_sizes_that_flatten_something_else(pool: Callable[[Tensor], Tensor]) -> None:
    model, x = Spelled(pool), sample("cpu").float()
    original = copy.deepcopy(model)
    fuse_(model)
    try:
        wanted = original(x)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="shape"):
            model(x)
    else:
        torch.testing.assert_close(model(x), wanted)
