"""Host: a parameter server in an actor of Dask, for the workers of many processes.

The waits of workers are tasks on this event loop. A process learns of those that do not end at
once, and of all else, by one blocked request, `events`. It computes no gradient and sends no
request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..._engine.base import EngineTask, Slot
from ..._engine.current import current_engine
from ..._errors import StepSourceLostError, StepUnreachableError, StopTraining
from ..._step.global_step import GlobalStep
from ...protocols import ParameterServer, Protocol
from ..dask._actor_calls import gone_workers, own_worker
from ._messages import Answer, Ending, HostStatistics, News, Report, State, Welcome
from ._served_processes import ServedProcess, ServedProcesses, Wait

if TYPE_CHECKING:
    from ..dask._cluster import DaskCluster

logger = logging.getLogger("asynchooks")


class HostWaits:
    """Runs the waits of workers in other processes as tasks; a `Host` makes it.

    Args:
        on_end: called when a wait has ended whose process expects the end.
    """

    def __init__(self, server: ParameterServer, on_end: Callable[[], object]) -> None:
        self._server = server
        self._on_end = on_end
        self.num_under_way = 0

    async def begin(self, process: ServedProcess, wait: Wait) -> Ending | None:
        """The ending of a wait, if it ends at once."""
        server = self._server
        if not (server.waits_before_step if wait.is_begin else server.waits_after_step):
            return Ending(wait.number, await self._end_of(wait))
        process.waits[wait.number] = wait
        self.restart(process, wait)
        await current_engine().checkpoint()  # a wait that need not wait has ended by then
        if not wait.is_done:
            wait.is_awaited = True
            return None
        process.waits.pop(wait.number, None)
        return Ending(wait.number, wait.error)

    def restart(self, process: ServedProcess, wait: Wait) -> None:
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
            self._on_end()

    async def _end_of(self, wait: Wait) -> Exception | None:
        verb: Callable[[int], Awaitable[None]]
        verb = self._server.begin_step if wait.is_begin else self._server.end_step
        try:
            await verb(wait.worker)
        except StopTraining as stop:
            return StopTraining(*stop.args)  # without its traceback, which holds frames
        except Exception as error:  # the protocol's own, raised to the worker
            return error
        return None


class StepMirror:
    """Shows the updates as the step of a `DaskCluster`, and takes its limit; a `Host` owns it.

    Args:
        training: its name.
        step: counts the updates.
        on_limit: called when the step has got a limit from other processes.
    """

    def __init__(self, training: str, step: GlobalStep, on_limit: Callable[[], object]) -> None:
        self._training = training
        self._step = step
        self._on_limit = on_limit
        self._cluster: DaskCluster | None = None
        self._task: EngineTask | None = None
        self._shown: State | None = None

    async def open(self, scheduler: str) -> None:
        """Join the training at the scheduler with this address; its present step is replaced.

        Raises:
            ConnectionError, RuntimeError: as opening a `DaskCluster`.
        """
        from ..dask._cluster import DaskCluster

        cluster = DaskCluster(scheduler, self._training, keeps_limit=True)
        await cluster.open()
        if cluster.global_step.value != self._step.value:
            await cluster.restart(self._step.value)
        self._cluster = cluster
        self._task = current_engine().start(self._follow_limit, cluster)

    def show(self, state: State) -> None:
        """Publish a state; many in a row make one request."""
        cluster, before = self._cluster, self._shown
        if cluster is None or state == before:
            return
        self._shown = state
        if before is not None and state.epoch != before.epoch:
            current_engine().start(self._restart, cluster, state.version)
        elif before is None or state.version != before.version:
            cluster.publish_soon(state.version)
        if state.limit is not None:
            cluster.global_step.raise_limit(state.limit)

    async def _follow_limit(self, cluster: DaskCluster) -> None:
        taken = -1
        while True:
            slot = Slot(current_engine(), "another limit")
            forget = cluster.global_step.watch_limit(slot)
            try:
                limit = cluster.global_step.limit
                if limit is not None and limit > taken:  # once: the sessions' next limit may differ
                    taken = limit
                    self._step.raise_limit(limit)
                    self._on_limit()
                await slot.engine.park(slot)
            finally:
                forget()

    async def _restart(self, cluster: DaskCluster, step: int) -> None:
        try:
            await cluster.restart(step)
        except StepUnreachableError as error:  # it is being closed
            logger.info("The step %d of the new epoch was not published: %s", step, error)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._cluster is not None:
            await self._cluster.aclose()


class Host:
    """The actor: `host_parameter_server` makes it and closes it; `RemoteParameterServer` calls it.

    Every method runs on the event loop of a Dask worker, and returns the server's state, too.

    Args:
        lease_secs: seconds without a message from a process after which its workers count as
            having left, > 0; infinite: never.
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
        self._processes = ServedProcesses(self._server, lease_secs, self._waits.restart)
        self._mirror = None if training is None else StepMirror(training, step, self._state)
        self._is_gone = False
        self._num_requests = 0
        self._number = 0
        self._seen: tuple[object, ...] = ()
        self._watch: EngineTask | None = None
        self._worker: Any = None  # the Dask worker that it is on

    async def open(self, scheduler: str) -> None:
        """Call it before anything else.

        Raises:
            ConnectionError, RuntimeError: the scheduler does not take the step.
        """
        self._worker = own_worker()
        if self._mirror is not None:
            await self._mirror.open(scheduler)

    async def aclose(self) -> None:
        """Call it after everything else: later requests fail."""
        self._is_gone = True  # Dask removes the actor later
        self._server.close()
        self._state()
        for name in list(self._processes.by_name):
            self._processes.close(name)
        if self._watch is not None:
            self._watch.cancel()
        if self._mirror is not None:
            await self._mirror.aclose()

    async def connect(self, process: str, place: str | None = None) -> Answer:
        """Register a process, which may be on a Dask worker.

        Raises:
            StepSourceLostError: the server was closed.
        """
        if self._is_gone:
            raise StepSourceLostError("the parameter server is gone: its host has closed it")
        self._processes.open(process).place = place
        if self._watch is None and self._lease_secs < math.inf:
            self._watch = current_engine().start(self._watch_leases)
        protocol = self._server.protocol
        welcome = Welcome(
            self._server.num_workers, protocol.abandons_stale,
            self._server.waits_after_step, self._lease_secs, repr(protocol),
        )  # fmt: skip
        return self._state(), welcome

    async def disconnect(self, process: str) -> None:
        """A process leaves; those of its workers that have not left stay until the lease ends."""
        self._processes.close(process)

    async def events(self, report: Report) -> Answer:
        """Wait for what concerns a process: ends of its waits, a version, or another change."""
        process = self._take_report(report)
        turn = process.begin_turn()
        while process.turn == turn and not process.is_closed:
            state = self._state()
            if process.has_news(state):
                return state, self._news_for(process)
            slot = process.slot = Slot(current_engine(), "news for a process")
            await slot.engine.park(slot)
        return self._state(), News(0, [], None)  # a newer request is answered, or it is gone

    async def report(self, report: Report) -> Answer:
        """A process is alive, and reports changes."""
        self._take_report(report)
        return self._state(), None

    async def begin_session(self, report: Report, worker: int) -> Answer:
        self._take_report(report, worker)
        self._server.join(worker)
        return self._state(), None

    async def end_session(self, report: Report, worker: int) -> Answer:
        process = self._take_report(report, worker)
        self._server.leave(worker)
        process.workers.discard(worker)
        return self._state(), None

    async def begin_step(self, report: Report, worker: int, wait: int) -> Answer:
        """Begin a wait; returns its ending, with the parameters, or None: it comes by `events`."""
        process = self._take_report(report, worker)
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=True))
        is_begun = ending is not None and ending.error is None
        return self._state(), (ending, self._server.pull(worker) if is_begun else None)

    async def pull(self, report: Report) -> Answer:
        self._take_report(report)
        return self._state(), self._server.pull(0)

    async def push(
        self, report: Report, worker: int, gradient: Any, version: int, wait: int
    ) -> Answer:
        """Take a gradient and begin the wait of the protocol; as `begin_step`."""
        process = self._take_report(report, worker)
        pushed = self._server.push(worker, gradient, version)
        self._state()  # so that the other processes are notified before this wait
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=False))
        return self._state(), (pushed, ending)

    async def end_step(self, report: Report, worker: int, wait: int) -> Answer:
        """Begin a wait without a push before; as `begin_step`."""
        process = self._take_report(report, worker)
        ending = await self._waits.begin(process, Wait(wait, worker, is_begin=False))
        return self._state(), ending

    async def close_server(self, report: Report) -> Answer:
        self._take_report(report)
        self._server.close()
        return self._state(), None

    async def state_dict(self, report: Report) -> Answer:
        self._take_report(report)
        return self._state(), self._server.state_dict()

    async def load_state_dict(self, report: Report, state: dict[str, Any]) -> Answer:
        self._take_report(report)
        self._server.load_state_dict(state)
        return self._state(), None

    async def staleness_counts(self, report: Report, worker: int | None) -> Answer:
        self._take_report(report)
        return self._state(), self._server.staleness_counts(worker)

    async def statistics(self, report: Report) -> Answer:
        self._take_report(report)
        server, processes = self._server, self._processes
        return self._state(), HostStatistics(
            version=server.version,
            processes=len(processes.by_name),
            processes_away=sum(each.is_away for each in processes.by_name.values()),
            workers_present=server.num_present,
            waits=self._waits.num_under_way
            + sum(each.num_ended for each in processes.by_name.values()),
            blocked_requests=sum(each.is_blocked for each in processes.by_name.values()),
            requests=self._num_requests,
            collected=server.num_collected,
            applied=server.num_applied,
            discarded=server.num_discarded,
        )

    def _take_report(self, report: Report, worker: int | None = None) -> ServedProcess:
        self._num_requests += 1
        process = self._processes.take_report(report, current_engine(), worker)
        if process.is_closed and worker is not None:
            raise StepSourceLostError(
                "the process has left: its disconnect has overtaken this request"
            )
        self._state()
        return process

    def _state(self) -> State:
        """The present state; processes that wait for a change are notified."""
        server = self._server
        step = server.global_step
        seen = (step.epoch, step.limit, server.is_closed)
        if seen != self._seen:
            self._number += 1
            self._seen = seen
            if server.is_over:  # perhaps by a limit that was set during a wait
                server.recheck_waits()
        state = State(self._number, step.epoch, server.version, step.limit, server.is_closed)
        self._processes.notify(state)
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
        while self._processes.by_name:
            await engine.park(
                Slot(engine, "the end of a lease"), engine.now() + self._processes.check_secs
            )
            silent = self._processes.silent_places()
            gone = await gone_workers(self._worker, silent, self._processes.check_secs)
            self._processes.check(gone)
            self._state()
        self._watch = None
