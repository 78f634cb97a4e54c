"""Loads the compiled modules.

A module that fails to load is described and never raised: the package then works on its eager path.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

# A library registers implementations of operators, so their schemas come first.
from . import _schemas as _schemas

__all__ = ["CPU", "CUDA", "PLAN", "Status", "build_constant", "loaded_for", "plan"]


@dataclass(frozen=True)
class Status:
    """What became of one compiled module.

    Attributes:
        name: the module's name.
        path: its file, or None where this build has none.
        error: the loader's text, or why there is no file; empty where it loaded.
    """

    name: str
    path: Path | None
    error: str

    @property
    def loaded(self) -> bool:
        """Whether the module can be used."""
        return not self.error


def build_constant(name: str) -> str | tuple[str, ...]:
    """A constant of the module ``_build`` that the build writes; empty where it is missing."""
    try:
        module = importlib.import_module("._build", __package__)
    except ImportError:
        return ""
    value: str | tuple[str, ...] = getattr(module, name, "")
    return value


def _find(name: str) -> Path | None:
    candidates = [Path(__file__).with_name(name + suffix) for suffix in EXTENSION_SUFFIXES]
    return next((path for path in candidates if path.is_file()), None)


def _load_operators(name: str, reason_constant: str) -> Status:
    path = _find(name)
    if path is None:
        reason = str(build_constant(reason_constant))
        return Status(name, None, reason or "it is not part of this build")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # torch's names the file alone, its cause has the loader's words
        return Status(name, path, str(error.__cause__ or error))
    return Status(name, path, "")


def _load_plan() -> tuple[Status, ModuleType | None]:
    try:
        module = importlib.import_module("._plan", __package__)
    except ImportError as error:
        return Status("_plan", _find("_plan"), str(error)), None
    return Status("_plan", Path(str(module.__file__)), ""), module


def _load_cuda() -> Status:
    if torch.version.cuda is None and _find("_C_cuda") is not None:
        return Status("_C_cuda", _find("_C_cuda"), "this PyTorch is built without CUDA")
    return _load_operators("_C_cuda", "CUDA_REASON")


PLAN, plan = _load_plan()
CPU = _load_operators("_C_cpu", "CPU_REASON")
CUDA = _load_cuda()


def loaded_for(device_type: str) -> bool:
    """Whether the planner and the compiled operators for this kind of device are loaded."""
    operators = {"cpu": CPU, "cuda": CUDA}.get(device_type)
    return operators is not None and operators.loaded and plan is not None
