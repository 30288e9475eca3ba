"""Hosts of trainings in a Dask server: the scheduler counts steps, a worker holds parameters.

They run on the event loop of that server. A process has one connection to the host of each of its
trainings, over which its calls and their answers go; `_link.py` is its other end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from .._version import __version__
from ._membership import Answer, Member, MembershipTable
from ._messages import FOLLOW, Message

logger = logging.getLogger("asynchooks")

_TICKS_PER_LEASE, _LONGEST_TICK_SECS = 8, 10.0


class Host(ABC):
    """One training: its members, what they call, and the news for them.

    A method `do_<function>(member, *arguments)` is called once for each call, in their order. Those
    that are waits run in tasks, until they end or the member releases them.
    """

    waits: ClassVar[frozenset[str]] = frozenset()
    """The functions that are coroutines."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex[:12]  # another host of this name is not this one
        self.table = MembershipTable[Any]()
        self.hang_ups: dict[str, Callable[[], object]] = {}  # by member: ends its connection
        self.num_calls = 0
        """Ever."""
        self.is_done = False
        """Whether it is forgotten when the last member has left."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> str:
        return f"{self.incarnation}.{self.table.state.epoch}"

    lease_secs: float | None = None
    """That of all members; None: each has its own."""

    def welcome(self) -> Any:
        """What a process is told of the host when it connects."""
        return None

    def join(
        self, name: str, wake: Callable[[], object], lease_secs: float, message: Message
    ) -> Any:
        """A process has connected, perhaps again after its connection broke."""
        member: Any = self.table.join(self._member(name, wake, lease_secs))
        # a new process runs nothing before it knows the limit
        is_new = not message.epoch and self.table.state.limit is not None
        member.knows_limit = is_new or message.limit is not None
        if message.epoch == self.epoch and message.limit is not None:
            self.table.resume(member, message.num_held)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_members(), name="asynchooks-watch")
        return member

    def take(self, member: Any, wake: Callable[[], object], message: Message) -> None:
        """A message has come over the connection of `wake`; the answers are part of the news."""
        table = self.table
        if not self._is_present(member, wake):
            return  # its process has connected again, and repeats its calls there
        member.secs_silent = 0.0
        member.has_received(message.received)
        self._is_back(member)
        for number, function, args in message.calls:
            if number > member.taken:
                member.taken = number
                self.num_calls += function != "look"
                self._call(member, number, function, args)
        state, limit = table.state, message.limit
        member.knows_limit = limit is not None
        member.next_step = message.next_step
        if message.epoch == self.epoch:
            member.held = message.num_held + member.granted - message.num_granted
            member.uncounted = min(member.uncounted, member.held)
        if limit is not None and (state.limit is None or limit > state.limit):
            self._raise_limit(limit)
        elif member.has_news(state):
            member.wake()
        table.request(member, message.num_wanted)

    def news(self, member: Any) -> dict[str, Any]:
        """The news of one process, which are sent at once."""
        self.table.has_sent(member)
        state = self.table.state
        return {
            "epoch": self.epoch,
            "step": state.step,
            "limit": state.limit,
            "is_closed": state.is_closed,
            "num_granted": member.granted,
            "answers": self._packed(member.unsent()),
        }

    def ended(self, member: Any, wake: Callable[[], object]) -> None:
        """The connection of `wake` has ended."""
        if self._is_present(member, wake):
            self.hang_ups.pop(member.name, None)
            self._disconnected(member)

    def _is_present(self, member: Any, wake: Callable[[], object]) -> bool:
        """Whether the connection of `wake` is the process's last one, and it has not left."""
        known: Any = self.table.members.get(member.name)
        return known is member and bool(known.wake == wake)

    # What a call may be, for any host

    def do_look(self, member: Any) -> int:
        """It is alive, and asks whether this host is."""
        return self.table.state.step

    @abstractmethod
    def do_bye(self, member: Any) -> None:
        """It leaves, after all that it has called."""

    # What each kind of host does

    def _member(self, name: str, wake: Callable[[], object], lease_secs: float) -> Any:
        return Member(name, wake, lease_secs)

    def _packed(self, answers: list[Answer]) -> Any:
        """The answers, for the connection."""
        return [tuple(each) for each in answers]

    @abstractmethod
    def _raise_limit(self, limit: int) -> None: ...

    @abstractmethod
    def _disconnected(self, member: Any) -> None: ...

    @abstractmethod
    def _is_silent(self, member: Any) -> None:
        """It has sent nothing for its lease; called at each tick until it does."""

    def _is_back(self, member: Any) -> None:  # noqa: B027
        """It has sent something."""

    async def _look_for_gone(self, secs: float) -> None:  # noqa: B027
        """At each tick: find members that are gone for sure."""

    def _begin_wait(self, member: Any, number: int, wait: Callable[[], Any]) -> None:
        """Have the coroutine of `wait` answer the call when it ends."""
        raise NotImplementedError

    def _call(self, member: Any, number: int, function: str, args: Any) -> None:
        do = partial(getattr(self, f"do_{function}"), member, *args)
        if function in self.waits:
            self._begin_wait(member, number, do)
            return
        try:
            member.answer(number, do())
        except Exception as error:  # the caller's
            member.answer(number, None, error)

    async def _watch_members(self) -> None:
        while self.table.members:
            lease_secs = min(each.lease_secs for each in self.table.members.values())
            secs = min(lease_secs / _TICKS_PER_LEASE, _LONGEST_TICK_SECS)
            await asyncio.sleep(secs)
            for member in list(self.table.members.values()):
                if member.tick(secs):
                    self._is_silent(member)
            await self._look_for_gone(secs)


