"""Simulation: runs a program of asynchooks in virtual time. A reader starts here.

It knows nothing of workers, delays and protocols; those wait through its kernel.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from numbers import Real
from typing import Any, Literal, get_args

from .._engine import EngineTask
from .._errors import SimulationError
from .._global_step import GlobalStep
from ._cluster import Cluster
from ._delays import Delay
from ._kernel import Kernel
from ._network import Queue
from ._rare_collections import rare_collections
from ._real_sleep import no_real_sleep
from ._recording import Recording
from ._streams import Streams

Backend = Literal["asyncio", "trio", "turbo"]
Until = float | Callable[[], bool]

_KERNELS = {
    "asyncio": ("._asyncio", "AsyncioKernel"),
    "trio": ("._trio", "TrioKernel"),
    "turbo": ("._turbo", "TurboKernel"),
}
_running: ContextVar[Simulation | None] = ContextVar("asynchooks_simulation", default=None)


class Simulation:
    """One run of a program in virtual time: sessions, hooks and workers, none of them changed.

    Time begins at 0.0 and jumps to the next moment at which somebody is to be woken; each sleep
    ends at exactly its time. Equal times are served in the order of asking. The same program with
    the same seed does the same on every backend, in every process, if it waits only through
    asynchooks.

    You make it and run it, once.

    Args:
        seed: of every random number, an integer >= 0.
        backend: "asyncio" and "trio" run an event loop, in which whatever is built on anyio works
            (sleep, timeouts, task groups, streams). "turbo" runs none: it is several times
            faster, and takes programs that wait through asynchooks only.
        shuffle_ties: serve equal times in an order drawn from the seed, to explore schedules.
        max_turns: how often a task may run at one virtual time before that is an error, >= 1.
        keep_trace: keep what happened in `trace`.

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
        max_turns: int = 10_000,
        keep_trace: bool = False,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"backend is {backend!r}; give one of {', '.join(get_args(Backend))}")
        if not isinstance(max_turns, int) or max_turns < 1:
            raise ValueError(f"max_turns is {max_turns!r}; give an integer >= 1")
        self.seed = seed
        self.backend = backend
        self.streams = Streams(seed)
        self.recording = Recording() if keep_trace else None
        module, name = _KERNELS[backend]
        orders = _shuffled(self.streams) if shuffle_ties else None
        self._new_kernel: Callable[[], Kernel] = lambda: getattr(
            import_module(module, __package__), name
        )(orders, max_turns, self.recording)
        self._kernel: Kernel | None = None
        self._value: Any = None
        self._num_clusters = self._num_queues = 0  # made so far
        self._is_over = False

    def run(
        self, main: Callable[..., Awaitable[Any]], *args: Any, until: Until | None = None
    ) -> Any:
        """Run `main(*args)`, and every task that it starts, and return its value.

        It ends with main, or when `until` comes, or with the first error of a task, which leaves
        as itself. What still runs then is cancelled, and its clean-up runs, in virtual time.

        Args:
            main: an async function; it starts further tasks by `start`.
            until: the last virtual time whose events happen, in seconds >= 0; or a condition that
                is looked at after every event (`at_step` gives one); None: until main ends.

        Returns:
            What main returned; None, if `until` came first.

        Raises:
            SimulationError: it ran already, or another runs in this thread, or an event loop.
            DeadlockError: all tasks wait, and nothing is left to wake them.
            LivelockError: tasks go on without spending time.
            OutsideWorkError: the program does real I/O, or really sleeps.
            ForeignAwaitError: "turbo" met an await of another library.
        """
        if self._kernel is not None:
            raise SimulationError("this simulation has run; make another one for another run")
        stop_at, condition = _check_until(until)
        _refuse_nesting()
        kernel = self._kernel = self._new_kernel()
        kernel.stop_when(stop_at, condition)

        async def run_main() -> None:
            self._value = await main(*args)

        token = _running.set(self)
        try:
            with no_real_sleep(), rare_collections():
                kernel.run(run_main)
        finally:
            self._is_over = True
            _running.reset(token)
        return self._value

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

    def sleep(self, secs: float) -> Awaitable[None]:
        """Suspend for exactly that many virtual seconds, >= 0. Cancellation safe."""
        return self.kernel.sleep(secs)

    def start(
        self, fn: Callable[..., Awaitable[Any]], *args: Any, name: str | None = None
    ) -> EngineTask:
        """Start `fn(*args)` as a task; it can be cancelled and waited for.

        Tasks run in order of starting. An error of one ends the simulation, and leaves as itself.
        """
        return self.kernel.start(fn, *args, name=name)

    def quiescence(self) -> Awaitable[None]:
        """Wait until nothing else is left to happen at this virtual time."""
        return self.kernel.quiescence()

    def outside_work(self) -> AbstractContextManager[None]:
        """Within the block virtual time stands still: something outside of the simulation works.

        Only needed for what the event loop cannot see: threads of `anyio.to_thread` are seen.
        """
        return self.kernel.outside_work()

    def cluster(self, num_workers: int, **options: Any) -> Cluster:
        """Workers around one parameter server, simulated; the options are those of `Cluster`.

        Of several in one simulation each draws random numbers of its own.
        """
        self._num_clusters += 1
        streams = self.streams
        if self._num_clusters > 1:
            streams = Streams(self.seed, branch=f"cluster {self._num_clusters}/")
        return Cluster(self, num_workers, streams=streams, **options)

    def queue(self, service: Delay, *, num_servers: int = 1) -> Queue:
        """Servers with one queue, first come first served; within the run.

        Each draws service times of its own.

        Args:
            service: seconds that a request takes once it is its turn.
            num_servers: how many are served side by side, >= 1.
        """
        self._num_queues += 1
        name = f"queue {self._num_queues}"
        return Queue(self.kernel, self.streams, service, num_servers, name)

    def note(self, what: str) -> None:
        """Add a line to the trace, if it is kept."""
        if self.recording is not None:
            self.recording.note(self.now, what)

    @property
    def trace(self) -> Recording:
        """What happened, in order."""
        if self.recording is None:
            raise SimulationError("no trace was kept; give Simulation keep_trace=True")
        return self.recording


def current_simulation() -> Simulation:
    """The simulation that this task runs in.

    Raises:
        SimulationError: it runs in real time.
    """
    simulation = _running.get()
    if simulation is None:
        raise SimulationError("no simulation runs here; call this in what Simulation.run runs")
    return simulation


def at_step(global_step: GlobalStep, step: int) -> Callable[[], bool]:
    """For `until`: whether the global step has been reached."""
    return lambda: global_step.value >= step


def _check_until(until: Until | None) -> tuple[float, Callable[[], bool] | None]:
    if until is None:
        return math.inf, None
    if callable(until):
        return math.inf, until
    if isinstance(until, Real) and not isinstance(until, bool) and until >= 0:
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
    from sniffio import AsyncLibraryNotFoundError, current_async_library

    try:
        library = current_async_library()
    except AsyncLibraryNotFoundError:
        if "asyncio" not in sys.modules or sys.modules["asyncio"]._get_running_loop() is None:
            return
        library = "asyncio"  # in a callback, where no task runs
    raise SimulationError(
        f"an event loop of {library} runs in this thread, and its time is real; call "
        "Simulation.run outside of it, or in a thread"
    )


def _shuffled(streams: Streams) -> Iterator[int]:
    """Orders that decide among equal times by chance, and differ."""
    generator = streams.generator(0, "ties")
    for number in itertools.count(0, 1024):
        for place, key in enumerate(generator.integers(1, 1 << 62, 1024).tolist()):
            yield key << 64 | number + place
