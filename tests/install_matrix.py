"""Shows that the package installs and runs in every situation that the README names.

    python tests/install_matrix.py            every situation
    python tests/install_matrix.py --quick    those that CI runs
    python tests/install_matrix.py cpu sdist  the named ones

Each situation gets a virtual environment of its own, one at a time, deleted after use. PyTorch is
installed with pip once for each kind of PyTorch; the environments then hold hard links to that
copy, which pip replaces and never rewrites. Each installs from a copy of the tracked files of this
tree and must pass ``python -m convnormpool`` and a small forward compared with eager PyTorch. Not
collected by pytest: it downloads and takes minutes.

"No nvcc" is a mount namespace (``unshare --mount``, so root or user namespaces) in which every
nvcc on PATH is covered by /dev/null and every toolkit's folder by an empty one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "csrc"))

import setup_toolchain as toolchain  # noqa: E402

SMOKE = """
import json, pathlib
import torch, convnormpool
from convnormpool import _build

folder = pathlib.Path(convnormpool.__file__).parent
libraries = []
for name, wanted in (("_C_cpu", True), ("_C_cuda", torch.version.cuda is not None)):
    if wanted and (folder / f"{name}.so").is_file():
        torch.ops.load_library(str(folder / f"{name}.so"))
        libraries.append(name)
torch.manual_seed(0)
layer = convnormpool.ConvNormPool3d(3, 16, 3).double()
x = torch.randn(2, 3, 6, 7, 8, dtype=torch.float64)
y = torch.nn.functional.hardswish(layer.conv(x))
error = (layer(x) - layer.group_norm(y).mean((2, 3, 4))).abs().max().item()
print(json.dumps({
    "torch": torch.__version__, "built": _build.TORCH_VERSION, "libraries": libraries,
    "arches": _build.CUDA_ARCHES, "cuda_reason": _build.CUDA_REASON,
    "cpu_reason": _build.CPU_REASON, "error": error, "folder": str(folder),
}))
"""
# Both sides sum about a thousand float64 terms of size 1: their rounding is near 1e-15.
LARGEST_ERROR = 1e-12


class Failed(Exception):
    """A situation did not do what it must."""


@dataclass
class Environment:
    """A virtual environment with a copy of the source tree."""

    folder: Path
    prefix: tuple[str, ...] = ()
    wheels: Path = field(default=Path())

    @property
    def source(self) -> Path:
        return self.folder / "source"

    def python(self, *arguments: str, expect: int = 0, **variables: str) -> str:
        """Runs this environment's Python away from the source tree; returns what it printed."""
        command = (*self.prefix, str(self.folder / "venv" / "bin" / "python"), *arguments)
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**inherited, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2400,
            check=False,
        )
        if done.returncode != expect:
            raise Failed(
                f"{shlex.join(arguments)[:200]} ended with {done.returncode}\n{done.stdout}"
            )
        return done.stdout

    def pip(self, *arguments: str) -> str:
        """Runs pip and returns what it printed."""
        return self.python("-m", "pip", *arguments)

    def site(self) -> Path:
        """The environment's site-packages."""
        return next((self.folder / "venv" / "lib").glob("python*/site-packages"))

    def without_toolkit(self) -> None:
        """Hides every CUDA toolkit and every nvcc from what is run from here on."""
        self.prefix = hide_toolkits(self.folder / "empty")


def hide_toolkits(empty: Path) -> tuple[str, ...]:
    """The beginning of a command that runs the rest in a mount namespace without CUDA toolkits."""
    empty.mkdir()
    roots, binaries = set(), set()
    for folder in os.environ["PATH"].split(os.pathsep):
        nvcc = Path(folder, "nvcc")
        if nvcc.is_file():
            binaries.add(str(nvcc.resolve()))
            roots.add(str(toolchain.root_behind(str(nvcc))))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    roots |= {str(Path(p).resolve()) for p in (home, "/usr/local/cuda") if Path(p).is_dir()}
    mounts = [f"mount --bind /dev/null {shlex.quote(path)}" for path in sorted(binaries)]
    mounts += [f"mount --bind {shlex.quote(str(empty))} {shlex.quote(p)}" for p in sorted(roots)]
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    script = " && ".join([*mounts, 'unset CUDA_HOME CUDA_PATH && exec "$@"'])
    return ("unshare", *user, "--mount", "sh", "-c", script, "sh")


def isolated(env: Environment) -> None:
    env.pip("install", "./source")


def isolated_with_wheel(env: Environment) -> None:
    """As a user installs it; the wheel is kept for the situations with another torch."""
    env.pip("install", "./source")
    env.pip("wheel", "--no-deps", "--wheel-dir", str(env.wheels), "./source")


