"""One training at a scheduler: its step, its limit, and the tickets of its processes.

A state machine for one event loop. It neither waits nor sends: it wakes the members that have news,
and the news is made when it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What one process sends to the scheduler: actions, and the present state of the process."""

    number: int
    """Of the last request with an action, or heartbeat: counted from 1; each is answered."""
    epoch: str
    """The epoch that it knows; runs of another one do not count any more."""
    num_runs: int = 0
    """Action: steps that were run."""
    published: int = 0
    """Action: a step that is reached at least."""
    restart_at: int | None = None
    """Action: a step at which a new epoch begins."""
    restart_of: str = ""
    """The epoch that it ends: once, however many ask for it; empty: the present one."""
    is_done: bool = False
    """Action: forget the training when the last process has left it."""
    next_step: float = math.inf
    """The lowest step that a task there waits for."""
    limit: int | None = None
    """The largest limit that it knows of; None: its runs are under way without tickets."""
    num_held: int = 0
    """Runs that are under way there or may begin, without those of `num_runs`."""
    num_granted: int = 0
    """Tickets received in this epoch so far: later ones are not in `num_held`."""
    num_wanted: int = 0
    """Tickets that it waits for."""


class Member:
    """One process at a training, from its connection to the end of that."""

    __slots__ = (
        "answer", "granted", "held", "knows_limit", "next_step", "num_silent", "uid", "uncounted",
        "wake", "wanted",
    )  # fmt: skip

    def __init__(self, uid: str, wake: Callable[[], None]) -> None:
        self.uid = uid
        self.wake = wake
        self.next_step: float = math.inf
        self.knows_limit = False
        self.held = 0  # tickets that it has, or that are on the way
        self.granted = 0  # ever, in this epoch
        self.wanted = 0
        self.uncounted = 0  # of those held, the ones that were given to others while it was away
        self.answer = (0, 0)  # number of its last request, the step after that
        self.num_silent = 0  # checks since its last message


class Training:
    """The state of one training, for all its processes.

    Invariant: step + tickets held by members <= limit, unless the limit was set below that.

    Args:
        incarnation: unique to this scheduler: another one's training of this name is not this one.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.num_restarts = 0
        self.step = 0
        self.limit: int | None = None
        self.is_done = False
        self.members: dict[str, Member] = {}
        self._wanting: dict[str, Member] = {}  # in order of asking
        self._left: dict[str, tuple[int, int]] = {}  # the last answers of processes that have left

    @property
    def epoch(self) -> str:
        return _epoch(self.incarnation, self.num_restarts)

    @property
    def num_held(self) -> int:
        return sum(each.held - each.uncounted for each in self.members.values())

    def join(self, uid: str, wake: Callable[[], None], request: Request) -> Member:
        """Take in a process, or one that comes back after its connection broke."""
        if uid in self.members:
            self.leave(self.members[uid])
        member = self.members[uid] = Member(uid, wake)
        member.answer = self._left.pop(uid, (0, 0))
        # a new process runs nothing before it knows the limit
        is_new = request.number == 0 and self.limit is not None
        member.knows_limit = is_new or request.limit is not None
        if request.epoch == self.epoch and request.limit is not None:
            free = (
                request.num_held if self.limit is None else self.limit - self.step - self.num_held
            )
            member.held = request.num_held
            member.uncounted = request.num_held - max(0, min(free, request.num_held))
        return member

    def leave(self, member: Member) -> None:
        """The process has gone: its tickets are free for others."""
        if self.members.get(member.uid) is not member:
            return
        del self.members[member.uid]
        self._wanting.pop(member.uid, None)
        self._left[member.uid] = member.answer
        while len(self._left) > 1000:  # such a process will not come back
            del self._left[next(iter(self._left))]
        self._grant()

    def take(self, member: Member, request: Request) -> None:
        """Handle a request; the answer is part of the member's news."""
        member.num_silent = 0
        if request.number > member.answer[0]:  # else it has no action, or is repeated
            self._act(member, request)
            member.answer = (request.number, self.step)
            member.wake()
        self._note(member, request)
        self._grant()

    def news(self, member: Member) -> dict[str, Any]:
        """The present state for one process; made when it is sent."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "limit": self.limit,
            "num_granted": member.granted,
            "answer": member.answer,
        }

    def statistics(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "limit": self.limit,
            "epoch": self.epoch,
            "num_processes": len(self.members),
            "num_held": self.num_held,
            "num_wanting": len(self._wanting),
            "num_waiting": sum(each.next_step < math.inf for each in self.members.values()),
        }

    def _act(self, member: Member, request: Request) -> None:
        self.is_done |= request.is_done
        if request.restart_at is not None:
            if request.restart_of in ("", self.epoch):
                self._restart(request.restart_at)
        elif request.epoch == self.epoch:
            late = min(request.num_runs, member.uncounted)
            member.uncounted -= late
            self.step = max(self.step + request.num_runs - late, request.published)
        is_over = self.limit is not None and self.step >= self.limit
        for each in self.members.values():
            if each.next_step <= self.step:
                each.next_step = math.inf
                each.wake()
            elif is_over and each.wanted:
                each.wake()

    def _restart(self, step: int) -> None:
        self.num_restarts += 1
        self.step = step
        for each in self.members.values():
            each.held = each.granted = each.uncounted = 0
            each.wake()

    def _note(self, member: Member, request: Request) -> None:
        if request.limit is not None and request.limit > (self.limit or -1):
            self.limit = request.limit
            for each in self.members.values():
                each.wake()
        member.knows_limit = request.limit is not None
        member.next_step = request.next_step
        if request.next_step <= self.step:
            member.next_step = math.inf
            member.wake()
        if request.epoch == self.epoch:
            member.held = request.num_held + member.granted - request.num_granted
            member.uncounted = min(member.uncounted, member.held)
        member.wanted = request.num_wanted
        if member.wanted and self.limit is not None and self.step >= self.limit:
            member.wake()
        if not member.wanted:
            self._wanting.pop(member.uid, None)
        elif member.uid not in self._wanting:
            self._wanting[member.uid] = member

    def _grant(self) -> None:
        """Grant tickets to the members that want some, as long as there are any.

        Not before every member has reported its runs under way without tickets, from before it
        knew the limit. Near the limit each gets a share, so that one process does not hold tickets
        that others could use.
        """
        if self.limit is None or not self._wanting:
            return
        if not all(each.knows_limit for each in self.members.values()):
            return
        free = self.limit - self.step - self.num_held
        for member in list(self._wanting.values()):
            if free <= 0:
                return
            num = min(member.wanted, max(1, free // (2 * len(self.members))))
            member.held += num
            member.granted += num
            free -= num
            member.wanted = 0
            del self._wanting[member.uid]
            member.wake()


def incarnation_of(epoch: str) -> str:
    """The incarnation of the training that an epoch belongs to."""
    return epoch.partition(".")[0]


def first_epoch(incarnation: str) -> str:
    """The epoch in which a training begins."""
    return _epoch(incarnation, 0)


def _epoch(incarnation: str, num_restarts: int) -> str:
    return f"{incarnation}.{num_restarts}"


def message_of(request: Request) -> dict[str, Any]:
    """The message of a request: default values are left out (9 us to pack instead of 29)."""
    plain = Request._field_defaults
    return {
        key: value
        for key, value in request._asdict().items()
        if key not in plain or value != plain[key]
    }


def request_of(message: Mapping[str, Any]) -> Request:
    """The request of a message; unknown fields are ignored."""
    return Request(**{key: message[key] for key in Request._fields if key in message})
