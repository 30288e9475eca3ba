"""The gate: which run may make a step now, and who is woken when the step moves.

One lock guards everything that the workers of a model share: the value, the limit, the tickets of
runs under way, the queue of those that ask for one, and the heap of those that wait for a step.
Nothing is called and nobody is woken under it: each change computes its news, which are delivered
after the lock is released. No lock but that of a stop is taken while it is held.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from .._engine.base import STOPPED, TIMED_OUT, Engine, Sentinel, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._errors import StepUnreachableError, StopTraining
from .._log import fields
from .remote import Remote

logger = logging.getLogger("asynchooks")

ADVANCED = Sentinel("ADVANCED")
"""In place of the step after a run: one more than before, as the run alone counts it."""
UNREAD = Sentinel("UNREAD")
"""In place of the step after a run: it may have moved, and is read when it is asked for."""
GRANTED, REFUSED, CUT_OFF = Sentinel("GRANTED"), Sentinel("REFUSED"), Sentinel("CUT_OFF")
"""What an asker is told: go on; the limit is reached; no credits of other processes come."""
UNREACHABLE = Sentinel("UNREACHABLE")
"""What a waiter is woken with when its step can no longer come."""

News = list[tuple[Slot, Any]]
"""Slots to wake, once the lock is released, and with what."""


class Kept(NamedTuple):
    """Outputs of the run that made a step, for a save of that step."""

    outputs: Mapping[str, Any]
    owner: object
    """What computed them: of several models that count on one step, this one."""


class Ticket:
    """The right to run one step, until it is settled."""

    is_settled = is_abandoned = False
    terms = -1  # of the credit that it took from other processes, if any
    lost_in: int | None = None  # how often other processes had forgotten lost runs at its loss

    def __init__(self, epoch: int, value: int | None, was_alone_at: int, num_taken: int) -> None:
        self.epoch = epoch
        self.value = value  # before the run; None where runs have ended unread
        self.was_alone_at = was_alone_at  # which grant it is; 0 if other runs were under way
        self.num_taken = num_taken  # values that the gate had taken when it was granted


class Asker:
    """One place in the gate's queue; `answer` is a ticket, or one of the sentinels."""

    __slots__ = ("answer", "is_exclusive", "slot")

    def __init__(self, slot: Slot, is_exclusive: bool) -> None:
        self.slot = slot
        self.is_exclusive = is_exclusive
        self.answer: Ticket | Sentinel | None = None


class Waiter:
    """One task that waits for a step; `worker` makes no step until this wait ends."""

    __slots__ = ("fails_on_loss", "is_gone", "slot", "value", "worker")

    def __init__(self, slot: Slot, worker: Worker | None, *, fails_on_loss: bool = False) -> None:
        self.slot = slot
        self.worker = worker
        self.fails_on_loss = fails_on_loss
        self.is_gone = False
        self.value: Any = None  # that it was woken with, once it is gone


