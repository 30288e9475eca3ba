"""Hooks with plain methods, beside hooks with coroutines: where they run, and in what order."""

import threading
from functools import partial
from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunHook
from asynchooks.testing import RecordingHook

from ..support.helpers import in_task
from ..support.moments import HeldStep, at, counting, plain_at

MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


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

    def plain(name: str) -> SessionRunHook:
        def note(moment: str, *given: object) -> None:
            log.append((name, moment))
            threads.append(threading.get_ident())

        return plain_at(**{each: partial(note, each) for each in (*MOMENTS, "on_error")})

    hooks = [plain("a"), RecordingHook("b", log), plain("c"), RecordingHook("d", log)]
    session = MonitoredSession(hooks, step, step_runner=step_runner)
    if fails:
        with pytest.raises(ZeroDivisionError):
            async with session:
                await session.run("calls")
        assert log[-4:] == [(name, "on_error") for name in "dcba"]
        return
    async with session:
        assert await session.run("calls") == 1
    assert log == [(name, moment) for moment in MOMENTS for name in "abcd"]
    if step_runner != "auto":
        here = threading.get_ident()
        assert (where == [here]) == (step_runner == "inline")
        assert threads == [here, here, *where * 8]


async def test_a_plain_hook_that_blocks_at_first_does_not_hold_the_event_loop() -> None:
    held = HeldStep(lambda: None)
    async with counting(plain_at(before_run=held)) as session:
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
