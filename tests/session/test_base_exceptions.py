"""What is no Exception leaves the session as itself, from every place, and ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    Restart,
    SharedSessionCreator,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.data import batch, map_concurrent, prefetch
from asynchooks.hooks import Evaluate, EvaluationHook, FeedHook
from asynchooks.protocols._waits import compute_unless
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook

from ..hooks.savers import Cell, CopyingSaver, PlainSaver, saved
from ..simulation.engines import BACKENDS, on_every_engine
from ..support.afterwards import nothing_left
from ..support.helpers import StartsTask, counting_creator, raises_at

pytestmark = pytest.mark.anyio


class Halt(BaseException):
    """An error of the user's own that no `except Exception` catches."""


KINDS: dict[str, Callable[[], BaseException]] = {
    "own": lambda: Halt("halt"),
    "skip": lambda: pytest.skip.Exception("not here"),
    "cancelled": lambda: asyncio.CancelledError("an upload"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}
kinds = pytest.mark.parametrize("kind", KINDS)


async def for_ever() -> None:
    await current_engine().park(Slot(current_engine(), "nothing"))


class Place:
    """Where the error is raised, once: under a session with a hook that records what it sees."""

    def __init__(self, error: BaseException, path: Path) -> None:
        self.error = error
        self.path = path
        self.hook = RecordingHook("seen")
        self.is_raised = False

    async def fail(self, *_: Any) -> Any:
        await current_engine().checkpoint()
        self.fail_here()

    def fail_here(self, *_: Any) -> Any:
        self.is_raised = True
        raise self.error

    async def fails_later(self, item: int) -> int:
        return item if item < 3 else await self.fail()

    async def source(self) -> AsyncIterator[int]:
        yield 0
        await self.fail()

    async def beside(self, fn: Callable[..., Awaitable[Any]], **options: Any) -> None:
        """Wait for a stop beside a side task."""
        async with MonitoredSession([self.hook], counting_creator()) as session:
            session.start_soon(fn, **options)
            await session.or_stop(for_ever)

    async def train(self, *hooks: Any, creator: Any = None, source: Any = None) -> None:
        """Run steps until a stop, fed by the source, if there is one."""
        creator = creator or counting_creator()
        async with MonitoredSession([self.hook, *hooks], creator, 5) as session:
            if source is not None:
                async for _ in session.batches(source):
                    await session.run([])
            while not session.should_stop():
                await session.run([])
                await current_engine().checkpoint()


async def side_task(place: Place) -> None:
    await place.beside(place.fail)


async def side_task_that_is_only_logged(place: Place) -> None:
    await place.beside(place.fail, on_failure=OnFailure.LOG)


async def restarted_side_task(place: Place) -> None:
    has_failed = False

    async def fail() -> None:
        nonlocal has_failed
        if has_failed:
            await place.fail()
        has_failed = True
        raise ValueError

    await place.beside(fail, on_failure=Restart(first_pause_secs=0.0))


async def side_task_at_the_end(place: Place) -> None:
    await end_beside(place, lambda session: session.global_step.wait_for(10**9), 120)


async def side_task_that_is_cancelled(place: Place) -> None:
    await end_beside(place, lambda session: for_ever(), 0.01)


async def end_beside(
    place: Place, wait: Callable[[MonitoredSession], Awaitable[Any]], grace_secs: float
) -> None:
    """End a session whose side task fails when its wait is stopped, or cancelled."""
    has_begun = Slot(current_engine(), "the side task")

    async def fail() -> None:
        has_begun.wake()
        try:
            await wait(session)
        finally:
            place.fail_here()

    async with MonitoredSession([place.hook], counting_creator(), grace_secs) as session:
        session.start_soon(fail)
        await current_engine().park(has_begun)


async def side_task_in_a_task_group(place: Place) -> None:
    async def fail() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            await anyio.lowlevel.checkpoint()
            try:
                place.fail_here()
            except BaseException:
                group.cancel_scope.cancel()
        raise place.error

    await place.beside(fail)


async def side_task_of_a_hook(place: Place) -> None:
    await place.train(StartsTask(place.fail))


async def or_stop(place: Place) -> None:
    async with MonitoredSession([place.hook], counting_creator()) as session:
        await session.or_stop(place.fail)


async def or_stop_that_is_stopped(place: Place) -> None:
    async def fail() -> None:
        session.request_stop()
        try:
            await for_ever()
        finally:
            place.fail_here()

    async with MonitoredSession([place.hook], counting_creator()) as session:
        await session.or_stop(fail)


async def or_stop_of_a_coordinator(place: Place) -> None:
    async def fail(coord: Coordinator) -> None:
        await coord.or_stop(place.fail)

    await place.train(StartsTask(fail))


async def map_in_tasks(place: Place) -> None:
    await place.train(source=map_concurrent(place.fails_later, range(9), 2))


async def map_in_threads(place: Place) -> None:
    def fn(item: int) -> Any:
        return item if item < 3 else place.fail_here()

    await place.train(source=map_concurrent(fn, range(9), 2))


async def unordered_map(place: Place) -> None:
    await place.train(source=map_concurrent(place.fails_later, range(9), 2, ordered=False))


async def source_below_prefetch(place: Place) -> None:
    await place.train(source=prefetch(place.source(), 2))


async def source_below_a_map(place: Place) -> None:
    async def fn(item: int) -> int:
        return item

    await place.train(source=map_concurrent(fn, place.source(), 2))


async def source_in_a_thread(place: Place) -> None:
    def source() -> Iterator[int]:
        yield 0
        place.fail_here()

    await place.train(source=prefetch(source(), 2))


async def source_of_a_feed_hook(place: Place) -> None:
    async def source() -> AsyncIterator[dict[str, int]]:
        yield {"x": 0}
        await place.fail()

    creator = FunctionSessionCreator(lambda x: {"loss": x})
    await place.train(FeedHook(source()), creator=creator)


async def closing_of_a_source(place: Place) -> None:
    async def source() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            place.fail_here()

    async with MonitoredSession([place.hook], counting_creator()) as session:
        async for _ in session.batches(prefetch(source(), 1)):
            break


async def evaluation(place: Place) -> None:
    await place.train(EvaluationHook(place.fail, every_n_steps=2))


async def evaluation_in_a_thread(place: Place) -> None:
    await place.train(EvaluationHook(place.fail_here, every_n_steps=2))


async def evaluation_that_is_restarted(place: Place) -> None:
    await place.train(EvaluationHook(place.fail, every_n_steps=2, on_failure=Restart()))


async def evaluation_between_steps(place: Place) -> None:
    await place.train(EvaluationHook(place.fail, every_n_steps=2, mode=Evaluate.EXCLUSIVE))


async def save_in_the_background(place: Place) -> None:
    await save_failing(place, CopyingSaver, background=True)


async def save_in_a_run(place: Place) -> None:
    await save_failing(place, PlainSaver, background=False)


async def save_failing(place: Place, kind: type[Any], *, background: bool) -> None:
    cell = Cell()
    saver = kind(cell, None, place.error)
    hook = CheckpointSaverHook(place.path, save_steps=2, saver=saver, background=background)
    try:
        await place.train(hook, creator=FunctionSessionCreator(cell.step))
    finally:
        place.is_raised = not saver.errors


class Listener(CheckpointSaverListener):
    """Calls a function after the second save."""

    def __init__(self, fn: Callable[[], Awaitable[None]]) -> None:
        self.fn = fn
        self.num_saves = 0

    async def after_save(self, session: Any, step: int) -> None:
        self.num_saves += 1
        if self.num_saves == 2:
            await self.fn()


async def listener_in_the_background(place: Place) -> None:
    cell = Cell()
    hook = CheckpointSaverHook(
        place.path, save_steps=2, saver=CopyingSaver(cell), background=True,
        listeners=[Listener(place.fail)],
    )  # fmt: skip
    await place.train(hook, creator=FunctionSessionCreator(cell.step))


async def step(place: Place) -> None:
    await place.train(creator=FunctionSessionCreator(place.fail))


async def step_in_a_thread(place: Place) -> None:
    await place.train(creator=FunctionSessionCreator(place.fail_here))


async def after_run(place: Place) -> None:
    place.is_raised = True
    await place.train(raises_at("after_run", place.error))


PLACES = [
    side_task, side_task_that_is_only_logged, restarted_side_task, side_task_at_the_end,
    side_task_that_is_cancelled, side_task_in_a_task_group, side_task_of_a_hook, or_stop,
    or_stop_that_is_stopped, or_stop_of_a_coordinator, map_in_tasks, map_in_threads, unordered_map,
    source_below_prefetch, source_below_a_map, source_in_a_thread, source_of_a_feed_hook,
    closing_of_a_source, evaluation, evaluation_in_a_thread, evaluation_that_is_restarted,
    evaluation_between_steps, save_in_the_background, save_in_a_run, listener_in_the_background,
    step, step_in_a_thread, after_run,
]  # fmt: skip
CANCELLED_ANYHOW = [side_task_that_is_cancelled, or_stop_that_is_stopped]


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


def cases(
    name: str, backends: Iterable[str], kinds: Iterable[str], places: Iterable[object] = PLACES
) -> pytest.MarkDecorator:
    """Places and kinds of errors on backends, but for errors that say nothing there.

    A task of asyncio that is being cancelled has ended by asyncio's cancellation.
    """
    found = [
        (backend, kind, place) for backend in backends for kind in kinds for place in places
        if (backend, kind) != ("asyncio", "cancelled") or place not in CANCELLED_ANYHOW
    ]  # fmt: skip
    return pytest.mark.parametrize((name, "kind", "place"), found)


@pytest.mark.exhaustive
@cases("anyio_backend", ["asyncio", "trio"], KINDS)
async def test_the_error_itself_leaves_and_the_hosts_other_tasks_go_on(
    place: Callable[[Place], Awaitable[None]], kind: str, tmp_path: Path
) -> None:
    at = Place(KINDS[kind](), tmp_path)
    async with nothing_left(), sibling():
        with anyio.fail_after(20), pytest.raises(type(at.error)) as caught:
            await place(at)
        assert caught.value is at.error
    assert at.is_raised
    if place is not closing_of_a_source:  # its hooks have ended by then
        assert at.hook.errors == [at.error]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
@pytest.mark.parametrize("place", [each for each in PLACES if each not in CANCELLED_ANYHOW])
async def test_the_cancellation_of_what_was_awaited_leaves_on_uvloop(
    place: Callable[[Place], Awaitable[None]], tmp_path: Path
) -> None:
    pytest.importorskip("uvloop")
    await test_the_error_itself_leaves_and_the_hosts_other_tasks_go_on(place, "cancelled", tmp_path)


@cases(
    "backend", BACKENDS, ["own", "cancelled"],
    [each for each in PLACES if each is not side_task_in_a_task_group],
)  # fmt: skip
def test_the_error_itself_leaves_in_virtual_time_too(
    backend: Any, place: Callable[[Place], Awaitable[None]], kind: str, tmp_path: Path
) -> None:
    at, simulation, num_turns = Place(KINDS[kind](), tmp_path), Simulation(backend=backend), 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await simulation.sleep(1.0)

    async def main() -> None:
        simulation.start(turn)
        with pytest.raises(type(at.error)) as caught:
            await place(at)
        assert caught.value is at.error
        before = num_turns
        await simulation.sleep(3.0)
        assert num_turns >= before + 2

    simulation.run(main)
    assert at.is_raised


@kinds
@on_every_engine
def test_an_error_that_a_simulated_task_lets_out_ends_the_simulation_as_itself(
    backend: Any, kind: str
) -> None:
    error, simulation = KINDS[kind](), Simulation(backend=backend)

    async def fail() -> None:
        await simulation.sleep(1.0)
        raise error

    async def main() -> None:
        simulation.start(fail)
        await simulation.sleep(2.0)

    with pytest.raises(type(error)) as caught:
        simulation.run(main)
    assert caught.value is error
    assert simulation.now == 1.0


only_on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def upload() -> asyncio.Future[None]:
    """What something else in the process cancels."""
    return asyncio.get_running_loop().create_future()


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


@only_on_asyncio
async def test_a_listener_whose_upload_was_cancelled_stops_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell, future = Cell(), upload()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=2, saver=CopyingSaver(cell), background=True,
        listeners=[Listener(lambda: wait_for(future))],
    )  # fmt: skip
    with anyio.fail_after(20), pytest.raises(asyncio.CancelledError, match="gone") as caught:
        async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
            while not session.should_stop():
                await session.run([])
                if cell.value == 3:  # the save of step 4 would wait for this one
                    future.cancel("gone")
                await current_engine().checkpoint()
    assert "in a checkpoint that was written in the background" in caught.value.__notes__
    assert "A checkpoint could not be written" in caplog.text
    assert session.stop_reason is not None
    assert session.stop_reason.error is caught.value


