"""Time and peak memory of a call.

On a GPU a call is timed by CUDA events, after a warm-up, with the L2 cache flushed before each
call by writing a buffer larger than it. On a CPU the calls to be compared take turns, so that a
slow minute of the machine falls on all of them. Every time is a median with its extremes.

Peak memory is what a call needs beyond its inputs and results. On a GPU it is the caching
allocator's record. On a CPU it is the growth of the process's resident set, because the libraries
below PyTorch take memory that its own profiler doesn't see: freed pages are first given back to
the system, the kernel's high-water mark is reset, and the mark after the call is compared with
the resident set before it. What an implementation keeps between calls is therefore not counted.
It needs Linux and glibc; elsewhere there is no figure.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# PyTorch leaves these classes unannotated.
_cuda: Any = torch.cuda

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Time:
    """Milliseconds: the median of several calls, and the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Time:
        return cls(statistics.median(milliseconds), min(milliseconds), max(milliseconds))


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class L2Flush:
    """Writes a buffer several times as large as the device's L2."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        size = max(4 * properties.L2_cache_size, 128 << 20)
        self.buffer = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def time_cuda(call: Callable[[], object], flush: L2Flush, repeats: int, warmup: int = 3) -> Time:
    for _ in range(warmup):
        call()
    events = [
        (_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    for start, end in events:
        flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return Time.of([start.elapsed_time(end) for start, end in events])


def graphed(call: Call) -> Callable[[], None]:
    """The call captured in a CUDA graph; returns its replay, which keeps the results alive."""
    side = _cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay(kept: tuple[Tensor, ...] = results) -> None:
        graph.replay()

    return replay


def time_cpu(calls: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[Time]:
    """Lets the calls take turns for ``rounds`` rounds, or fewer (never below three) when
    ``seconds`` are over. They must have run once already.

    Every round starts with another call, since what ran before leaves caches and the heap in a
    state that suits some calls better than others.
    """
    milliseconds: list[list[float]] = [[] for _ in calls]
    pairs = list(zip(calls, milliseconds, strict=True))
    deadline = time.perf_counter() + seconds
    for finished in range(rounds):
        if finished >= min(3, rounds) and time.perf_counter() > deadline:
            break
        for turn in range(len(calls)):
            call, record = pairs[(turn + finished) % len(calls)]
            start = time.perf_counter()
            call()
            record.append(1e3 * (time.perf_counter() - start))
    return [Time.of(record) for record in milliseconds]


def time_host(
    calls: Sequence[Callable[[], object]], device: torch.device, loops: int, rounds: int
) -> list[Time]:
    """Microseconds a call takes when it is made ``loops`` times in a row; calls take turns."""
    microseconds: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds + 1):
        for call, record in zip(calls, microseconds, strict=True):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(loops):
                call()
            synchronize(device)
            if round_ > 0:
                record.append(1e6 * (time.perf_counter() - start) / loops)
    return [Time.of(record) for record in microseconds]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_extra_bytes(call: Call, device: torch.device) -> int | None:
    """Memory beyond inputs and results at the worst moment of a call that has run before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        results = call()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before - nbytes(results))
    gc.collect()
    try:
        _set_heap_thresholds(64 << 10, 64 << 10)
        _libc().malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before_kib = _resident_kib("VmRSS")
    except (AttributeError, OSError, TypeError):
        return None
    results = call()
    extra = 1024 * (_resident_kib("VmHWM") - before_kib) - nbytes(results)
    # What glibc's own adjustment arrives at in a process that frees large tensors.
    _set_heap_thresholds(32 << 20, 64 << 20)
    return max(0, extra)


def _libc() -> Any:
    return ctypes.CDLL(None)


def _set_heap_thresholds(mmap: int, trim: int) -> None:
    """Blocks above ``mmap`` bytes come from the system and return to it when they are freed; the
    heap returns what is free at its top above ``trim`` bytes."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    _libc().mallopt(m_mmap_threshold, mmap)
    _libc().mallopt(m_trim_threshold, trim)


def _resident_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)
