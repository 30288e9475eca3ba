"""shielded: a resource is created and given up whole, whatever is cancelled at whatever moment."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from asynchooks.data import shielded
from asynchooks.simulation import Simulation

from .learning import on_engines, on_loops

MOMENTS = [0.25 * quarter for quarter in range(1, 40)]


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
    async def box(self, name: str = "") -> AsyncIterator[str]:
        await self.wait(f"create{name}")
        try:
            yield f"box{name}"
        except BaseException as error:
            self.log.append(type(error))
            raise
        finally:
            await self.wait(f"delete{name}")

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
        self, box: Callable[[], AbstractAsyncContextManager[object]], cancel_at: float
    ) -> BaseException | None:
        """What a block of 3 s within a shielded box ended by."""

        async def work() -> None:
            async with shielded(box()):
                await self.simulation.sleep(3.0)

        return self.run(work, cancel_at)

    @property
    def steps(self) -> list[str]:
        return [each[0] for each in self.log if isinstance(each, tuple)]

    @property
    def ended_at(self) -> float:
        return max(float(each[1]) for each in self.log if isinstance(each, tuple))


def whole(name: str = "") -> tuple[list[str], list[str]]:
    return [f"create{name} {k}" for k in range(3)], [f"delete{name} {k}" for k in range(3)]


CREATED, DELETED = whole()


@on_engines
@pytest.mark.parametrize("cancel_at", MOMENTS)
def test_it_is_entered_and_left_whole_wherever_it_is_cancelled(
    backend: Any, cancel_at: float
) -> None:
    world = World(backend)

    async def work() -> None:
        async with shielded(world.box()) as box:
            assert box == "box"
            world.log.append("within")
            await world.simulation.sleep(3.0)
            world.log.append("to the end")
        world.log.append("behind")
        await world.simulation.sleep(1.0)
        world.log.append("not cancelled")

    assert world.run(work, cancel_at) is None
    assert world.steps == CREATED + DELETED
    # in its creation: it is left at once; in its deletion: raised behind the block
    assert ("within" in world.log) == (cancel_at > 3.0)
    left_at = 3.0 if cancel_at < 3.0 else min(cancel_at, 6.0)
    assert world.ended_at == left_at + 3.0
    assert ("to the end" in world.log) == (cancel_at >= 6.0)
    assert ("behind" in world.log) == (cancel_at >= 6.0)
    assert ("not cancelled" in world.log) == (cancel_at >= 10.0)


@on_engines
@pytest.mark.parametrize("cancel_at", MOMENTS)
def test_nested_ones_are_entered_and_left_whole(backend: Any, cancel_at: float) -> None:
    world = World(backend)

    async def work() -> None:
        async with shielded(world.box(" a")):
            async with shielded(world.box(" b")):
                await world.simulation.sleep(1.0)

    assert world.run(work, cancel_at) is None
    (created_a, deleted_a), (created_b, deleted_b) = whole(" a"), whole(" b")
    both = created_a + created_b + deleted_b + deleted_a
    assert world.steps in (both, created_a + deleted_a)
    if cancel_at > 3.0:
        assert world.steps == both


@on_engines
@pytest.mark.parametrize("cancel_at", [0.5, 3.5, 4.5])
def test_an_error_while_it_is_entered_leaves_as_itself(backend: Any, cancel_at: float) -> None:
    world, error = World(backend), BoxError()

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await world.wait("create")
        await world.simulation.sleep(1.0)
        raise error
        yield

    async def work() -> None:
        async with shielded(broken()):
            world.log.append("within")

    assert world.run(work, cancel_at) is error
    assert world.steps == CREATED
    assert "within" not in world.log


@on_engines
def test_an_error_in_the_block_leaves_after_the_deletion(backend: Any) -> None:
    world, error = World(backend), BoxError()

    async def work() -> None:
        async with shielded(world.box()):
            raise error

    assert world.run(work) is error
    assert world.steps == CREATED + DELETED
    assert BoxError in world.log


@on_engines
@pytest.mark.parametrize("cancel_at", [6.5, None])
def test_an_error_in_the_block_leaves_even_when_cancelled_in_the_deletion(
    backend: Any, cancel_at: float | None
) -> None:
    world, error = World(backend), BoxError()

    async def work() -> None:
        async with shielded(world.box()):
            await world.simulation.sleep(3.0)
            raise error

    assert world.run(work, cancel_at) is error
    assert world.steps == CREATED + DELETED


@on_engines
def test_a_manager_may_swallow_the_error_of_the_block(backend: Any) -> None:
    world = World(backend)

    class Swallows:
        async def __aenter__(self) -> None:
            await world.wait("create")

        async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
            world.log.append((kind is BoxError, isinstance(error, BoxError), traceback is not None))
            await world.wait("delete")
            return True

    async def work() -> None:
        async with shielded(Swallows()):
            raise BoxError
        world.log.append("behind")

    assert world.run(work) is None
    assert (True, True, True) in world.log
    assert world.log[-1] == "behind"


@on_engines
def test_what_leaving_raises_leaves_with_the_error_of_the_block_as_its_context(
    backend: Any,
) -> None:
    world, first, second = World(backend), BoxError("block"), OSError("deletion")

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await world.simulation.sleep(1.0)
            raise second

    async def work() -> None:
        async with shielded(broken()):
            raise first

    assert world.run(work) is second
    assert second.__context__ is first


@on_engines
@pytest.mark.parametrize("cancel_at", [None, 4.0, 8.0])
def test_leaving_is_cancelled_after_its_limit(backend: Any, cancel_at: float | None) -> None:
    world = World(backend)

    async def work() -> None:
        async with shielded(world.box(), limit_secs=1.5):
            await world.simulation.sleep(2.0)

    error = world.run(work, cancel_at)
    left_at = 4.0 if cancel_at == 4.0 else 5.0
    assert world.steps == [*CREATED, "delete 0"]
    assert world.simulation.now == max(left_at + 1.5, cancel_at or 0)
    if cancel_at is None:
        assert isinstance(error, TimeoutError)
        assert "took more than 1.5 s, and was cancelled" in str(error)


@on_engines
def test_a_leaving_that_was_cancelled_has_ended_when_the_error_leaves(backend: Any) -> None:
    world = World(backend)

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        yield
        try:
            await world.simulation.sleep(10.0)
        finally:
            world.log.append("given up")

    async def work() -> None:
        try:
            async with shielded(slow(), limit_secs=1.5):
                pass
        finally:
            world.log.append("left")

    assert isinstance(world.run(work), TimeoutError)
    assert world.log == ["given up", "left"]
    assert world.simulation.now == 1.5


@on_engines
def test_an_error_of_the_block_has_a_note_where_leaving_took_longer_than_its_limit(
    backend: Any,
) -> None:
    world, error = World(backend), BoxError()

    async def work() -> None:
        async with shielded(world.box(), limit_secs=1.5):
            raise error

    assert world.run(work) is error
    assert any("took more than 1.5 s" in note for note in error.__notes__)


@on_engines
def test_messages_name_the_function_that_makes_the_manager(backend: Any) -> None:
    world, error = World(backend), BoxError()

    class Slow:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *error: Any) -> None:
            await world.simulation.sleep(9.0)

        def __repr__(self) -> str:
            return "<slow>"

    async def work(manager: Any, failure: BaseException | None = None) -> None:
        async with shielded(manager, limit_secs=1.5):
            if failure is not None:
                raise failure

    late = "took more than 1.5 s, and was cancelled"
    assert str(world.run(lambda: work(world.box()))) == f"leaving World.box() {late}"
    world = World(backend)
    assert world.run(lambda: work(world.box(), error)) is error
    assert error.__notes__ == [f"leaving World.box() {late}"]
    world = World(backend)
    assert str(world.run(lambda: work(Slow()))) == f"leaving <slow> {late}"


@on_engines
def test_entering_has_no_limit(backend: Any) -> None:
    world = World(backend)

    async def work() -> None:
        async with shielded(world.box(), limit_secs=3.5):
            pass

    assert world.run(work) is None
    assert world.steps == CREATED + DELETED


@on_loops
@pytest.mark.parametrize("cancel_at", MOMENTS)
def test_a_manager_may_hold_a_task_group_open(backend: Any, cancel_at: float) -> None:
    world = World(backend)

    @asynccontextmanager
    async def box() -> AsyncIterator[None]:
        await world.wait("create")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)  # a heartbeat
                yield
                group.cancel_scope.cancel()
        finally:
            await world.wait("delete")

    assert world.run_within(box, cancel_at) is None
    assert world.steps == CREATED + DELETED


@on_loops
@pytest.mark.parametrize("cancel_at", MOMENTS)
def test_a_manager_may_create_and_delete_within_its_task_group(
    backend: Any, cancel_at: float
) -> None:
    world = World(backend)

    @asynccontextmanager
    async def box() -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await world.wait("create")
            group.start_soon(anyio.sleep_forever)
            try:
                yield
            finally:
                await world.wait("delete")
                group.cancel_scope.cancel()

    assert world.run_within(box, cancel_at) is None
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

    async def work() -> None:
        async with shielded(box()):
            await world.simulation.sleep(30.0)
            world.log.append("to the end")

    failure = world.run(work)
    assert isinstance(failure, ExceptionGroup)
    assert failure.exceptions == (error,)
    assert world.steps == CREATED + DELETED
    assert world.ended_at == world.simulation.now == 7.0
    assert "to the end" not in world.log


@on_loops
@pytest.mark.parametrize("deadline", [0.5, 2.5, 4.5, 6.5, 8.5, 9.5])
def test_a_timeout_around_it_comes_when_it_is_whole(backend: Any, deadline: float) -> None:
    world = World(backend)

    async def work() -> None:
        with anyio.move_on_after(deadline) as scope:
            async with shielded(world.box()):
                await world.simulation.sleep(3.0)
            await anyio.sleep(0.25)
            world.log.append("in time")
        assert scope.cancelled_caught == (deadline < 9.25)

    assert world.run(work) is None
    assert world.steps == CREATED + DELETED
    assert ("in time" in world.log) == (deadline == 9.5)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((None,), TypeError, "manager is None; give an async context manager"),
        ((anyio.CancelScope,), TypeError, "manager is CancelScope"),
        ((asynccontextmanager,), TypeError, "asynccontextmanager"),
    ],
)
@on_loops
def test_what_is_no_async_context_manager_is_refused(
    backend: Any, arguments: Any, error: type[Exception], match: str
) -> None:
    async def work() -> None:
        async with shielded(*arguments):
            pass

    raised = World(backend).run(work)
    assert isinstance(raised, error)
    assert match in str(raised)


@on_loops
@pytest.mark.parametrize("limit_secs", [0, -1.0, float("nan"), "3", None])
def test_a_limit_that_is_no_number_of_seconds_is_refused(backend: Any, limit_secs: Any) -> None:
    world = World(backend)

    async def work() -> None:
        async with shielded(world.box(), limit_secs=limit_secs):
            pass

    raised = world.run(work)
    assert isinstance(raised, (TypeError, ValueError))
    assert "limit_secs is" in str(raised)
    assert world.log == []


@on_loops
def test_a_plain_with_is_refused(backend: Any) -> None:
    world = World(backend)

    async def work() -> None:
        with shielded(world.box()):  # type: ignore[attr-defined]
            pass

    assert "async with shielded(manager):" in str(world.run(work))


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
@pytest.mark.parametrize("num_turns", range(1, 40))
def test_task_cancel_does_not_come_in_between(num_turns: int, num_cancels: int) -> None:
    world = NativeWorld()

    async def main() -> None:
        task = asyncio.create_task(world.work())
        await turns(num_turns)
        is_done = task.done()
        for _ in range(num_cancels):
            task.cancel()
            await turns(1)
        [left] = await asyncio.gather(task, return_exceptions=True)
        assert world.open == 0
        assert isinstance(left, asyncio.CancelledError) == (not is_done)
        assert world.log[-1] in ("deleted", "behind")

    asyncio.run(main())
    assert world.log[:1] == ["created"]


@pytest.mark.parametrize("num_turns", range(1, 30))
def test_neither_does_the_failure_of_a_task_group(num_turns: int) -> None:
    world, error = NativeWorld(), BoxError()

    async def fail() -> None:
        await turns(num_turns)
        raise error

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(world.work())
                group.create_task(fail())
        assert caught.value.exceptions == (error,)
        assert world.open == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_turns", "log"),
    [
        (0, []),
        (2, []),
        (7, ["created", "within"]),
        (12, ["created", "within", "leaving"]),
    ],
    ids=["before", "entering", "within", "leaving"],
)
def test_neither_does_a_timeout_of_asyncio(num_turns: int, log: list[str]) -> None:
    world, log_then = NativeWorld(), list[str]()

    async def main() -> None:
        async def expire() -> None:
            await turns(num_turns)
            log_then.extend(world.log)
            timeout.reschedule(asyncio.get_running_loop().time())

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as timeout:
                expiry = asyncio.Task(expire())  # also where tasks are eager, it is not: it counts
                await world.work()
                await asyncio.Event().wait()
        await expiry
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(main())
    assert log_then == log
    assert world.open == 0
    assert world.log[-1] == "deleted"


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
