"""Hooks with plain methods, beside hooks with coroutines: where they run, and in what order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Awaitable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunArgs,
    SessionRunHook,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, raises_at

pytestmark = pytest.mark.anyio

Log = list[tuple[str, str]]


class Plain(SessionRunHook):
    """As RecordingHook, without a coroutine; notes the threads that it is called in, too."""

    def __init__(self, name: str, log: Log, fetches: Any = None) -> None:
        self.name, self.log, self.fetches = name, log, fetches
        self.results: list[Any] = []
        self.threads: list[tuple[str, int]] = []

    def note(self, moment: str) -> None:
        self.log.append((self.name, moment))
        self.threads.append((moment, threading.get_ident()))

    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session")

    def before_run(self, run_context: Any) -> Any:
        self.note("before_run")
        return None if self.fetches is None else SessionRunArgs(self.fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run")
        self.results.append(run_values.results)

    def end(self, session: Any) -> None:
        self.note("end")

    def on_error(self, session: Any, exception: BaseException) -> None:
        self.note("on_error")


MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_plain_and_coroutine_hooks_keep_their_order_at_every_moment(step_runner: Any) -> None:
    log: Log = []
    a, b, c = Plain("a", log), RecordingHook("b", log), Plain("c", log)
    d, e = Plain("d", log, "calls"), RecordingHook("e", log)
    hooks = [a, b, c, d, e]
    async with MonitoredSession(hooks, counting_creator(), step_runner=step_runner) as session:
        assert await session.run("calls") == 1
    assert log == [(name, moment) for moment in MOMENTS for name in "abcde"]
    assert d.results == [1]
    assert a.results == [None]


async def test_on_error_of_plain_hooks_is_called_in_reverse() -> None:
    log: Log = []
    hooks = [Plain("a", log), RecordingHook("b", log), Plain("c", log)]
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks, counting_creator()):
            raise ZeroDivisionError
    assert log[-3:] == [("c", "on_error"), ("b", "on_error"), ("a", "on_error")]


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_plain_hook_runs_where_the_step_runs(step_runner: Any) -> None:
    here = threading.get_ident()
    where: list[int] = []

    def step() -> dict[str, int]:
        where.append(threading.get_ident())
        return {}

    hook = Plain("a", [])
    creator = FunctionSessionCreator(step)
    async with MonitoredSession([hook], creator, step_runner=step_runner) as session:
        await session.run([])
        await session.run([])
    assert (set(where) == {here}) == (step_runner == "inline")
    for moment, thread in hook.threads:
        assert thread == (here if moment == "begin" else where[0]), moment


async def test_what_a_plain_method_returns_to_be_awaited_is_awaited_in_its_place() -> None:
    log: list[str] = []

    async def later(name: str) -> None:
        await anyio.lowlevel.checkpoint()
        log.append(name)

    class Wrapped(SessionRunHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def after_run(self, run_context: Any, run_values: Any) -> Awaitable[None]:
            log.append(f"{self.name} called")
            return later(f"{self.name} done")

    async with MonitoredSession([Wrapped("a"), Wrapped("b")], counting_creator()) as session:
        await session.run([])
    assert log == ["a called", "a done", "b called", "b done"]


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "before_run", "after_run"])
async def test_an_error_of_a_plain_hook_names_it_and_the_moment(moment: str) -> None:
    hooks = [Plain("a", []), raises_at(moment, ZeroDivisionError, is_plain=True)]
    with pytest.raises(ZeroDivisionError) as caught:
        async with MonitoredSession(hooks, counting_creator()) as session:
            await session.run([])
    assert f"in {moment} of Raises" in caught.value.__notes__


async def test_a_plain_hook_that_blocks_at_first_does_not_hold_the_event_loop() -> None:
    released = threading.Event()

    class Blocks(SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            assert released.wait(30)

    async with MonitoredSession([Blocks()], counting_creator()) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await anyio.wait_all_tasks_blocked()
            released.set()  # reached although the hook blocks


async def test_a_method_with_a_yield_in_it_is_refused() -> None:
    class Generator(SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> Any:
            yield run_values

    class AsyncGenerator(SessionRunHook):
        async def end(self, session: Any) -> Any:
            yield session

    for hook, moment in ((Generator(), "after_run"), (AsyncGenerator(), "end")):
        words = rf"{moment} of hooks\[1\], a {type(hook).__name__}, holds a `yield`"
        with pytest.raises(TypeError, match=words):
            MonitoredSession([RecordingHook("a"), hook], counting_creator())


async def test_a_coroutine_that_a_plain_end_returns_too_late_is_closed(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class ReturnsLate(SessionRunHook):
        def end(self, session: Any) -> Any:
            async def more() -> None: ...

            threads.append(threading.current_thread())
            has_begun.set()
            may_return.wait(30)
            return more()

    threads: list[threading.Thread] = []
    has_begun, may_return = threading.Event(), threading.Event()
    creator = FunctionSessionCreator(dict)

    async def train() -> None:
        with scope:
            async with MonitoredSession([ReturnsLate()], creator, 0, step_runner="thread"):
                pass

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await anyio.to_thread.run_sync(has_begun.wait, 30)
        scope.cancel()
    assert scope.cancelled_caught
    may_return.set()
    await anyio.to_thread.run_sync(threads[0].join)
    gc.collect()
    assert [str(each.message) for each in recwarn if "never awaited" in str(each.message)] == []