class Counter(Host):
    """A training without parameters: what its processes run, the scheduler counts."""

    def do_count(self, member: Member, epoch: str, num_runs: int) -> int:
        """Runs have ended; those of an earlier epoch do not count. Returns the step after them."""
        table, state = self.table, self.table.state
        if epoch == self.epoch:
            table.update(state.epoch, state.step + table.settle(member, num_runs), state.limit)
        return table.state.step

    def do_publish(self, member: Member, epoch: str, step: int) -> int:
        """The step is at least this; returns it."""
        state = self.table.state
        if epoch == self.epoch and step > state.step:
            self.table.update(state.epoch, step, state.limit)
        return self.table.state.step

    def do_restart(self, member: Member, step: int, of: str) -> int:
        """A new epoch begins there; `of`: the one that it ends, once, or "" for the present one."""
        state = self.table.state
        if of in ("", self.epoch):
            self.table.update(state.epoch + 1, step, state.limit)
        return self.table.state.step

    def do_forget(self, member: Member) -> None:
        self.is_done = True

    def do_bye(self, member: Member) -> None: ...

    def do_statistics(self, member: Member) -> dict[str, Any]:
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

    def _raise_limit(self, limit: int) -> None:
        state = self.table.state
        self.table.update(state.epoch, state.step, limit)

    def _disconnected(self, member: Member) -> None:
        self.table.leave(member)  # whether it has left or has died: its credits are free

    def _is_silent(self, member: Member) -> None:
        self.hang_ups[member.name]()


class Hosts:
    """All hosts in one Dask server, by the names of their trainings; `hosts_of` makes it."""

    def __init__(self, server: Any) -> None:
        self.by_name: dict[str, Host] = {}
        server.handlers[FOLLOW] = self._follow

    async def _follow(
        self,
        comm: Any,
        training: str,
        counts: bool,
        version: str,
        uid: str,
        place: str | None,
        lease_secs: float,
        message: dict[str, Any],
    ) -> Any:
        """Serve one process until its connection ends.

        Args:
            counts: whether the training has no parameters: then its first process begins it.
            place: the address of the process's Dask worker, if it is one.
        """
        host = self.by_name.get(training)
        if host is None and counts:
            host = self.by_name[training] = Counter()
        if version != __version__ or host is None:
            await comm.write({"version": __version__, "is_gone": host is None})
            return Status.dont_reply
        news = asyncio.Event()
        wake = news.set
        member = host.join(uid, wake, lease_secs, Message.unpacked(message))
        member.place = place
        host.hang_ups[uid] = comm.abort
        try:
            own = {"version": __version__, "welcome": host.welcome(), "lease_secs": host.lease_secs}
            await comm.write({**own, **host.news(member)})
            async with asyncio.TaskGroup() as group:
                group.create_task(_send_news(comm, host, member, news))
                while True:
                    host.take(member, wake, Message.unpacked(await comm.read()))
        except* OSError as ended:  # it left, or its process died: handled alike
            logger.info("%s has left the training %r: %r", uid, training, ended.exceptions[0])
        finally:
            host.ended(member, wake)
            if host.is_done and not host.table.members:
                self.by_name.pop(training, None)
            comm.abort()
        return Status.dont_reply


async def _send_news(comm: Any, host: Host, member: Any, news: asyncio.Event) -> None:
    """Send the newest state: a slow process gets fewer messages, not a longer queue."""
    while True:
        await news.wait()
        news.clear()
        await comm.write(host.news(member))


def hosts_of(server: Any) -> Hosts:
    """Those of a scheduler or a worker."""
    if not hasattr(server, "asynchooks_hosts"):
        server.asynchooks_hosts = Hosts(server)
    hosts: Hosts = server.asynchooks_hosts
    return hosts


class StepPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask has no types
    """Brings the hosts to a scheduler. `DaskCluster` registers it; it ends with the scheduler."""

    name = "asynchooks"
    idempotent = True  # a second registration keeps the step

    async def start(self, scheduler: Any) -> None:
        hosts_of(scheduler)


def dask_setup(scheduler: Any) -> None:
    """For `dask scheduler --preload asynchooks.distributed._dask_plugin`."""
    hosts_of(scheduler)
    with suppress(ValueError):
        scheduler.add_plugin(StepPlugin(), name=StepPlugin.name)
