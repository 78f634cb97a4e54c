"""The least time a case could take on this machine: its bytes and FLOP over measured ceilings.

Counted once, from the case alone. Forward: every input is read once and the output written once;
the convolution is two FLOP per product, products with zero padding included, and everything after
it is free. Backward: the inputs are read a second time (the gradient of the normalisation needs
statistics that only the whole forward gives), the incoming gradient is read, every wanted gradient
is written, and each wanted one of dx and dw is as many products as the forward. Recomputing the
convolution instead of storing its output is one more such set of products; it is our choice and
not the problem's, so the limit leaves it out and a second limit states it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .cases import BACKWARD, FORWARD, Case, Setting
from .peers import backend_flags
from .timing import L2Flush, time_cpu, time_cuda


@dataclass(frozen=True)
class Counts:
    bytes: int
    flop: int
    recompute_flop: int


def count(case: Case, pass_name: str, element_size: int) -> Counts:
    x = _product(case.input_shape)
    parameters = _product(case.weight_shape) + 3 * case.out_channels
    out = case.batch * case.out_channels
    products = 2 * case.batch * case.out_channels * case.positions * case.fan_in
    elements = x + parameters + out
    if pass_name == FORWARD:
        return Counts(element_size * elements, products, 0)
    elements += x + parameters + out + parameters
    if pass_name == BACKWARD:
        return Counts(element_size * (elements + x), 3 * products, products)
    return Counts(element_size * elements, 2 * products, products)


def _product(extents: tuple[int, ...]) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


@dataclass(frozen=True)
class Limit:
    """Milliseconds, without and with recomputing the convolution, and what sets the first."""

    ms: float
    recompute_ms: float
    bound: str


@dataclass
class Ceilings:
    """Bytes a second of a large copy (read and written), FLOP a second of a large matrix product.

    The float32-accurate ceiling of a GPU is the better of a float32 matrix product and a third of
    the float16 one, since three float16 products make one that is accurate to float32.
    """

    device: torch.device
    copy: float
    matmul: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)

    def rate(self, setting: Setting) -> float:
        rate = self._measured(setting)
        if self.device.type == "cuda" and setting == Setting(torch.float32, "ieee"):
            return max(rate, self._measured(Setting(torch.float16)) / 3)
        return rate

    def _measured(self, setting: Setting) -> float:
        if setting.label not in self.matmul:
            self.matmul[setting.label] = _matmul_rate(self.device, setting)
            self.settings[setting.label] = setting
        return self.matmul[setting.label]

    def refresh(self) -> None:
        """Measures again and keeps the better: on a shared CPU one moment may be a bad one."""
        self.copy = max(self.copy, measure_ceilings(self.device).copy)
        for label, setting in self.settings.items():
            self.matmul[label] = max(self.matmul[label], _matmul_rate(self.device, setting))

    def limit(self, counts: Counts, setting: Setting) -> Limit:
        rate = self.rate(setting)
        memory = counts.bytes / self.copy
        math = counts.flop / rate
        recompute = (counts.flop + counts.recompute_flop) / rate
        bound = "math" if math > memory else "memory"
        return Limit(1e3 * max(memory, math), 1e3 * max(memory, recompute), bound)

    def lines(self) -> list[str]:
        found = [f"copy {self.copy / 1e9:,.1f} GB/s (read + written)"]
        for label, rate in self.matmul.items():
            found.append(f"matmul {label} {rate / 1e12:,.2f} TFLOP/s")
        return found


def measure_ceilings(device: torch.device, quick: bool = False) -> Ceilings:
    cuda = device.type == "cuda"
    size = (1 << 30) if cuda else (64 << 20) if quick else (256 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return Ceilings(device, 2 * size / seconds)


def _matmul_rate(device: torch.device, setting: Setting) -> float:
    wide = setting.dtype is torch.float64
    size = (4096 if wide else 8192) if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(setting.dtype)
    b = torch.randn(size, size, device=device).to(setting.dtype)
    with backend_flags(setting):
        seconds = _best_seconds(lambda: torch.mm(a, b), device)
    return 2 * size**3 / seconds


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The fastest of several calls made when the machine is warm: a ceiling, not a typical time."""
    if device.type == "cuda":
        return time_cuda(call, L2Flush(device), repeats=10).low / 1e3
    start = time.perf_counter()
    while time.perf_counter() - start < 0.1:
        call()
    return time_cpu([call], rounds=30, seconds=0.5)[0].low / 1e3
