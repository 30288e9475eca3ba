"""GlobalStep: the awaitable counter of training steps, with the gate that stops it exactly.

It does not count by itself: whoever ran a step publishes the value read after the run.
"""

from __future__ import annotations

import logging
import math
import operator
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .._engine.base import STOPPED, TIMED_OUT, Engine, Sentinel, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._errors import StepSourceLostError, StepUnreachableError, StopTraining
from .admission import wake_all
from .allowance import LOST, UNREACHABLE, FedRuns
from .source import SourceState
from .waiters import Listener, Waiter, Worker

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 30.0
"""How long the body of a session's block waits until it counts as the session's own waiting.

Meanwhile another task may begin to run its steps.
"""


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
    def last_known(self) -> int:
        """As `value`, but as it was read last: this takes no lock and reads nothing."""
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
    def training(self) -> object:
        """The same for as long as any session on this step is open: one training of one model."""
        return self._waiters.training

    @property
    def moved_elsewhere(self) -> bool:
        """Whether other processes move it, too."""
        return self._waiters.num_workers == math.inf

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
        worker = self.worker
        # a wait that ends by itself, or that others' updates may end, keeps nobody from moving on
        is_bounded = timeout is not None or self._gate.keeps_limit
        if not is_bounded and self._gate.value < step and self._gate.tickets:
            in_step = self._worker_in_step(engine)
        else:
            in_step = None
        body = None if is_bounded or worker is not None else self.body
        with self._lock:
            if self._gate.value >= step:
                return self._gate.value
            if self._stop is not None and self._stop.is_set:
                raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
            if fails_on_loss and self._waiters.source_state is SourceState.LOST:
                raise self._lost(step)
            if in_step is not None and self._waiters.is_alone(in_step):
                raise StepUnreachableError(
                    f"{self.name} {step} can no longer come: this task is in a step of {self!r}, "
                    "and no other session is open that could move it, so it would wait for "
                    "itself, for ever. Wait outside of the step function, between two runs"
                )
            slot = Slot(engine, f"{self.name} {step}")
            is_next = step < self._waiters.next_step
            worker = worker or in_step
            waiter = self._waiters.add(step, slot, worker)
            waiter.fails_on_loss = fails_on_loss
            if self._gate.value >= step:  # since a moment ago, by a run that took no lock
                self._waiters.leave(waiter)
                return self._gate.value
            lost = self._waiters.take_lost()
            nobody_else = worker is not None and self._gate.source is None
            all_wait = nobody_else and self._waiters.all_wait
        self._tell_lost(lost, step, all_wait)
        if self._gate.is_unread:  # by a thread that did not know of this waiter yet
            self.refresh()
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            self._tell_source(is_next)
            if body is not None and body.is_in_body(engine):
                value = await self._wait_as_body(body, engine, waiter, slot, step)
            else:
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

    async def _wait_as_body(
        self, body: Worker, engine: Engine, waiter: Waiter, slot: Slot, step: int
    ) -> Any:
        """Wait, after a while as the session itself, unless other tasks are to run its steps."""
        body.begin_body_wait(engine)
        try:
            with EndsAtStop(slot, self._stop):
                value = await engine.park(slot, engine.now() + _PATIENCE_SECS)
            if value is not TIMED_OUT:
                return value
            with self._lock:
                if waiter.is_gone:  # at this very moment
                    return self._gate.value if self._gate.value >= step else UNREACHABLE
                waiter.slot = slot = Slot(engine, slot.what)
                if not body.runs_elsewhere:
                    self._waiters.count(waiter, body)
                lost = self._waiters.take_lost()
                all_wait = self._gate.source is None and self._waiters.all_wait
            self._tell_lost(lost, step, all_wait)
            with EndsAtStop(slot, self._stop):
                return await engine.park(slot)
        finally:
            body.end_body_wait()

    def _tell_lost(self, lost: list[Waiter], step: int, all_wait: bool) -> None:
        if all_wait and not lost:
            logger.warning(
                "All open workers wait for %s %d or another step: %r", self.name, step, self
            )
        wake_all([(each.slot, UNREACHABLE) for each in lost])

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

    def publish(self, value: int | Sentinel, *, epoch: int | None = None) -> None:
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

    def open_worker(self, engine: Engine | None = None, listener: Listener | None = None) -> Worker:
        """Say that one more session may move the step; close it with `close_worker`.

        Args:
            engine: where all its steps run that do not run in threads of its own.
            listener: what `stop_workers` stops, from then on.
        """
        worker = Worker(listener, engine)
        with self._lock:
            is_first = not self._waiters.workers
            self._waiters.open(worker)
            self._gate.engine = engine if is_first or engine is self._gate.engine else None
            self._gate.find_free()
        return worker

    def close_worker(self, worker: Worker) -> None:
        """Say that this session moves the step no more; waiters that it leaves alone end."""
        with self._lock:
            news = self._without(worker)
        wake_all(news)
        self._tell_source()

    def drop_worker(self, worker: Worker) -> None:
        """As `close_worker`, where the garbage collector may have interrupted anything."""
        if not self._acquire(blocking=False):  # perhaps by the very code that is interrupted
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self.close_worker, (worker,))  # `Thread` has locks of its own
            return
        try:
            news = self._without(worker)
        finally:
            self._release()
        for slot, value in news:
            slot.engine.wake_from_signal(slot, value)

    def _without(self, worker: Worker) -> list[tuple[Slot, object]]:
        """Take a worker off, with the lock held; returns whom that concerns."""
        self._waiters.close(worker)
        if not self._waiters.workers:
            self._gate.limit = None  # whoever opens next sets a limit of its own
            self._gate.is_closed = False
            self._gate.void()
            self._gate.engine = None
        news = self._news()
        return news + [(each.slot, UNREACHABLE) for each in self._waiters.take_lost()]

    @property
    def stop_reason(self) -> StopReason | None:
        """Why all workers were stopped; None if they were not."""
        return self._waiters.stop_reason

    def stop_workers(self, reason: StopReason, apart_from: Worker | None = None) -> StopReason:
        """Stop all open workers, and those that open before the last of them has closed.

        Runs that are under way complete. From any thread.

        Args:
            apart_from: one that knows already; the others are stopped once.

        Returns:
            The first reason, which stands.
        """
        waiters = self._waiters
        with self._lock:
            others = [each for each in waiters.workers if not each.is_stopped]
            if waiters.workers:
                reason = waiters.stop_reason = waiters.stop_reason or reason
        for worker in others:
            if worker.listener is not None and worker is not apart_from:
                worker.is_stopped = True
                worker.listener.stop_for(reason)
        return reason

    def close_gate(self) -> None:
        """Let no run take a step before the last worker has closed; for the end of a stop for all.

        A run whose `before_run` is under way ends by StopTraining; a step under way completes, and
        `exclusive` waits for it.
        """
        with self._lock:
            self._gate.is_closed = bool(self._waiters.workers)
            news = self._news()
        wake_all(news)

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

    def bound(
        self, stop: Stop, worker: Worker | None = None, *, body: Worker | None = None
    ) -> GlobalStep:
        """The same step, whose waits end at `stop` and count as waits of `worker`.

        Args:
            body: as `worker`, for long waits in the body of its block: not those of other tasks,
                nor where other tasks run its steps, nor with a timeout.
        """
        handle = GlobalStep.__new__(GlobalStep)
        for shared in ("_acquire", "_gate", "_lock", "_release", "_waiters", "name"):
            setattr(handle, shared, getattr(self, shared))
        handle._stop, handle._spare_ticket = stop, None
        handle.worker, handle.body = worker, body
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
