"""How the two-stage path cuts a convolution into pieces, and the library calls for one piece.

Three ways: chunks of whole samples; slabs of a sample's output planes (large samples on CPU); and
chunks whose depth is unfolded into channels, so that the library convolves in two dimensions
(few channels on CUDA). All depend on the problem alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _convolution, _kernels
from .planner import Convolution, Decision
from .reference import statistics_dtype

__all__ = ["Chunks", "Piece", "Slabs", "Unfolded", "cut"]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """Samples [n0, n1) and output planes [z0, z1), which are slab number ``slab`` of them."""

    n0: int
    n1: int
    z0: int
    z1: int
    slab: int

    @property
    def rows(self) -> slice:
        """The piece's samples."""
        return slice(self.n0, self.n1)


def cut(x: Tensor, w: Tensor, b: Tensor | None, conv: Convolution, decision: Decision) -> Chunks:
    """The pieces as the planner decided."""
    if decision.unfolded_channels:
        return Unfolded(x, w, b, conv, decision)
    if decision.chunk_planes is not None:
        return Slabs(x, w, b, conv, decision)
    return Chunks(x, w, b, conv, decision)


class Chunks:
    """Chunks of whole samples, convolved in three dimensions.

    Attributes:
        extents: (Z, P, Q) of the whole output.
        pieces: in the order in which they are summed.
        slabs: pieces per sample.
        wide: the dtype of gradients. Those of a mean over many positions are far below float16's
            range, so they and what they are multiplied with are float32 (float64 for float64).
    """

    def __init__(
        self, x: Tensor, w: Tensor, b: Tensor | None, conv: Convolution, decision: Decision
    ) -> None:
        # A worker thread is not below autograd as its caller is.
        self.x, w = x.detach(), w.detach()
        self.conv = conv
        self.filter = tuple(w.shape)
        self.channels_last = decision.channels_last
        self.unfolded_channels = decision.unfolded_channels
        # CPU libraries have no good 16-bit convolutions everywhere.
        self.dtype = torch.float32 if x.is_cpu and x.dtype in _HALVES else x.dtype
        self.wide = statistics_dtype(x.dtype)
        # float16 and bfloat16 values are tf32 values, so their widened products lose by it only
        # what rounding dy to tf32 loses.
        self.allow_tf32 = conv.precision == "tf32" or x.dtype in _HALVES
        self.w = self._weight(w.to(self.dtype))
        self.w_wide = self.w if self.wide == self.dtype else self._weight(w.to(self.wide))
        self.b = None if b is None else b.detach().to(self.dtype)
        self.extents = _convolution.output_extents(
            x.shape[2:], w.shape[2:], conv.stride, conv.padding, conv.dilation
        )
        planes = self.extents[0]
        height = decision.chunk_planes or planes
        self.slabs = -(-planes // height)
        step = decision.chunk_samples
        self.pieces = [
            Piece(n, min(n + step, len(x)), z, min(z + height, planes), z // height)
            for n in range(0, len(x), step)
            for z in range(0, planes, height)
        ]

    def _weight(self, w: Tensor) -> Tensor:
        layout = torch.channels_last_3d if self.channels_last else torch.contiguous_format
        return w.contiguous(memory_format=layout)

    @property
    def _geometry(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
        """Stride, padding, dilation and groups of the library convolution of a loaded piece."""
        return self.conv.stride, self.conv.padding, self.conv.dilation, self.conv.groups

    def load(self, piece: Piece) -> Tensor:
        """A piece's input as the library convolves it."""
        part = self.x[piece.rows].to(self.dtype)
        return _kernels.to_channels_last(part) if self.channels_last else part.contiguous()

    def convolve(self, part: Tensor) -> Tensor:
        """The output (n, K, planes, P, Q) of a loaded piece, dense."""
        y = _convolution.forward(part, self.w, self.b, *self._geometry, self.allow_tf32)
        return _kernels.dense(y)

    def weight_grad(self, dy: Tensor, part: Tensor) -> Tensor:
        """A loaded piece's share of the weight's gradient."""
        part = part.to(self.wide)
        return _convolution.weight_grad(dy, part, self.filter, *self._geometry)

    def input_grad(self, dy: Tensor, part: Tensor, piece: Piece, dx: Tensor) -> Tensor | None:
        """Writes the piece's input gradient into dx, or returns it for ``add_input_grad``."""
        dx[piece.rows].copy_(self._input_grad(dy, part))
        return None

    def _input_grad(self, dy: Tensor, part: Tensor) -> Tensor:
        size = part.shape[2:]
        return _convolution.input_grad(dy, self.w_wide, size, *self._geometry, self.allow_tf32)

    def add_input_grad(self, dx: Tensor, part_dx: Tensor, piece: Piece) -> None:
        """Adds what ``input_grad`` returned."""
        dx[piece.rows] += part_dx


@dataclass(frozen=True)
class _Window:
    """Input planes [first, last) that a slab reads, and the zeros that padding puts around them."""

    first: int
    last: int
    before: int
    behind: int


class Slabs(Chunks):
    """Slabs of output planes. Their inputs overlap, so input gradients are added in order."""

    @property
    def _geometry(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
        stride, padding, dilation, groups = super()._geometry
        return stride, (0, *padding[1:]), dilation, groups

    def _window(self, piece: Piece) -> _Window:
        stride, padding, dilation = self.conv.stride[0], self.conv.padding[0], self.conv.dilation[0]
        depth = self.x.shape[2]
        first = piece.z0 * stride - padding
        length = (piece.z1 - 1 - piece.z0) * stride + dilation * (self.filter[2] - 1) + 1
        start = min(max(first, 0), depth)
        stop = min(max(first + length, start), depth)
        # A slab that lies in the padding altogether has no plane of the input.
        before = min(max(-first, 0), length)
        return _Window(start, stop, before, length - before - (stop - start))

    def load(self, piece: Piece) -> Tensor:
        window = self._window(piece)
        part = self.x[piece.rows, :, window.first : window.last]
        if window.before or window.behind:
            part = F.pad(part, (0, 0, 0, 0, window.before, window.behind))
        return part.to(self.dtype).contiguous()

    def input_grad(self, dy: Tensor, part: Tensor, piece: Piece, dx: Tensor) -> Tensor | None:
        return self._input_grad(dy, part)

    def add_input_grad(self, dx: Tensor, part_dx: Tensor, piece: Piece) -> None:
        window = self._window(piece)
        inside = part_dx[:, :, window.before : part_dx.shape[2] - window.behind]
        dx[piece.rows, :, window.first : window.last] += inside


class Unfolded(Chunks):
    """Chunks of whole samples whose planes under the filter are channels, channels last."""

    def _weight(self, w: Tensor) -> Tensor:
        flat = w.flatten(1, 2)
        flat = F.pad(flat, (0, 0, 0, 0, 0, self.unfolded_channels - flat.shape[1]))
        return flat.contiguous(memory_format=torch.channels_last)

    @property
    def _geometry(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], int]:
        conv = self.conv
        return conv.stride[1:], conv.padding[1:], conv.dilation[1:], 1

    @property
    def _depth(self) -> tuple[int, int, int, int]:
        conv = self.conv
        return self.filter[2], conv.stride[0], conv.padding[0], conv.dilation[0]

    def load(self, piece: Piece) -> Tensor:
        part = self.x[piece.rows]
        return _kernels.unfold_depth(part, *self._depth, self.unfolded_channels, self.extents[0])

    def convolve(self, part: Tensor) -> Tensor:
        y = _convolution.forward(part, self.w, self.b, *self._geometry, self.allow_tf32)
        planes = y.permute(0, 2, 3, 1).contiguous()
        shape = (-1, *self.extents, planes.shape[3])
        return planes.view(shape).permute(0, 4, 1, 2, 3)

    def weight_grad(self, dy: Tensor, part: Tensor) -> Tensor:
        part = part.to(self.wide)
        size = (self.filter[0], self.unfolded_channels, *self.filter[3:])
        grad = _convolution.weight_grad(_planes(dy), part, size, *self._geometry)
        return grad[:, : self.filter[1] * self.filter[2]].reshape(self.filter)

    def input_grad(self, dy: Tensor, part: Tensor, piece: Piece, dx: Tensor) -> Tensor | None:
        du = self._input_grad(_planes(dy), part)
        _kernels.fold_depth(du, *self._depth, dx[piece.rows])
        return None


def _planes(y: Tensor) -> Tensor:
    """(n, K, planes, P, Q), channels last, as (n * planes, K, P, Q)."""
    return y.permute(0, 2, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)
