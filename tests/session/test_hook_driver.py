"""HookDriver: the moments of one hook, step by step, as a session calls them."""

from __future__ import annotations

import pytest

from asynchooks import (
    EarlyStoppingHook,
    FunctionSessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopTraining,
)
from asynchooks.testing import HookDriver, RecordingHook, ScriptedSession, ScriptedSessionCreator

pytestmark = pytest.mark.anyio


async def test_opening_steps_and_leaving_call_the_moments_in_order() -> None:
    hook = RecordingHook("hook", fetches="loss")
    creator = ScriptedSessionCreator([ScriptedSession([{"loss": 0.5}, {"loss": 0.25}])])
    async with HookDriver(hook, creator) as driver:
        assert [moment for _, moment in hook.log] == ["begin", "after_create_session"]
        for number in (1, 2):
            run_context = await driver.make_step()
            assert (run_context.step, run_context.original_args.fetches) == (number, ())
    assert [moment for _, moment in hook.log[2:]] == [
        "before_run", "after_run", "before_run", "after_run", "end",
    ]  # fmt: skip
    assert hook.results == [0.5, 0.25]


async def test_a_step_returns_what_the_hook_asked_for() -> None:
    losses = iter((0.5, 0.25, 0.25, 0.75))
    creator = FunctionSessionCreator(lambda: {"loss": next(losses)})
    async with HookDriver(EarlyStoppingHook("loss", patience=2), creator) as driver:
        stops = [(await driver.make_step()).stop_requested for _ in range(4)]
        assert stops == [False, False, False, True]
        with pytest.raises(StopTraining):
            await driver.make_step()


async def test_what_a_hook_leaves_for_the_end_of_a_run_is_done() -> None:
    done: list[int] = []

    class Late(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            async def note() -> None:
                done.append(run_context.step)

            run_context.finish_with(note)

    async with HookDriver(Late(), FunctionSessionCreator(dict)) as driver:
        await driver.make_step()
        assert done == [1]


async def test_errors_and_feeds_are_the_caller_s() -> None:
    class Fails(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("x")

        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            if run_values.results < 0:
                raise ValueError("below 0")

    creator = FunctionSessionCreator(lambda x: {"x": x})
    with pytest.raises(ValueError, match="below 0"):
        async with HookDriver(Fails(), creator) as driver:
            await driver.make_step("x", {"x": 1})
            await driver.make_step("x", {"x": -1})


def test_what_is_no_hook_is_refused() -> None:
    with pytest.raises(TypeError, match="expected"):
        HookDriver("hook", FunctionSessionCreator(dict))  # type: ignore[arg-type]