def not_isolated(env: Environment) -> None:
    env.pip("install", "setuptools>=64", "pybind11", "ninja")
    env.pip("install", "--no-build-isolation", "./source")


def editable(env: Environment) -> None:
    env.pip("install", "--editable", "./source")
    found = env.python("-c", "import convnormpool; print(convnormpool.__file__)")
    if str(env.source) not in found:
        raise Failed(f"an editable install imported {found}")


def no_toolkit(env: Environment) -> None:
    env.without_toolkit()
    env.pip("install", "./source")


def pip_toolchain(env: Environment) -> None:
    """The extra brings the toolchain; the build that follows finds it."""
    env.without_toolkit()
    env.pip("install", "./source[cuda-toolchain]")
    env.pip("install", "--force-reinstall", "--no-deps", "./source")


def source_distribution(env: Environment) -> None:
    """Sdist, a wheel from the sdist alone, and that wheel installed."""
    env.pip("install", "build")
    said = env.python("-m", "build", "--sdist", "--outdir", "dist", "./source")
    if "torch-" in said or "torch>=" in said.partition("running sdist")[0]:
        raise Failed(f"building the sdist asked for torch:\n{said}")
    shutil.rmtree(env.source)
    sdist = str(next((env.folder / "dist").glob("*.tar.gz")))
    env.pip("wheel", "--no-deps", "--wheel-dir", "dist", sdist)
    env.pip("install", str(next((env.folder / "dist").glob("*.whl"))))


def wheel_from_elsewhere(env: Environment) -> None:
    """Installs the wheel that was built against the CUDA torch, and nothing else."""
    env.pip("install", "--no-deps", "--no-index", str(next(env.wheels.glob("*.whl"))))


def forced_cuda_fails(env: Environment) -> None:
    """CONVNORMPOOL_BUILD=cuda without a toolkit is an error that says what to do."""
    env.without_toolkit()
    said = env.python("-m", "pip", "install", "./source", expect=1, CONVNORMPOOL_BUILD="cuda")
    if "CONVNORMPOOL_BUILD=cuda, but no complete CUDA" not in said:
        raise Failed(f"the sentence is missing:\n{said}")
    env.python("-m", "pip", "install", "./source", CONVNORMPOOL_BUILD="cpu")


@dataclass(frozen=True)
class Situation:
    """One row: how the package comes into which environment, and what must then be there."""

    name: str
    torch: str  # "cuda", "cpu", "none" or a requirement
    install: Callable[[Environment], None]
    says: str
    reason: str = ""  # what CUDA_REASON must contain; empty where the CUDA library must be there
    cpu: bool = True
    quick: bool = False
    after: str = ""  # the situation that leaves what this one needs


SITUATIONS = (
    Situation("cuda", "cuda", isolated_with_wheel, "CUDA torch, nvcc, pip install .", quick=True),
    Situation("cuda-no-isolation", "cuda", not_isolated, "the same, --no-build-isolation"),
    Situation("cuda-editable", "cuda", editable, "the same, --editable"),
    Situation("no-nvcc", "cuda", no_toolkit, "CUDA torch, no toolkit", "no complete CUDA"),
    Situation(
        "forced", "cuda", forced_cuda_fails, "CONVNORMPOOL_BUILD=cuda, then cpu", "BUILD=cpu asked"
    ),
    Situation("pip-toolchain", "cuda", pip_toolchain, "CUDA torch, the extra cuda-toolchain"),
    Situation("cpu", "cpu", isolated, "CPU-only torch, pip install .", "CPU-only", quick=True),
    Situation("cpu-no-isolation", "cpu", not_isolated, "--no-build-isolation", "CPU-only"),
    Situation("cpu-editable", "cpu", editable, "CPU-only torch, --editable", "CPU-only"),
    Situation(
        "sdist", "cpu", source_distribution, "sdist, wheel from it, install", "CPU-only", quick=True
    ),
    Situation(
        "wheel-on-cpu-torch",
        "cpu",
        wheel_from_elsewhere,
        "a wheel built against the CUDA torch, on CPU-only torch",
        quick=True,
        after="cuda",
    ),
    Situation("no-torch", "none", isolated, "no torch, pip install .", quick=True),
    Situation(
        "no-torch-no-isolation",
        "none",
        not_isolated,
        "no torch, --no-build-isolation",
        "PyTorch was not found",
        cpu=False,
    ),
    Situation(
        "wheel-on-oldest-torch",
        "torch==2.11.0",
        wheel_from_elsewhere,
        "a wheel built against the CUDA torch, on torch 2.11.0",
        after="cuda",
    ),
)


