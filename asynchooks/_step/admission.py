"""Admission: admits and settles the runs of one counter, for tasks and threads.

It calls no backend and waits for no step.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from .._engine.base import STOPPED, TIMED_OUT, Engine, Sentinel, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop
from .._engine.sync import NO_LOCK, CallLock
from .._errors import StepUnreachableError, StopTraining
from .gate import ADVANCED, Answer, Asker, Gate, Ticket
from .gate import After as After
from .source import Demand, SourceState, StepSource
from .waiters import Waiters

logger = logging.getLogger("asynchooks")


UNREACHABLE = Sentinel("UNREACHABLE")
"""What a waiter is woken with when its step can no longer come."""
LOST = Sentinel("LOST")
"""What one that `fails_on_loss` is woken with when no updates of other processes arrive."""


@dataclass(frozen=True)
class GlobalStepStatistics:
    """What a `GlobalStep` holds at one moment; all counts, in steps or tasks.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=3)], creator) as session:
            await session.run("loss")
            statistics = session.global_step.statistics()
            assert (statistics.value, statistics.limit) == (1, 3)
    """

    value: int
    """The step."""
    epoch: int
    """How often the step has gone back: by a restore, or with a graph's variable."""
    limit: int | None
    """The step that no run may lead beyond; None without a limit."""
    stride: int | None
    """By how much one run moves the step, at most; None before it is known."""
    tickets: int
    """Runs under way that need a ticket."""
    tasks_waiting_for_step: int
    """Tasks in `wait_for`."""
    tasks_waiting_for_ticket: int
    """Runs that wait to begin."""
    is_exclusive: bool
    """Whether an exclusive block is open, or waits to be."""
    workers_opened: int
    """Sessions that have been opened, ever."""
    workers_open: int
    """Sessions that are open."""
    source: SourceState | None
    """Whether updates of other processes arrive; None where no other process moves the step."""


