"""Conv3d, HardSwish, GroupNorm and the mean over all positions as one layer.

    >>> layer = ConvNormPool3d(3, 16, kernel_size=4, num_groups=4)
    >>> layer(torch.randn(2, 3, 16, 32, 32)).shape
    torch.Size([2, 16])

The convolution's output is never kept. ``python -m convnormpool`` shows what is installed and
checks it; ``explain`` says which path takes a layer and why.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from . import ops as ops
from . import reference as reference
from .functional import conv_norm_pool
from .modules import ConvNormPool1d, ConvNormPool2d, ConvNormPool3d, explain
from .planner import Decision

__all__ = [
    "ConvNormPool1d",
    "ConvNormPool2d",
    "ConvNormPool3d",
    "Decision",
    "conv_norm_pool",
    "explain",
    "ops",
    "reference",
]

try:
    __version__ = version("convnormpool")
except PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"
