"""The gate: which run may make a step now, and who is woken when the step moves.

One lock guards everything that the workers of a model share: the value, the limit, the tickets of
runs under way, the queue of those that ask for one, and the heap of those that wait for a step.
Nothing is called and no task is woken under it: each change computes its news, which are delivered
after the lock is released. No lock but that of a stop is taken while it is held.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._engine.base import STOPPED, Engine, Sentinel, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._errors import StepUnreachableError, StopTraining
from .._log import fields
from .remote import LOST, Remote, SourceState

logger = logging.getLogger("asynchooks")

ADVANCED = Sentinel("ADVANCED")
"""In place of the step after a run: one more than before, as the run alone counts it."""
UNREAD = Sentinel("UNREAD")
"""In place of the step after a run: it may have moved, and is read when it is asked for."""
UNREACHABLE = Sentinel("UNREACHABLE")
"""What a waiter is woken with when its step can no longer come."""

News = list[tuple[Slot, Any]]
"""Slots to wake, once the lock is released, and with what."""


Kept = tuple[Mapping[str, Any], object]
"""Outputs of the run that made a step, and what computed them: of several models that count on one
step, this one."""


class Ticket:
    """The right to run one step, until it is settled."""

    terms = -1
    """Of the credit that it took from other processes, if any."""

    def __init__(self, epoch: int, value: int | None, was_alone_at: int) -> None:
        self.epoch = epoch
        self.value = value  # before the run; None where runs have ended unread
        self.was_alone_at = was_alone_at  # which grant it is; 0 if other runs were under way


@dataclass(eq=False)
class Asker:
    """One place in the gate's queue."""

    slot: Slot
    is_exclusive: bool
    is_bounded: bool
    """Whether it gives up by itself after a time."""
    answer: Ticket | Callable[[], None] | Exception | None = None
    """Its ticket, or what ends its exclusive side; or why it gets none."""


@dataclass(eq=False)
class Waiter:
    """One task that waits for a step; the gate sets the other fields."""

    fails_on_loss: bool = False
    is_watching: bool = False
    """Whether it is woken, too, when the limit changes or the step goes back."""
    slot: Any = None
    worker: Worker | None = None
    """What makes no step until this wait ends."""
    value: Any = None
    """What it was woken with, once it waits no more."""


@dataclass(eq=False)
class Worker:
    """One open session, as the gate sees it: it may still move the step."""

    engine: Engine | None = None
    stop: Stop | None = None
    waits: int = 0
    """Of its own for a step: during these it moves none."""
    step: Any = None
    """The coroutine of the step that it runs, where that is one."""
    task: object | None = None
    """Which opened it."""
    is_running: bool = False
    is_shared: bool = False
    """Whether tasks other than that one run its steps."""
    body_waits: bool = False
    """Whether one of its waits is that of the body of its block."""
    has_run: bool = False
    """Whether a run has begun since the body began to wait: by another task."""

    @property
    def is_waiting(self) -> bool:
        """Whether it moves no step for now."""
        return self.waits > 0 and not (self.body_waits and self.has_run)


