"""The two-stage path: a library convolution on a piece of the batch, reduced before the next piece.

On CUDA a piece is a chunk of samples, sized so that memory is bounded. On CPU it belongs to one
thread, which convolves it and reduces it while its output is still in that core's cache. The pieces
depend on the problem alone, and whatever is summed over them is summed in their order. The backward
pass convolves a piece again instead of keeping its output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _convolution, _kernels, _pieces, _threads
from ._pieces import Chunks, Piece
from .planner import Convolution, Decision

__all__ = ["backward", "forward"]


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
    chunks = _pieces.cut(x, w, b, conv, decision)
    sliced = chunks.slabs > 1
    part_mean = mean.new_empty((chunks.slabs, *mean.shape)) if sliced else mean.unsqueeze(0)
    part_m2 = torch.empty_like(part_mean) if sliced else m2.unsqueeze(0)

    def reduce(piece: Piece) -> None:
        y = chunks.convolve(chunks.load(piece))
        out = (part_mean[piece.slab, piece.rows], part_m2[piece.slab, piece.rows])
        _kernels.act_moments(y, conv.activation, *out)

    if x.is_cpu:
        with _convolution.settings("cpu", chunks.allow_tf32):
            deque(_threads.map_in_order(reduce, chunks.pieces), maxlen=0)
    else:
        deque(map(reduce, chunks.pieces), maxlen=0)
    if sliced:
        per_plane = chunks.extents[1] * chunks.extents[2]
        counts = [(p.z1 - p.z0) * per_plane for p in chunks.pieces[: chunks.slabs]]
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
    chunks = _pieces.cut(x, w, b, conv, decision)
    dx, dw, db = wanted
    if dx is not None and chunks.slabs > 1:
        dx.zero_()
    sum_w = None if dw is None else dw.new_zeros(dw.shape, dtype=chunks.wide)
    sum_b = None if db is None else db.new_zeros(db.shape, dtype=torch.float64)

    def differentiate(piece: Piece) -> _Grads:
        return _piece_grads(chunks, piece, moments, wanted)

    with _convolution.settings(x.device.type, chunks.allow_tf32):
        run = _threads.map_in_order if x.is_cpu else map
        for piece, grads in zip(chunks.pieces, run(differentiate, chunks.pieces), strict=True):
            part_x, part_w, part_b = grads
            if dx is not None and part_x is not None:
                chunks.add_input_grad(dx, part_x, piece)
            if sum_w is not None and part_w is not None:
                sum_w += part_w
            if sum_b is not None and part_b is not None:
                sum_b += part_b
    if dw is not None and sum_w is not None:
        dw.copy_(sum_w)
    if db is not None and sum_b is not None:
        db.copy_(sum_b)


def _piece_grads(
    chunks: Chunks, piece: Piece, moments: tuple[Tensor, Tensor, Tensor], wanted: _Grads
) -> _Grads:
    """A piece's contributions, except for an input gradient that could be written in place."""
    part = chunks.load(piece)
    y = chunks.convolve(part)
    mean, grad_mean, grad_m2 = (t[piece.rows] for t in moments)
    if chunks.slabs > 1:
        # The operator spreads grad_mean over the positions it sees, here a slab's share of them.
        grad_mean = grad_mean * ((piece.z1 - piece.z0) / chunks.extents[0])
    dy = y if y.dtype == chunks.wide else torch.empty_like(y, dtype=chunks.wide)
    _kernels.act_moments_backward(y, mean, grad_mean, grad_m2, chunks.conv.activation, dy)
    del y

    dx, dw, db = wanted
    part_w = None if dw is None else chunks.weight_grad(dy, part)
    part_b = None if db is None else dy.sum(dim=(2, 3, 4)).sum(dim=0, dtype=torch.float64)
    part_x = None if dx is None else chunks.input_grad(dy, part, piece, dx)
    return part_x, part_w, part_b
