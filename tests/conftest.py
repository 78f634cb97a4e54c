"""Devices, paths and seeds of the whole suite."""

from __future__ import annotations

import functools
import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch

from convnormpool import explain

SEED = int(os.environ.get("CONVNORMPOOL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@functools.cache
def _devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@functools.cache
def _has_fused(device: str) -> bool:
    """Whether the planner gives a first convolution of few channels to the fused kernel."""
    x, w = torch.empty(2, 3, 6, 8, 8, device=device), torch.empty(16, 3, 4, 4, 4, device=device)
    return explain(w, x).path == "fused"


@functools.cache
def _paths(device: str) -> tuple[str, ...]:
    # A CPU build without the fused path is broken and must fail; a CUDA build may have none.
    fused = device == "cpu" or _has_fused(device)
    return ("fused", "two_stage", "eager") if fused else ("two_stage", "eager")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device; deselected where there is none")


def pytest_report_header() -> str:
    return f"convnormpool: CONVNORMPOOL_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"the same inputs again: CONVNORMPOOL_TEST_SEED={SEED}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``device`` runs a test on every kind of device; ``path`` beside it on each path as well.

    ``fused_device`` is every kind of device that has the fused path.
    """
    names = metafunc.fixturenames
    if "device" in names and "path" in names:
        pairs = [(device, path) for device in _devices() for path in _paths(device)]
        metafunc.parametrize(("device", "path"), pairs)
    elif "device" in names:
        metafunc.parametrize("device", _devices())
    elif "fused_device" in names:
        metafunc.parametrize("fused_device", [d for d in _devices() if "fused" in _paths(d)])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cuda" in _devices():
        return
    without = [item for item in items if item.get_closest_marker("cuda")]
    if without:
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=without)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inputs are new in every session, and the same for a test however it is selected."""
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))
    yield