@kinds
async def test_what_a_write_in_the_background_raises_leaves_the_next_run(
    kind: str, tmp_path: Path
) -> None:
    cell, error = Cell(), KINDS[kind]()
    saver = CopyingSaver(cell, None, error)
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=saver, background=True)
    with pytest.raises(type(error)) as caught:
        async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
            with anyio.fail_after(20):
                while not session.should_stop():
                    await session.run([])
                    await current_engine().checkpoint()
            num_steps = cell.value
            await session.run([])
    assert caught.value is error
    assert cell.value == num_steps


@kinds
async def test_the_last_write_in_the_background_leaves_the_end_of_the_block(
    kind: str, tmp_path: Path
) -> None:
    cell, error = Cell(), KINDS[kind]()
    saver = CopyingSaver(cell, None, error)
    hook = CheckpointSaverHook(tmp_path, save_steps=10, saver=saver, background=True)
    with pytest.raises(type(error)) as caught:
        async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
            await session.run([])
    assert caught.value is error


@pytest.mark.parametrize("kind", ["own", "skip", "cancelled"])
async def test_what_one_end_raises_keeps_no_other_from_its_save(kind: str, tmp_path: Path) -> None:
    cell, error, later = Cell(), KINDS[kind](), ValueError("later")
    saver = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
    hooks = [raises_at("end", error), raises_at("end", later), saver]
    with pytest.raises(type(error)) as caught:
        async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
            await session.run([])
    assert caught.value is error
    assert error.__notes__ == [
        "in end of Raises",
        "then, in end of Raises: ValueError('later')",
    ]
    assert saved(tmp_path) == {0: "0", 1: "1"}


