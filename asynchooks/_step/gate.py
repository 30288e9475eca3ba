"""The gate: who may run a step now, so that training stops exactly at its limit.

A state machine without locks and without waiting: `StepRuns` holds its lock around every call
and parks the askers. Nothing here knows of tasks, hooks or sessions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from itertools import takewhile

from .._engine.base import Engine, Sentinel, Slot
from .._engine.current import system_now
from .source import StepSource

ADVANCED = Sentinel("ADVANCED")
"""In place of the step after a run: one more than before, as nobody else counts it."""
UNREAD = Sentinel("UNREAD")
"""In place of the step after a run: it may have moved, and is read when somebody asks."""


class Answer(Enum):
    """What an asker hears: go on, come back never, or wait for its slot to be woken."""

    GRANTED = auto()
    REFUSED = auto()
    CUT_OFF = auto()  # below the limit, but no more tickets come
    WAIT = auto()


class Ticket:
    """The right to run one step, until it is settled; then it may be granted again."""

    __slots__ = ("epoch", "is_abandoned", "is_settled", "lone_grant", "lost_in", "terms", "value")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.terms = -1  # of the allowance that it was taken from, if any
        self.value: int | None = 0  # before the run; None: runs have ended unread
        self.lone_grant = 0  # which grant this is, if no other run was under way
        self.is_settled = True
        self.is_abandoned = False
        self.lost_in = 0  # where it was abandoned: how often lost runs had been forgotten by then


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
    each run under way, unless there are unread runs, and then nobody is answered who has a limit.

    A step on the one event loop of all workers needs no ticket: until it has returned, nobody on
    that event loop can ask for one.
    """

    __slots__ = (
        "abandoned", "allowance", "askers", "engine", "epoch", "grants", "holder", "is_closed",
        "is_cut_off", "is_exclusive", "is_free", "is_rationed", "is_running_here", "keeps_limit",
        "kept_from", "lease_until", "limit", "low_water", "num_forgets", "num_lost", "num_void",
        "read_runs", "reader", "source", "stride", "terms", "tickets", "unread_runs", "value",
        "value_here",
    )  # fmt: skip

    def __init__(self, value: int) -> None:
        self.value = value
        self.unread_runs = 0  # settled with UNREAD, ever
        self.read_runs = 0  # how many of those `value` includes
        self.reader: Callable[[], int | None] | None = None  # reads the step of unread runs
        self.epoch = 0
        self.limit: int | None = None
        self.is_closed = False  # no further run is granted, whatever the limit
        self.keeps_limit = False  # no run moves the step beyond it: whoever publishes sees to that
        self.source: StepSource | None = None  # what other processes move the step, if any
        # below a limit this process runs only what the source allowed it, in runs
        self.is_rationed = False
        self.is_cut_off = False  # no allowance comes any more
        self.allowance = 0  # >= 0
        self.lease_until = math.inf  # when others may have been given it, by `system_now`
        self.low_water = 0  # an allowance that is to be filled up
        self.terms = 0  # how often what was allowed before became void
        self.tickets = 0
        self.abandoned = 0  # of those, the ones whose thread may never end
        # of older epochs: a source that has not lost its state may still see their runs, after its
        # step has gone back. Those whose thread may never end are forgotten after a while.
        self.num_void = self.num_lost = self.num_forgets = 0
        self.kept_from = 0  # those of earlier epochs were forgotten, if they were lost by then
        # the largest advance of a run that was alone; unknown until one was
        self.stride: int | None = None
        self.is_exclusive = False
        # the task that runs within the exclusive side, and what of it does; None where others
        # end it, so that the task may wait for that
        self.holder: tuple[object, str] | None = None
        self.askers: deque[Asker] = deque()
        self.grants = 0
        self.engine: Engine | None = None  # the one of all open workers, if there is one
        self.is_free = False  # they have one engine, nobody stands in line, and it is not closed
        # a step without a ticket, on that engine's event loop: see `StepRuns.begin_here`
        self.is_running_here = False
        self.value_here: int | None = None  # before that step, if known and it began alone

    @property
    def is_unread(self) -> bool:
        """Whether runs have ended whose step is not known: `value` may lie behind."""
        return self.unread_runs != self.read_runs

    def is_far_from_limit(self) -> bool:
        """Whether one more step cannot go beyond the limit; without a lock."""
        if self.is_rationed:
            return False
        tickets = self.tickets  # before the value: one counts until its step is in the value
        stride, limit = self.stride, self.limit
        if stride is None or limit is None or self.unread_runs != self.read_runs:
            return self.keeps_limit and limit is not None and self.value < limit
        return self.value + (tickets + 1) * stride <= limit

    def decide(self, is_exclusive: bool) -> Answer:
        """The answer for whoever stands first in the queue."""
        tickets = self.tickets + self.is_running_here
        if is_exclusive:
            free = tickets == self.abandoned and not self.is_exclusive
            return Answer.GRANTED if free else Answer.WAIT
        if self.is_closed or (self.limit is not None and self.value >= self.limit):
            return Answer.REFUSED
        if self.is_exclusive:
            return Answer.WAIT
        if self.limit is None or self.keeps_limit:
            return Answer.GRANTED
        hangs = tickets == self.abandoned  # nobody is left whose end could be waited for
        if self.is_rationed:
            if self.allowance > 0 and system_now() < self.lease_until:
                return Answer.GRANTED
            if self.is_cut_off:
                return Answer.CUT_OFF
            # no other process is allowed those steps either
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
        ticket.is_settled = ticket.is_abandoned = False
        self.tickets += 1
        self.grants += 1
        # one that a run takes which began without a limit was not asked of anybody
        is_allowed = self.limit is not None and self.allowance > 0
        ticket.terms = self.terms if is_allowed else -1
        self.allowance -= is_allowed
        return ticket

    def take_back(self, ticket: Ticket) -> None:
        """The ticket has not been used: whoever asks next may have what it was allowed."""
        self.settle(ticket, None)
        self.allowance += ticket.terms == self.terms

    def void(self) -> None:
        """Forget what was allowed so far; others may have been given it meanwhile."""
        self.terms += 1
        self.allowance = self.low_water = 0

    def allow(self, runs: int) -> None:
        """Add to what this process may run below the limit."""
        self.allowance += runs
        self.low_water = self.allowance // 2

    @property
    def num_short(self) -> int:
        """How many askers a ticket would help; not those that wait for somebody's exclusive."""
        is_needed = self.is_rationed and self.limit is not None and self.allowance == 0
        if not is_needed or self.is_exclusive:
            return 0
        return sum(1 for _ in takewhile(lambda asker: not asker.is_exclusive, self.askers))

    @property
    def is_short(self) -> bool:
        """Whether more tickets should be asked for."""
        return (
            self.is_rationed and self.limit is not None and not self.is_closed
            and self.allowance <= self.low_water and self.value < self.limit
        )  # fmt: skip

    def settle(self, ticket: Ticket, value: int | Sentinel | None) -> None:
        """Take the ticket back, with the step after its run (None: the run failed)."""
        if ticket.is_settled:
            return
        ticket.is_settled = True
        if ticket.epoch != self.epoch:  # its step was lost with its epoch, and so was its place
            was_lost = ticket.is_abandoned and ticket.lost_in < self.num_forgets
            if not (was_lost and ticket.epoch < self.kept_from):
                self.num_void -= 1
                self.num_lost -= ticket.is_abandoned
            return
        was_alone = ticket.lone_grant + 1 == self.grants
        self.move(ticket.epoch, ticket.value if was_alone else None, value)
        self.tickets -= 1
        self.abandoned -= ticket.is_abandoned

    def move(self, epoch: int, before: int | None, after: int | Sentinel | None) -> None:
        """Take note of the step after a run; `before` it, if that was known and it was alone."""
        if epoch != self.epoch or after is None:
            return
        if after is UNREAD:
            self.unread_runs += 1
            return
        if after is ADVANCED:
            self.value = after = self.value + 1
        else:
            after = self.learn(after)
        if before is not None and after - before > (self.stride or 0):
            if self.keeps_limit or self.source is not None:  # others have moved it, too
                return
            self.stride = after - before

    def learn(self, value: int | Sentinel) -> int:
        """Take note of a step that was published, perhaps late; returns it as a number."""
        if value is UNREAD:
            self.unread_runs += 1
            return self.value
        after = self.value + 1 if isinstance(value, Sentinel) else value
        if after > self.value:
            self.value = after
        return after

    def restart(self, value: int) -> None:
        """Begin a new epoch: the step may have gone back; tickets of the old one are void."""
        self.epoch += 1
        self.value = value
        self.read_runs = self.unread_runs
        self.num_void += self.tickets
        self.num_lost += self.abandoned
        self.tickets = self.abandoned = 0
        self.void()

    def forget_lost(self) -> None:
        """Take it that no run of an older epoch is under way whose thread may never end."""
        self.num_void -= self.num_lost
        self.num_lost, self.kept_from = 0, self.epoch
        self.num_forgets += 1

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for its run any longer: rather stop short of the limit than hang."""
        if ticket.is_settled or ticket.is_abandoned:
            return
        ticket.is_abandoned, ticket.lost_in = True, self.num_forgets
        if ticket.epoch == self.epoch:
            self.abandoned += 1
        else:
            self.num_lost += 1

    def find_free(self) -> None:
        """Call it after every change of what `is_free` says."""
        self.is_free = not (
            self.engine is None or self.is_exclusive or self.askers or self.is_closed
        )

    def answer_askers(self) -> list[Asker]:
        """Those who need not wait any longer, in order, taken out of the queue."""
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
