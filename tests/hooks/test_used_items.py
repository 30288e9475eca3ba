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
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
)
from asynchooks.data import Stage, batch, prefetch

from ..support.faults import FaultError
from .inputs import Diary, saving, until_stopped
from .training import Calls, tasks

pytestmark = pytest.mark.anyio

NUM = 6


class Steps:
    """A model that notes its items; its step is a coroutine, or plain, on a runner."""

    def __init__(self, kind: str = "inline") -> None:
        self.items: list[int] = []
        self.runner: Any = "thread" if kind == "thread" else "inline"
        self.creator = FunctionSessionCreator(self._async if kind == "async" else self._plain)

    async def _async(self, x: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return self._plain(x)

    def _plain(self, x: int) -> dict[str, float]:
        self.items.append(int(x))
        return {"loss": 1.0}


class Counting:
    """A feed function with a position."""

    def __init__(self) -> None:
        self.position = 0

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
    """A hook that fails behind the step, or is cancelled there."""

    def fail_plainly(hook: SessionRunHook, run_context: SessionRunContext, values: Any) -> None:
        if run_context.step == step:
            raise FaultError

    async def fail() -> None:
        if how.startswith("cancelled"):
            scope[0].cancel()
            await anyio.sleep_forever()
        raise FaultError

    async def after_run(run_context: SessionRunContext, values: Any) -> None:
        if run_context.step != step:
            return
        if how.endswith("in finish_with"):
            run_context.finish_with(fail)
        else:
            await fail()

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


HOW = ["cancelled", "error", "plain error", "cancelled in finish_with", "error in finish_with"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["async", "inline", "thread"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_each_item_is_trained_once_wherever_its_run_breaks_behind_the_step(
    how: str, kind: str, is_first: bool
) -> None:
    steps, scope = Steps(kind), list[anyio.CancelScope]()
    feeding = FeedHook(prefetch(range(NUM), 2), "x")
    hooks = [breaking_at(3, how, scope), feeding][:: -1 if is_first else 1]
    async with MonitoredSession(hooks, steps.creator, step_runner=steps.runner) as session:
        await run_all(session, scope, lambda: session.run("loss"))
    assert steps.items == list(range(NUM))
    assert session.global_step.value == NUM


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_run_in_a_step_fn_uses_its_item_with_its_step(how: str, is_first: bool) -> None:
    steps, scope = Steps(), list[anyio.CancelScope]()
    hooks = [breaking_at(3, how, scope), FeedHook(range(NUM), "x")][:: -1 if is_first else 1]

    async def step_fn(step_context: StepContext) -> None:
        await step_context.run_with_hooks("loss")

    async with MonitoredSession(hooks, steps.creator) as session:
        await run_all(session, scope, lambda: session.run_step_fn(step_fn))
    assert steps.items == list(range(NUM))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_first", [True, False])
async def test_the_position_of_a_feed_fn_is_behind_what_a_step_was_made_with(
    how: str, is_first: bool
) -> None:
    steps, scope = Steps(), list[anyio.CancelScope]()
    feeding, positions = FeedFnHook(Counting()), list[Any]()
    hooks = [breaking_at(3, how, scope), feeding][:: -1 if is_first else 1]

    async def run() -> None:
        try:
            await session.run("loss")
        finally:
            positions.append(feeding.state_dict()["position"])

    async with MonitoredSession(hooks, steps.creator) as session:
        await run_all(session, scope, run)
    assert steps.items == list(range(NUM))
    assert positions[:NUM] == [1, 2, 3, 4, 5, 6]


async def test_a_run_that_is_cancelled_while_an_evaluation_begins_uses_its_item() -> None:
    items, scope = list[int](), [anyio.CancelScope()]

    async def step(x: int) -> dict[str, float]:
        items.append(x)
        scope[0].cancel()  # it comes with the first wait behind the step
        return {"loss": 1.0}

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": 1.0}

    hooks = [EvaluationHook(evaluate, every_n_steps=2), FeedHook(prefetch(range(NUM), 2), "x")]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        await run_all(session, scope, lambda: session.run("loss"))
    assert items == list(range(NUM))


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_session_lost_behind_its_step_without_a_checkpoint_is_fed_the_next_item(
    is_first: bool,
) -> None:
    steps, faults = Steps(), [PreemptionError("lost behind the step")]

    def after_run(run_context: SessionRunContext, values: Any) -> None:
        if run_context.step == 3 and faults:
            raise faults.pop()

    hooks = [Calls(after_run=after_run), FeedHook(range(NUM), "x")][:: -1 if is_first else 1]
    async with MonitoredSession(hooks, steps.creator) as session:
        await until_stopped(session)
    assert steps.items == list(range(NUM))


async def test_a_step_that_failed_has_used_nothing() -> None:
    diary = Diary({3: FaultError()})
    async with MonitoredSession([FeedHook(range(NUM), "x")], diary.creator) as session:
        await run_all(session, [], lambda: session.run([]))
    assert diary.items == list(range(NUM))


@pytest.mark.parametrize("how", ["cancelled", "error"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_workers_share_out_each_item_once_where_one_breaks_behind_its_step(
    how: str, is_first: bool
) -> None:
    steps = Steps("async")
    creator, source = SharedSessionCreator(steps.creator), prefetch(range(30), 4)

    async def work(breaks: bool) -> None:
        scope = list[anyio.CancelScope]()
        hooks: list[SessionRunHook] = [FeedHook(source, "x")]
        if breaks:
            hooks.insert(is_first, breaking_at(7, how, scope))
        async with MonitoredSession(hooks, creator) as session:
            await run_all(session, scope, lambda: session.run("loss"))

    async with tasks() as group:
        group.start_soon(work, True)
        group.start_soon(work, True)
        group.start_soon(work, False)
    assert sorted(steps.items) == list(range(30))


@pytest.mark.parametrize("how", ["cancelled", "error"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("feeds", [True, False])
async def test_a_checkpoint_is_behind_the_item_of_a_run_that_broke_behind_its_step(
    tmp_path: Path, how: str, is_first: bool, feeds: bool
) -> None:
    diary = Diary()

    async def live(hook: SessionRunHook | None, num_runs: int) -> None:
        source: Stage[Any] = prefetch(batch(range(12), 2), 2)
        position = FeedHook(source, "x") if feeds else InputPositionHook(source)
        hooks: list[SessionRunHook] = [position, saving(tmp_path, diary, every=100)]
        if hook is not None:
            hooks.insert(0 if is_first else len(hooks), hook)
        async with MonitoredSession(hooks, diary.creator) as session:
            batches = session.batches(source) if not feeds else None
            for _ in range(num_runs):
                feed_dict = None if batches is None else {"x": await anext(batches)}
                scope[:] = [anyio.CancelScope()]
                with scope[0], contextlib.suppress(FaultError):
                    await session.run([], feed_dict)

    scope = list[anyio.CancelScope]()
    await live(breaking_at(3, how, scope), 3)  # the last run before the final checkpoint breaks
    assert diary.items == list(range(6))
    await live(None, 3)
    assert diary.items == list(range(12))


async def test_a_hook_knows_in_the_next_run_whether_the_last_one_made_its_step() -> None:
    known, last = list[bool](), list[SessionRunContext]()

    def before_run(run_context: SessionRunContext) -> None:
        known.extend(each.step_is_made for each in last)
        last[:] = [run_context]

    diary, scope = Diary({2: FaultError()}), list[anyio.CancelScope]()
    hooks = [breaking_at(2, "error", scope), Calls(before_run=before_run)]
    async with MonitoredSession(hooks, diary.creator) as session:
        for _ in range(4):
            with contextlib.suppress(FaultError):
                await session.run([], {"x": 0})
    assert known == [True, False, True]


@pytest.mark.parametrize("feeds", [True, False])
async def test_an_item_comes_again_where_the_model_goes_back_behind_its_step(
    tmp_path: Path, feeds: bool
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

    async def steps_of(session: MonitoredSession, source: Any) -> AsyncIterator[None]:
        if feeds:
            while not session.should_stop():
                await session.run([])
                yield
        else:
            async for x in session.batches(source):
                await session.run([], {"x": x})
                yield

    def hooks_with(source: Any, *others: SessionRunHook) -> list[SessionRunHook]:
        return [FeedHook(source, "x") if feeds else InputPositionHook(source), *others]

    async def slow() -> None:
        await is_open.wait()
        async with MonitoredSession(hooks_with(source, Calls(after_run=wait)), creator) as session:
            async for _ in steps_of(session, source):
                pass

    async def recovering() -> None:
        saver = saving(tmp_path / "now", diary, every=1)
        hooks = hooks_with(source, saver, Calls(after_run=lose))
        async with MonitoredSession(hooks, creator) as session:
            is_open.set()
            await in_after_run.wait()
            assert diary.items == list(range(6))
            async for _ in steps_of(session, source):
                if not has_recovered.is_set():
                    assert 5 not in diary.items
                    shutil.copytree(tmp_path / "now", path)
                    has_recovered.set()

    async with tasks() as group:
        group.start_soon(recovering)
        group.start_soon(slow)
    assert sorted(diary.items) == list(range(12))

    later, source = Diary(), prefetch(range(12), 2)  # from the checkpoint that was made meanwhile
    hooks = hooks_with(source, saving(path, later))
    async with MonitoredSession(hooks, later.creator) as session:
        async for _ in steps_of(session, source):
            pass
    assert sorted(later.items) == list(range(12))