def copy_source(target: Path) -> None:
    """Copies what git tracks or would track, or the whole tree where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".venv", "build", "*.so"))
        return
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def make_venv(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)


def make_base(folder: Path, requirement: str) -> Environment:
    """An environment with one kind of PyTorch."""
    base = Environment(folder)
    make_venv(folder)
    if requirement:
        base.pip("install", "--quiet", *shlex.split(requirement))
    return base


def check(env: Environment, situation: Situation) -> str:
    """Runs the installed package; returns a description of what is there."""
    # Without the CPU library the package works, on the eager path, and its self-check says so.
    report = env.python("-m", "convnormpool", expect=0 if situation.cpu else 1)
    result = json.loads(env.python("-c", SMOKE).splitlines()[-1])
    with_cuda_torch = "+cpu" not in result["torch"]
    expected = ["_C_cpu"] if situation.cpu else []
    if not situation.reason and with_cuda_torch:
        expected.append("_C_cuda")
    if result["libraries"] != expected:
        raise Failed(f"libraries {result['libraries']}, expected {expected}: {result}\n{report}")
    if situation.reason not in result["cuda_reason"] or bool(situation.reason) != bool(
        result["cuda_reason"]
    ):
        raise Failed(f"the reason for no CUDA library is {result['cuda_reason']!r}")
    if situation.cpu == bool(result["cpu_reason"]):
        raise Failed(f"the reason for no CPU library is {result['cpu_reason']!r}")
    if not result["error"] <= LARGEST_ERROR:
        raise Failed(f"the forward is off by {result['error']}")
    libraries = " ".join(result["libraries"]) or "none"
    return f"{result['built'] or 'none'} | {result['torch']} | {libraries}"


def choose(names: Sequence[str], quick: bool) -> list[Situation]:
    """The situations to show, those that others need included, in the order of the table."""
    by_name = {situation.name: situation for situation in SITUATIONS}
    unknown = set(names) - set(by_name)
    if unknown:
        raise SystemExit(f"no such situation: {', '.join(sorted(unknown))}")
    chosen = set(names) or {s.name for s in SITUATIONS if s.quick or not quick}
    chosen |= {by_name[name].after for name in chosen} - {""}
    return [situation for situation in SITUATIONS if situation.name in chosen]


def main() -> int:
    """Shows the situations and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(s.name for s in SITUATIONS))
    parser.add_argument("--quick", action="store_true", help="only what CI runs")
    parser.add_argument("--cuda-torch", default="torch", help="what pip installs as CUDA torch")
    parser.add_argument("--cpu-torch", default="torch==2.13.0", help="and as CPU-only torch")
    parser.add_argument("--arch", default="9.0a", help="TORCH_CUDA_ARCH_LIST for all builds")
    parser.add_argument("--work", type=Path, help="folder for the environments (6 GB)")
    arguments = parser.parse_args()
    os.environ["TORCH_CUDA_ARCH_LIST"] = arguments.arch
    requirements = {"cuda": arguments.cuda_torch, "cpu": arguments.cpu_torch, "none": ""}

    rows, failures = [], 0
    with tempfile.TemporaryDirectory(prefix="install-matrix-", dir=arguments.work) as name:
        work = Path(name)
        base: Environment | None = None
        held = ""
        for situation in choose(arguments.names, arguments.quick):
            if situation.torch != held:
                shutil.rmtree(work / "base", ignore_errors=True)
                start = time.monotonic()
                base = make_base(work / "base", requirements.get(situation.torch, situation.torch))
                held = situation.torch
                print(f"torch: {held}: {time.monotonic() - start:.0f} s", flush=True)
            assert base
            env = Environment(work / "row", wheels=work / "wheels")
            start = time.monotonic()
            try:
                make_venv(env.folder)
                site = env.site()
                shutil.rmtree(site)
                shutil.copytree(base.site(), site, copy_function=os.link, symlinks=True)
                copy_source(env.source)
                situation.install(env)
                outcome = f"ok | {check(env, situation)}"
            except (Failed, OSError, subprocess.SubprocessError, StopIteration) as failure:
                failures += 1
                outcome = "FAILED | | |"
                print(f"{situation.name}: {str(failure)[-6000:] or failure!r}", flush=True)
            finally:
                shutil.rmtree(env.folder, ignore_errors=True)
            seconds = time.monotonic() - start
            rows.append(f"| {situation.name} | {situation.says} | {seconds:.0f} s | {outcome} |")
            print(rows[-1], flush=True)

    print("\n| situation | what | time | result | built against | runs on | libraries loaded |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
