"""Host: a parameter server in an actor of Dask, for the workers of many processes.

The server's own waits are tasks on this event loop. A process hears of those that do not end at
once, and of all else, by one blocked request, `events`. It computes no gradient, and asks nobody.
"""

from __future__ import annotations

import math
from typing import Any

from .._engine import EngineTask, Slot, current_engine
from .._errors import StepSourceLostError
from .._global_step import GlobalStep
from ..protocols import ParameterServer, Protocol
from ._clients import Clients, ServedProcess, Wait
from ._dask_workers import gone_workers, own_worker
from ._host_waits import HostWaits
from ._messages import Answer, HostStatistics, News, Report, State, Welcome
from ._step_mirror import StepMirror


class Host:
    """The actor: `host_parameter_server` makes it and closes it; `RemoteParameterServer` calls it.

    Every method runs on the event loop of a Dask worker, and all of them say the server's state.

    Args:
        lease_secs: seconds without a word from a process after which its workers are taken to have
            left, > 0; infinite: never.
        training: of a `DaskCluster`, whose step shows the updates; None: none.
        options: as `ParameterServer` takes them; the others, too.
    """

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        num_workers: int,
        lease_secs: float,
        training: str | None,
        options: dict[str, Any],
    ) -> None:
        step = GlobalStep(moved_elsewhere=True, keeps_limit=True)
        self._server = ParameterServer(
            parameters, protocol, num_workers=num_workers, global_step=step, **options
        )
        self._lease_secs = lease_secs
        self._waits = HostWaits(self._server, self._state)
        self._clients = Clients(self._server, lease_secs, self._waits.restart)
        self._mirror = None if training is None else StepMirror(training, step, self._state)
        self._is_gone = False
        self._num_requests = 0
        self._number = 0
        self._seen: tuple[object, ...] = ()
        self._watch: EngineTask | None = None
        self._worker: Any = None  # of Dask, that it is on

    async def open(self, scheduler: str) -> None:
        """Before anything else.

        Raises:
            ConnectionError, RuntimeError: the step cannot be shown by the scheduler.
        """
        self._worker = own_worker()
        if self._mirror is not None:
            await self._mirror.open(scheduler)

    async def aclose(self) -> None:
        """After everything else: nobody can ask any more."""
        self._is_gone = True  # Dask takes the actor away in its own time
        self._server.close()
        self._state()
        for name in list(self._clients.processes):
            self._clients.close(name)
        if self._watch is not None:
            self._watch.cancel()
        if self._mirror is not None:
            await self._mirror.aclose()

    async def connect(self, process: str, place: str | None = None) -> Answer:
        """A process is there, perhaps on a Dask worker.

        Raises:
            StepSourceLostError: the server was taken away.
        """
        if self._is_gone:
            raise StepSourceLostError("the parameter server is gone: its host has closed it")
        self._clients.open(process).place = place
        if self._watch is None and self._lease_secs < math.inf:
            self._watch = current_engine().start(self._watch_leases)
        protocol = self._server.protocol
        welcome = Welcome(
            self._server.num_workers, protocol.abandons_stale,
            self._server._waits_after, self._lease_secs, repr(protocol),
        )  # fmt: skip
        return self._state(), welcome

    async def disconnect(self, process: str) -> None:
        """A process asks no more; workers of it that have not left are waited for, for a while."""
        self._clients.close(process)

    async def events(self, report: Report) -> Answer:
        """Wait for what concerns a process: ends of its waits, a version, or anything else."""
        process = self._hear(report)
        turn = process.begin_turn()
        while process.turn == turn and not process.is_closed:
            state = self._state()
            if process.has_news(state):
                return state, self._news_for(process)
            slot = process.slot = Slot(current_engine(), "what a process has to hear")
            await slot.engine.park(slot)
        return self._state(), News(0, [], None)  # it asks anew by now, or is gone

    async def report(self, report: Report) -> Answer:
        """A process lives, and waits for something else now."""
        self._hear(report)
        return self._state(), None

    async def take_seat(self, report: Report, worker: int) -> Answer:
        self._hear(report, worker)
        self._server.join(worker)
        return self._state(), None

    async def leave_seat(self, report: Report, worker: int) -> Answer:
        process = self._hear(report, worker)
        self._server.leave(worker)
        process.workers.discard(worker)
        return self._state(), None

    async def begin_step(self, report: Report, worker: int, wait: int) -> Answer:
        """Begin to wait; the ending, with the parameters, or None if it will come by `events`."""
        process = self._hear(report, worker)
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=True))
        is_begun = ending is not None and ending.error is None
        return self._state(), (ending, self._server.pull(worker) if is_begun else None)

    async def pull(self, report: Report) -> Answer:
        self._hear(report)
        return self._state(), self._server.pull(0)

    async def push(
        self, report: Report, worker: int, gradient: Any, version: int, wait: int
    ) -> Answer:
        """Take a gradient and begin to wait as the protocol says; as `begin_step`."""
        process = self._hear(report, worker)
        pushed = self._server.push(worker, gradient, version)
        self._state()  # so that all others hear of it before anybody waits
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=False))
        return self._state(), (pushed, ending)

    async def end_step(self, report: Report, worker: int, wait: int) -> Answer:
        """Wait without a push before; as `begin_step`."""
        process = self._hear(report, worker)
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=False))
        return self._state(), ending

    async def close_server(self, report: Report) -> Answer:
        self._hear(report)
        self._server.close()
        return self._state(), None

    async def state_dict(self, report: Report) -> Answer:
        self._hear(report)
        return self._state(), self._server.state_dict()

    async def load_state_dict(self, report: Report, state: dict[str, Any]) -> Answer:
        self._hear(report)
        self._server.load_state_dict(state)
        return self._state(), None

    async def staleness_counts(self, report: Report, worker: int | None) -> Answer:
        self._hear(report)
        return self._state(), self._server.staleness_counts(worker)

    async def statistics(self, report: Report) -> Answer:
        self._hear(report)
        server, clients = self._server, self._clients
        return self._state(), HostStatistics(
            version=server.version,
            processes=len(clients.processes),
            processes_away=sum(each.is_away for each in clients.processes.values()),
            workers_present=server.num_present,
            waits=self._waits.num_under_way
            + sum(each.num_ended for each in clients.processes.values()),
            blocked_requests=sum(each.is_blocked for each in clients.processes.values()),
            requests=self._num_requests,
            collected=server.num_collected,
            applied=server.num_applied,
            discarded=server.num_discarded,
        )

    def _hear(self, report: Report, worker: int | None = None) -> ServedProcess:
        self._num_requests += 1
        process = self._clients.hear(report, current_engine(), worker)
        if process.is_closed and worker is not None:
            raise StepSourceLostError("the process has left: its farewell has overtaken this")
        self._state()
        return process

    def _state(self) -> State:
        """The present state; whoever waits for what has changed is told."""
        server = self._server
        step = server.global_step
        seen = (step.epoch, step.limit, server._is_closed)
        if seen != self._seen:
            self._number += 1
            self._seen = seen
            if server.is_over:  # perhaps by a limit that was set while somebody waited
                server._look_again()
        state = State(self._number, step.epoch, server.version, step.limit, server._is_closed)
        self._clients.tell(state)
        if self._mirror is not None:
            self._mirror.show(state)
        return state

    def _news_for(self, process: ServedProcess) -> News:
        received, endings = process.endings()
        snapshot = None
        for each in endings:
            wait = process.waits[each.wait]
            if wait.is_begin and each.error is None:
                snapshot = self._server.pull(wait.worker)
        return News(received, endings, snapshot)

    async def _watch_leases(self) -> None:
        engine = current_engine()
        while self._clients.processes:
            await engine.park(
                Slot(engine, "the end of a lease"), engine.now() + self._clients.look_secs
            )
            silent = self._clients.silent_places()
            gone = await gone_workers(self._worker, silent, self._clients.look_secs)
            self._clients.look(gone)
            self._state()
        self._watch = None
