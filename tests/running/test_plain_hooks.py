"""Hooks with plain methods, beside hooks with coroutines: where they run, and in what order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunHook
from asynchooks.testing import RecordingHook

from ..support.helpers import in_task
from ..support.moments import HeldStep, at, counting

pytestmark = pytest.mark.anyio

MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


def plain(**moments: Any) -> SessionRunHook:
    """As `at`, with plain methods that call what is given."""
    methods = {moment: lambda hook, *given, fn=fn: fn() for moment, fn in moments.items()}
    hook: SessionRunHook = type("Plain", (SessionRunHook,), methods)()
    return hook


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_plain_hooks_keep_their_order_among_others_and_run_where_the_step_runs(
    step_runner: Any, fails: bool
) -> None:
    log: list[tuple[str, str]] = []
    where, threads = list[int](), list[int]()

    def step() -> dict[str, int]:
        where.append(threading.get_ident())
        if fails:
            raise ZeroDivisionError
        return {"calls": 1}

    def notes(name: str, moment: str) -> Any:
        log.append((name, moment))
        if name == "a":
            threads.append(threading.get_ident())
        return SessionRunArgs("calls") if (name, moment) == ("d", "before_run") else None

    hooks = [
        RecordingHook(name, log) if name in "be" else plain(
            **{each: lambda name=name, each=each: notes(name, each)
               for each in (*MOMENTS, "on_error")}
        )
        for name in "abcde"
    ]  # fmt: skip
    session = MonitoredSession(hooks, step, step_runner=step_runner)
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
    async with counting(plain(before_run=held)) as session:
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
            counting(at(), hook)
