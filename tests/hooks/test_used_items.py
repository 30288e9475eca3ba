"""Which items are used: that is settled with the step, whatever becomes of its run afterwards."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedFnHook,
    FeedHook,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
)
from asynchooks.data import batch, prefetch

from ..support.faults import FaultError
from .inputs import Diary, saving, trained_with
from .training import Calls, tasks

pytestmark = pytest.mark.anyio

NUM = 6


class Counting:
    """A feed function with a position."""

    position = 0

    def __call__(self) -> dict[str, int]:
        if self.position == NUM:
            raise StopIteration
        self.position += 1
        return {"x": self.position - 1}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


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

    def fail_plainly(hook: SessionRunHook, run_context: SessionRunContext, values: Any) -> None:
        if run_context.step == step:
            raise errors.pop()

    if how == "plain error":
        hook: SessionRunHook = type("Fails", (SessionRunHook,), {"after_run": fail_plainly})()
        return hook
    return Calls(after_run=after_run)


async def run_all(
    session: MonitoredSession,
    scope: list[anyio.CancelScope],
    run: Callable[[], Awaitable[object]],
) -> None:
    while not session.should_stop():
        scope[:] = [anyio.CancelScope()]
        with scope[0], contextlib.suppress(FaultError):
            await run()


first_or_last = pytest.mark.parametrize("is_first", [True, False])


@pytest.mark.parametrize(
    "how",
    [
        "cancelled",
        "error",
        "plain error",
        "cancelled in finish_with",
        "error in finish_with",
        "lost",
    ],
)
@pytest.mark.parametrize("kind", ["inline", "thread", "step_fn", "feed_fn"])
@first_or_last
async def test_each_item_is_trained_once_wherever_its_run_breaks_behind_the_step(
    how: str, kind: str, is_first: bool
) -> None:
    diary, scope = Diary(), list[anyio.CancelScope]()
    source = prefetch(range(NUM), 2)
    feeding: Any = FeedFnHook(Counting()) if kind == "feed_fn" else FeedHook(source, "x")
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

    async with MonitoredSession(hooks, diary.creator, step_runner=runner) as session:
        await run_all(session, scope, run)
        assert diary.items == list(range(NUM))
    assert session.global_step.value == NUM


@pytest.mark.parametrize("how", ["cancelled", "error"])
@first_or_last
@pytest.mark.parametrize("by_loop", [True, False])
async def test_a_checkpoint_is_behind_the_item_of_a_run_that_broke_behind_its_step(
    tmp_path: Path, how: str, is_first: bool, by_loop: bool
) -> None:
    diary, scope = Diary(), list[anyio.CancelScope]()
    source, same = (prefetch(batch(range(12), 2), 2) for _ in range(2))
    hooks: list[Any] = [InputPositionHook(source) if by_loop else FeedHook(source, "x")]
    hooks.insert(not is_first, breaking_at(3, how, scope))
    hooks.append(saving(tmp_path, diary, every=100))
    async with MonitoredSession(hooks, diary.creator) as session:
        batches = session.batches(source) if by_loop else None
        for _ in range(3):  # the last run before the final checkpoint breaks
            feeds = None if batches is None else {"x": await anext(batches)}
            scope[:] = [anyio.CancelScope()]
            with scope[0], contextlib.suppress(FaultError):
                await session.run([], feeds)
    assert diary.items == list(range(6))
    again = await trained_with(same, tmp_path, by_loop=by_loop)
    assert again.items == list(range(12))


@pytest.mark.parametrize("by_loop", [True, False])
async def test_an_item_comes_again_where_the_model_goes_back_behind_its_step(
    tmp_path: Path, by_loop: bool
) -> None:
    """One worker is still in after_run, behind its step, while the other one recovers."""
    diary, source, path = Diary(), prefetch(range(12), 2), tmp_path / "then"
    creator = SharedSessionCreator(diary.creator)
    is_open, in_after_run, has_recovered = anyio.Event(), anyio.Event(), anyio.Event()
    losses = [PreemptionError("lost")]

    async def wait(run_context: SessionRunContext, values: Any) -> None:
        if 5 in diary.items and not in_after_run.is_set():
            in_after_run.set()
            await has_recovered.wait()

    def lose(run_context: SessionRunContext, values: Any) -> None:
        if losses:
            raise losses.pop()

    def session_with(*hooks: SessionRunHook) -> MonitoredSession:
        feed = InputPositionHook(source) if by_loop else FeedHook(source, "x")
        return MonitoredSession([feed, *hooks], creator)

    async def steps_of(session: MonitoredSession) -> AsyncIterator[None]:
        if by_loop:
            async for x in session.batches(source):
                await session.run([], {"x": x})
                yield
        while not by_loop and not session.should_stop():
            await session.run([])
            yield

    async def slow() -> None:
        await is_open.wait()
        async with session_with(Calls(after_run=wait)) as session:
            async for _ in steps_of(session):
                pass

    async def recovering() -> None:
        saver = saving(tmp_path / "now", diary, every=1)
        async with session_with(saver, Calls(after_run=lose)) as session:
            is_open.set()
            await in_after_run.wait()
            assert diary.items == list(range(6))
            async for _ in steps_of(session):
                if not has_recovered.is_set():
                    assert 5 not in diary.items
                    shutil.copytree(tmp_path / "now", path)
                    has_recovered.set()

    async with tasks() as group:
        group.start_soon(recovering)
        group.start_soon(slow)
    assert sorted(diary.items) == list(range(12))
    # from the checkpoint that was made meanwhile
    later = await trained_with(prefetch(range(12), 2), path, by_loop=by_loop)
    assert sorted(later.items) == list(range(12))
