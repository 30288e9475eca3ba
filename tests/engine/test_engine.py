"""The real-time engines: parking, waking, tasks, shields and turns on asyncio, uvloop and trio.

They are private, and every wait of the package is one of theirs: a fault here shows elsewhere
rarely, and only under load.
"""

import asyncio
import gc
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any
from weakref import ref

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    MonitoredSession,
)
from asynchooks._engine.base import TIMED_OUT, Slot
from asynchooks._engine.current import current_engine
from asynchooks._engine.real_time import PASS_SECS

from ..simulation.engines import output_of
from ..support.faults import Halt
from ..support.helpers import counting_creator, settle, turns
from ..support.loops import LOOPS, loop_of
from ..support.loops import anyio_backend as anyio_backend
from ..support.steps import pause


@pytest.mark.parametrize("secs", [0.0013, 0.0024, 0.0049])  # uvloop counts milliseconds
async def test_a_deadline_ends_a_park_and_not_before(secs: float) -> None:
    engine = current_engine()
    begun = engine.now()
    slot = Slot(engine, "a test")
    assert await engine.park(slot, begun + secs) is TIMED_OUT
    assert engine.now() >= begun + secs
    assert slot.is_woken


async def test_a_turn_lets_all_that_were_woken_run_first() -> None:
    engine, resumed = current_engine(), list[Slot]()
    slots = [Slot(engine, str(i)) for i in range(50)]

    async def park(slot: Slot) -> None:
        await engine.park(slot)
        resumed.append(slot)

    async with anyio.create_task_group() as group:
        for slot in slots:
            group.start_soon(park, slot)
        await settle()
        for slot in slots:
            slot.wake()
        await engine.turn()
        assert len(resumed) == 50


async def test_a_turn_yields_only_when_its_share_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = current_engine()
    others, clock = 0, engine.tick()
    monkeypatch.setattr(engine, "tick", lambda: clock)

    async def count() -> None:
        nonlocal others
        while others < 1000:
            others += 1
            await turns()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await engine.turn()
        before = others
        for _ in range(10):
            await engine.turn()
        assert others == before
        for _ in range(2):  # trio runs the tasks of one pass in any order
            clock += 2 * PASS_SECS
            await engine.turn()
        assert others > before
        group.cancel_scope.cancel()


def test_a_native_cancellation_that_comes_with_the_value_loses_neither() -> None:
    async def main() -> None:
        slot, seen = Slot(current_engine(), "a test"), list[Any]()

        async def park() -> None:
            try:
                await current_engine().park(slot)
            except asyncio.CancelledError:
                seen.append((slot.is_woken, slot.value))
                raise

        task = asyncio.create_task(park())
        await asyncio.sleep(0)
        slot.wake("value")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [(True, "value")]

    asyncio.run(main())


async def test_wakes_of_threads_at_the_same_moment_all_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, both_wrote = current_engine(), threading.Barrier(2)

    class Mail(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            both_wrote.wait()

    monkeypatch.setattr(engine, "_thread_wakes", Mail())
    slots = [Slot(engine, "a thread") for _ in range(2)]
    threads = [threading.Thread(target=slot.wake, args=(i,)) for i, slot in enumerate(slots)]
    for thread in threads:
        thread.start()
    assert [await engine.park(slot, engine.now() + 30) for slot in slots] == [0, 1]
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", [ValueError, Halt, asyncio.CancelledError, GeneratorExit])
async def test_a_failure_that_a_task_lets_out_is_logged_and_ends_nothing_else(
    kind: Callable[[], BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    error = kind()

    async def fail() -> None:
        await turns()
        raise error

    assert await current_engine().start(fail).wait()
    await settle()
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.name == "asynchooks"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.faults
def test_an_exit_that_a_task_lets_out_ends_the_loop_and_asyncio_reports_nothing_more() -> None:
    pytest.importorskip("uvloop")
    program = """
import anyio, gc
from asynchooks._engine.current import current_engine

async def leave():
    raise SystemExit(3)

async def main():
    current_engine().start(leave)
    await anyio.sleep(60)

for use_uvloop in (False, True):
    try:
        anyio.run(main, backend_options=dict(use_uvloop=use_uvloop))
    except SystemExit as left:
        print(left.code)
    gc.collect()
"""
    assert output_of(program) == ["3", "3"]


@coroutine
def suspend() -> Generator[None, None, None]:
    yield


async def test_only_the_cancellation_of_the_running_task_is_no_failure_also_in_a_group() -> None:
    engine, seen = current_engine(), list[BaseException | None]()

    async def watch(wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await wait()
        except BaseException as error:
            seen.append(engine.failure_in(error))
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, anyio.sleep_forever)
        await settle()
        tasks.cancel_scope.cancel()
    task = engine.start(watch, anyio.sleep_forever)
    await settle()
    task.cancel()
    await task.wait()
    thrown_away = watch(suspend)
    thrown_away.send(None)
    thrown_away.close()
    assert seen == [None] * 3

    def fail(error: BaseException) -> None:
        raise error

    group = BaseExceptionGroup("several", [Halt(), ValueError()])
    for error in (Halt(), asyncio.CancelledError(), SystemExit(), GeneratorExit(), group):
        try:
            fail(error)
        except BaseException as raised:
            assert engine.failure_in(raised) is error
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await turns()
        except anyio.get_cancelled_exc_class() as error:
            assert engine.failure_in(BaseExceptionGroup("one", [error])) is None
            both = BaseExceptionGroup("two", [error, group])
            both.add_note("noted")
            rest = engine.failure_in(both)
            assert isinstance(rest, BaseExceptionGroup)
            assert rest.split(type(error))[0] is None
            assert (rest.message, rest.__notes__) == ("two", ["noted"])
            raise


@pytest.mark.parametrize("loop", LOOPS)
def test_an_event_loop_is_freed_when_it_has_ended(loop: str) -> None:
    backend, options = loop_of(loop)
    refs: list[ref[Any]] = []

    async def main() -> None:
        async with MonitoredSession([], counting_creator(), step_runner="thread") as session:
            session.start_soon(session.global_step.wait_for, 100)
            await session.run([])
            await pause(0.001)
        refs.append(ref(anyio.lowlevel.current_token().native_token))
        refs.append(ref(current_engine()))

    anyio.run(main, backend=backend, backend_options=options)
    gc.collect()
    assert [each() for each in refs] == [None, None]


def test_an_engine_outlives_its_loop_in_what_still_refers_to_it() -> None:
    class Own(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 7.0

    engines: list[Any] = []

    async def main() -> None:
        engines.append(current_engine())
        assert current_engine().now() == 7.0
        assert any("main" in str(coroutine) for _, coroutine in current_engine().running_tasks())

    anyio.run(main, backend_options={"loop_factory": Own})
    gc.collect()
    [engine] = engines
    slot = Slot(engine, "nothing")
    thread = threading.Thread(target=slot.wake)
    thread.start()
    thread.join()
    assert not slot.is_woken
