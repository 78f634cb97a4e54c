"""AOTInductor: the layer exported, packaged, and run here and in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from convnormpool import ConvNormPool3d

SIZES = (1, 5)
TIMEOUT_S = 120
# Less to compile: what is generated around the operators is not what is tested.
CONFIGS = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}

# The operators run in Python, so a process has to have imported the package, and is told so.
FRESH = """
import sys
import torch

package, data = sys.argv[1:]
try:
    torch._inductor.aoti_load_package(package)
except RuntimeError as error:
    assert "convnormpool::" in str(error), error
else:
    raise AssertionError("loaded without the operators")

import convnormpool

inputs, wanted = torch.load(data)
run = torch._inductor.aoti_load_package(package)
for x, right in zip(inputs, wanted, strict=True):
    torch.testing.assert_close(run(x), right)
print("equal")
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = ConvNormPool3d(3, 16, (2, 3, 3), 4, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x))
        return out


def test_package_in_half_precision(device: str, tmp_path: Path) -> None:
    """Results have the dtype that eager's have."""
    layer = ConvNormPool3d(3, 16, (2, 3, 3), 4).to(device, torch.bfloat16)
    x = torch.randn(3, 3, 4, 5, 6, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        wanted = layer(x)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2"), inductor_configs=CONFIGS
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), wanted)


def test_package_with_a_dynamic_batch(device: str, tmp_path: Path) -> None:
    """Equal to eager at two batch sizes, here and in a fresh process that imports the package."""
    model = Model().to(device).eval()
    inputs = [torch.randn(samples, 3, 4, 5, 6, device=device) for samples in SIZES]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        example = torch.randn(3, 3, 4, 5, 6, device=device)
        batch = torch.export.Dim("batch", min=1, max=4096)
        program = torch.export.export(model, (example,), dynamic_shapes={"x": {0: batch}})
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), inductor_configs=CONFIGS
    )
    run = torch._inductor.aoti_load_package(package)
    for x, right in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(run(x), right)

    data = tmp_path / "data"
    torch.save((inputs, wanted), data)
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, package, str(data)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert fresh.returncode == 0 and fresh.stdout == "equal\n", fresh.stderr