class Admission:
    """What all handles of one `GlobalStep` share: gate, waiters, and the lock that guards both.

    The step makes it; a session takes it from there, for its runs. A step on the event loop of
    all workers stands between `begin_here` and `end_here`; any other needs a ticket, which is
    settled after it. Methods may be called from any thread.
    """

    __slots__ = (
        "_described", "_told_epoch", "acquire", "gate", "lock", "name", "release", "waiters",
    )  # fmt: skip

    def __init__(self, value: int, name: str, num_workers: float | None) -> None:
        self.name = name
        self.lock = threading.Lock()
        # half as dear as `with`, in what every step does
        self.acquire, self.release = self.lock.acquire, self.lock.release
        self.gate = Gate(value)
        self.waiters = Waiters(num_workers)
        self._described = value, f"{name} {value}"
        self._told_epoch = 0  # of which the slots of `watch_next` know

    def __repr__(self) -> str:  # as the step, in logs and errors
        gate, waiters = self.gate, self.waiters
        is_known = waiters.num_workers not in (None, math.inf)
        expected = f" of {waiters.num_workers} expected" if is_known else ""
        limit = "" if gate.limit is None else f", limit {gate.limit}"
        return (
            f"<GlobalStep {self.name} at {gate.value}{limit}, epoch {gate.epoch}, "
            f"workers: {len(waiters.workers)} open, {waiters.opened} opened{expected}>"
        )

    def description(self, step: int) -> str:
        """What a slot waits for, in words; with the lock held. Waiters of a step share one text."""
        if self._described[0] != step:
            self._described = step, f"{self.name} {step}"
        return self._described[1]

    def news(self) -> list[tuple[Slot, object]]:
        """What to wake in the present state; with the lock held, after every change."""
        gate = self.gate
        news: list[tuple[Slot, object]] = []
        if self.waiters.next_step <= gate.value:
            news = [(each.slot, gate.value) for each in self.waiters.take_due(gate.value)]
        if gate.askers:
            news += [(each.slot, each.answer) for each in gate.answer_askers()]
        if self._told_epoch != gate.epoch:
            self._told_epoch = gate.epoch
            news += [(slot, gate.value) for slot in self.waiters.restart_slots]
            self.waiters.restart_slots.clear()
        gate.find_free()
        return news

    @contextmanager
    def change(self) -> Iterator[Gate]:
        """Change the gate under the lock, and wake the tasks that this concerns."""
        with self.lock:
            yield self.gate
            news = self.news()
        wake_all(news)

    def restart(self, value: int) -> None:
        """Begin a new epoch at a value, and wake the tasks that this concerns."""
        with self.change() as gate:
            gate.restart(value)

    def watch_next(self, slot: Slot) -> Callable[[], None]:
        """Wake the slot when the step moves, or goes back; returns a function that ends this.

        It does not count as a wait for a step.
        """
        if self.gate.is_unread:
            self.refresh()
        with self.lock:
            waiter = self.waiters.add(self.gate.value + 1, slot, None)
            self.waiters.restart_slots.append(slot)
        if self.gate.source is not None:
            self.gate.source.look_again()

        def forget() -> None:
            with self.lock:
                self.waiters.leave(waiter)
                if slot in self.waiters.restart_slots:
                    self.waiters.restart_slots.remove(slot)

        return forget

    def look_again(self) -> None:
        """Notify the source, if there is one, when credits run short; without the lock."""
        source = self.gate.source
        if source is not None and self.gate.is_short:
            source.look_again()

    @property
    def is_running_here(self) -> bool:
        """Whether a step without a ticket is under way."""
        return self.gate.is_running_here

    def begin_here(self, call_lock: CallLock = NO_LOCK) -> int | None:
        """Begin a step on the event loop of all workers without a ticket; `end_here` ends it.

        It takes no lock: an asker from elsewhere sees `is_running_here`, or is seen. (All that is
        so under the GIL. The lock took an eighth of a run.)

        Args:
            call_lock: says that no other call is under way that the step must not overlap.

        Returns:
            The epoch that the step counts in; None if it has to wait, for a ticket or for others.
        """
        gate = self.gate
        if not gate.is_free or (gate.limit is not None and not gate.is_far_from_limit()):
            return None
        gate.is_running_here = True
        epoch = gate.epoch
        # another thread joined the queue meanwhile, and may wait for the end of this step
        if not gate.is_free or not call_lock.is_free:
            with self.change():
                gate.is_running_here = False
            return None
        if gate.tickets:
            gate.value_here = None
            gate.grants += 1  # those are not alone any more
        else:
            gate.value_here = gate.value if gate.unread_runs == gate.read_runs else None
        gate.taken_here = gate.num_taken
        return epoch

    def end_here(self, epoch: int, after: After | None) -> int | None:
        """Settle a step that `begin_here` began, with the step after it, None if it failed.

        Returns what `settle` does.

        A step that only counts takes no lock: askers and waiters have joined before they look at
        the value, and this looks for them after it has moved it; between the look at the epoch and
        the sum no other thread can run.
        """
        gate = self.gate
        if after is ADVANCED and gate.stride and epoch == gate.epoch:
            gate.value = made = gate.value + 1  # as `move`; first, as until then the run counts
            gate.is_running_here = False
            if gate.askers or self.waiters.next_step <= made:
                with self.lock:
                    news = self.news()
                wake_all(news)
            return made
        self.acquire()
        try:
            gate.is_running_here = False
            moved = gate.move(epoch, gate.taken_here, gate.value_here, after)
            is_due = gate.askers or self.waiters.next_step <= gate.value
            news = self.news() if is_due or gate.epoch != self._told_epoch else []
        finally:
            self.release()
        if news:
            wake_all(news)
        if gate.unread_runs != gate.read_runs and self.is_watched:  # since a moment ago
            self.refresh()
        return moved

    def suspend_here(self, epoch: int, spare: Ticket | None = None) -> Ticket:
        """A ticket to settle, for a step that `begin_here` began and that is a coroutine.

        `spare` is as of `take_ticket_nowait`.
        """
        gate = self.gate
        with self.lock:  # it goes on while others run
            gate.is_running_here = False
            return Ticket(epoch) if epoch < gate.first_epoch else gate.grant(spare)

    def take_ticket_nowait(self, spare: Ticket | None = None) -> Ticket | None:
        """A ticket, if one is free; None if there is something to wait for.

        Args:
            spare: the caller's last ticket, to be used again if it is settled: one object for all
                steps of a session.

        Raises:
            StopTraining: the limit is reached, or no run takes a step any more.
            StepUnreachableError: it is not, but the source grants no more credits.
        """
        gate = self.gate
        self.acquire()
        try:
            is_open = gate.limit is None and not (gate.is_exclusive or gate.is_closed)
            answer = Answer.GRANTED if is_open else gate.decide(is_exclusive=False)
            if answer is Answer.GRANTED and not gate.askers:
                return gate.grant(spare)
        finally:
            self.release()
            if gate.needs_credits:
                self.look_again()
        if answer in (Answer.REFUSED, Answer.CUT_OFF):
            raise self._refusal(answer)
        return None

    async def take_ticket(self, stop: Stop | None = None) -> Ticket:
        """The right to run one step, in order of asking; `settle` it after the run.

        Cancellation safe. It raises as `take_ticket_nowait`, and StopTraining at the stop.
        """
        ticket = self.take_ticket_nowait()
        if ticket is not None:
            return ticket
        asker = await self._ask(is_exclusive=False, stop=stop)
        if asker.answer in (Answer.REFUSED, Answer.CUT_OFF):
            raise self._refusal(asker.answer)
        if asker.ticket is None:
            raise StopTraining(f"a stop was requested while waiting to run a step of {self.name}")
        return asker.ticket

    def _refusal(self, answer: Answer) -> Exception:
        if answer is Answer.REFUSED and self.gate.is_closed:
            return StopTraining(f"all workers were stopped, and the model is final: {self!r}")
        if answer is Answer.REFUSED:
            return StopTraining(f"{self.name} has reached its limit: {self!r}")
        return StepUnreachableError(
            f"no step of {self!r} can be run any more: its source is closed, which gave the "
            "credits below the limit. Keep the source open until the sessions have closed."
        )

    def settle(self, ticket: Ticket, value: After | None = None) -> int | None:
        """Give a ticket back with the step read after the run, None if it failed.

        The step may also be `ADVANCED`, or `UNREAD` if nothing depends on it now.

        Returns:
            The step that the run made; None if it made none that counts, or that is known.
        """
        gate = self.gate
        self.acquire()
        try:
            made = gate.settle(ticket, value)
            is_due = gate.askers or self.waiters.next_step <= gate.value
            news = self.news() if is_due or gate.epoch != self._told_epoch else ()
        finally:
            self.release()
        if news:
            wake_all(news)
        if gate.needs_credits and gate.askers:  # the credit of a failed run is free again
            self.look_again()
        if gate.unread_runs != gate.read_runs and self.is_watched:  # since a moment ago
            self.refresh()
        return made

    def give_back(self, ticket: Ticket) -> None:
        """Give a ticket back whose run has not begun: others may have it."""
        with self.change() as gate:
            gate.take_back(ticket)
        self.look_again()

    def abandon(self, ticket: Ticket) -> None:
        """The run of this ticket is not waited for any longer; a thread may still settle it.

        Near the limit others are refused then, rather than waiting for ever; `take_exclusive` goes
        ahead without it.
        """
        with self.change() as gate:
            gate.abandon(ticket)
        self.look_again()

    @property
    def is_watched(self) -> bool:
        """Whether a limit or a waiter depends on the step after each run."""
        return self.gate.limit is not None or self.waiters.next_step < math.inf

    def is_made_alone(self, step: int) -> bool:
        """Whether this step, as it was read after a run, can only have been made by that run.

        Also where no session is open: hooks are called by hand.
        """
        return self.gate.lone == step or not self.waiters.workers

    def read_by(
        self,
        read: Callable[[], int | None] | None,
        instead_of: Callable[[], int | None] | None = None,
    ) -> None:
        """Have the step of unread runs read by this function, in the thread that asks for it.

        If it is to replace a function that is not the present one, nothing changes.
        """
        if instead_of is None or self.gate.reader == instead_of:
            self.gate.reader = read

    def reread(self) -> None:
        """The step may have moved otherwise than by a run: it is read when it is asked for."""
        with self.lock:
            self.gate.unread_runs += 1
        if self.is_watched:
            self.refresh()

    def refresh(self) -> None:
        """Read the step of runs that have ended unread; where that fails, the last one stands."""
        while not self._read_once():
            pass  # others took a value meanwhile, and either may be the newer one

    def _read_once(self) -> bool:
        gate = self.gate
        with self.lock:
            seen, epoch, num_taken = gate.unread_runs, gate.epoch, gate.num_taken
            read = gate.reader if gate.is_unread else None
        value = None
        try:
            if read is not None:
                value = read()
        except Exception as error:  # a lost session; its runs raise, too
            logger.info("%s could not be read: %r", self.name, error)
        with self.change():
            if epoch < gate.first_epoch or value is None:
                is_known = True
            else:
                is_known = gate.take(value, epoch, num_taken)
            if is_known:
                gate.read_runs = max(gate.read_runs, seen)
        return is_known

    async def take_exclusive(
        self, *, stop: Stop | None, timeout: float | None, ends_at_stop: bool
    ) -> Callable[[], None]:
        """Wait until no run is under way; returns what lets runs go on, from any thread."""
        asker = await self._ask(
            is_exclusive=True, stop=stop, timeout=timeout, ends_at_stop=ends_at_stop
        )
        if asker.slot.value is STOPPED and asker.answer is not Answer.GRANTED:
            raise StopTraining(f"a stop was requested while runs were under way: {self!r}")
        if asker.answer is not Answer.GRANTED:
            raise TimeoutError(
                f"the runs that are under way have not ended within {timeout} s: {self!r}"
            )
        is_taken = True

        def release() -> None:
            nonlocal is_taken
            with self.change() as gate:
                if is_taken:
                    is_taken = gate.is_exclusive = False
            self.look_again()  # the queue may have taken the last credits

        return release

    @contextmanager
    def held_here(self, what: str) -> Iterator[None]:
        """Within the block (`what`, for people) the running task has the exclusive side.

        It may not wait for that, nor for a run.
        """
        gate, task = self.gate, current_engine().current_task()
        holder = gate.holder = None if task is None else (task, what)
        try:
            yield
        finally:
            if gate.holder is holder:
                gate.holder = None

    async def _ask(
        self,
        *,
        is_exclusive: bool,
        stop: Stop | None,
        timeout: float | None = None,
        ends_at_stop: bool = True,
    ) -> Asker:
        """Stand in the gate's queue until there is an answer, or time, or a stop."""
        engine = current_engine()
        self._refuse_to_wait_for_itself(engine, is_exclusive=is_exclusive)
        what = f"{'all runs' if is_exclusive else 'a ticket'} of {self.name}"
        asker = Asker(Slot(engine, what), is_exclusive)
        with self.change() as gate:
            gate.askers.append(asker)
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            self.look_again()
            with EndsAtStop(asker.slot, stop) if ends_at_stop else nullcontext():
                await engine.park(asker.slot, until)
        except BaseException:
            self._withdraw(asker, give_back=True)
            raise
        if asker.slot.value in (STOPPED, TIMED_OUT):
            self._withdraw(asker, give_back=False)
        return asker

    def _withdraw(self, asker: Asker, *, give_back: bool) -> None:
        """Leave the queue; what was granted meanwhile is passed on, if it is not wanted."""
        with self.change() as gate:
            if asker.answer is Answer.WAIT:
                gate.askers.remove(asker)
            elif give_back and asker.ticket is not None:
                gate.take_back(asker.ticket)
            elif give_back and asker.answer is Answer.GRANTED:
                gate.is_exclusive = False
        self.look_again()

    def _refuse_to_wait_for_itself(self, engine: Engine, *, is_exclusive: bool) -> None:
        """Raise RuntimeError in the task that holds the exclusive side: see `held_here`."""
        holder = self.gate.holder
        if holder is None or holder[0] is not engine.current_task():
            return
        wants = "asks for global_step.exclusive() again" if is_exclusive else "runs a step"
        instead = "leave that out" if is_exclusive else "run the step after it"
        raise RuntimeError(
            f"this task is in {holder[1]} of {self!r}, and {wants}: it would wait for itself, for "
            f"ever. Within {holder[1]} no step of that model runs; {instead}"
        )

    def feed_from(
        self, source: StepSource | None, stride: int, instead_of: StepSource | None
    ) -> None:
        state = None if source is None else SourceState.LIVE
        with self.lock:
            if instead_of not in (None, self.gate.source):
                return
            self.gate.feed_from(source, stride)
            news, before = self._change_source_state(state)
        self._log_source_state(before, state)
        wake_all(news)
        if source is not None:
            source.look_again()

    def set_source_state(
        self, state: SourceState | None, reason: str, source: StepSource | None
    ) -> None:
        with self.lock:
            if source not in (None, self.gate.source):
                return
            news, before = self._change_source_state(state)
        self._log_source_state(before, state, reason)
        wake_all(news)

    def _change_source_state(
        self, state: SourceState | None
    ) -> tuple[list[tuple[Slot, object]], SourceState | None]:
        """(What to wake, the state before); with the lock held."""
        before, self.waiters.source_state = self.waiters.source_state, state
        self.gate.is_cut_off = state is SourceState.CLOSED
        news = self.news() + self.unreachable()
        if state is SourceState.LOST:
            news += [(each.slot, LOST) for each in self.waiters.take_failing()]
        return news, before

    def _log_source_state(
        self, before: SourceState | None, state: SourceState | None, reason: str = ""
    ) -> None:
        # not that the last session here has closed, or the first one opened
        if before is state or state is None or (before is None and state is SourceState.LIVE):
            return
        level = logging.WARNING if state is SourceState.LOST else logging.INFO
        why = reason and f": {reason}"
        logger.log(level, "The source of %s is %s%s", self.name, state.value, why)

    def unreachable(self) -> list[tuple[Slot, object]]:
        """Waiters to wake because their steps can no longer come; with the lock held."""
        return [(each.slot, UNREACHABLE) for each in self.waiters.take_unreachable()]

    def demand(self) -> Demand:
        """What is needed from other processes now."""
        with self.lock:
            gate, waiters = self.gate, self.waiters
            next_step = waiters.next_step
            if gate.needs_credits and gate.limit is not None and not gate.is_at_limit:
                next_step = min(next_step, gate.limit)
            return Demand(
                next_step=next_step,
                limit=gate.limit,
                num_short=gate.num_short,
                num_spare=gate.credits,
                num_out=gate.tickets + gate.num_void + gate.is_running_here,
                num_granted=gate.grants,
                workers_open=len(waiters.workers),
                epoch=gate.epoch,
                num_lost=gate.num_lost,
            )

    def statistics(self) -> GlobalStepStatistics:
        """The state of this step and of the tasks that wait for it, at one moment."""
        gate, waiters = self.gate, self.waiters
        if gate.is_unread:
            self.refresh()
        with self.lock:
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


def wake_all(news: Iterable[tuple[Slot, object]]) -> None:
    """Outside of the lock: a wake-up may call another thread's event loop."""
    for slot, value in news:
        slot.wake(value)
