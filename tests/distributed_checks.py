"""What each of the processes that ``test_distributed.py`` starts through torchrun checks.

``torchrun distributed_checks.py FOLDER`` runs every check of ``CHECKS`` in its order, in every
process, and writes what became of it to ``FOLDER/<check>.<rank>``: nothing where all was well. It
stops at the first that fails, since its processes may no longer be at the same place.
"""

from __future__ import annotations

import copy
import faulthandler
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import SEED
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from convnormpool import ConvNormPool3d, explain

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.distributed import leave

# Of a collective, and of this whole process: nothing waits for ever.
COLLECTIVE = timedelta(seconds=60)
PROCESS_S = 150

RATE = 0.1
STEPS = 3
SAMPLES = 6

Batch = tuple[Tensor, Tensor]


def classifier(channels: int = 3, kernel: int = 3) -> nn.Sequential:
    """The same on every process; without kinks, at which rounding would decide a gradient."""
    torch.manual_seed(SEED)
    layer = ConvNormPool3d(channels, 16, kernel, 4, padding=1, activation="silu")
    return nn.Sequential(layer, nn.Linear(16, 5))


def batch(step: int, channels: int = 3, samples: int = SAMPLES) -> Batch:
    """A step's batch of all processes together."""
    generator = torch.Generator().manual_seed(SEED + 1 + step)
    x = 3 * torch.randn(samples, channels, 5, 6, 7, generator=generator)
    return x, torch.randn(samples, 5, generator=generator)


def share(whole: Batch, rank: int) -> Batch:
    """The part of one process: every second sample."""
    x, target = whole
    return x[rank :: dist.get_world_size()], target[rank :: dist.get_world_size()]


def loss(model: nn.Module, part: Batch) -> Tensor:
    x, target = part
    return (model(x) - target).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone())
    return found


def alone(model: nn.Module, parts: Sequence[Batch]) -> list[Tensor]:
    """The mean over ``parts`` of their losses' gradients, in this process alone."""
    model = copy.deepcopy(model)
    wide = [torch.promote_types(p.dtype, torch.float32) for p in model.parameters()]
    sums = [torch.zeros_like(p, dtype=d) for p, d in zip(model.parameters(), wide, strict=True)]
    for part in parts:
        model.zero_grad()
        loss(model, part).backward()
        for total, grad in zip(sums, gradients(model), strict=True):
            total += grad
    return [total / len(parts) for total in sums]


def assert_same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"parameter {i}: off by {(a - b).abs().max():.2e}"


def assert_as_whole(model: nn.Module, found: Sequence[Tensor], whole: Batch) -> None:
    """As near to float64's gradients of the undivided batch as one process' float32 gradients.

    The bound is that of ``helpers.assert_accurate``; the terms here are the samples' gradients.
    """
    exact = copy.deepcopy(model).double()
    samples = [(x[None].double(), target[None].double()) for x, target in zip(*whole, strict=True)]
    right = alone(exact, samples)
    squares = [torch.zeros_like(g) for g in right]
    for sample in samples:
        for total, grad in zip(squares, alone(exact, [sample]), strict=True):
            total += (grad / len(samples)).square()
    eps = torch.finfo(torch.float32).eps
    for a, peer, b, square in zip(found, alone(model, [whole]), right, squares, strict=True):
        own = (peer.double() - b).norm()
        bound = 4 * max(own, eps * (b.norm() + square.sum().sqrt()))
        assert (a.double() - b).norm() <= bound


@contextmanager
def no_warnings() -> Iterator[None]:
    """The reducer warns once in a process: later checks would not see what an earlier one did."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    strides = [str(w.message) for w in caught if "stride" in str(w.message)]
    assert not strides, strides


def ddp_gradients(channels: int = 3, kernel: int = 3, last: bool = False) -> None:
    """Those of the parts in one process, to the bit; and of the undivided batch."""
    single = classifier(channels, kernel)
    if last:
        single = single.to(memory_format=torch.channels_last_3d)
    for view in (False, True):
        model = DistributedDataParallel(copy.deepcopy(single), gradient_as_bucket_view=view)
        for step in range(2):  # the buckets of the second are made as the first's gradients came
            whole = batch(step, channels)
            model.zero_grad()
            with no_warnings():
                loss(model, share(whole, dist.get_rank())).backward()
            found = gradients(model)
            parts = [share(whole, rank) for rank in range(dist.get_world_size())]
            assert_same_bits(found, alone(single, parts))
            assert_as_whole(single, found, whole)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride(), name


def ddp_gradients_channels_last() -> None:
    ddp_gradients(last=True)


def ddp_gradients_channels_last_pointwise() -> None:
    """Filters whose axes have one element, and with it any stride."""
    ddp_gradients(channels=4, kernel=1, last=True)


def ddp_gradients_channels_last_one_channel() -> None:
    ddp_gradients(channels=1, last=True)


def ddp_uneven_inputs() -> None:
    """Through ``join``: a process without a batch left adds nothing to the others' gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    single = classifier()
    model = DistributedDataParallel(copy.deepcopy(single))
    with model.join():
        for step in range(rank + 1):  # one step here, two there
            model.zero_grad()
            loss(model, share(batch(step), rank)).backward()
            left = range(step, world)
            wanted = alone(single, [share(batch(step), r) for r in left])
            scaled = [g * (len(left) / world) for g in wanted]
            assert_same_bits(gradients(model), scaled)


