"""A simulated cluster: workers around one parameter server, in virtual time.

What happens to one gradient is written in `Worker`: pull, compute, push. `Cluster` starts and ends
the training. How long messages take is in `_network.py`, what fails in `_failures.py`.
"""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from ..._check import function, instance, integer, number
from ..._engine.base import TIMED_OUT, Sentinel, Slot
from ..._engine.current import current_engine
from ..._engine.threads import StepRunnerName
from ..._errors import (
    DeadlockError,
    LivelockError,
    SimulationError,
    StepUnreachableError,
    is_clean_end,
    shown,
)
from ..._hook import SessionRunContext, SessionRunHook, SessionRunValues
from ..._session import MonitoredSession
from ..._step.gate import Worker as StepWorker
from ..._step.global_step import GlobalStep
from ..._stopping.backoff import Recovery
from ...backends._function import FunctionSessionCreator
from ...hooks import StopAtStepHook
from ...protocols import Asynchronous, ParameterServer, Protocol, ProtocolHook, Pushed, Snapshot
from ..delays._delay import Delay, checked_secs, checked_secs_above_zero
from ..delays._distributions import Constant, Exponential
from ..delays._streams import DelayStream, Streams
from ..kernel._kernel import Kernel, KernelTask, Until
from ..output._report import SPENT, Report, ServerReport, WorkerReport
from ..output._timeline import Push, TimeAccount, Timeline
from ._network import LinkCuts, Message, Network, Queue, arrival, delay_of_each

