"""The CUDA kernels' bodies run on the host: tests/emulation compiles them with g++.

Each program is built with AddressSanitizer and UndefinedBehaviorSanitizer, runs small shapes of
every kind against float64, and ends with status 0 if all of them agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation_programs import PROGRAMS, Results, build, run


@pytest.mark.parametrize(("source", "operand"), PROGRAMS)
def test_program(emulated: Results, source: str, operand: str) -> None:
    result = emulated[source, operand].result()
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
