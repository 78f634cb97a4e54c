"""A small 3-D classifier trained with this package's layer and with eager PyTorch's.

The task is made here: noise with a plane wave in it, whose direction and frequency are the class
and whose phase is random. Eager is trained from several seeds; their spread is the noise within
which ours should end. Parameters are float32; half precision means autocast, with a gradient
scaler for float16.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convnormpool

from .cases import BACKWARD_DW, CASES, Case, Setting
from .compare import Options
from .peers import backend_flags, in_words
from .report import Cell, Table
from .roofline import count
from .timing import Time, synchronize

CLASSES = 8
LAST = 20


class MeanOverPositions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3, 4))


def classifier(case: Case, setting: Setting, path: str | None, seed: int) -> nn.Module:
    """Ours by ``path`` or, without one, eager's: the same initial values from the same seed."""
    torch.manual_seed(seed)
    layer = convnormpool.ConvNormPool3d(
        case.in_channels,
        case.out_channels,
        case.kernel,
        case.num_groups,
        fp32_precision=setting.precision,
        path=path or "auto",
    )
    head = nn.Linear(case.out_channels, CLASSES)
    if path is not None:
        return nn.Sequential(layer, head)
    return nn.Sequential(layer.conv, nn.Hardswish(), layer.group_norm, MeanOverPositions(), head)


def volumes(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch and its classes."""
    device = generator.device
    labels = torch.randint(CLASSES, (case.batch,), device=device, generator=generator)
    directions = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(7)).to(device)
    directions *= torch.linspace(0.5, 1.5, CLASSES, device=device)[:, None] / directions.norm(
        dim=1, keepdim=True
    )
    axes = [torch.arange(float(extent), device=device) for extent in case.spatial]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    phase = 6.2832 * torch.rand(case.batch, 1, 1, 1, device=device, generator=generator)
    wave = torch.sin(torch.einsum("ni,idhw->ndhw", directions[labels], grid) + phase)
    noise = torch.randn(*case.input_shape, device=device, generator=generator)
    return noise + wave.unsqueeze(1), labels


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    step_ms: list[float]
    peak_bytes: int | None


def run(
    model: nn.Module, case: Case, setting: Setting, options: Options, steps: int, seed: int
) -> Outcome:
    """Trains for ``steps`` steps. The clock covers the steps, not the making of the volumes."""
    device = options.device
    model.to(device)
    generator = torch.Generator(device).manual_seed(100 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    low = setting.dtype if setting.dtype is not torch.float32 else None
    scaler: Any = torch.amp.GradScaler(device.type, enabled=low is torch.float16)
    losses: list[Tensor] = []
    step_ms: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        x, labels = volumes(case, generator)
        synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=low or torch.bfloat16, enabled=low is not None):
            loss = F.cross_entropy(model(x).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        synchronize(device)
        step_ms.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.detach())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Outcome(torch.stack(losses).tolist(), step_ms, peak)


def train(
    settings: list[Setting], paths: tuple[str, ...], options: Options, quick: bool = False
) -> Table:
    cuda = options.device.type == "cuda"
    case = CASES["ref"].with_batch((8 if quick else 128) if cuda else (4 if quick else 16))
    steps = 25 if quick else 200
    columns = (
        "setting",
        "implementation",
        "seed",
        "first loss",
        f"loss, last {LAST} steps",
        "ms a step (low-high)",
        "of limit",
        "peak MiB",
    )
    table = Table(f"{steps} training steps on plane waves in noise, {case.describe()}", columns)
    for setting in settings:
        plans: list[tuple[str | None, int]] = [(None, 0), (None, 1), (None, 2)]
        plans += [(path, 0) for path in paths]
        ends: dict[tuple[str | None, int], float] = {}
        limit = options.ceilings.limit(count(case, BACKWARD_DW, setting.dtype.itemsize), setting)
        for path, seed in plans:
            row: dict[str, Cell] = {
                "setting": setting.label,
                "implementation": "eager" if path is None else f"ours {path}",
                "seed": seed,
            }
            table.rows.append(row)
            try:
                with backend_flags(setting):
                    model = classifier(case, setting, path, seed)
                    outcome = run(model, case, setting, options, steps, seed)
            except Exception as error:
                table.notes.append(f"{row['implementation']}: not run: {in_words(error)}")
                continue
            ends[path, seed] = statistics.mean(outcome.losses[-LAST:])
            row["first loss"] = outcome.losses[0]
            row[f"loss, last {LAST} steps"] = ends[path, seed]
            step = Time.of(outcome.step_ms)
            row["ms a step (low-high)"] = step
            row["seconds"] = sum(outcome.step_ms) / 1e3
            row["of limit"] = f"{100 * limit.ms / step.median:.1f}%"
            row["peak MiB"] = None if outcome.peak_bytes is None else outcome.peak_bytes / 2**20
        table.notes += _verdicts(setting, ends)
    return table


def _verdicts(setting: Setting, ends: dict[tuple[str | None, int], float]) -> list[str]:
    """How far ours ended from eager of the same seed, beside the spread of eager's seeds."""
    eager = [end for (path, _), end in ends.items() if path is None]
    if len(eager) < 2 or (None, 0) not in ends:
        return []
    spread = max(eager) - min(eager)
    return [
        f"{setting.label}: ours {path} ends {end - ends[None, 0]:+.4f} from eager of the same "
        f"seed; eager's seeds span {spread:.4f}"
        for (path, _), end in ends.items()
        if path is not None
    ]
