"""The programs of tests/emulation: how they are built with g++ and run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
OPERANDS = ("kTf32", "kFloat16", "kBFloat16", "kSplit")
SOURCES = (
    *("wgmma_backward_both", "wgmma_backward_input", "wgmma_backward_filter"),
    *("wgmma_window", "window_backward", "window", "taps"),
)
# (source, kind of operand or none), the longest first: those of split operands run the longest.
PROGRAMS = [
    *((source, "kSplit") for source in SOURCES),
    ("reductions", ""),
    ("merge", ""),
    *((source, operand) for source in SOURCES for operand in OPERANDS if operand != "kSplit"),
    *(("wgmma_backward_filter_alone", operand) for operand in OPERANDS if operand != "kSplit"),
    ("window_map", ""),
]
FLAGS = [
    # Of all levels -Og has the least time to compile and to run together.
    *("-std=c++17", "-Og", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-fno-strict-aliasing", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-I", str(EMULATION), "-I", str(EMULATION / "toolkit"), "-I", str(ROOT / "csrc")),
]


def _finish(*command: str) -> subprocess.CompletedProcess[str]:
    """Behind all else on the machine: the tests beside which it runs have limits of time."""
    return subprocess.run(["nice", "-n", "19", *command], capture_output=True, text=True)


def build(program: Path, source: str, operand: str) -> subprocess.CompletedProcess[str]:
    defines = [f"-DOPERAND={operand}"] if operand else []
    compiler = os.environ.get("CXX", "g++")
    return _finish(compiler, *FLAGS, *defines, str(EMULATION / f"{source}.cpp"), "-o", str(program))


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _finish(str(program), *arguments)


def build_and_run(folder: Path, source: str, operand: str) -> subprocess.CompletedProcess[str]:
    program = folder / f"{source}_{operand}"
    built = build(program, source, operand)
    if built.returncode != 0:
        return built
    return run(program)


Program = tuple[str, str]  # as in PROGRAMS
Results = dict[Program, "Future[subprocess.CompletedProcess[str]]"]


@contextmanager
def in_background(programs: Iterable[Program], folder: Path) -> Iterator[Results]:
    """Builds and runs them side by side, in PROGRAMS' order."""
    chosen = set(programs)
    pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
    try:
        yield {p: pool.submit(build_and_run, folder, *p) for p in PROGRAMS if p in chosen}
    finally:
        pool.shutdown(cancel_futures=True)
