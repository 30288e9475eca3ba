"""A parameter server that processes reach over the network: a host in a Dask worker.

The waits of workers are tasks on this event loop; each answers the call that began it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from distributed.protocol import to_serialize

from .._engine.base import EngineTask
from .._engine.current import current_engine
from .._errors import StepSourceLostError, StopTraining
from .._step.global_step import GlobalStep
from ..protocols import ParameterServer, Protocol, Pushed, Snapshot
from ._dask_plugin import Host
from ._membership import Answer, Member
from ._messages import HostStatistics

logger = logging.getLogger("asynchooks")


@dataclass(slots=True, eq=False)
class Wait:
    """One worker's wait to begin or to end a step."""

    run: Callable[[], Any]
    """Begins it: a coroutine function, which may be called again."""
    task: EngineTask | None = None

    def interrupt(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.task = None


class ServedProcess(Member):
    """One process: its workers, and their waits."""

    __slots__ = ("has_left", "is_away", "waits", "workers")

    def __init__(self, name: str, wake: Callable[[], object], lease_secs: float) -> None:
        super().__init__(name, wake, lease_secs)
        self.is_away = False  # silent, and its workers have left
        self.has_left = False
        self.workers: set[int] = set()  # with a call from here, that have not left
        self.waits: dict[int, Wait] = {}  # by the call


class ServedParameters(Host):
    """The host of a parameter server; `host_parameter_server` makes it and closes it.

    A process that is silent for longer than the lease is away: its workers leave, so that others do
    not wait for them. At its next message they join again. One that ends without a word has as long
    to be started again.

    Args:
        lease_secs: as for `host_parameter_server`.
        options: of `ParameterServer`.
    """

    waits: ClassVar = frozenset(("begin_step", "end_step"))

    def __init__(
        self,
        worker: Any,
        parameters: Any,
        protocol: Protocol,
        num_workers: int,
        lease_secs: float,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self._is_gone = False
        self._worker = worker  # the Dask worker that it is on
        step = GlobalStep(multi_process=True, published_only=True)
        self.server = ParameterServer(
            parameters, protocol, num_workers=num_workers, global_step=step, **options
        )
        self.lease_secs: float = lease_secs

    async def aclose(self) -> None:
        """Make no further update, which ends all waits; later calls fail."""
        self.server.close()
        self._update()
        self._is_gone = True

    def welcome(self) -> Any:
        server, protocol = self.server, self.server.protocol
        waits = server.waits_before_step, server.waits_after_step
        return server.num_workers, repr(protocol), protocol.abandons_stale, *waits

    # What processes call

    def do_bye(self, member: ServedProcess) -> None:
        """It leaves; those of its workers that have not left stay until the lease ends."""
        member.has_left = True
        for number in list(member.waits):
            self.do_release(member, number)

    def do_release(self, member: ServedProcess, number: int) -> None:
        """It waits no more."""
        wait = member.waits.pop(number, None)
        if wait is not None:
            wait.interrupt()

    def do_join(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        self.server.join(worker)
        self._update()

    def do_leave(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        self.server.leave(worker)
        member.workers.discard(worker)
        self._update()

    async def do_begin_step(self, member: ServedProcess, worker: int) -> Snapshot:
        self._claim(member, worker)
        await self.server.begin_step(worker)
        return self.server.pull(worker)

    async def do_end_step(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        await self.server.end_step(worker)

    def do_pull(self, member: ServedProcess) -> Snapshot:
        return self.server.pull(0)

    def do_push(self, member: ServedProcess, worker: int, gradient: Any, version: int) -> Pushed:
        self._claim(member, worker)
        pushed = self.server.push(worker, gradient, version)
        self._update()
        return pushed

    def do_close(self, member: ServedProcess) -> None:
        self.server.close()
        self._update()

    def do_state_dict(self, member: ServedProcess) -> dict[str, Any]:
        return self.server.state_dict()

    def do_load_state_dict(self, member: ServedProcess, state: dict[str, Any]) -> None:
        self.server.load_state_dict(state)
        self._update()

    def do_staleness_counts(self, member: ServedProcess, worker: int | None) -> dict[int, int]:
        return self.server.staleness_counts(worker)

    def do_statistics(self, member: ServedProcess) -> HostStatistics:
        server, members = self.server, self.table.members.values()
        return HostStatistics(
            version=server.version,
            processes=len(members),
            processes_away=sum(each.is_away for each in members),
            workers_present=server.num_present,
            waits=sum(len(each.waits) for each in members),
            blocked_requests=sum(
                each.name in self.hang_ups and not each.is_away for each in members
            ),
            requests=self.num_calls,
            collected=server.num_collected,
            applied=server.num_applied,
            discarded=server.num_discarded,
        )

    # Its members

    def _member(self, name: str, wake: Callable[[], object], lease_secs: float) -> ServedProcess:
        known: ServedProcess | None = self.table.members.get(name)
        if known is None:
            return ServedProcess(name, wake, self.lease_secs)
        known.wake, known.num_sent = wake, 0  # its waits go on over the new connection
        return known

    def _packed(self, answers: list[Answer]) -> Any:
        return to_serialize([tuple(each) for each in answers])

    def _raise_limit(self, limit: int) -> None:
        self.server.global_step.raise_limit(limit)
        self._update()

    def _disconnected(self, member: ServedProcess) -> None:
        if not member.workers:
            self.table.leave(member)

    def _is_silent(self, member: ServedProcess) -> None:
        if not member.is_away:
            self._drop(member, f"No message came for {self.lease_secs:g} s from")

    def _is_back(self, member: ServedProcess) -> None:
        if member.is_away:
            logger.info("The process of the workers %s is back", sorted(member.workers))
            member.is_away = False
            for worker in sorted(member.workers):
                self.server.join(worker)
            for number in member.waits:
                self._start(member, number)

    async def _look_for_gone(self, secs: float) -> None:
        """The scheduler knows first that a Dask worker has died."""
        silent = [each for each in self.table.members.values() if each.secs_silent > secs]
        places = {each.place for each in silent if each.place and not each.is_away}
        if not places:
            return
        try:
            async with asyncio.timeout(secs):
                known = await self._worker.scheduler.ncores(workers=list(places))
        except (OSError, TimeoutError):
            return
        for member in silent:
            if member.place in places.difference(known) and member.secs_silent > secs:
                self._drop(member, f"The Dask worker {member.place} has left the cluster, and")

    def _drop(self, member: ServedProcess, why: str) -> None:
        member.is_away = True
        for wait in member.waits.values():  # they go on when it is back
            wait.interrupt()
        if member.workers:
            logger.warning(
                "%s the process of the workers %s: others do not wait for them any longer",
                why, sorted(member.workers),
            )  # fmt: skip
        for worker in sorted(member.workers):
            self.server.leave(worker)
        if member.has_left or not member.workers:
            self.table.leave(member)
        self._update()

    def _claim(self, member: ServedProcess, worker: int) -> None:
        self.server.check_worker(worker)
        if worker in member.workers:
            return
        for other in list(self.table.members.values()):
            if worker in other.workers:
                other.workers.remove(worker)
                if other.is_away:  # the worker has left with it, and now joins again
                    self.server.join(worker)
                if not other.workers and (other.has_left or other.is_away):
                    self.table.leave(other)
        member.workers.add(worker)

    def _call(self, member: ServedProcess, number: int, function: str, args: Any) -> None:
        if self._is_gone and function not in ("bye", "release"):
            error = StepSourceLostError("the parameter server is gone: its host has closed it")
            member.answer(number, None, error)
        else:
            super()._call(member, number, function, args)

    def _begin_wait(self, member: ServedProcess, number: int, wait: Callable[[], Any]) -> None:
        member.waits[number] = Wait(wait)
        self._start(member, number)

    def _start(self, member: ServedProcess, number: int) -> None:
        wait = member.waits[number]

        async def run() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = await wait.run()
            except StopTraining as stop:
                error = StopTraining(*stop.args)  # without its traceback, which holds frames
            except Exception as raised:  # the protocol's own, raised to the worker
                error = raised
            if wait.task is task:  # else it was interrupted, and has ended all the same
                del member.waits[number]
                member.answer(number, value, error)

        task = wait.task = current_engine().start(run)

    def _update(self) -> None:
        """The state is new: members that wait for it have news."""
        server, before = self.server, self.table.state
        step = server.global_step
        state = self.table.update(
            step.epoch, server.version, step.limit, is_closed=server.is_closed
        )
        if state.is_over and state.number != before.number:
            server.recheck_waits()  # perhaps by a limit that was set during a wait
