"""Finds what setup.py builds with: PyTorch, a CUDA toolkit, architectures, compilers.

Nothing here imports torch: its headers, its libraries and ``torch/version.py`` are all that a build
needs. What is missing becomes a sentence with its remedy, printed by the build and recorded in the
installed package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

MINIMUM_TORCH = (2, 11)
TORCH_REQUIREMENT = "torch>=2.11"
HOPPER = "9.0a"
DEFAULT_ARCHES = ("8.0", HOPPER, "10.0", "12.0")
USUAL_ROOT = Path("/usr/local/cuda")
AGAIN = "then reinstall convnormpool"


class NotBuilt(Exception):
    """Why a library is not built, and the remedy, in words for the user."""


class Torch(NamedTuple):
    root: Path
    version: str
    cuda: str | None
    hip: str | None

    @property
    def site(self) -> Path:
        return self.root.parent


class Toolkit(NamedTuple):
    nvcc: str
    release: str
    cudart: Path
    includes: tuple[Path, ...]


def surrounding_sites() -> list[str]:
    """The folders of packages of the environment around an isolated build.

    An isolated build hides them from sys.path, while sysconfig and site still name them. A virtual
    environment that cannot see the base and user folders is not searched there: what the installed
    package won't find, it must not be built against.
    """
    sites = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]
    config = Path(sys.prefix, "pyvenv.cfg")
    text = config.read_text() if config.is_file() else "include-system-site-packages = true"
    if re.search(r"(?im)^include-system-site-packages\s*=\s*true", text):
        sites.append(site.getusersitepackages())
        sites += site.getsitepackages([sys.base_prefix])
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        sites += [
            sysconfig.get_path("platlib", vars=base),
            sysconfig.get_path("purelib", vars=base),
        ]
    return list(dict.fromkeys(sites))


def read_torch(spec: ModuleSpec | None) -> Torch | None:
    """The torch that a module spec stands for."""
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    version = root / "version.py"
    if not version.is_file():
        return None
    values = runpy.run_path(str(version))
    return Torch(root, str(values["__version__"]), values.get("cuda"), values.get("hip"))


def find_torch(sites: Iterable[str]) -> tuple[Torch | None, str]:
    """The first torch that is new enough, on sys.path and then in ``sites``, or why there is none.

    In an isolated build sys.path holds the build's own packages, which is where a torch lies that
    was asked for because the surrounding one was missing or too old.
    """
    old = ""
    specs = [importlib.util.find_spec("torch")]
    specs += [PathFinder.find_spec("torch", [path]) for path in sites]
    for torch in map(read_torch, specs):
        if torch is None:
            continue
        match = re.match(r"(\d+)\.(\d+)", torch.version)
        if match and (int(match[1]), int(match[2])) >= MINIMUM_TORCH:
            return torch, ""
        old = old or f"PyTorch {torch.version} is older than 2.11"
    reason = old or "PyTorch was not found when convnormpool was built"
    return None, f"{reason}; install {TORCH_REQUIREMENT}, {AGAIN}"


def output_of(*command: str) -> str:
    """What a command prints; empty if it can't be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def root_behind(nvcc: str) -> Path:
    """The toolkit that an nvcc belongs to, also if that is a wrapper script: nvcc tells."""
    match = re.search(r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "-x", "cu", os.devnull), re.M)
    return Path(match[1].strip()).resolve() if match else Path(nvcc).resolve().parents[1]


def toolkit_places(pip_roots: Iterable[Path]) -> Iterator[tuple[str, Path, str]]:
    """(name for messages, root, nvcc) of every place to look for a toolkit, in order."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        yield f"CUDA_HOME ({home})", Path(home), str(Path(home, "bin", "nvcc"))
    on_path = shutil.which("nvcc")
    if on_path:
        yield f"nvcc on PATH ({on_path})", root_behind(on_path), on_path
    yield str(USUAL_ROOT), USUAL_ROOT, str(USUAL_ROOT / "bin" / "nvcc")
    for root in pip_roots:
        yield f"pip's toolchain ({root})", root, str(root / "bin" / "nvcc")


def find_cudart(folders: Iterable[Path], major: str) -> Path:
    """The libcudart of this major version; pip's has no plain libcudart.so beside it."""
    others = []
    for folder in folders:
        for name in (f"libcudart.so.{major}", "libcudart.so"):
            library = folder / name
            if library.is_file():
                if library.resolve().name.startswith(f"libcudart.so.{major}"):
                    return library
                others.append(str(library.resolve()))
        others += [str(path) for path in sorted(folder.glob("libcudart.so.*"))]
    if others:
        raise NotBuilt(f"{others[0]} is not of CUDA {major}")
    raise NotBuilt(f"libcudart.so.{major} is missing")


