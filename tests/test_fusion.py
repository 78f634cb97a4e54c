"""fuse_ and unfuse_: what is rewritten, what is refused and why, and that results stay."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusion_models import (
    POOL,
    Pooled,
    assert_equivalent,
    calls,
    chain,
    fused,
    mean,
    results,
    sample,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from convnormpool.fusion import FusionReport, fuse_, unfuse_

# In float64 PyTorch's own hardsigmoid has 1/6 in float32 in its backward.
DTYPES = {"hardsigmoid": torch.float32}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


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


def changes() -> dict[str, Callable[[nn.Sequential], Any]]:
    def other_convolution(m: nn.Sequential) -> None:
        torch.manual_seed(1)
        m[0] = nn.Sequential(nn.Conv3d(3, 8, 3))

    return {
        "hook": lambda m: m[2].register_forward_hook(lambda module, args, out: out * 2),
        "slope": lambda m: setattr(m[1], "negative_slope", 0.5),
        "append": lambda m: m.append(nn.Softmax(1)),
        "convolution": other_convolution,
        "forward": lambda m: setattr(m[1], "forward", torch.sigmoid),
    }


@pytest.mark.parametrize("change", changes())
def test_what_changes_after_fusing(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original forward runs, hooks fire."""
    model = chain(nn.LeakyReLU(), None)
    original = copy.deepcopy(model)
    fuse_(model)
    made = calls(monkeypatch)
    x = sample("cpu").float()
    model(x)
    for m in (model, original):
        changes()[change](m)
    assert torch.equal(model(x), original(x)) and len(made) == 1


def test_lists_of_modules_that_grow() -> None:
    class Stacked(Pooled):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([Block()]))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.block:
                x = part(x)
            return x.mean((2, 3, 4))

    model, x = Stacked(), sample("cpu").float()
    original = copy.deepcopy(model)
    assert fuse_(model)
    for m in (model, original):
        m.block.append(nn.Softplus())
    assert torch.equal(model(x), original(x))


def test_what_may_change_after_fusing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, parametrizations, dtypes, the head: the place reads its modules at each call."""
    model = nn.Sequential(*chain(nn.SiLU(), None), nn.Linear(8, 5)).to(device)
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    original = copy.deepcopy(model)
    made = calls(monkeypatch)
    fused(model, sample(device))
    model.float()(sample(device).float()).square().sum().backward()
    optimiser.step()
    original.load_state_dict(model.state_dict())
    for m in (model, original):
        m[5] = nn.Linear(8, 2).to(device)
        nn.init.ones_(m[5].weight), nn.init.ones_(m[5].bias)
        parametrizations.weight_norm(m[0])
    assert_equivalent(model, original, sample(device))
    assert len(made) == 3
    half = sample(device).bfloat16()
    assert model.bfloat16()(half).dtype == original.bfloat16()(half).dtype == torch.bfloat16


@pytest.mark.parametrize("register", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_before_fusing(register: Callable[[nn.Module], nn.Module]) -> None:
    model = chain(nn.ReLU(), None).eval()
    register(model[0])
    fused(model, sample("cpu"))


def test_a_block_in_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are called twice stay as they are, so each call is judged by itself."""

    class Twice(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            h = self.block(x)
            out: Tensor = super().forward(x) + self.head(h.amax((2, 3, 4)))
            return out

    made = calls(monkeypatch)
    fused(Twice(Block()), sample("cpu"))
    assert made == ["relu"]


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool3d(1), mean])
def test_autocast(pool: Callable[[Tensor], Tensor], device: str) -> None:
    """The dtypes in which the original ends."""
    model = Spelled(pool).to(device)
    x = sample(device).float()
    with torch.autocast(device, torch.bfloat16):
        before = model(x)
        fuse_(model)
        after = model(x)
    assert after.dtype == before.dtype and after.shape == before.shape
    scale = 16 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(after.float(), before.float(), rtol=scale, atol=scale)


def test_without_a_batch_dimension() -> None:
    """There group normalisation takes the depth for the channels; the original steps run."""
    model = chain(nn.ReLU(), None, pool=False).append(nn.AdaptiveAvgPool3d(1))
    x = torch.randn(3, 10, 6, 7)
    before = model(x)
    fuse_(model)
    assert torch.equal(model(x), before) and before.shape == (8, 1, 1, 1)


