"""Rows about streams, on CUDA: work goes to the current stream and nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import Case, Tensors, assert_same_bits, ours
from torch import Tensor

from convnormpool import ConvNormPool3d, conv_norm_pool, explain

pytestmark = pytest.mark.cuda

CASE = Case("stream", (8, 3, 6, 16, 16), 16, (3, 3, 3), 4)
REPEATS = 50


def busy() -> None:
    """A few milliseconds of work on the current stream, so that what follows is overtaken."""
    torch.cuda._sleep(5_000_000)


def test_row_side_stream_behind_a_long_kernel(device: str, path: str) -> None:
    """50 repeats on a side stream: inputs that are still being written are waited for."""
    tensors = CASE.tensors(torch.float32, "cuda")
    grad_out = CASE.grad_out(torch.float32, "cuda")
    way = path
    wanted = ours(CASE, tensors, grad_out, path=way)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        with torch.cuda.stream(stream):
            late: Tensors = [None if t is None else torch.zeros_like(t) for t in tensors]
            busy()
            for room, t in zip(late, tensors, strict=True):
                if room is not None and t is not None:
                    room.copy_(t)
            found = ours(CASE, late, grad_out, path=way)
        stream.synchronize()
        assert_same_bits(found, wanted)


def test_row_two_models_interleaved(device: str) -> None:
    """Two models on two streams, forward and backward, each as it is alone."""
    cases = (CASE, Case("other", (6, 4, 5, 12, 9), 24, (2, 3, 3), 6, padding=(1, 0, 1)))
    problems = [
        (c, c.tensors(torch.float32, "cuda"), c.grad_out(torch.float32, "cuda")) for c in cases
    ]
    wanted = [ours(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        results = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                busy()
                results.append(ours(*problem))
        torch.cuda.synchronize()
        for found, right in zip(results, wanted, strict=True):
            assert_same_bits(found, right)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nothing_synchronises(dtype: torch.dtype, precision: str) -> None:
    """PyTorch's own synchronisations are errors here, and the host is ahead of the device."""
    tensors = CASE.tensors(dtype, "cuda")
    grad_out = CASE.grad_out(dtype, "cuda")
    ours(CASE, tensors, grad_out, fp32_precision=precision)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    done = torch.cuda.Event()
    try:
        torch.cuda._sleep(2_000_000_000)
        found = ours(CASE, tensors, grad_out, fp32_precision=precision)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(t is not None and t.isfinite().all() for t in found)


def test_backward_on_the_forward_stream() -> None:
    """Autograd runs the backward where the forward ran; the caller's stream waits for it."""
    tensors = CASE.tensors(torch.float32, "cuda")
    grad_out = CASE.grad_out(torch.float32, "cuda")
    wanted = ours(CASE, tensors, grad_out)
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = CASE.call(conv_norm_pool, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    busy()
    out.backward(grad_out)
    torch.cuda.synchronize()
    assert_same_bits([t.grad for t in leaves if t is not None], wanted[1:])


def peak(function: Callable[[], Tensor]) -> int:
    """Bytes beyond what was there before, the result included."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_row_memory_kept_in_inference(precision: str, device: str, path: str) -> None:
    """no_grad, the reference workload: fused under 8 MiB beyond input and output, else 150."""
    layer = ConvNormPool3d(3, 16, 4, path=path, fp32_precision=precision, device="cuda")
    x = torch.randn(1024, 3, 16, 32, 32, device="cuda")
    bound = 8 if explain(layer, x).path == "fused" else 150
    with torch.no_grad():
        used = peak(lambda: layer(x))
    assert used <= bound << 20
    assert torch.cuda.memory_allocated() > 0


def test_other_device_than_the_current() -> None:
    """The tensors' device counts: no context of another is needed or left changed."""
    last = torch.cuda.device_count() - 1
    x = torch.randn(2, 3, 6, 8, 8)
    layer = ConvNormPool3d(3, 16, 3)
    with torch.cuda.device(0):
        found = layer.to(f"cuda:{last}")(x.to(f"cuda:{last}"))
        found.sum().backward()
        assert torch.cuda.current_device() == 0
    assert found.device.index == last and found.isfinite().all()
