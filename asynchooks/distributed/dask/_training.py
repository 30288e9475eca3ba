"""One training at a scheduler: the requests of its processes, and the news for them.

It neither waits nor sends: the plugin does. The news are made when they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._membership import Member, MembershipTable


class Request(NamedTuple):
    """What one process sends to the scheduler: actions, and the present state of the process."""

    number: int  # of the last request with an action, or heartbeat: from 1; each is answered
    epoch: str  # that it knows; runs of another one do not count any more
    # Actions
    num_runs: int = 0  # steps that were run
    published: int = 0  # a step that is reached at least
    restart_at: int | None = None  # a step at which a new epoch begins
    restart_of: str = ""  # the epoch that it ends, once; empty: the present one
    is_done: bool = False  # forget the training when the last process has left it
    # State
    next_step: float = math.inf  # the lowest step that a task there waits for
    limit: int | None = None  # the largest that it knows; None: it runs without credits
    num_held: int = 0  # runs under way there, or that may begin, without those of `num_runs`
    num_granted: int = 0  # credits received in this epoch: later ones are not in `num_held`
    num_wanted: int = 0  # credits that it waits for


class Training:
    """The state of one training, for all its processes.

    Args:
        incarnation: unique to this scheduler: another one's training of this name is not this one.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.is_done = False
        self.table: MembershipTable[Member] = MembershipTable()

    @property
    def epoch(self) -> str:
        return _epoch(self.incarnation, self.table.state.epoch)

    def join(self, member: Member, request: Request) -> Member:
        """Add a process, or one that comes back after its connection broke."""
        member = self.table.join(member)
        # a new process runs nothing before it knows the limit
        is_new = request.number == 0 and self.table.state.limit is not None
        member.knows_limit = is_new or request.limit is not None
        if request.epoch == self.epoch and request.limit is not None:
            self.table.resume(member, request.num_held)
        return member

    def take(self, member: Member, request: Request) -> None:
        """Handle a request; the answer is part of the member's news."""
        table = self.table
        if table.members.get(member.name) is not member:
            return  # its process has connected again, and repeats the request there
        if table.is_new(member, request.number):  # else it has no action, or is repeated
            self._act(member, request)
            member.answer = (request.number, table.state.step)
            table.notify(member)
        state, limit = table.state, request.limit
        member.knows_limit = limit is not None
        member.next_step = request.next_step
        if request.epoch == self.epoch:
            member.held = request.num_held + member.granted - request.num_granted
            member.uncounted = min(member.uncounted, member.held)
        if limit is not None and (state.limit is None or limit > state.limit):
            table.update(state.epoch, state.step, limit)
        elif member.has_news(state):
            member.wake()
        table.request(member, request.num_wanted)

    def news(self, member: Member) -> dict[str, Any]:
        """The news of one process, which are sent at once."""
        self.table.has_sent(member)
        state = self.table.state
        return {
            "epoch": self.epoch,
            "step": state.step,
            "limit": state.limit,
            "num_granted": member.granted,
            "answer": member.answer,
        }

    def statistics(self) -> dict[str, Any]:
        table = self.table
        return {
            "step": table.state.step,
            "limit": table.state.limit,
            "epoch": self.epoch,
            "num_processes": len(table.members),
            "num_held": table.num_held,
            "num_wanting": table.num_wanting,
            "num_waiting": sum(each.next_step < math.inf for each in table.members.values()),
        }

    def _act(self, member: Member, request: Request) -> None:
        table, state = self.table, self.table.state
        self.is_done |= request.is_done
        if request.restart_at is not None:
            if request.restart_of in ("", self.epoch):
                table.update(state.epoch + 1, request.restart_at, state.limit)
        elif request.epoch == self.epoch:
            step = state.step + table.settle(member, request.num_runs)
            table.update(state.epoch, max(step, request.published), state.limit)


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
