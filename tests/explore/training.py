"""What the programs of the promises train, and how they run workers together.

Workers take 1 s of virtual time for a step, all alike, so that they are ready together again and
again.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from asynchooks import (
    MonitoredSession,
    PreemptionError,
    RawSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.simulation import Simulation

NUM_WORKERS, NUM_STEPS = 3, 3
CUT = "is closed; make a new one|cancelled from outside|opens late"

Program = Callable[[Simulation], Awaitable[None]]


class Boom(Exception):  # noqa: N818
    """An error of the program."""


@dataclass
class Model:
    """What workers train: it counts its steps."""

    simulation: Simulation
    steps: int = 0
    secs: float = 1.0
    error_at: int = -1
    made_at: dict[int, float] = field(default_factory=dict)
    """When each step was made, in virtual seconds."""
    num_under_way: int = 0
    is_held: bool = False
    """Whether no step may be under way."""

    async def step(self) -> dict[str, Any]:
        assert not self.is_held, "a step begins while another task is alone with the model"
        self.num_under_way += 1
        try:
            await self.simulation.sleep(self.secs)
            if self.steps + 1 == self.error_at:
                self.error_at = -1
                raise Boom
            self.steps += 1
            self.made_at[self.steps] = self.simulation.now
            return {"steps": self.steps}
        finally:
            self.num_under_way -= 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block no step may be under way."""
        assert not self.num_under_way, "a step is under way where a task is to be alone"
        assert not self.is_held, "two tasks are alone with the model"
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False


@dataclass(eq=False)
class Machines(SessionCreator):
    """Makes machines that train one after the other; each begins at the step made last."""

    simulation: Simulation
    steps: int = 0
    rows: list[Any] = field(default_factory=list)
    """What the steps were fed."""
    made: list[Machine] = field(default_factory=list)
    num_lost: int = 0
    fails_all: bool = True
    """Whether all steps on a lost machine fail; else one, and what others make is of no use."""

    def lose(self) -> None:
        """The present machine breaks down: steps under way on it fail, and all later ones."""
        if self.made and not self.made[-1].is_lost:
            self.made[-1].is_lost = True
            self.num_lost += 1

    @asynccontextmanager
    async def lost_after(self, *pauses: float) -> AsyncIterator[None]:
        """Within the block, the present machine breaks down behind each of these pauses."""

        async def lose() -> None:
            for secs in pauses:
                await self.simulation.sleep(secs)
                self.lose()

        losing = self.simulation.start(lose)
        yield
        await losing.wait()

    async def create_session(self) -> RawSession:
        await self.simulation.sleep(0.0)
        machine = Machine(self)
        self.made.append(machine)
        return machine


class Machine(RawSession):
    """A raw session that ends with its machine."""

    def __init__(self, machines: Machines) -> None:
        super().__init__()
        self.machines = machines
        self.is_lost = self.is_known = self.is_closed = False
        self.num_under_way, self.steps = 0, machines.steps

    async def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        machines, feeds = self.machines, feed_dict or {}
        assert not self.is_known, "a step begins on a machine that is known to be lost"
        assert not self.is_closed, "a step begins on a session that is closed"
        self.num_under_way += 1
        try:
            await machines.simulation.sleep(feeds.get("secs", 1.0))
            if self.is_lost and (machines.fails_all or not self.is_known):
                raise PreemptionError
        except PreemptionError:
            self.is_known = True
            raise
        finally:
            self.num_under_way -= 1
        self.steps += 1
        if not self.is_lost:
            machines.steps = self.steps
            machines.rows += [value for name, value in feeds.items() if name == "row"]
        return {}

    def read_step(self) -> int:
        return self.steps

    def tells_of_close(self, error: BaseException) -> bool:
        return isinstance(error, Boom)

    async def close(self) -> None:
        assert not self.is_closed, "a session is closed twice"
        assert not self.num_under_way, "a session is closed below a step"
        self.is_closed = True


class Waiting(SessionRunHook):
    """Waits in each of its moments, and notes them: each one by a letter."""

    def __init__(self, simulation: Simulation) -> None:
        self.sleep, self.moments = simulation.sleep, ""

    async def note(self, letter: str) -> None:
        self.moments += letter
        await self.sleep(0.0)

    async def begin(self) -> None:
        await self.note("b")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        await self.note("c")

    async def before_run(self, run_context: Any) -> None:
        await self.note("r")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.note("a")

    async def before_end(self, session: Any) -> None:
        await self.note("e")

    async def end(self, session: Any) -> None:
        await self.note("d")

    async def on_error(self, session: Any, error: BaseException) -> None:
        await self.note("x")

    async def after_close(self, error: BaseException | None) -> None:
        self.moments += "z"


MOMENTS = "|bx|b(c(ra?)*)*(ed|(ed?)?x)z"
"""What a hook may see, as a regular expression of the letters of `Waiting`.

One whose `begin` did not return holds nothing, and sees no `after_close`.
"""


async def train(
    creator: Any, hooks: Sequence[Any], body: Callable[[MonitoredSession], Any] | None = None
) -> int:
    """Train to the end, after a call of the body; returns the step at the end."""
    async with MonitoredSession(hooks, creator) as session:
        if body is not None:
            body(session)
        while not session.should_stop():
            await session.run([])
    return session.global_step.value


async def workers(
    simulation: Simulation,
    worker: Callable[[int], Awaitable[Any]],
    num: int = NUM_WORKERS,
    name: str = "worker",
) -> set[int]:
    """Run the workers together; returns those that were not cancelled.

    One whose hook would restore the model too late counts as cancelled.

    The last one that reads an input closes it. So if that is cancelled before another one opens,
    the other one finds it closed, and counts as cancelled, too. So does one that finds it cut as
    the simulation ends.
    """
    whole = set()
    is_cancelled = False
    cut: list[Exception] = []

    async def run(i: int) -> None:
        nonlocal is_cancelled
        try:
            await worker(i)
        except RuntimeError as error:
            if not re.search(CUT, str(error)):
                raise
            cut.append(error)
            is_cancelled = is_cancelled or "opens late" in str(error)
        except BaseException:
            is_cancelled = True
            raise
        else:
            whole.add(i)

    tasks = [simulation.start(run, i, name=f"{name} {i}") for i in range(num)]
    for each in tasks:
        await each.wait()
    assert is_cancelled or not cut, cut
    return whole


async def train_together(
    simulation: Simulation,
    creator: SharedSessionCreator,
    *hooks: Sequence[Any],
    last_step: int | None = NUM_STEPS,
) -> dict[int, int]:
    """Train, as `workers`, one with each sequence of hooks, up to that step or for ever.

    Returns the steps at the ends of those that were not cancelled.
    """
    ends = {}

    async def worker(i: int) -> None:
        limit = [] if last_step is None else [StopAtStepHook(last_step=last_step)]
        ends[i] = await train(creator, [*hooks[i], *limit])

    await workers(simulation, worker, len(hooks))
    return ends


async def until_stop(fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
    """Await a wait that a stop may end."""
    with suppress(StopTraining):
        await fn(*args)


async def run_if_open(session: MonitoredSession) -> None:
    """A run in a task of its own, unless the session closes before that begins."""
    if session.phase not in ("closing", "closed"):
        await until_stop(session.run, [])


def directory_of(simulation: Simulation) -> str:
    """A directory that is there as long as the simulation, also when main has left.

    It is in memory where that can be: with a disk a program took twice as long.
    """
    place = mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    finalize(simulation, rmtree, place, ignore_errors=True)  # a fork may have removed it
    return place
