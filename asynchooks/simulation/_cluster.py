"""A simulated cluster: workers around one parameter server, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine import EngineTask, Slot, current_engine
from .._errors import SimulationError, StepUnreachableError, is_clean_end
from .._global_step import GlobalStep
from ..protocols import Asynchronous, ParameterServer, Protocol
from ._arguments import checked_positive
from ._delays import Constant, Delay, Exponential, checked_delay
from ._failures import Failure
from ._kernel import Kernel
from ._network import Queue
from ._report import Report, report_of
from ._timeline import NoTimeline, Timeline
from ._worker import Worker

if TYPE_CHECKING:
    from ._simulation import Simulation, Until

Program = Callable[[Worker], Awaitable[Any]]
Gradient = Callable[[Any, Worker], Any]


@dataclass(frozen=True)
class Delays:
    """What takes how long: computing a gradient, and its way to the server and back."""

    compute: Delay
    pull: Delay | None
    push: Delay | None


class Cluster:
    """Workers 0 to num_workers - 1 and a parameter server. `Simulation.cluster` makes it.

    Parameters and gradients are real arrays, so that training curves are real training curves;
    only time is simulated. `run` does all; `train` does the same within a program of one's own.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(8, protocol=StaleSynchronous(3), compute=Exponential(1.0))
        report = cluster.run(updates=1000)
        assert report.updates == 1000 and max(report.staleness) <= 8 * 4
    """

    def __init__(
        self,
        simulation: Simulation,
        num_workers: int,
        *,
        parameters: Any = None,
        protocol: Protocol | None = None,
        compute: Delay | None = None,
        pull: Delay | None = None,
        push: Delay | None = None,
        service: Delay | None = None,
        failures: Sequence[Failure] = (),
        learning_rate: float | Callable[[int], float] = 0.1,
        update: Any = None,
        keep_timeline: bool = False,
    ) -> None:
        self.simulation = simulation
        self.num_workers = num_workers
        self.delays = Delays(
            checked_delay("compute", Exponential(1.0) if compute is None else compute),
            _delay_or_none("pull", pull),
            _delay_or_none("push", push),
        )
        self.server = ParameterServer(
            np.zeros(1) if parameters is None else parameters,
            Asynchronous() if protocol is None else protocol,
            num_workers=num_workers,
            learning_rate=learning_rate,
            update=update,
            global_step=GlobalStep(num_workers=num_workers, keeps_limit=True),
        )
        self.nothing = _zeros_like(self.server.parameters)
        """A gradient that changes nothing."""
        for each in failures:
            if not isinstance(each, Failure):
                raise TypeError(f"failures hold {each!r}; give Crashes, Preemption or another")
            each.check(num_workers)
        self.failures = list(failures)
        self.timeline = Timeline() if keep_timeline else NoTimeline()
        self.losses: list[tuple[float, int, float]] = []
        """(Virtual seconds, updates, loss), as often as `loss_every` said."""
        self.queue: Queue | None = None
        self.workers: list[Worker] = []
        self.num_active = 0
        """Workers whose program runs now."""
        self._service = _delay_or_none("service", service)
        self._program: Program | None = None
        self._beside: list[EngineTask] = []
        self._change: Slot
        self._num_unfinished = 0
        self.updates: int | None = None
        """How many were asked for."""
        self.last_update_at = 0.0
        self.ended_at: float | None = None
        """Virtual seconds of the last update, once training has ended by itself."""

    @property
    def kernel(self) -> Kernel:
        """The engine of the simulation, while it runs."""
        return self.simulation.kernel

    @property
    def global_step(self) -> GlobalStep:
        """Counts the updates."""
        return self.server.global_step

    def run(
        self,
        program: Program | None = None,
        *,
        gradient: Gradient | None = None,
        updates: int | None = None,
        until: Until | None = None,
        loss: Callable[[Any], float] | None = None,
        loss_every: int = 1,
    ) -> Report:
        """Run the simulation: every worker runs the program until training is over.

        Args:
            program: what a worker does, an async function of it; None: pull, compute, push.
            gradient: without a program: of (parameters, worker); None: zeros, for laws of time.
            updates: so many are made, exactly; None: as many as `until` lets happen.
            until: as for `Simulation.run`.
            loss: of the parameters; taken down with its time.
            loss_every: updates between two losses, >= 1.

        Returns:
            What came of it.

        Raises:
            ValueError: neither `updates` nor `until` nor a program that ends by itself is given.
            BaseException: as `Simulation.run`.
        """
        if program is None and updates is None and until is None:
            raise ValueError("this would run for ever; give updates, until, or a program that ends")

        async def main() -> None:
            await self.train(
                program, gradient=gradient, updates=updates, loss=loss, loss_every=loss_every
            )

        self.simulation.run(main, until=until)
        return self.report()

    async def train(
        self,
        program: Program | None = None,
        *,
        gradient: Gradient | None = None,
        updates: int | None = None,
        loss: Callable[[Any], float] | None = None,
        loss_every: int = 1,
    ) -> None:
        """As `run`, within a simulation that runs: returns when every worker has ended.

        Cancellation cancels the workers.
        """
        kernel = self.kernel
        if current_engine() is not kernel:
            raise SimulationError("a cluster trains within its own simulation; call this there")
        if self.workers:
            raise SimulationError("this cluster has trained; make another one")
        if updates is not None:
            self.updates = checked_positive("updates", updates)
            self.global_step.raise_limit(updates)
        if self._service is not None:
            self.queue = Queue(kernel, self.simulation.streams, self._service, 1, "the server")
        self._program = _plain_program(gradient) if program is None else program
        self.workers = [Worker(self, index) for index in range(self.num_workers)]
        self._num_unfinished = self.num_workers
        for worker in self.workers:
            for failure in self.failures:
                if failure.concerns(worker.index):
                    failure.prepare(worker)
            self.start_worker(worker)
        for worker in self.workers:
            for failure in self.failures:
                if failure.concerns(worker.index):
                    self._start_beside(failure.play, self, worker)
        if loss is not None:
            every = checked_positive("loss_every", loss_every)
            self._start_beside(self._record_losses, loss, every)
        self._change = Slot(kernel, "the end of training")
        try:
            while self.num_active or not (self._num_unfinished == 0 or self.server.is_over):
                await kernel.park(self._change)
                self._change = Slot(kernel, "the end of training")
            self.ended_at = self.last_update_at
            if loss is not None:
                self._add_loss(loss)
        finally:
            for task in [*self._beside, *(worker.task for worker in self.workers)]:
                if task is not None:
                    task.cancel()

    def report(self) -> Report:
        """What came of it up to now."""
        return report_of(self)

    def start_worker(self, worker: Worker) -> None:
        """Let a worker begin its program; for failures."""
        self.num_active += 1
        worker._is_in_session = False
        worker.task = self.kernel.start(self._work, worker, name=f"worker {worker.index}")

    async def stop_worker(self, worker: Worker) -> None:
        """Cancel a worker's program, and wait until it has ended; for failures."""
        assert worker.task is not None
        worker.task.cancel()
        await worker.task.wait()

    async def _work(self, worker: Worker) -> None:
        assert self._program is not None
        begun = self.kernel.time
        try:
            await self._program(worker)
        except Exception as error:
            if not is_clean_end(error):
                error.add_note(f"in the program of worker {worker.index}")
                raise
            worker.is_finished = True
        else:
            worker.is_finished = True
        finally:
            self.num_active -= 1
            self.timeline.ran(worker.index, begun, self.kernel.time)
            if worker.is_finished:
                self._num_unfinished -= 1
                self.server.leave(worker.index)
            self._change.wake()

    def has_left(self, worker: Worker) -> None:
        """Count a worker whose program was stopped as gone for good; for failures."""
        worker.is_finished = True
        self._num_unfinished -= 1
        self.server.leave(worker.index)
        self._change.wake()

    def _start_beside(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._beside.append(self.kernel.start(fn, *args))

    async def _record_losses(self, loss: Callable[[Any], float], every: int) -> None:
        step = self.global_step
        while True:
            self._add_loss(loss)
            try:
                await step.wait_for(step.value + every)
            except StepUnreachableError:  # the last session has closed
                return

    def _add_loss(self, loss: Callable[[Any], float]) -> None:
        server = self.server
        if not self.losses or self.losses[-1][1] != server.version:
            value = float(loss(server.parameters))
            self.losses.append((self.kernel.time, server.version, value))


def _plain_program(gradient: Gradient | None) -> Program:
    """Pull, compute, push; without a gradient zeros are pushed."""

    async def program(worker: Worker) -> None:
        nothing = worker.cluster.nothing
        while True:
            snapshot = await worker.pull()
            if await worker.compute():
                value = nothing if gradient is None else gradient(snapshot.parameters, worker)
                await worker.push(value, snapshot.version)

    return program


def _zeros_like(parameters: Any) -> Any:
    if isinstance(parameters, dict):
        return {name: np.zeros_like(value) for name, value in parameters.items()}
    return np.zeros_like(parameters)


def _delay_or_none(name: str, delay: Delay | None) -> Delay | None:
    """The delay, unless it takes no time at all."""
    if delay is None or checked_delay(name, delay) == Constant(0.0):
        return None
    return delay
