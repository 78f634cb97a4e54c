"""The CPU path's threads: their number, errors in them, processes forked with them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from helpers import Case, ours

from convnormpool import _convolution, _kernels, _threads, conv_norm_pool

CASE = Case("chunks", (11, 2, 10, 20, 21), 16, (3, 3, 3), 4)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_workers_do_not_multiply() -> None:
    """Each worker computes on one thread; the caller keeps its number."""
    for threads in (2, 3):
        torch.set_num_threads(threads)
        executor = _threads._executor(threads)
        assert executor.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == threads


def test_workers_are_reused() -> None:
    ours(
        CASE,
        CASE.tensors(torch.float32, "cpu"),
        CASE.grad_out(torch.float32, "cpu"),
        path="two_stage",
    )
    before = threading.active_count()
    for _ in range(3):
        tensors = CASE.tensors(torch.float32, "cpu")
        ours(CASE, tensors, CASE.grad_out(torch.float32, "cpu"), path="two_stage")
    assert threading.active_count() == before


def test_error_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller as it is, after every piece has ended; the next call is well."""
    running = 0
    tensors = CASE.tensors(torch.float32, "cpu")
    wanted = CASE.call(conv_norm_pool, tensors, path="two_stage")

    def failing(*args: object) -> None:
        nonlocal running
        running += 1
        try:
            if running > 1:
                raise MemoryError("no room")
        finally:
            running -= 1
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(_kernels, "act_moments", failing)
        with pytest.raises(MemoryError, match="no room"):
            CASE.call(conv_norm_pool, tensors, path="two_stage")
        assert running == 0
    assert torch.equal(CASE.call(conv_norm_pool, tensors, path="two_stage"), wanted)


def _child(pipe: Connection, tensors: list[torch.Tensor]) -> None:
    # libgomp's threads don't survive a fork either, so the child has to be alone.
    torch.set_num_threads(1)
    pipe.send(CASE.call(conv_norm_pool, tensors, path="two_stage").tolist())


def test_forked_process() -> None:
    """A process that is forked after a call can call."""
    tensors = CASE.tensors(torch.float32, "cpu")
    wanted = CASE.call(conv_norm_pool, tensors, path="two_stage")
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(child, tensors))
    process.start()
    assert parent.poll(60)
    assert parent.recv() == wanted.tolist()
    process.join(60)
    assert process.exitcode == 0


def test_forked_while_settings_are_held() -> None:
    """A child that is forked while another thread is inside a call has neither its lock nor its
    settings."""
    tensors = CASE.tensors(torch.float32, "cpu")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _convolution.settings("cpu", False):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(child, tensors))
    process.start()
    answered = parent.poll(60)
    done.set()
    thread.join()
    if not answered:
        process.kill()
    assert (
        answered and parent.recv() == CASE.call(conv_norm_pool, tensors, path="two_stage").tolist()
    )
    process.join(60)


def test_calls_from_a_worker_thread() -> None:
    """As a data loader's or a server's thread calls: not the one that imported the package."""
    tensors = CASE.tensors(torch.float32, "cpu")
    wanted = CASE.call(conv_norm_pool, tensors, path="two_stage")
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(CASE.call(conv_norm_pool, tensors, path="two_stage"))
    )
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)