_CHANGED = Sentinel("CHANGED")
"""What a worker is woken with when its speed has changed."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Worker:
    """What a worker's program acts through. The cluster makes one for each worker.

    A program repeats: `pull`, `compute`, `push`; the first and the last wait as the protocol says.
    Training ends by a StopTraining that one of them raises, and that the program lets pass.

    Example:
        async def train(worker):
            while True:
                parameters, version = await worker.pull()
                if await worker.compute():
                    await worker.push(gradient(parameters), version)
    """

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        compute: DelayStream,
        messages: tuple[Message | None, Message | None, Message | None],
    ) -> None:
        self.cluster = cluster
        self.index = index
        """From 0."""
        self._kernel, self._step = cluster.kernel, cluster.global_step
        self._compute = compute
        self._request, self._download, self._upload = messages  # None: it takes no time
        self._rng: np.random.Generator | None = None
        self.is_in_session = False  # the session waits as the protocol says
        self.is_finished = False
        self.is_away = True  # it has no open session, and may still open one
        self.link_cuts: LinkCuts = ()
        self.task: KernelTask | None = None
        self._epoch = self._step.epoch  # when the protocol let it pull
        self._is_undone = False  # the server went back between that and the pull
        self._working: Slot | None = None  # parked in while it computes, or stands still
        self._ends = 0.0  # that, if its speed does not change
        # failures may overlap: it works only while it has no stops and no pauses
        self.num_stops = self.num_pauses = 0
        self.factors: list[float] = []  # of the slowdowns that hold now
        self.slowness = 1.0  # how many times as long its work takes now
        self.version = 0
        """The version of the last snapshot that it pulled."""
        self.num_computed = 0
        self.bytes_moved = 0
        self.time = TimeAccount(index, cluster.clock, cluster.timeline)

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers, the same for the same seed."""
        if self._rng is None:
            self._rng = self.cluster.streams.generator(self.index, "program")
        return self._rng

    async def pull(self) -> Snapshot:
        """The current parameters and their version, once the protocol lets this worker pull.

        Cancellation safe.

        Raises:
            StopTraining: training is over.
        """
        server = self.cluster.server
        if self.num_pauses:
            await self._until_repaired()
        if not self.is_in_session:
            begun = server.begin_step(self.index)
            await (self.wait(begun) if server.waits_before_step else begun)
            if self.num_pauses:
                await self._until_repaired()
        if self._request is not None or self.link_cuts:  # the request is a message, too
            await self._send("pull", self._request)
        snapshot = server.pull(self.index)
        self.version = snapshot.version
        is_late = self._epoch != self._step.epoch
        self._is_undone = is_late and server.waits_before_step
        if self._download is not None:
            await self._send("pull", self._download)
        return snapshot

    async def compute(self, secs: float | None = None) -> bool:
        """Spend the virtual time of one gradient on what was pulled last.

        Cancellation safe: the time until then is lost.

        Args:
            secs: seconds >= 0 on an unhindered worker; None: drawn from the cluster's delay.

        Returns:
            Whether it was finished; False if an update has made it useless, training is over, or
            the server was restored after the protocol had let this worker begin, so that it might
            be too far ahead now: then push nothing.

        Raises:
            TypeError, ValueError: `secs` is no such number.
        """
        if self.num_pauses:
            await self._until_repaired()
        kernel, server, begun = self._kernel, self.cluster.server, self.cluster.clock()
        left = self._compute.next() if secs is None else checked_secs("secs", secs)
        value = _CHANGED
        try:
            while value is _CHANGED and not self._is_undone:
                start, slowness = kernel.time, self.slowness
                # a pause does not hold up work that takes no time
                self._ends = ends = start + (left * slowness if left else 0.0)
                self._working = slot = Slot(kernel, "the end of its computation")
                remove = server.watch_update(self.version, slot)
                try:
                    value = await kernel.park(slot, ends)
                finally:
                    remove()
                if value is _CHANGED:
                    left = max(0.0, left - (kernel.time - start) / slowness)
        finally:
            is_done = value is TIMED_OUT
            self.num_computed += is_done
            self.time.spend("compute" if is_done else "lost", begun)
        return is_done

    async def push(self, gradient: Any, version: int | None = None) -> Pushed:
        """Send a gradient, and wait as the protocol says after its arrival. Cancellation safe.

        Args:
            gradient: names and shapes as the parameters'.
            version: of the snapshot that it was computed on; None: of the last one.

        Returns:
            Its outcome and staleness.
        """
        cluster = self.cluster
        version = self.version if version is None else version
        if self.num_pauses:
            await self._until_repaired()
        if self._upload is not None or self.link_cuts:
            await self._send("push", self._upload)
        if cluster.queues and not cluster.server.is_over:  # one that is late is discarded at once
            ends = max([queue.enter() for queue in cluster.queues])
            await self._wait_until(ends, "served", "its turn at the server")
        pushed = cluster.server.push(self.index, gradient, version)
        if cluster.timeline.is_kept:
            now, after = self._kernel.time, cluster.server.version
            push = Push(self.index, now, pushed.outcome.value, pushed.staleness, after)
            cluster.timeline.pushes.append(push)
        if cluster.server.waits_after_step and not self.is_in_session:
            await self.wait(cluster.server.end_step(self.index))
        return pushed

    def session(
        self,
        hooks: Sequence[Any] = (),
        *,
        gradient: Gradient | None = None,
        step: Callable[[], Awaitable[Any]] | None = None,
        stop_grace_period_secs: float = 120,
        step_runner: StepRunnerName = "auto",
        recovery: Recovery | None = None,
    ) -> MonitoredSession:
        """A session whose run is one step of this worker: pull, compute, push, with all hooks.

        Open it by `async with`. It has the hooks of the protocol and of the cluster's number of
        updates.

        Args:
            hooks: further ones.
            gradient: of (parameters, worker); None: zeros, for laws of time.
            step: an async function in place of that, which returns a mapping of outputs; it may
                use `pull`, `compute` and `push`. Without it the outputs are "computed" (False for
                a useless computation), "staleness" and "outcome" (None where nothing was pushed).
            stop_grace_period_secs, step_runner, recovery: as for `MonitoredSession`.
        """
        self.is_in_session = True
        cluster = self.cluster
        own: list[SessionRunHook] = [_WorkerHook(self)]
        if cluster.updates is not None:
            own.append(StopAtStepHook(last_step=cluster.updates))

        async def own_step() -> dict[str, Any]:
            pushed = await self.one_step(gradient)
            return {
                "computed": pushed is not None,
                "staleness": pushed and pushed.staleness,
                "outcome": pushed and pushed.outcome.value,
            }

        async def run_step() -> dict[str, Any]:
            outputs = await (own_step if step is None else step)()
            return {**outputs, "global_step": cluster.server.version}

        return MonitoredSession(
            [*own, *hooks],
            FunctionSessionCreator(run_step, global_step=cluster.global_step),
            stop_grace_period_secs=stop_grace_period_secs,
            step_runner=step_runner,
            recovery=recovery,
        )

    async def one_step(self, gradient: Gradient | None) -> Pushed | None:
        """Pull, compute, and push; None if the computation was useless."""
        snapshot = await self.pull()
        if not await self.compute():
            return None
        nothing = self.cluster.nothing
        value = nothing if gradient is None else gradient(snapshot.parameters, self)
        return await self.push(value, snapshot.version)

    def change_speed(self) -> None:
        """Work on as fast as its pauses and slowdowns allow now; for failures."""
        self.slowness = math.inf if self.num_pauses else math.prod(self.factors)
        # what ends at this very moment has been done at the speed before
        if self._working is not None and self._ends > self._kernel.time:
            self._working.wake(_CHANGED)

    async def wait(self, waiting: Awaitable[None]) -> None:
        """Wait as the protocol says, and count the time as waiting."""
        begun = self.cluster.clock()
        try:
            await waiting
        finally:
            self._epoch = self._step.epoch
            self.time.spend("wait", begun)

    async def _until_repaired(self) -> None:
        while self.num_pauses:
            self._ends, self._working = math.inf, Slot(self._kernel, "its repair")
            await self._kernel.park(self._working)

    async def _send(self, kind: str, message: Message | None) -> None:
        """Wait until a message arrives; without one, until it would that takes no time itself."""
        now = self._kernel.time
        arrives = now if message is None else message.arrival(now)
        if self.link_cuts:
            arrives = arrival(self.link_cuts, now, arrives)
        await self._wait_until(arrives, kind, "a message")
        if message is not None and arrives <= self.cluster.clock():  # before training ended
            self.bytes_moved += message.num_bytes

    async def _wait_until(self, time: float, kind: str, what: str) -> None:
        """Wait until that time, and count it as this kind of span."""
        begun = self.cluster.clock()
        if time <= self._kernel.time:
            return
        try:
            await self._kernel.park(Slot(self._kernel, what), time)
        finally:
            self.time.spend(kind, begun)

    def __repr__(self) -> str:
        return f"<worker {self.index} of {self.cluster.num_workers}>"


