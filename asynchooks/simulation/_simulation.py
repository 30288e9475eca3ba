"""Simulation: runs a program of asynchooks in virtual time. A reader starts here.

Nothing here depends on workers, delays and protocols; those wait through its kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, get_args

from .._check import a_number, integer
from .._engine.base import EngineTask
from .._errors import SimulationError
from .._step.global_step import GlobalStep
from ..protocols import Protocol
from .cluster._cluster import Cluster, Failure
from .cluster._network import Network, Queue
from .delays._delay import Delay
from .delays._streams import Streams
from .kernel._choice import Scheduled, Shuffled, parse_order
from .kernel._interpreter import no_real_sleep, rare_collections
from .kernel._kernel import Chooser, Event, Kernel, Recording, Until

Backend = Literal["asyncio", "trio", "turbo"]

_KERNELS = {
    "asyncio": (".kernel._asyncio", "AsyncioKernel"),
    "trio": (".kernel._trio", "TrioKernel"),
    "turbo": (".kernel._turbo", "TurboKernel"),
}
_running: ContextVar[Simulation | None] = ContextVar("asynchooks_simulation", default=None)


class Simulation:
    """One run of a program in virtual time: sessions, hooks and workers, none of them changed.

    Time begins at 0.0 and jumps to the next time at which a task is to wake; each sleep ends at
    exactly its time. Equal times are served in the order of asking. A program that waits only
    through asynchooks does the same for the same seed, on every backend and in every process.

    You make it and run it, once.

    Args:
        seed: of every random number, an integer >= 0.
        backend: "asyncio" and "trio" run an event loop, in which all that is built on anyio works
            (sleep, timeouts, task groups, streams). "turbo" runs none: it is several times
            faster, and takes programs that wait through asynchooks only.
        shuffle_ties: serve equal times, and run the tasks that are ready at one time, in an order
            drawn from the seed, to explore schedules.
        schedule: one order of these, as the `ScheduleError` of `explore` shows it.
        max_turns: how often a task may run at one virtual time before that is an error, >= 1.
        keep_trace: record what happens in `trace`.

    Example:
        simulation = Simulation(seed=7)

        async def main():
            await simulation.sleep(3.5)
            return simulation.now

        assert simulation.run(main) == 3.5
    """

    def __init__(
        self,
        seed: int = 0,
        backend: Backend = "asyncio",
        *,
        shuffle_ties: bool = False,
        schedule: str | None = None,
        max_turns: int = 10_000,
        keep_trace: bool = False,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"backend is {backend!r}; give one of {', '.join(get_args(Backend))}")
        max_turns = integer("max_turns", max_turns, least=1)
        self.seed = integer("seed", seed, least=0)
        self.backend = backend
        self.recording = Recording() if keep_trace else None
        self.chooser: Chooser | None = None
        if shuffle_ties:
            self.chooser = Shuffled(self.streams.generator(0, "ready").integers)
        if schedule is not None:
            self.chooser = Scheduled(parse_order(schedule))
        self._max_turns = max_turns
        self._kernel: Kernel | None = None
        self._value: Any = None
        self._num_clusters = self._num_queues = 0  # made so far
        self._is_over = False

    @cached_property
    def streams(self) -> Streams:
        """Of all random numbers; a run that draws none does not make it, which takes 0.2 ms."""
        return Streams(self.seed)

    def run(
        self, main: Callable[..., Awaitable[Any]], *args: Any, until: Until | None = None
    ) -> Any:
        """Run `main(*args)`, and every task that it starts, and return its value.

        It ends with main, at `until`, or with the first error of a task, which is raised as it
        is. Tasks that still run then are cancelled; their clean-up runs in virtual time.

        Args:
            main: an async function; it starts further tasks by `start`.
            until: the last virtual time at which events happen, in seconds >= 0; or a condition
                that is checked after every event (`at_step` gives one); None: until main ends.

        Returns:
            What main returned; None, if it ended at `until`.

        Raises:
            SimulationError: it has run, or another one or an event loop runs in this thread.
            DeadlockError: all tasks wait, and nothing is left to wake them.
            LivelockError: tasks run on without spending time, or a cluster without an update.
            OutsideWorkError: the program does real I/O, or really sleeps.
            ForeignAwaitError: "turbo" met an await of another library.
        """
        if self._kernel is not None:
            raise SimulationError("this simulation has run; make another one for another run")
        stop_at, condition = _check_until(until)
        _refuse_nesting()
        module, name = _KERNELS[self.backend]
        kernel_class = getattr(import_module(module, __package__), name)
        kernel: Kernel = kernel_class(self._max_turns, self.recording, self.chooser)
        self._kernel = kernel
        kernel.stop_when(stop_at, condition)

        async def run_main() -> None:
            self._value = await main(*args)
            if isinstance(self.chooser, Scheduled):
                await self._refuse_tasks_left()

        token = _running.set(self)
        try:
            with no_real_sleep(), rare_collections():
                kernel.run(run_main)
        finally:
            self._is_over = True
            _running.reset(token)
        return self._value

    async def _refuse_tasks_left(self) -> None:
        await self.kernel.quiescence()
        daemons = {each.name for each in self.kernel.live if each.is_daemon}
        left = {name for name, _ in self.kernel.running_tasks()} - daemons - {"main"}
        if left:
            raise SimulationError(
                "main has returned, and nothing more happens at that time, but tasks are left:\n"
                f"{self.kernel.describe_waits()}\nEnd them, or wait for their end."
            )

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return 0.0 if self._kernel is None else self._kernel.time

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs in another thread than this one."""
        return self._kernel is not None and self._kernel.is_elsewhere

    @property
    def kernel(self) -> Kernel:
        """The engine, while it runs."""
        if self._kernel is None:
            raise SimulationError("the simulation has not begun; call this in what `run` runs")
        if self._is_over:
            raise SimulationError("the simulation is over; call this in what `run` runs")
        return self._kernel

    @property
    def kernel_or_none(self) -> Kernel | None:
        """The engine; None before the run."""
        return self._kernel

    async def sleep(self, secs: float) -> None:
        """Suspend for exactly this many virtual seconds, >= 0. Cancellation safe."""
        await self.kernel.sleep(secs)

    def start(
        self, fn: Callable[..., Awaitable[Any]], *args: Any, name: str | None = None
    ) -> EngineTask:
        """Start `fn(*args)` as a task, with `cancel()` and `await task.wait()`.

        Tasks run in order of starting. An error of a task ends the simulation, which raises it.
        """
        return self.kernel.start(fn, *args, name=name)

    def quiescence(self) -> Awaitable[None]:
        """Wait until nothing else is left to happen at this virtual time."""
        return self.kernel.quiescence()

    def outside_work(self) -> AbstractContextManager[None]:
        """Within the block virtual time stands still, for work outside of the simulation.

        Only needed for work that the event loop does not know of: it knows the threads of
        `anyio.to_thread`.
        """
        return self.kernel.outside_work()

    def cluster(
        self,
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
    ) -> Cluster:
        """Workers around one parameter server, simulated; the options are those of `Cluster`.

        Each cluster of a simulation draws its own random numbers.
        """
        streams = self.streams
        if self._num_clusters:
            streams = Streams(self.seed, branch=f"cluster {self._num_clusters + 1}/")
        token = _running.set(self)  # the protocol may read the time already
        try:
            cluster = Cluster(
                self,
                num_workers,
                parameters=parameters,
                protocol=protocol,
                compute=compute,
                pull=pull,
                push=push,
                service=service,
                num_servers=num_servers,
                network=network,
                failures=failures,
                learning_rate=learning_rate,
                update=update,
                keep_timeline=keep_timeline,
                streams=streams,
            )
        finally:
            _running.reset(token)
        self._num_clusters += 1
        return cluster

    def queue(self, service: Delay, *, num_servers: int = 1) -> Queue:
        """Servers with one queue, first come first served; within the run.

        Each queue draws its own service times.

        Args:
            service: seconds that a request takes once it is its turn.
            num_servers: requests that are served at the same time, >= 1.
        """
        self._num_queues += 1
        name = f"queue {self._num_queues}"
        return Queue(self.kernel, self.streams, service, num_servers, name)

    def note(self, what: str) -> None:
        """Add a line to the trace, if it is kept."""
        if self.recording is not None:
            self.recording.events.append(Event(self.now, what))

    def __repr__(self) -> str:
        state = "over" if self._is_over else "running"
        when = f"{state} at {self.now!r} virtual seconds" if self._kernel else "not begun"
        return f"<Simulation seed={self.seed!r} backend={self.backend!r}, {when}>"

    @property
    def trace(self) -> Recording:
        """What happened and was noted: `events` in order, each with its `time` and `what`.

        `to_bytes()` has a line for each event, with its time as an exact hexadecimal float, and
        `digest()` is the SHA-256 of that.
        """
        if self.recording is None:
            raise SimulationError("no trace was kept; give Simulation keep_trace=True")
        return self.recording


