"""The members of a training: their messages, leases and credits, and which of them have news.

A state machine without I/O and without a clock: its host reports messages and the time that has
passed, and sends the news.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ._credits import share_of

_NUM_LEFT = 1000
"""Members that have left whose repeated calls are recognized."""


class State(NamedTuple):
    """The progress of a training."""

    number: int
    """Counts changes other than of the step: the state with the larger one is newer."""
    epoch: int
    step: int
    limit: int | None
    is_closed: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the step cannot advance any more."""
        return self.is_closed or (self.limit is not None and self.step >= self.limit)


class Answer(NamedTuple):
    """The end of a call."""

    order: int  # of all answers to the member, from 1
    call: int  # its number, given by the member
    value: Any
    error: Exception | None = None


class Member:
    """One process of a training, from its first message until it leaves.

    Args:
        name: unique to the process.
        wake: called when it has news; it may be called again before they are sent.
        lease_secs: after more seconds than these without a message the member is silent.
    """

    __slots__ = (
        "answers", "granted", "held", "is_due", "known", "knows_limit", "lease_secs", "name",
        "next_step", "num_answers", "num_sent", "place", "secs_silent", "taken", "uncounted",
        "wake", "wanted",
    )  # fmt: skip

    def __init__(self, name: str, wake: Callable[[], object], lease_secs: float) -> None:
        self.name = name
        self.wake = wake
        self.lease_secs = lease_secs
        self.place: str | None = None  # the address of its Dask worker, if it is one
        self.secs_silent = 0.0  # since its last message
        self.known: State | None = None  # the newest state that was sent to it
        self.next_step: float = math.inf  # the lowest step that it waits for
        self.is_due = False  # it has news of its own
        # Calls
        self.taken = 0  # the number of the newest one
        self.answers: dict[int, Answer] = {}  # by their order, until it has received them
        self.num_answers = 0  # ever
        self.num_sent = 0  # of these, over the present connection
        # Credits
        self.knows_limit = False  # else it has runs under way without credits
        self.held = 0  # credits that it has, or that are on the way to it
        self.granted = 0  # ever, in this epoch
        self.wanted = 0
        self.uncounted = 0  # of those held, the ones that others got while it was away

    def tick(self, secs: float) -> bool:
        """So much time has passed; returns whether the member is silent.

        Its host adds up its own pauses instead of reading a clock: a host that was stopped itself
        has received nothing, without any member being silent.
        """
        self.secs_silent += secs
        return self.secs_silent > self.lease_secs

    def has_news(self, state: State) -> bool:
        """Whether this state, or something else, concerns the member."""
        known = self.known
        return (
            self.is_due
            or known is None
            or state.number > known.number
            or known.step < state.step >= self.next_step
        )

    def answer(self, call: int, value: Any, error: Exception | None = None) -> None:
        """A call of this member has ended."""
        self.num_answers += 1
        self.answers[self.num_answers] = Answer(self.num_answers, call, value, error)
        self.is_due = True
        self.wake()

    def has_received(self, order: int) -> None:
        """It has all answers up to this one."""
        for each in [each for each in self.answers if each <= order]:
            del self.answers[each]

    def unsent(self) -> list[Answer]:
        """The answers that are sent now: over a new connection all that it has not received."""
        found = [each for order, each in self.answers.items() if order > self.num_sent]
        self.num_sent = self.num_answers
        return found


M = TypeVar("M", bound=Member)


class MembershipTable(Generic[M]):
    """All members of one training, and its state.

    Invariant: step + credits held by members <= limit, unless the limit was set below that.
    """

    def __init__(self) -> None:
        self.state = State(0, 0, 0, None)
        self.members: dict[str, M] = {}
        self._wanting: dict[str, M] = {}  # in order of asking
        self._left: dict[str, Member] = {}

    def join(self, member: M) -> M:
        """Add a member, in place of one of its name, whose calls it continues."""
        before = self.members.get(member.name)
        if before is not None:
            self.leave(before)
        left = self._left.pop(member.name, None)
        if left is not None:
            member.taken = left.taken
            member.answers, member.num_answers = left.answers, left.num_answers
        self.members[member.name] = member
        return member

    def leave(self, member: M) -> None:
        """Remove a member: its credits are free for others."""
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        self._wanting.pop(member.name, None)
        self._left[member.name] = member
        while len(self._left) > _NUM_LEFT:
            del self._left[next(iter(self._left))]
        self._grant()

    def update(self, epoch: int, step: int, limit: int | None, *, is_closed: bool = False) -> State:
        """Set the state and wake the members that have news; credits end with their epoch."""
        before, members = self.state, self.members.values()
        if (epoch, limit, is_closed) == (before.epoch, before.limit, before.is_closed):
            self.state = state = State(before.number, epoch, step, limit, is_closed)
            for member in members:
                if member.next_step <= step and member.has_news(state):
                    member.wake()
            return state
        self.state = state = State(before.number + 1, epoch, step, limit, is_closed)
        for member in members:
            if epoch != before.epoch:
                member.held = member.granted = member.uncounted = 0
            member.wake()
        return state

    def has_sent(self, member: M) -> None:
        """All news of the member were sent."""
        member.known, member.is_due = self.state, False
        if member.next_step <= self.state.step:
            member.next_step = math.inf

    @property
    def num_held(self) -> int:
        """Credits of all members that count."""
        return sum(each.held - each.uncounted for each in self.members.values())

    @property
    def num_wanting(self) -> int:
        """Members that wait for credits."""
        return len(self._wanting)

    def resume(self, member: M, num_held: int) -> None:
        """The member has come back with credits, of which others may have got some meanwhile."""
        limit, free = self.state.limit, num_held
        if limit is not None:
            free = max(0, min(limit - self.state.step - self.num_held, num_held))
        member.held, member.uncounted = num_held, num_held - free

    def settle(self, member: M, num_runs: int) -> int:
        """The member has made runs; returns how many of them count."""
        late = min(num_runs, member.uncounted)
        member.uncounted -= late
        return num_runs - late

    def request(self, member: M, num_wanted: int) -> None:
        """The member wants so many credits; those that are free are granted to all that want some.

        Call it after each message: the number of credits held may have changed.
        """
        member.wanted = num_wanted
        if not num_wanted:
            self._wanting.pop(member.name, None)
        elif member.name not in self._wanting:
            self._wanting[member.name] = member
        self._grant()

    def _grant(self) -> None:
        """Grant credits to the members that want some, as long as there are any.

        Not before every member has reported its runs under way without credits, from before it
        knew the limit.
        """
        limit = self.state.limit
        if limit is None or not self._wanting:
            return
        if not all(each.knows_limit for each in self.members.values()):
            return
        free = limit - self.state.step - self.num_held
        for member in list(self._wanting.values()):
            if free <= 0:
                return
            num = min(member.wanted, share_of(free, len(self.members)))
            member.held += num
            member.granted += num
            member.wanted = 0
            free -= num
            del self._wanting[member.name]
            member.is_due = True
            member.wake()