def test_copies(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepcopy, pickle and torch.save keep what was rewritten, of forward code as well."""
    x = sample(device).float()
    for model in (chain(nn.ReLU(), None), VideoClassifier().eval()):
        model.to(device)
        fuse_(model)
        right = model(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        )
        made = calls(monkeypatch)
        for number, copied in enumerate(copies, 1):
            assert torch.equal(copied(x), right) and len(made) == number
            assert unfuse_(copied) == 1
            copied(x)
            assert len(made) == number


def test_slices_of_a_fused_sequential() -> None:
    model = chain(nn.ReLU(), None)
    original = copy.deepcopy(model)
    fuse_(model)
    x = sample("cpu").float()
    assert torch.equal(model[:2](x), original[:2](x)) and torch.equal(model[0](x), original[0](x))


def test_unfuse(device: str) -> None:
    """Types, attributes, hooks and bits as before."""
    model = nn.Sequential(VideoClassifier(), nn.ReLU()).to(device).eval()
    fired: list[int] = []
    x = sample(device).float()
    before = [(m, type(m), list(m.__dict__)) for m in model.modules()]
    right = model(x)
    assert fuse_(model)
    model[0].register_forward_hook(lambda *_: fired.append(1))
    model(x)
    with parametrized_class(model[0]), pytest.raises(RuntimeError, match="0 got another class"):
        unfuse_(model)
    assert unfuse_(model) == 1 and unfuse_(model) == 0
    assert torch.equal(model(x), right) and fired == [1, 1]
    assert [(m, type(m), list(m.__dict__)) for m in model.modules()] == before


class parametrized_class:
    """Meanwhile a module has a class derived from its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, type(module)

    def __enter__(self) -> None:
        self.module.__class__ = type("Other", (self.kind,), {})

    def __exit__(self, *_: object) -> None:
        self.module.__class__ = self.kind


def test_twice_and_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused places stay as they are; the filter is asked about the others, by qualified name."""
    model = nn.ModuleDict({"a": chain(nn.ReLU(), None), "b": chain(nn.ELU(), None)})
    seen: list[tuple[str, nn.Module]] = []

    def only_b(name: str, module: nn.Module) -> bool:
        seen.append((name, module))
        return name.startswith("b")

    report = fuse_(model, filter=only_b, fp32_precision="tf32")
    assert [p.name for p in report.fused] == ["b.0"]
    assert [(p.name, p.reason) for p in report.refused] == [("a.0", "the filter left it out")]
    assert seen == [("a.0", model["a"][0]), ("b.0", model["b"][0])]
    again = fuse_(model)
    assert [p.name for p in again.fused] == ["a.0"] and not fuse_(model)
    assert [p.reason for p in fuse_(model).refused] == ["it is fused already"] * 2
    model["a"].append(nn.Identity())
    assert [p.name for p in fuse_(model).fused] == ["a.0"], "what has changed is looked at anew"
    precisions: list[str] = []
    monkeypatch.setattr(
        "convnormpool.modules.conv_norm_pool",
        lambda x, *_, **more: precisions.append(more["fp32_precision"]) or x.new_zeros(2, 8),
    )
    for branch in ("a", "b"):
        model[branch](sample("cpu").float())
    assert precisions == ["ieee", "tf32"]


def test_parts_that_cannot_be_traced_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called as they are, in front of and behind what is fused."""

    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.isnan().any() else x * 2

    made = calls(monkeypatch)
    model = nn.Sequential(Untraceable(), Block(), nn.AdaptiveAvgPool3d(1), Untraceable())
    fused(model, sample("cpu"))
    assert made == ["relu"]


def test_compile(device: str) -> None:
    """One graph, the same results."""
    model = VideoClassifier().to(device).eval()
    x = sample(device).float()
    fuse_(model)
    right = results(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(results(compiled, x), right, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_export() -> None:
    model = VideoClassifier().eval()
    x = sample("cpu").float()
    fuse_(model)
    batch = {"x": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(model, (x,), dynamic_shapes=batch).module()
    torch.testing.assert_close(exported(x[:1]), model(x[:1]))
