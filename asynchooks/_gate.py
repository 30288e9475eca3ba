"""The gate: who may run a step now, so that training stops exactly at its limit.

A state machine without locks and without waiting: `GlobalStep` holds its lock around every call
and parks the askers. Nothing here knows of tasks, hooks or sessions.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from ._engine import Slot


class Answer(Enum):
    """What an asker hears: go on, come back never, or wait for its slot to be woken."""

    GRANTED = auto()
    REFUSED = auto()
    WAIT = auto()


class Ticket:
    """The right to run one step, until it is settled."""

    __slots__ = ("epoch", "grant", "is_abandoned", "is_alone", "is_settled", "value")

    def __init__(self, epoch: int, value: int, grant: int, is_alone: bool) -> None:
        self.epoch = epoch
        self.value = value
        self.grant = grant
        self.is_alone = is_alone
        self.is_settled = False
        self.is_abandoned = False


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
    each ticket out. `value` was read after a run each time, so it misses no settled run.
    """

    __slots__ = (
        "abandoned", "askers", "epoch", "grants", "is_exclusive", "limit", "stride", "tickets",
        "value",
    )  # fmt: skip

    def __init__(self, value: int) -> None:
        self.value = value
        self.epoch = 0
        self.limit: int | None = None
        self.tickets = 0
        self.abandoned = 0  # of those, the ones whose thread may never end
        # the largest advance of a run that was alone; unknown until one was
        self.stride: int | None = None
        self.is_exclusive = False
        self.askers: deque[Asker] = deque()
        self.grants = 0

    def decide(self, is_exclusive: bool) -> Answer:
        """The answer for whoever stands first in the queue."""
        if is_exclusive:
            free = self.tickets == self.abandoned and not self.is_exclusive
            return Answer.GRANTED if free else Answer.WAIT
        if self.limit is not None and self.value >= self.limit:
            return Answer.REFUSED
        if self.is_exclusive:
            return Answer.WAIT
        if self.limit is None or self.tickets == 0:
            return Answer.GRANTED
        hangs = self.tickets == self.abandoned  # nobody is left whose end could be waited for
        if self.stride is None:
            return Answer.GRANTED if hangs else Answer.WAIT
        if self.value + (self.tickets + 1) * self.stride <= self.limit:
            return Answer.GRANTED
        return Answer.REFUSED if hangs else Answer.WAIT

    def grant(self) -> Ticket:
        ticket = Ticket(self.epoch, self.value, self.grants, is_alone=self.tickets == 0)
        self.tickets += 1
        self.grants += 1
        return ticket

    def settle(self, ticket: Ticket, value: int | None) -> None:
        """Take the ticket back, with the step after its run (None: the run failed)."""
        if ticket.is_settled:
            return
        ticket.is_settled = True
        if ticket.epoch != self.epoch:
            return  # its step was lost with its epoch, and so was its place
        self.tickets -= 1
        self.abandoned -= ticket.is_abandoned
        if value is None:
            return
        advance = value - ticket.value
        was_alone = ticket.is_alone and ticket.grant + 1 == self.grants
        if was_alone and advance > 0:
            self.stride = max(self.stride or 0, advance)
        self.value = max(self.value, value)

    def restart(self, value: int) -> None:
        """Begin a new epoch: the step may have gone back; tickets of the old one are void."""
        self.epoch += 1
        self.value = value
        self.tickets = self.abandoned = 0

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for its run any longer: rather stop short of the limit than hang."""
        if not ticket.is_settled and ticket.epoch == self.epoch and not ticket.is_abandoned:
            ticket.is_abandoned = True
            self.abandoned += 1

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
