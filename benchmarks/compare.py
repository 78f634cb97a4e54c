"""One case, one setting, one pass: every implementation's time, memory, error and roofline."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cases import PASS_TITLES, Case, Inputs, Oracle, Setting, result_names
from .peers import Allowance, Call, Implementation, backend_flags, bind, in_words, plan_of
from .report import Cell, Table
from .roofline import Ceilings, count
from .timing import L2Flush, Time, graphed, peak_extra_bytes, time_cpu, time_cuda

# Above this a call's launches no longer matter, and no CUDA graph of it is timed.
GRAPH_MS = 3.0

COLUMNS = (
    "implementation",
    "ms (low-high)",
    "ms in a CUDA graph",
    "speed-up",
    "TFLOP/s",
    "of limit",
    "extra MiB",
    "error against float64",
)


@dataclass(frozen=True)
class Options:
    device: torch.device
    repeats: int
    seconds: float
    allowance: Allowance
    ceilings: Ceilings
    graphs: bool = True


@dataclass
class Measured:
    implementation: Implementation
    time: Time | None = None
    graph_time: Time | None = None
    extra_bytes: int | None = None
    errors: dict[str, float] | None = None
    words: str = ""

    @property
    def best_ms(self) -> float:
        if self.time is None:
            raise ValueError(f"{self.implementation.name} was not timed")
        graph = self.graph_time.median if self.graph_time else float("inf")
        return min(self.time.median, graph)


def compare(
    case: Case,
    setting: Setting,
    pass_name: str,
    implementations: Sequence[Implementation],
    inputs: Inputs,
    oracle: Oracle,
    options: Options,
) -> Table:
    measure = _measure_cuda if options.device.type == "cuda" else _measure_cpu
    measured = measure(case, setting, pass_name, implementations, inputs, oracle, options)
    return _table(case, setting, pass_name, inputs, measured, options)


def _start(
    entry: Measured,
    case: Case,
    setting: Setting,
    pass_name: str,
    inputs: Inputs,
    oracle: Oracle,
    allowance: Allowance,
) -> Call | None:
    """The implementation's call after its first run, which gave the errors; none if it failed."""
    implementation = entry.implementation
    try:
        call = bind(implementation, case, setting, inputs, pass_name)
        if implementation.compile is None:
            results = call()
        else:
            with allowance.spend():
                results = call()
        entry.errors = oracle.errors(result_names(pass_name), results)
    except Exception as error:
        entry.words = in_words(error)
        return None
    return call


def _measure_cpu(
    case: Case,
    setting: Setting,
    pass_name: str,
    implementations: Sequence[Implementation],
    inputs: Inputs,
    oracle: Oracle,
    options: Options,
) -> list[Measured]:
    measured = [Measured(implementation) for implementation in implementations]
    ready: list[tuple[Measured, Call]] = []
    with backend_flags(setting):
        for entry in measured:
            call = _start(entry, case, setting, pass_name, inputs, oracle, options.allowance)
            if call is not None:
                ready.append((entry, call))
        times = time_cpu([call for _, call in ready], options.repeats, options.seconds)
        for (entry, call), taken in zip(ready, times, strict=True):
            entry.time = taken
            entry.extra_bytes = peak_extra_bytes(call, options.device)
    torch.compiler.reset()
    return measured


def _measure_cuda(
    case: Case,
    setting: Setting,
    pass_name: str,
    implementations: Sequence[Implementation],
    inputs: Inputs,
    oracle: Oracle,
    options: Options,
) -> list[Measured]:
    flush = L2Flush(options.device)
    measured = []
    for implementation in implementations:
        entry = Measured(implementation)
        measured.append(entry)
        with backend_flags(setting, implementation.cudnn_benchmark):
            call = _start(entry, case, setting, pass_name, inputs, oracle, options.allowance)
            if call is None:
                continue
            try:
                entry.time = time_cuda(call, flush, options.repeats)
                entry.extra_bytes = peak_extra_bytes(call, options.device)
                if options.graphs and entry.time.median <= GRAPH_MS:
                    entry.graph_time = time_cuda(graphed(call), flush, options.repeats)
            except Exception as error:
                entry.words = in_words(error)
        del call
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return measured


def _table(
    case: Case,
    setting: Setting,
    pass_name: str,
    inputs: Inputs,
    measured: Sequence[Measured],
    options: Options,
) -> Table:
    counts = count(case, pass_name, setting.dtype.itemsize)
    limit = options.ceilings.limit(counts, setting)
    peers = [m.best_ms for m in measured if m.time is not None and not m.implementation.ours]
    best_peer = min(peers, default=None)
    table = Table(f"{case.name} {setting.label}, {PASS_TITLES[pass_name]}", COLUMNS)
    for entry in measured:
        row: dict[str, Cell] = {
            "case": case.name,
            "setting": setting.label,
            "pass": pass_name,
            "implementation": entry.implementation.name,
            "ours": entry.implementation.ours,
        }
        table.rows.append(row)
        if entry.time is None:
            row |= {"error against float64": "not run", "words": entry.words}
            table.notes.append(f"{entry.implementation.name}: not run: {entry.words}")
            continue
        row |= {
            "ms (low-high)": entry.time,
            "ms in a CUDA graph": entry.graph_time,
            "speed-up": f"{best_peer / entry.best_ms:.2f}x" if best_peer else None,
            "TFLOP/s": counts.flop / entry.best_ms / 1e9,
            "of limit": f"{100 * limit.ms / entry.best_ms:.1f}%",
            "extra MiB": None if entry.extra_bytes is None else entry.extra_bytes / 2**20,
            "error against float64": entry.errors,
            "limit ms": limit.ms,
            "limit ms with recompute": limit.recompute_ms,
        }
        if entry.implementation.path is not None:
            row["plan"] = plan_of(case, setting, entry.implementation.path, inputs)
            table.notes.append(f"{entry.implementation.name}: {row['plan']}")
        if entry.words:
            table.notes.append(f"{entry.implementation.name}: {entry.words}")
    table.notes.insert(0, _limit_note(case, limit.ms, limit.recompute_ms, limit.bound))
    return table


def _limit_note(case: Case, ms: float, recompute_ms: float, bound: str) -> str:
    note = f"{case.describe()}; limit {ms:.4f} ms, set by {bound}"
    if recompute_ms > ms:
        note += f"; with the convolution computed twice {recompute_ms:.4f} ms"
    return note