class Gate:
    """What all handles of one `GlobalStep` share. Methods may be called from any thread.

    The invariant that makes the stop exact: under a limit, `value` plus one stride for each run
    under way never exceeds it, but for a single run, which may be the one that shows the stride.

    It has fewer than 30 attributes, which CPython keeps within the object: each step looks at many.
    """

    def __init__(self, value: int, name: str, num_workers: float | None) -> None:
        self.name = name
        self.num_workers = num_workers  # that will open, if known; infinite: of many processes
        self.lock = threading.Lock()
        self.value = value
        self.epoch = 0  # how often the step has gone back
        self.limit: int | None = None
        self.stride: int | None = None  # the largest advance of a run that was alone
        self.is_closed = False  # no further run is granted until the last worker has closed
        self.is_final = False  # the step will not move again
        self.published_only = False  # runs do not count; callers of `publish` respect the limit
        self.remote = Remote()  # what is known of other processes that move the step
        self.tickets: set[Ticket] = set()  # of runs under way
        self.void: set[Ticket] = set()  # of runs under way whose step was lost with its epoch
        self.abandoned: set[Ticket] = set()  # of runs whose thread may never end; some have
        self.grants = 0
        self.exclusive: Asker | None = None  # who has the exclusive side
        # the task that holds the exclusive side, and what it does: it may not wait for itself
        self.holder: tuple[object, str] | None = None
        self.askers: deque[Asker] = deque()
        self.kept: tuple[int, Kept | None] = -1, None  # with the step; None: which run is unknown
        self.lone = -1  # the last step that was read after a run which alone may have made it
        # what reads a graph's step, in the thread that asks for it
        self.reader: Callable[[], int | None] | None = None
        self.unread: object | None = None  # the last run that has ended and was not read since
        # a heap by step, then order of asking; the first one waits, others may wait no more
        self.waiters: list[tuple[float, int, Waiter]] = []
        self.num_asked, self.sweep_at = 0, 64
        self.told: tuple[int | None, int] = None, 0  # limit and epoch that watchers know of
        self.workers: dict[Worker, None] = {}  # in order of opening
        self.num_opened = 0
        self.stop = Stop()  # of all workers, also of those that open before the last has closed

    def __repr__(self) -> str:
        is_known = self.num_workers not in (None, math.inf)
        expected = f" of {self.num_workers} expected" if is_known else ""
        limit = "" if self.limit is None else f", limit {self.limit}"
        return (
            f"<GlobalStep {self.name} at {self.value}{limit}, epoch {self.epoch}, "
            f"workers: {len(self.workers)} open, {self.num_opened} opened{expected}>"
        )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change what is here, then wake whomever that concerns."""
        with self.lock:
            yield
            news = self._news()
        for slot, value in news:
            slot.wake(value)
        self.remote.look_again()

    def _news(self) -> News:
        """Who need not wait any longer; with the lock held, after every change."""
        news: News = []
        if self.waiters:
            while self.waiters and self.waiters[0][0] <= self.value:
                news += self._wake([self.waiters[0][2]], self.value)
            if self.told != (self.limit, self.epoch):
                watching = [each for *_, each in self.waiters if each.is_watching]
                news += self._wake(watching, self.value)
            if self.remote.state is SourceState.LOST:
                failing = [each for *_, each in self.waiters if each.fails_on_loss]
                news += self._wake(failing, LOST)
        self.told = self.limit, self.epoch
        while self.askers and (answer := self._answer(self.askers[0].is_exclusive)):
            asker = self.askers.popleft()
            if isinstance(answer, Exception):
                asker.answer = answer
            elif asker.is_exclusive:
                self.exclusive, asker.answer = asker, partial(self._release, asker)
            else:
                asker.answer = self._grant()
            news.append((asker.slot, None))
        # by now those that are due wait no more, and their workers may train
        if self.waiters and not self._may_come():
            news += self._wake([each for *_, each in self.waiters], UNREACHABLE)
        elif self.waiters and self.askers:
            news += self._wake(self._waiting_in_vain(), UNREACHABLE)
        return news

    # --- runs -------------------------------------------------------------------------------------

    def _answer(self, is_exclusive: bool) -> bool | Exception:
        """Whether the first one in the queue goes on; or why it never will."""
        limit, remote = self.limit, self.remote
        if is_exclusive:
            return self._hangs and self.exclusive is None
        if self.is_closed:
            return StopTraining(f"all workers were stopped, and the model is final: {self!r}")
        if limit is None or self.value < limit:
            if self.exclusive is not None:
                return False
            if limit is None or self.published_only:
                return True
            num, stride = len(self.tickets), self.stride
            if remote.needs_credits:
                if remote.has_credit:
                    return True
                if remote.state is SourceState.CLOSED:
                    return StepUnreachableError(
                        f"no step of {self!r} can be run any more: its source is closed, which "
                        "gave the credits below the limit. Keep the source open until the "
                        "sessions have closed."
                    )
                # else no other process is granted those steps either
                if self.value + num * (stride or 1) < limit:
                    return False
            elif self.unread is not None:
                return False
            elif not num or (
                self.value + (num + 1) * (stride or 1) <= limit and (stride or self._hangs)
            ):
                return True
            if not self._hangs:
                return False
            return StopTraining(
                "a run that was left alone in its thread may still bring "
                f"{self.name} to its limit: {self!r}"
            )
        return StopTraining(f"{self.name} has reached its limit: {self!r}")

    @property
    def _hangs(self) -> bool:
        """Whether waiting for the end of the runs under way is in vain."""
        return self.tickets <= self.abandoned

    def _grant(self) -> Ticket:
        self.grants = grants = self.grants + 1
        value = self.value if self.unread is None else None
        ticket = Ticket(self.epoch, value, 0 if self.tickets else grants)
        self.tickets.add(ticket)
        if self.remote.needs_credits and self.limit is not None:
            ticket.terms = self.remote.spend()
        return ticket

    def take_ticket_nowait(self) -> Ticket | None:
        """A ticket, if one is free; None if there is something to wait for.

        Raises:
            StopTraining: the limit is reached, or no run takes a step any more.
            StepUnreachableError: it is not, but other processes grant no more credits.
        """
        with self.lock:
            if self.limit is None and not (self.askers or self.exclusive or self.is_closed):
                return self._grant()
            answer = not self.askers and self._answer(is_exclusive=False)
            ticket = self._grant() if answer is True else None
        if self.remote.needs_credits:
            self._ask_for_credits()
        if isinstance(answer, Exception):
            raise answer
        return ticket

    def _ask_for_credits(self) -> None:
        remote, limit = self.remote, self.limit
        is_below = limit is not None and self.value < limit and not self.is_closed
        if is_below and remote.credits <= remote.low_water:
            remote.look_again()

    async def take_ticket(self, stop: Stop | None = None) -> Ticket:
        """The right to run one step, in order of asking; `settle` it after the run.

        Cancellation safe. It raises as `take_ticket_nowait`, and StopTraining at the stop.
        """
        while True:
            ticket: Ticket = self.take_ticket_nowait() or await self.ask(stop)
            if ticket in self.tickets:
                return ticket
            self.give_back(ticket)  # the step was restarted before this task went on

    async def ask(
        self,
        stop: Stop | None,
        *,
        is_exclusive: bool = False,
        timeout: float | None = None,
        ends_at_stop: bool = True,
    ) -> Any:
        """Stand in the queue for a ticket, or for the exclusive side: for what ends that."""
        engine, holder = current_engine(), self.holder
        if holder is not None and holder[0] is engine.current_task():
            wants = "asks for global_step.exclusive() again" if is_exclusive else "runs a step"
            instead = "leave that out" if is_exclusive else "run the step after it"
            raise RuntimeError(
                f"this task is in {holder[1]} of {self!r}, and {wants}: it would wait for itself, "
                f"for ever. Within {holder[1]} no step of that model runs; {instead}"
            )
        slot = Slot(engine, f"{'all runs' if is_exclusive else 'a ticket'} of {self.name}")
        asker = Asker(slot, is_exclusive, is_bounded=timeout is not None)
        until = math.inf if timeout is None else engine.now() + timeout
        with self.changing():
            self.askers.append(asker)
        try:
            try:
                # a side task's own stop ends it also where none is given
                with EndsAtStop(slot, stop) if ends_at_stop else nullcontext():
                    await engine.park(slot, until)
            finally:
                with self.changing():
                    if asker.answer is None:
                        self.askers.remove(asker)
            if slot.value is STOPPED and not isinstance(asker.answer, Exception):
                what = "runs were under way" if is_exclusive else "waiting to run a step"
                raise StopTraining(f"a stop was requested while {what}: {self!r}")
        except BaseException:  # with an answer, perhaps, that came too late: it is passed on
            if isinstance(asker.answer, Ticket):
                self.give_back(asker.answer)
            elif is_exclusive:
                self._release(asker)
            raise
        if isinstance(asker.answer, Exception):
            raise asker.answer
        if asker.answer is None:
            raise TimeoutError(
                f"the runs that are under way have not ended within {timeout} s: {self!r}"
            )
        return asker.answer

    def _release(self, asker: Asker) -> None:
        with self.changing():
            if self.exclusive is asker:
                self.exclusive = None

    @contextmanager
    def held_here(self, what: str) -> Iterator[None]:
        """Within the block (`what`, for people) the running task has the exclusive side.

        It may not wait for that, nor for a run.
        """
        task = current_engine().current_task()
        holder = self.holder = None if task is None else (task, what)
        try:
            yield
        finally:
            if self.holder is holder:
                self.holder = None

    def settle(
        self, ticket: Ticket, after: int | Sentinel | None = None, kept: Kept | None = None
    ) -> int | None:
        """Give a ticket back with the step after its run, None if it failed; from any thread.

        The step may also be `ADVANCED`, or `UNREAD` if nothing depends on it now.

        Returns:
            The step that the run made; None if it made none that counts, or that is known.
        """
        made: int | None = None
        news: Iterable[tuple[Slot, Any]] = ()
        with self.lock:
            try:
                self.tickets.remove(ticket)
            except KeyError:  # its step was lost, and so was its place
                self.void.discard(ticket)
                after = None
            if after is ADVANCED:
                self.value = made = self.value + 1
            elif isinstance(after, int):
                made = after
                if not self._take_value(made, ticket.epoch, ticket.value):
                    self.unread = ticket
            elif after is not None:  # UNREAD
                self.unread = ticket
            if made is not None:
                was_alone = ticket.was_alone_at == self.grants
                if kept is not None:
                    self._keep(made, kept, is_alone=was_alone)
                # where others move it too, an advance says nothing of the run
                is_shared = self.published_only or self.remote.source is not None
                if was_alone and ticket.value is not None and not is_shared:
                    self.lone, advance = made, made - ticket.value
                    if advance > (self.stride or 0):
                        self.stride = advance
            waiters = self.waiters
            if (
                self.askers
                or (waiters and waiters[0][0] <= self.value)
                or self.epoch != self.told[1]
            ):
                news = self._news()
        for slot, value in news:
            slot.wake(value)
        if self.remote.needs_credits:
            self._ask_for_credits()
        if self.unread is not None and self.is_watched:  # since a moment ago
            self.refresh()
        return made

    def _keep(self, made: int, kept: Kept, *, is_alone: bool) -> None:
        """Keep the outputs of the run that made the present step: the first that comes to it.

        Of runs that were not alone and came to the same step, it is not known which one made it.
        """
        if made == self.value and self.kept[0] != made:
            self.kept = made, kept
        elif made == self.value and not is_alone:
            self.kept = made, None

    def is_made_alone(self, step: int) -> bool:
        """Whether this step, as it was read after a run, can only have been made by that run.

        Also where no session is open: hooks are called by hand.
        """
        return self.lone == step or not self.workers

    def give_back(self, ticket: Ticket) -> None:
        """Give a ticket back whose run has not begun: others may have it."""
        with self.lock:
            if ticket in self.tickets:
                self.remote.refund(ticket.terms)
        self.settle(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """The run of this ticket is not waited for any longer; a thread may still settle it.

        Near the limit others are refused then, rather than waiting for ever; the exclusive side is
        given without it.
        """
        with self.changing():
            self.abandoned = (self.abandoned | {ticket}) & (self.tickets | self.void)

    # --- the value --------------------------------------------------------------------------------

    def publish(self, value: int | Sentinel, epoch: int | None, kept: Kept | None = None) -> None:
        """Take note of a step that was said, perhaps late; one of another epoch is outdated."""
        with self.changing():
            if epoch in (None, self.epoch):
                made = self.value + 1 if isinstance(value, Sentinel) else value
                self.value = max(self.value, made)
                if kept is not None:
                    self._keep(made, kept, is_alone=True)

    def _take_value(self, value: int, epoch: int, before: int | None) -> bool:
        """Take note of a step that was read, since the gate was in this epoch, at another value.

        Where a variable of this process holds the step, it is followed back, too: a read that
        began after the last value was taken is newer than that. Of two that overlapped either may
        be, and so may one that began before the step went back.

        Returns:
            False if it must be read again, to know.
        """
        if epoch != self.epoch:
            return False
        if value < self.value:
            is_shared = self.published_only or self.remote.source is not None
            # once the gate is closed, a model that is brought back is no training: that step stays
            if self.reader is None or is_shared or self.is_closed:
                return True
            if before != self.value:
                return False
            self.epoch += 1  # runs under way go on, and move the step from there
        self.value = value
        return True

    def restart(self, value: int) -> None:
        """Begin a new epoch: the step may have gone back; tickets of the old one are void."""
        with self.changing():
            self.epoch += 1
            self.value = value
            self.kept, self.lone, self.unread = (-1, None), -1, None
            self.void |= self.tickets
            self.tickets.clear()
            self.remote.void_credits()

    @property
    def is_at_limit(self) -> bool:
        """Whether the step has reached its limit, if there is one; without the lock."""
        return self.limit is not None and self.value >= self.limit

    @property
    def is_watched(self) -> bool:
        """Whether a limit or a waiter depends on the step after each run."""
        return self.limit is not None or bool(self.waiters)

    def reread(self) -> None:
        """The step may have moved otherwise than by a run: it is read when it is asked for."""
        self.unread = object()
        if self.is_watched:
            self.refresh()

    def refresh(self) -> None:
        """Read the step of runs that have ended unread; where that fails, the last one stands."""
        is_known = False
        # else others took a value meanwhile, and either may be the newer one
        while (unread := self.unread) is not None and not is_known:
            epoch, before, read, value = self.epoch, self.value, self.reader, None
            try:
                value = None if read is None else read()
            except Exception as error:  # a lost session; its runs raise, too
                logger.info("%s could not be read: %r", self.name, error)
            with self.changing():
                is_known = value is None or self._take_value(value, epoch, before)
                if is_known and self.unread is unread:
                    self.unread = None

    # --- waits ------------------------------------------------------------------------------------

    def wait(self, step: float, waiter: Waiter, slot: Slot, worker: Worker | None = None) -> None:
        """Join those that wait for a step; or wait on in another slot, as a worker from now on."""
        with self.changing():
            waits_on = waiter.slot is not None
            if not waits_on:
                if len(self.waiters) >= self.sweep_at:
                    self.waiters = [each for each in self.waiters if each[2].value is None]
                    heapq.heapify(self.waiters)
                    self.sweep_at = 2 * len(self.waiters) + 64
                self.num_asked += 1
                heapq.heappush(self.waiters, (step, self.num_asked, waiter))
            if waiter.value is None:
                waiter.slot, waiter.worker = slot, worker
                if worker is not None:
                    self._count_wait(worker, 1)
                    worker.body_waits = worker.body_waits or waits_on
            is_alone = worker is not None and self.remote.source is None
            all_wait = is_alone and all(each.is_waiting for each in self.workers)
        if waiter.value is not None:
            slot.wake(waiter.value)
        elif all_wait and not slot.is_woken:
            logger.warning(
                "All open workers wait for %s or another step, which only a worker can bring that "
                "opens later: %r. Let one of them train without that wait (no GlobalStepWaiterHook "
                "in its hooks); with SharedSessionCreator(step, num_workers=...) this is an error",
                slot.what,
                self,
            )

    def leave(self, waiter: Waiter) -> None:
        """A task waits no more; its entry goes when it is the first one, or in a sweep."""
        with self.lock:
            self._wake([waiter], STOPPED)

    def watch(self, slot: Slot, step: float) -> Callable[[], None]:
        """Wake the slot at that step, and when the limit changes or the step goes back.

        It does not count as a wait for a step: the task's session may make its next run. Returns a
        function that ends this.
        """
        waiter = Waiter(is_watching=True)
        self.wait(step, waiter, slot)
        return partial(self.leave, waiter)

    def _wake(self, waiters: Iterable[Waiter], value: Any) -> News:
        """These wait no more, and their workers train from now on, not when their tasks run."""
        news, heap = [], self.waiters
        for waiter in waiters:
            if waiter.value is None:
                waiter.value = value
                if waiter.worker is not None:
                    self._count_wait(waiter.worker, -1)
                news.append((waiter.slot, value))
        while heap and heap[0][2].value is not None:
            heapq.heappop(heap)
        return news

    def _count_wait(self, worker: Worker, change: int) -> None:
        worker.waits += change
        worker.body_waits = worker.body_waits and worker.waits > 0

    def _may_come(self) -> bool:
        """Whether some worker does not wait, or others are expected to open.

        With their number known, until that many have opened; else until one has closed.
        """
        if self.is_final or self.remote.state is SourceState.CLOSED:
            return False
        opened, expected = self.num_opened, self.num_workers
        if opened < expected if expected else opened <= len(self.workers):
            return True
        if not all(each.is_waiting for each in self.workers):
            return True
        # one that timed out, or that was stopped, has been woken and may still train
        return any(
            each.worker is not None and each.slot.is_woken and each.value is None
            for *_, each in self.waiters
        )

    def is_alone(self, worker: Worker) -> bool:
        """Whether this is the only open worker, and no others are announced."""
        return [*self.workers] == [worker] and self.num_opened >= (self.num_workers or 0)

    def _waiting_in_vain(self) -> list[Waiter]:
        """Those that wait in a step for one that comes only after it: all others wait for its end.

        That is, each other worker waits for a step, or stands in the queue until the runs have
        ended that are under way.
        """
        waiting = [each for *_, each in self.waiters if each.value is None]
        in_step = [each for each in waiting if each.worker and each.worker.step]
        if not in_step or self.remote.source or any(each.is_bounded for each in self.askers):
            return []
        num_free = sum(not each.is_waiting for each in self.workers)
        num_left = len(self.tickets - self.abandoned)
        return [] if num_free > len(self.askers) or len(in_step) < num_left else in_step

    def set_waiting(self, worker: Worker, is_waiting: bool) -> None:
        """Record whether an open worker makes no steps for now."""
        with self.changing():
            self._count_wait(worker, 1 if is_waiting else -1)

    # --- workers ----------------------------------------------------------------------------------

    def open(self, engine: Engine | None = None, stop: Stop | None = None) -> Worker:
        """One more session may move the step; its stop is set by what stops all workers."""
        worker = Worker(engine, stop)
        with self.lock:
            if not self.workers:
                self.stop.clear()  # it may have come while the last worker closed
                if self.num_opened >= (self.num_workers or math.inf):
                    self.num_opened = 0  # all that were announced have come and gone: a new round
            self.num_opened += 1
            self.workers[worker] = None
        if stop is not None:
            stop.join(self.stop)
        self.remote.look_again()  # a source may know a limit that the last training has left here
        return worker

    def close(self, worker: Worker) -> None:
        """The session moves the step no more; waits for steps that cannot come now end."""
        with self.changing():
            self._close(worker)

    def drop(self, worker: Worker) -> None:
        """As `close`, for the garbage collector, which may interrupt any code."""
        if not self.lock.acquire(blocking=False):  # perhaps by the code that is interrupted
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self.close, (worker,))  # `Thread` has locks of its own
            return
        try:
            self._close(worker)
            news = self._news()
        finally:
            self.lock.release()
        for slot, value in news:
            slot.engine.wake_from_signal(slot, value)

    def _close(self, worker: Worker) -> None:
        if worker.stop is not None:
            worker.stop.leave()
        self.workers.pop(worker, None)
        if not self.workers:
            # the next one to open begins another training, with a limit of its own
            self.limit, self.is_closed, self.kept = None, False, (-1, None)
            self.remote.void_credits()
            self.stop.clear()

    def stop_all(self, reason: StopReason, apart_from: Stop | None = None) -> StopReason:
        """Stop all open workers, and those that open before the last of them has closed.

        But not the one that has this stop. Returns the first reason, which stays in force.
        """
        if self.workers and not self.stop.is_set:
            level = logging.INFO if reason.error is None else logging.WARNING
            extra = fields(step=self.value, reason=reason)
            logger.log(level, "All workers of %s stop, by %s", self.name, reason, extra=extra)
            self.stop.set(reason, apart_from=apart_from)
        return self.stop.reason or reason

    def close_for_runs(self) -> None:
        """Admit no more runs until the last worker has closed; after all workers were stopped.

        A run whose `before_run` is under way raises StopTraining; a step under way completes, and
        the exclusive side waits for it.
        """
        with self.changing():
            self.is_closed = bool(self.workers)
