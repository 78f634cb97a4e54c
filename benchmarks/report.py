"""Tables as aligned text, as markdown whose rows name machine and versions, and as JSON."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .timing import Time

Cell = str | int | float | bool | None | Time | dict[str, float]


@dataclass(frozen=True)
class Environment:
    device: str
    driver: str
    torch: str
    cudnn: str
    cuda: str
    commit: str
    date: str
    threads: int

    def cells(self) -> dict[str, str]:
        """What every markdown row carries; the columns' titles are the keys."""
        return {
            "GPU": self.device,
            "driver": self.driver,
            "torch": self.torch,
            "cuDNN": self.cudnn,
            "CUDA": self.cuda,
            "commit": self.commit,
            "date": self.date,
        }

    def line(self) -> str:
        cells = self.cells()
        named = ", ".join(f"{title} {cells[title]}" for title in list(cells)[1:])
        return f"{self.device} ({self.threads} CPU threads), {named}"


def environment(device: torch.device, commit: str | None = None) -> Environment:
    """Commit: the given one, or that of the repository this file stands in."""
    cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if cuda else f"none, {_cpu_name()}",
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else "-",
        torch=str(torch.__version__),
        cudnn=_cudnn_version() if cuda else "-",
        cuda=str(torch.version.cuda) if cuda else "-",
        commit=commit or _commit(),
        date=datetime.date.today().isoformat(),
        threads=torch.get_num_threads(),
    )


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else "unknown"


def _commit() -> str:
    commit = _first_line("git", "rev-parse", "--short", "HEAD")
    if commit == "unknown":
        return commit
    changed = _first_line("git", "status", "--porcelain", "--untracked-files=no")
    return commit if changed == "unknown" else f"{commit}+"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cudnn_version() -> str:
    cudnn: Any = torch.backends.cudnn
    version = cudnn.version()
    if not version:
        return "none"
    major, rest = divmod(version, 10000 if version >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@dataclass
class Table:
    """Rows are dictionaries from column titles to values; a missing cell is left empty."""

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def filled(self) -> tuple[str, ...]:
        """The columns in which some row has a value."""
        return tuple(c for c in self.columns if any(row.get(c) is not None for row in self.rows))

    def text(self) -> str:
        columns = self.filled()
        grid = [list(columns)]
        grid += [[show(row.get(column)) for column in columns] for row in self.rows]
        widths = [max(map(len, cells)) for cells in zip(*grid, strict=True)]
        numeric = [self._numeric(column) for column in columns]
        lines = [self.title]
        for cells in grid:
            padded = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(cells, widths, numeric, strict=True)
            )
            lines.append("  ".join(padded).rstrip())
        lines.insert(2, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *self.notes])

    def _numeric(self, column: str) -> bool:
        values = [row.get(column) for row in self.rows]
        return not any(isinstance(value, dict) for value in values) and all(
            not isinstance(value, str) or value[:1].isdigit() for value in values
        )

    def markdown(self, machine: Environment) -> str:
        carried = machine.cells()
        columns = self.filled()
        titles = (*columns, *carried)
        lines = [f"**{self.title}**", "", _pipes(titles), _pipes(["---"] * len(titles))]
        for row in self.rows:
            shown = [show(row.get(column)) for column in columns]
            lines.append(_pipes([*shown, *carried.values()]))
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def show(value: Cell) -> str:
    """A cell's text: times as median (low-high), errors by name, numbers to three digits."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "NO"
        case Time():
            spread = f"{significant(value.low)}-{significant(value.high)}"
            return f"{significant(value.median)} ({spread})"
        case float():
            return significant(value)
        case dict():
            return " ".join(f"{name} {error:.1e}" for name, error in value.items())
        case _:
            return str(value)


def significant(value: float) -> str:
    """Three significant digits without an exponent, more for what is above a thousand."""
    magnitude = abs(value)
    for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if magnitude >= bound:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}"


def to_json(
    machine: Environment, ceilings: Mapping[str, float], arguments: str, tables: Sequence[Table]
) -> str:
    def cell(value: Cell) -> object:
        return asdict(value) if isinstance(value, Time) else value

    document = {
        "environment": asdict(machine),
        "arguments": arguments,
        "ceilings": dict(ceilings),
        "tables": [
            {
                "title": table.title,
                "rows": [{key: cell(value) for key, value in row.items()} for row in table.rows],
                "notes": table.notes,
            }
            for table in tables
        ],
    }
    return json.dumps(document, indent=1) + "\n"
