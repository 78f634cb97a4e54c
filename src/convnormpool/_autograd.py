"""Derivatives and vmap rules of the operators, and the autograd function of the whole layer.

Both are needed: the function alone gives silent zeros under ``torch.compile(torch.func.grad(f))``,
and the operators' registrations alone don't support ``torch.func.grad``. Their formulas are one.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks, ops
from ._convolution import output_extents
from ._schemas import LIBRARY

__all__ = ["ConvNormPool", "gradients_by_operators"]


_SECOND_DERIVATIVE = (
    "the gradients of convnormpool can't be differentiated again (create_graph=True, or a gradient "
    "of a gradient) except with path='eager', or CONVNORMPOOL_PATH=eager in the environment"
)


# --- derivatives of the operators -----------------------------------------------------------------


class _Once(torch.autograd.Function):
    """Gradients that depend on ``sources``, with one clear error where that is differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *gradients_and_sources: Any) -> tuple[Any, ...]:
        return tuple(
            g.view_as(g) if isinstance(g, Tensor) else g for g in gradients_and_sources[:count]
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_SECOND_DERIVATIVE)


def _once_differentiable(formula: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """PyTorch's decorator of that name takes saved tensors for constants; this one does not."""

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            found = formula(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        applied: tuple[Any, ...] = _Once.apply(len(found), *found, *ctx.saved_tensors, *grads)
        return applied

    return backward


def _act_moments_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, ctx.activation = inputs
    ctx.save_for_backward(y, output[0])


@_once_differentiable
def _act_moments_backward(ctx: Any, grad_mean: Tensor, grad_m2: Tensor) -> tuple[Any, ...]:
    y, mean = ctx.saved_tensors
    return ops.act_moments_backward(grad_mean, grad_m2, y, mean, ctx.activation), None


def _group_norm_pool_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    mean, m2, count, weight, bias, num_groups, eps, _ = inputs
    ctx.save_for_backward(mean, m2, weight, bias)
    ctx.arguments = (count, num_groups, eps)
    # Statistics for the caller to look at; nothing is differentiated through them.
    ctx.mark_non_differentiable(output[1], output[2])


@_once_differentiable
def _group_norm_pool_backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    mean, m2, weight, bias = ctx.saved_tensors
    count, num_groups, eps = ctx.arguments
    wanted = ctx.needs_input_grad
    mask = (wanted[0] or wanted[1], wanted[3], wanted[4])
    grads = ops.group_norm_pool_backward(
        grad_out, mean, m2, count, weight, bias, num_groups, eps, mask
    )
    grad_mean, grad_m2 = grads[:2] if mask[0] else (None, None)
    grad_weight = grads[2] if mask[1] else None
    grad_bias = grads[3] if mask[2] else None
    return grad_mean, grad_m2, None, grad_weight, grad_bias, None, None, None


def _conv_act_moments_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, b, *ctx.arguments = inputs
    ctx.save_for_backward(x, w, b, *output)


@_once_differentiable
def _conv_act_moments_backward(ctx: Any, grad_mean: Tensor, grad_m2: Tensor) -> tuple[Any, ...]:
    x, w, b, mean, m2 = ctx.saved_tensors
    mask = tuple(ctx.needs_input_grad[:3])
    grads = ops.conv_act_moments_backward(
        grad_mean, grad_m2, x, w, b, mean, m2, *ctx.arguments, mask
    )
    wanted = (grad if take else None for grad, take in zip(grads, mask, strict=True))
    return (*wanted, *(None for _ in ctx.arguments))


for _name, _backward, _context in (
    ("act_moments", _act_moments_backward, _act_moments_context),
    ("group_norm_pool", _group_norm_pool_backward, _group_norm_pool_context),
    ("conv_act_moments", _conv_act_moments_backward, _conv_act_moments_context),
):
    torch.library.register_autograd(
        f"convnormpool::{_name}", _backward, setup_context=_context, lib=LIBRARY
    )


# --- vmap -----------------------------------------------------------------------------------------


def _register_vmap(name: str, rows: frozenset[int]) -> None:
    """A vmap rule. ``rows``: the arguments whose first dimension counts independent samples.

    Where only those are batched the new dimension joins the samples and one call does all.
    Otherwise (batched parameters, or sums over samples in the result) each slice is one call.
    """
    operator = getattr(torch.ops.convnormpool, name)

    def by_slices(size: int, dims: Sequence[Any], args: Sequence[Any]) -> Any:
        if size == 0:
            raise ValueError(f"vmap of {name} over a dimension of size 0")

        def at(i: int) -> list[Any]:
            return [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]

        results = [operator(*at(i)) for i in range(size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(column) for column in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        size = info.batch_size
        # A list argument such as stride has a list of dims.
        dims = [d if isinstance(a, Tensor) else None for a, d in zip(args, in_dims, strict=True)]
        batched = {i for i, d in enumerate(dims) if d is not None}
        if not rows or batched - rows:
            return by_slices(size, dims, args)
        folded = list(args)
        for i in rows:
            value, dim = args[i], dims[i]
            value = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
            samples = value.shape[1]
            folded[i] = value.flatten(0, 1)
        results = operator(*folded)
        if isinstance(results, Tensor):
            return results.unflatten(0, (size, samples)), 0
        return tuple(r.unflatten(0, (size, samples)) for r in results), (0,) * len(results)

    torch.library.register_vmap(f"convnormpool::{name}", rule, lib=LIBRARY)


_register_vmap("act_moments", frozenset({0}))
_register_vmap("act_moments_backward", frozenset({0, 1, 2, 3}))
_register_vmap("group_norm_pool", frozenset({0, 1}))
_register_vmap("group_norm_pool_backward", frozenset())
_register_vmap("conv_act_moments", frozenset({0}))
_register_vmap("conv_act_moments_backward", frozenset())
_register_vmap("conv_weight_grad", frozenset())


# --- the layer ------------------------------------------------------------------------------------


def _below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Spares the operators their derivatives' registrations where nothing records any."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


class ConvNormPool(torch.autograd.Function):
    """The whole layer. It keeps its arguments and the moments, never the convolution's output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        num_groups: int,
        eps: float,
        count: int,
        dtype: torch.dtype,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        activation: str,
        precision: str,
        path: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output (N, K) in ``dtype``, and the moments (N, K) that it comes from."""
        with _below_autograd():
            mean, m2 = ops.conv_act_moments(
                x, w, b, stride, padding, dilation, groups, activation, precision, path
            )
            # By name: torch 2.11's AOTInductor reads a dtype's number as that of another one.
            norm = (norm_weight, norm_bias, num_groups, eps, _checks.DTYPE_NAMES[dtype])
            out = ops.group_norm_pool(mean, m2, count, *norm)
        return out[0], mean, m2

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        x, w, b, norm_weight, norm_bias, *rest = inputs
        ctx.num_groups, ctx.eps, _, _, *ctx.convolution = rest
        _, mean, m2 = output
        ctx.mark_non_differentiable(mean, m2)
        ctx.save_for_backward(x, w, b, norm_weight, norm_bias, mean, m2)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[:5]
        saved = ctx.saved_tensors  # once: checkpointing gives them out no second time
        x, w = saved[:2]
        # Not kept by the forward: dynamo loses a symbolic one that equals an extent of x.
        count = math.prod(output_extents(x.shape[2:], w.shape[2:], *ctx.convolution[:3]))
        norm = (ctx.num_groups, ctx.eps, count)
        found = gradients_by_operators(grad_out, saved, *norm, wanted, ctx.convolution)
        return (*found, *(None,) * 11)


def gradients_by_operators(
    grad_out: Tensor,
    saved: Sequence[Any],
    num_groups: int,
    eps: float,
    count: int,
    wanted: Sequence[bool],
    convolution: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    """The gradients of (x, w, b, norm_weight, norm_bias); None for an unwanted one.

    ``saved`` are those, mean and m2; ``convolution`` is the operator's arguments behind (x, w, b).
    """
    arguments = (grad_out, *saved, num_groups, eps, count, wanted, convolution)
    # Where a derivative of these gradients could be asked for, it must not come out as zero.
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        grads = _Gradients.apply(*arguments)
    else:
        with _below_autograd():
            grads = _gradients(*arguments)
    return tuple(g if take else None for g, take in zip(grads, wanted, strict=True))


def _gradients(
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    m2: Tensor,
    num_groups: int,
    eps: float,
    count: int,
    wanted: Sequence[bool],
    convolution: Sequence[Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of (x, w, b, norm_weight, norm_bias); an unwanted one has no elements."""
    norm_mask = (any(wanted[:3]), wanted[3], wanted[4])
    grad_mean, grad_m2, grad_norm_weight, grad_norm_bias = ops.group_norm_pool_backward(
        grad_out, mean, m2, count, norm_weight, norm_bias, num_groups, eps, norm_mask
    )
    if norm_mask[0]:
        grad_x, grad_w, grad_b = ops.conv_act_moments_backward(
            grad_mean, grad_m2, x, w, b, mean, m2, *convolution, wanted[:3]
        )
    else:
        grad_x, grad_w, grad_b = (mean.new_empty(0) for _ in range(3))
    return grad_x, grad_w, grad_b, grad_norm_weight, grad_norm_bias


# What apply() binds its arguments to; found once, it is not looked up at each call.
ConvNormPool.forward.__signature__ = inspect.signature(ConvNormPool.forward)  # type: ignore[attr-defined]


class _Gradients(torch.autograd.Function):
    """``_gradients`` with one clear error where its derivative is asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_SECOND_DERIVATIVE)
