"""Host: a parameter server in an actor of Dask, for the workers of many processes.

The waits of workers are tasks on this event loop. A process learns of those that do not end at
once, and of all else, by one blocked request, `events`. It computes no gradient and sends no
request.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..._engine.base import EngineTask, Slot
from ..._engine.current import current_engine
from ..._engine.recording import Kind, Recorder, current_recorder, ended
from ..._errors import StepSourceLostError, StepUnreachableError
from ..._step.global_step import GlobalStep
from ...planning import record
from ...protocols import ParameterServer, Protocol
from .._membership import State
from ._calls import gone_workers, own_worker
from ._messages import Answer, HostStatistics, News, Report, Welcome
from ._served_processes import ServedProcess, ServedProcesses, Wait

if TYPE_CHECKING:
    from ..dask._cluster import DaskCluster

logger = logging.getLogger("asynchooks")


class StepMirror:
    """Shows the updates as the step of a `DaskCluster`, and takes its limit."""

    def __init__(self, training: str, step: GlobalStep, on_limit: Callable[[], object]) -> None:
        self._training = training
        self._step = step
        self._on_limit = on_limit
        self._cluster: DaskCluster | None = None
        self._task: EngineTask | None = None
        self._shown: State | None = None

    async def open(self, scheduler: str) -> None:
        """Join the training at the scheduler with this address; its present step is replaced."""
        from ..dask._cluster import DaskCluster

        cluster = DaskCluster(scheduler, self._training, published_only=True)
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
            current_engine().start(self._restart, cluster, state.step)
        elif before is None or state.step != before.step:
            cluster.publish_soon(state.step)
        if state.limit is not None:
            cluster.global_step.raise_limit(state.limit)

    async def _follow_limit(self, cluster: DaskCluster) -> None:
        taken = -1
        while True:
            slot = Slot(current_engine(), "another limit")
            step = cluster.global_step
            forget = step.gate.watch(slot, math.inf)  # it need not know when the limit is reached
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


class ServiceRecord:
    """What the server does for requests, in a file of its own.

    Spans hold what the protocol and the update take. The processor's time of the whole process,
    which also reads and writes messages, is kept as a total.
    """

    def __init__(self, path: str) -> None:
        self._record = record(path, name="parameter server")
        self._recorder: Recorder | None = None
        self._processor_secs = self._served_secs = 0.0
        self._nums: dict[str, int] = {}

    def open(self) -> None:
        """Begin to record."""
        self._record.__enter__()
        self._recorder = current_recorder()
        self._processor_secs = time.process_time()

    @contextmanager
    def span(self, function: str) -> Iterator[None]:
        """The block, as the service of one request."""
        self._nums[function] = self._nums.get(function, 0) + 1
        assert self._recorder is not None  # it is open
        began = time.thread_time()
        with ended(self._recorder.work_span(current_engine(), Kind.SERVE, function)):
            yield
        self._served_secs += time.thread_time() - began

    async def aclose(self) -> None:
        """Record nothing more."""
        if self._recorder is not None:
            self._recorder.describe(
                "server",
                {
                    "processor_secs": time.process_time() - self._processor_secs,
                    "served_processor_secs": self._served_secs,
                    "requests": self._nums,
                },
            )
        await self._record.__aexit__(None, None, None)


class Host:
    """The actor: `host_parameter_server` makes it and closes it; `RemoteParameterServer` calls it.

    Every method runs on the event loop of a Dask worker, and returns the server's state, too. The
    arguments are those of `host_parameter_server`, the options those of `ParameterServer`.
    """

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        num_workers: int,
        lease_secs: float,
        training: str | None,
        options: dict[str, Any],
        trace: str | None = None,
    ) -> None:
        step = GlobalStep(multi_process=True, published_only=True)
        self._server = ParameterServer(
            parameters, protocol, num_workers=num_workers, global_step=step, **options
        )
        self._lease_secs = lease_secs
        self._processes = ServedProcesses(self._server, lease_secs)
        self._mirror = None if training is None else StepMirror(training, step, self._state)
        self._is_gone = False
        self._num_requests = 0
        self._watch: EngineTask | None = None
        self._worker: Any = None  # the Dask worker that it is on
        self._trace = None if trace is None else ServiceRecord(trace)

    async def open(self, scheduler: str) -> None:
        """Call it before anything else; raises as opening a `DaskCluster`."""
        self._worker = own_worker()
        if self._mirror is not None:
            await self._mirror.open(scheduler)
        if self._trace is not None:
            self._trace.open()

    async def aclose(self) -> None:
        """Call it after everything else: later requests fail."""
        self._is_gone = True  # Dask removes the actor later
        self._server.close()
        self._state()
        for name in list(self._processes.table.members):
            self._processes.close(name)
        if self._watch is not None:
            self._watch.cancel()
        if self._mirror is not None:
            await self._mirror.aclose()
        if self._trace is not None:
            await self._trace.aclose()

    async def connect(self, process: str, place: str | None = None) -> Answer:
        """Register a process, which may be on a Dask worker."""
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
        while process.turn == turn and not process.has_left:
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
        ending = await self._processes.wait(process, Wait(wait, worker, is_begin=True))
        with self._serves("begin_step"):
            is_begun = ending is not None and ending.error is None
            return self._state(), (ending, self._server.pull(worker) if is_begun else None)

    async def pull(self, report: Report) -> Answer:
        with self._serves("pull"):
            self._take_report(report)
            return self._state(), self._server.pull(0)

    async def push(
        self, report: Report, worker: int, gradient: Any, version: int, wait: int
    ) -> Answer:
        """Take a gradient and begin the wait of the protocol; as `begin_step`."""
        with self._serves("push"):
            process = self._take_report(report, worker)
            pushed = self._server.push(worker, gradient, version)
            self._state()  # so that the other processes are notified before this wait
        ending = await self._processes.wait(process, Wait(wait, worker, is_begin=False))
        return self._state(), (pushed, ending)

    async def end_step(self, report: Report, worker: int, wait: int) -> Answer:
        """Begin a wait without a push before; as `begin_step`."""
        process = self._take_report(report, worker)
        ending = await self._processes.wait(process, Wait(wait, worker, is_begin=False))
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
        server, members = self._server, self._processes.table.members.values()
        return self._state(), HostStatistics(
            version=server.version,
            processes=len(members),
            processes_away=sum(each.is_away for each in members),
            workers_present=server.num_present,
            waits=self._processes.num_under_way + sum(each.num_ended for each in members),
            blocked_requests=sum(each.is_blocked for each in members),
            requests=self._num_requests,
            collected=server.num_collected,
            applied=server.num_applied,
            discarded=server.num_discarded,
        )

    def _serves(self, function: str) -> AbstractContextManager[None]:
        """The block, which waits for nothing, is recorded as the service of a request."""
        return nullcontext() if self._trace is None else self._trace.span(function)

    def _take_report(self, report: Report, worker: int | None = None) -> ServedProcess:
        self._num_requests += 1
        process = self._processes.take_report(report, worker)
        if process.has_left and worker is not None:
            raise StepSourceLostError(
                "the process has left: its disconnect has overtaken this request"
            )
        self._state()
        return process

    def _state(self) -> State:
        """The present state; processes that wait for a change are notified."""
        server, table = self._server, self._processes.table
        step, before = server.global_step, table.state
        state = table.update(step.epoch, server.version, step.limit, is_closed=server.is_closed)
        if state.is_over and state.number != before.number:
            server.recheck_waits()  # perhaps by a limit that was set during a wait
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
        engine, processes = current_engine(), self._processes
        while processes.table.members:
            tick = Slot(engine, "the next check of the leases")
            await engine.park(tick, engine.now() + processes.tick_secs)
            gone = await gone_workers(self._worker, processes.silent_places(), processes.tick_secs)
            processes.tick(gone)
            self._state()
        self._watch = None
