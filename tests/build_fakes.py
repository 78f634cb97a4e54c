"""The build's modules, and machines made up for them: a torch, a toolkit, an environment."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _file_of(name: str) -> Path:
    return ROOT / "setup.py" if name == "setup" else ROOT / "csrc" / f"{name}.py"


def load(name: str) -> Any:
    """A module of the build, which is not on sys.path for every way to start pytest."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _file_of(name))
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


toolchain = load("setup_toolchain")
build = load("setup")
SUPPORTED = {"7.5", "8.0", "8.6", "9.0", "10.0", "12.0"}


def forget_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no toolkit of this machine decides a test."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CONVNORMPOOL_BUILD", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MAX_JOBS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "USUAL_ROOT", tmp_path / "usual")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def make_torch(site: Path, version: str, cuda: str | None = "13.0", hip: str | None = None) -> Any:
    """A folder of packages with a torch of which only the version can be read."""
    root = site / "torch"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise AssertionError('torch must not be imported')\n")
    (root / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n")
    return toolchain.Torch(root, version, cuda, hip)


def make_nvcc(root: Path, release: str = "13.0") -> Path:
    cases = f'"--version") echo "Cuda compilation tools, release {release}, V{release}.88";;'
    names = " ".join("sm_" + arch.replace(".", "") for arch in SUPPORTED)
    codes = f'"--list-gpu-code") printf "{names}";;'
    top = f'"--dryrun") echo "#$ TOP={root}/bin/.." >&2;;'
    return script(root / "bin" / "nvcc", f'case "$1" in\n{cases}\n{codes}\n{top}\nesac')


def make_toolkit(root: Path, release: str = "13.0", leave_out: str = "") -> Path:
    """A toolkit's folder with what the search looks at."""
    major, _, minor = release.partition(".")
    if leave_out != "nvcc":
        make_nvcc(root, release)
    if leave_out != "headers":
        (root / "include").mkdir(parents=True)
        (root / "include" / "cuda_runtime.h").touch()
        number = int(major) * 1000 + int(minor) * 10
        text = f"#define CUDART_VERSION  {number}\n"
        (root / "include" / "cuda_runtime_api.h").write_text(text)
    if leave_out != "cudart":
        (root / "lib64").mkdir(parents=True)
        (root / "lib64" / f"libcudart.so.{major}").touch()
    return root


def reason(call: Callable[[], object]) -> str:
    """The sentence of a decision against a library."""
    with pytest.raises(toolchain.NotBuilt) as caught:
        call()
    return str(caught.value)


def path_of_tools(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A PATH with the shell's own tools only, to which a test can add an nvcc."""
    folder.mkdir()
    for tool in ("sh", "echo", "printf"):
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder
