"""Row of invalid arguments: each is a Python exception that names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convnormpool import ConvNormPool3d, conv_norm_pool, explain, ops

X, W = (2, 4, 5, 6, 7), (16, 4, 3, 3, 3)

# The arguments that differ from a good call, and what the message must name.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kernel larger than the padded input": (
        {"weight": (16, 4, 3, 9, 3), "padding": 1}, "input.*height",
    ),
    "kernel larger by dilation": ({"dilation": (1, 1, 4)}, "input.*width"),
    "no depth": ({"input": (2, 4, 0, 6, 7)}, "input.*depth"),
    "kernel of size 0": ({"weight": (16, 4, 3, 0, 3)}, "weight.*height"),
    "groups 0": ({"groups": 0}, "groups"),
    "groups -1": ({"groups": -1}, "groups"),
    "groups 3 of 4": ({"groups": 3}, "groups"),
    "stride 0": ({"stride": 0}, "stride"),
    "stride -1": ({"stride": (1, -1, 1)}, "stride"),
    "dilation 0": ({"dilation": (1, 1, 0)}, "dilation"),
    "negative padding": ({"padding": (0, -1, 0)}, "padding"),
    "padding in other words": ({"padding": "full"}, "padding"),
    "padding same with a stride": ({"padding": "same", "stride": 2}, "padding.*stride"),
    "channel mismatch": ({"input": (2, 5, 5, 6, 7)}, "input has 5 channels.*takes 4"),
    "channel mismatch with groups": ({"groups": 2}, "input has 4 channels.*takes 8"),
    "no channels": ({"input": (2, 0, 5, 6, 7), "weight": (16, 0, 3, 3, 3)}, "channels"),
    "no output channels": ({"weight": (0, 4, 3, 3, 3)}, "channels"),
    "2-D input": ({"input": (4, 5)}, "input must be 5-D"),
    "6-D input": ({"input": (1, 2, 4, 5, 6, 7)}, "input must be 5-D"),
    "input of fewer axes": ({"input": (2, 4, 5, 6, 7), "weight": (16, 4, 3)}, "input must be 3-D"),
    "2-D weight": ({"weight": (16, 4)}, "weight must be"),
    "integer input": ({"input_dtype": torch.int32}, "input must be float"),
    "complex input": ({"input_dtype": torch.complex64}, "input must be float"),
    "weight of another dtype": ({"weight_dtype": torch.float64}, "weight.*dtype"),
    "bias of another dtype": ({"bias": (16,), "bias_dtype": torch.float16}, "bias.*dtype"),
    "bias of another shape": ({"bias": (15,)}, "bias.*shape"),
    "bias of another rank": ({"bias": (16, 1)}, "bias.*shape"),
    "norm_weight of another shape": ({"norm_weight": (4,)}, "norm_weight.*shape"),
    "norm_bias of another shape": ({"norm_bias": (17,)}, "norm_bias.*shape"),
    "norm_weight of another dtype": (
        {"norm_weight": (16,), "norm_weight_dtype": torch.float16}, "norm_weight.*dtype",
    ),
    "norm_bias of integers": (
        {"norm_bias": (16,), "norm_bias_dtype": torch.int64}, "norm_bias must be float",
    ),
    "num_groups 0": ({"num_groups": 0}, "num_groups"),
    "num_groups -4": ({"num_groups": -4}, "num_groups"),
    "num_groups 3 of 16": ({"num_groups": 3}, "num_groups"),
    "num_groups 32 of 16": ({"num_groups": 32}, "num_groups"),
    "eps negative": ({"eps": -1e-5}, "eps"),
    "eps NaN": ({"eps": float("nan")}, "eps"),
    "eps beyond float64": ({"eps": 10**400}, "eps.*float64"),
    "activation unknown": ({"activation": "hardswoosh"}, "activation.*hardswish"),
    "fp32_precision unknown": ({"fp32_precision": "bf16"}, "fp32_precision.*ieee"),
    "path unknown": ({"path": "fast"}, "path.*two_stage"),
}  # fmt: skip
TENSORS = ("input", "weight", "bias", "norm_weight", "norm_bias")


def call(changes: dict[str, Any], device: str, path: str) -> Tensor:
    arguments: dict[str, Any] = {"input": X, "weight": W, "num_groups": 4, "path": path, **changes}
    for name in TENSORS:
        dtype = arguments.pop(f"{name}_dtype", torch.float32)
        if name in arguments:
            arguments[name] = torch.ones(arguments[name], dtype=dtype, device=device)
    return conv_norm_pool(**arguments)


@pytest.mark.parametrize("name", BAD)
def test_row_invalid_arguments(name: str, device: str, any_path: str) -> None:
    changes, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call(changes, device, any_path)


def test_what_passed_once_excuses_nothing_like_it() -> None:
    """Checks are remembered by their arguments' values, and True is 1, and 1.0 too."""
    for _ in range(2):
        call({"num_groups": 1, "groups": 1}, "cpu", "auto")
        for name in ("num_groups", "groups"):
            for value in (True, 1.0):
                with pytest.raises(TypeError, match=f"{name} must be an integer"):
                    call({name: value}, "cpu", "auto")


def test_remembered_checks_look_into_sequences() -> None:
    x, w = torch.randn(2, 3, 5, 5, 5), torch.randn(8, 3, 3, 3, 3)
    for name in ("stride", "dilation", "padding"):
        conv_norm_pool(x, w, num_groups=4, **{name: (1, 1, 1)})
        for value in (True, 1.0):
            with pytest.raises(TypeError, match=f"{name} must be an integer"):
                conv_norm_pool(x, w, num_groups=4, **{name: (1, value, 1)})


def test_bias_under_autocast_is_a_tensor() -> None:
    x, w = torch.ones(X), torch.ones(W)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="bias must be a tensor; got"):
        conv_norm_pool(x, w, [0.0] * 16, num_groups=4)  # type: ignore[arg-type]


def test_hints_at_what_was_meant() -> None:
    with pytest.raises(ValueError, match="taken for one sample without a batch"):
        conv_norm_pool(torch.ones(2, 4, 8, 8), torch.ones(W), num_groups=4)  # an axis forgotten
    with pytest.raises(ValueError, match="it is 4 unless given"):
        ConvNormPool3d(4, 10, 3)
    with pytest.raises(ValueError, match="a name, not a module"):
        ConvNormPool3d(4, 16, 3, activation=torch.nn.SiLU())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input must be a tensor; got ConvNormPool3d"):
        explain(torch.ones(X), ConvNormPool3d(4, 16, 3))  # type: ignore[arg-type]


def test_the_good_call_is_good(device: str, any_path: str) -> None:
    assert call({}, device, any_path).shape == (2, 16)


@pytest.mark.parametrize("value", [(1, 1), (1, 1, 1, 1), "2", None, 1.5], ids=str)
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_not_one_number_or_three(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        call({name: value}, "cpu", "auto")


MODULE: dict[str, tuple[dict[str, Any], str]] = {
    "in_channels": ({"in_channels": 0}, "in_channels"),
    "out_channels": ({"out_channels": -16}, "out_channels"),
    "kernel_size": ({"kernel_size": (3, 0, 3)}, "kernel_size"),
    "stride": ({"stride": 0}, "stride"),
    "padding": ({"padding": -1}, "padding"),
    "same": ({"padding": "same", "stride": 2}, "padding"),
    "dilation": ({"dilation": 0}, "dilation"),
    "groups": ({"groups": 0}, "groups"),
    "groups of channels": ({"groups": 3}, "groups"),
    "padding_mode": ({"padding_mode": "mirror"}, "padding_mode"),
    "num_groups": ({"num_groups": 5}, "num_groups"),
    "eps": ({"eps": -1.0}, "eps"),
    "activation": ({"activation": "swish"}, "activation"),
    "fp32_precision": ({"fp32_precision": "medium"}, "fp32_precision"),
    "path": ({"path": ""}, "path"),
}


@pytest.mark.parametrize("name", MODULE)
def test_module_arguments(name: str) -> None:
    changes, message = MODULE[name]
    arguments: dict[str, Any] = {"in_channels": 4, "out_channels": 16, "kernel_size": 3, **changes}
    with pytest.raises(ValueError, match=message):
        ConvNormPool3d(**arguments)


def test_module_checks_its_input() -> None:
    layer = ConvNormPool3d(4, 16, 3)
    with pytest.raises(ValueError, match="input has 5 channels"):
        layer(torch.randn(2, 5, 5, 6, 7))
    with pytest.raises(TypeError, match=r"weight.*dtype"):
        layer(torch.randn(2, 4, 5, 6, 7, dtype=torch.float64))


def test_explain_checks_too() -> None:
    with pytest.raises(ValueError, match="groups"):
        explain(torch.ones(W), torch.ones(X), groups=3)
    with pytest.raises(ValueError, match="too small"):
        explain(torch.ones(16, 4, 9, 3, 3), torch.ones(X))


@pytest.mark.cuda
@pytest.mark.parametrize("name", TENSORS[1:])
def test_tensors_on_two_devices(name: str) -> None:
    tensors = {"weight": torch.ones(W), **{n: torch.ones(16) for n in TENSORS[2:]}}
    given = {n: t if n == name else t.cuda() for n, t in tensors.items()}
    with pytest.raises(ValueError, match=f"{name} must be on the input's device"):
        conv_norm_pool(torch.ones(X, device="cuda"), num_groups=4, **given)


def test_operators_check_their_arguments(device: str) -> None:
    """``torch.ops.convnormpool.*`` are public: no call of them reads out of bounds."""
    x, w = torch.ones(X, device=device), torch.ones(W, device=device)
    rows, three = torch.ones(2, 16, device=device), (1, 1, 1)
    plain = (three, (0, 0, 0), three, 1, "hardswish", "ieee", "auto")
    mask = (True, True, True)
    with pytest.raises(ValueError, match="weight"):
        ops.conv_act_moments(x, w[0], None, *plain)
    with pytest.raises(ValueError, match="mean"):
        ops.conv_act_moments_backward(rows, rows, x, w, None, rows[:1], rows, *plain, mask)
    with pytest.raises(TypeError, match="grad_m2"):
        ops.conv_act_moments_backward(rows, rows.double(), x, w, None, rows, rows, *plain, mask)
    with pytest.raises(ValueError, match="y must be"):
        ops.act_moments(torch.ones(3, device=device), "hardswish")
    with pytest.raises(ValueError, match="position"):
        ops.act_moments(torch.ones(2, 3, 0, device=device), "hardswish")
    with pytest.raises(ValueError, match="m2"):
        ops.group_norm_pool(rows, rows[:1], 4, None, None, 4, 1e-5)
    with pytest.raises(ValueError, match="count"):
        ops.group_norm_pool(rows, rows, 0, None, None, 4, 1e-5)
    with pytest.raises(ValueError, match="grad_out"):
        ops.group_norm_pool_backward(rows[:1], rows, rows, 4, None, None, 4, 1e-5, mask)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("padding", 1.5),
        ("padding", (1, 1.5, 1)),
        ("stride", None),
        ("stride", torch.tensor([1, 1, 1])),
        ("padding", np.array([1, 1, 1])),
        ("groups", 1.0),
        ("groups", "1"),
        ("num_groups", 2.0),
        ("num_groups", None),
        ("eps", "a"),
        ("norm_weight", 1.0),
        ("bias", 1.0),
        ("bias", torch.zeros(W[0]).to_sparse()),
        ("norm_weight", torch.zeros(W[0]).to_sparse()),
    ],
)
def test_wrong_types(name: str, value: object) -> None:
    """A TypeError that names the argument."""
    arguments: dict[str, Any] = {"num_groups": 2, name: value}
    with pytest.raises(TypeError, match=name):
        conv_norm_pool(torch.randn(X), torch.randn(W), **arguments)


