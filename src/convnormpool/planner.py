"""Which path takes a problem, and why not the others.

The decisions are the C++ planner's (``csrc/plan.h``). The paths:

``fused``
    One kernel computes the convolution and its statistics; nothing of its output is stored.
``two_stage``
    The library's convolution on chunks of the batch, each reduced to moments before the next.
``eager``
    PyTorch's operators, which keep the convolution's output.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _checks, _library
from ._checks import Described

__all__ = ["ENVIRONMENT", "Convolution", "Decision", "decide", "requested_path"]

ENVIRONMENT = "CONVNORMPOOL_PATH"


@dataclass(frozen=True)
class Convolution:
    """A convolution's arguments, per axis three, and what is done with its output."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    activation: str
    precision: str


@dataclass(frozen=True)
class Decision:
    """What the planner decided.

    Attributes:
        path: "fused", "two_stage" or "eager".
        kernel: what computes the convolution, in words.
        backward: the path of the gradients.
        chunk_samples: samples that a library convolution takes at once (two_stage).
        chunk_planes: output planes along the depth that it takes at once, None for all.
        channels_last: the layout in which it is called (two_stage).
        unfolded_channels: the channels of a two-dimensional convolution that takes the place of
            the three-dimensional one (two_stage on CUDA), 0 where none does.
        workspace: elements of the statistics dtype that the kernel needs beside its results.
        gradient_workspaces: the same for the gradients: of none, x, (w, b), all.
        wgmma: whether the kernel is that of compute capability 9.0 (fused on CUDA).
        alignment: bytes to which the kernel needs x aligned; it is copied where it is not.
        gradients_wgmma: as ``wgmma``, of the gradients' kernels.
        reasons: for each path not taken, one sentence why; under "gradients" the same where their
            path differs from the forward's, under "wgmma" where its kernel could be but is not,
            under "gradients by wgmma" where that holds for the gradients alone.
    """

    path: str
    kernel: str
    backward: str
    chunk_samples: int
    chunk_planes: int | None
    channels_last: bool
    unfolded_channels: int
    workspace: int
    reasons: Mapping[str, str] = field(default_factory=dict)
    gradient_workspaces: tuple[int, ...] = (0, 0, 0, 0)
    wgmma: bool = False
    alignment: int = 1
    gradients_wgmma: bool = False

    def gradient_workspace(self, input: bool, parameters: bool) -> int:
        """Elements that the fused gradients need of x, of w or b, or of both."""
        return self.gradient_workspaces[input + 2 * parameters]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.kernel}"]
        if self.backward != self.path:
            lines.append(f"gradients by {self.backward}")
        elif self.gradients_wgmma:
            lines.append("gradients by wgmma")
        if self.path == "two_stage":
            layout = "channels last" if self.channels_last else "contiguous"
            lines.append(f"chunks of {self.chunk_samples} samples, {layout}")
        lines += [f"not {path}: {reason}" for path, reason in self.reasons.items()]
        return "\n".join(lines)


def requested_path(path: str) -> str:
    """The path asked for: the argument, or for "auto" what ``CONVNORMPOOL_PATH`` says."""
    _checks.choice("path", path, _checks.PATHS)
    if path == "auto":
        path = os.environ.get(ENVIRONMENT, "") or "auto"
        _checks.choice(f"the environment variable {ENVIRONMENT}", path, _checks.PATHS)
    return path


@functools.cache
def _device_facts(device_type: str, index: int | None) -> Mapping[str, int]:
    if device_type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(index)
    return {
        "major": properties.major,
        "minor": properties.minor,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "sm_90a": any(arch.startswith("9.0a") for arch in _library.build_constant("CUDA_ARCHES")),
    }


@functools.cache
def _warn_eager(device_type: str) -> None:
    warnings.warn(
        f"convnormpool uses its eager path on {device_type}: the compiled operators are not "
        "loaded. Run python -m convnormpool to see why.",
        RuntimeWarning,
        stacklevel=2,
    )


def _problem(
    planner: Any,
    input: Sequence[int],
    filter: Sequence[int],
    conv: Convolution,
    dtype: torch.dtype,
) -> Any:
    """The planner's own description of a convolution."""
    return planner.Problem(
        input=input, filter=filter, stride=conv.stride, padding=conv.padding,
        dilation=conv.dilation, groups=conv.groups,
        dtype=getattr(planner.DType, str(dtype).removeprefix("torch.")),
        precision=getattr(planner.Precision, conv.precision),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _plan(
    input: Sequence[int],
    filter: Sequence[int],
    conv: Convolution,
    dtype: torch.dtype,
    device_type: str,
    index: int | None,
    path: str,
) -> Decision:
    planner = _library.plan
    if planner is None or not _library.loaded_for(device_type):
        reason = f"the compiled operators for {device_type} are not loaded"
        if path in ("fused", "two_stage"):
            raise ValueError(f"path {path!r} can't run: {reason} (python -m convnormpool says why)")
        if path == "auto":
            _warn_eager(device_type)
        reasons = {"fused": reason, "two_stage": reason}
        return Decision(
            "eager", "PyTorch's operators", "eager", input[0], None, False, 0, 0, reasons
        )
    problem = _problem(planner, input, filter, conv, dtype)
    device = planner.Device(cuda=device_type == "cuda", **_device_facts(device_type, index))
    requested = None if path == "auto" else getattr(planner.Path, path)
    try:
        found = planner.plan(problem, device, requested)
    except ValueError as error:
        raise ValueError(f"path {path!r} can't run: {error}") from None
    reasons = dict(zip(("fused", "two_stage", "eager"), found.reason, strict=True))
    del reasons[found.path.name]
    if found.backward_reason:
        reasons["gradients"] = found.backward_reason
    if found.kernel_reason:
        reasons["wgmma"] = found.kernel_reason
    elif found.backward_kernel_reason:
        reasons["gradients by wgmma"] = found.backward_kernel_reason
    planes = found.chunk_planes if found.chunk_planes < problem.output[0] else None
    gradient_workspaces: tuple[int, ...] = (0, 0, 0, 0)
    if found.backward_path.name == "fused" and device_type == "cuda":
        gradient_workspaces = tuple(
            planner.conv_act_moments_backward_workspace(
                problem, device, found.backward_wgmma, bool(i & 1), bool(i & 2)
            )
            for i in range(4)
        )
    return Decision(
        found.path.name, found.kernel, found.backward_path.name, found.chunk_samples, planes,
        found.channels_last, found.unfolded_channels, found.workspace, reasons,
        gradient_workspaces, found.wgmma, found.alignment, found.backward_wgmma,
    )  # fmt: skip


def decide(x: Described, w: Described, conv: Convolution, path: str = "auto") -> Decision:
    """The decision for a convolution of ``x`` (N, C, D, H, W) with ``w`` (K, C // groups, T, R, S).

    Raises:
        ValueError: an explicit path that can't run, with the planner's sentence.
    """
    return _plan(
        tuple(x.shape), tuple(w.shape), conv, x.dtype, x.device.type, x.device.index,
        requested_path(path),
    )  # fmt: skip
