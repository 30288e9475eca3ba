"""A parameter server that processes reach over the network: a host in a Dask worker.

The waits of workers are tasks on this event loop; each answers the call that began it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from distributed.protocol import deserialize, pickle, to_serialize

from .._engine.base import EngineTask
from .._engine.current import current_engine
from .._errors import StopTraining
from .._step.global_step import GlobalStep
from ..protocols import ParameterServer, Protocol, Pushed, Snapshot
from ._membership import Host, Member

logger = logging.getLogger("asynchooks")

_GONE_SECS = 5.0
"""After these a process has died whose connection has ended: a live one connects again at once."""


class ServedProcess(Member):
    """One process: its workers, and their waits."""

    def __init__(self, name: str, lease_secs: float) -> None:
        super().__init__(name, lease_secs)
        self.waits: dict[int, Callable[[], Awaitable[Any]]] = {}  # by the call
        self.tasks: dict[int, EngineTask] = {}  # of these waits, unless the process has left


class ServedParameters(Host):
    """The host of a parameter server; `host_parameter_server` makes it and has it closed.

    When a process has left its workers leave, so that others do not wait for them; when it comes
    back they join again, and its waits go on. It has left when it is silent for longer than the
    lease. So has one whose connection has ended, a little later; but one that ended with an error,
    and said so, has the lease to be started again.

    Args:
        lease_secs: as for `host_parameter_server`.
        options: of `ParameterServer`.
    """

    member_type = ServedProcess

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        num_workers: int,
        lease_secs: float,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self._owners: dict[int, ServedProcess] = {}  # the last to call for a worker, until it left
        step = GlobalStep(multi_process=True, published_only=True)
        self.server = ParameterServer(
            parameters, protocol, num_workers=num_workers, global_step=step, **options
        )
        self.lease_secs = lease_secs

    def welcome(self) -> Any:
        server, protocol = self.server, self.server.protocol
        return server.num_workers, repr(protocol), protocol.abandons_stale, server.waits_after_step

    # What processes call

    def do_release(self, member: ServedProcess, number: int) -> None:
        """It waits no more."""
        if member.waits.pop(number, None) is not None:
            _interrupt(member, number)
            member.answer(number, None)

    def do_join(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        self.server.join(worker)

    def do_leave(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        del self._owners[worker]
        self.server.leave(worker)

    async def wait_begin_step(self, member: ServedProcess, worker: int) -> Snapshot:
        self._claim(member, worker)
        await self.server.begin_step(worker)
        return self.server.pull(worker)

    async def wait_end_step(self, member: ServedProcess, worker: int) -> None:
        self._claim(member, worker)
        await self.server.end_step(worker)

    def do_ask(self, member: ServedProcess, function: str, *args: Any) -> Any:
        """Call a method of the server itself."""
        return getattr(self.server, function)(*args)

    def do_pull(self, member: ServedProcess) -> Snapshot:
        return self.server.pull(0)

    def do_close(self, member: ServedProcess) -> None:
        """Make no further update, which ends all waits; forgotten once all have left."""
        self.server.close()
        self.is_done = True

    def do_push(self, member: ServedProcess, worker: int, gradient: Any, version: int) -> Pushed:
        self._claim(member, worker)
        return self.server.push(worker, gradient, version)

    def do_statistics(self, member: ServedProcess) -> dict[str, int]:
        server, members = self.server, self.members.values()
        away = [each for each in self.left.values() if self._workers_of(each)]
        return {
            "version": server.version,
            "processes": len(members) + len(away),
            "processes_away": len(away),
            "processes_connected": sum(each.line is not None for each in members),
            "workers_present": server.num_present,
            "waits": sum(len(each.waits) for each in [*members, *away]),
            "requests": self.num_calls,
            "collected": server.num_collected,
            "applied": server.num_applied,
            "discarded": server.num_discarded,
        }

    def _call(self, member: ServedProcess, number: int, function: str, args: Any) -> None:
        try:
            args = deserialize(*args)
        except Exception as error:
            text = f"the parameter server cannot read what was sent: {error!r}; "
            text += "give arrays and numbers, or install there what these objects need"
            member.answer(number, None, TypeError(text))
            return
        if hasattr(self, f"wait_{function}"):
            member.waits[number] = partial(getattr(self, f"wait_{function}"), member, *args)
            self._start(member, number)
        else:
            super()._call(member, number, function, args)
        self._update()

    def _start(self, member: ServedProcess, number: int) -> None:
        wait = member.waits[number]

        async def run() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = await wait()
            except StopTraining as stop:
                error = StopTraining(*stop.args)  # without its traceback, which holds frames
            except Exception as raised:  # the protocol's own, raised to the worker
                error = raised
            if member.tasks.get(number) is task:  # else it was interrupted, and has ended anyway
                del member.tasks[number], member.waits[number]
                member.answer(number, value, error)
            self._update()  # what was collected before a restore may have been due

        task = member.tasks[number] = current_engine().start(run)

    def _packed(self, answers: list[Any]) -> Any:
        return to_serialize([(call, value, _portable(error)) for call, value, error in answers])

    # Its members

    def _raise_limit(self, limit: int) -> None:
        self.server.global_step.raise_limit(limit)
        self.server.recheck_waits()
        self._update()

    def _workers_of(self, member: ServedProcess) -> list[int]:
        return sorted(worker for worker, each in self._owners.items() if each is member)

    def _is_gone(self, member: ServedProcess) -> bool:
        patience = member.lease_secs
        if member.line is None:
            if not self._workers_of(member):
                return True
            if patience < math.inf and not member.has_said_bye:
                patience = min(patience, _GONE_SECS)
        return member.secs_silent > patience

    def _has_left(self, member: ServedProcess) -> None:
        for number in list(member.tasks):  # the waits go on when it is back
            _interrupt(member, number)
        for worker in self._workers_of(member):
            logger.warning(
                "The process of worker %d has left, or no message came from it for %g s: others do "
                "not wait for it any longer",
                worker,
                member.lease_secs,
            )
            try:
                self.server.leave(worker)
            except Exception:  # of an update; it must not end the watch over the other processes
                logger.exception("An update failed that was due when worker %d had left", worker)
        self._update()

    def _came_back(self, member: ServedProcess) -> None:
        for worker in self._workers_of(member):
            logger.info("The process of worker %d is back", worker)
            self.server.join(worker)
        for number in member.waits:
            self._start(member, number)

    def _claim(self, member: ServedProcess, worker: int) -> None:
        self.server.check_worker(worker)
        before, self._owners[worker] = self._owners.get(worker, member), member
        if before is not member:
            if before.name in self.members:
                self._look_at(before)
            else:  # the worker has left with it, and now joins again
                self.server.join(worker)

    def _update(self) -> None:
        """The state may be new: processes that wait for it have news."""
        server, step = self.server, self.server.global_step
        self.update(
            epoch=step.epoch, step=server.version, limit=step.limit, is_closed=server.is_closed
        )


def _interrupt(member: ServedProcess, number: int) -> None:
    task = member.tasks.pop(number, None)
    if task is not None:
        task.cancel()


def _portable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same if its process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
