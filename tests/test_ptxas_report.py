"""The check of ptxas's report: every kernel is in it, and none spills beyond what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class TestPtxasReport:
    KERNEL = """ptxas info    : 3 bytes gmem
ptxas info    : Compiling entry function '_Z1kIdEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z1kIdEvPT_
    {stack} bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
"""

    def check(self, tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "log").write_text(text)
        command = [sys.executable, str(ROOT / ".ci" / "check_ptxas.py"), str(tmp_path / "log")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_clean(self, tmp_path: Path) -> None:
        done = self.check(tmp_path, self.KERNEL.format(stack=0, stores=0))
        assert done.returncode == 0
        assert "       40    1024  " in done.stdout
        assert "1 kernels, 0 with a spill or a stack frame" in done.stdout

    @pytest.mark.parametrize(("stack", "stores"), [(8, 0), (0, 4)])
    def test_faults(self, tmp_path: Path, stack: int, stores: int) -> None:
        done = self.check(tmp_path, self.KERNEL.format(stack=stack, stores=stores))
        assert done.returncode == 1
        assert f"{stack} bytes of stack, {stores} of spill stores" in done.stdout

    @pytest.mark.parametrize(("stores", "status"), [(96, 0), (100, 1)])
    def test_a_spill_that_is_allowed(self, tmp_path: Path, stores: int, status: int) -> None:
        config = "WgmmaBothSplitConfigILi3ELi4ELi4ELi4ELb0ELi4EEENS_11HardswishFnEEEv"
        name = f"_ZN12convnormpool49conv_activation_moments_backward_wgmma_both_splitINS_20{config}"
        text = self.KERNEL.format(stack=32, stores=stores).replace("_Z1kIdEvPT_", name)
        assert self.check(tmp_path, text).returncode == status

    def test_a_called_function_counts(self, tmp_path: Path) -> None:
        called = "ptxas info    : Function properties for slow_path\n"
        called += "    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        done = self.check(tmp_path, self.KERNEL.format(stack=0, stores=0) + called)
        assert done.returncode == 1
        assert "slow_path [sm_90a]: 40 bytes of stack" in done.stdout

    @pytest.mark.parametrize("lines", [0, 2])
    def test_a_missing_report_is_a_fault(self, tmp_path: Path, lines: int) -> None:
        text = "\n".join(self.KERNEL.splitlines()[:lines])
        assert self.check(tmp_path, text).returncode == 1
