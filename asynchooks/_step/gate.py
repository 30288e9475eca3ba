"""The gate: which run may take a step now, so that training stops exactly at its limit.

A state machine without locks and without waiting: `Admission` holds its lock around every call
and parks the tasks that ask. Nothing here knows of tasks, hooks or sessions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from itertools import takewhile
from typing import Any, NamedTuple

from .._engine.base import Engine, Sentinel, Slot
from .._engine.current import system_now
from .source import StepSource

ADVANCED = Sentinel("ADVANCED")
"""In place of the step after a run: one more than before, as the run alone counts it."""
UNREAD = Sentinel("UNREAD")
"""In place of the step after a run: it may have moved, and is read when it is asked for."""


class Kept(NamedTuple):
    """The step after a run, with outputs of the run that are kept for a save of that step."""

    after: int | Sentinel
    outputs: Mapping[str, Any]
    owner: object
    """What computes them: of several models that count on one step, this one."""


After = int | Sentinel | Kept
"""The step after a run: as it was read, `ADVANCED` or `UNREAD`, perhaps with outputs."""


class Answer(Enum):
    """What the gate answers: go on, never ask again, or wait for the slot to be woken."""

    GRANTED = auto()
    REFUSED = auto()
    CUT_OFF = auto()  # below the limit, but no more credits come
    WAIT = auto()


class Ticket:
    """The right to run one step, until it is settled; then it may be granted again."""

    __slots__ = (
        "epoch", "is_abandoned", "is_settled", "lone_grant", "lost_in", "num_taken", "terms",
        "value",
    )  # fmt: skip

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.terms = -1  # of the credit that it took, if any
        self.value: int | None = 0  # before the run; None: runs have ended unread
        self.lone_grant = 0  # which grant this is, if no other run was under way
        self.num_taken = 0  # of the gate, when it was granted
        self.is_settled = True
        self.is_abandoned = False
        self.lost_in = 0  # how often lost runs had been forgotten when it was abandoned


class Asker:
    """One place in the gate's queue; `ticket` is there as soon as the answer is "granted"."""

    __slots__ = ("answer", "is_exclusive", "slot", "ticket")

    def __init__(self, slot: Slot, is_exclusive: bool) -> None:
        self.slot = slot
        self.is_exclusive = is_exclusive
        self.answer = Answer.WAIT
        self.ticket: Ticket | None = None


