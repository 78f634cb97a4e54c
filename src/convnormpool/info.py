"""The environment report and self-check behind ``python -m convnormpool``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

from . import __version__, _library, planner, reference
from .functional import conv_norm_pool

__all__ = ["report", "self_check"]


def _module_line(status: _library.Status) -> str:
    if status.loaded:
        return f"loaded from {status.path.name if status.path else '?'}"
    where = f" ({status.path.name})" if status.path else ""
    return f"NOT loaded{where}: {status.error}"


def report() -> Iterator[str]:
    """The lines of the environment report."""
    yield f"convnormpool    {__version__}"
    yield f"Python          {platform.python_version()} on {platform.platform()}"
    yield f"PyTorch         {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    arches = _library.build_constant("CUDA_ARCHES")
    built = _library.build_constant("TORCH_VERSION") or "unknown"
    toolkit = _library.build_constant("CUDA_VERSION") or "none"
    yield f"built against   PyTorch {built}, CUDA {toolkit}"
    yield f"architectures   {' '.join(arches) if arches else 'none'}"
    for status in (_library.PLAN, _library.CPU, _library.CUDA):
        yield f"{status.name:<15} {_module_line(status)}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            yield f"cuda:{index}          {properties.name}, compute capability {capability}"
    else:
        yield "CUDA devices    none"
    forced = os.environ.get(planner.ENVIRONMENT)
    if forced:
        yield f"{planner.ENVIRONMENT}={forced} decides what path 'auto' takes"


def _check(device: str, path: str) -> str:
    """The largest error of a small forward and backward on one path against float64, in words."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [tensor(3, 3, 6, 9, 10) * 3, tensor(8, 3, 3, 3, 3) / 9, tensor(8), tensor(8)]
    weights = tensor(3, 8)
    results = []
    runs = (("cpu", torch.float64, None), (device, torch.float32, path))
    for run_device, dtype, run_path in runs:
        x, w, b, gamma = (t.float().to(run_device, dtype).requires_grad_() for t in tensors)
        arguments = {"num_groups": 2, "norm_weight": gamma, "padding": 1}
        if run_path is None:
            out = reference.conv_norm_pool(x, w, b, **arguments)  # type: ignore[arg-type]
        else:
            out = conv_norm_pool(x, w, b, path=run_path, **arguments)  # type: ignore[arg-type]
        (out * weights.to(run_device, dtype)).sum().backward()
        found = [out.detach(), x.grad, w.grad, b.grad, gamma.grad]
        results.append([t.double().cpu() for t in found if t is not None])
    worst = max(
        ((ours - oracle).norm() / oracle.norm()).item()
        for oracle, ours in zip(*results, strict=True)
    )
    # Single-precision gradients of this problem are good to a few 1e-7 in norm.
    if not worst < 1e-5:
        raise ArithmeticError(f"relative error {worst:.1e} against float64")
    return f"relative error {worst:.1e}"


def self_check() -> tuple[list[str], bool]:
    """Runs every path on every kind of device; the lines to show, and whether all is well.

    A path that the planner refuses is no failure, except for "auto"; a module of the build that
    does not load is one, and so is a wrong result.
    """
    lines = []
    good = True
    for status in (_library.PLAN, _library.CPU, _library.CUDA):
        if status.path is not None and not status.loaded and torch.version.cuda is not None:
            good = False
    if not _library.PLAN.loaded or not _library.CPU.loaded:
        good = False
    if torch.cuda.is_available() and not _library.CUDA.loaded:
        lines.append("cuda  the CUDA operators are not loaded: CUDA tensors take the eager path")
        good = False
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for path in ("auto", "fused", "two_stage", "eager"):
            try:
                outcome = _check(device, path)
            except ValueError as refusal:
                outcome = str(refusal) if path != "auto" else f"FAILED: {refusal}"
                good = good and path != "auto"
            except (RuntimeError, ArithmeticError) as failure:
                outcome = f"FAILED: {failure}"
                good = False
            lines.append(f"{device:<5} {path:<10} {outcome}")
    return lines, good