def ddp_no_samples_on_one() -> None:
    """A part without samples: gradients of zero, of the right shapes."""
    rank = dist.get_rank()
    single = classifier()
    model = DistributedDataParallel(copy.deepcopy(single))
    whole = batch(0)
    x, target = whole if rank else (whole[0][:0], whole[1][:0])
    (model(x) - target).square().sum().backward()
    single.zero_grad()
    (single(whole[0]) - whole[1]).square().sum().backward()
    assert_same_bits(gradients(model), [g / dist.get_world_size() for g in gradients(single)])


def all_processes() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model: nn.Sequential, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Computing in ``dtype``, with gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mesh=all_processes(), mp_policy=policy)
    return model


def train(model: nn.Module, parts_of: Callable[[Batch], list[Batch]]) -> list[Tensor]:
    """The losses of a few steps of gradient descent, and the last one's gradients."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = parts_of(batch(step))
        for part in parts:
            value = loss(model, part)
            (value / len(parts)).backward()
            found.append(value.detach())
        optimizer.step()
    return [*found, *gradients(model)]


def fsdp_training() -> None:
    """Losses and gradients of a few steps, to the bit those of the parts in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    single = train(classifier(), lambda whole: [share(whole, r) for r in range(world)])
    model = sharded(classifier())
    layer = model[0]
    assert isinstance(layer, FSDPModule) and isinstance(layer.conv.weight, DTensor)
    assert layer.conv.weight.to_local().shape[0] == 16 // world
    found = train(model, lambda whole: [share(whole, rank)])
    assert_same_bits(found[:STEPS], single[: STEPS * world][rank::world])
    assert_same_bits(found[STEPS:], single[STEPS * world :])


def fsdp_gradients() -> None:
    """Those of the undivided batch in one process."""
    model = sharded(classifier())
    whole = batch(0)
    loss(model, share(whole, dist.get_rank())).backward()
    assert_as_whole(classifier(), gradients(model), whole)


def fsdp_in_bfloat16() -> None:
    """Mixed precision: the gradients of the parts with a bfloat16 model in one process."""
    model = sharded(classifier(), torch.bfloat16)
    whole = batch(0)
    loss(model, share(whole, dist.get_rank())).backward()
    low = (whole[0].bfloat16(), whole[1])
    parts = [share(low, rank) for rank in range(dist.get_world_size())]
    assert_same_bits(gradients(model), alone(classifier().bfloat16(), parts))


def fsdp_of_the_submodules() -> None:
    """Sharding ``conv`` on its own puts hooks on it: they fire, on the eager path."""
    model = classifier()
    for unit in (model[0].conv, model):
        fully_shard(unit, mesh=all_processes())
    whole = batch(0)
    assert explain(model[0], whole[0]).path == "eager"
    loss(model, share(whole, dist.get_rank())).backward()
    eager = classifier()
    eager[0].path = "eager"
    parts = [share(whole, rank) for rank in range(dist.get_world_size())]
    assert_same_bits(gradients(model), alone(eager, parts))


def checkpoints() -> None:
    """Both kinds of model, for the process that started this one to load."""
    kinds = {"ddp": DistributedDataParallel(classifier()), "fsdp": sharded(classifier())}
    for name, model in kinds.items():
        dcp.save(get_model_state_dict(model), checkpoint_id=folder() / name)


CHECKS = (
    ddp_gradients,
    ddp_gradients_channels_last,
    ddp_gradients_channels_last_pointwise,
    ddp_gradients_channels_last_one_channel,
    ddp_uneven_inputs,
    ddp_no_samples_on_one,
    fsdp_training,
    fsdp_gradients,
    fsdp_in_bfloat16,
    fsdp_of_the_submodules,
    checkpoints,
)


def folder() -> Path:
    return Path(sys.argv[1])


def main() -> int:
    faulthandler.dump_traceback_later(PROCESS_S, exit=True)
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    for check in CHECKS:
        problem = ""
        try:
            check()
        except Exception:
            problem = traceback.format_exc()
        (folder() / f"{check.__name__}.{dist.get_rank()}").write_text(problem)
        if problem:
            return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())
