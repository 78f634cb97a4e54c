"""Conv3d, HardSwish, GroupNorm and the mean over all positions as one layer.

    >>> layer = ConvNormPool3d(3, 16, kernel_size=4, num_groups=4)
    >>> layer(torch.randn(2, 3, 16, 32, 32)).shape
    torch.Size([2, 16])

The convolution's output is never kept. ``fuse_`` finds the same chain in a model and rewrites it in
place. ``python -m convnormpool`` shows what is installed and checks it; ``explain`` says which path
takes a layer and why.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from . import ops as ops
from . import reference as reference
from .functional import conv_norm_pool
from .fusion import FusionReport, fuse_, unfuse_
from .modules import ConvNormPool1d, ConvNormPool2d, ConvNormPool3d, explain
from .planner import Decision

__all__ = [
    "ConvNormPool1d",
    "ConvNormPool2d",
    "ConvNormPool3d",
    "Decision",
    "FusionReport",
    "conv_norm_pool",
    "explain",
    "fuse_",
    "ops",
    "reference",
    "unfuse_",
]

try:
    __version__ = version("convnormpool")
except PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"
