"""What is installed: metadata, files, the record of the build, and what the binaries carry."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import convnormpool
from convnormpool import _build  # type: ignore[attr-defined, unused-ignore]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(convnormpool.__file__).parent
LIBRARIES = {"_C_cpu": _build.CPU_REASON, "_C_cuda": _build.CUDA_REASON}
BINARIES = sorted(PACKAGE.glob("*.so"))


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("convnormpool")
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{metadata["Version"]}"\n' in project
    assert metadata["Requires-Python"] == ">=3.10"
    assert "License :: OSI Approved :: MIT License" in (metadata.get_all("Classifier") or [])
    requirements = importlib.metadata.requires("convnormpool") or []
    assert [r for r in requirements if "extra" not in r] == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra") or []) == {"test", "lint", "cuda-toolchain"}


def test_installed_files() -> None:
    """The distribution holds the package and nothing else."""
    files = importlib.metadata.files("convnormpool") or []
    tops = {path.parts[0] for path in files}
    allowed = r"convnormpool|convnormpool-[\w.]+\.dist-info|__editable__\.convnormpool-[\w.]+\.pth"
    assert not [top for top in tops if not re.fullmatch(allowed, top)]
    suffixes = {path.suffix for path in files if path.parts[0] == "convnormpool"}
    assert suffixes <= {".py", ".pyc", ".so", ".typed"}


def test_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_record() -> None:
    """The record says of each library that it is there, or why not."""
    for name, reason in LIBRARIES.items():
        assert (PACKAGE / f"{name}.so").is_file() == (not reason)
    assert bool(_build.CUDA_ARCHES) == bool(_build.CUDA_VERSION) == (not _build.CUDA_REASON)
    assert all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) for arch in _build.CUDA_ARCHES)
    assert bool(_build.TORCH_VERSION) == (not _build.CPU_REASON)


@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.name)
def test_binaries_name_no_folder(binary: Path) -> None:
    """No path of the machine that built them, whether of sources, headers or temporary files."""
    data = binary.read_bytes()
    found = re.findall(
        rb"(?<![\w.])/[\w./+-]*(?:csrc|site-packages|pip-|include|tmpxft|build)[\w./+-]*", data
    )
    assert not found
    assert os.fsencode(ROOT) not in data


def undefined_symbols(library: Path) -> list[str]:
    command = ["nm", "-D", "--undefined-only", "--format=posix", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[0].partition("@")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.name)
def test_exports(binary: Path) -> None:
    """Python's entry at most: torch loads libraries into the global scope, where names collide."""
    command = ["nm", "-D", "--defined-only", "--format=posix", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert [name for name in names if name != "PyInit__plan"] == []


@pytest.mark.parametrize("library", [p for p in BINARIES if p.stem in LIBRARIES], ids=str)
def test_stable_abi(library: Path) -> None:
    """Of torch a library needs C functions only, and nothing of Python."""
    symbols = undefined_symbols(library)
    mangled = [name for name in symbols if name.startswith("_Z")]
    assert not [name for name in mangled if re.search(r"\d(c10|at|torch|caffe2)", name)]
    assert not [name for name in symbols if name.startswith(("Py", "_Py"))]
    assert [name for name in symbols if name.startswith(("aoti_torch_", "torch_"))]


@pytest.mark.parametrize("library", [p for p in BINARIES if p.stem in LIBRARIES], ids=str)
def test_needed_libraries(library: Path) -> None:
    """They are found by name in a process that has torch; no run path leads anywhere."""
    command = ["readelf", "--dynamic", "--wide", str(library)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    system = r"lib(torch_cpu|stdc\+\+|gcc_s|c|m|pthread|dl|rt)\.so.*|ld-linux.*"
    other = [name for name in needed if not re.fullmatch(system, name)]
    cuda = r"libtorch_cuda\.so|libcudart\.so\.\d+"
    assert all(library.stem == "_C_cuda" and re.fullmatch(cuda, name) for name in other)


def test_source_distribution(tmp_path: Path) -> None:
    """An sdist holds what building, the tests and the benchmarks need, and nothing built."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".git", ".*_cache", ".venv", ".hypothesis", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=ignored)
    (tree / "src" / "convnormpool" / "_C_cpu.so").touch()
    (tree / "src" / "convnormpool" / "_build.py").write_text("CPU_REASON = 'of another build'\n")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    single = {"setup.py", "csrc/setup_toolchain.py", "pyproject.toml", "README.md", "LICENSE"}
    assert single <= held
    assert "src/convnormpool/py.typed" in held
    for folder in ("csrc", "src/convnormpool", "tests", "benchmarks"):
        sources = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".cpp", ".cu", ".cuh", ".h", ".md"}
        }
        assert sources - {"src/convnormpool/_build.py"} <= held
    assert "src/convnormpool/_build.py" not in held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]
