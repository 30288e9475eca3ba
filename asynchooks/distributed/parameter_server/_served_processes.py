"""The processes that a parameter server serves: their workers, and the waits of these.

Which of them are alive and have news is known by the membership table; `Host` answers requests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..._engine.base import Engine, EngineTask, Slot
from ..._engine.current import current_engine
from ..._errors import StopTraining
from ..._step.gate import Worker
from ...protocols import ParameterServer
from .._membership import Member, MembershipTable, State
from ._messages import Ending, Report

logger = logging.getLogger("asynchooks")

_TICKS = 8
"""In the time of a lease; a process is detected as silent by so much later at most."""


class Wait:
    """One worker's wait to begin or to end a step; its process has numbered it."""

    __slots__ = ("error", "is_awaited", "is_begin", "is_done", "number", "round", "task", "worker")

    def __init__(self, number: int, worker: int, *, is_begin: bool) -> None:
        self.number = number
        self.worker = worker
        self.is_begin = is_begin
        self.is_done = False
        self.is_awaited = False  # its process expects the end by `events`
        self.error: Exception | None = None
        self.task: EngineTask | None = None
        self.round = 0  # of its tasks: an interrupted one may still end

    def interrupt(self) -> None:
        self.round += 1
        if self.task is not None:
            self.task.cancel()


