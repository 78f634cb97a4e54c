"""Devices, paths and seeds of the whole suite."""

from __future__ import annotations

import functools
import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch
from emulation_programs import Results, in_background

from convnormpool import explain

SEED = int(os.environ.get("CONVNORMPOOL_TEST_SEED", "0")) or random.SystemRandom().randrange(
    1, 2**31
)


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
    # On CUDA the fused path refuses many a shape, which then is for "auto" to send elsewhere.
    return ("fused" if device == "cpu" else "auto", "two_stage")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device; deselected where there is none")


def pytest_report_header() -> str:
    return f"convnormpool: CONVNORMPOOL_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"the same inputs again: CONVNORMPOOL_TEST_SEED={SEED}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``device`` runs a test on every kind of device, beside it ``path`` on each of our paths.

    ``any_path`` has the eager path, too; ``fused_device`` is every device that has the fused path.
    """
    names = metafunc.fixturenames
    only_cuda = metafunc.definition.get_closest_marker("cuda") is not None
    devices = [d for d in _devices() if d == "cuda" or not only_cuda]
    for name, more in (("path", ()), ("any_path", ("eager",))):
        if "device" in names and name in names:
            pairs = [(device, path) for device in devices for path in (*_paths(device), *more)]
            # Where there is none a test of CUDA is deselected, which takes an item to deselect.
            metafunc.parametrize(("device", name), pairs or [("cuda", "two_stage")])
            return
    if "device" in names:
        metafunc.parametrize("device", devices or ["cuda"])
    elif "fused_device" in names:
        metafunc.parametrize("fused_device", [d for d in _devices() if _has_fused(d)])


def _waits_for_emulation(item: pytest.Item) -> bool:
    return "emulated" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_waits_for_emulation)  # last, see `begin`
    if "cuda" in _devices():
        return
    without = [item for item in items if item.get_closest_marker("cuda")]
    if without:
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=without)


@pytest.fixture(scope="session")
def emulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """What the emulation programs of the session's tests come to."""
    tests = filter(_waits_for_emulation, request.session.items)
    programs = [tuple(map(test.callspec.params.get, ("source", "operand"))) for test in tests]
    with in_background(programs, tmp_path_factory.mktemp("emulation")) as results:
        yield results


@pytest.fixture(scope="session", autouse=True)
def begin(request: pytest.FixtureRequest) -> None:
    """The emulation programs take minutes: they begin before the first test, beside all others."""
    if any(map(_waits_for_emulation, request.session.items)):
        request.getfixturevalue("emulated")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inputs are new in every session, and the same for a test however it is selected."""
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))
    yield
