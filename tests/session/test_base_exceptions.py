"""What is no Exception leaves the session as itself, from every place, and ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    Restart,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.data import map_concurrent, prefetch
from asynchooks.hooks import Evaluate, EvaluationHook, FeedHook
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook

from ..hooks.savers import Cell, CopyingSaver, PlainSaver, saved, session_on
from ..support.afterwards import nothing_left
from ..support.faults import LOOPS, Halt
from ..support.helpers import StartsTask, counting_creator, raises_at
from ..support.moments import at as hook_at
from ..support.moments import counting

pytestmark = pytest.mark.anyio

KINDS: dict[str, Callable[[], BaseException]] = {
    "own": lambda: Halt("halt"),
    "skip": lambda: pytest.skip.Exception("not here"),
    "cancelled": lambda: asyncio.CancelledError("an upload"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}
kinds = pytest.mark.parametrize("kind", KINDS)
exits = pytest.mark.parametrize("kind", ["interrupt", "exit"])


async def for_ever() -> None:
    await current_engine().park(Slot(current_engine(), "nothing"))


class Place:
    """Where the error is raised, once: under a session with a hook that records what it sees."""

    def __init__(self, kind: str, path: Path) -> None:
        self.error = KINDS[kind]()
        self.path = path
        self.hook = RecordingHook("seen")
        self.is_raised = False
        self.has_failed = False

    async def fail(self, *_: Any) -> Any:
        await current_engine().checkpoint()
        self.fail_here()

    def fail_here(self, *_: Any) -> Any:
        self.is_raised = True
        raise self.error

    async def fail_second(self) -> None:
        """Raise an Exception first."""
        if self.has_failed:
            await self.fail()
        self.has_failed = True
        raise ValueError

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
            await session.or_stop(for_ever)

        await self.run(body)

    async def end_beside(self, waits_for_step: bool, grace_secs: float) -> None:
        """End a session whose side task fails when its wait is stopped, or cancelled."""

        async def body(session: MonitoredSession) -> None:
            has_begun = Slot(current_engine(), "the side task")

            async def fail() -> None:
                has_begun.wake()
                try:
                    await (session.global_step.wait_for(10**9) if waits_for_step else for_ever())
                finally:
                    self.fail_here()

            session.start_soon(fail)
            await current_engine().park(has_begun)

        await self.run(body, stop_grace_period_secs=grace_secs)

    async def stop_and_fail(self, session: MonitoredSession) -> None:
        async def fail() -> None:
            session.request_stop()
            try:
                await for_ever()
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
            while not session.should_stop():
                await session.run([])
                await current_engine().checkpoint()

    async def save(self, kind: type[Any], *, background: bool) -> None:
        cell = Cell()
        saver = kind(cell, None, self.error)
        hook = CheckpointSaverHook(self.path, save_steps=2, saver=saver, background=background)
        try:
            await self.train(hook, step=cell.step)
        finally:
            self.is_raised = not saver.errors

    async def evaluate(self, fn: Any, **options: Any) -> None:
        await self.train(EvaluationHook(fn, every_n_steps=2, **options))


PLACES: dict[str, Callable[[Place], Awaitable[None]]] = {
    "side task": lambda at: at.beside(at.fail),
    "side task that is only logged": lambda at: at.beside(at.fail, on_failure=OnFailure.LOG),
    "restarted side task": lambda at: at.beside(
        at.fail_second, on_failure=Restart(first_pause_secs=0.0)
    ),
    "side task at the end": lambda at: at.end_beside(True, 120),
    "side task that is cancelled": lambda at: at.end_beside(False, 0.01),
    "side task of a hook": lambda at: at.train(StartsTask(at.fail)),
    "or_stop": lambda at: at.run(lambda session: session.or_stop(at.fail)),
    "or_stop that is stopped": lambda at: at.run(at.stop_and_fail),
    "or_stop of a coordinator": lambda at: at.train(
        StartsTask(lambda coord: coord.or_stop(at.fail))
    ),
    "map": lambda at: at.train(source=map_concurrent(at.at_three, range(9), 2)),
    "map in threads": lambda at: at.train(source=map_concurrent(at.at_three_here, range(9), 2)),
    "source below prefetch": lambda at: at.train(source=prefetch(at.source(), 2)),
    "source in a thread": lambda at: at.train(source=prefetch(at.source_here(), 2)),
    "source of a feed hook": lambda at: at.train(
        FeedHook(at.source({"x": 0})), step=lambda x: {"loss": x}
    ),
    "evaluation": lambda at: at.evaluate(at.fail),
    "evaluation between steps": lambda at: at.evaluate(at.fail, mode=Evaluate.EXCLUSIVE),
    "save in the background": lambda at: at.save(CopyingSaver, background=True),
    "after_run": lambda at: at.train(hook_at(after_run=at.fail)),
    "step": lambda at: at.train(step=at.fail),
    "step in a thread": lambda at: at.train(step=at.fail_here),
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
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        yield
        before = num_turns
        while num_turns < before + 3:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


def cases(loop: str, *kinds: tuple[Any, str]) -> pytest.MarkDecorator:
    """Each place with these pairs of a loop and a kind, but for errors that say nothing there."""
    found = [
        pytest.param(backend, kind, place, id=f"{backend}-{kind}-{place}")
        for backend, kind in kinds
        for place in PLACES
        if place not in CANCELLED_ANYHOW * (kind == "cancelled" and backend != "trio")
    ]
    return pytest.mark.parametrize((loop, "kind", "place"), found)


@pytest.mark.exhaustive
@cases(
    "anyio_backend",
    *[("asyncio", kind) for kind in KINDS],
    *[("trio", kind) for kind in ("own", "cancelled", "exit")],
    *[(loop, "cancelled") for loop in LOOPS[2:]],
)
async def test_the_error_itself_leaves_and_the_hosts_other_tasks_go_on(
    place: str, kind: str, tmp_path: Path
) -> None:
    at = Place(kind, tmp_path)
    async with nothing_left(), sibling():
        with anyio.fail_after(20), pytest.raises(type(at.error)) as caught:
            await PLACES[place](at)
        assert caught.value is at.error
    assert at.is_raised
    assert at.hook.errors == [at.error]


@cases(
    "backend",
    *[("turbo", "own"), ("trio", "own"), ("trio", "cancelled"), ("asyncio", "cancelled")],
)
def test_the_error_itself_leaves_in_virtual_time_too(
    backend: Any, place: str, kind: str, tmp_path: Path
) -> None:
    at, simulation, num_turns = Place(kind, tmp_path), Simulation(backend=backend), 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await simulation.sleep(1.0)

    async def main() -> None:
        simulation.start(turn)
        with pytest.raises(type(at.error)) as caught:
            await PLACES[place](at)
        assert caught.value is at.error
        before = num_turns
        await simulation.sleep(3.0)
        assert num_turns >= before + 2

    simulation.run(main)
    assert at.is_raised


only_on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def upload() -> asyncio.Future[None]:
    """What something else in the process cancels."""
    return asyncio.get_running_loop().create_future()


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


@only_on_asyncio
@pytest.mark.parametrize("way", ["task", "scope", "timeout"])
async def test_a_cancellation_of_the_host_is_not_lost_in_that_of_a_side_task(way: str) -> None:
    has_ended: list[str] = []

    async def train_until_cancelled(scope: anyio.CancelScope | None = None) -> None:
        future = upload()
        async with counting() as session:
            session.start_soon(wait_for, future)
            await session.run([])
            await current_engine().checkpoint()
            future.cancel()
            if scope is not None:
                scope.cancel()
            elif way == "task":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            await for_ever()
        has_ended.append("the block")

    async def host() -> None:
        if way == "scope":
            with anyio.CancelScope() as scope:
                await train_until_cancelled(scope)
            assert scope.cancelled_caught
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await train_until_cancelled()
        else:
            await train_until_cancelled()
        has_ended.append("the host")

    task = asyncio.create_task(host())
    await asyncio.wait([task])
    assert task.cancelled() == (way == "task")
    if not task.cancelled():
        task.result()
        assert task.cancelling() == 0
        assert has_ended == ["the host"]


@exits
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


@kinds
async def test_what_one_end_raises_keeps_no_other_from_its_save_but_an_exit_leaves_at_once(
    kind: str, tmp_path: Path
) -> None:
    cell, error, later, is_exit = Cell(), KINDS[kind](), ValueError("later"), kind[0] in "ie"
    saver = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
    ends = [later, error] if is_exit else [error, later]
    with pytest.raises(type(error)) as caught:
        hooks = [raises_at("end", each) for each in ends]
        async with session_on(cell, *hooks, saver) as session:
            await session.run([])
    assert caught.value is error
    note = "after ValueError('later')" if is_exit else "then, in end of Raises: ValueError('later')"
    assert note in error.__notes__
    assert "in end of Raises" in error.__notes__
    assert saved(tmp_path) == ({0: "0"} if is_exit else {0: "0", 1: "1"})
