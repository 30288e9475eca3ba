"""shielded: a resource is created and given up whole, whatever is cancelled at whatever moment."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import product
from typing import Any

import anyio
import pytest

from asynchooks.data import shielded
from asynchooks.simulation import Simulation

from .learning import on_engines, on_loops

MOMENTS = [0.5, 1.0, 2.75, 3.0, 3.25, 5.0, 5.75, 6.0, 6.25, 8.75, 9.0, 9.75, 10.0]


class BoxError(Exception):
    pass


class World:
    """Resources that take 3 s to create and 3 s to delete, each in three waits, and a log."""

    def __init__(self, backend: Any) -> None:
        self.simulation = Simulation(backend=backend)
        self.log: list[Any] = []

    async def wait(self, what: str) -> None:
        for part in range(3):
            await self.simulation.sleep(1.0)
            self.log.append((f"{what} {part}", self.simulation.now))

    @asynccontextmanager
    async def box(self) -> AsyncIterator[None]:
        await self.wait("create")
        try:
            yield
        finally:
            await self.wait("delete")

    def run(
        self, work: Callable[[], Awaitable[None]], cancel_at: float | None = None
    ) -> BaseException | None:
        """What it ended by, if that was no cancellation."""
        errors: list[BaseException] = []

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                errors.append(error)

        async def main() -> None:
            task = self.simulation.start(guarded)
            if cancel_at is not None:
                await self.simulation.sleep(cancel_at)
                task.cancel()
            assert await task.wait(1000.0)

        self.simulation.run(main)
        return errors[0] if errors else None

    def run_within(
        self,
        box: AbstractAsyncContextManager[object],
        cancel_at: float | None = None,
        *,
        secs: float = 3.0,
        error: Exception | None = None,
        **limit: Any,
    ) -> BaseException | None:
        """What a block of 3 s within a shielded box ended by."""

        async def work() -> None:
            async with shielded(box, **limit):
                self.log.append("within")
                await self.simulation.sleep(secs)
                if error is not None:
                    raise error
                self.log.append("to the end")
            self.log.append("behind")
            await self.simulation.sleep(1.0)
            self.log.append("not cancelled")

        return self.run(work, cancel_at)

    @property
    def steps(self) -> list[str]:
        return [each[0] for each in self.log if isinstance(each, tuple)]

    @property
    def ended_at(self) -> float:
        return max(float(each[1]) for each in self.log if isinstance(each, tuple))


CREATED, DELETED = [f"create {k}" for k in range(3)], [f"delete {k}" for k in range(3)]


def box_of(world: World, group_is: str) -> AbstractAsyncContextManager[None]:
    """A box that may hold a task group open, and create and delete within it or around it."""
    if group_is == "absent":
        return world.box()

    @asynccontextmanager
    async def beating() -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)  # a heartbeat
            if group_is == "around":
                async with world.box():
                    yield
            else:
                yield
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def box() -> AsyncIterator[None]:
        async with world.box(), beating():
            yield

    return box() if group_is == "within" else beating()


@on_engines
def test_it_is_entered_and_left_whole_wherever_it_is_cancelled(backend: Any) -> None:
    groups = ["absent"] if backend == "turbo" else ["absent", "around", "within"]
    for cancel_at, group_is in product(MOMENTS, groups):
        world = World(backend)
        assert world.run_within(box_of(world, group_is), cancel_at) is None
        assert world.steps == CREATED + DELETED
        # in its creation: it is left at once; in its deletion: raised behind the block
        assert ("within" in world.log) == (cancel_at > 3.0)
        left_at = 3.0 if cancel_at < 3.0 else min(cancel_at, 6.0)
        assert world.ended_at == left_at + 3.0
        assert ("to the end" in world.log) == ("behind" in world.log) == (cancel_at >= 6.0)
        assert ("not cancelled" in world.log) == (cancel_at >= 10.0)


@on_loops
@pytest.mark.parametrize("cancel_at", [0.5, 3.5, 4.5])
def test_an_error_while_it_is_entered_leaves_as_itself(backend: Any, cancel_at: float) -> None:
    world, error = World(backend), BoxError()

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await world.wait("create")
        await world.simulation.sleep(1.0)
        raise error
        yield

    assert world.run_within(broken(), cancel_at) is error
    assert world.steps == CREATED
    assert "within" not in world.log


@on_loops
@pytest.mark.parametrize("cancel_at", [6.5, None])
def test_an_error_in_the_block_leaves_after_the_deletion_also_where_that_is_cancelled(
    backend: Any, cancel_at: float | None
) -> None:
    world, error = World(backend), BoxError()
    assert world.run_within(world.box(), cancel_at, error=error) is error
    assert world.steps == CREATED + DELETED


@on_loops
def test_a_manager_may_swallow_the_error_of_the_block_or_raise_another(backend: Any) -> None:
    world, block, second = World(backend), BoxError("block"), OSError("deletion")
    is_raised = False

    class Manager:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
            assert (kind, error, traceback is None) == (BoxError, block, False)
            await world.wait("delete")
            if is_raised:
                raise second
            return True

    assert world.run_within(Manager(), error=block) is None
    assert "behind" in world.log
    is_raised, world = True, World(backend)
    assert world.run_within(Manager(), error=block) is second


@on_loops
@pytest.mark.parametrize("cancel_at", [None, 4.0, 8.0])
@pytest.mark.parametrize("error", [None, BoxError()])
def test_leaving_is_cancelled_after_its_limit_and_has_ended_then(
    backend: Any, cancel_at: float | None, error: Exception | None
) -> None:
    world = World(backend)
    left = world.run_within(world.box(), cancel_at, secs=2.0, error=error, limit_secs=1.5)
    left_at = 4.0 if cancel_at == 4.0 else 5.0
    assert world.steps == [*CREATED, "delete 0"]
    assert world.simulation.now == max(left_at + 1.5, cancel_at or 0)
    if cancel_at is None:
        late = "leaving World.box() took more than 1.5 s, and was cancelled"
        assert left is error if error is not None else isinstance(left, TimeoutError)
        assert late in (str(left) if error is None else error.__notes__)


@on_loops
def test_entering_has_no_limit(backend: Any) -> None:
    world = World(backend)
    assert world.run_within(world.box(), secs=0.0, limit_secs=3.5) is None
    assert world.steps == CREATED + DELETED


@on_loops
def test_a_task_of_its_group_that_fails_ends_the_block_and_its_error_leaves(
    backend: Any,
) -> None:
    world, error = World(backend), BoxError()

    @asynccontextmanager
    async def box() -> AsyncIterator[None]:
        async def fail() -> None:
            await anyio.sleep(4.0)
            raise error

        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await world.wait("create")
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await world.wait("delete")

    failure = world.run_within(box(), secs=30.0)
    assert isinstance(failure, ExceptionGroup)
    assert failure.exceptions == (error,)
    assert world.steps == CREATED + DELETED
    assert world.ended_at == world.simulation.now == 7.0
    assert "to the end" not in world.log


@on_loops
@pytest.mark.parametrize(
    ("manager", "limit_secs", "match"),
    [
        (None, 1, "manager is None; give an async context manager"),
        (anyio.CancelScope, 1, "manager is CancelScope"),
        (..., 0, "limit_secs is 0"),
        (..., float("nan"), "limit_secs is nan"),
        (..., "3", "limit_secs is '3'"),
    ],
)
def test_wrong_arguments_are_refused(
    backend: Any, manager: Any, limit_secs: Any, match: str
) -> None:
    world = World(backend)
    manager = world.box() if manager is ... else manager
    raised = world.run_within(manager, limit_secs=limit_secs)
    assert isinstance(raised, (TypeError, ValueError))
    assert match in str(raised)
    assert world.log == []


# asyncio's own cancellations, which a shield does not keep out


class NativeWorld:
    """Boxes in real time."""

    def __init__(self) -> None:
        self.open = 0
        self.log: list[str] = []

    @asynccontextmanager
    async def box(self) -> AsyncIterator[None]:
        self.open += 1
        await turns(4)
        self.log.append("created")
        try:
            yield
        finally:
            self.log.append("leaving")
            await turns(4)
            self.open -= 1
            self.log.append("deleted")

    async def work(self) -> None:
        async with shielded(self.box()):
            self.log.append("within")
            await turns(4)
        self.log.append("behind")


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_cancels", [1, 3])
def test_task_cancel_does_not_come_in_between(num_cancels: int) -> None:
    async def main(num_turns: int) -> None:
        world = NativeWorld()
        task = asyncio.create_task(world.work())
        await turns(num_turns)
        is_done = task.done()
        for _ in range(num_cancels):
            task.cancel()
            await turns(1)
        [left] = await asyncio.gather(task, return_exceptions=True)
        assert world.open == 0
        assert isinstance(left, asyncio.CancelledError) == (not is_done)
        assert (world.log[0], world.log[-1]) in (("created", "deleted"), ("created", "behind"))

    for num_turns in range(1, 40):
        asyncio.run(main(num_turns))


def test_the_end_of_an_event_loop_leaves_it_too() -> None:
    world = NativeWorld()

    async def main() -> None:
        task = asyncio.create_task(world.work())
        await turns(8)
        assert not task.done()
        assert world.log[-1] == "within"

    asyncio.run(main())
    assert world.open == 0


def test_an_error_of_entering_is_noted_where_the_task_was_cancelled_meanwhile() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await turns(5)
        raise BoxError("no quota")
        yield

    async def work() -> None:
        async with shielded(broken()):
            raise AssertionError

    async def main() -> None:
        task = asyncio.create_task(work())
        await turns(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        [note] = caught.value.__notes__
        assert re.fullmatch(r"then, entering [\w.<>]*broken\(\): BoxError\('no quota'\)", note)

    asyncio.run(main())
