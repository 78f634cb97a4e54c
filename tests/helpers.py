"""Problems, their oracle, and tolerances derived from it.

The oracle is eager PyTorch in float64 on the same, already rounded, tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnormpool import _kernels, conv_norm_pool, explain, ops, planner, reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
PARAMETERS = ("x", "w", "b", "gamma", "beta")
RESULTS = ("out", *(f"d{name}" for name in PARAMETERS))

Tensors = list[Tensor | None]


@dataclass(frozen=True)
class Case:
    """A problem: the layer's arguments and the input's shape."""

    name: str
    input: tuple[int, int, int, int, int] = (2, 3, 6, 9, 10)
    outputs: int = 16
    kernel: tuple[int, int, int] = (3, 3, 3)
    num_groups: int = 4
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, int, int] | str = (0, 0, 0)
    dilation: tuple[int, int, int] = (1, 1, 1)
    groups: int = 1
    activation: str = "hardswish"
    eps: float = 1e-5
    bias: bool = True
    affine: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def convolution(self) -> dict[str, Any]:
        """What ``F.conv3d`` takes beside tensors."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def filter(self) -> tuple[int, int, int, int, int]:
        return (self.outputs, self.input[1] // self.groups, *self.kernel)

    def tensors(self, dtype: torch.dtype, device: str, *, spread: float = 3.0) -> Tensors:
        """Random x, w, b, gamma, beta; a ``spread`` of 3 reaches both knees of hardswish."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64)

        channels = self.outputs
        found = [
            normal(*self.input) * spread,
            normal(*self.filter) / math.sqrt(math.prod(self.filter[1:])),
            normal(channels) if self.bias else None,
            1 + normal(channels) / 2 if self.affine else None,
            normal(channels) if self.affine else None,
        ]
        return [None if t is None else t.to(device, dtype) for t in found]

    def grad_out(self, dtype: torch.dtype, device: str) -> Tensor:
        return torch.randn(self.input[0], self.outputs).to(device, dtype)

    def call(
        self, function: Callable[..., Tensor], tensors: Sequence[Tensor | None], **more: Any
    ) -> Tensor:
        """``conv_norm_pool`` or something of its signature on these tensors."""
        x, w, b, gamma, beta = tensors
        return function(
            x, w, b, num_groups=self.num_groups, norm_weight=gamma, norm_bias=beta, eps=self.eps,
            activation=self.activation, **self.convolution, **more,
        )  # fmt: skip


CASES = (
    Case("plain"),
    Case("reference", (2, 3, 16, 32, 32), 16, (4, 4, 4), 4),
    Case("one_position", (3, 2, 3, 3, 3), 8, (3, 3, 3), 2),
    Case("one_sample_no_bias", (1, 4, 5, 7, 6), 12, (2, 2, 2), 3, bias=False),
    Case("not_affine", (3, 3, 4, 6, 7), 8, (3, 2, 3), 4, affine=False),
    Case("neither", (2, 1, 4, 5, 6), 6, (2, 3, 2), 3, bias=False, affine=False),
    Case("padded", (2, 3, 4, 5, 6), 16, (3, 3, 3), 4, padding=(1, 2, 1)),
    Case("padded_beyond_kernel", (2, 2, 3, 4, 3), 8, (2, 1, 2), 2, padding=(2, 3, 1)),
    Case("strided", (2, 3, 7, 9, 11), 16, (3, 3, 3), 4, stride=(2, 3, 2), padding=(1, 1, 0)),
    Case("dilated", (2, 3, 7, 8, 9), 8, (2, 3, 2), 2, dilation=(3, 2, 1), padding=(1, 0, 1)),
    Case("pointwise", (2, 20, 3, 4, 5), 24, (1, 1, 1), 6),
    Case("wide_input", (2, 24, 4, 5, 5), 20, (3, 3, 3), 5, padding=(1, 1, 1)),
    Case("grouped", (2, 6, 4, 6, 5), 9, (2, 3, 3), 3, groups=3),
    Case("depthwise", (2, 8, 4, 6, 5), 16, (3, 3, 3), 4, groups=8, padding=(1, 1, 1)),
    Case("flat", (3, 3, 1, 12, 13), 8, (1, 3, 3), 2, stride=(1, 2, 2), padding=(0, 1, 1)),
    Case("odd_channels", (2, 3, 4, 5, 7), 7, (2, 2, 3), 1),
    Case("many_channels", (1, 2, 3, 4, 5), 257, (2, 2, 2), 1),
    # Samples whose output is cut into slabs on CPU, and batches that are cut into chunks.
    Case("slabs", (2, 1, 26, 40, 40), 16, (3, 3, 3), 4, padding=(1, 0, 1)),
    Case("chunks", (11, 2, 10, 20, 21), 16, (3, 3, 3), 4),
)


def run(
    case: Case,
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    grad_out: Tensor,
    wanted: Sequence[bool] = (True,) * 5,
    **more: Any,
) -> Tensors:
    """The output and the gradients of the five tensors, in the order of ``RESULTS``."""
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip(tensors, wanted, strict=True)
    ]
    out = case.call(function, leaves, **more)
    if out.requires_grad:
        out.backward(grad_out.to(out.dtype))
    return [out.detach(), *(None if t is None else t.grad for t in leaves)]


def ours(case: Case, tensors: Sequence[Tensor | None], grad_out: Tensor, **more: Any) -> Tensors:
    return run(case, conv_norm_pool, tensors, grad_out, **more)


def doubled(tensors: Sequence[Tensor | None]) -> Tensors:
    return [None if t is None else t.double() for t in tensors]


def oracle(case: Case, tensors: Sequence[Tensor | None], grad_out: Tensor) -> Tensors:
    return run(case, reference.conv_norm_pool, doubled(tensors), grad_out.double())


def _terms(case: Case, tensors: Sequence[Tensor | None], grad_out: Tensor) -> Tensors:
    """For each result the root of the sum of the squares of the terms that it is a sum of.

    A result whose every term carries an independent relative error of eps is off by eps times this.
    """
    x, w, b, gamma, beta = doubled(tensors)
    assert x is not None and w is not None
    y = F.conv3d(x, w, b, **case.convolution)
    h = reference.ACTIVATIONS[case.activation](y)
    mean = h.mean(dim=(2, 3, 4))
    rstd = (
        h.unflatten(1, (case.num_groups, -1)).var(dim=(2, 3, 4, 5), unbiased=False) + case.eps
    ).rsqrt()
    # A channel's mean is itself a sum, of its positions, which may cancel nearly all of it.
    size = mean.square() + h.square().mean(dim=(2, 3, 4)) / h[0, 0].numel()
    size = size * _per_channel(case, rstd).square()
    scaled = size if gamma is None else size * gamma.square()
    dy = _dy_terms(case, y, h, rstd, grad_out.double() * (1 if gamma is None else gamma))
    squared = run_convolution_grads(case, x.square(), w.square(), dy.square())
    d = grad_out.double().square()
    return [
        (scaled + (0 if beta is None else beta.square())).sqrt(),
        squared[0].sqrt(),
        squared[1].sqrt(),
        # A channel's coefficients are rounded once for all its positions.
        dy.sum(dim=(2, 3, 4)).square().sum(dim=0).sqrt(),
        (d * size).sum(dim=0).sqrt(),
        d.sum(dim=0).sqrt(),
    ]


def _per_channel(case: Case, per_group: Tensor) -> Tensor:
    return per_group.repeat_interleave(case.outputs // case.num_groups, dim=1)


def _dy_terms(case: Case, y: Tensor, h: Tensor, rstd: Tensor, grad_normal: Tensor) -> Tensor:
    """What the gradient of y is a sum of, in absolute values: they may cancel nearly all of it."""
    z = y.detach().requires_grad_()
    (slope,) = torch.autograd.grad(reference.ACTIVATIONS[case.activation](z).sum(), z)
    r = _per_channel(case, rstd)[..., None, None, None]
    centre = h.unflatten(1, (case.num_groups, -1)).mean(dim=(2, 3, 4, 5))
    # The deviation from the mean is as inexact as what it is the difference of.
    normal = (h.abs() + _per_channel(case, centre.abs())[..., None, None, None]) * r
    g = grad_normal.abs()[..., None, None, None] / y[0, 0].numel()

    def group_mean(values: Tensor) -> Tensor:
        per_group = values.unflatten(1, (case.num_groups, -1)).mean(dim=(2, 3, 4, 5))
        return _per_channel(case, per_group)[..., None, None, None]

    return slope.abs() * r * (g + group_mean(g) + normal * group_mean(g * normal))


def _undecided(
    case: Case, tensors: Sequence[Tensor | None], grad_out: Tensor, precision: str
) -> Tensors:
    """What the gradients of x, w and b may gain or lose where the activation has a kink.

    Where an output of the convolution is nearer to a kink than it is exact, either slope is right.
    """
    x, w, b, gamma, beta = doubled(tensors)
    assert x is not None and w is not None and tensors[0] is not None
    y = F.conv3d(x, w, b, **case.convolution)
    size = F.conv3d(x.square(), w.square(), None, **case.convolution).sqrt() + y.abs()
    # Sums are float32 for 16-bit tensors, too.
    eps = torch.finfo(reference.statistics_dtype(tensors[0].dtype)).eps
    near = (FACTOR_CUDA if x.is_cuda else FACTOR) * eps * size
    if precision == "tf32":
        # Each operand is off by half a unit of 11 bits; two units bound what comes of that.
        near += 2 * torch.finfo(torch.float16).eps * size

    def slope(at: Tensor) -> Tensor:
        z = at.detach().requires_grad_()
        return torch.autograd.grad(reference.ACTIVATIONS[case.activation](z).sum(), z)[0]

    jump = (slope(y + near) - slope(y - near)).abs()
    # A smooth slope changes by about 2 near, as curvatures are about one where y is not large and
    # none where it is; a kink's jump is at least 1/6, hardsigmoid's.
    jump = torch.where(jump > 1e-3, jump, 0.0)
    nothing: Tensors = [None] * len(RESULTS)
    if not jump.any():
        return nothing
    h = reference.ACTIVATIONS[case.activation](y).detach().requires_grad_()
    out = F.group_norm(h, case.num_groups, gamma, beta, case.eps).mean(dim=(2, 3, 4))
    (dh,) = torch.autograd.grad(out, h, grad_out.double())
    change = jump * dh.abs()
    dx, dw = run_convolution_grads(case, x.abs(), w.abs(), change)
    nothing[1:4] = dx, dw, change.sum(dim=(0, 2, 3, 4))
    return nothing


def run_convolution_grads(case: Case, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = F.conv3d(x, w, None, **case.convolution)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), dy)
    return grad_x, grad_w


def error(found: Tensor, right: Tensor) -> float:
    """The norm of the difference; NaN and Inf never compare as small."""
    value = (found.double() - right).norm().item()
    return value if math.isfinite(value) else math.inf


# How many times eager's own error is allowed: two float32 sums of the same terms in different
# orders have independent errors, whose ratio on small tensors is now and then near three.
FACTOR = 4.0
# cuDNN chooses among algorithms, Winograd's among them, and tensor cores cut off what falls out of
# an accumulator: float32 results that are as good in kind differ by more there.
FACTOR_CUDA = 8.0
# In float64 the oracle rounds like what is compared with it, and eager's error is an estimate.
FACTOR_FLOAT64 = 16.0


def eager_errors(
    case: Case, tensors: Sequence[Tensor | None], grad_out: Tensor, precision: str
) -> list[float]:
    """Eager's own errors; in float64, where its error is not known, those in float32 scaled."""
    x = tensors[0]
    assert x is not None
    scale = 1.0
    if x.dtype == torch.float64:
        tensors = [None if t is None else t.float() for t in tensors]
        grad_out = grad_out.float()
        scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    eager = run(case, reference.conv_norm_pool, tensors, grad_out, fp32_precision=precision)
    right = oracle(case, tensors, grad_out)
    return [
        0.0 if a is None or b is None else scale * error(a, b)
        for a, b in zip(eager, right, strict=True)
    ]


def assert_accurate(
    case: Case,
    found: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    grad_out: Tensor,
    *,
    precision: str = "ieee",
    like_eager: bool | None = None,
) -> None:
    """Each result is as near to the oracle as its dtype allows, in norm.

    The bound is FACTOR times the larger of eager's own error and of eps times the size of the
    result and of the terms that it sums. For 16-bit results eager's error is the one that it makes
    in float32 on the same tensors, unless they are to be ``like_eager``: they come from float32
    sums, and eager's do not. What a dtype can't resolve near zero is added, and what either slope
    at a kink of the activation may change.
    """
    x = tensors[0]
    assert x is not None
    eps = torch.finfo(x.dtype).eps
    if precision == "tf32":
        eps = torch.finfo(torch.float16).eps  # as many bits
    factor = FACTOR_CUDA if x.is_cuda else FACTOR
    if x.dtype == torch.float64:
        factor = FACTOR_FLOAT64
    if like_eager is None:
        # A library's 16-bit convolution on CUDA rounds its output, as eager's does.
        like_eager = x.is_cuda or x.dtype not in HALVES
    if like_eager:
        own = eager_errors(case, tensors, grad_out, precision)
    else:
        widened = [None if t is None else t.float() for t in tensors]
        own = eager_errors(case, widened, grad_out.float(), precision)
    rows = zip(
        RESULTS, found, oracle(case, tensors, grad_out), _terms(case, tensors, grad_out), own,
        _undecided(case, tensors, grad_out, precision), strict=True,
    )  # fmt: skip
    problems = []
    for name, result, right, terms, peer, undecided in rows:
        assert (result is None) == (right is None), name
        if result is None or right is None or terms is None:
            continue
        assert result.shape == right.shape, name
        info = torch.finfo(result.dtype)
        bound = factor * max(peer, eps * (right.norm() + terms.norm()).item())
        bound += info.smallest_normal * info.eps * math.sqrt(result.numel())
        bound += 0.0 if undecided is None else undecided.norm().item()
        if not error(result, right) <= bound:
            problems.append(f"{name}: error {error(result, right):.2e}, bound {bound:.2e}")
    assert not problems, f"{case}: " + "; ".join(problems)


def check(
    case: Case, dtype: torch.dtype, device: str, path: str, *, precision: str = "ieee"
) -> None:
    """One problem on one path, output and all gradients; or the planner's refusal of it."""
    tensors = case.tensors(dtype, device)
    grad_out = case.grad_out(dtype, device)
    if path == "fused" and not fused_takes(case, tensors):
        with pytest.raises(ValueError, match=r"path 'fused' can't run: \w.*"):
            ours(case, tensors, grad_out, path=path)
        return
    found = ours(case, tensors, grad_out, path=path, fp32_precision=precision)
    for result, given in zip(found, [tensors[0], *tensors], strict=True):
        assert given is None or (result is not None and result.dtype == given.dtype)
    assert_accurate(
        case, found, tensors, grad_out, precision=precision,
        like_eager=path == "eager" or None,
    )  # fmt: skip


def fused_takes(case: Case, tensors: Sequence[Tensor | None]) -> bool:
    x, w, *_ = tensors
    assert x is not None and w is not None
    return explain(w, x, **case.convolution).path == "fused"


def kernel_decision(
    case: Case, x: Tensor, w: Tensor, precision: str, sm_90a: bool
) -> tuple[planner.Convolution, planner.Decision]:
    """The decision for the fused path of a CUDA build with or without code for sm_90a."""
    assert not isinstance(case.padding, str)
    conv = planner.Convolution(
        case.stride, case.padding, case.dilation, case.groups, case.activation, precision
    )
    facts = {**planner._device_facts("cuda", x.device.index), "sm_90a": sm_90a}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_device_facts", lambda *_: facts)
        decision = planner._plan.__wrapped__(
            tuple(x.shape), tuple(w.shape), conv, x.dtype, "cuda", x.device.index, "fused"
        )
    return conv, decision


def kernel_moments(
    case: Case, x: Tensor, w: Tensor, b: Tensor | None, precision: str, sm_90a: bool
) -> tuple[str, Tensor, Tensor]:
    """Name and moments of the fused CUDA kernel of a build with or without code for sm_90a."""
    conv, decision = kernel_decision(case, x, w, precision, sm_90a)
    mean = torch.full((len(x), len(w)), math.nan, device=x.device)
    m2 = torch.full_like(mean, math.nan)
    _kernels.conv_act_moments(x, w, b, conv, decision, mean, m2)
    return decision.kernel.rpartition(" ")[2], mean, m2


def kernel_gradients(
    case: Case,
    tensors: Sequence[Tensor | None],
    grad_out: Tensor,
    precision: str,
    sm_90a: bool,
    wanted: Sequence[bool] = (True,) * 3,
) -> tuple[bool, Tensors]:
    """Whether by wgmma, and the layer's results, x, w and b's gradients by the fused kernels.

    As ``kernel_moments``; of those three the ``wanted`` ones.
    """
    x, w, b, gamma, beta = tensors
    assert x is not None and w is not None
    _, mean, m2 = kernel_moments(case, x, w, b, precision, sm_90a)
    y = torch.empty((1, *x.shape[1:]), device="meta")
    count = F.conv3d(y, w.to("meta", y.dtype), None, **case.convolution)[0, 0].numel()
    norm = (count, gamma, beta, case.num_groups, case.eps)
    dtype = str(x.dtype).removeprefix("torch.")
    out = ops.group_norm_pool(mean, m2, *norm, dtype)[0]
    grad_mean, grad_m2, *grads = ops.group_norm_pool_backward(
        grad_out, mean, m2, *norm, (True, gamma is not None, beta is not None)
    )
    found = [
        torch.full_like(t, math.nan) if want and t is not None else None
        for t, want in zip((x, w, b), wanted, strict=True)
    ]
    conv, decision = kernel_decision(case, x, w, precision, sm_90a)
    _kernels.conv_act_moments_backward(
        x, w, b, conv, decision, (mean, grad_mean, grad_m2), m2, (found[0], found[1], found[2])
    )
    affine = [None if t is None else g for g, t in zip(grads, (gamma, beta), strict=True)]
    return decision.gradients_wgmma, [out, *found, *affine]


def has_wgmma() -> bool:
    """Whether this build has the kernel of compute capability 9.0, and the device is one."""
    facts = planner._device_facts("cuda", 0)
    return (facts["major"], facts["minor"]) == (9, 0) and bool(facts["sm_90a"])


def assert_same_bits(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Equal bit for bit, NaN and the sign of zero included."""
    for name, a, b in zip(RESULTS, found, wanted, strict=False):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            assert a.dtype == b.dtype and same, name


def variant(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
