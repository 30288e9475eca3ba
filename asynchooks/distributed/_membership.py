"""The members of a training: their messages, heartbeats and credits, and which of them have news.

A state machine without I/O and without a clock: its owner reports messages and ticks, and sends the
news. The plugin of Dask's scheduler and the host of a parameter server use it; a member of a host
takes no credits, as its server respects the limit itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ._credits import share_of

_NUM_LEFT = 1000
"""Members that have left whose late messages are recognized."""


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

    def merged(self, other: State) -> State:
        """The newest of two states: messages overtake each other."""
        newer, older = (self, other) if other.number < self.number else (other, self)
        if newer.epoch == older.epoch and newer.step < older.step:
            return newer._replace(step=older.step)
        return newer


class Member:
    """One process of a training, from its first message until it leaves.

    Args:
        name: unique to the process.
        wake: called when it has news; it may be called again before they are sent.
        lease_ticks: after more ticks than these without a message the member is silent.
    """

    __slots__ = (
        "answer", "granted", "has_left", "held", "is_due", "known", "knows_limit", "lease_ticks",
        "name", "next_step", "num_silent", "uncounted", "wake", "wanted",
    )  # fmt: skip

    def __init__(self, name: str, wake: Callable[[], object], lease_ticks: float) -> None:
        self.name = name
        self.wake = wake
        self.lease_ticks = lease_ticks
        self.num_silent = 0  # ticks since its last message
        self.answer = (0, 0)  # the number of its newest message, and the step after that
        self.has_left = False  # for good: late messages do not count
        self.known: State | None = None  # the newest state that it has
        self.next_step: float = math.inf  # the lowest step that it waits for
        self.is_due = False  # it has news of its own
        # Credits
        self.knows_limit = False  # else it has runs under way without credits
        self.held = 0  # credits that it has, or that are on the way to it
        self.granted = 0  # ever, in this epoch
        self.wanted = 0
        self.uncounted = 0  # of those held, the ones that others got while it was away

    def tick(self) -> bool:
        """One tick has passed; returns whether the member is silent.

        Its owner counts ticks instead of reading a clock: an owner that was stopped itself has
        received nothing, without any member being silent.
        """
        self.num_silent += 1
        return self.num_silent > self.lease_ticks

    def has_news(self, state: State) -> bool:
        """Whether this state, or something else, concerns the member."""
        known = self.known
        return (
            self.is_due
            or known is None
            or state.number > known.number
            or known.step < state.step >= self.next_step
        )


M = TypeVar("M", bound=Member)


class MembershipTable(Generic[M]):
    """All members of one training, and its state.

    Invariant: step + credits held by members <= limit, unless the limit was set below that.
    """

    def __init__(self) -> None:
        self.state = State(0, 0, 0, None)
        self.members: dict[str, M] = {}
        self._wanting: dict[str, M] = {}  # in order of asking
        self._left: dict[str, tuple[tuple[int, int], bool]] = {}  # answer, whether for good

    def join(self, member: M) -> M:
        """Add a member, in place of one of its name; not one that has left for good."""
        before = self.members.get(member.name)
        if before is not None:
            self.leave(before)
        member.answer, member.has_left = self._left.get(member.name, (member.answer, False))
        if not member.has_left:
            self._left.pop(member.name, None)
            self.members[member.name] = member
        return member

    def leave(self, member: M) -> None:
        """Remove a member: its credits are free for others. With `has_left` it cannot rejoin."""
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        self._wanting.pop(member.name, None)
        self._left[member.name] = member.answer, member.has_left
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

    def is_new(self, member: M, number: int) -> bool:
        """A message has come; returns whether it is newer than all before, which is noted."""
        member.num_silent = 0
        if number <= member.answer[0]:
            return False
        member.answer = (number, self.state.step)
        return True

    def notify(self, member: M) -> None:
        """The member has news of its own."""
        member.is_due = True
        member.wake()

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
            self.notify(member)