@pytest.mark.parametrize("value", [torch.ones(3), np.array(["relu", "elu"]), None], ids=str)
def test_activation_that_is_no_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"activation must be one of hardswish, .*; got (a|N)"):
        conv_norm_pool(torch.randn(X), torch.randn(W), num_groups=2, activation=value)


@pytest.mark.parametrize("eps", [1, True, np.float32(1e-3), np.float64(1e-3)], ids=repr)
def test_numbers_as_eps(eps: Any) -> None:
    """What PyTorch's normalisation takes as eps."""
    x, w = torch.randn(X), torch.randn(W)
    found = conv_norm_pool(x, w, num_groups=2, eps=eps)
    assert torch.equal(found, conv_norm_pool(x, w, num_groups=2, eps=float(eps)))
    layer = ConvNormPool3d(4, 16, 3, eps=eps)
    assert torch.isfinite(layer(x)).all()


@pytest.mark.parametrize("name", ["stride", "dilation", "padding"])
def test_beyond_32_bits(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        conv_norm_pool(torch.randn(X), torch.randn(W), num_groups=2, **{name: 2**31})


@pytest.mark.parametrize("stride", [7, 2**20, 2**31 - 1])
def test_stride_beyond_the_input(stride: int, device: str) -> None:
    """One output along each axis, at once, and the gradients that come of it."""
    x, w = torch.randn(X, device=device), torch.randn(W, device=device)
    results = []
    for given, given_stride in ((x, stride), (x[:, :, :3, :3, :3], 1)):
        leaves = given.clone().requires_grad_(), w.clone().requires_grad_()
        out = conv_norm_pool(*leaves, num_groups=2, stride=given_stride)
        out.square().sum().backward()
        dx, dw = (leaf.grad for leaf in leaves)
        assert dx is not None and dw is not None
        results.append((out, dx[:, :, :3, :3, :3], dw))
        assert dx.count_nonzero() == results[-1][1].count_nonzero()
    for found, corner in zip(*results, strict=True):
        assert torch.allclose(found, corner, rtol=1e-4, atol=1e-5)


def test_explain_checks_its_arguments() -> None:
    x, w = torch.randn(X), torch.randn(W)
    for name in ("padding", "activation", "fp32_precision"):
        with pytest.raises(ValueError, match=name):
            explain(w, x, **{name: "bad"})
    with pytest.raises(ValueError, match="kernel_size"):
        ConvNormPool3d(3, 4, (2, 2))


def test_precision_is_one_setting() -> None:
    """Set on the layer after construction it reaches the convolution that hooks run."""
    layer = ConvNormPool3d(3, 4, 2)
    layer.fp32_precision = "tf32"
    assert layer.conv.fp32_precision == "tf32"
    with pytest.raises(ValueError, match="fp32_precision"):
        layer.fp32_precision = "bf16"