def current_simulation() -> Simulation:
    """The simulation that this task runs in.

    Raises:
        SimulationError: it runs in real time.

    Example:
        simulation = Simulation(backend="turbo")

        async def main():
            assert current_simulation() is simulation

        simulation.run(main)
    """
    simulation = _running.get()
    if simulation is None:
        raise SimulationError("no simulation runs here; call this in what Simulation.run runs")
    return simulation


def at_step(global_step: GlobalStep, step: int) -> Callable[[], bool]:
    """For `until`: whether the global step has been reached.

    Example:
        simulation = Simulation(backend="turbo")
        step = GlobalStep()

        async def count():
            while True:
                await simulation.sleep(1.0)
                step.publish(step.value + 1)

        simulation.run(count, until=at_step(step, 5))
        assert simulation.now == 5.0
    """
    return lambda: global_step.value >= step


def _check_until(until: Until | None) -> tuple[float, Callable[[], bool] | None]:
    if until is None:
        return math.inf, None
    if callable(until):
        return math.inf, until
    if a_number(until) and until >= 0:
        return float(until), None
    raise ValueError(
        f"until is {until!r}; give virtual seconds >= 0, a condition (a function without "
        "arguments, such as at_step(global_step, 100)), or None"
    )


def _refuse_nesting() -> None:
    running = _running.get()
    if running is not None and not running.is_elsewhere:
        raise SimulationError(
            "a simulation runs already; start tasks in it by `start`, or run this one afterwards"
        )
    library = _running_library()
    if library is not None:
        raise SimulationError(
            f"an event loop of {library} runs in this thread, and its time is real; call "
            "Simulation.run outside of it, or in a thread"
        )


def _running_library() -> str | None:
    sniffio = sys.modules.get("sniffio")  # trio imports it; it may not be installed without trio
    if sniffio is not None:
        with suppress(sniffio.AsyncLibraryNotFoundError):
            return str(sniffio.current_async_library())
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    return "asyncio"  # perhaps in a callback, where no task runs
