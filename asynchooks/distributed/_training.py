"""What a scheduler keeps of one training: step, limit, and who may run how many steps.

A state machine for one event loop. It neither waits nor sends: it wakes whom it has news for,
and the news is made when it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What one process says to the scheduler; but for the actions, how things stand with it."""

    number: int
    """Of the last one with an action, or a heartbeat: counted from 1, and each is answered."""
    epoch: str
    """The one that it knows; runs of another do not count any more."""
    num_runs: int = 0
    """Action: steps that were run."""
    published: int = 0
    """Action: a step that is reached at least."""
    restart_at: int | None = None
    """Action: a step at which a new epoch begins."""
    restart_of: str = ""
    """The epoch that ends by it: once, however many ask for it; empty: whichever there is."""
    is_done: bool = False
    """Action: forget the training when the last process has left it."""
    next_step: float = math.inf
    """The lowest step that somebody waits for there."""
    limit: int | None = None
    """The largest limit that it knows of; None: its runs are under way without tickets."""
    num_held: int = 0
    """Runs that are under way there or may begin, without those of `num_runs`."""
    num_granted: int = 0
    """Tickets that it has received in this epoch, ever: later ones are not in `num_held`."""
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
        self.held = 0  # tickets that it has or is being sent
        self.granted = 0  # ever, in this epoch
        self.wanted = 0
        self.uncounted = 0  # of those held, the ones that it ran too long: others have them now
        self.answer = (0, 0)  # number of its last request, the step after that
        self.num_silent = 0  # looks at it since it was heard of


class Training:
    """The state of one training, for all its processes.

    Invariant: step + tickets held by members <= limit, unless the limit was set below that.

    Args:
        incarnation: what no other scheduler's training of this name has: its step is not ours.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.num_restarts = 0
        self.step = 0
        self.limit: int | None = None
        self.is_done = False
        self.members: dict[str, Member] = {}
        self._wanting: dict[str, Member] = {}  # in order of asking
        self._left: dict[str, tuple[int, int]] = {}  # the last answers of those who have left

    @property
    def epoch(self) -> str:
        return _epoch(self.incarnation, self.num_restarts)

    @property
    def num_held(self) -> int:
        return sum(each.held - each.uncounted for each in self.members.values())

    def join(self, uid: str, wake: Callable[[], None], how: Request) -> Member:
        """Take in a process, or one that comes back after its connection broke."""
        if uid in self.members:
            self.leave(self.members[uid])
        member = self.members[uid] = Member(uid, wake)
        member.answer = self._left.pop(uid, (0, 0))
        # a new one runs nothing before it has heard of the limit that there is
        is_told = how.number == 0 and self.limit is not None
        member.knows_limit = is_told or how.limit is not None
        if how.epoch == self.epoch and how.limit is not None:
            free = how.num_held if self.limit is None else self.limit - self.step - self.num_held
            member.held = how.num_held
            member.uncounted = how.num_held - max(0, min(free, how.num_held))
        return member

    def leave(self, member: Member) -> None:
        """The process has gone: others may run what it did not."""
        if self.members.get(member.uid) is not member:
            return
        del self.members[member.uid]
        self._wanting.pop(member.uid, None)
        self._left[member.uid] = member.answer
        while len(self._left) > 1000:  # whoever has not come back by then never will
            del self._left[next(iter(self._left))]
        self._hand_out()

    def take(self, member: Member, request: Request) -> None:
        """Do what a process asks for; its answer is part of its news."""
        member.num_silent = 0
        if request.number > member.answer[0]:  # else it does not ask for anything, or asks again
            self._act(member, request)
            member.answer = (request.number, self.step)
            member.wake()
        self._note(member, request)
        self._hand_out()

    def news(self, member: Member) -> dict[str, Any]:
        """All that a process should know now, made when it is sent."""
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

    def _hand_out(self) -> None:
        """Give tickets to those who ask, as long as there are any.

        Not before everybody has said how many runs it has under way that need none, as it did
        not know of a limit when they began. Near the limit a share each, so that one process does
        not hold what others could run.
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
    """Which training, of which scheduler, an epoch belongs to."""
    return epoch.partition(".")[0]


def first_epoch(incarnation: str) -> str:
    """The one in which a training begins."""
    return _epoch(incarnation, 0)


def _epoch(incarnation: str, num_restarts: int) -> str:
    return f"{incarnation}.{num_restarts}"


def message_of(request: Request) -> dict[str, Any]:
    """What goes over the wire: what is as ever is left out (29 us to pack become 9)."""
    plain = Request._field_defaults
    return {
        key: value
        for key, value in request._asdict().items()
        if key not in plain or value != plain[key]
    }


def request_of(message: Mapping[str, Any]) -> Request:
    """What came over the wire; what a newer version added is left out."""
    return Request(**{key: message[key] for key in Request._fields if key in message})