@pytest.mark.parametrize("kind", ["interrupt", "exit"])
async def test_an_exit_in_an_end_leaves_before_the_others(kind: str, tmp_path: Path) -> None:
    cell, error = Cell(), KINDS[kind]()
    saver = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
    hooks = [raises_at("end", ValueError("first")), raises_at("end", error), saver]
    with pytest.raises(type(error)) as caught:
        async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
            await session.run([])
    assert caught.value is error
    assert "after ValueError('first')" in error.__notes__
    assert saved(tmp_path) == {0: "0"}


@pytest.mark.parametrize(
    ("kind", "background"), [("own", False), ("own", True), ("cancelled", True), ("exit", False)]
)
async def test_a_note_names_the_method_of_the_listener_that_raised(
    kind: str, background: bool, tmp_path: Path
) -> None:
    at, cell = Place(KINDS[kind](), tmp_path), Cell()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=2, saver=CopyingSaver(cell), background=background,
        listeners=[Listener(at.fail)],
    )  # fmt: skip
    with pytest.raises(type(at.error)):
        await at.train(hook, creator=FunctionSessionCreator(cell.step))
    assert "in the listener's Listener.after_save" in at.error.__notes__


@kinds
async def test_workers_that_share_a_model_are_stopped_by_what_leaves_one_of_them(kind: str) -> None:
    error, creator = KINDS[kind](), SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as other:
        with pytest.raises(type(error)):
            async with MonitoredSession([], creator):
                raise error
        assert other.should_stop()
    assert other.stop_reason is not None
    assert other.stop_reason.error is error


