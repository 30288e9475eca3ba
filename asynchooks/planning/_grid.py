"""Predictions of many settings, in parallel processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from .._errors import PlanError
from ._plan import Main, Plan
from ._prediction import Prediction

_WITH_THREADS = ("tensorflow", "torch", "jax")
"""Modules whose computations may hang in a fork, as the threads of their pools are not in it."""
_work: tuple[Plan, Main, dict[str, Any]] | None = None
"""Of a process of the pool: set once, as it is forked."""


def predict_all(
    plan: Plan,
    main: Main,
    settings: Sequence[Mapping[str, Any]],
    *,
    num_runs: int = 8,
    seed: int = 0,
    num_processes: int | None = None,
    allow_mismatch: bool = False,
    done: Callable[[], object] = lambda: None,
) -> list[Prediction | Exception]:
    """A prediction of each setting, or the error that it gave, in the same order.

    The result does not depend on the number of processes. They are forks of this one, so that they
    need neither import the program nor read and fit the records again. Where there is no fork, or
    other threads run, which a fork would not have, all is done here; so it is if the program has
    imported TensorFlow, PyTorch or JAX, whose own threads Python does not count.

    Args:
        plan: what predicts; it checks the recorded settings once, here.
        main: the program.
        settings: of each prediction.
        num_runs: as of `Plan.predict`, as are `seed` and `allow_mismatch`.
        num_processes: >= 1; None: one for each core.
        done: called as each setting is done.

    Raises:
        PlanError: the recorded settings are missed, or a process has died.
        KeyboardInterrupt: Ctrl-C; the processes are ended.
    """
    options = {"num_runs": num_runs, "seed": seed, "allow_mismatch": allow_mismatch}
    plan.checks(main, num_runs, seed)  # once, for all processes
    num = min(num_processes or _num_cores(), len(settings))
    if num <= 1 or not _can_fork():
        results = []
        for each in settings:
            results.append(_predicted(plan, main, options, each))
            done()
        return results
    return _in_processes(num, (plan, main, options), settings, done)


def _in_processes(
    num: int,
    work: tuple[Plan, Main, dict[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    done: Callable[[], object],
) -> list[Prediction | Exception]:
    global _work
    _work = work  # the forks have it
    pool = ProcessPoolExecutor(
        num, mp_context=get_context("fork"), initializer=_leave_interrupts_to_the_parent
    )
    try:
        futures = {pool.submit(_predict_here, each): place for place, each in enumerate(settings)}
        results: dict[int, Prediction | Exception] = {}
        for future in as_completed(futures):
            results[futures[future]] = _result_of(future, settings[futures[future]])
            done()
        return [results[place] for place in range(len(settings))]
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()  # nothing of theirs is kept
        raise
    finally:
        _work = None
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches the whole group; a fork that raised it within the pool's locks would hang."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result_of(
    future: Future[Prediction | Exception], settings: Mapping[str, Any]
) -> Prediction | Exception:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise PlanError(
            f"a process died as it predicted {dict(settings)!r}, or another setting of the same "
            "time: perhaps it ran out of memory; give one process to see which"
        ) from error


def _predict_here(settings: Mapping[str, Any]) -> Prediction | Exception:
    assert _work is not None
    return _predicted(*_work, settings)


def _predicted(
    plan: Plan, main: Main, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> Prediction | Exception:
    try:
        return plan.predict(main, **options, **settings)
    except Exception as error:
        # some errors cannot be sent from another process, and all shall be shown alike
        return PlanError(f"{type(error).__name__}: {error}")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_fork() -> bool:
    return (
        sys.platform.startswith("linux")
        and threading.active_count() == 1
        and not any(each in sys.modules for each in _WITH_THREADS)
    )
