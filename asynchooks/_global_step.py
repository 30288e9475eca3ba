"""GlobalStep: the awaitable counter of training steps, with the gate that stops it exactly.

It does not count by itself: whoever ran a step publishes the value read after the run.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from ._engine import STOPPED, TIMED_OUT, Signal, Slot, current_engine
from ._errors import StepUnreachableError, StopTraining
from ._gate import Answer, Asker, Gate, Ticket
from ._stop import EndsAtStop, Stop
from ._waiters import Waiters, Worker

logger = logging.getLogger("asynchooks")

_UNREACHABLE = Signal("UNREACHABLE")


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


class GlobalStep:
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

    Example:
        step = GlobalStep()
        async with anyio.create_task_group() as group:
            group.start_soon(step.wait_for, 10)  # suspended, without polling
            step.publish(10)                     # from any thread
    """

    def __init__(
        self,
        value: int = 0,
        *,
        num_workers: int | None = None,
        name: str = "global_step",
        moved_elsewhere: bool = False,
    ) -> None:
        if not isinstance(value, int):
            raise TypeError(f"value is {value!r}; give an integer number of steps")
        if num_workers is not None and not (isinstance(num_workers, int) and num_workers >= 1):
            raise ValueError(f"num_workers is {num_workers!r}; give at least 1, or None if unknown")
        self.name = name
        # shared with every handle that `bound` makes; the lock guards the other two
        self._lock = threading.Lock()
        self._gate = Gate(value)
        self._waiters = Waiters(math.inf if moved_elsewhere else num_workers)
        # this handle's own
        self._stop: Stop | None = None
        self._worker: Worker | None = None

    @property
    def value(self) -> int:
        """The last step published in this epoch."""
        return self._gate.value

    @property
    def epoch(self) -> int:
        """How often the step was restarted (after a recovery it may have gone back)."""
        return self._gate.epoch

    @property
    def limit(self) -> int | None:
        """The step at which `session.run` refuses to go on, if any."""
        return self._gate.limit

    async def wait_for(self, step: int, *, timeout: float | None = None) -> int:
        """Suspend until the step is reached and return the value that was published then.

        That value is returned even if the step has gone back since. Waiters wake in order of
        their steps, among equals in order of asking; a later value may have been published by the
        time one runs. Cancellation safe: a cancelled waiter leaves nothing behind.

        Args:
            step: the global step to wait for; one that is reached already returns at once.
            timeout: seconds, >= 0, on the engine's clock; None waits as long as it takes.

        Raises:
            TypeError, ValueError: `step` is no integer, or `timeout` is negative.
            StopTraining: the session that this handle belongs to was asked to stop.
            TimeoutError: the step did not come in time.
            StepUnreachableError: nobody is left to bring it.
        """
        engine = current_engine()
        if not isinstance(step, int):
            step = _as_integer(step)
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}; give seconds >= 0, or None")
        with self._lock:
            if self._gate.value >= step:
                return self._gate.value
            if self._stop is not None and self._stop.is_set:
                raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
            slot = Slot(engine, f"{self.name} {step}")
            waiter = self._waiters.add(step, slot, self._worker)
            lost = self._waiters.take_lost()
            all_wait = self._worker is not None and self._waiters.all_wait
        if all_wait and not lost:
            logger.warning(
                "All open workers wait for %s %d or another step: %r", self.name, step, self
            )
        _wake([(each.slot, _UNREACHABLE) for each in lost])
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            with EndsAtStop(slot, self._stop):
                value = await engine.park(slot, until)
        finally:
            with self._lock:
                self._waiters.leave(waiter)
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
        if value is TIMED_OUT:
            raise TimeoutError(f"{self.name} {step} did not come within {timeout} s: {self!r}")
        if value is _UNREACHABLE:
            raise StepUnreachableError(
                f"{self.name} {step} can no longer come: {self!r} has nobody left to move it. "
                "Wait for an earlier step, or keep a session open that trains up to it."
            )
        assert isinstance(value, int)
        return value

    def publish(self, value: int, *, epoch: int | None = None) -> None:
        """Say that the step has reached a value, and wake who waited for it; from any thread.

        A value of another epoch, or below the present one, is late news and ignored.
        """
        with self._lock:
            if epoch in (None, self._gate.epoch):
                self._gate.value = max(self._gate.value, value)
            news = self._news()
        _wake(news)

    def restart(self, value: int) -> None:
        """Begin a new epoch at a value, which may lie below the present one; from any thread."""
        with self._lock:
            self._gate.restart(value)
            news = self._news()
        _wake(news)

    def raise_limit(self, step: int) -> None:
        """Let no run start that could bring the step beyond `step`; the largest limit holds."""
        with self._lock:
            gate = self._gate
            gate.limit = step if gate.limit is None else max(gate.limit, step)
            news = self._news()
        _wake(news)

    def take_ticket_nowait(self) -> Ticket | None:
        """A ticket, if one is to be had at once; None if there is something to wait for.

        Raises:
            StopTraining: the limit is reached.
        """
        with self._lock:
            gate = self._gate
            answer = gate.decide(is_exclusive=False)
            if answer is Answer.GRANTED and not gate.askers:
                return gate.grant()
        if answer is Answer.REFUSED:
            raise StopTraining(f"{self.name} has reached its limit: {self!r}")
        return None

    async def take_ticket(self) -> Ticket:
        """The right to run one step, in order of asking; `settle` it after the run.

        Raises:
            StopTraining: the limit is reached, or a stop was requested meanwhile.
        """
        ticket = self.take_ticket_nowait()
        if ticket is not None:
            return ticket
        asker = await self._ask(is_exclusive=False)
        if asker.answer is Answer.REFUSED:
            raise StopTraining(f"{self.name} has reached its limit: {self!r}")
        if asker.ticket is None:
            raise StopTraining(f"a stop was requested while waiting to run a step of {self.name}")
        return asker.ticket

    def settle(self, ticket: Ticket, value: int | None = None) -> None:
        """Give a ticket back with the step read after the run, None if it failed; any thread."""
        with self._lock:
            self._gate.settle(ticket, value)
            news = self._news()
        _wake(news)

    def abandon(self, ticket: Ticket) -> None:
        """Say that nobody waits for the run of this ticket, which a thread may still settle.

        Near the limit others are refused then, rather than waiting for ever; `exclusive` goes
        ahead without it.
        """
        with self._lock:
            self._gate.abandon(ticket)
            news = self._news()
        _wake(news)

    @asynccontextmanager
    async def exclusive(self, *, timeout: float | None = None) -> AsyncIterator[None]:
        """Within the block no run is under way, in order of asking. Cancellation safe.

        Do not run a step of the same model inside: it would wait for the block to end.

        Args:
            timeout: seconds, >= 0, to wait for runs that are under way; None waits as long as it
                takes, for ever if one of them waits for the caller.

        Raises:
            TimeoutError: on entering: they have not ended in time.
        """
        release = await self.take_exclusive(timeout=timeout)
        try:
            yield
        finally:
            release()

    async def take_exclusive(self, *, timeout: float | None = None) -> Callable[[], None]:
        """As entering `exclusive`; returns what ends it, from any thread."""
        asker = await self._ask(is_exclusive=True, timeout=timeout)
        if asker.answer is not Answer.GRANTED:
            raise TimeoutError(
                f"the runs that are under way have not ended within {timeout} s: {self!r}"
            )
        is_taken = True

        def release() -> None:
            nonlocal is_taken
            with self._lock:
                if is_taken:
                    is_taken = self._gate.is_exclusive = False
                news = self._news()
            _wake(news)

        return release

    def open_worker(self) -> Worker:
        """Say that one more session may move the step; close it with `close_worker`."""
        worker = Worker()
        with self._lock:
            self._waiters.open(worker)
        return worker

    def close_worker(self, worker: Worker) -> None:
        """Say that this session moves the step no more; waiters that it leaves alone end."""
        with self._lock:
            self._waiters.close(worker)
            if not self._waiters.workers:
                self._gate.limit = None  # whoever opens next sets a limit of its own
            lost = self._waiters.take_lost()
        _wake([(each.slot, _UNREACHABLE) for each in lost])

    def close(self) -> None:
        """Say that the step will not move again: everybody who waits for it, or will, ends."""
        with self._lock:
            self._waiters.is_closed = True
            lost = self._waiters.take_lost()
        _wake([(each.slot, _UNREACHABLE) for each in lost])

    def bound(self, stop: Stop, worker: Worker | None = None) -> GlobalStep:
        """The same step, whose waits end at `stop` and count as waits of `worker`."""
        handle = copy.copy(self)
        handle._stop, handle._worker = stop, worker
        return handle

    def statistics(self) -> GlobalStepStatistics:
        """The state of this step and of those who wait for it, at one moment."""
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
            )

    async def _ask(self, *, is_exclusive: bool, timeout: float | None = None) -> Asker:
        """Stand in the gate's queue until there is an answer, time, or (not exclusive) a stop."""
        engine = current_engine()
        what = f"{'all runs' if is_exclusive else 'a ticket'} of {self.name}"
        asker = Asker(Slot(engine, what), is_exclusive)
        with self._lock:
            self._gate.askers.append(asker)
            news = self._news()
        _wake(news)
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            with nullcontext() if is_exclusive else EndsAtStop(asker.slot, self._stop):
                await engine.park(asker.slot, until)
        except BaseException:
            self._withdraw(asker, give_back=True)
            raise
        if asker.slot.value in (STOPPED, TIMED_OUT):
            self._withdraw(asker, give_back=False)
        return asker

    def _withdraw(self, asker: Asker, *, give_back: bool) -> None:
        """Leave the queue; what was granted meanwhile is passed on, if it is not wanted."""
        with self._lock:
            if asker.answer is Answer.WAIT:
                self._gate.askers.remove(asker)
            elif give_back and asker.ticket is not None:
                self._gate.settle(asker.ticket, None)
            elif give_back and asker.answer is Answer.GRANTED:
                self._gate.is_exclusive = False
            news = self._news()
        _wake(news)

    def _news(self) -> list[tuple[Slot, object]]:
        """Whom the present state concerns; call it with the lock held, after every change."""
        gate = self._gate
        news: list[tuple[Slot, object]] = []
        if len(self._waiters):
            news = [(each.slot, gate.value) for each in self._waiters.take_due(gate.value)]
        if gate.askers:
            news += [(each.slot, each.answer) for each in gate.answer_askers()]
        return news

    def __repr__(self) -> str:
        gate, waiters = self._gate, self._waiters
        is_known = waiters.num_workers not in (None, math.inf)
        expected = f" of {waiters.num_workers} expected" if is_known else ""
        limit = "" if gate.limit is None else f", limit {gate.limit}"
        return (
            f"<GlobalStep {self.name} at {gate.value}{limit}, epoch {gate.epoch}, "
            f"workers: {len(waiters.workers)} open, {waiters.opened} opened{expected}>"
        )


def _wake(news: Iterable[tuple[Slot, object]]) -> None:
    """Outside of the lock: a wake-up may ring another thread's event loop."""
    for slot, value in news:
        slot.wake(value)


def _as_integer(step: object) -> int:
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step is {step!r}; give the global step to wait for, an integer") from None