@only_on_asyncio
@pytest.mark.parametrize("way", ["task", "scope", "timeout"])
async def test_a_cancellation_of_the_host_is_not_lost_in_that_of_a_side_task(way: str) -> None:
    has_ended: list[str] = []

    async def train(scope: anyio.CancelScope | None) -> None:
        future = upload()
        async with MonitoredSession([], counting_creator()) as session:
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
                await train(scope)
            assert scope.cancelled_caught
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await train(None)
        else:
            await train(None)
        has_ended.append("the host")

    task = asyncio.create_task(host())
    await asyncio.wait([task])
    assert task.cancelled() == (way == "task")
    if not task.cancelled():
        task.result()
        assert task.cancelling() == 0
        assert has_ended == ["the host"]


@only_on_asyncio
async def test_a_task_group_of_asyncio_takes_a_cancelled_side_task_for_a_cancelled_host() -> None:
    """It lets the others go on, and says nothing: catch the error around the block to see it."""
    others: list[str] = []

    async def train() -> None:
        future = upload()
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(wait_for, future)
            future.cancel()
            await session.or_stop(for_ever)

    async def other() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        others.append("done")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(train())
        group.create_task(other())
    assert task.cancelled()
    assert others == ["done"]


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_side_task_with_a_nursery_of_trios_own_is_cancelled_cleanly() -> None:
    trio = pytest.importorskip("trio")
    error = ValueError("in the clean-up")

    async def hold(has_begun: Slot, fails: bool) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            has_begun.wake()
            try:
                await trio.sleep_forever()
            finally:
                if fails:
                    raise error

    async def train(fails: bool) -> None:
        async with MonitoredSession([], counting_creator(), 0.01) as session:
            has_begun = Slot(current_engine(), "the side task")
            session.start_soon(hold, has_begun, fails)
            await current_engine().park(has_begun)

    await train(fails=False)
    with pytest.raises(BaseExceptionGroup) as caught:
        await train(fails=True)
    assert caught.value.exceptions == (error,)


@kinds
async def test_what_a_computation_raises_that_may_be_abandoned_leaves_as_itself(kind: str) -> None:
    at = Place(KINDS[kind](), Path())
    async with sibling():
        with pytest.raises(type(at.error)) as caught:
            await compute_unless(lambda slot: lambda: None, at.fail, ())
    assert caught.value is at.error


async def test_a_generator_that_failed_raises_that_again_and_is_not_said_to_be_cancelled() -> None:
    async def source() -> AsyncIterator[int]:
        yield 0
        raise Halt("halt")

    stage = batch(source(), 1)
    await anext(stage)
    for _ in range(2):
        with pytest.raises(Halt):
            await anext(stage)
    await stage.aclose()


@pytest.mark.parametrize("kind", ["interrupt", "exit"])
async def test_an_exit_in_on_error_keeps_no_other_hook_from_letting_go(
    kind: str, tmp_path: Path
) -> None:
    error, cell = KINDS[kind](), Cell()
    saver = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            async with MonitoredSession([saver, raises_at("on_error", error)], cell.step):
                raise ValueError("in the block")
    assert caught.value is error
