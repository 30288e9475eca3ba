"""Which items are used: that is settled with the step, whatever becomes of its run afterwards."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedFnHook,
    FeedHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    StepContext,
)
from asynchooks.data import prefetch

from ..data.sources import at as position
from ..support.faults import FaultError
from ..support.hook_models import Drawing
from ..support.moments import at
from .inputs import Diary

NUM = 6


def breaking_at(step: int, how: str, scope: list[anyio.CancelScope]) -> SessionRunHook:
    """A hook that fails behind the step, or is cancelled there, once."""
    errors = [PreemptionError("lost") if how == "lost" else FaultError()]

    async def fail() -> None:
        if how.startswith("cancelled"):
            scope[0].cancel()
            await anyio.sleep_forever()
        raise errors.pop()

    async def after_run(run_context: SessionRunContext, values: Any) -> None:
        if run_context.step != step or not errors:
            return
        if how.endswith("in finish_with"):
            run_context.finish_with(fail)
        else:
            await fail()

    return at(after_run=after_run)


async def run_all(
    session: MonitoredSession,
    scope: list[anyio.CancelScope],
    run: Callable[[], Awaitable[object]],
) -> None:
    while not session.should_stop():
        scope[:] = [anyio.CancelScope()]
        with scope[0], contextlib.suppress(FaultError):
            await run()


@pytest.mark.parametrize(
    "how",
    [
        "cancelled",
        "error",
        "cancelled in finish_with",
        "error in finish_with",
        "lost",
    ],
)
@pytest.mark.parametrize("kind", ["inline", "thread", "step_fn", "feed_fn"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_each_item_is_trained_once_wherever_its_run_breaks_behind_the_step(
    how: str, kind: str, is_first: bool
) -> None:
    diary, scope = Diary(), list[anyio.CancelScope]()
    source = prefetch(range(NUM), 2)
    feeding: Any = FeedFnHook(Drawing(NUM)) if kind == "feed_fn" else FeedHook(source, "x")
    hooks = [breaking_at(3, how, scope), feeding][:: -1 if is_first else 1]
    runner: Any = "thread" if kind == "thread" else "inline"

    async def step_fn(step_context: StepContext) -> None:
        await step_context.run_with_hooks("x")

    async def run() -> None:
        try:
            await (session.run_step_fn(step_fn) if kind == "step_fn" else session.run("x"))
        finally:
            if kind == "feed_fn":
                assert feeding.state_dict() == {"position": len(diary.items)}
            else:
                assert source.state_dict() == position(len(diary.items))

    async with MonitoredSession(hooks, diary.creator, step_runner=runner) as session:
        await run_all(session, scope, run)
        assert diary.items == list(range(NUM))
    assert session.global_step.value == NUM
