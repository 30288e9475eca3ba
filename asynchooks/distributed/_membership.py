"""Host: one training on a server: its processes, what they call, their leases, and their news.

It does no I/O and reads no clock: what serves the connections reports messages and the time that
has passed, and sends the news. The kinds of host say what a call does.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from ._messages import Message

_NUM_LEFT = 1000
"""Processes that have left which are recognized when they come back."""
_TICKS_PER_LEASE, _LONGEST_TICK_SECS = 8, 1.0


class Line(NamedTuple):
    """A connection of a process."""

    wake: Callable[[], object]
    """Has the news of the process sent over it, soon."""
    hang_up: Callable[[], object]
    """Ends it."""


class State(NamedTuple):
    """The progress of a training."""

    epoch: int = 0
    step: int = 0
    limit: int | None = None
    is_closed: bool = False


class Member:
    """One process of a training. It is remembered after it has left, as it may come back.

    Args:
        name: unique to the process.
        lease_secs: after more seconds than these without a message it has left.
    """

    def __init__(self, name: str, lease_secs: float) -> None:
        self.name = name
        self.lease_secs = lease_secs
        self.line: Line | None = None  # the last connection, until it ends
        self.secs_silent = 0.0  # since its last message
        self.next_step: float = math.inf  # the lowest step that it waits for
        self.is_due = False  # it has news, whatever the step
        self.has_said_bye = False  # its connection ends now
        # Calls, by their numbers, which the process gives
        self.taken = 0  # the newest one
        self.answers: dict[int, Any] = {}  # until the process has received them
        self.unsent: list[Any] = []  # of these, over the present connection
        # Credits
        self.is_back = False  # it was away in this epoch: others may have been granted its runs
        self.knows_limit = False  # else it has runs under way without credits
        self.held = 0  # credits that it has, or that are on the way to it
        self.granted = 0  # over the present connection, in this epoch

    def answer(self, call: int, value: Any, error: Exception | None = None) -> None:
        """A call of this process has ended."""
        self.answers[call] = found = call, value, error
        self.unsent.append(found)
        self.wake()

    def has_news(self, state: State) -> bool:
        return self.is_due or bool(self.unsent) or state.step >= self.next_step

    def wake(self) -> None:
        if self.line is not None:
            self.line.wake()


class Host(ABC):
    """A method `do_<function>(member, *arguments)` is called once for each call, in their order."""

    member_type: ClassVar[type[Member]] = Member
    lease_secs: float | None = None
    """That of all processes; None: each has its own."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex[:12]  # another host of this name is not this one
        self.state = State()
        self.members: dict[str, Any] = {}
        self.left: dict[str, Any] = {}
        self.num_calls = 0
        """Ever."""
        self.is_done = False
        """Whether it is forgotten once all processes have said that they leave."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> str:
        return f"{self.incarnation}.{self.state.epoch}"

    @property
    def is_forgotten(self) -> bool:
        return self.is_done and all(each.has_said_bye for each in self.members.values())

    def welcome(self) -> Any:
        """What a process is told of the host when it connects."""
        return None

    # What the connections report

    def join(self, name: str, line: Line, lease_secs: float, message: Message) -> Any:
        """A process has connected, with its first message; perhaps again, and then it goes on.

        Calls that it repeats are not done again, and answers that it lacks are sent again.
        """
        member = self.members.get(name)
        has_left = member is None and name in self.left
        if has_left:
            member = self.left.pop(name)
        elif member is None:
            member = self.member_type(name, self.lease_secs or lease_secs)
        elif member.line is not None:
            member.line.hang_up()
        self.members[name], member.line = member, line
        member.granted = member.held = 0
        member.is_back = message.epoch == self.epoch
        if has_left:
            self._came_back(member)
        self.take(member, line, message)
        member.unsent = list(member.answers.values())
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_members(), name="asynchooks-watch")
        return member

    def take(self, member: Any, line: Line, message: Message) -> bool:
        """A message has come over a connection; the answers are part of the news.

        Returns:
            False if the process has another connection by now, over which it repeats its calls.
        """
        if member.line is not line:
            return False
        member.secs_silent = 0.0
        for number in message.received:
            member.answers.pop(number, None)
        for number, function, args in message.calls:
            if number > member.taken:
                member.taken = number
                self.num_calls += 1
                self._call(member, number, function, args)
        member.next_step = message.next_step
        member.is_due |= message.asks
        limit, own_limit = self.state.limit, message.limit
        if own_limit is not None and (limit is None or own_limit > limit):
            self._raise_limit(own_limit)
        if member.has_news(self.state):
            member.wake()
        return True

    def news(self, member: Any) -> dict[str, Any]:
        """The news of one process, which are sent at once."""
        state = self.state
        answers, member.unsent, member.is_due = member.unsent, [], False
        if state.step >= member.next_step:
            member.next_step = math.inf
        return {
            "epoch": self.epoch,
            "step": state.step,
            "limit": state.limit,
            "is_closed": state.is_closed,
            "num_granted": member.granted,
            "answers": self._packed(answers),
        }

    def ended(self, member: Any, line: Line) -> None:
        """A connection has ended."""
        if member.line is line:
            member.line = None
            self._look_at(member)

    def tick(self, secs: float) -> None:
        """So much time has passed.

        The pauses are added up, and no clock is read: a host that was stopped itself has received
        nothing, without any process being silent. Nor does a pause that was begun for longer leases
        count in full for a process that has just joined.
        """
        for member in list(self.members.values()):
            member.secs_silent += min(secs, member.lease_secs / _TICKS_PER_LEASE)
            self._look_at(member)

    async def _watch_members(self) -> None:
        while self.members:
            shortest = min(each.lease_secs for each in self.members.values())
            secs = min(shortest / _TICKS_PER_LEASE, _LONGEST_TICK_SECS)
            await asyncio.sleep(secs)
            self.tick(secs)

    def _look_at(self, member: Any) -> None:
        """Have it leave if it is gone."""
        if not self._is_gone(member):
            return
        if member.line is not None:  # it connects again if it goes on
            member.line.hang_up()
            member.line = None
        self.left[member.name] = self.members.pop(member.name)
        while len(self.left) > _NUM_LEFT:
            del self.left[next(iter(self.left))]
        self._has_left(member)

    def update(self, **changes: Any) -> None:
        """Set the state and wake the processes that have news; credits end with their epoch."""
        before, self.state = self.state, self.state._replace(**changes)
        is_news = self.state._replace(step=0) != before._replace(step=0)
        for member in self.members.values():
            if self.state.epoch != before.epoch:
                member.held, member.granted, member.is_back = 0, 0, False
            member.is_due |= is_news
            if member.has_news(self.state):
                member.wake()

    # What each kind of host does

    def do_bye(self, member: Any) -> None:
        """It leaves, after all that it has called."""
        member.has_said_bye = True

    def _call(self, member: Any, number: int, function: str, args: Any) -> None:
        try:
            member.answer(number, getattr(self, f"do_{function}")(member, *args))
        except Exception as error:  # the caller's
            member.answer(number, None, error)

    def _packed(self, answers: list[Any]) -> Any:
        """The answers, for the connection."""
        return answers

    @abstractmethod
    def _raise_limit(self, limit: int) -> None: ...

    @abstractmethod
    def _is_gone(self, member: Any) -> bool:
        """Whether it has left; asked when its connection has ended, and while it is silent."""

    @abstractmethod
    def _has_left(self, member: Any) -> None: ...

    def _came_back(self, member: Any) -> None:  # noqa: B027
        """It had left."""
