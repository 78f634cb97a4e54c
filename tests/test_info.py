"""``python -m convnormpool``, and packages whose compiled modules are missing or broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convnormpool
from convnormpool import _library, info

PACKAGE = Path(convnormpool.__file__).parent
CALL = (
    "import torch; from convnormpool import *;"
    "layer = ConvNormPool3d(3, 8, 3); x = torch.randn(2, 3, 4, 5, 6);"
    "layer(x).sum().backward(); print(explain(layer, x).path)"
)


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(path or PACKAGE.parent))
    environment.pop("CONVNORMPOOL_PATH", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300,
        cwd=path or PACKAGE.parent,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without compiled modules."""
    root = tmp_path_factory.mktemp("bare")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, root / "convnormpool", ignore=ignored)
    return root


def test_report_and_self_check() -> None:
    done = python("-m", "convnormpool")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("all well")
    for word in (torch.__version__, "_C_cpu", "_C_cuda", "_plan", "CUDA devices", "self-check"):
        if word != "CUDA devices" or not torch.cuda.is_available():
            assert word in done.stdout
    for path in ("auto", "fused", "two_stage", "eager"):
        assert f"cpu   {path:<10} relative error" in done.stdout


def test_a_path_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment: every call would fail, so all is not well."""
    monkeypatch.setenv("CONVNORMPOOL_PATH", "bogus")
    lines, good = info.self_check()
    assert not good and any("FAILED" in line and "'bogus'" in line for line in lines)
    assert any("CONVNORMPOOL_PATH=bogus" in line for line in info.report())


def test_report_names_modules_and_devices() -> None:
    lines = list(info.report())
    assert sum(line.startswith(("_plan", "_C_cpu", "_C_cuda")) for line in lines) == 3
    for index in range(torch.cuda.device_count()):
        assert any(torch.cuda.get_device_name(index) in line for line in lines)


def test_without_compiled_modules(bare: Path) -> None:
    """The eager path works and says that it is one; the report says why, with status 1."""
    done = python("-c", CALL, path=bare)
    assert done.returncode == 0 and done.stdout.strip() == "eager", done.stderr
    assert done.stderr.count("RuntimeWarning: convnormpool uses its eager path on cpu") == 1
    report = python("-m", "convnormpool", path=bare)
    assert report.returncode == 1 and "NOT loaded" in report.stdout
    refused = python("-c", CALL.replace("8, 3)", "8, 3, path='two_stage')"), path=bare)
    assert "can't run: the compiled operators for cpu are not loaded" in refused.stderr


def test_broken_library(bare: Path, tmp_path: Path) -> None:
    """A file that the loader refuses never breaks the import; its text is shown."""
    shutil.copytree(bare, tmp_path, dirs_exist_ok=True)
    assert _library.PLAN.path is not None
    shutil.copy(_library.PLAN.path, tmp_path / "convnormpool")
    (tmp_path / "convnormpool" / "_C_cpu.so").write_bytes(b"not a library")
    done = python("-c", CALL, path=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "eager", done.stderr
    report = python("-m", "convnormpool", path=tmp_path)
    assert report.returncode == 1
    assert "NOT loaded (_C_cpu.so)" in report.stdout and "file too short" in report.stdout
    assert "something is wrong" in report.stdout


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check does look at numbers."""
    correct = info.conv_norm_pool

    def wrong(*args: object, **more: object) -> torch.Tensor:
        return correct(*args, **more) * 1.001  # type: ignore[arg-type]

    monkeypatch.setattr(info, "conv_norm_pool", wrong)
    lines, good = info.self_check()
    assert not good and any("FAILED" in line for line in lines)


def test_version() -> None:
    assert convnormpool.__version__
