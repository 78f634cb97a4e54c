"""fuse_ and unfuse_: what may change in a fused model, what undoes it, and that results stay."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fusion_models import (
    Block,
    Pooled,
    Spelled,
    VideoClassifier,
    assert_equivalent,
    calls,
    chain,
    fused,
    mean,
    results,
    sample,
    with_forward,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from convnormpool.fusion import fuse_, unfuse_


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


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


class Siamese(Spelled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x * 2)


@pytest.mark.parametrize("answers", [(True, False), (False, True)])
def test_one_convolution_called_twice(answers: tuple[bool, bool]) -> None:
    """It is one place, of which the filter is asked once."""
    model, left = Siamese(mean).double(), list(answers)
    x = sample("cpu")
    wanted = model(x)
    report = fuse_(model, filter=lambda name, module: left.pop(0))
    assert len(left) == 1
    assert [p.name for p in report.fused] == ["conv"] * answers[0]
    assert [p.reason for p in report.refused] == ["the filter left it out"] * (not answers[0])
    assert torch.allclose(model(x), wanted)
    assert unfuse_(model) == answers[0]


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


def test_errors_of_a_filter_are_its_own() -> None:
    def broken(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError, match="conv"):
        fuse_(with_forward(lambda self, x: self.pooled(x)), filter=broken)
