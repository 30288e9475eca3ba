"""Who may run a step of one counter now: the gate and its queue, for tasks and threads.

What a run did to the step, and who waits for it, is told to everybody from here; `GlobalStep`
adds the waiting.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from .._engine.base import STOPPED, TIMED_OUT, Engine, Sentinel, Slot, async_block
from .._engine.call_lock import NO_LOCK, CallLock
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop
from .._errors import StepUnreachableError, StopTraining
from .gate import ADVANCED, UNREAD, Answer, Asker, Gate, Ticket
from .waiters import Waiters, Worker

logger = logging.getLogger("asynchooks")


class StepRuns:
    """The runs of one counter of steps; `GlobalStep` is made of it."""

    __slots__ = (
        "__weakref__", "_acquire", "_gate", "_lock", "_release", "_spare_ticket", "_stop",
        "_waiters", "body", "name", "worker",
    )  # fmt: skip

    def __init__(self, value: int, name: str, num_workers: float | None) -> None:
        self.name = name
        # shared with every handle that `bound` makes; the lock guards the other two
        self._lock = threading.Lock()
        # half as dear as `with`, in what every step does
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._gate = Gate(value)
        self._waiters = Waiters(num_workers)
        # this handle's own
        self._stop: Stop | None = None
        self.worker: Worker | None = None  # its runs are those of this one, and so are its waits
        self.body: Worker | None = None  # for the body of this one's block
        self._spare_ticket: Ticket | None = None  # one object for all steps of a worker

    def take_ticket_nowait(self) -> Ticket | None:
        """A ticket, if one is to be had at once; None if there is something to wait for.

        Raises:
            StopTraining: the limit is reached, or no run takes a step any more.
            StepUnreachableError: it is not, but whoever gives tickets below it gives no more.
        """
        gate = self._gate
        self._acquire()
        try:
            is_open = gate.limit is None and not (gate.is_exclusive or gate.is_closed)
            answer = Answer.GRANTED if is_open else gate.decide(is_exclusive=False)
            if answer is Answer.GRANTED and not gate.askers:
                ticket = self._spare_ticket = gate.grant(self._spare_ticket)
                return ticket
        finally:
            self._release()
            if gate.is_rationed:
                self._look_again()
        if answer in (Answer.REFUSED, Answer.CUT_OFF):
            raise self._refusal(answer)
        return None

    async def take_ticket(self) -> Ticket:
        """The right to run one step, in order of asking; `settle` it after the run.

        Raises:
            StopTraining: the limit is reached, or a stop was requested meanwhile.
            StepUnreachableError: as `take_ticket_nowait`.
        """
        ticket = self.take_ticket_nowait()
        if ticket is not None:
            return ticket
        asker = await self._ask(is_exclusive=False, ends_at_stop=True)
        if asker.answer in (Answer.REFUSED, Answer.CUT_OFF):
            raise self._refusal(asker.answer)
        if asker.ticket is None:
            raise StopTraining(f"a stop was requested while waiting to run a step of {self.name}")
        return asker.ticket

    def _refusal(self, answer: Answer) -> Exception:
        if answer is Answer.REFUSED and self._gate.is_closed:
            return StopTraining(f"all workers were stopped, and the model is final: {self!r}")
        if answer is Answer.REFUSED:
            return StopTraining(f"{self.name} has reached its limit: {self!r}")
        return StepUnreachableError(
            f"no step of {self!r} can be run any more: its source is closed, which gave the "
            "tickets below the limit. Keep the source open until the sessions have closed."
        )

    def settle(self, ticket: Ticket, value: int | Sentinel | None = None) -> None:
        """Give a ticket back with the step read after the run, None if it failed; any thread.

        The step may also be `ADVANCED`, or `UNREAD` if nothing depends on it now.
        """
        gate = self._gate
        self._acquire()
        try:
            gate.settle(ticket, value)
            news = self._news() if gate.askers or self._waiters.next_step <= gate.value else ()
        finally:
            self._release()
        if news:
            wake_all(news)
        if gate.is_rationed and gate.askers:  # what a failed run held is to be had again
            self._look_again()
        if value is UNREAD and self.is_watched:  # since a moment ago
            self.refresh()

    @property
    def is_running_here(self) -> bool:
        """Whether a step without a ticket is under way: see `run_here`."""
        return self._gate.is_running_here

    def give_back(self, ticket: Ticket) -> None:
        """Give a ticket back whose run has not begun: others may have it."""
        with self._lock:
            self._gate.take_back(ticket)
            news = self._news()
        wake_all(news)
        self._look_again()

    def begin_here(self, door: CallLock = NO_LOCK) -> int | None:
        """Begin a step on the event loop of all workers without a ticket; `end_here` ends it.

        It takes no lock: whoever joins the queue from elsewhere sees `is_running_here`, or is
        seen. (All that is so under the GIL. The lock took an eighth of a run.)

        Args:
            door: says that no other call is under way that the step must not overlap.

        Returns:
            The epoch that the step counts in; None if it has to wait, for a ticket or for others.
        """
        gate = self._gate
        if not gate.is_free or (gate.limit is not None and not gate.is_far_from_limit()):
            return None
        gate.is_running_here = True
        epoch = gate.epoch
        # another thread joined the queue meanwhile, and may wait for the end of this step
        if not gate.is_free or not door.is_free:
            self._leave_here()
            return None
        if gate.tickets:
            gate.value_here = None
            gate.grants += 1  # those are not alone any more
        else:
            gate.value_here = gate.value if gate.unread_runs == gate.read_runs else None
        return epoch

    def end_here(self, epoch: int, after: int | Sentinel | None) -> None:
        """Settle a step that `begin_here` began, with the step after it, None if it failed.

        A step that only counts takes no lock: whoever asks or waits has said so before it looks at
        the value, and this looks for them after it has moved it; between the look at the epoch and
        the sum nothing else can run.
        """
        gate = self._gate
        if after is ADVANCED and gate.stride and epoch == gate.epoch:
            gate.value += 1  # what `move` would do; first, as until then the run counts
            gate.is_running_here = False
            if gate.askers or self._waiters.next_step <= gate.value:
                with self._lock:
                    news = self._news()
                wake_all(news)
            return
        self._acquire()
        try:
            gate.is_running_here = False
            gate.move(epoch, gate.value_here, after)
            news = self._news() if gate.askers or self._waiters.next_step <= gate.value else []
        finally:
            self._release()
        if news:
            wake_all(news)
        if after is UNREAD and self.is_watched:  # since a moment ago
            self.refresh()

    def suspend_here(self, epoch: int) -> Ticket:
        """A ticket to settle, for a step that `begin_here` began and that is a coroutine."""
        gate = self._gate
        with self._lock:  # it goes on while others run
            gate.is_running_here = False
            if epoch != gate.epoch:
                return Ticket(epoch)
            ticket = self._spare_ticket = gate.grant(self._spare_ticket)
            return ticket

    def _leave_here(self) -> None:
        with self._lock:
            self._gate.is_running_here = False
            news = self._news()
        wake_all(news)

    @property
    def is_watched(self) -> bool:
        """Whether somebody depends on the step after each run: a limit, or who waits for it."""
        return self._gate.limit is not None or self._waiters.next_step < math.inf

    def read_by(
        self,
        read: Callable[[], int | None] | None,
        instead_of: Callable[[], int | None] | None = None,
    ) -> None:
        """Have the step of unread runs read by this function, in whichever thread asks.

        Args:
            instead_of: the one to replace; if it is another by now, that stays.
        """
        if instead_of is None or self._gate.reader == instead_of:
            self._gate.reader = read

    def refresh(self) -> None:
        """Read the step of runs that have ended unread; where that fails, the last one stands."""
        gate = self._gate
        with self._lock:
            seen, epoch = gate.unread_runs, gate.epoch
            read = gate.reader if gate.is_unread else None
        value = None
        try:
            if read is not None:
                value = read()
        except Exception as error:  # a lost session; its runs say so, too
            logger.info("%s could not be read: %r", self.name, error)
        with self._lock:
            if epoch == gate.epoch:
                if value is not None:
                    gate.learn(value)
                gate.read_runs = max(gate.read_runs, seen)
            news = self._news()
        wake_all(news)

    def abandon(self, ticket: Ticket) -> None:
        """Say that nobody waits for the run of this ticket, which a thread may still settle.

        Near the limit others are refused then, rather than waiting for ever; `exclusive` goes
        ahead without it.
        """
        with self._lock:
            self._gate.abandon(ticket)
            news = self._news()
        wake_all(news)
        self._look_again()

    @async_block("global_step.exclusive()")
    async def exclusive(self, *, timeout: float | None = None) -> AsyncIterator[None]:
        """Within the block no run is under way, in order of asking. Cancellation safe.

        Do not run a step of the same model inside, nor ask for it again: that would wait for the
        end of the block. In the task that is in the block it is an error; another one waits.

        Args:
            timeout: seconds, >= 0, to wait for runs that are under way; None waits as long as it
                takes, for ever if one of them waits for the caller.

        Raises:
            TimeoutError: on entering: they have not ended in time.
            StopTraining: on entering: the session was asked to stop while they went on.
            RuntimeError: on entering: this task is in such a block already, in a save, or in an
                async step.
            TypeError: it is entered by `with`, not by `async with`.
        """
        release = await self.take_exclusive(timeout=timeout, ends_at_stop=True)
        try:
            with self.held_here("global_step.exclusive()"):
                yield
        finally:
            release()

    @contextmanager
    def held_here(self, what: str) -> Iterator[None]:
        """Within the block the running task may not wait for the exclusive side, which it has.

        Args:
            what: it is in, for people: "global_step.exclusive()".
        """
        gate, task = self._gate, current_engine().current_task()
        holder = gate.holder = None if task is None else (task, what)
        try:
            yield
        finally:
            if gate.holder is holder:
                gate.holder = None

    async def take_exclusive(
        self, *, timeout: float | None = None, ends_at_stop: bool = False
    ) -> Callable[[], None]:
        """As entering `exclusive`, also after a stop; returns what ends it, from any thread.

        Where the task that takes it ends it, too, what it does meanwhile stands in `held_here`.
        """
        if timeout is None or ends_at_stop:
            self._refuse_in_step(current_engine())
        asker = await self._ask(is_exclusive=True, timeout=timeout, ends_at_stop=ends_at_stop)
        if asker.slot.value is STOPPED and asker.answer is not Answer.GRANTED:
            raise StopTraining(f"a stop was requested while runs were under way: {self!r}")
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
            wake_all(news)
            self._look_again()  # whoever stood in line may have taken the last tickets

        return release

    async def _ask(
        self, *, is_exclusive: bool, timeout: float | None = None, ends_at_stop: bool
    ) -> Asker:
        """Stand in the gate's queue until there is an answer, or time, or a stop."""
        engine = current_engine()
        self._refuse_to_wait_for_itself(engine, is_exclusive)
        what = f"{'all runs' if is_exclusive else 'a ticket'} of {self.name}"
        asker = Asker(Slot(engine, what), is_exclusive)
        with self._lock:
            self._gate.askers.append(asker)
            news = self._news()
        wake_all(news)
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            self._look_again()
            with EndsAtStop(asker.slot, self._stop) if ends_at_stop else nullcontext():
                await engine.park(asker.slot, until)
        except BaseException:
            self._withdraw(asker, give_back=True)
            raise
        if asker.slot.value in (STOPPED, TIMED_OUT):
            self._withdraw(asker, give_back=False)
        return asker

    def _refuse_to_wait_for_itself(self, engine: Engine, is_exclusive: bool) -> None:
        holder = self._gate.holder
        if holder is None or holder[0] is not engine.current_task():
            return
        wants = "asks for global_step.exclusive() again" if is_exclusive else "runs a step"
        instead = "leave that out" if is_exclusive else "run the step after it"
        raise RuntimeError(
            f"this task is in {holder[1]} of {self!r}, and {wants}: it would wait for itself, for "
            f"ever. Within {holder[1]} no step of that model runs; {instead}"
        )

    def _refuse_in_step(self, engine: Engine) -> None:
        if self._worker_in_step(engine) is not None:
            raise RuntimeError(
                f"this task is in a step of {self!r}, and asks for global_step.exclusive(): it "
                "would wait for itself, for ever, as that waits for the end of all steps under "
                "way. Ask for it outside of the step function, between two runs"
            )

    def _worker_in_step(self, engine: Engine) -> Worker | None:
        """Whose step, an async one, the running task is in; None if it is in none."""
        if not self._gate.tickets:
            return None
        workers = list(self._waiters.workers) if self.worker is None else [self.worker]
        return next((worker for worker in workers if worker.is_in_step(engine)), None)

    def _withdraw(self, asker: Asker, *, give_back: bool) -> None:
        """Leave the queue; what was granted meanwhile is passed on, if it is not wanted."""
        with self._lock:
            if asker.answer is Answer.WAIT:
                self._gate.askers.remove(asker)
            elif give_back and asker.ticket is not None:
                self._gate.take_back(asker.ticket)
            elif give_back and asker.answer is Answer.GRANTED:
                self._gate.is_exclusive = False
            news = self._news()
        wake_all(news)
        self._look_again()

    def _look_again(self) -> None:
        """Tell the source, if there is one, when it has tickets to bring; without the lock."""
        source = self._gate.source
        if source is not None and self._gate.is_short:
            source.look_again()

    def _news(self) -> list[tuple[Slot, object]]:
        """Whom the present state concerns; call it with the lock held, after every change."""
        gate = self._gate
        news: list[tuple[Slot, object]] = []
        if self._waiters.next_step <= gate.value:
            news = [(each.slot, gate.value) for each in self._waiters.take_due(gate.value)]
        if gate.askers:
            news += [(each.slot, each.answer) for each in gate.answer_askers()]
        gate.find_free()
        return news


def wake_all(news: Iterable[tuple[Slot, object]]) -> None:
    """Outside of the lock: a wake-up may ring another thread's event loop."""
    for slot, value in news:
        slot.wake(value)