class Worker:
    """One open session, as the gate sees it: it may still move the step."""

    __slots__ = (
        "body_waits_since",
        "engine",
        "is_running",
        "is_shared",
        "num_runs",
        "step",
        "stop",
        "task",
        "waits",
    )

    def __init__(self, engine: Engine | None = None, stop: Stop | None = None) -> None:
        self.engine = engine
        self.stop = stop
        self.waits = 0  # of its own for a step: during these it moves none
        self.step: Any = None  # the coroutine of the step that it runs, where that is one
        self.task: object | None = None  # which opened it
        self.is_running = False
        self.is_shared = False  # tasks other than that one run its steps
        self.num_runs = 0
        self.body_waits_since = -1  # the run since which its body waits, if that is its own wait

    def is_in_step(self, engine: Engine) -> bool:
        """Whether the running task is within this worker's step, an async one."""
        # a coroutine is running exactly as long as what it awaits does
        return self.engine is engine and getattr(self.step, "cr_running", False)

    def is_in_body(self, engine: Engine) -> bool:
        """Whether the running task is the one that opened it, and no other runs its steps now."""
        is_own = self.task is not None and self.task is engine.current_task()
        return is_own and not (self.is_shared or self.is_running)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another task has begun to run its steps while its body waits."""
        return self.body_waits_since not in (-1, self.num_runs)


class Gate:
    """What all handles of one `GlobalStep` share. Methods may be called from any thread.

    The invariant that makes the stop exact: under a limit, `value` plus one stride for each run
    under way never exceeds it, but for a single run, which may be the one that shows the stride.
    """

    __slots__ = (
        "__weakref__",
        "_described",
        "_num_waiting",
        "_order",
        "_watchers",
        "abandoned",
        "askers",
        "epoch",
        "first_epoch",
        "grants",
        "holder",
        "is_closed",
        "is_exclusive",
        "is_final",
        "is_moved_by_others",
        "kept",
        "limit",
        "lock",
        "lone",
        "name",
        "num_opened",
        "num_taken",
        "num_waiters",
        "num_workers",
        "published_only",
        "read_runs",
        "reader",
        "remote",
        "stop",
        "stride",
        "tickets",
        "training",
        "unread_runs",
        "value",
        "waiters",
        "workers",
    )

    def __init__(self, value: int, name: str, num_workers: float | None) -> None:
        self.name = name
        self.num_workers = num_workers  # that will open, if known; infinite: of many processes
        self.lock = threading.Lock()
        self.value = value
        self.epoch = 0  # how often the step has gone back
        self.first_epoch = 0  # runs that began in it, or later, still move the step
        self.limit: int | None = None
        self.stride: int | None = None  # the largest advance of a run that was alone
        self.is_closed = False  # no further run is granted until the last worker has closed
        self.is_final = False  # the step will not move again
        self.published_only = False  # runs do not count; callers of `publish` respect the limit
        self.is_moved_by_others = False  # than the runs of this process
        self.remote: Remote | None = None  # what is known of other processes that move the step
        self.tickets = 0  # runs under way
        self.abandoned = 0  # of these, the ones whose thread may never end
        self.grants = 0
        self.is_exclusive = False
        # the task that holds the exclusive side, and what it does: it may not wait for itself
        self.holder: tuple[object, str] | None = None
        self.askers: deque[Asker] = deque()
        self.kept: tuple[int, Kept | None] = -1, None  # with the step; None: which run is unknown
        self.lone = -1  # the last step that was read after a run which alone may have made it
        # a graph's step is read when it is asked for: runs that ended unread, and those read since
        self.reader: Callable[[], int | None] | None = None
        self.unread_runs = self.read_runs = 0
        self.num_taken = 0  # values taken, ever: one that was read before the last is no news
        self.waiters: list[tuple[float, int, Waiter]] = []  # a heap by step, then order of asking
        self.num_waiters = 0  # of these, the ones that have not left
        self._order = 0
        self._watchers: list[Slot] = []  # woken when the limit changes, or the step goes back
        self._described = value, f"{name} {value}"
        self.workers: dict[Worker, None] = {}  # in order of opening
        self.num_opened = 0
        self._num_waiting = 0  # open workers that wait themselves
        self.training = object()  # identifies it for all sessions that share it
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
        self._deliver(news)

    def _deliver(self, news: News) -> None:
        for slot, value in news:
            slot.wake(value)
        if self.remote is not None:
            self.remote.look_again()

    def _news(self) -> News:
        """Who need not wait any longer; with the lock held, after every change."""
        news: News = []
        while self.waiters and self.waiters[0][0] <= self.value:
            self._take(heapq.heappop(self.waiters)[2], self.value, news)
        while self.askers:
            asker = self.askers[0]
            answer = self._answer(asker.is_exclusive)
            if answer is None:
                break
            asker.answer = answer
            if answer is GRANTED and asker.is_exclusive:
                self.is_exclusive = True
            elif answer is GRANTED:
                asker.answer = self._grant()
            news.append((self.askers.popleft().slot, None))
        # by now those that are due wait no more, and their workers may train
        if self.num_waiters and not self._may_come():
            for _, _, waiter in sorted(self.waiters):
                self._take(waiter, UNREACHABLE, news)
        return news

    # --- runs -------------------------------------------------------------------------------------

    def _answer(self, is_exclusive: bool) -> Sentinel | None:
        """The answer for whoever is first in the queue; None: wait."""
        if self.limit is None and not (is_exclusive or self.is_exclusive or self.is_closed):
            return GRANTED
        hangs = self.tickets == self.abandoned  # waiting for the end of these is in vain
        if is_exclusive:
            return GRANTED if hangs and not self.is_exclusive else None
        limit, remote = self.limit, self.remote
        if self.is_closed or (limit is not None and self.value >= limit):
            return REFUSED
        if self.is_exclusive:
            return None
        if limit is None or self.published_only:
            return GRANTED
        if remote is not None and remote.needs_credits:
            if remote.has_credit:
                return GRANTED
            if remote.is_closed:
                return CUT_OFF
            # no other process is granted those steps either
            is_last = hangs and self.value + self.tickets * (self.stride or 1) >= limit
            return REFUSED if is_last else None
        if self.unread_runs != self.read_runs:
            return None
        if not self.tickets or (self.stride is None and hangs):
            return GRANTED
        if self.stride is None:
            return None
        if self.value + (self.tickets + 1) * self.stride <= limit:
            return GRANTED
        return REFUSED if hangs else None

    def _grant(self) -> Ticket:
        self.grants = grants = self.grants + 1
        value = self.value if self.unread_runs == self.read_runs else None
        ticket = Ticket(self.epoch, value, 0 if self.tickets else grants, self.num_taken)
        self.tickets += 1
        if self.remote is not None and self.limit is not None:
            ticket.terms = self.remote.spend()
        return ticket

    def take_ticket_nowait(self) -> Ticket | None:
        """A ticket, if one is free; None if there is something to wait for.

        Raises:
            StopTraining: the limit is reached, or no run takes a step any more.
            StepUnreachableError: it is not, but other processes grant no more credits.
        """
        answer = ticket = None
        with self.lock:
            if not self.askers:
                is_free = self.limit is None and not (self.is_exclusive or self.is_closed)
                answer = GRANTED if is_free else self._answer(is_exclusive=False)
                if answer is GRANTED:
                    ticket = self._grant()
        if self.remote is not None:
            self._ask_for_credits(self.remote)
        if ticket is None and answer is not None:
            raise self._refusal(answer)
        return ticket

    def _ask_for_credits(self, remote: Remote) -> None:
        is_below = self.limit is not None and self.value < self.limit and not self.is_closed
        if remote.is_short and is_below:
            remote.look_again()

    async def take_ticket(self, stop: Stop | None = None) -> Ticket:
        """The right to run one step, in order of asking; `settle` it after the run.

        Cancellation safe. It raises as `take_ticket_nowait`, and StopTraining at the stop.
        """
        ticket = self.take_ticket_nowait()
        if ticket is not None:
            return ticket
        answer = (await self._ask(is_exclusive=False, stop=stop)).answer
        if isinstance(answer, Ticket):
            if answer.epoch >= self.first_epoch:
                return answer
            self.give_back(answer)  # the step was restarted before this task went on
            return await self.take_ticket(stop)
        if answer is not None:
            raise self._refusal(answer)
        raise StopTraining(f"a stop was requested while waiting to run a step of {self.name}")

    def _refusal(self, answer: Sentinel) -> Exception:
        if answer is CUT_OFF:
            return StepUnreachableError(
                f"no step of {self!r} can be run any more: its source is closed, which gave the "
                "credits below the limit. Keep the source open until the sessions have closed."
            )
        if self.is_closed:
            return StopTraining(f"all workers were stopped, and the model is final: {self!r}")
        return StopTraining(f"{self.name} has reached its limit: {self!r}")

    async def take_exclusive(
        self, *, stop: Stop | None = None, timeout: float | None = None, ends_at_stop: bool = True
    ) -> Callable[[], None]:
        """Wait until no run is under way; returns what lets runs go on, from any thread."""
        asker = await self._ask(
            is_exclusive=True, stop=stop, timeout=timeout, ends_at_stop=ends_at_stop
        )
        if asker.answer is None and asker.slot.value is STOPPED:
            raise StopTraining(f"a stop was requested while runs were under way: {self!r}")
        if asker.answer is None:
            raise TimeoutError(
                f"the runs that are under way have not ended within {timeout} s: {self!r}"
            )
        return self._releasing(asker)

    def _releasing(self, asker: Asker) -> Callable[[], None]:
        def release() -> None:
            with self.changing():
                if asker.answer is GRANTED:
                    asker.answer, self.is_exclusive = None, False

        return release

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

    def _refuse_to_wait_for_itself(self, engine: Engine, *, is_exclusive: bool) -> None:
        holder = self.holder
        if holder is None or holder[0] is not engine.current_task():
            return
        wants = "asks for global_step.exclusive() again" if is_exclusive else "runs a step"
        instead = "leave that out" if is_exclusive else "run the step after it"
        raise RuntimeError(
            f"this task is in {holder[1]} of {self!r}, and {wants}: it would wait for itself, for "
            f"ever. Within {holder[1]} no step of that model runs; {instead}"
        )

    async def _ask(
        self,
        *,
        is_exclusive: bool,
        stop: Stop | None,
        timeout: float | None = None,
        ends_at_stop: bool = True,
    ) -> Asker:
        """Stand in the queue until there is an answer, or a stop, or the time is over."""
        engine = current_engine()
        self._refuse_to_wait_for_itself(engine, is_exclusive=is_exclusive)
        slot = Slot(engine, f"{'all runs' if is_exclusive else 'a ticket'} of {self.name}")
        asker = Asker(slot, is_exclusive)
        until = math.inf if timeout is None else engine.now() + timeout
        with self.changing():
            self.askers.append(asker)
        try:
            # a side task's own stop ends it also where none is given
            with EndsAtStop(slot, stop) if ends_at_stop else nullcontext():
                await engine.park(slot, until)
        except BaseException:
            self._withdraw(asker)
            raise
        if slot.value in (STOPPED, TIMED_OUT):  # the answer may have come all the same
            with self.changing():
                if asker.answer is None:
                    self.askers.remove(asker)
        return asker

    def _withdraw(self, asker: Asker) -> None:
        """A task that asked was cancelled, perhaps after the answer: that is passed on."""
        with self.changing():
            if asker.answer is None:
                self.askers.remove(asker)
            elif isinstance(asker.answer, Ticket):
                self._take_back(asker.answer)
            elif asker.is_exclusive:
                self.is_exclusive = False

    def settle(
        self, ticket: Ticket, after: int | Sentinel | None = None, kept: Kept | None = None
    ) -> int | None:
        """Give a ticket back with the step after its run, None if it failed; from any thread.

        The step may also be `ADVANCED`, or `UNREAD` if nothing depends on it now.

        Returns:
            The step that the run made; None if it made none that counts, or that is known.
        """
        with self.lock:
            epoch = self.epoch
            made = self._settle(ticket, after, kept)
            news: News | tuple[()] = ()
            waiters = self.waiters
            if self.askers or (waiters and waiters[0][0] <= self.value) or epoch != self.epoch:
                news = self._news_of_epoch(epoch)
        for slot, value in news:
            slot.wake(value)
        if self.remote is not None:
            self._ask_for_credits(self.remote)
        if self.unread_runs != self.read_runs and self.is_watched:  # since a moment ago
            self.refresh()
        return made

    def _news_of_epoch(self, before: int) -> News:
        news = self._news()
        return news if before == self.epoch else news + self._take_watchers()

    def _settle(
        self, ticket: Ticket, after: int | Sentinel | None, kept: Kept | None = None
    ) -> int | None:
        if ticket.is_settled:
            return None
        ticket.is_settled = True
        if ticket.epoch < self.first_epoch:  # its step was lost, and so was its place
            if self.remote is not None:
                self.remote.forget_void(ticket.epoch, ticket.lost_in)
            return None
        self.tickets -= 1
        if ticket.is_abandoned:
            self.abandoned -= 1
        if after is ADVANCED:
            self.value = made = self.value + 1
        elif after is None:
            return None
        elif isinstance(after, Sentinel):  # UNREAD
            self.unread_runs += 1
            return None
        else:
            made = after
            if not self._take_value(made, ticket.epoch, ticket.num_taken):
                self.unread_runs += 1
        was_alone = ticket.was_alone_at == self.grants
        if kept is not None:
            self._keep(made, kept, is_alone=was_alone)
        # where others move it too, an advance says nothing of the run
        if was_alone and ticket.value is not None and not self.is_moved_by_others:
            self.lone, advance = made, made - ticket.value
            if advance > (self.stride or 0):
                self.stride = advance
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
        with self.changing():
            self._take_back(ticket)

    def _take_back(self, ticket: Ticket) -> None:
        self._settle(ticket, None)
        if self.remote is not None:
            self.remote.refund(ticket.terms)

    def abandon(self, ticket: Ticket) -> None:
        """The run of this ticket is not waited for any longer; a thread may still settle it.

        Near the limit others are refused then, rather than waiting for ever; the exclusive side is
        given without it.
        """
        with self.changing():
            if ticket.is_settled or ticket.is_abandoned:
                return
            ticket.is_abandoned = True
            ticket.lost_in = 0 if self.remote is None else self.remote.num_forgets
            if ticket.epoch >= self.first_epoch:
                self.abandoned += 1
            elif self.remote is not None:
                self.remote.num_lost += 1

    # --- the value --------------------------------------------------------------------------------

    def publish(self, value: int | Sentinel, epoch: int | None, kept: Kept | None = None) -> None:
        """Take note of a step that was said, perhaps late; one of another epoch is outdated."""
        with self.changing():
            if epoch not in (None, self.epoch):
                return
            made = self.value + 1 if isinstance(value, Sentinel) else value
            self.value = max(self.value, made)
            self.num_taken += 1
            if kept is not None:
                self._keep(made, kept, is_alone=True)

    def _take_value(self, value: int, epoch: int, num_taken: int) -> bool:
        """Take note of a step that was read, in this epoch and since so many values were taken.

        Where a variable of this process holds the step, it is followed back, too: a read that
        began after the last value was taken is newer than that. Of two that overlapped either may
        be, and so may one that began before the step went back.

        Returns:
            False if it must be read again, to know.
        """
        goes_back = value < self.value
        # once the gate is closed, a model that is brought back is no training: that step stays
        if self.reader is None or self.is_moved_by_others or self.is_closed:
            if goes_back:
                return True
        elif epoch != self.epoch or (goes_back and num_taken != self.num_taken):
            return False
        elif goes_back:
            self.epoch += 1  # runs under way go on, and move the step from there
        self.value = value
        self.num_taken += 1
        return True

    def restart(self, value: int) -> None:
        """Begin a new epoch: the step may have gone back; tickets of the old one are void."""
        with self.lock:
            if self.remote is not None:
                self.remote.restarted(self.tickets, self.abandoned)
            self.epoch += 1
            self.first_epoch = self.epoch
            self.value = value
            self.kept, self.lone = (-1, None), -1
            self.num_taken += 1
            self.read_runs = self.unread_runs
            self.tickets = self.abandoned = 0
            news = self._news() + self._take_watchers()
        self._deliver(news)

    def raise_limit(self, step: int) -> None:
        """Start no run that could move the step beyond `step`; the largest limit applies."""
        with self.lock:
            self.limit = step if self.limit is None else max(self.limit, step)
            news = self._news() + self._take_watchers()
        self._deliver(news)
        if self.unread_runs != self.read_runs:
            self.refresh()

    @property
    def is_at_limit(self) -> bool:
        """Whether the step has reached its limit, if there is one; without the lock."""
        return self.limit is not None and self.value >= self.limit

    @property
    def is_watched(self) -> bool:
        """Whether a limit or a waiter depends on the step after each run."""
        return self.limit is not None or self.num_waiters > 0

    def read_by(
        self,
        read: Callable[[], int | None] | None,
        instead_of: Callable[[], int | None] | None = None,
    ) -> None:
        """Have the step of unread runs read by this function, in the thread that asks for it.

        If it is to replace a function that is not the present one, nothing changes.
        """
        if instead_of is None or self.reader == instead_of:
            self.reader = read

    def reread(self) -> None:
        """The step may have moved otherwise than by a run: it is read when it is asked for."""
        with self.lock:
            self.unread_runs += 1
        if self.is_watched:
            self.refresh()

    def refresh(self) -> None:
        """Read the step of runs that have ended unread; where that fails, the last one stands."""
        while not self._read_once():
            pass  # others took a value meanwhile, and either may be the newer one

    def _read_once(self) -> bool:
        with self.lock:
            seen, epoch, num_taken = self.unread_runs, self.epoch, self.num_taken
            read = self.reader if seen != self.read_runs else None
        value = None
        try:
            if read is not None:
                value = read()
        except Exception as error:  # a lost session; its runs raise, too
            logger.info("%s could not be read: %r", self.name, error)
        with self.lock:
            before, is_known = self.epoch, True
            if value is not None and epoch >= self.first_epoch:
                is_known = self._take_value(value, epoch, num_taken)
            if is_known:
                self.read_runs = max(self.read_runs, seen)
            news = self._news_of_epoch(before)
        self._deliver(news)
        return is_known

    # --- waits ------------------------------------------------------------------------------------

    def description(self, step: int) -> str:
        """What a slot waits for, in words. Waiters of a step share one text."""
        if self._described[0] != step:
            self._described = step, f"{self.name} {step}"
        return self._described[1]

    def wait(self, step: float, waiter: Waiter) -> None:
        """Join those that wait for a step."""
        with self.changing():
            heapq.heappush(self.waiters, (step, self._order, waiter))
            self._order += 1
            self.num_waiters += 1
            if waiter.worker is not None:
                self._count_wait(waiter.worker, 1)
        self._warn_if_all_wait(waiter)

    def wait_as_worker(self, waiter: Waiter, slot: Slot, worker: Worker | None) -> bool:
        """A waiter goes on to wait in another slot, from now on as the worker, if there is one.

        Returns False if it was woken at this very moment.
        """
        with self.changing():
            if waiter.is_gone:
                return False
            waiter.slot = slot
            if worker is not None:
                waiter.worker, worker.body_waits_since = worker, worker.num_runs
                self._count_wait(worker, 1)
        self._warn_if_all_wait(waiter)
        return True

    def _warn_if_all_wait(self, waiter: Waiter) -> None:
        """One more worker waits, and none of those that are open is left to bring its step."""
        is_fed = self.remote is not None and self.remote.source is not None
        if waiter.worker is None or waiter.slot.is_woken or is_fed:
            return
        with self.lock:
            all_wait = self._all_wait()
        if all_wait:
            what = waiter.slot.what
            logger.warning("All open workers wait for %s or another step: %r", what, self)

    def leave(self, waiter: Waiter) -> None:
        """A task waits no more; its entry goes when it would be due, or when half are gone."""
        with self.lock:
            self._take(waiter, None, [])
            if self.num_waiters < len(self.waiters) // 2:
                self.waiters = [entry for entry in self.waiters if not entry[2].is_gone]
                heapq.heapify(self.waiters)

    def watch(self, slot: Slot, step: float) -> Callable[[], None]:
        """Wake the slot at that step, and when the limit changes or the step goes back.

        It does not count as a wait for a step: the task's session may make its next run. Returns a
        function that ends this.
        """
        waiter = Waiter(slot, None)
        with self.lock:
            self._watchers.append(slot)
        self.wait(step, waiter)

        def forget() -> None:
            self.leave(waiter)
            with self.lock:
                if slot in self._watchers:
                    self._watchers.remove(slot)

        return forget

    def _take_watchers(self) -> News:
        watchers, self._watchers = self._watchers, []
        return [(slot, self.value) for slot in watchers]

    def take_failing(self, value: Sentinel) -> News:
        """Those that end where no news of other processes arrive; with the lock held."""
        news: News = []
        for _, _, waiter in sorted(self.waiters):
            if waiter.fails_on_loss:
                self._take(waiter, value, news)
        return news

    def _take(self, waiter: Waiter, value: Any, news: News) -> None:
        """The waiter waits no more; its entry may stay in the heap."""
        if waiter.is_gone:
            return
        waiter.is_gone, waiter.value = True, value
        self.num_waiters -= 1
        if waiter.worker is not None:  # at once, not when its task runs: it trains from now on
            self._count_wait(waiter.worker, -1)
        news.append((waiter.slot, value))

    def _count_wait(self, worker: Worker, change: int) -> None:
        was_waiting = worker.waits > 0
        worker.waits += change
        if worker.waits == 0:
            worker.body_waits_since = -1
        if worker in self.workers:
            self._num_waiting += (worker.waits > 0) - was_waiting

    def _all_wait(self) -> bool:
        """Whether every open worker waits itself."""
        if self._num_waiting != len(self.workers):
            return False
        return not any(worker.runs_elsewhere for worker in self.workers)

    def _may_come(self) -> bool:
        """Whether some worker does not wait, or others are expected to open.

        With their number known, until that many have opened; else until one has closed.
        """
        if self.is_final or (self.remote is not None and self.remote.is_closed):
            return False
        if not self._all_wait():
            return True
        opened, expected = self.num_opened, self.num_workers
        if opened < expected if expected else opened <= len(self.workers):
            return True
        # one that timed out, or that was stopped, has been woken and may still train
        return any(
            each.worker is not None and each.slot.is_woken
            for _, _, each in self.waiters
            if not each.is_gone
        )

    def is_alone(self, worker: Worker) -> bool:
        """Whether this is the only open worker, and no others are announced."""
        is_only = len(self.workers) == 1 and worker in self.workers
        return is_only and self.num_opened >= (self.num_workers or 0)

    def finish(self) -> None:
        """The step will not move again: current and later waits for it end."""
        with self.changing():
            self.is_final = True

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
        return worker

    def close(self, worker: Worker) -> None:
        """The session moves the step no more; waits for steps that cannot come now end."""
        with self.lock:
            news = self._close(worker)
        self._deliver(news)

    def drop(self, worker: Worker) -> None:
        """As `close`, for the garbage collector, which may interrupt any code."""
        if not self.lock.acquire(blocking=False):  # perhaps by the code that is interrupted
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self.close, (worker,))  # `Thread` has locks of its own
            return
        try:
            news = self._close(worker)
        finally:
            self.lock.release()
        for slot, value in news:
            slot.engine.wake_from_signal(slot, value)

    def _close(self, worker: Worker) -> News:
        if worker.stop is not None:
            worker.stop.leave()
        if worker in self.workers:
            del self.workers[worker]
            self._num_waiting -= worker.waits > 0
        if not self.workers:
            # the next one to open begins another training, with a limit of its own
            self.limit, self.is_closed, self.kept = None, False, (-1, None)
            if self.remote is not None:
                self.remote.void_credits()
            self.stop.clear()
        return self._news()

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
