"""The CUDA kernels' bodies run on the host: tests/emulation compiles them with g++.

Each program is built with AddressSanitizer and UndefinedBehaviorSanitizer, runs small shapes of
every kind against float64, and ends with status 0 if all of them agree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

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


def build(program: Path, source: str, operand: str) -> subprocess.CompletedProcess[str]:
    defines = [f"-DOPERAND={operand}"] if operand else []
    compiler = os.environ.get("CXX", "g++")
    return subprocess.run(
        [compiler, *FLAGS, *defines, str(EMULATION / f"{source}.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
    )


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True)


def build_and_run(folder: Path, source: str, operand: str) -> subprocess.CompletedProcess[str]:
    program = folder / f"{source}_{operand}"
    built = build(program, source, operand)
    if built.returncode != 0:
        return built
    return run(program)


Results = dict[tuple[str, str], "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """All programs, built and run side by side."""
    folder = tmp_path_factory.mktemp("emulation")
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        yield {program: pool.submit(build_and_run, folder, *program) for program in PROGRAMS}


@pytest.mark.parametrize(("source", "operand"), PROGRAMS)
def test_program(results: Results, source: str, operand: str) -> None:
    result = results[source, operand].result()
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "ok " in result.stdout


def test_emulator_finds_faults(tmp_path: Path) -> None:
    """A right kernel passes; a fault of each kind ends the program or shows in its result."""
    program = tmp_path / "faults"
    build(program, "faults", "").check_returncode()
    complaints = {
        1: "",
        2: "",
        3: "__syncwarp",
        4: "emulation: ",
        5: "AddressSanitizer",
        6: "misaligned",
        7: "deadlock",
        8: "signed integer overflow",
    }
    run(program, "0").check_returncode()
    for fault, complaint in complaints.items():
        result = run(program, str(fault))
        assert result.returncode != 0, f"fault {fault} was not found"
        assert complaint in result.stderr
