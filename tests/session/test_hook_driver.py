"""HookDriver: the moments of one hook, step by step, as a session calls them."""

import pytest

from asynchooks import EarlyStoppingHook, FunctionSessionCreator, StopTraining
from asynchooks.testing import HookDriver, RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.moments import moments_of


async def test_opening_steps_and_leaving_call_the_moments_in_order() -> None:
    hook = RecordingHook("hook", fetches="loss")
    creator = ScriptedSessionCreator([ScriptedSession([{"loss": 0.5}, {"loss": 0.25}])])
    async with HookDriver(hook, creator) as driver:
        assert moments_of(hook) == ["begin", "after_create_session"]
        for number in (1, 2):
            run_context = await driver.make_step()
            assert (run_context.step, run_context.original_args.fetches) == (number, ())
    assert moments_of(hook)[2:] == ["before_run", "after_run"] * 2 + ["end"]
    assert hook.results == [0.5, 0.25]


async def test_a_step_returns_what_the_hook_asked_for() -> None:
    losses = iter((0.5, 0.25, 0.25, 0.75))
    creator = FunctionSessionCreator(lambda: {"loss": next(losses)})
    async with HookDriver(EarlyStoppingHook("loss", patience=2), creator) as driver:
        stops = [(await driver.make_step()).stop_requested for _ in range(4)]
        assert stops == [False, False, False, True]
        with pytest.raises(StopTraining):
            await driver.make_step()
    with pytest.raises(TypeError, match="expected"):
        HookDriver("hook", creator)  # type: ignore[arg-type]