class ServedProcess(Member):
    """One process: its workers, their waits, and the one request that it blocks."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self._wake, _TICKS)
        self.place: str | None = None  # the address of its Dask worker, if it is one
        self.is_away = False  # silent, and its workers have left
        self.workers: set[int] = set()  # with a request from here, that have not left
        self.waits: dict[int, Wait] = {}
        self.turn = 0
        self.slot: Slot | None = None  # of the blocked request
        self.session: Worker | None = None  # its sessions, as the server's step sees them
        self._ended: dict[int, Wait] = {}  # by the order of their ends, until received
        self._num_ended = 0

    @property
    def is_blocked(self) -> bool:
        return self.slot is not None and not self.slot.is_woken

    @property
    def num_ended(self) -> int:
        """Waits whose end the process has not reported as received."""
        return len(self._ended)

    def begin_turn(self) -> int:
        """A request for news has come, and replaces the one before."""
        self.turn += 1
        self._wake()
        return self.turn

    def release(self, report: Report) -> None:
        """Drop the waits that the process has abandoned, or whose ends it has received."""
        for number in report.released:
            wait = self.waits.pop(number, None)
            if wait is not None:
                wait.interrupt()
        for order in [order for order in self._ended if order <= report.received]:
            self.waits.pop(self._ended.pop(order).number, None)

    def end(self, wait: Wait) -> None:
        """A wait has ended whose process expects the end by its blocked request."""
        self._num_ended += 1
        self._ended[self._num_ended] = wait
        self._wake()

    def endings(self) -> tuple[int, list[Ending]]:
        """(The number of the last one, all that have not been received), in order."""
        waits = [each for each in self._ended.values() if each.number in self.waits]
        return self._num_ended, [Ending(each.number, each.error) for each in waits]

    def has_news(self, state: State) -> bool:
        return bool(self._ended) or super().has_news(state)

    def _wake(self) -> None:
        if self.slot is not None:
            self.slot.wake()


class ServedProcesses:
    """All processes of a server, and the waits of their workers, each a task here.

    A process that is silent for longer than the lease is away: its workers leave, so that others do
    not wait for them, and join again at its next request.
    """

    def __init__(self, server: ParameterServer, lease_secs: float) -> None:
        self._server = server
        self._lease_secs = lease_secs
        self.tick_secs = lease_secs / _TICKS
        """Seconds between two calls of `tick`."""
        self.table: MembershipTable[ServedProcess] = MembershipTable()
        self.num_under_way = 0
        """Tasks of waits."""

    def open(self, name: str) -> ServedProcess:
        process = self.table.members.get(name) or self.table.join(ServedProcess(name))
        process.num_silent = 0
        return process

    def close(self, name: str) -> None:
        """The process has left. Workers that have not may join again from another process."""
        process = self.open(name)
        process.has_left = True
        process.begin_turn()
        for wait in process.waits.values():
            wait.interrupt()
        process.waits.clear()
        self._set_session(process, None)
        if not process.workers:
            self.table.leave(process)

    def take_report(self, report: Report, worker: int | None) -> ServedProcess:
        """Apply a report; `worker` is the one that the request is for, if any."""
        process = self.open(report.process)
        if process.has_left:  # its disconnect has overtaken this request
            return process
        process.release(report)
        if self.table.is_new(process, report.number):
            process.known, process.next_step = report.known, report.next_step
            if report.has_sessions != (process.session is not None):
                self._set_session(process, current_engine() if report.has_sessions else None)
            step, limit = self._server.global_step, report.limit
            if limit is not None and (step.limit is None or limit > step.limit):
                step.raise_limit(limit)
        if process.is_away:
            self._bring_back(process)
        if worker is not None and worker not in process.workers:
            self._claim(process, worker)
        return process

    async def wait(self, process: ServedProcess, wait: Wait) -> Ending | None:
        """Begin a wait; returns its ending if it ends at once, else None: it is news later."""
        server = self._server
        if not (server.waits_before_step if wait.is_begin else server.waits_after_step):
            return Ending(wait.number, await self._end_of(wait))
        process.waits[wait.number] = wait
        self._start(process, wait)
        await current_engine().checkpoint()  # a wait that need not wait has ended by then
        if not wait.is_done:
            wait.is_awaited = True
            return None
        process.waits.pop(wait.number, None)
        return Ending(wait.number, wait.error)

    def silent_places(self) -> set[str]:
        """Dask workers without a request since the last tick."""
        found = {each.place for each in self.table.members.values() if each.num_silent}
        return {each for each in found if each is not None}

    def tick(self, gone: Collection[str] = ()) -> None:
        """Have the workers leave of processes that are silent, or whose Dask worker is gone."""
        for process in list(self.table.members.values()):
            is_silent = process.tick()
            if process.is_away:
                continue
            if is_silent:
                self._drop(process, f"No request came for {self._lease_secs:g} s from")
            elif process.place in gone and process.num_silent > 1:
                self._drop(process, f"The Dask worker {process.place} has left the cluster, and")

    def _drop(self, process: ServedProcess, why: str) -> None:
        process.is_away = True
        process.begin_turn()
        for wait in process.waits.values():
            if not wait.is_done:
                wait.interrupt()
        self._set_session(process, None)
        if process.workers:
            logger.warning(
                "%s the process of the workers %s: others do not wait for them any longer",
                why, sorted(process.workers),
            )  # fmt: skip
        for worker in sorted(process.workers):
            self._server.leave(worker)
        if process.has_left or not process.workers:
            self.table.leave(process)

    def _bring_back(self, process: ServedProcess) -> None:
        logger.info("The process of the workers %s is back", sorted(process.workers))
        process.is_away = False
        for worker in sorted(process.workers):
            self._server.join(worker)
        for wait in process.waits.values():
            if not wait.is_done:
                self._start(process, wait)

    def _claim(self, process: ServedProcess, worker: int) -> None:
        self._server.check_worker(worker)
        for other in list(self.table.members.values()):
            if worker in other.workers:
                other.workers.remove(worker)
                if other.is_away:  # the worker has left with it, and now joins again
                    self._server.join(worker)
                if not other.workers and (other.has_left or other.is_away):
                    self.table.leave(other)
        process.workers.add(worker)

    def _set_session(self, process: ServedProcess, engine: Engine | None) -> None:
        step = self._server.global_step
        if process.session is not None:
            step.gate.close(process.session)
        process.session = None if engine is None else step.gate.open(engine)

    def _start(self, process: ServedProcess, wait: Wait) -> None:
        wait.task = current_engine().start(self._wait, process, wait)

    async def _wait(self, process: ServedProcess, wait: Wait) -> None:
        turn = wait.round
        self.num_under_way += 1
        try:
            error = await self._end_of(wait)
        finally:
            self.num_under_way -= 1
        if wait.round != turn:  # it was released, or another task runs it
            return
        wait.error, wait.is_done = error, True
        if wait.is_awaited:
            process.end(wait)

    async def _end_of(self, wait: Wait) -> Exception | None:
        server = self._server
        try:
            await (server.begin_step if wait.is_begin else server.end_step)(wait.worker)
        except StopTraining as stop:
            return StopTraining(*stop.args)  # without its traceback, which holds frames
        except Exception as error:  # the protocol's own, raised to the worker
            return error
        return None