class _WorkerHook(ProtocolHook):
    """Waits as the protocol says, which counts as the waiting of its worker.

    It also tells the cluster that the session of its worker is open.
    """

    uses_default_graph = False

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.cluster.server, worker.index)
        self._simulated = worker

    async def begin(self) -> None:
        self._simulated.cluster.set_away(self._simulated, False)
        await super().begin()

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._simulated.wait(super().before_run(run_context))

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._simulated.wait(super().after_run(run_context, run_values))


Program = Callable[[Worker], Awaitable[Any]]
Gradient = Callable[[Any, Worker], Any]
Loss = Callable[[Any], float]


def loss_of(value: Any) -> float:
    """What a loss function returned as a float, which may be NaN or infinite; else a TypeError."""
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError):  # an array of one value is a number, too
            return float(value)
    raise TypeError(f"loss returned {shown(value)}; let it return a number, such as a float")


@dataclass(frozen=True)
class Training:
    """The arguments of `Cluster.run` and `Cluster.train`, checked."""

    program: Program | None
    gradient: Gradient | None
    updates: int | None
    loss: Loss | None
    loss_every: int
    max_secs_without_update: float | None
    target_loss: float | None = None

    def __post_init__(self) -> None:
        for name in ("program", "gradient", "loss"):
            if getattr(self, name) is not None:
                function(name, getattr(self, name), "a function, or None")
        if self.program is not None and self.gradient is not None:
            raise ValueError(
                "got a program and a gradient, which would not be used; let the program compute "
                "it: worker.session(gradient=...), or await worker.push(gradient, version)"
            )
        if self.updates is not None:
            integer("updates", self.updates, least=1)
        integer("loss_every", self.loss_every, least=1)
        if self.target_loss is not None:
            number("target_loss", self.target_loss)
            if self.loss is None:
                raise ValueError(
                    f"target_loss is {self.target_loss!r}, and no loss is recorded; give loss, a "
                    "function of the parameters"
                )
        if self.max_secs_without_update is not None:
            checked_secs_above_zero("max_secs_without_update", self.max_secs_without_update)

    def program_or_default(self) -> Program:
        """The program; without one: steps of a worker until training is over."""
        if self.program is not None:
            return self.program

        async def program(worker: Worker) -> None:
            while True:
                await worker.one_step(self.gradient)

        return program


