"""Counter: a training without parameters: it counts runs, and admits them below a limit."""

from __future__ import annotations

import math
from typing import Any

from ._credits import share_of
from ._membership import Host, Line, Member
from ._messages import Message


class Counter(Host):
    """The host of a counted training, on the scheduler.

    Invariant: step + credits held by processes <= limit, unless the limit was set below that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanting: dict[Member, int] = {}  # how many credits, in order of asking

    # What processes call

    def do_count(self, member: Member, epoch: str, num_runs: int, least: int = 0) -> int:
        """Runs have ended, and the step is at least so much; returns the step after them.

        What is said of an earlier epoch does not count.
        """
        if epoch == self.epoch:
            counted = self.state.step + int(min(num_runs, self._room_for(member)))
            self.update(step=max(counted, least))
        return self.state.step

    def do_restart(self, member: Member, step: int, of: str) -> int:
        """A new epoch begins there; `of`: the one that it ends, once, or "" for the present one."""
        if of in ("", self.epoch):
            self.update(epoch=self.state.epoch + 1, step=step)
        return self.state.step

    def do_forget(self, member: Member) -> None:
        self.is_done = True

    def do_statistics(self, member: Member) -> dict[str, Any]:
        members = self.members.values()
        return {
            "step": self.state.step,
            "limit": self.state.limit,
            "epoch": self.epoch,
            "num_processes": len(members),
            "num_held": sum(each.held for each in members),
            "num_wanting": len(self._wanting),
            "num_waiting": sum(each.next_step < math.inf for each in members),
        }

    # Credits

    def take(self, member: Member, line: Line, message: Message) -> bool:
        if not super().take(member, line, message):
            return False
        # a new process runs nothing before it knows the limit
        member.knows_limit = (message if message.epoch else self.state).limit is not None
        if message.epoch == self.epoch:
            held = message.num_held + member.granted - message.num_granted
            member.held = int(min(held, self._room_for(member)))
        if message.num_wanted:
            self._wanting[member] = message.num_wanted
        else:
            self._wanting.pop(member, None)
        self._grant()
        return True

    def _num_free(self, limit: int) -> int:
        held: int = sum(each.held for each in self.members.values())
        return limit - self.state.step - held

    def _room_for(self, member: Member) -> float:
        """How many runs of a process count: all, unless it was away.

        Others may have been granted the same steps then, and of late runs only those count that
        lead to steps which no other process holds.
        """
        limit = self.state.limit
        if limit is None or not member.is_back:
            return math.inf
        return max(0, self._num_free(limit) + member.held)

    def _grant(self) -> None:
        """Grant credits to the processes that want some, as long as there are any.

        Not before each has reported its runs under way without credits, from before it knew the
        limit.
        """
        limit = self.state.limit
        if limit is None or not all(each.knows_limit for each in self.members.values()):
            return
        for member, num_wanted in list(self._wanting.items()):
            free = self._num_free(limit)
            if free <= 0:
                return
            num = min(num_wanted, share_of(free, len(self.members)))
            member.held += num
            member.granted += num
            del self._wanting[member]
            member.is_due = True
            member.wake()

    def _raise_limit(self, limit: int) -> None:
        self.update(limit=limit)

    def _is_gone(self, member: Member) -> bool:
        # a process that has left cannot be told from one that has died: its credits are free
        return member.line is None or member.secs_silent > member.lease_secs

    def _has_left(self, member: Member) -> None:
        self._wanting.pop(member, None)
        self._grant()
