"""The kernel on trio: a clock that fires the next entry when trio is about to sleep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import outcome
import trio
import trio.testing

from ..._engine.real_time import OnTrio
from ..._errors import OutsideWorkError
from ._anyio import REAL_IO, AnyioKernel, LoopTask, Step, Waiter
from ._kernel import KernelTask

_TRIOS_OWN = ("trio.", "<")
"""How trio names its own tasks."""
_OWN_WAITS = 1
"""Trio's own task waits for the pipe by which threads wake the loop."""
_LOOK_EVERY = 256
"""Entries between two checks for tasks that wait for real I/O; one takes some microseconds."""


class TrioKernel(OnTrio, AnyioKernel):
    """Deadlines of trio's own scopes expire at exactly their time, between the kernel's entries."""

    _num_looks = 0
    _is_released = False
    has_fired = False
    """Whether an entry has woken what is ready."""

    def _all_tasks(self) -> list[tuple[str, object]]:
        return [
            (task.name, task.coro)
            for task in _tasks_of_run()[1:]
            if task is not self.driver and not task.name.startswith(_TRIOS_OWN)
        ]

    def current_task(self) -> object | None:
        return trio.lowlevel.current_task()

    def _new_waiter(self) -> Waiter:
        return _TaskWaiter(self._current_task())

    def _run_loop(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        options = {"clock": _Clock(self)}
        try:
            anyio.run(fn, *args, backend="trio", backend_options=options)
        except trio.TrioInternalError as error:  # raised by the clock, as the last resort
            if self.error is None:
                raise
            raise self.error from error

    def _enter(self) -> None:
        self._current_task = trio.lowlevel.current_task
        self.driver = trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()
        # not public in trio; without it, `wait_all_tasks_blocked` ends when time has passed
        context = getattr(trio._core._run, "GLOBAL_RUN_CONTEXT", None)
        self._runner = getattr(context, "runner", None)
        if self.chooser is not None and self._runner is not None:
            self._runner.runq = _ReadyQueue(self, self._runner.runq)

    async def _until_released(self) -> None:
        await self._event.wait()

    def _release(self) -> None:
        self._is_released = True
        self._event.set()

    def begin(self, task: KernelTask) -> None:
        assert isinstance(task, LoopTask)
        spawned = trio.lowlevel.spawn_system_task(
            self.body_of, task, *task.body, name=task.name, context=task.context
        )
        task.body = spawned.coro

    def _wake_loop(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.deliver)

    def _break_foreign_wait(self, coroutine: object) -> None:
        for task in _tasks_of_run():
            # scopes are not public in trio; without this, the task would never end
            status = getattr(task, "_cancel_status", None) if task.coro is coroutine else None
            while status is not None:
                status._scope.shield = False
                status = status.parent

    def _count_busy_threads(self) -> int:
        # trio does not count abandoned threads; their tokens return when they end
        tokens = trio.to_thread.current_default_thread_limiter().borrowed_tokens
        return max(trio.testing.active_thread_count(), tokens)

    def sleep_secs(self, deadline: float) -> float:
        """Fire the next entry, or let trio's next deadline come; returns trio's time to sleep."""
        self._num_looks += 1
        if self._num_looks % _LOOK_EVERY == 0:
            self._refuse_io()
        if self._is_idle_awaited():
            return math.inf
        target = self.next_target(deadline)
        if target is not None:
            target.fire()
            self.has_fired = self.chooser is not None
            return 0.0
        return 0.0 if self.time >= deadline or self._is_released else math.inf

    def _has_foreign_timers(self) -> bool:
        return trio.lowlevel.current_statistics().seconds_to_next_deadline < math.inf

    def _is_idle_awaited(self) -> bool:
        """Whether a task waits until all are blocked: trio wakes it if this clock lets it sleep."""
        return not self.num_steps and bool(getattr(self._runner, "waiting_for_idle", False))

    def _nothing_left(self) -> None:
        self._refuse_io()
        super()._nothing_left()

    def _refuse_io(self) -> None:
        waiting = _num_waiting_for_io()
        if waiting > _OWN_WAITS and not self.is_outside_declared and not self.is_ending:
            self.end(OutsideWorkError(REAL_IO))


class _TaskWaiter(Waiter):
    __slots__ = ("_trio_task",)

    def __init__(self, trio_task: trio.lowlevel.Task) -> None:
        super().__init__()
        self._trio_task: trio.lowlevel.Task | None = trio_task  # until it is rescheduled

    @property
    def is_over(self) -> bool:
        return self._trio_task is None

    def suspend(self) -> Awaitable[Any]:
        return trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._trio_task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def fire(self) -> None:
        task, self._trio_task = self._trio_task, None
        assert task is not None
        trio.lowlevel.reschedule(task)

    def fail(self, error: BaseException) -> None:
        task, self._trio_task = self._trio_task, None
        if task is not None:
            trio.lowlevel.reschedule(task, outcome.Error(error))


class _ReadyQueue(deque[trio.lowlevel.Task]):
    """Trio's queue of the tasks that are ready, which it copies and clears.

    What no entry has woken is made an entry, so that one at a time is chosen. Of several, trio
    would run half of the times the last one first, whatever the seed.
    """

    def __init__(self, kernel: TrioKernel, tasks: deque[trio.lowlevel.Task]) -> None:
        super().__init__(tasks)
        self._kernel = kernel

    def __iter__(self) -> Iterator[trio.lowlevel.Task]:
        tasks = [self.popleft() for _ in range(len(self))]
        if self._kernel.driver in tasks:
            tasks.remove(self._kernel.driver)
            yield self._kernel.driver
        has_fired, self._kernel.has_fired = self._kernel.has_fired, False
        if len(tasks) == 1 and (has_fired or tasks[0] in self._kernel.in_waits):
            yield tasks[0]
            return
        tasks.sort(key=lambda task: task._counter)
        self._kernel.ask_for_steps(
            Step(self._kernel, task, partial(self.append, task)) for task in tasks
        )


class _Clock(trio.abc.Clock):
    """Virtual time, for trio."""

    def __init__(self, kernel: TrioKernel) -> None:
        self._kernel = kernel

    def start_clock(self) -> None:
        """Nothing to start: the time is that of the kernel's last entry."""

    def current_time(self) -> float:
        if not trio.lowlevel.in_trio_task():  # the loop itself, once a turn
            self._kernel.look_at_turns()
        return self._kernel.entry[0]

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return self._kernel.sleep_secs(deadline)


def _tasks_of_run() -> list[trio.lowlevel.Task]:
    """The root of all tasks, and all tasks."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else [root]
    for task in tasks:  # grows during the loop
        for nursery in task.child_nurseries:
            tasks.extend(nursery.child_tasks)
    return tasks


def _num_waiting_for_io() -> int:
    io = trio.lowlevel.current_statistics().io_statistics
    return int(getattr(io, "tasks_waiting_read", 0) + getattr(io, "tasks_waiting_write", 0))
