"""The layer where nothing looks at its operators: the kernels' calls and what they write into.

A public operator that is implemented in Python costs several times what its kernel's launch does:
it is dispatched twice, and checks arguments that the layer has checked. Whoever may look at the
operators gets them (:func:`watched`); a plain call goes straight to the compiled ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _kernels, _library, _paths, planner
from ._autograd import gradients_by_operators
from ._checks import Described
from .planner import Convolution, Decision
from .reference import statistics_dtype

__all__ = ["Plan", "Tensors", "plan", "run", "watched"]

# (x, w, b, norm_weight, norm_bias)
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

_PLAIN = frozenset({Tensor, Parameter, type(None)})
# The older vmap, by which autograd maps over the gradients of is_grads_batched.
_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")


def watched(tensors: Iterable[object]) -> bool:
    """Whether more than the kernels may depend on the operators that a call is made of.

    A compiler, a transform of torch.func, forward derivatives, a mode or a tensor of another class
    do: they work by the operators' names and registrations.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or not {*map(type, tensors)} <= _PLAIN
    )


class Plan(NamedTuple):
    """Everything about a call but its tensors.

    Attributes:
        convolution: over three axes.
        decision: the planner's, for a path with compiled operators.
        path: the one that was asked for.
        positions: of the convolution's output.
        num_groups: of the normalisation.
        eps: of the normalisation.
        dtype: of the output.
    """

    convolution: Convolution
    decision: Decision
    path: str
    positions: int
    num_groups: int
    eps: float
    dtype: torch.dtype


def plan(
    x: Described,
    w: Described,
    convolution: Convolution,
    path: str,
    positions: int,
    num_groups: int,
    eps: float,
    dtype: torch.dtype,
) -> Plan | None:
    """The plan of a call whose arguments are checked, or None where the operators have to run it.

    They also say why a path can't run.
    """
    if path == "eager" or x.shape[0] == 0 or not _library.loaded_for(x.device.type):
        return None
    with contextlib.suppress(ValueError):
        decision = planner.decide(x, w, convolution, path)
        if decision.path != "eager":
            return Plan(convolution, decision, path, positions, num_groups, eps, dtype)
    return None


def run(tensors: Tensors, plan: Plan) -> Tensor:
    """The output (N, K), with a derivative where one may be asked for."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out: Tensor = ConvNormPool.apply(*tensors, plan)
        return out
    return _forward(tensors, plan)[0]


class ConvNormPool(torch.autograd.Function):
    """``_autograd.ConvNormPool`` without the operators; users see the same name in their graphs."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """The output (N, K) from the tensors and the plan."""
        *tensors, ctx.plan = arguments
        out, *moments = _forward(tensors, ctx.plan)
        ctx.save_for_backward(*tensors, *moments)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        wanted = ctx.needs_input_grad[:5]
        saved = ctx.saved_tensors  # once: checkpointing gives them out no second time
        given = (grad_out, *saved)
        if not (torch.is_grad_enabled() or watched(given) or _unusual(*given)):
            return (*_gradients(plan, wanted, *given), None)
        conv = plan.convolution
        convolution = (
            conv.stride, conv.padding, conv.dilation, conv.groups, conv.activation,
            conv.precision, plan.path,
        )  # fmt: skip
        rest = (plan.num_groups, plan.eps, plan.positions, wanted, convolution)
        return (*gradients_by_operators(grad_out, saved, *rest), None)


def _unusual(grad_out: Tensor, x: Tensor, w: Tensor, *rest: Any) -> bool:
    """Whether tensors are otherwise than the kernels take them.

    Autograd may hand over zeros without memory, and hooks on saved tensors other strides or dtypes;
    the operators copy those, and refuse the last.
    """
    *_, mean, m2 = rest
    dense = mean.is_contiguous() and m2.is_contiguous()
    return grad_out._is_zerotensor() or x.dtype != w.dtype or not dense


def _forward(tensors: Sequence[Any], plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the moments that it comes from."""
    x, w, b, norm_weight, norm_bias = tensors
    with torch._C._AutoDispatchBelowAutograd():
        mean = x.new_empty((x.shape[0], w.shape[0]), dtype=statistics_dtype(x.dtype))
        m2 = torch.empty_like(mean)
        convolution = (x, w, b, plan.convolution, plan.decision, mean, m2)
        norm = (norm_weight, norm_bias, plan.num_groups, plan.eps, plan.dtype)
        if x.is_cuda and plan.decision.path == "fused":
            return _kernels.conv_norm_pool(*convolution, *norm), mean, m2
        _paths.moments(*convolution)
        out = _kernels.group_norm_pool(mean, m2, plan.positions, *norm)[0]
    return out, mean, m2


def _gradients(
    plan: Plan,
    wanted: Sequence[bool],
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    m2: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of (x, w, b, norm_weight, norm_bias); None for an unwanted one."""
    norm = (norm_weight, plan.positions, plan.num_groups, plan.eps)
    with torch._C._AutoDispatchBelowAutograd():
        of_norm = (
            _kernels.dense_like(norm_weight) if norm_weight is not None and wanted[3] else None,
            _kernels.dense_like(norm_bias) if norm_bias is not None and wanted[4] else None,
        )
        if not any(wanted[:3]):
            _kernels.group_norm_pool_backward(grad_out, mean, m2, *norm, (None, None, *of_norm))
            return (None, None, None, *of_norm)
        of_moments = (torch.empty_like(mean), torch.empty_like(mean))
        _kernels.group_norm_pool_backward(grad_out, mean, m2, *norm, (*of_moments, *of_norm))
        of_convolution = (
            x.new_empty(x.shape) if wanted[0] else None,
            _kernels.dense_like(w) if wanted[1] else None,
            _kernels.dense_like(b) if b is not None and wanted[2] else None,
        )
        _paths.gradients(
            x, w, b, plan.convolution, plan.decision, (mean, *of_moments), m2, of_convolution
        )
    return (*of_convolution, *of_norm)