def read_toolkit(root: Path, nvcc: str, major: str, pip_roots: Sequence[Path]) -> Toolkit:
    """The toolkit at ``root``; parts that it lacks come from ``pip_roots``, torch's own CUDA."""
    if not (Path(nvcc).is_file() and os.access(nvcc, os.X_OK)):
        raise NotBuilt("nvcc is missing")
    match = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
    if not match:
        raise NotBuilt(f"{nvcc} does not run")
    if match[1] != major:
        raise NotBuilt(f"its nvcc is of CUDA {match[1]}.{match[2]}, not {major}")
    roots = [root, *sorted(root.glob("targets/*")), *pip_roots]
    headers = [r / "include" for r in roots if (r / "include" / "cuda_runtime.h").is_file()]
    if not headers:
        raise NotBuilt("cuda_runtime.h is missing")
    api = (headers[0] / "cuda_runtime_api.h").read_text(errors="replace")
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", api)
    if not version or str(int(version[1]) // 1000) != major:
        raise NotBuilt(f"{headers[0] / 'cuda_runtime.h'} is not of CUDA {major}")
    cudart = find_cudart([r / lib for r in roots for lib in ("lib64", "lib")], major)
    # nvcc finds its own toolkit's headers first; these follow, for what that toolkit lacks.
    includes = dict.fromkeys([headers[0], *(r / "include" for r in pip_roots)])
    # The system's own folder must keep its place: gcc's headers count on what comes after them.
    added = [path for path in includes if path.is_dir() and path != Path("/usr/include")]
    return Toolkit(nvcc, f"{match[1]}.{match[2]}", cudart, tuple(added))


def find_toolkit(torch: Torch, sites: Sequence[str]) -> Toolkit:
    """A complete toolkit of torch's CUDA version."""
    if sys.platform != "linux":
        raise NotBuilt(f"the CUDA library is built on Linux only, and this is {sys.platform}")
    if torch.hip:
        raise NotBuilt(
            f"PyTorch {torch.version} is a ROCm build; install a CUDA build of PyTorch, {AGAIN}"
        )
    if not torch.cuda:
        raise NotBuilt(
            f"PyTorch {torch.version} is a CPU-only build; install a CUDA build of PyTorch, {AGAIN}"
        )
    major = torch.cuda.partition(".")[0]
    folders = dict.fromkeys([str(torch.site), *sites])
    pip_roots = [r for f in folders if (r := Path(f, "nvidia", f"cu{major}")).is_dir()]
    failures = {}
    for name, root, nvcc in toolkit_places(pip_roots):
        try:
            return read_toolkit(root, nvcc, major, pip_roots)
        except NotBuilt as failure:
            failures[name] = str(failure)
    tried = ", ".join(f"in {name} {failure}" for name, failure in failures.items())
    raise NotBuilt(
        f"no complete CUDA {major} toolkit was found for PyTorch {torch.version}: {tried}; "
        f'install CUDA {torch.cuda} and set CUDA_HOME, or pip install "cuda-toolkit[nvcc,cccl]'
        f'=={torch.cuda}.*", {AGAIN}'
    )


def parse_arches(text: str, supported: set[str]) -> list[str]:
    """TORCH_CUDA_ARCH_LIST's notation to a list of it, or the default that this nvcc supports.

    9.0 becomes 9.0a, which runs on the same devices and has their matrix instructions. What is
    older than 8.0 is left out, since container images name every architecture that they know.
    """
    if not text.strip():
        known = [a for a in DEFAULT_ARCHES if a.rstrip("a") in supported]
        if not known:
            raise NotBuilt(f"this nvcc knows none of {', '.join(DEFAULT_ARCHES)}; use a newer one")
        return [*known[:-1], f"{known[-1]}+PTX"]
    arches: list[str] = []
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if not match:
            raise SystemExit(
                f"convnormpool: TORCH_CUDA_ARCH_LIST has {entry!r}; write it like "
                "'8.0;9.0a;12.0+PTX'"
            )
        number = f"{match[1]}.{match[2]}"
        if int(match[1]) < 8:
            print(f"convnormpool: {entry} is left out, the kernels need 8.0 or newer", flush=True)
        elif number not in supported:
            raise NotBuilt(
                f"TORCH_CUDA_ARCH_LIST has {entry}, which this nvcc does not know; remove it or "
                "use a newer CUDA toolkit"
            )
        else:
            suffix = "a" if number == "9.0" else match[3]
            arches.append(f"{number}{suffix}{match[4] or ''}")
    if not arches:
        raise NotBuilt("TORCH_CUDA_ARCH_LIST names no architecture from 8.0 on; add one")
    return list(dict.fromkeys(arches))


def arch_flags(arches: Iterable[str]) -> list[str]:
    """Options for nvcc; PTX is of the plain architecture, as only that runs on later devices."""
    flags = []
    for arch in arches:
        code = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if arch.endswith("+PTX"):
            plain = code.rstrip("af")
            flags.append(f"-gencode=arch=compute_{plain},code=compute_{plain}")
    return flags


def arches_of(source: str, arches: Sequence[str]) -> Sequence[str]:
    """What a file is compiled for: one of wgmma kernels for 9.0a alone, and otherwise not."""
    if "_wgmma_" not in Path(source).name:
        return arches
    return [HOPPER] if has_hopper(arches) else []


def has_hopper(arches: Iterable[str]) -> bool:
    """Whether the build is to have Hopper's own kernels."""
    return any(arch.removesuffix("+PTX") == HOPPER for arch in arches)


def supported_arches(nvcc: str) -> set[str]:
    """What this nvcc compiles for, as 8.0 and the like."""
    codes = re.findall(r"sm_(\d+)(\d)\b", output_of(nvcc, "--list-gpu-code"))
    return {f"{major}.{minor}" for major, minor in codes}


def build_mode() -> str:
    """CONVNORMPOOL_BUILD."""
    mode = os.environ.get("CONVNORMPOOL_BUILD") or "auto"
    if mode not in ("auto", "cuda", "cpu"):
        raise SystemExit(f"convnormpool: CONVNORMPOOL_BUILD is {mode!r}; use auto, cuda or cpu")
    return mode


def decide_cuda(
    torch: Torch | None, reason: str, sites: Sequence[str]
) -> tuple[Toolkit, list[str]]:
    """The toolkit and the architectures to build for. A visible GPU plays no part."""
    if build_mode() == "cpu":
        raise NotBuilt(f"CONVNORMPOOL_BUILD=cpu asked for no CUDA library; unset it, {AGAIN}")
    try:
        if torch is None:
            raise NotBuilt(reason)
        toolkit = find_toolkit(torch, sites)
        supported = supported_arches(toolkit.nvcc)
        return toolkit, parse_arches(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), supported)
    except NotBuilt as failure:
        if build_mode() == "cuda":
            raise SystemExit(f"convnormpool: CONVNORMPOOL_BUILD=cuda, but {failure}") from None
        raise


