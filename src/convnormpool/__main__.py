"""``python -m convnormpool``: the environment report and a self-check; status 1 if it fails."""

from __future__ import annotations

import sys

import torch

from . import _library
from .info import report, self_check


def main() -> int:
    """Prints the report; the exit status."""
    for line in report():
        print(line)
    lines, good = self_check()
    print("self-check")
    for line in lines:
        print("  " + line)
    if good and torch.version.cuda is not None and not _library.CUDA.loaded:
        print("all well on CPU; there are no operators for CUDA")
    else:
        print("all well" if good else "something is wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
