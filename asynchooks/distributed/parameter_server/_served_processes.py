"""The processes that a parameter server serves: their waits, and whether they are alive.

A state machine on the server's event loop; `Host` runs the waits and answers requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection

from ..._engine.base import Engine, EngineTask, Slot
from ..._step.waiters import Worker
from ...protocols import ParameterServer
from ._messages import Ending, Report, State

logger = logging.getLogger("asynchooks")

_CHECKS = 8
"""In the time of a lease; a process is detected as silent by so much later at most."""
_NUM_LEFT = 1000
"""Processes that have left whose late requests are recognized."""


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


class ServedProcess:
    """One process: its last report, its waits, and the one request that it blocks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.place: str | None = None  # the address of its Dask worker, if it is one
        self.num_silent = 0  # checks since its last request
        self.is_away = False
        self.is_closed = False
        self.workers: set[int] = set()  # with a request from here, that have not left
        self.waits: dict[int, Wait] = {}
        self.turn = 0
        self.slot: Slot | None = None  # of the blocked request
        self.session: Worker | None = None  # its sessions, as the server's step sees them
        self._report: Report | None = None
        self._ended: dict[int, Wait] = {}  # by the order of their ends, until received
        self._num_ended = 0

    @property
    def is_blocked(self) -> bool:
        return self.slot is not None and not self.slot.is_woken

    @property
    def num_ended(self) -> int:
        """Waits whose end the process has not reported as received."""
        return len(self._ended)

    def apply(self, report: Report) -> bool:
        """Apply a report; returns whether it is the newest."""
        for number in report.released:
            wait = self.waits.pop(number, None)
            if wait is not None:
                wait.interrupt()
        for order in [order for order in self._ended if order <= report.received]:
            self.waits.pop(self._ended.pop(order).number, None)
        if self._report is not None and report.number < self._report.number:
            return False
        self._report = report
        return True

    def begin_turn(self) -> int:
        """A request for news has come, and replaces the one before."""
        self.turn += 1
        if self.slot is not None:
            self.slot.wake()
        return self.turn

    def end(self, wait: Wait) -> None:
        """A wait has ended whose process expects the end by its blocked request."""
        self._num_ended += 1
        self._ended[self._num_ended] = wait

    def endings(self) -> tuple[int, list[Ending]]:
        """(the number of the last one, all that have not been received), in order."""
        waits = [each for each in self._ended.values() if each.number in self.waits]
        return self._num_ended, [Ending(each.number, each.error) for each in waits]

    def has_news(self, state: State) -> bool:
        report = self._report
        if self._ended or report is None or report.known is None:
            return True
        known = report.known
        return state.is_news_to(known) or known.version < state.version >= report.next_step


class ServedProcesses:
    """All processes of a server, by name.

    A process that is silent for longer than the lease is away: its workers leave, so that others do
    not wait for them, and join again at its next request.
    """

    def __init__(
        self,
        server: ParameterServer,
        lease_secs: float,
        restart: Callable[[ServedProcess, Wait], None],
    ) -> None:
        self._server = server
        self._lease_secs = lease_secs
        self._restart = restart
        self.by_name: dict[str, ServedProcess] = {}
        self._left: deque[str] = deque(maxlen=_NUM_LEFT)

    def open(self, name: str) -> ServedProcess:
        process = self.by_name.get(name)
        if process is None:
            process = ServedProcess(name)
            process.is_closed = name in self._left
            if not process.is_closed:
                self.by_name[name] = process
        if not process.is_closed:
            process.num_silent = 0
        return process

    def close(self, name: str) -> None:
        """The process has left. Workers that have not may join again from another process."""
        self._left.append(name)
        process = self.by_name.get(name)
        if process is None:
            return
        process.is_closed = True
        process.begin_turn()
        for wait in process.waits.values():
            wait.interrupt()
        process.waits.clear()
        self._set_session(process, None)
        if not process.workers:
            del self.by_name[name]

    def take_report(self, report: Report, engine: Engine, worker: int | None) -> ServedProcess:
        """Apply a report; `worker` is the one that the request is for, if any."""
        process = self.open(report.process)
        if process.is_closed:  # its disconnect has overtaken this request
            return process
        if process.apply(report):
            step = self._server.global_step
            if report.has_sessions != (process.session is not None):
                self._set_session(process, engine if report.has_sessions else None)
            limit = report.limit
            if limit is not None and (step.limit is None or limit > step.limit):
                step.raise_limit(limit)
        if process.is_away:
            self._bring_back(process)
        if worker is not None and worker not in process.workers:
            self._claim(process, worker)
        return process

    def notify(self, state: State) -> None:
        for process in self.by_name.values():
            if process.slot is not None and process.has_news(state):
                process.slot.wake()

    @property
    def check_secs(self) -> float:
        """Seconds between two calls of `check`."""
        return self._lease_secs / _CHECKS

    def silent_places(self) -> set[str]:
        """Dask workers without a request since the last check."""
        found = {each.place for each in self.by_name.values() if each.num_silent}
        return {each for each in found if each is not None}

    def check(self, gone: Collection[str] = ()) -> None:
        """Have the workers leave of processes that are silent for a lease, or that Dask has lost.

        Counts checks instead of reading a clock: a server that was stopped itself cannot know how
        long others were silent.
        """
        for process in list(self.by_name.values()):
            process.num_silent += 1
            if process.is_away:
                continue
            if process.num_silent > _CHECKS:
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
        if process.is_closed or not process.workers:
            del self.by_name[process.name]

    def _bring_back(self, process: ServedProcess) -> None:
        logger.info("The process of the workers %s is back", sorted(process.workers))
        process.is_away = False
        for worker in sorted(process.workers):
            self._server.join(worker)
        for wait in process.waits.values():
            if not wait.is_done:
                self._restart(process, wait)

    def _claim(self, process: ServedProcess, worker: int) -> None:
        self._server.check_worker(worker)
        for other in list(self.by_name.values()):
            if worker in other.workers:
                other.workers.remove(worker)
                if other.is_away:  # the worker has left with it, and now joins again
                    self._server.join(worker)
                if not other.workers and (other.is_closed or other.is_away):
                    del self.by_name[other.name]
        process.workers.add(worker)

    def _set_session(self, process: ServedProcess, engine: Engine | None) -> None:
        step = self._server.global_step
        if process.session is not None:
            step.close_worker(process.session)
        process.session = None if engine is None else step.open_worker(engine)