class Cluster:
    """Workers 0 to num_workers - 1 and a parameter server. `Simulation.cluster` makes it.

    Parameters and gradients are real arrays, so training curves are real training curves; only
    time is simulated. `run` runs the whole simulation; `train` is called within a program's own.

    Args:
        num_workers: >= 1.
        parameters: an array, or a dict of arrays; None: one zero.
        protocol: what makes an update, and who waits for whom; None: `Asynchronous()`.
        compute: seconds that a gradient takes; None: `Exponential(1.0)`.
        pull, push: seconds that parameters take to a worker, and a gradient to the server; None:
            none. A `network` says it instead.
        service: seconds that a server takes for each push, one at a time; None: none. With several
            servers each draws its own, of its part of the gradient: give the seconds of a part.
        num_servers: >= 1; the parameters lie on so many servers in equal parts. A push goes to all
            of them, and is done once the last has served it. They differ from one server where
            `service` takes time, each with a queue of its own, and on a `Network`, whose bytes
            they share.
        network: links with latency and bandwidth; None: messages take what `pull` and `push` say.
        failures: of workers.
        learning_rate: a number >= 0, or a function of a gradient's staleness.
        update: the new parameters, of (parameters, mean gradient, learning rate); None: plain SGD.
        keep_timeline: for `write_trace` and `plot_reports`, which need what each worker did when.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, out of range, or does not fit the
            others.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(8, protocol=StaleSynchronous(3), compute=Exponential(1.0))
        report = cluster.run(updates=1000)
        assert report.updates == 1000 and max(report.staleness) <= 8 * 4
    """

    def __init__(
        self,
        simulation: Any,  # a Simulation: its file imports this one
        num_workers: int,
        *,
        parameters: Any = None,
        protocol: Protocol | None = None,
        compute: Delay | None = None,
        pull: Delay | None = None,
        push: Delay | None = None,
        service: Delay | None = None,
        num_servers: int = 1,
        network: Network | None = None,
        failures: Sequence[Failure] = (),
        learning_rate: float | Callable[[int], float] = 0.1,
        update: Callable[[Any, Any, float], Any] | None = None,
        keep_timeline: bool = False,
        streams: Streams,
    ) -> None:
        self.simulation = simulation
        self._kernel: Kernel | None = None  # while and after it trains
        self.streams = streams
        self.num_workers = integer("num_workers", num_workers, least=1)
        self._compute = delay_of_each(
            "compute", Exponential(1.0) if compute is None else compute, self.num_workers
        )
        self._pull = _delay_or_none("pull", pull, self.num_workers)
        self._push = _delay_or_none("push", push, self.num_workers)
        self._num_servers = integer("num_servers", num_servers, least=1)
        self._service = _delay_or_none("service", service, self._num_servers)
        if network is not None:
            expected = "a network, as in network=Network(latency=0.01, bandwidth=1e9), or None"
            instance("network", network, Network, expected).check(self.num_workers)
            for name, delay in (("pull", self._pull), ("push", self._push)):
                if delay is not None:
                    raise ValueError(
                        f"got {name}={delay!r} and a network, which says how long messages take; "
                        "give one of the two"
                    )
        self._network = network
        self.server = ParameterServer(
            np.zeros(1) if parameters is None else parameters,
            Asynchronous() if protocol is None else protocol,
            num_workers=num_workers,
            learning_rate=learning_rate,
            update=update,
            global_step=GlobalStep(num_workers=num_workers, published_only=True),
        )
        self.server.when_over = self._end_clock
        self.nothing = _zeros_like(self.server.parameters)
        """A gradient that changes nothing."""
        self.failures = _checked_failures(failures, self.num_workers)
        self.timeline = Timeline(is_kept=keep_timeline)
        self.losses: list[tuple[float, int, float]] = []
        """(Virtual seconds, updates, loss), every `loss_every` updates and at each report."""
        self._loss: Loss | None = None
        self._target_loss: float | None = None
        self.queues: list[Queue] = []
        """Of the servers, while and after it trains; empty where service takes no time."""
        self.workers: list[Worker] = []
        self.num_active = 0
        """Workers whose program runs now."""
        self._program: Program | None = None
        self._num_away = self.num_workers
        """Workers that have no open session but may open one: see `set_away`."""
        self._stand_in: StepWorker
        self._side_tasks: list[KernelTask] = []
        self._change: Slot
        self.num_unfinished = 0
        """Workers whose program has not ended for good."""
        self.updates: int | None = None
        """The number of updates given to `run` or `train`."""
        self.began_at = 0.0
        """Virtual seconds at which training began."""
        self.ended_at: float | None = None
        """Virtual seconds at which it ended."""

    @property
    def kernel(self) -> Kernel:
        """The engine of the simulation, while it runs."""
        kernel: Kernel = self.simulation.kernel
        return kernel

    @property
    def global_step(self) -> GlobalStep:
        """Counts the updates."""
        return self.server.global_step

    def clock(self) -> float:
        """Virtual seconds; it stands still once training has ended."""
        if self.ended_at is not None:
            return self.ended_at
        # read several times in each step, so without a call
        moment: float = self.simulation.now if self._kernel is None else self._kernel.entry[0]
        return moment

    def run(
        self,
        program: Program | None = None,
        *,
        gradient: Gradient | None = None,
        updates: int | None = None,
        until: Until | None = None,
        loss: Loss | None = None,
        loss_every: int = 1,
        target_loss: float | None = None,
        max_secs_without_update: float | None = None,
    ) -> Report:
        """Run the simulation: every worker runs the program until training is over.

        Args:
            program: what a worker does, an async function of it; None: pull, compute, push.
            gradient: without a program: of (parameters, worker); None: zeros, for laws of time.
            updates: exactly this many are made, unless all workers end or leave before; None: as
                many as `until` allows.
            until: as for `Simulation.run`.
            loss: a number, of the parameters; recorded with its time, also at the begin and the
                end.
            loss_every: updates between two losses, >= 1.
            target_loss: training also ends at the first recorded loss at or under this.
            max_secs_without_update: virtual seconds, > 0, after which training that makes no
                update is an error; None: it may continue. Workers that all wait for ever are an
                error anyway, unless some crash again and again: give it with such `Crashes`.

        Returns:
            The results.

        Raises:
            TypeError, ValueError: an argument does not fit, or neither `updates` nor `until` nor a
                program that ends by itself is given; nothing has run.
            BaseException: as `Simulation.run`.
        """
        options = loss, loss_every, max_secs_without_update, target_loss
        training = Training(program, gradient, updates, *options)
        is_bounded = updates is not None or target_loss is not None
        if program is None and not is_bounded and until in (None, math.inf):
            raise ValueError("this would run for ever; give updates, until, or a program that ends")

        self.simulation.run(self._train, training, until=until)
        return self.report()

    async def train(
        self,
        program: Program | None = None,
        *,
        gradient: Gradient | None = None,
        updates: int | None = None,
        loss: Loss | None = None,
        loss_every: int = 1,
        max_secs_without_update: float | None = None,
    ) -> None:
        """As `run`, within a simulation that runs: returns when every worker has ended.

        Cancellation cancels the workers.
        """
        await self._train(
            Training(program, gradient, updates, loss, loss_every, max_secs_without_update)
        )

    async def _train(self, training: Training) -> None:
        kernel = self.kernel
        if current_engine() is not kernel:
            raise SimulationError("a cluster trains within its own simulation; call this there")
        if self.workers:
            raise SimulationError("this cluster has trained; make another one")
        self._kernel, self._program = kernel, training.program_or_default()
        self.updates, self.began_at = training.updates, kernel.time
        if self.updates is not None:
            self.global_step.raise_limit(self.updates)
        self._make_workers()
        self.num_unfinished = self.num_workers
        self._stand_in = self.global_step.gate.open(kernel)
        self._change = Slot(kernel, "the end of training")
        hits = [
            (worker, failure)
            for worker in self.workers
            for failure in self.failures
            if failure.concerns(worker.index)
        ]
        for worker, failure in hits:
            failure.prepare(worker)
        for worker in self.workers:
            self._start_worker(worker)
        for worker, failure in hits:
            what = f"{type(failure).__name__} of worker {worker.index}"
            self._start_side_task(what, failure.play, self, worker)
        if training.loss is not None:
            self._loss, self._target_loss = training.loss, training.target_loss
            self._start_side_task("losses", self._record_losses, training.loss_every)
        if (max_secs := training.max_secs_without_update) is not None:
            self._start_side_task("updates", self._watch_updates, max_secs)
        try:
            while self.num_active or not (self.num_unfinished == 0 or self.server.is_over):
                await kernel.park(self._change)
                self._change = Slot(kernel, "the end of training")
            self._record_loss()
            if self._num_away:  # no further step comes
                self._num_away = 0
                self.global_step.gate.set_waiting(self._stand_in, True)
        finally:
            for worker in self.workers:
                worker.time.come_up()
            self.ended_at = self.clock()
            self._target_loss = None  # a report may record another loss; it has nothing to end
            if not kernel.is_ending:  # which has cancelled all tasks
                for task in [*self._side_tasks, *(worker.task for worker in self.workers)]:
                    if task is not None:
                        task.cancel()
        for task in self._side_tasks:
            await task.wait()

    def _make_workers(self) -> None:
        """Make the workers, their messages, and the queues of the servers."""
        kernel, streams, num = self.kernel, self.streams, self.num_workers
        if self._service is not None:
            self.queues = [
                Queue(kernel, streams, self._service, 1, "the server", each)
                for each in range(self._num_servers)
            ]
        messages: list[tuple[Message | None, Message | None, Message | None]]
        if self._network is not None:
            sizes = num, self._num_servers, self.server.parameters
            messages = [*self._network.messages(kernel, streams, *sizes)]
        else:
            pull, push = (
                [
                    None if delay is None else Message(streams.delays(each, purpose, delay))
                    for each in range(num)
                ]
                for purpose, delay in (("pull", self._pull), ("push", self._push))
            )
            messages = [(None, pull[each], push[each]) for each in range(num)]
        self.workers = [
            Worker(self, each, streams.delays(each, "compute", self._compute), messages[each])
            for each in range(num)
        ]

    def _end_clock(self) -> None:
        self.ended_at = self.kernel.time

    def report(self) -> Report:
        """The results up to now, with the current loss."""
        self._record_loss()  # `until` may end training between two losses
        secs = self.clock() - self.began_at
        server = self.server
        return Report(
            protocol=_ADDRESS.sub("", str(server.protocol)),  # the same in each process
            num_workers=self.num_workers,
            secs=secs,
            updates=server.version,
            applied=server.num_applied,
            discarded=server.num_discarded,
            staleness=server.staleness_counts(),
            workers=[self._report_of(each, secs) for each in self.workers],
            losses=list(self.losses),
            undone=server.num_undone,
            timeline=self.timeline if self.timeline.is_kept else None,
            servers=[self._report_of_server(each, secs) for each in range(len(self.queues))],
            bytes_moved=sum(each.bytes_moved for each in self.workers),
        )

    async def _record_losses(self, every: int) -> None:
        """Record the loss now, and after every so many updates."""
        step = self.global_step
        while True:
            self._record_loss()
            try:
                await step.wait_for(step.value + every)
            except StepUnreachableError:  # no worker is left to make one
                return

    def _record_loss(self) -> None:
        """Record the loss, if there is one, unless this time and update are recorded already."""
        key = (self.clock(), self.server.version)
        if self._loss is not None and (not self.losses or self.losses[-1][:2] != key):
            loss = loss_of(self._loss(self.server.parameters))
            self.losses.append((*key, loss))
            if self._target_loss is not None and loss <= self._target_loss:
                self._target_loss = None
                self.ended_at = self.clock()
                self.kernel.end()

    def _report_of(self, worker: Worker, secs: float) -> WorkerReport:
        spent = worker.time.secs
        times = {f"secs_{name}": spent[kind] for name, kind in SPENT.items()}
        times["secs_pushed"] += spent["served"]
        return WorkerReport(
            worker=worker.index,
            gradients=worker.num_computed,
            staleness=self.server.staleness_counts(worker.index),
            **times,
            secs_idle=max(0.0, secs - math.fsum(times.values())),
        )

    def _report_of_server(self, place: int, secs: float) -> ServerReport:
        queue = self.queues[place]
        busy, queued = queue.secs_after(self.clock())
        secs_busy, secs_queued = queue.secs_busy - busy, queue.secs_queued - queued
        return ServerReport(
            server=place,
            requests=queue.num_served,
            secs_busy=secs_busy,
            secs_queued=secs_queued,
            busy_share=secs_busy / secs if secs > 0 else 0.0,
            mean_queue=secs_queued / secs if secs > 0 else 0.0,
        )

    async def _watch_updates(self, max_secs: float) -> None:
        """DeadlockError, or LivelockError if tasks go on, after so long without an update."""
        server, step, kernel = self.server, self.global_step, self.kernel
        while not server.is_over:
            begun, epoch, value = kernel.time, step.epoch, step.value
            try:
                await step.wait_for(value + 1, timeout=max_secs)
            except StepUnreachableError:  # no worker is left to make one
                return
            except TimeoutError:
                if server.is_over or epoch != step.epoch:  # a restore has brought the step back
                    continue
                # one that stands still because of a failure may continue
                stand_still = any(w.num_stops or w.slowness == math.inf for w in self.workers)
                waits = kernel.is_left_to_daemons() and not stand_still
                raise (DeadlockError if waits else LivelockError)(
                    f"no update came from virtual time {begun!r} to {kernel.time!r}, for "
                    f"max_secs_without_update={max_secs!r} seconds, while the tasks "
                    f"{'wait' if waits else 'go on'}:\n{kernel.describe_waits()}\n{server!r}. Let "
                    "enough gradients arrive for an update, or give more seconds."
                ) from None

    async def take_down(self, worker: Worker, *, loses_work: bool = True) -> None:
        """Let a worker crash, or pause it; for failures.

        Returns when its program, if it is cancelled, has ended. Each call needs a `bring_back`;
        where failures overlap, the worker works again after the last of them.
        """
        worker.time.go_down()
        if not loses_work:
            worker.num_pauses += 1
            worker.change_speed()
            return
        worker.num_stops += 1
        assert worker.task is not None
        if not worker.is_finished:
            self.set_away(worker, True)
        worker.task.cancel()
        await worker.task.wait()

    def bring_back(self, worker: Worker, *, loses_work: bool = True) -> None:
        """Let a worker begin its program again, or continue; for failures, after `take_down`.

        After the last update no program begins again: it could only undo updates by a restore.
        """
        if loses_work:
            worker.num_stops -= 1
        else:
            worker.num_pauses -= 1
            worker.change_speed()
        if not (worker.num_stops or worker.num_pauses):
            worker.time.come_up()
        if loses_work and not (worker.num_stops or worker.is_finished or self.server.is_over):
            self._start_worker(worker)

    def set_away(self, worker: Worker, is_away: bool) -> None:
        """Count a worker as away, or not: it has no open session, but may open one.

        One worker of the step stands for all that are away, so that the step neither ends its waits
        nor forgets its limit. A worker that never opens a session is away until its program ends.
        """
        if worker.is_away != is_away:
            worker.is_away = is_away
            self._num_away += 1 if is_away else -1
            if self._num_away == int(is_away):  # the first, or the last
                self.global_step.gate.set_waiting(self._stand_in, not is_away)

    def _start_worker(self, worker: Worker) -> None:
        self.num_active += 1
        worker.is_in_session = False
        worker.task = self.kernel.start(self._work, worker, name=f"worker {worker.index}")

    async def _work(self, worker: Worker) -> None:
        assert self._program is not None
        has_ended = False
        try:
            returned: Any = self._program(worker)
            if not isinstance(returned, Awaitable):
                raise TypeError(
                    f"the program returned {returned!r}; give an async function: "
                    "async def program(worker)"
                )
            await returned
            has_ended = True
        except Exception as error:
            has_ended = is_clean_end(error)
            if not has_ended:
                error.add_note(f"in the program of worker {worker.index}")
                raise
        finally:
            self.num_active -= 1
            if has_ended:
                self.retire(worker)
            self._change.wake()

    def retire(self, worker: Worker) -> None:
        """Count a worker whose program has ended as gone for good; for failures."""
        if worker.is_finished:
            return
        worker.is_finished = True
        worker.time.come_up()
        self.num_unfinished -= 1
        self.server.leave(worker.index)
        self.set_away(worker, False)
        self._change.wake()

    def __repr__(self) -> str:
        server = self.server
        return (
            f"<Cluster of {self.num_workers} workers, {server.protocol!r}, at update "
            f"{server.version}{'' if self.ended_at is None else ', ended'}>"
        )

    def _start_side_task(self, name: str, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start what makes no progress by itself; it is cancelled at the end of training."""
        task = self.kernel.start(fn, *args, name=name)
        task.is_daemon = True
        self._side_tasks.append(task)


class Failure(ABC):
    """A failure of some workers or all. You make it and give it to a cluster.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        failures = [Slowdown(at=5.0, secs=10.0, factor=4.0, workers=[0])]
        cluster = simulation.cluster(4, compute=Exponential(1.0), failures=failures)
        assert cluster.run(updates=100).updates == 100
    """

    workers: Collection[int] | None

    def check(self, num_workers: int) -> None:
        """Raise TypeError or ValueError if `workers` are not among those of the cluster."""
        if self.workers is None:
            return
        allowed = f"give numbers from 0 to {num_workers - 1}, as in workers=[0], or None for all"
        if isinstance(self.workers, str) or not isinstance(self.workers, Collection):
            raise TypeError(f"workers of {self!r} is {self.workers!r}; {allowed}")
        for each in self.workers:
            if isinstance(each, bool) or not isinstance(each, Integral):
                raise TypeError(f"{self!r} is for worker {each!r}; {allowed}")
            if not 0 <= each < num_workers:
                raise ValueError(f"{self!r} is for worker {each}; {allowed}")

    def concerns(self, worker: int) -> bool:
        """Whether it hits this worker."""
        return self.workers is None or worker in self.workers

    def prepare(self, worker: Worker) -> None:  # noqa: B027
        """Set up the worker, before training begins."""

    async def play(self, cluster: Cluster, worker: Worker) -> None:  # noqa: B027
        """Let it happen; a task of its own, which is cancelled at the end of training."""


def _checked_failures(failures: object, num_workers: int) -> list[Failure]:
    """The failures, if each is one, of workers of the cluster."""
    if isinstance(failures, str) or not isinstance(failures, Sequence):
        raise TypeError(f"failures is {failures!r}; give a list, as in failures=[Preemption(60.0)]")
    found: list[Failure] = []
    for each in failures:
        if not isinstance(each, Failure):
            raise TypeError(f"failures hold {each!r}; give Crashes, Preemption or another")
        each.check(num_workers)
        found.append(copy(each))  # its random numbers depend on its identity: it may come twice
    return found


def _delay_or_none(name: str, value: Delay | None, num: int) -> Delay | None:
    """The delay of each worker or server; None if it takes no time at all."""
    delay = None if value is None else delay_of_each(name, value, num)
    return None if delay == Constant(0.0) else delay


def _zeros_like(parameters: Any) -> Any:
    if isinstance(parameters, dict):
        return {name: np.zeros_like(value) for name, value in parameters.items()}
    return np.zeros_like(parameters)
