"""The moments of a convolution and its gradients, by the path that was decided."""

from __future__ import annotations

from torch import Tensor

from . import _kernels, _two_stage
from ._convolution import without_autocast
from .planner import Convolution, Decision

__all__ = ["gradients", "moments"]


def moments(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    mean: Tensor,
    m2: Tensor,
) -> None:
    """Writes the moments (N, K), of at least one sample, into mean and m2."""
    if decision.path == "fused":
        _kernels.conv_act_moments(x, w, b, conv, decision, mean, m2)
        return
    with without_autocast(x.device.type):
        _two_stage.forward(x, w, b, conv, decision, mean, m2)


def gradients(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    moments: tuple[Tensor, Tensor, Tensor],
    m2: Tensor,
    wanted: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Writes the wanted gradients of (x, w, b), at least one, given (mean, grad_mean, grad_m2)."""
    if decision.backward == "fused":
        _kernels.conv_act_moments_backward(x, w, b, conv, decision, moments, m2, wanted)
        return
    with without_autocast(x.device.type):
        _two_stage.backward(x, w, b, conv, decision, moments, wanted)
