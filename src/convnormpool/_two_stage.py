"""The two-stage path: a library convolution on a piece of the batch, reduced before the next piece.

On CUDA a piece is a chunk of samples, sized so that memory is bounded. On CPU it belongs to one
thread, which convolves it and reduces it while its output is still in that core's cache; a large
sample is cut into slabs of output planes. The pieces depend on the problem alone, and whatever is
summed over them is summed in their order, so no bit depends on the number of threads. The backward
pass convolves a piece again instead of keeping its output.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _convolution, _kernels
from .planner import Convolution, Decision
from .reference import statistics_dtype

__all__ = ["backward", "forward"]

_Result = TypeVar("_Result")
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Piece:
    """Samples [n0, n1) and output planes [z0, z1), slab number ``slab`` of them."""

    n0: int
    n1: int
    z0: int
    z1: int
    slab: int


@dataclass(frozen=True)
class _Window:
    """Input planes [first, last) of a piece, and the zeros that padding puts around them."""

    first: int
    last: int
    before: int
    behind: int


class _Problem:
    """The tensors of a call as the library convolves them, and their pieces."""

    def __init__(
        self, x: Tensor, w: Tensor, b: Tensor | None, conv: Convolution, decision: Decision
    ) -> None:
        # Worker threads are not below autograd as the caller is.
        self.x = x.detach()
        self.conv = conv
        self.channels_last = decision.channels_last
        # CPU libraries have no good 16-bit convolutions everywhere.
        self.dtype = torch.float32 if x.is_cpu and x.dtype in _HALVES else x.dtype
        self.w = self._weight(w.detach(), self.dtype)
        self.b = None if b is None else b.detach().to(self.dtype)
        # Gradients of a mean over many positions are far below float16's range, so they and what
        # they are multiplied with are wide. float16 and bfloat16 values are tf32 values: products
        # of those in tf32 lose nothing but what dy's rounding to tf32 loses.
        self.wide = statistics_dtype(x.dtype)
        self.w_wide = self._weight(w.detach(), self.wide)
        self.allow_tf32 = conv.precision == "tf32" or x.dtype in _HALVES

        self.extents = [
            (x.shape[2 + i] + 2 * conv.padding[i] - conv.dilation[i] * (w.shape[2 + i] - 1) - 1)
            // conv.stride[i]
            + 1
            for i in range(3)
        ]
        planes = self.extents[0]
        self.height = decision.chunk_planes or planes
        self.slabs = -(-planes // self.height)
        step = decision.chunk_samples
        self.pieces = [
            _Piece(n, min(n + step, len(x)), z, min(z + self.height, planes), z // self.height)
            for n in range(0, len(x), step)
            for z in range(0, planes, self.height)
        ]

    def _weight(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        layout = torch.channels_last_3d if self.channels_last else torch.contiguous_format
        return w.to(dtype).contiguous(memory_format=layout)

    def window(self, piece: _Piece) -> _Window:
        """Which planes of the input a slab reads."""
        stride, padding, dilation = self.conv.stride[0], self.conv.padding[0], self.conv.dilation[0]
        depth = self.x.shape[2]
        first = piece.z0 * stride - padding
        length = (piece.z1 - 1 - piece.z0) * stride + dilation * (self.w.shape[2] - 1) + 1
        start = min(max(first, 0), depth)
        stop = min(max(first + length, start), depth)
        # A slab that lies in the padding altogether has no plane of the input.
        before = min(max(-first, 0), length)
        return _Window(start, stop, before, length - before - (stop - start))

    def load(self, piece: _Piece) -> tuple[Tensor, tuple[int, int, int]]:
        """A piece's input as the convolution reads it, and the padding that is left to do."""
        padding = self.conv.padding
        part = self.x[piece.n0 : piece.n1]
        if self.slabs > 1:
            window = self.window(piece)
            part = part[:, :, window.first : window.last]
            if window.before or window.behind:
                part = F.pad(part, (0, 0, 0, 0, window.before, window.behind))
            padding = (0, padding[1], padding[2])
        part = part.to(self.dtype)
        if self.channels_last:
            return _kernels.to_channels_last(part), padding
        return part.contiguous(), padding

    def convolve(self, part: Tensor, padding: Sequence[int]) -> Tensor:
        """The output of a loaded piece, dense."""
        conv = self.conv
        y = _convolution.forward(
            part, self.w, self.b, conv.stride, padding, conv.dilation, conv.groups, self.allow_tf32
        )
        return _kernels.dense(y)


def forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    mean: Tensor,
    m2: Tensor,
) -> None:
    """Writes the moments (N, K) of the activated convolution into mean and m2."""
    problem = _Problem(x, w, b, conv, decision)
    sliced = problem.slabs > 1
    part_mean = mean.new_empty((problem.slabs, *mean.shape)) if sliced else mean.unsqueeze(0)
    part_m2 = torch.empty_like(part_mean) if sliced else m2.unsqueeze(0)

    def reduce(piece: _Piece) -> None:
        y = problem.convolve(*problem.load(piece))
        rows = slice(piece.n0, piece.n1)
        out = (part_mean[piece.slab, rows], part_m2[piece.slab, rows])
        _kernels.act_moments(y, conv.activation, *out)

    if x.is_cpu:
        with _convolution.settings("cpu", problem.allow_tf32):
            collections.deque(_on_threads(reduce, problem.pieces), maxlen=0)
    else:
        collections.deque(map(reduce, problem.pieces), maxlen=0)
    if sliced:
        per_plane = problem.extents[1] * problem.extents[2]
        counts = [(p.z1 - p.z0) * per_plane for p in problem.pieces[: problem.slabs]]
        _merge(part_mean, part_m2, counts, mean, m2)


