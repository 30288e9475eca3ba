"""in_processes: a function of many items, in forks of this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from .. import _check
from .._errors import SimulationError

T = TypeVar("T")
_WITH_THREADS = ("tensorflow", "torch", "jax")
"""Libraries whose threads Python does not count, and a fork would not have."""
_call: Callable[[int], Any] | None = None
"""What a fork does by the place of an item: set once, before it is made."""


def in_processes(
    work: Callable[[Any], T],
    items: Sequence[Any],
    *,
    num_processes: int | None = None,
) -> Generator[T, None, None]:
    """What `work` returns of each item, in their order, whatever the number of processes.

    They are forks of this one, so that they need not import anything again, and `work` and `items`
    may be anything; only what it returns is pickled. Where there is no fork, or other threads run,
    which a fork would not have, all is done here.

    Args:
        work: a function of one item, which returns errors rather than raises them.
        items: which are shown in errors.
        num_processes: >= 1; None: one for each core.

    Raises:
        TypeError, ValueError: num_processes is no integer >= 1.
        SimulationError: a process has died (says with which item).
        KeyboardInterrupt: Ctrl-C; the processes are killed, as they are where it is closed.
    """
    if num_processes is not None:
        _check.integer("num_processes", num_processes, least=1)
    num = min(num_processes or num_cores(), len(items))
    if num > 1 and _can_fork():
        return _in_forks(work, items, num)
    return (work(each) for each in items)


def _in_forks(work: Callable[[Any], T], items: Sequence[Any], num: int) -> Generator[T, None, None]:
    global _call
    context = get_context("fork")
    pids = context.RawArray("q", len(items))  # of the forks that work on each item now, else 0

    def call(place: int) -> T:
        pids[place] = os.getpid()
        try:
            return work(items[place])
        finally:
            pids[place] = 0

    _call = call  # the forks have it
    pool = ProcessPoolExecutor(num, mp_context=context, initializer=_leave_interrupts_to_the_parent)
    try:
        with _interrupts_held():
            futures = [pool.submit(_call_of_fork, place) for place in range(len(items))]
        forks = list((pool._processes or {}).values())
        for future in futures:
            try:
                result = future.result()
            except BrokenProcessPool as error:
                raise SimulationError(_death(pool, forks, items, pids)) from error
            yield result
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()  # nothing of theirs is kept
        raise
    finally:
        _call = None
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, in which processes are started.

    Else one that is forked already, and not yet known to the pool, would be left behind. To block
    the signal is not enough: it would reach another thread, such as one of NumPy's, and Python
    would raise it here.
    """
    if threading.current_thread() is not threading.main_thread():  # it raises none
        yield
        return
    has_come = []
    before = signal.signal(signal.SIGINT, lambda *_: has_come.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if has_come:
            signal.raise_signal(signal.SIGINT)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches the whole group; a fork that raised it within the pool's locks would hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call_of_fork(place: int) -> Any:
    assert _call is not None
    return _call(place)


def _death(
    pool: ProcessPoolExecutor,
    forks: Sequence[BaseProcess],
    items: Sequence[Any],
    pids: Sequence[int],
) -> str:
    """Which items the forks had that died by themselves."""
    pool.shutdown(wait=True, cancel_futures=True)  # the pool terminates the others
    dead = [each for each in forks if each.exitcode not in (0, -signal.SIGTERM)] or forks
    ends = {each.pid: each.exitcode for each in dead}
    places = [place for place, pid in enumerate(pids) if pid in ends]
    if not places:
        return f"a process died between two items; exit codes: {list(ends.values())}"
    found = " or ".join(f"{items[each]!r} (exit code {ends[pids[each]]})" for each in places)
    return f"a process died with {found}: perhaps it ran out of memory, or its code ended it"


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_fork() -> bool:
    has_threads = any(name in sys.modules for name in _WITH_THREADS)
    return sys.platform.startswith("linux") and threading.active_count() == 1 and not has_threads
