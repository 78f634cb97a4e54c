"""Builds convnormpool's compiled modules; also its own PEP 517 backend.

Three modules are built: the operators for CPU and for CUDA, two plain shared libraries against
LibTorch's stable ABI, and the planner, a pybind11 module that includes no torch header.

As a backend this is setuptools with one difference: torch joins the build requirements only where
the environment that the package is installed into has none that is new enough. Compilers are
called directly because torch's BuildExtension derives the toolkit's root from the place of
``nvcc``, which may be a wrapper script, and links a ``libcudart.so`` that pip's toolchain lacks.

Environment: CONVNORMPOOL_BUILD (auto, cuda, cpu), TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, CXX.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not overridden below)
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

import setup_toolchain as toolchain  # noqa: E402
from setup_toolchain import NotBuilt, Toolkit, Torch  # noqa: E402

PACKAGE = "convnormpool"
PLAN, CPU, CUDA = (f"{PACKAGE}.{name}" for name in ("_plan", "_C_cpu", "_C_cuda"))
SOURCES = {
    PLAN: ("csrc/plan.cpp", "csrc/bindings.cpp"),
    CPU: ("csrc/cpu/*.cpp",),
    CUDA: ("csrc/cuda/*.cu",),
}
SHARED = ".dylib" if sys.platform == "darwin" else ".so"
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"


def glob(*patterns: str) -> list[str]:
    """Files of the source tree, relative to its root, in a fixed order."""
    found = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(found)


def _with_torch(requirements: list[str]) -> list[str]:
    torch, _ = toolchain.find_torch(toolchain.surrounding_sites())
    return requirements if torch else [*requirements, toolchain.TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """PEP 517's hook."""
    return _with_torch(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """PEP 660's hook."""
    return _with_torch(build_meta.get_requires_for_build_editable(config_settings))


class Step(NamedTuple):
    """One command, which makes ``output``; a compiler also writes ``output``.d for ninja."""

    command: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    compiles: bool


class Recipe:
    """The commands that build the modules, run in the root so that binaries name no folder."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.cxx = toolchain.host_compiler()
        self.steps: list[Step] = []

    def host(self, source: str, includes: Sequence[str], *flags: str) -> str:
        """Compiles C++; returns the object."""
        common = ["-O3", "-DNDEBUG", "-Wall", "-Wextra", "-Icsrc"]
        return self._compile(source, includes, *self.cxx, *common, *self._code(includes), *flags)

    def device(self, source: str, includes: Sequence[str], nvcc: str, *flags: str) -> str:
        """Compiles CUDA; returns the object."""
        common = ["-O3", "-DNDEBUG", "-Icsrc", "--expt-relaxed-constexpr", "-Xfatbin=-compress-all"]
        ccbin = ["-ccbin", self.cxx[0]] if os.environ.get("CXX") else []
        # nvcc hands these on through a shell.
        host = [w for flag in self._code(includes) for w in ("-Xcompiler", shlex.quote(flag))]
        return self._compile(source, includes, nvcc, *ccbin, *common, *host, *flags)

    def link(self, objects: Sequence[str], output: Path, *libraries: str) -> None:
        """Links a module, without an rpath: what it needs is in the process once torch is.

        It exports nothing but Python's entry. Templates of the standard library have default
        visibility whatever -fvisibility says, and torch loads libraries into the global scope:
        copies of them made here would be taken by others, and theirs by this one.
        """
        if sys.platform == "darwin":
            flags = ["-undefined", "dynamic_lookup"]
        else:  # the planner finds Python's symbols in the process; a library names all it needs
            exports = self.work / f"{output.name}.map"
            exports.parent.mkdir(parents=True, exist_ok=True)
            exports.write_text("{ global: PyInit_*; local: *; };\n")
            flags = ["-Wl,-s", f"-Wl,--version-script={exports}"]
            flags += ["-Wl,--no-undefined"] if libraries else []
        command = (*self.cxx, "-shared", *flags, *objects, "-o", str(output), *libraries)
        self.steps.append(Step(command, tuple(objects), str(output), compiles=False))

    def run(self, jobs: int) -> None:
        """Runs what is out of date by ninja's account, or everything where there is no ninja."""
        for step in self.steps:
            Path(step.output).parent.mkdir(parents=True, exist_ok=True)
        scripts = sysconfig.get_path("scripts")
        ninja = shutil.which("ninja") or shutil.which("ninja", path=scripts)
        if ninja:
            file = self.work / "build.ninja"
            file.write_text("\n".join(self._ninja_lines()))
            self._call((ninja, "-f", str(file), "-j", str(jobs)))
            return
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self._call, [step.command for step in self.steps if step.compiles]))
        for step in self.steps:
            if not step.compiles:
                self._call(step.command)

    def _compile(self, source: str, includes: Sequence[str], *command: str) -> str:
        output = str(self.work / f"{source}.o")
        search = [word for path in includes for word in ("-isystem", path)]
        words = (*command, *search, "-MD", "-MF", f"{output}.d", "-c", source, "-o", output)
        self.steps.append(Step(words, (source,), output, compiles=True))
        return output

    def _code(self, includes: Iterable[str]) -> list[str]:
        named = [(str(ROOT), "."), *((path, Path(path).name) for path in includes)]
        maps = [f"-ffile-prefix-map={path}={name}" for path, name in named]
        return ["-fPIC", "-fvisibility=hidden", *maps]

    def _call(self, command: Sequence[str]) -> None:
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"convnormpool: this command failed: {shlex.join(command)}")

    def _ninja_lines(self) -> Iterator[str]:
        def escaped(path: str) -> str:
            return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

        yield from ("ninja_required_version = 1.5", f"builddir = {escaped(str(self.work))}")
        yield from ("rule compile", "  command = $cmd", "  depfile = $out.d", "  deps = gcc")
        yield from ("rule link", "  command = $cmd")
        for step in self.steps:
            rule = "compile" if step.compiles else "link"
            yield f"build {escaped(step.output)}: {rule} {' '.join(map(escaped, step.inputs))}"
            yield "  cmd = " + shlex.join(step.command).replace("$", "$$")
        yield ""


