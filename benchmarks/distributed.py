"""Trains the small 3-D classifier of ``benchmarks.training`` on several processes.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --mode fsdp --checkpoint run
    python -m benchmarks.distributed --mode ddp --checkpoint run --steps 40

The first trains on two processes and leaves a checkpoint of its last step in the folder ``run``,
the second goes on from there with one: the number of processes and the mode may differ between
runs. A step's volumes depend on its number alone, every process takes its share of them, and so
the losses are those of one process, up to rounding. Processes talk by NCCL, a GPU each, or with
``--device cpu`` (and where there is no GPU) by Gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .cases import CASES, Case, Setting
from .training import classifier, volumes

MODES = ("ddp", "fsdp")
SEED = 1000
# Of a collective, after which a process that has lost its peers stops.
TIMEOUT = timedelta(minutes=2)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The processes that torchrun started, or without it a group of this one alone."""
    options: dict[str, Any] = {"backend": "gloo", "timeout": TIMEOUT}
    if device.type == "cuda":
        options.update(backend="nccl", device_id=device)
    if not dist.is_torchelastic_launched():
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group(**options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Sequential, mode: str, device: torch.device) -> nn.Module:
    """The model as DistributedDataParallel, or with its parameters sharded."""
    model.to(device)
    if mode == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # The layer is a unit: it reads its submodules' parameters and doesn't call the submodules.
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model


def share(case: Case, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This process' part of a step's volumes and classes."""
    generator = torch.Generator(device).manual_seed(SEED + step)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    x, labels = volumes(case, generator)
    return x[mine], labels[mine]


class Checkpoints:
    """A folder with one checkpoint for each of some steps."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def save(self, step: int) -> None:
        dcp.save(self._state(), checkpoint_id=self.folder / f"{step:08}")

    def load(self) -> int:
        """Loads the last one that is complete; its step, 0 where there is none."""
        # The metadata are written last, by one process, when the others have written theirs.
        found = sorted(path.parent for path in self.folder.glob("*/.metadata"))
        if not found:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(found[-1].name)

    def _state(self) -> dict[str, Any]:
        """Names and values that don't depend on the mode or the number of processes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


@dataclass(frozen=True)
class Outcome:
    first: int
    losses: list[float]
    seconds: float


def train(case: Case, mode: str, steps: int, device: torch.device, folder: Path | None) -> Outcome:
    """Trains until ``steps`` steps are done, those of a checkpoint included."""
    model = classifier(case, Setting(torch.float32), "auto", seed=0)
    assert isinstance(model, nn.Sequential)
    model = distribute(model, mode, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpoints = None if folder is None else Checkpoints(folder, model, optimizer)
    first = 0 if checkpoints is None else checkpoints.load()
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(first, steps):
        x, labels = share(case, step, device)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean)
    values = [loss.item() for loss in losses]
    seconds = time.perf_counter() - start
    if checkpoints is not None and losses:
        checkpoints.save(steps)
    return Outcome(first, values, seconds)


def report(outcome: Outcome, case: Case, kind: str) -> None:
    for step, loss in enumerate(outcome.losses, outcome.first + 1):
        print(f"step {step:4}  loss {loss:.6f}")
    done = len(outcome.losses)
    if not done:
        print(f"{kind}: the checkpoint has {outcome.first} steps, none are left")
        return
    rate = done * case.batch / outcome.seconds
    steps = f"steps {outcome.first + 1} to {outcome.first + done}"
    print(f"{kind}: {steps} of {case.batch} volumes, {rate:.0f} volumes/s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="ddp", help="(default: ddp)")
    add("--device", choices=("cpu", "cuda"), help="(default: a GPU if there is one)")
    add("--steps", type=int, default=20, help="in all, earlier runs' included (default: 20)")
    add("--batch", type=int, default=16, help="of all processes together (default: 16)")
    add("--checkpoint", type=Path, metavar="FOLDER", help="resume from here, and save here")
    options = parser.parse_args(arguments)
    processes = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    if options.batch < 1:
        parser.error(f"--batch must be at least 1; got {options.batch}")
    if options.checkpoint is not None and options.checkpoint.is_file():
        parser.error(f"--checkpoint must be a folder; {options.checkpoint} is a file")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and there is none")
    if options.batch % processes:
        parser.error(f"--batch {options.batch} can't be divided among {processes} processes")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"]) if dist.is_torchelastic_launched() else 0
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    case = CASES["ref"].with_batch(options.batch)
    with process_group(device):
        outcome = train(case, options.mode, options.steps, device, options.checkpoint)
        if dist.get_rank() == 0:
            kind = f"{options.mode} on {dist.get_world_size()} x {device.type}"
            report(outcome, case, f"{kind} ({dist.get_backend()})")
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process once its output is written, without finalizing Python.

    Gloo's threads outlive ``destroy_process_group`` where DDP or FSDP was used, and one that drops
    its last tensor while Python finalizes may abort the process (PyTorch issue 190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