class Gate:
    """Value, limit, tickets in flight, stride and the queue of askers, first come first served.

    The invariant that makes the stop exact: the true step is at most `value` plus one stride for
    each run under way, unless there are unread runs; then, under a limit, every asker waits.

    A step on the one event loop of all workers needs no ticket: until it has returned, no task of
    that event loop can ask for one.
    """

    __slots__ = (
        "abandoned", "askers", "credits", "engine", "epoch", "first_epoch", "grants", "holder",
        "is_closed", "is_cut_off", "is_exclusive", "is_free", "is_running_here", "kept",
        "kept_from", "lease_until", "limit", "lone", "low_water", "needs_credits", "num_forgets",
        "num_lost", "num_taken", "num_void", "published_only", "read_runs", "reader", "source",
        "stride", "taken_here", "terms", "tickets", "unread_runs", "value", "value_here",
    )  # fmt: skip

    def __init__(self, value: int) -> None:
        self.value = value
        self.unread_runs = 0  # settled with UNREAD, ever
        self.read_runs = 0  # how many of those `value` includes
        self.reader: Callable[[], int | None] | None = None  # reads the step of unread runs
        self.num_taken = 0  # values taken, ever: one that was read before the last is no news
        self.epoch = 0
        self.first_epoch = 0  # runs that began in it, or later, still move the step
        # with the step that the run made; no outputs where it is not known which run that was
        self.kept: tuple[int, Kept | None] = -1, None
        self.lone = -1  # the last step that was read after a run which alone may have made it
        self.limit: int | None = None
        self.is_closed = False  # no further run is granted, whatever the limit
        self.published_only = False  # runs do not count; callers of `publish` respect the limit
        self.source: StepSource | None = None  # through which other processes move the step
        # below a limit each run takes a credit, which the source granted to this process
        self.needs_credits = False
        self.credits = 0  # >= 0
        self.is_cut_off = False  # no credit comes any more
        self.lease_until = math.inf  # when credits expire, by `system_now`
        self.low_water = 0  # at which more credits are asked for
        self.terms = 0  # how often earlier credits became void
        self.tickets = 0
        self.abandoned = 0  # of those, the ones whose thread may never end
        # of older epochs: a source that has not lost its state may still see their runs, after its
        # step has gone back. Those whose thread may never end are forgotten after a while.
        self.num_void = self.num_lost = self.num_forgets = 0
        self.kept_from = 0  # lost runs of earlier epochs were forgotten
        # the largest advance of a run that was alone; unknown until there was one
        self.stride: int | None = None
        self.is_exclusive = False
        # the task that holds the exclusive side, and what it does; None where another task ends
        # it, so that this one may wait for that
        self.holder: tuple[object, str] | None = None
        self.askers: deque[Asker] = deque()
        self.grants = 0
        self.engine: Engine | None = None  # the one of all open workers, if there is one
        self.is_free = False  # they have one engine, the queue is empty, and it is not closed
        # a step without a ticket, on that engine's event loop: see `Admission.begin_here`
        self.is_running_here = False
        self.value_here: int | None = None  # before that step, if known and it began alone
        self.taken_here = 0  # as `Ticket.num_taken`, of that step

    @property
    def is_unread(self) -> bool:
        """Whether runs have ended whose step is not known: `value` may lie behind."""
        return self.unread_runs != self.read_runs

    @property
    def is_at_limit(self) -> bool:
        """Whether the step has reached its limit, if there is one."""
        return self.limit is not None and self.value >= self.limit

    def is_far_from_limit(self) -> bool:
        """Whether one more step cannot go beyond the limit; without a lock."""
        if self.needs_credits:
            return False
        tickets = self.tickets  # before the value: one counts until its step is in the value
        stride, limit = self.stride, self.limit
        if stride is None or limit is None or self.unread_runs != self.read_runs:
            return self.published_only and limit is not None and self.value < limit
        return self.value + (tickets + 1) * stride <= limit

    def decide(self, is_exclusive: bool) -> Answer:
        """The answer for the first in the queue."""
        tickets = self.tickets + self.is_running_here
        if is_exclusive:
            free = tickets == self.abandoned and not self.is_exclusive
            return Answer.GRANTED if free else Answer.WAIT
        if self.is_closed or self.is_at_limit:
            return Answer.REFUSED
        if self.is_exclusive:
            return Answer.WAIT
        if self.limit is None or self.published_only:
            return Answer.GRANTED
        hangs = tickets == self.abandoned  # every run under way was abandoned: waiting is in vain
        if self.needs_credits:
            if self.credits > 0 and system_now() < self.lease_until:
                return Answer.GRANTED
            if self.is_cut_off:
                return Answer.CUT_OFF
            # no other process is granted those steps either
            is_last = hangs and self.value + tickets * (self.stride or 1) >= self.limit
            return Answer.REFUSED if is_last else Answer.WAIT
        if self.is_unread:
            return Answer.WAIT
        if tickets == 0:
            return Answer.GRANTED
        if self.stride is None:
            return Answer.GRANTED if hangs else Answer.WAIT
        if self.value + (tickets + 1) * self.stride <= self.limit:
            return Answer.GRANTED
        return Answer.REFUSED if hangs else Answer.WAIT

    def grant(self, spare: Ticket | None = None) -> Ticket:
        """A ticket for one more run: the spare one, unless it is still out."""
        ticket = Ticket() if spare is None or not spare.is_settled else spare
        ticket.epoch = self.epoch
        ticket.value = self.value if self.unread_runs == self.read_runs else None
        ticket.lone_grant = -1 if self.tickets else self.grants
        ticket.num_taken = self.num_taken
        ticket.is_settled = ticket.is_abandoned = False
        self.tickets += 1
        self.grants += 1
        # a run that began without a limit was granted without a credit
        takes_credit = self.limit is not None and self.credits > 0
        ticket.terms = self.terms if takes_credit else -1
        self.credits -= takes_credit
        return ticket

    def take_back(self, ticket: Ticket) -> None:
        """The ticket has not been used: the next asker may have its credit."""
        self.settle(ticket, None)
        self.credits += ticket.terms == self.terms

    def feed_from(self, source: StepSource | None, stride: int) -> None:
        """Have another source, or none; the credits of the last one are void."""
        self.source = source
        grants = source is not None and source.grants_credits
        self.needs_credits = grants and not self.published_only
        self.void_credits()
        self.lease_until = math.inf
        if source is not None:
            self.stride = stride

    def void_credits(self) -> None:
        """Forget the credits so far; others may have been granted them meanwhile."""
        self.terms += 1
        self.credits = self.low_water = 0

    def add_credits(self, runs: int) -> None:
        """Add to what this process may run below the limit."""
        self.credits += runs
        self.low_water = self.credits // 2

    @property
    def num_short(self) -> int:
        """How many askers a credit would help; not those that wait behind an exclusive one."""
        is_needed = self.needs_credits and self.limit is not None and self.credits == 0
        if not is_needed or self.is_exclusive:
            return 0
        return sum(1 for _ in takewhile(lambda asker: not asker.is_exclusive, self.askers))

    @property
    def is_short(self) -> bool:
        """Whether more credits should be asked for."""
        return (
            self.needs_credits and self.limit is not None and not self.is_closed
            and self.credits <= self.low_water and self.value < self.limit
        )  # fmt: skip

    def settle(self, ticket: Ticket, value: After | None) -> int | None:
        """Take the ticket back, with the step after its run (None: the run failed).

        Returns what `move` does.
        """
        if ticket.is_settled:
            return None
        ticket.is_settled = True
        if ticket.epoch < self.first_epoch:  # its step was lost, and so was its place
            was_lost = ticket.is_abandoned and ticket.lost_in < self.num_forgets
            if not (was_lost and ticket.epoch < self.kept_from):
                self.num_void -= 1
                self.num_lost -= ticket.is_abandoned
            return None
        was_alone = ticket.lone_grant + 1 == self.grants
        before = ticket.value if was_alone else None
        made = self.move(ticket.epoch, ticket.num_taken, before, value)
        self.tickets -= 1
        self.abandoned -= ticket.is_abandoned
        return made

    def move(
        self, epoch: int, num_taken: int, before: int | None, after: After | None
    ) -> int | None:
        """Take note of the step after a run; `before` it, if that was known and it was alone.

        `epoch` and `num_taken` are those in which it began. Returns the step that the run made;
        None if it made none that counts, or that is known.
        """
        if epoch < self.first_epoch or after is None:
            return None
        if after is UNREAD:
            self.unread_runs += 1
            return None
        kept = after if isinstance(after, Kept) else None
        if isinstance(after, Kept):
            after = after.after
        if isinstance(after, Sentinel):  # ADVANCED
            self.value = after = self.value + 1
        elif not self.take(after, epoch, num_taken):
            self.unread_runs += 1
        if kept is not None:
            self._keep(after, kept, is_alone=before is not None)
        # where others move it too, an advance says nothing of the run
        if before is not None and not self.published_only and self.source is None:
            self.lone = after
            if after - before > (self.stride or 0):
                self.stride = after - before
        return after

    def learn(self, value: After) -> None:
        """Take note of a step that was published, perhaps late."""
        if value is UNREAD:
            self.unread_runs += 1
            return
        kept = value if isinstance(value, Kept) else None
        if isinstance(value, Kept):
            value = value.after
        after = self.value + 1 if isinstance(value, Sentinel) else value
        self.value = max(self.value, after)
        self.num_taken += 1
        if kept is not None:
            self._keep(after, kept, is_alone=True)

    def _keep(self, made: int, kept: Kept, *, is_alone: bool) -> None:
        """Keep the outputs of the run that made the present step: the first that comes to it.

        Of runs that were not alone and came to the same step, it is not known which one made it.
        """
        if made == self.value and self.kept[0] != made:
            self.kept = made, kept
        elif made == self.value and not is_alone:
            self.kept = made, None

    def take(self, value: int, epoch: int, num_taken: int) -> bool:
        """Take note of a step that was read, in this epoch and since so many values were taken.

        Where a variable of this process holds the step, it is followed back, too: a read that
        began after the last value was taken is newer than that. Of two that overlapped either may
        be, and so may one that began before the step went back.

        Returns:
            False if it must be read again, to know.
        """
        goes_back = value < self.value
        # once the gate is closed, a model that is brought back is no training: that step stays
        if self.reader is None or self.source is not None or self.is_closed:
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
        self.epoch += 1
        self.first_epoch = self.epoch
        self.value = value
        self.kept, self.lone = (-1, None), -1
        self.num_taken += 1
        self.read_runs = self.unread_runs
        self.num_void += self.tickets
        self.num_lost += self.abandoned
        self.tickets = self.abandoned = 0
        self.void_credits()

    def reset_limit(self) -> None:
        """The last worker has closed: the next one to open sets a limit of its own."""
        self.limit = self.engine = None
        self.kept = -1, None
        self.is_closed = False
        self.void_credits()

    def forget_lost(self) -> None:
        """Assume that the runs of older epochs whose thread may never end have ended."""
        self.num_void -= self.num_lost
        self.num_lost, self.kept_from = 0, self.first_epoch
        self.num_forgets += 1

    def abandon(self, ticket: Ticket) -> None:
        """The end of its run is not waited for: rather stop short of the limit than hang."""
        if ticket.is_settled or ticket.is_abandoned:
            return
        ticket.is_abandoned, ticket.lost_in = True, self.num_forgets
        if ticket.epoch >= self.first_epoch:
            self.abandoned += 1
        else:
            self.num_lost += 1

    def find_free(self) -> None:
        """Update `is_free`; after every change of what it depends on."""
        self.is_free = not (
            self.engine is None or self.is_exclusive or self.askers or self.is_closed
        )

    def answer_askers(self) -> list[Asker]:
        """Those that need not wait any longer, in order, taken out of the queue."""
        answered = []
        while self.askers:
            asker = self.askers[0]
            asker.answer = self.decide(asker.is_exclusive)
            if asker.answer is Answer.WAIT:
                break
            if asker.answer is Answer.GRANTED and asker.is_exclusive:
                self.is_exclusive = True
            elif asker.answer is Answer.GRANTED:
                asker.ticket = self.grant()
            answered.append(self.askers.popleft())
        return answered