class Decision(NamedTuple):
    """What is built, and what is recorded about it."""

    torch: Torch | None
    toolkit: Toolkit | None
    arches: list[str]
    reasons: dict[str, str]

    def information(self) -> str:
        """The text of ``convnormpool/_build.py``."""
        return f'''"""Written by the build: what this installation was built with."""

TORCH_VERSION: str = {self.torch.version if self.torch else ""!r}
CUDA_VERSION: str = {self.toolkit.release if self.toolkit else ""!r}
CUDA_ARCHES: tuple[str, ...] = {tuple(self.arches)!r}
CUDA_REASON: str = {self.reasons.get(CUDA, "")!r}
CPU_REASON: str = {self.reasons.get(CPU, "")!r}
'''


def decide() -> Decision:
    """What this environment allows to build."""
    sites = toolchain.surrounding_sites()
    torch, no_torch = toolchain.find_torch(sites)
    reasons = {} if torch else {CPU: no_torch}
    try:
        toolkit, arches = toolchain.decide_cuda(torch, no_torch, sites)
    except NotBuilt as failure:
        return Decision(torch, None, [], {**reasons, CUDA: str(failure)})
    return Decision(torch, toolkit, arches, reasons)


def recipe_of(decision: Decision, work: Path, outputs: dict[str, Path], jobs: int) -> Recipe:
    """The commands for the modules among ``outputs`` that are to be built."""
    recipe = Recipe(work)
    sources = {name: glob(*patterns) for name, patterns in SOURCES.items()}

    python = [toolchain.python_include(), toolchain.pybind11_include(decision.torch)]
    recipe.link([recipe.host(source, python) for source in sources[PLAN]], outputs[PLAN])
    if decision.torch is None:
        return recipe

    headers = [str(decision.torch.root / "include")]
    cpu_library = str(decision.torch.root / "lib" / f"libtorch_cpu{SHARED}")
    objects = [recipe.host(source, headers, STABLE_ABI) for source in sources[CPU]]
    recipe.link(objects, outputs[CPU], cpu_library)
    if decision.toolkit is None:
        return recipe

    headers += [str(path) for path in decision.toolkit.includes]
    threads = max(1, min(len(decision.arches) + 1, jobs // len(sources[CUDA])))
    flags = [
        STABLE_ABI,
        "-DUSE_CUDA",
        f"--threads={threads}",
    ]
    if toolchain.has_hopper(decision.arches):
        flags.append("-DCONVNORMPOOL_SM_90A")
    objects = []
    for source in sources[CUDA]:
        targets = toolchain.arch_flags(toolchain.arches_of(source, decision.arches))
        if targets:
            nvcc = decision.toolkit.nvcc
            objects.append(recipe.device(source, headers, nvcc, *flags, *targets))
    # torch's own CUDA runtime, found by its name in the process: one runtime, one current device.
    cuda_library = str(decision.torch.root / "lib" / "libtorch_cuda.so")
    recipe.link(objects, outputs[CUDA], cpu_library, cuda_library, str(decision.toolkit.cudart))
    return recipe


class Build(build_ext):
    """build_ext for the modules that this environment allows."""

    def get_ext_filename(self, fullname: str) -> str:
        """A library has a plain name: torch loads it, and it knows nothing of Python."""
        path = Path(*fullname.split("."))
        if path.name in (CPU.rpartition(".")[2], CUDA.rpartition(".")[2]):
            return f"{path}.so"
        return str(super().get_ext_filename(fullname))

    def build_extensions(self) -> None:
        """Decides what to build, builds it and records both."""
        decision = decide()
        for name, reason in decision.reasons.items():
            print(f"convnormpool: {name} is not built: {reason}", flush=True)
        if decision.toolkit:
            print(
                f"convnormpool: CUDA {decision.toolkit.release} for {' '.join(decision.arches)}",
                flush=True,
            )
        outputs = {name: Path(self.get_ext_fullpath(name)).resolve() for name in SOURCES}
        for name in decision.reasons:  # of an earlier build in the same folder
            outputs[name].unlink(missing_ok=True)
        jobs = toolchain.max_jobs()
        recipe_of(decision, Path(self.build_temp).resolve(), outputs, jobs).run(jobs)
        self.extensions = [ext for ext in self.extensions if ext.name not in decision.reasons]
        outputs[PLAN].with_name("_build.py").write_text(decision.information())

    def copy_extensions_to_source(self) -> None:
        """For an editable install: the modules and the record go beside the Python files."""
        source = ROOT / "src" / PACKAGE
        for name in (CPU, CUDA):
            (source / Path(self.get_ext_filename(name)).name).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        self.copy_file(str(Path(self.build_lib, PACKAGE, "_build.py")), str(source / "_build.py"))


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(name, glob(*SOURCES[name])) for name in SOURCES],
        cmdclass={"build_ext": Build},
    )