def max_jobs() -> int:
    """MAX_JOBS, or as many as there are cores and 2 GiB of memory for each."""
    text = os.environ.get("MAX_JOBS")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise SystemExit(f"convnormpool: MAX_JOBS is {text!r}; use a number from 1 on")
        return int(text)
    try:
        cores = len(os.sched_getaffinity(0))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return os.cpu_count() or 1
    return max(1, min(cores, memory >> 31))


def host_compiler() -> list[str]:
    """CXX or the first C++ compiler there is, checked for C++17 by default: no -std= is passed."""
    names = [os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]
    command = next((c for n in names if n and (c := shlex.split(n)) and shutil.which(c[0])), None)
    if command is None:
        raise SystemExit("convnormpool: no C++ compiler was found; install g++ 11 or newer")
    macros = output_of(*command, "-dM", "-E", "-x", "c++", os.devnull)
    match = re.search(r"#define __cplusplus (\d+)", macros)
    if not match or int(match[1]) < 201703:
        raise SystemExit(
            f"convnormpool: {shlex.join(command)} does not compile C++17 by default; "
            "set CXX to g++ 11, clang++ 16 or newer"
        )
    return command


def python_include() -> str:
    """Python's headers."""
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").is_file():
        raise SystemExit(f"convnormpool: {folder} has no Python.h; install python3-dev or the like")
    return folder


def pybind11_include(torch: Torch | None) -> str:
    """pybind11's headers: its package's, or those that torch brings along."""
    try:
        import pybind11
    except ImportError:
        if torch and (torch.root / "include" / "pybind11").is_dir():
            return str(torch.root / "include")
        raise SystemExit("convnormpool: pybind11 is missing; pip install pybind11") from None
    return str(pybind11.get_include())
