"""Reads ptxas's report (nvcc -Xptxas=-v) and fails on a spill or a stack frame not allowed here.

    python .ci/check_ptxas.py LOG

Prints registers and static shared memory of each kernel. A kernel whose report is missing, or a log
without kernels, fails too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\w+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# Bytes of spills by kernel, each the most that is there now: no more may come. With hardswish and a
# 4x4x4 filter the kernels by wgmma were faster so than with fewer warps and none
# (benchmarks/NOTES.md), but for the input's gradient, of which only two warpgroups exist. The
# others follow them and were not timed.
ALLOWED = {
    # The filter's gradient by wgmma, three warpgroups of 168 registers: with float32's windows, and
    # more with general activations.
    r"backward_wgmma_filterI.*WgmmaOperandE[02]ELi3E": 64,
    r"backward_wgmma_filterI.*WgmmaOperandE.ELi3ELi4ELi4ELi4E.*ActivationFn": 448,
    # The input's gradient by wgmma with split operands: two warpgroups of 255 registers.
    r"backward_wgmma_inputI.*WgmmaOperandE3ELi3ELi4ELi4ELi4E.*HardswishFn": 48,
    # Both gradients with split operands, where items are pieces of samples: not timed. Two
    # warpgroups of 255 registers.
    r"backward_wgmma_both_splitI.*Li3ELi4ELi4ELi4ELb0E": 96,
    # The forward for filters of any extents, float32 and two tiles of channels: two blocks on an
    # SM, timed as it is.
    r"conv_taps_kernelI.*WindowOperandE[03]E.*Li2E": 112,
    # The filter's gradient by mma.sync for a 4x4x4 filter: three blocks on an SM, of 168 registers.
    r"backward_window_kernelI.*ConfigILi4ELi4ELi4ELi3E.*Li2ELi1ELi3E": 112,
    # The input's, with split operands: two blocks.
    r"backward_window_kernelI.*WindowOperandE3E.*Li4ELi0ELi2E": 40,
}


@dataclass
class Function:
    """One function for one architecture; only a kernel has registers of its own."""

    name: str
    arch: str
    kernel: bool
    frame: tuple[int, int, int] | None = None
    registers: int | None = None
    shared: int = 0

    def fault(self) -> str:
        """What is wrong with it, or nothing."""
        if self.frame is None or (self.kernel and self.registers is None):
            return "its report is incomplete"
        stack, stores, loads = self.frame
        allowed = max(
            (n for pattern, n in ALLOWED.items() if re.search(pattern, self.name)), default=0
        )
        if max(stack, stores, loads) > allowed:
            return f"{stack} bytes of stack, {stores} of spill stores, {loads} of spill loads"
        return ""


def parse(lines: Iterable[str]) -> list[Function]:
    """The functions of a report, in its order."""
    functions: dict[tuple[str, str], Function] = {}
    kernel = properties = None
    for line in lines:
        if match := ENTRY.search(line):
            kernel = properties = Function(match[1], match[2], kernel=True)
            functions[match[2], match[1]] = kernel
        elif kernel is None:
            continue
        elif match := PROPERTIES.search(line):
            if match[1] == kernel.name:
                properties = kernel
            else:
                properties = Function(match[1], kernel.arch, kernel=False)
                functions[kernel.arch, match[1]] = properties
        elif (match := FRAME.search(line)) and properties:
            properties.frame = (int(match[1]), int(match[2]), int(match[3]))
        elif match := USED.search(line):
            kernel.registers = int(match[1])
            shared = SHARED.search(line)
            kernel.shared = int(shared[1]) if shared else 0
    return list(functions.values())


def demangle(names: Sequence[str]) -> list[str]:
    """Names as in the source; as they are where there is no c++filt."""
    try:
        done = subprocess.run(
            ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return list(names)
    return done.stdout.splitlines()


def main() -> int:
    """Prints the table and the faults; 1 if there are any."""
    functions = parse(Path(sys.argv[1]).read_text(errors="replace").splitlines())
    names = demangle([function.name for function in functions])
    faults = []
    print("registers  shared  kernel")
    for function, name in sorted(zip(functions, names, strict=True), key=lambda pair: pair[1]):
        if function.kernel:
            print(f"{function.registers!s:>9} {function.shared:>7}  {name} [{function.arch}]")
        if function.fault():
            faults.append(f"{name} [{function.arch}]: {function.fault()}")
    kernels = sum(function.kernel for function in functions)
    print(f"{kernels} kernels, {len(faults)} with a spill or a stack frame")
    print("\n".join(faults))
    return 1 if faults or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
