"""GlobalStep: the awaitable counter of training steps, with the gate that stops it exactly.

It does not count by itself: whoever ran a step publishes the value read after the run.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from ._engine import STOPPED, TIMED_OUT, Engine, Slot, current_engine
from ._errors import StepSourceLostError, StepUnreachableError, StopTraining
from ._fed_runs import LOST, UNREACHABLE, FedRuns
from ._signal import Signal
from ._step_runs import wake_all
from ._step_source import SourceState
from ._stop import EndsAtStop, Stop
from ._waiters import Worker

logger = logging.getLogger("asynchooks")


@dataclass(frozen=True)
class GlobalStepStatistics:
    """What a `GlobalStep` holds at one moment; all counts, in steps or tasks."""

    value: int
    epoch: int
    limit: int | None
    stride: int | None
    tickets: int
    tasks_waiting_for_step: int
    tasks_waiting_for_ticket: int
    is_exclusive: bool
    workers_opened: int
    workers_open: int
    source: SourceState | None
    """Whether news of other processes arrives; None where nobody else moves the step."""


class GlobalStep(FedRuns):
    """The number of training steps done, shared by all workers of one model.

    A session's creator makes it and the last session on it closes it; `session.global_step` and
    `run_context.global_step` hand it out. It may be used without any session, too. Users want
    `value`, `wait_for`, `exclusive` and `statistics`; the rest is for sessions, hooks and creators.

    Args:
        value: the first value, in steps.
        num_workers: how many sessions will open, when known: then a wait that can no longer end
            is noticed as soon as all of them wait.
        name: what it is called in logs and event files.
        moved_elsewhere: whether other processes move it, too: then no wait for it is hopeless.
        keeps_limit: whether only `publish` moves it, by one who minds the limit: runs do not count
            then, and none waits for another near the limit. A ParameterServer does so.

    Example:
        step = GlobalStep()
        async with anyio.create_task_group() as group:
            group.start_soon(step.wait_for, 10)  # suspended, without polling
            step.publish(10)                     # from any thread
    """

    __slots__ = ()

    def __init__(
        self,
        value: int = 0,
        *,
        num_workers: int | None = None,
        name: str = "global_step",
        moved_elsewhere: bool = False,
        keeps_limit: bool = False,
    ) -> None:
        if not isinstance(value, int):
            raise TypeError(f"value is {value!r}; give an integer number of steps")
        if num_workers is not None and not (isinstance(num_workers, int) and num_workers >= 1):
            raise ValueError(f"num_workers is {num_workers!r}; give at least 1, or None if unknown")
        super().__init__(value, name, math.inf if moved_elsewhere else num_workers)
        self._gate.keeps_limit = keeps_limit

    @property
    def value(self) -> int:
        """The last step published in this epoch; read anew where a graph's runs have moved it."""
        if self._gate.unread_runs != self._gate.read_runs:
            self.refresh()
        return self._gate.value

    @property
    def epoch(self) -> int:
        """How often the step was restarted (after a recovery it may have gone back)."""
        return self._gate.epoch

    @property
    def limit(self) -> int | None:
        """The step at which `session.run` refuses to go on, if any."""
        return self._gate.limit

    @property
    def keeps_limit(self) -> bool:
        """Whether only `publish` moves it, never beyond the limit."""
        return self._gate.keeps_limit

    async def wait_for(
        self, step: int, *, timeout: float | None = None, fails_on_loss: bool = False
    ) -> int:
        """Suspend until the step is reached and return the value that was published then.

        That value is returned even if the step has gone back since. Waiters wake in order of
        their steps, among equals in order of asking; a later value may have been published by the
        time one runs. Cancellation safe: a cancelled waiter leaves nothing behind.

        Args:
            step: the global step to wait for; one that is reached already returns at once.
            timeout: seconds, >= 0, on the engine's clock; None waits as long as it takes.
            fails_on_loss: whether to end when other processes move the step and no news of them
                arrives for now; else the wait goes on when it does again.

        Raises:
            TypeError, ValueError: `step` is no integer, or `timeout` is negative.
            StepSourceLostError: no news arrives, and `fails_on_loss` is set.
            StopTraining: the session that this handle belongs to was asked to stop.
            TimeoutError: the step did not come in time.
            StepUnreachableError: nobody is left to bring it.
        """
        engine = current_engine()
        if not isinstance(step, int):
            step = _as_integer(step)
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}; give seconds >= 0, or None")
        if self._gate.is_unread:
            self.refresh()
        with self._lock:
            if self._gate.value >= step:
                return self._gate.value
            if self._stop is not None and self._stop.is_set:
                raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
            if fails_on_loss and self._waiters.source_state is SourceState.LOST:
                raise self._lost(step)
            slot = Slot(engine, f"{self.name} {step}")
            is_next = step < self._waiters.next_step
            waiter = self._waiters.add(step, slot, self._worker)
            waiter.fails_on_loss = fails_on_loss
            if self._gate.value >= step:  # since a moment ago, by a run that took no lock
                self._waiters.leave(waiter)
                return self._gate.value
            lost = self._waiters.take_lost()
            nobody_else = self._worker is not None and self._gate.source is None
            all_wait = nobody_else and self._waiters.all_wait
        if all_wait and not lost:
            logger.warning(
                "All open workers wait for %s %d or another step: %r", self.name, step, self
            )
        wake_all([(each.slot, UNREACHABLE) for each in lost])
        if self._gate.is_unread:  # by a thread that did not know of this waiter yet
            self.refresh()
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            self._tell_source(is_next)
            with EndsAtStop(slot, self._stop):
                value = await engine.park(slot, until)
        finally:
            with self._lock:
                self._waiters.leave(waiter)
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
        if value is TIMED_OUT:
            raise TimeoutError(f"{self.name} {step} did not come within {timeout} s: {self!r}")
        if value is LOST:
            raise self._lost(step)
        if value is UNREACHABLE:
            raise StepUnreachableError(
                f"{self.name} {step} can no longer come: {self!r} has nobody left to move it. "
                "Wait for an earlier step, or keep a session open that trains up to it."
            )
        assert isinstance(value, int)
        return value

    def _tell_source(self, is_news: bool = True) -> None:
        source = self._gate.source
        if is_news and source is not None:
            source.look_again()

    def _lost(self, step: int) -> StepSourceLostError:
        return StepSourceLostError(
            f"no news of other processes arrives while waiting for {self.name} {step}: {self!r}"
        )

    def watch_limit(self, slot: Slot) -> Callable[[], None]:
        """Have the slot woken when the limit is reached, or changed; returns what forgets it.

        Whoever waits so is not waiting for a step: its session may go on with the next run.
        """
        watchers = self._waiters.of_limit
        with self._lock:
            limit = self._gate.limit
            is_next = limit is not None and limit < self._waiters.next_step
            waiter = None if limit is None else self._waiters.add(limit, slot, None)
            watchers.append(slot)
        self._tell_source(is_next)

        def forget() -> None:
            with self._lock:
                if waiter is not None:
                    self._waiters.leave(waiter)
                if slot in watchers:
                    watchers.remove(slot)

        return forget

    def publish(self, value: int | Signal, *, epoch: int | None = None) -> None:
        """Say that the step has reached a value, and wake who waited for it; from any thread.

        `ADVANCED` stands for one step more.

        A value of another epoch, or below the present one, is late news and ignored.
        """
        with self._lock:
            if epoch in (None, self._gate.epoch):
                self._gate.learn(value)
            news = self._news()
        wake_all(news)

    def restart(self, value: int) -> None:
        """Begin a new epoch at a value, which may lie below the present one; from any thread."""
        with self._lock:
            self._gate.restart(value)
            news = self._news()
        wake_all(news)
        self._tell_source()

    def raise_limit(self, step: int) -> None:
        """Let no run start that could bring the step beyond `step`; the largest limit holds."""
        with self._lock:
            gate = self._gate
            gate.limit = step if gate.limit is None else max(gate.limit, step)
            news = self._news() + [(slot, gate.limit) for slot in self._waiters.of_limit]
            self._waiters.of_limit.clear()
        wake_all(news)
        if gate.is_unread:
            self.refresh()
        self._look_again()

    def open_worker(self, engine: Engine | None = None) -> Worker:
        """Say that one more session may move the step; close it with `close_worker`.

        Args:
            engine: where all its steps run that do not run in threads of its own.
        """
        worker = Worker()
        with self._lock:
            is_first = not self._waiters.workers
            self._waiters.open(worker)
            self._gate.engine = engine if is_first or engine is self._gate.engine else None
            self._gate.find_free()
        return worker

    def close_worker(self, worker: Worker) -> None:
        """Say that this session moves the step no more; waiters that it leaves alone end."""
        with self._lock:
            self._waiters.close(worker)
            if not self._waiters.workers:
                self._gate.limit = None  # whoever opens next sets a limit of its own
                self._gate.void()
                self._gate.engine = None
            news = self._news()
            lost = self._waiters.take_lost()
        wake_all(news + [(each.slot, UNREACHABLE) for each in lost])
        self._tell_source()

    def set_idle(self, worker: Worker, is_idle: bool) -> None:
        """Say that an open worker moves no step for now; waiters that it leaves alone end."""
        with self._lock:
            self._waiters.set_idle(worker, is_idle)
            lost = self._waiters.take_lost()
        wake_all([(each.slot, UNREACHABLE) for each in lost])

    def close(self) -> None:
        """Say that the step will not move again: everybody who waits for it, or will, ends."""
        with self._lock:
            self._waiters.is_closed = True
            lost = self._waiters.take_lost()
        wake_all([(each.slot, UNREACHABLE) for each in lost])

    def bound(self, stop: Stop, worker: Worker | None = None) -> GlobalStep:
        """The same step, whose waits end at `stop` and count as waits of `worker`."""
        handle = GlobalStep.__new__(GlobalStep)
        for shared in ("_acquire", "_gate", "_lock", "_release", "_waiters", "name"):
            setattr(handle, shared, getattr(self, shared))
        handle._stop, handle._worker, handle._spare_ticket = stop, worker, None
        return handle

    def statistics(self) -> GlobalStepStatistics:
        """The state of this step and of those who wait for it, at one moment."""
        if self._gate.is_unread:
            self.refresh()
        with self._lock:
            gate, waiters = self._gate, self._waiters
            return GlobalStepStatistics(
                value=gate.value,
                epoch=gate.epoch,
                limit=gate.limit,
                stride=gate.stride,
                tickets=gate.tickets,
                tasks_waiting_for_step=len(waiters),
                tasks_waiting_for_ticket=len(gate.askers),
                is_exclusive=gate.is_exclusive,
                workers_opened=waiters.opened,
                workers_open=len(waiters.workers),
                source=waiters.source_state,
            )

    def __repr__(self) -> str:
        gate, waiters = self._gate, self._waiters
        is_known = waiters.num_workers not in (None, math.inf)
        expected = f" of {waiters.num_workers} expected" if is_known else ""
        limit = "" if gate.limit is None else f", limit {gate.limit}"
        return (
            f"<GlobalStep {self.name} at {gate.value}{limit}, epoch {gate.epoch}, "
            f"workers: {len(waiters.workers)} open, {waiters.opened} opened{expected}>"
        )


def _as_integer(step: object) -> int:
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step is {step!r}; give the global step to wait for, an integer") from None
