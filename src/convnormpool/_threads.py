"""A ``map`` over threads that convolve on their own, for the CPU's two-stage path."""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["map_in_order"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_order(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results of ``function`` in the order of the items.

    As many threads as PyTorch uses work at once, and PyTorch's operators use one thread in each of
    them: a result then has the same bits for any number of threads.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(function, items)
        return
    executor = _executor(threads)
    running: collections.deque[Future[_Result]] = collections.deque()
    try:
        for item in items:
            running.append(executor.submit(_without_grad, function, item))
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


def _without_grad(function: Callable[[_Item], _Result], item: _Item) -> _Result:
    with torch.no_grad():
        return function(item)


_lock = threading.Lock()


def _executor(threads: int) -> ThreadPoolExecutor:
    with _lock:
        return _make_executor(threads)


@functools.lru_cache(maxsize=1)
def _make_executor(threads: int) -> ThreadPoolExecutor:
    # torch.set_num_threads sets a number for all threads that have not yet asked for theirs, so
    # each worker asks while that is one, and the caller's number is set again after them all.
    barrier = threading.Barrier(threads)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()
        barrier.wait()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="convnormpool")
    try:
        for future in [executor.submit(start) for _ in range(threads)]:
            future.result()
    except BaseException:  # no room for a thread: the others must not wait for it
        barrier.abort()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        torch.set_num_threads(threads)
    return executor


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _make_executor.cache_clear()  # a forked child has none of its parent's threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
