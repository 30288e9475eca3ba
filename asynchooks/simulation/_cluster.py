"""A simulated cluster: workers around one parameter server, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine import EngineTask, Slot, current_engine
from .._errors import SimulationError, is_clean_end
from .._global_step import GlobalStep
from ..protocols import Asynchronous, ParameterServer, Protocol
from ._arguments import checked_positive
from ._delays import Delay, Exponential
from ._failures import Failure, checked_failures
from ._kernel import Kernel
from ._losses import Losses
from ._network import Queue
from ._presence import Presence
from ._programs import Gradient, Loss, Program, Training, as_awaitable, zeros_like
from ._report import Report, report_of
from ._streams import Streams
from ._timeline import NoTimeline, Timeline
from ._timings import checked_timings
from ._worker import Worker

if TYPE_CHECKING:
    from ._simulation import Simulation, Until


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
        streams: Streams | None = None,
    ) -> None:
        self.simulation = simulation
        self.streams = simulation.streams if streams is None else streams
        self.num_workers = checked_positive("num_workers", num_workers)
        compute = Exponential(1.0) if compute is None else compute
        self.delays = checked_timings(self.num_workers, compute, pull, push, service)
        self.server = ParameterServer(
            np.zeros(1) if parameters is None else parameters,
            Asynchronous() if protocol is None else protocol,
            num_workers=num_workers,
            learning_rate=learning_rate,
            update=update,
            global_step=GlobalStep(num_workers=num_workers, keeps_limit=True),
        )
        self.server.when_over = self._has_made_all
        self.nothing = zeros_like(self.server.parameters)
        """A gradient that changes nothing."""
        self.failures = checked_failures(failures, self.num_workers)
        self.timeline = Timeline() if keep_timeline else NoTimeline()
        self.losses: list[tuple[float, int, float]] = []
        """(Virtual seconds, updates, loss), as often as `loss_every` said, and at each report."""
        self._losses: Losses | None = None
        self.queue: Queue | None = None
        self.workers: list[Worker] = []
        self.num_active = 0
        """Workers whose program runs now."""
        self._program: Program | None = None
        self._presence: Presence
        self._beside: list[EngineTask] = []
        self._change: Slot
        self._num_unfinished = 0
        self.updates: int | None = None
        """How many were asked for."""
        self.began_at = 0.0
        """Virtual seconds at which training began."""
        self.ended_at: float | None = None
        """Virtual seconds at which it ended: by the last update asked for, or else."""

    @property
    def kernel(self) -> Kernel:
        """The engine of the simulation, while it runs."""
        return self.simulation.kernel

    @property
    def global_step(self) -> GlobalStep:
        """Counts the updates."""
        return self.server.global_step

    def clock(self) -> float:
        """Virtual seconds; it stands still once training has ended."""
        if self.ended_at is not None:
            return self.ended_at
        kernel = self.simulation._kernel  # asked several times in each step
        return 0.0 if kernel is None else kernel.entry[0]

    def run(
        self,
        program: Program | None = None,
        *,
        gradient: Gradient | None = None,
        updates: int | None = None,
        until: Until | None = None,
        loss: Loss | None = None,
        loss_every: int = 1,
    ) -> Report:
        """Run the simulation: every worker runs the program until training is over.

        Args:
            program: what a worker does, an async function of it; None: pull, compute, push.
            gradient: without a program: of (parameters, worker); None: zeros, for laws of time.
            updates: so many are made, exactly, unless all workers end or leave before; None: as
                many as `until` lets happen.
            until: as for `Simulation.run`.
            loss: of the parameters; taken down with its time, at the begin and the end, too.
            loss_every: updates between two losses, >= 1.

        Returns:
            What came of it.

        Raises:
            TypeError, ValueError: an argument is not what it should be, or neither `updates` nor
                `until` nor a program that ends by itself is given; then nothing has run.
            BaseException: as `Simulation.run`.
        """
        training = Training(program, gradient, updates, loss, loss_every)
        if program is None and updates is None and until in (None, math.inf):
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
    ) -> None:
        """As `run`, within a simulation that runs: returns when every worker has ended.

        Cancellation cancels the workers.
        """
        await self._train(Training(program, gradient, updates, loss, loss_every))

    async def _train(self, training: Training) -> None:
        kernel = self.kernel
        if current_engine() is not kernel:
            raise SimulationError("a cluster trains within its own simulation; call this there")
        if self.workers:
            raise SimulationError("this cluster has trained; make another one")
        self.updates, self.began_at = training.updates, kernel.time
        if self.updates is not None:
            self.global_step.raise_limit(self.updates)
        if (service := self.delays.service) is not None:
            self.queue = Queue(kernel, self.streams, service, 1, "the server")
        self._program = training.program_for(self.nothing)
        self.workers = [Worker(self, index) for index in range(self.num_workers)]
        self.server.around_wait = lambda worker, waiting: self.workers[worker].wait(waiting)
        self._num_unfinished = self.num_workers
        self._presence = Presence(self.global_step, kernel, self.num_workers)
        self._change = Slot(kernel, "the end of training")
        for worker in self.workers:
            for failure in self.failures:
                if failure.concerns(worker.index):
                    failure.prepare(worker)
            self._start_worker(worker)
        for worker in self.workers:
            for failure in self.failures:
                if failure.concerns(worker.index):
                    self._start_beside(failure.play, self, worker)
        if training.loss is not None:
            self._losses = Losses(self.server, self.clock, training.loss, self.losses)
            self._start_beside(self._losses.record, training.loss_every)
        try:
            while self.num_active or not (self._num_unfinished == 0 or self.server.is_over):
                await kernel.park(self._change)
                self._change = Slot(kernel, "the end of training")
            if self._losses is not None:
                self._losses.add()
            self._presence.end()
        finally:
            for worker in self.workers:
                worker.books.come_up()
            self.ended_at = self.clock()
            if not kernel.is_ending:  # else it has cancelled all
                for task in [*self._beside, *(worker.task for worker in self.workers)]:
                    if task is not None:
                        task.cancel()
        for task in self._beside:
            await task.wait()

    def _has_made_all(self) -> None:
        self.ended_at = self.kernel.time

    def report(self) -> Report:
        """What came of it up to now, the present loss included."""
        if self._losses is not None:  # `until` ends training between two that were taken down
            self._losses.add()
        return report_of(self)

    async def take_down(self, worker: Worker, *, loses_work: bool = True) -> None:
        """Let a worker crash, or stand still where it is; for failures.

        Returns when its program, if it is cancelled, has ended. Each call needs a `bring_back`;
        where failures overlap, the worker works again after the last of them.
        """
        worker.go_down(loses_work=loses_work)
        if loses_work:
            assert worker.task is not None
            if not worker.is_finished:
                self._presence.expect(worker)
            worker.task.cancel()
            await worker.task.wait()

    def bring_back(self, worker: Worker, *, loses_work: bool = True) -> None:
        """Let a worker begin its program anew, or go on; for failures, as `take_down`."""
        worker.come_up(loses_work=loses_work)
        if loses_work and not (worker.num_stops or worker.is_finished):
            self._start_worker(worker)

    def is_back(self, worker: Worker) -> None:
        """The session of a worker is open: what it waits for, others need not expect of it."""
        self._presence.is_back(worker)

    def _start_worker(self, worker: Worker) -> None:
        self.num_active += 1
        worker.begins_anew()
        worker.task = self.kernel.start(self._work, worker, name=f"worker {worker.index}")

    async def _work(self, worker: Worker) -> None:
        assert self._program is not None
        begun, has_ended = self.kernel.time, False
        try:
            await as_awaitable(self._program(worker))
            has_ended = True
        except Exception as error:
            has_ended = is_clean_end(error)
            if not has_ended:
                error.add_note(f"in the program of worker {worker.index}")
                raise
        finally:
            self.num_active -= 1
            self.timeline.ran(worker.index, begun, self.kernel.time)
            if has_ended:
                self.let_go(worker)
            self._change.wake()

    def let_go(self, worker: Worker) -> None:
        """Count a worker whose program has ended as gone for good; for failures."""
        if worker.is_finished:
            return
        worker.is_finished = True
        worker.books.come_up()
        self._num_unfinished -= 1
        self.server.leave(worker.index)
        self._presence.is_back(worker)
        self._change.wake()

    def _start_beside(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._beside.append(self.kernel.start(fn, *args))