def _merge(
    part_mean: Tensor, part_m2: Tensor, counts: Sequence[int], mean: Tensor, m2: Tensor
) -> None:
    """The moments of wholes from those of their slabs, (slabs, N, K), in float64."""
    weights = part_mean.new_tensor(counts, dtype=torch.float64).view(-1, 1, 1)
    parts = part_mean.double()
    total = (parts * weights).sum(dim=0) / sum(counts)
    spread = (weights * (parts - total).square()).sum(dim=0)
    mean.copy_(total)
    m2.copy_(part_m2.double().sum(dim=0) + spread)


_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    conv: Convolution,
    decision: Decision,
    moments: tuple[Tensor, Tensor, Tensor],
    wanted: _Grads,
) -> None:
    """Writes the wanted gradients of (x, w, b), given (mean, grad_mean, grad_m2), each (N, K)."""
    problem = _Problem(x, w, b, conv, decision)
    dx, dw, db = wanted
    if dx is not None and problem.slabs > 1:
        dx.zero_()  # slabs overlap and are added
    sum_w = None if dw is None else dw.new_zeros(dw.shape, dtype=problem.wide)
    sum_b = None if db is None else db.new_zeros(db.shape, dtype=torch.float64)

    def differentiate(piece: _Piece) -> _Grads:
        return _piece_grads(problem, piece, moments, wanted)

    with _convolution.settings(x.device.type, problem.allow_tf32):
        run = _on_threads if x.is_cpu else map
        for piece, grads in zip(problem.pieces, run(differentiate, problem.pieces), strict=True):
            part_x, part_w, part_b = grads
            if dx is not None and part_x is not None:
                _add_slab(dx, part_x, problem, piece)
            if sum_w is not None and part_w is not None:
                sum_w += part_w
            if sum_b is not None and part_b is not None:
                sum_b += part_b
    if dw is not None and sum_w is not None:
        dw.copy_(sum_w)
    if db is not None and sum_b is not None:
        db.copy_(sum_b)


def _piece_grads(
    problem: _Problem,
    piece: _Piece,
    moments: tuple[Tensor, Tensor, Tensor],
    wanted: _Grads,
) -> _Grads:
    """A piece's contributions; the input gradient of whole samples is written in place instead."""
    conv = problem.conv
    part, padding = problem.load(piece)
    y = problem.convolve(part, padding)
    mean, grad_mean, grad_m2 = (t[piece.n0 : piece.n1] for t in moments)
    if problem.slabs > 1:
        # The operator spreads grad_mean over the positions it sees, here a slab's share of them.
        grad_mean = grad_mean * ((piece.z1 - piece.z0) / problem.extents[0])
    dy = y if y.dtype == problem.wide else torch.empty_like(y, dtype=problem.wide)
    _kernels.act_moments_backward(y, mean, grad_mean, grad_m2, conv.activation, dy)
    del y

    dx, dw, db = wanted
    part_x = part_w = part_b = None
    arguments = (conv.stride, padding, conv.dilation, conv.groups)
    if dw is not None:
        part = part.to(problem.wide)
        part_w = _convolution.weight_grad(dy, part, problem.w.shape, *arguments)
    if db is not None:
        part_b = dy.sum(dim=(2, 3, 4)).sum(dim=0, dtype=torch.float64)
    if dx is not None:
        size = part.shape[2:]
        part_x = _convolution.input_grad(dy, problem.w_wide, size, *arguments, problem.allow_tf32)
        if problem.slabs == 1:
            dx[piece.n0 : piece.n1].copy_(part_x)
            part_x = None
    return part_x, part_w, part_b


def _add_slab(dx: Tensor, part_x: Tensor, problem: _Problem, piece: _Piece) -> None:
    window = problem.window(piece)
    inside = part_x[:, :, window.before : part_x.shape[2] - window.behind]
    dx[piece.n0 : piece.n1, :, window.first : window.last] += inside


# --- threads --------------------------------------------------------------------------------------


def _on_threads(
    function: Callable[[_Piece], _Result], pieces: Sequence[_Piece]
) -> Iterator[_Result]:
    """``map`` on as many threads as PyTorch uses, each convolving on its own; results in order."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(function, pieces)
        return
    executor = _executor(threads)
    running: collections.deque[Future[_Result]] = collections.deque()
    try:
        for piece in pieces:
            running.append(executor.submit(_without_grad, function, piece))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()  # nothing may still write into the caller's tensors


def _without_grad(function: Callable[[_Piece], _Result], piece: _Piece) -> _Result:
    with torch.no_grad():
        return function(piece)


_executor_lock = threading.Lock()


def _executor(threads: int) -> ThreadPoolExecutor:
    with _executor_lock:
        return _make_executor(threads)


@functools.lru_cache(maxsize=1)
def _make_executor(threads: int) -> ThreadPoolExecutor:
    """Threads whose own parallelism is off.

    ``torch.set_num_threads`` acts on the calling thread and on threads that have not yet done
    parallel work, so the caller's number is set again once all workers have theirs.
    """
    barrier = threading.Barrier(threads)

    def start() -> None:
        torch.set_num_threads(1)
        barrier.wait()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="convnormpool")
    for future in [executor.submit(start) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(threads)
    return executor


def _after_fork() -> None:
    global _executor_lock
    _executor_lock = threading.Lock()
    _make_executor.cache_clear()  # a forked child has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
