"""in_processes: a function of many items, in forks of this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from .._errors import SimulationError

T = TypeVar("T")
_WITH_THREADS = ("tensorflow", "torch", "jax")
"""Libraries whose threads Python does not count, and a fork would not have."""
_work: Callable[[Any], Any] | None = None
"""Of a fork: set once, before it is made."""


def in_processes(
    work: Callable[[Any], T],
    items: Sequence[Any],
    *,
    num_processes: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> list[T]:
    """What `work` returns of each item, in their order, whatever the number of processes.

    They are forks of this one, so that they need not import anything again, and `work` may be any
    function; what it returns is pickled. Where there is no fork, or other threads run, which a fork
    would not have, all is done here.

    Args:
        work: a function of one item, which returns errors rather than raises them.
        items: which are shown in errors.
        num_processes: >= 1; None: one for each core.
        done: called as each item is done.

    Raises:
        SimulationError: a process has died (says of which item).
        KeyboardInterrupt: Ctrl-C; the processes are killed.
    """
    num = min(num_processes or num_cores(), len(items))
    if num > 1 and _can_fork():
        return _in_forks(work, items, num, done)
    results = []
    for each in items:
        results.append(work(each))
        done()
    return results


def _in_forks(
    work: Callable[[Any], T], items: Sequence[Any], num: int, done: Callable[[], object]
) -> list[T]:
    global _work
    _work = work  # the forks have it
    pool = ProcessPoolExecutor(
        num, mp_context=get_context("fork"), initializer=_leave_interrupts_to_the_parent
    )
    try:
        with _interrupts_held():
            futures = {pool.submit(_call, each): place for place, each in enumerate(items)}
        results: dict[int, T] = {}
        for future in as_completed(futures):
            place = futures[future]
            try:
                results[place] = future.result()
            except BrokenProcessPool as error:
                raise SimulationError(
                    f"a process died with {items[place]!r}, or with another item of the same time: "
                    "perhaps it ran out of memory; give one process to see which"
                ) from error
            done()
        return [results[place] for place in range(len(items))]
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()  # nothing of theirs is kept
        raise
    finally:
        _work = None
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, in which processes are started.

    Else one that is forked already, and not yet known to the pool, would be left behind.
    """
    if sys.platform == "win32":  # there is no fork
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches the whole group; a fork that raised it within the pool's locks would hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(item: Any) -> Any:
    assert _work is not None
    return _work(item)


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_fork() -> bool:
    has_threads = any(name in sys.modules for name in _WITH_THREADS)
    return sys.platform.startswith("linux") and threading.active_count() == 1 and not has_threads
