"""The shapes that are measured, their inputs, and their answers in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from convnormpool import reference

Triple = tuple[int, int, int]
ONES: Triple = (1, 1, 1)
ZEROS: Triple = (0, 0, 0)


@dataclass(frozen=True)
class Case:
    """One layer and one batch, in PyTorch's words; spatial extents are depth, height, width."""

    name: str
    batch: int
    in_channels: int
    spatial: Triple
    out_channels: int
    kernel: Triple
    stride: Triple = ONES
    padding: Triple = ZEROS
    dilation: Triple = ONES
    groups: int = 1
    num_groups: int = 8

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.spatial)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def fan_in(self) -> int:
        """The number of products in one element of the convolution's output."""
        t, r, s = self.kernel
        return self.in_channels // self.groups * t * r * s

    @property
    def output_spatial(self) -> Triple:
        z, p, q = (
            (n + 2 * pad - dil * (k - 1) - 1) // step + 1
            for n, k, step, pad, dil in zip(
                self.spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return z, p, q

    @property
    def positions(self) -> int:
        z, p, q = self.output_spatial
        return z * p * q

    @property
    def conv_output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.output_spatial)

    def with_batch(self, batch: int) -> Case:
        return replace(self, batch=batch)

    def describe(self) -> str:
        """The shape in one line, naming only what differs from a plain convolution."""
        parts = [f"{self.input_shape} -> {self.out_channels} k{_short(self.kernel)}"]
        if self.stride != ONES:
            parts.append(f"s{_short(self.stride)}")
        if self.padding != ZEROS:
            parts.append(f"p{_short(self.padding)}")
        if self.dilation != ONES:
            parts.append(f"d{_short(self.dilation)}")
        if self.groups != 1:
            parts.append(f"conv groups {self.groups}")
        parts.append(f"norm groups {self.num_groups}")
        return " ".join(parts)


def _short(extents: Triple) -> str:
    return str(extents[0]) if len(set(extents)) == 1 else str(extents).replace(" ", "")


def cube(extent: int) -> Triple:
    return (extent, extent, extent)


_REFERENCE = Case("ref", 1024, 3, (16, 32, 32), 16, cube(4), num_groups=4)

SHAPES: tuple[Case, ...] = (
    _REFERENCE,
    replace(_REFERENCE, name="ref_b32", batch=32),
    replace(_REFERENCE, name="ref_b1", batch=1),
    Case("med_stem_96", 4, 1, cube(96), 32, cube(3), padding=ONES),
    Case("med_stem_128s2", 2, 4, cube(128), 32, cube(3), stride=cube(2), padding=ONES),
    Case("resnet3d_stem_k7s2", 8, 1, cube(64), 64, cube(7), stride=cube(2), padding=cube(3)),
    Case(
        "video_stem",
        16,
        3,
        (16, 112, 112),
        64,
        (3, 7, 7),
        stride=(1, 2, 2),
        padding=(1, 3, 3),
    ),
    Case("mid_32_64", 8, 32, cube(32), 64, cube(3), padding=ONES),
    Case("mid_64_128_s2", 16, 64, (16, 32, 32), 128, cube(3), stride=cube(2), padding=ONES),
    Case("deep_128_256", 32, 128, cube(8), 256, cube(3), padding=ONES, num_groups=32),
    Case("deep_256_320", 4, 256, cube(8), 320, cube(3), padding=ONES, num_groups=32),
    Case("ref_ci16_co32", 256, 16, (16, 32, 32), 32, cube(4)),
    Case("pointwise", 32, 64, cube(16), 128, cube(1)),
    Case("depthwise", 32, 64, (16, 32, 32), 64, cube(3), padding=ONES, groups=64),
    Case(
        "conv2d_like",
        64,
        3,
        (1, 224, 224),
        32,
        (1, 3, 3),
        stride=(1, 2, 2),
        padding=(0, 1, 1),
    ),
)

# The reference workload at a size for two CPU cores, and one that takes no time at all.
REF_CPU = replace(_REFERENCE, name="ref_b128", batch=128)
TINY = Case("tiny", 2, 2, (4, 5, 6), 4, (2, 3, 2), num_groups=2)

# Filters that no kernel is compiled for, over few input channels: (batch, channels, spatial,
# channels out, kernel, padding).
_FILTERS: tuple[tuple[int, int, Triple, int, Triple, Triple], ...] = (
    (64, 1, (32, 64, 64), 16, cube(5), cube(2)),
    (64, 4, (32, 64, 64), 16, cube(3), ONES),
    (64, 2, (32, 64, 64), 32, cube(3), ONES),
    (32, 4, (32, 64, 64), 32, cube(3), ONES),
    (32, 8, (32, 64, 64), 16, cube(3), ONES),
    (32, 8, (32, 64, 64), 32, cube(3), ONES),
    (32, 16, (32, 48, 48), 16, cube(3), ONES),
    (32, 16, (32, 48, 48), 32, cube(3), ONES),
    (16, 16, (32, 48, 48), 64, cube(3), ONES),
    (64, 1, (32, 64, 64), 32, cube(7), cube(3)),
    (32, 3, (16, 64, 64), 64, cube(7), cube(3)),
    (256, 3, (1, 224, 224), 16, (1, 3, 3), (0, 1, 1)),
    (256, 3, (1, 224, 224), 64, (1, 3, 3), (0, 1, 1)),
    (64, 3, (16, 112, 112), 32, (3, 5, 5), (1, 2, 2)),
    (512, 1, (1, 28, 28), 32, (1, 3, 3), ZEROS),
    (128, 3, cube(32), 16, cube(2), ZEROS),
    (64, 2, (32, 64, 64), 16, cube(1), ZEROS),
    (4, 4, cube(128), 16, cube(3), ONES),
    (256, 1, (16, 32, 32), 16, cube(4), ZEROS),
)
FILTERS = tuple(
    Case(f"filter_{i}", n, c, spatial, k, kernel, padding=padding, num_groups=4)
    for i, (n, c, spatial, k, kernel, padding) in enumerate(_FILTERS)
)

CASES: dict[str, Case] = {case.name: case for case in (*SHAPES, *FILTERS, REF_CPU, TINY)}
# Names for several.
GROUPS: dict[str, tuple[Case, ...]] = {"all": SHAPES, "filters": FILTERS}


@dataclass(frozen=True)
class Setting:
    """A storage type, and for float32 how products are formed: "ieee" or "tf32"."""

    dtype: torch.dtype
    precision: str = "ieee"

    @property
    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {self.precision}" if self.dtype is torch.float32 else name


@dataclass(frozen=True)
class Inputs:
    """The tensors of one layer, all of one dtype, and the gradient that comes back to it."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    grad_out: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.weight, self.bias, self.norm_weight, self.norm_bias

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*map(function, (*self.arguments(), self.grad_out)))

    def samples(self, index: Tensor) -> Inputs:
        return replace(self, x=self.x[index], grad_out=self.grad_out[index])


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random tensors for which the convolution's output has a deviation near one.

    The gradient that comes back is of order one: small ones, at which half precision in eager
    PyTorch loses everything, would flatter this package.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    channels = case.out_channels
    inputs = Inputs(
        x=randn(*case.input_shape),
        weight=randn(*case.weight_shape) / case.fan_in**0.5,
        bias=randn(channels),
        norm_weight=1 + 0.2 * randn(channels),
        norm_bias=randn(channels),
        grad_out=randn(case.batch, channels),
    )
    return inputs.map(lambda tensor: tensor.to(dtype))


Chain = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def eager_chain(case: Case) -> Chain:
    """The layer in plain PyTorch, the tests' oracle: (x, weight, bias, gamma, beta) -> output.

    Whether its convolution may use tf32 is left to PyTorch's global settings.
    """

    def chain(
        x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor
    ) -> Tensor:
        return reference.conv_norm_pool(
            x,
            weight,
            bias,
            num_groups=case.num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            stride=case.stride,
            padding=case.padding,
            dilation=case.dilation,
            groups=case.groups,
        )

    return chain


FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_DW = "backward-dw"
PASSES = (FORWARD, BACKWARD, BACKWARD_DW)
PASS_TITLES = {
    FORWARD: "forward",
    BACKWARD: "forward + backward, every gradient",
    BACKWARD_DW: "forward + backward, parameters' gradients only",
}
PARAMETER_GRADIENTS = ("dw", "db", "dgamma", "dbeta")


def result_names(pass_name: str) -> tuple[str, ...]:
    """What one call of a pass returns, in order."""
    if pass_name == FORWARD:
        return ("out",)
    if pass_name == BACKWARD:
        return ("out", "dx", *PARAMETER_GRADIENTS)
    return ("out", *PARAMETER_GRADIENTS)


@dataclass(frozen=True)
class Oracle:
    """float64 answers from the same rounded inputs.

    Samples are independent in the output and in dx, so those stand for the samples in ``index``
    alone; the parameters' gradients are of the whole batch.
    """

    index: Tensor
    values: dict[str, Tensor]

    def errors(self, names: Sequence[str], results: Sequence[Tensor]) -> dict[str, float]:
        """The relative norm of each result's error; absolute where the answer is zero.

        The derivative of hardswish jumps at -3 and 3. An element of the convolution's output within
        rounding of a knee may take either side's, in any implementation, and in a float32 run one
        such element alone is an error of 1e-5 to 1e-4 in dw.
        """
        errors = {}
        for name, result in zip(names, results, strict=True):
            expected = self.values[name]
            actual = result[self.index] if name in ("out", "dx") else result
            scale = float(expected.norm()) or 1.0
            errors[name] = float((actual.double() - expected).norm()) / scale
        return errors


ORACLE_CHUNK_BYTES = 1 << 28


def make_oracle(case: Case, inputs: Inputs, gradients: bool, samples: int = 16) -> Oracle:
    """Runs the eager chain in float64, a few samples at a time so that memory stays bounded."""
    device = inputs.x.device
    index = (
        torch.linspace(0, case.batch - 1, min(samples, case.batch), device=device).round().long()
    )
    chain = eager_chain(case)
    parameters = [tensor.double().requires_grad_() for tensor in inputs.arguments()[1:]]
    wanted = torch.arange(case.batch, device=device) if gradients else index
    per_sample = 8 * case.out_channels * case.positions
    rows: dict[str, list[Tensor]] = {"out": [], "dx": []}
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for chunk in torch.split(wanted, max(1, ORACLE_CHUNK_BYTES // per_sample)):
        part = inputs.samples(chunk)
        x = part.x.double().requires_grad_()
        with torch.set_grad_enabled(gradients):
            out = chain(x, *parameters)
        kept = torch.isin(chunk, index)
        rows["out"].append(out.detach()[kept])
        if gradients:
            grads = torch.autograd.grad(out, (x, *parameters), part.grad_out.double())
            rows["dx"].append(grads[0][kept])
            for total, grad in zip(sums, grads[1:], strict=True):
                total += grad
    values = {"out": torch.cat(rows["out"])}
    if gradients:
        values["dx"] = torch.cat(rows["dx"])
        values.update(zip(PARAMETER_GRADIENTS, sums, strict=True))
    return Oracle(index, values)
