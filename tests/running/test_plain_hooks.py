"""Hooks with plain methods, beside hooks with coroutines: where they run, and in what order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunHook
from asynchooks.testing import RecordingHook

from ..support.helpers import in_task
from ..support.moments import HeldStep, counting

pytestmark = pytest.mark.anyio

Log = list[tuple[str, str]]
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


def plain(name: str, log: Log, threads: list[int], fetches: Any = None) -> SessionRunHook:
    """As RecordingHook, without a coroutine; notes the threads that it is called in, too."""

    def method(moment: str) -> Any:
        def note(hook: Any, *given: Any) -> Any:
            log.append((name, moment))
            threads.append(threading.get_ident())
            return fetches if moment == "before_run" else None

        return note

    methods = {moment: method(moment) for moment in (*MOMENTS, "on_error")}
    hook: SessionRunHook = type("Plain", (SessionRunHook,), methods)()
    return hook


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_plain_hooks_keep_their_order_among_others_and_run_where_the_step_runs(
    step_runner: Any, fails: bool
) -> None:
    log: Log = []
    where, threads = list[int](), list[int]()

    def step() -> dict[str, int]:
        where.append(threading.get_ident())
        if fails:
            raise ZeroDivisionError
        return {"calls": 1}

    asks = plain("d", log, [], SessionRunArgs("calls"))
    hooks = [plain("a", log, threads), RecordingHook("b", log), plain("c", log, []), asks]
    session = MonitoredSession([*hooks, RecordingHook("e", log)], step, step_runner=step_runner)
    if fails:
        with pytest.raises(ZeroDivisionError):
            async with session:
                await session.run("calls")
        assert log[-5:] == [(name, "on_error") for name in "edcba"]
        return
    async with session:
        assert await session.run("calls") == 1
    assert log == [(name, moment) for moment in MOMENTS for name in "abcde"]
    if step_runner != "auto":
        here = threading.get_ident()
        assert (where == [here]) == (step_runner == "inline")
        assert threads == [here, *where * 4]


async def test_a_plain_hook_that_blocks_at_first_does_not_hold_the_event_loop() -> None:
    held = HeldStep(lambda: None)

    class Blocks(SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            held()

    async with counting(Blocks()) as session:
        async with in_task(session.run, []):
            held.may_end.set()  # reached although the hook blocks


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
            counting(RecordingHook("a"), hook)
