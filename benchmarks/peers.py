"""What is compared: this package's paths, and PyTorch's own ways of running the same layer.

Every peer is the eager chain of ``convnormpool.reference``, which is also the tests' oracle. A
peer gets its inputs and weights in its own layout before the clock starts, and cudnn.benchmark;
tf32 is allowed exactly where the setting says so. "max-autotune" is the mode without its own CUDA
graphs, whose copies of the inputs cost a large case more than its launches do; on a GPU every
implementation, the peers too, is timed in a CUDA graph as well, and a table's speed-up compares
the better of the two.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

import convnormpool

from .cases import BACKWARD, FORWARD, Case, Chain, Inputs, Setting, eager_chain

Call = Callable[[], tuple[Tensor, ...]]

COMPILE_MODES = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Implementation:
    """One way to run the layer; ``path`` is set for ours, the other fields for peers."""

    name: str
    path: str | None = None
    channels_last: bool = False
    compile: str | None = None
    cudnn_benchmark: bool = True

    @property
    def ours(self) -> bool:
        return self.path is not None

    def chain(self, case: Case, setting: Setting) -> Chain:
        if self.path is None:
            chain = eager_chain(case)
            if self.compile is None:
                return chain
            # fullgraph, so that a graph break is a reported failure and not a slower peer.
            mode = COMPILE_MODES[self.compile]
            compiled: Chain = torch.compile(chain, fullgraph=True, dynamic=False, mode=mode)
            return compiled
        return our_chain(case, setting, self.path)

    def arrange(self, inputs: Inputs) -> Inputs:
        if not self.channels_last:
            return inputs
        layout = torch.channels_last_3d
        return inputs.map(lambda t: t.contiguous(memory_format=layout) if t.dim() == 5 else t)


def our_chain(case: Case, setting: Setting, path: str) -> Chain:
    def chain(
        x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor
    ) -> Tensor:
        return convnormpool.conv_norm_pool(
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
            fp32_precision=setting.precision,
            path=path,
        )

    return chain


def plan_of(case: Case, setting: Setting, path: str, inputs: Inputs) -> str:
    """What the planner made of it, on one line."""
    decision = convnormpool.explain(
        inputs.weight,
        inputs.x,
        stride=case.stride,
        padding=case.padding,
        dilation=case.dilation,
        groups=case.groups,
        fp32_precision=setting.precision,
        path=path,
    )
    return "; ".join(line for line in str(decision).splitlines() if not line.startswith("not "))


PEER_KINDS = ("eager", "compile", "max-autotune")


def peers(kinds: tuple[str, ...], cuda: bool) -> list[Implementation]:
    """The peers of the named kinds, each in both layouts."""
    found = []
    if "eager" in kinds:
        if cuda:
            found.append(Implementation("eager as it comes", cudnn_benchmark=False))
        found.append(Implementation("eager contiguous"))
        found.append(Implementation("eager channels_last_3d", channels_last=True))
    for kind in PEER_KINDS[1:]:
        if kind in kinds:
            found.append(Implementation(f"{kind} contiguous", compile=kind))
            found.append(
                Implementation(f"{kind} channels_last_3d", channels_last=True, compile=kind)
            )
    return found


def ours(paths: tuple[str, ...]) -> list[Implementation]:
    return [Implementation(f"ours {path}", path=path) for path in paths]


@contextmanager
def backend_flags(setting: Setting, cudnn_benchmark: bool = True) -> Iterator[None]:
    """PyTorch's global settings for one measurement; restored afterwards."""
    tf32 = setting.precision == "tf32"
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = tf32
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=cudnn_benchmark, deterministic=False, allow_tf32=tf32
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def bind(
    implementation: Implementation, case: Case, setting: Setting, inputs: Inputs, pass_name: str
) -> Call:
    """One call of a pass with everything prepared: returns the tensors ``result_names`` lists."""
    chain = implementation.chain(case, setting)
    arranged = implementation.arrange(inputs)
    if pass_name == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (chain(*arranged.arguments()),)

        return forward

    x, *others = arranged.arguments()
    parameters = [tensor.detach().requires_grad_() for tensor in others]
    x = x.detach().requires_grad_(pass_name == BACKWARD)
    wanted = (x, *parameters) if pass_name == BACKWARD else tuple(parameters)
    grad_out = arranged.grad_out

    def step() -> tuple[Tensor, ...]:
        out = chain(x, parameters[0], parameters[1], parameters[2], parameters[3])
        return (out.detach(), *torch.autograd.grad(out, wanted, grad_out))

    return step


class Allowance:
    """Seconds that all compilations of a run may take together.

    A compilation that exhausts them is interrupted (where the system has SIGALRM; elsewhere it
    ends by itself), and later ones are not started.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left = seconds

    @contextmanager
    def spend(self) -> Iterator[None]:
        if self.left <= 0:
            raise TimeoutError(f"not compiled, the run's {self.seconds:.0f} s for that are spent")

        def interrupt(signum: int, frame: FrameType | None) -> None:
            raise TimeoutError(f"compiling exceeded the run's {self.seconds:.0f} s for that")

        start = time.perf_counter()
        alarm = hasattr(signal, "SIGALRM")
        if alarm:
            previous = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
            self.left -= time.perf_counter() - start


def in_words(error: BaseException) -> str:
    """An exception as one short line; for a failed compilation, what caused it."""
    while isinstance(error.__cause__, BaseException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text}"[:300]
