"""What is no Exception leaves the session as itself, from every place, and ends nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
)
from asynchooks.data import map_concurrent, prefetch
from asynchooks.hooks import Evaluate, EvaluationHook, FeedHook
from asynchooks.testing import RecordingHook

from ..hooks.savers import Cell, PlainSaver, session_on
from ..support.afterwards import nothing_left
from ..support.faults import LOOPS, Halt
from ..support.helpers import counting_creator, raises_at, turns
from ..support.moments import counting
from ..support.moments import train as run_steps

KINDS: dict[str, Callable[[], BaseException]] = {
    "own": lambda: Halt("halt"),
    "skip": lambda: pytest.skip.Exception("not here"),
    "cancelled": lambda: asyncio.CancelledError("an upload"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}


class Place:
    """Where the error is raised, once: under a session with a hook that records what it sees."""

    def __init__(self, kind: str) -> None:
        self.error = KINDS[kind]()
        self.hook = RecordingHook("seen")
        self.is_raised = False

    async def fail(self, *_: Any) -> Any:
        await turns()
        self.fail_here()

    def fail_here(self, *_: Any) -> Any:
        self.is_raised = True
        raise self.error

    async def at_three(self, item: int) -> int:
        return item if item < 3 else await self.fail()

    def at_three_here(self, item: int) -> Any:
        return item if item < 3 else self.fail_here()

    async def source(self, item: Any = 0) -> AsyncIterator[Any]:
        yield item
        await self.fail()

    def source_here(self) -> Iterator[int]:
        yield 0
        self.fail_here()

    async def run(self, body: Callable[[MonitoredSession], Awaitable[Any]], **options: Any) -> None:
        async with MonitoredSession([self.hook], counting_creator(), **options) as session:
            await body(session)

    async def beside(self, fn: Callable[..., Awaitable[Any]], **options: Any) -> None:
        """Wait for a stop beside a side task."""

        async def body(session: MonitoredSession) -> None:
            session.start_soon(fn, **options)
            await session.or_stop(anyio.sleep_forever)

        await self.run(body)

    async def end_beside(self, waits_for_step: bool, grace_secs: float) -> None:
        """End a session whose side task fails when its wait is stopped, or cancelled."""

        async def body(session: MonitoredSession) -> None:
            has_begun = anyio.Event()

            async def fail() -> None:
                has_begun.set()
                try:
                    await (
                        session.global_step.wait_for(10**9)
                        if waits_for_step
                        else anyio.sleep_forever()
                    )
                finally:
                    self.fail_here()

            session.start_soon(fail)
            await has_begun.wait()

        await self.run(body, stop_grace_period_secs=grace_secs)

    async def stop_and_fail(self, session: MonitoredSession) -> None:
        async def fail() -> None:
            session.request_stop()
            try:
                await anyio.sleep_forever()
            finally:
                self.fail_here()

        await session.or_stop(fail)

    async def train(self, *hooks: Any, step: Any = None, source: Any = None) -> None:
        """Run steps until a stop, fed by the source, if there is one."""
        creator = FunctionSessionCreator(step) if step else counting_creator()
        async with MonitoredSession([self.hook, *hooks], creator, 5) as session:
            if source is not None:
                async for _ in session.batches(source):
                    await session.run([])
            await run_steps(session)

    async def evaluate(self, mode: Evaluate) -> None:
        await self.train(EvaluationHook(self.fail, every_n_steps=2, mode=mode))


# beside those of the failure matrices, which are hooks, steps, side tasks and savers
PLACES: dict[str, Callable[[Place], Awaitable[None]]] = {
    "side task that is only logged": lambda at: at.beside(at.fail, on_failure=OnFailure.LOG),
    "side task at the end": lambda at: at.end_beside(True, 120),
    "side task that is cancelled": lambda at: at.end_beside(False, 0.01),
    "or_stop": lambda at: at.run(lambda session: session.or_stop(at.fail)),
    "or_stop that is stopped": lambda at: at.run(at.stop_and_fail),
    "map": lambda at: at.train(source=map_concurrent(at.at_three, range(9), 2)),
    "map in threads": lambda at: at.train(source=map_concurrent(at.at_three_here, range(9), 2)),
    "source below prefetch": lambda at: at.train(source=prefetch(at.source(), 2)),
    "source in a thread": lambda at: at.train(source=prefetch(at.source_here(), 2)),
    "source of a feed hook": lambda at: at.train(
        FeedHook(at.source({"x": 0})), step=lambda x: {"loss": x}
    ),
    "evaluation": lambda at: at.evaluate(Evaluate.CONCURRENT),
    "evaluation between steps": lambda at: at.evaluate(Evaluate.EXCLUSIVE),
}
CANCELLED_ANYHOW = ["side task that is cancelled", "or_stop that is stopped"]
"""A task of asyncio that is being cancelled has ended by asyncio's cancellation."""


@asynccontextmanager
async def sibling() -> AsyncIterator[None]:
    """Another task of the host goes on, also after what is inside."""
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await turns()

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        yield
        before = num_turns
        while num_turns < before + 3:
            await turns()
        group.cancel_scope.cancel()


CASES = [
    *(("asyncio", kind) for kind in KINDS),
    *(("trio", kind) for kind in ("own", "cancelled")),
    *((loop, "cancelled") for loop in LOOPS[2:]),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("anyio_backend", "kind", "place"),
    [
        (loop, kind, place)
        for loop, kind in CASES
        for place in PLACES
        if loop == "trio" or kind != "cancelled" or place not in CANCELLED_ANYHOW
    ],
)
async def test_the_error_itself_leaves_and_the_hosts_other_tasks_go_on(
    place: str, kind: str
) -> None:
    at = Place(kind)
    async with nothing_left(), sibling():
        with anyio.fail_after(20), pytest.raises(type(at.error)) as caught:
            await PLACES[place](at)
        assert caught.value is at.error
    assert at.is_raised
    assert at.hook.errors == [at.error]


only_on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


@only_on_asyncio
@pytest.mark.parametrize("way", ["task", "timeout"])
async def test_a_cancellation_of_the_host_is_not_lost_in_that_of_a_side_task(way: str) -> None:
    has_ended = False

    async def train_until_cancelled() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with counting() as session:
            session.start_soon(wait_for, future)
            await session.run([])
            await turns()
            future.cancel()  # as something else in the process does
            if way == "task":
                task.cancel()
            await anyio.sleep_forever()

    async def host() -> None:
        nonlocal has_ended
        if way == "task":
            await train_until_cancelled()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await train_until_cancelled()
        has_ended = True

    task = asyncio.create_task(host())
    await asyncio.wait([task])
    assert task.cancelled() != has_ended
    assert has_ended == (way == "timeout")
    assert has_ended <= (task.cancelling() == 0)


@pytest.mark.parametrize("kind", ["interrupt", "exit"])
async def test_an_exit_in_on_error_keeps_no_other_hook_from_letting_go(
    kind: str, tmp_path: Path
) -> None:
    error, cell = KINDS[kind](), Cell()
    saver = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            async with session_on(cell, saver, raises_at("on_error", error)):
                raise ValueError("in the block")
    assert caught.value is error
