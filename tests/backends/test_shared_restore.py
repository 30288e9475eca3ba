"""Shared sessions: which worker's hook restores the model, and which one comes too late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FeedHook,
    MonitoredSession,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopTraining,
)
from asynchooks.data import Stage, prefetch
from asynchooks.testing import ScriptedSessionCreator

from ..hooks.inputs import Diary, until_stopped
from ..hooks.savers import Latch, is_free, until
from ..hooks.training import Holds, tasks
from ..support.afterwards import check_gate, nothing_left
from ..support.helpers import in_task, settle
from ..support.moments import NOW, at, lost

pytestmark = pytest.mark.anyio

NUM_ITEMS, NUM_SAVED = 9, 3


class Life:
    """A model, its input, and the creator that its workers share."""

    def __init__(
        self, path: Path, *, is_async: bool = False, errors: dict[int, BaseException] | None = None
    ) -> None:
        self.path = path
        self.diary = Diary(errors)
        self.source: Stage[int] = prefetch(range(NUM_ITEMS), 2)
        self.may_restore = Latch()
        step = self._step_async if is_async else self._step
        self.creator = SharedSessionCreator(step)

    def _step(self, x: Any) -> dict[str, Any]:
        return self.diary.step(x)

    async def _step_async(self, x: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return self.diary.step(x)

    def state_dict(self) -> dict[str, Any]:
        return self.diary.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.may_restore.pass_by()
        self.diary.load_state_dict(state)

    def saver(self, name: str = "") -> CheckpointSaverHook:
        saver = StateDictSaver(model=self)
        return CheckpointSaverHook(self.path / name, save_steps=2, saver=saver)

    @property
    def feed(self) -> FeedHook:
        return FeedHook(self.source, "x")

    def session(self, *hooks: SessionRunHook, **options: Any) -> MonitoredSession:
        return MonitoredSession(hooks, self.creator, recovery=NOW, **options)

    @asynccontextmanager
    async def refused(self, hook: SessionRunHook, match: str) -> AsyncIterator[None]:
        """The block begins when a worker with the hook was refused, which leaves nothing."""
        async with nothing_left():
            with pytest.raises(CheckpointError, match=match) as caught:
                await self.session(hook).open()
        assert "Open the session with that hook first" in str(caught.value)
        yield
        assert is_free(self.path)


async def save_some(path: Path) -> None:
    """Leave a checkpoint of a training with the first items."""
    life = Life(path)
    async with life.session(life.feed, life.saver()) as session:
        for _ in range(NUM_SAVED):
            await session.run([])


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_saver_that_opens_before_any_step_restores_model_step_and_input_also_after_a_loss(
    is_async: bool, tmp_path: Path
) -> None:
    """Model and input go back together, whichever worker notices."""
    await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async, errors={4: lost()})
    async with life.session(life.feed) as early, life.session(life.feed, life.saver()) as late:
        assert early.global_step.value == late.global_step.value == NUM_SAVED
        assert life.diary.items == [0, 1, 2]
        await late.run([])
        for _ in range(2):
            await early.run([])
        assert life.diary.items == [0, 1, 2, 3, 4, 5]
        await early.run([])  # from the checkpoint of step 4
        assert life.diary.items == [0, 1, 2, 3, 4]
        await until_stopped(late)
    assert life.diary.items == list(range(NUM_ITEMS))
    check_gate(life.creator)


@pytest.mark.parametrize("kind", ["saver", "saver without a checkpoint", "own"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_saver_that_opens_after_a_step_is_refused_and_the_others_go_on(
    is_async: bool, kind: str, tmp_path: Path
) -> None:
    if kind == "saver":
        await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async)
    hook = at(restore_model=lambda raw: 2) if kind == "own" else life.saver()
    words = "would restore the model, but its worker opens late: others have trained the model to"
    async with nothing_left(), life.session(life.feed) as early:
        await early.run([])
        async with life.refused(hook, f"{type(hook).__name__} {words} step 1"):
            assert (early.stop_reason, early.global_step.value, life.diary.items) == (None, 1, [0])
            await until_stopped(early)
    assert life.diary.items == list(range(NUM_ITEMS))
    check_gate(life.creator)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_second_saver_opens_at_any_step_and_leaves_the_model_alone(
    is_lost: bool, tmp_path: Path
) -> None:
    """Also where the first has left and the raw session was lost: the function's model stays."""
    await save_some(tmp_path)
    life = Life(tmp_path, errors={2: lost()} if is_lost else None)
    async with life.session() as other:
        async with life.session(life.saver()) as first:
            await first.run([], {"x": 3})
        await other.run([], {"x": 4})
        async with life.session(life.saver("second")) as second:
            assert second.global_step.value == 5
            assert life.diary.items == [0, 1, 2, 3, 4]
    again = Life(tmp_path / "second")
    async with again.session(again.saver()):
        assert again.diary.items == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("feeds", [False, True])
async def test_a_saver_that_opens_after_an_item_was_drawn_is_refused(
    feeds: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life, may_go_on = Life(tmp_path), anyio.Event()
    hooks = [life.feed, Holds("before_run", may_go_on)] if feeds else []
    async with life.session(*hooks) as early, tasks() as group:
        batches = early.batches(life.source)
        if feeds:
            group.start_soon(early.run, [])
            await settle()
        else:
            assert await anext(batches) == 0
        async with life.refused(life.saver(), r"another draws items from .*prefetch"):
            may_go_on.set()
        if not feeds:
            await early.run([], {"x": 0})
            async for x in batches:
                await early.run([], {"x": x})
    assert life.diary.items == ([0] if feeds else list(range(NUM_ITEMS)))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_saver_waits_for_a_step_under_way_and_restores_if_that_fails(
    fails: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life, steps = Life(tmp_path), Latch()
    life.diary.errors = {1: ValueError("in the step")} if fails else {}
    steps.close()

    def step(x: Any) -> dict[str, Any]:
        steps.pass_by()
        return life.diary.step(x)

    life.creator = SharedSessionCreator(step)

    async def run(session: MonitoredSession) -> None:
        try:
            await session.run([], {"x": 1})
        except ValueError:
            assert fails

    async def save() -> None:
        if not fails:
            async with life.refused(life.saver(), "trained the model to step 1"):
                assert life.diary.items == [1]
                return
        async with life.session(life.saver()) as late:
            assert (late.global_step.value, life.diary.items) == (NUM_SAVED, [0, 1, 2])

    async with life.session(step_runner="thread") as early, tasks() as group:
        group.start_soon(run, early)
        await steps.wait_for_arrival()
        group.start_soon(save)
        await until(lambda: early.global_step.statistics().tasks_waiting_for_ticket == 1)
        assert life.diary.items == []
        steps.open()


async def test_a_saver_does_not_wait_for_ever_for_a_step_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynchooks.backends._shared.PATIENCE_SECS", 0.05)
    life, has_begun, may_end = Life(tmp_path), anyio.Event(), anyio.Event()

    async def step() -> dict[str, Any]:
        has_begun.set()
        await may_end.wait()
        return {}

    life.creator = SharedSessionCreator(step)
    async with life.session() as early, tasks() as group:
        group.start_soon(early.run, [])
        await has_begun.wait()
        async with life.refused(life.saver(), "a step of another has been under way for 0.05 s"):
            may_end.set()
    assert early.global_step.value == 1


async def test_a_saver_that_opens_between_two_attempts_of_the_others_is_refused(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life, scope = Life(tmp_path, errors={2: lost()}), anyio.CancelScope()
    raws: list[Any] = [life.diary.creator.create_session(), lost()]
    life.creator = SharedSessionCreator(ScriptedSessionCreator(raws))
    recovery = Recovery(first_pause_secs=3600, longest_pause_secs=3600)

    async def pause_before_the_next_attempt() -> None:
        with scope:
            await early.run([], {"x": 8})

    async with MonitoredSession([], life.creator, recovery=recovery) as early:
        await early.run([], {"x": 7})
        async with in_task(pause_before_the_next_attempt):
            async with life.refused(life.saver(), "others have trained the model to step 1"):
                scope.cancel()
    assert life.diary.items == [7]


async def test_all_is_as_at_first_once_all_workers_have_closed(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for num_before in (0, 2, 4):
        async with life.session() as early:  # its steps are no steps of those that open next
            async with life.session(life.saver()) as late:
                assert late.global_step.value == len(life.diary.items) == num_before
                await early.run([], {"x": 1})
                await late.run([], {"x": 1})
            life.diary.items = [1, 1, 1]
        async with life.session() as early:
            await early.run([], {"x": await anext(early.batches(range(1, 3)))})
            async with life.refused(life.saver(), "others have trained the model to step"):
                pass


async def test_two_event_loops_do_not_share_a_creator(tmp_path: Path) -> None:
    life = Life(tmp_path)

    async def open_there() -> None:
        words = "is in use in another event loop; open the sessions of all its workers in"
        with pytest.raises(RuntimeError, match=words):
            await life.session().open()

    async with life.session() as session:
        await anyio.to_thread.run_sync(anyio.run, open_there)
        await session.run([], {"x": 2})


class Restoring:
    """A worker that restores late, and is held while it does."""

    def __init__(self, path: Path) -> None:
        self.life = Life(path)
        self.scope = anyio.CancelScope()
        self.has_left = anyio.Event()

    async def open(self) -> None:
        with self.scope:
            async with self.life.session(self.life.feed, self.life.saver()):
                pass
        self.has_left.set()

    @asynccontextmanager
    async def beside(self, *hooks: SessionRunHook) -> AsyncIterator[MonitoredSession]:
        """The block begins, in a session that is open, while the model is being restored."""
        await save_some(self.life.path)
        self.life.may_restore.close()
        async with self.life.session(*hooks) as early, tasks() as group:
            group.start_soon(self.open)
            await self.life.may_restore.wait_for_arrival()
            yield early


async def test_model_and_step_are_restored_together_when_their_worker_is_cancelled(
    tmp_path: Path,
) -> None:
    restoring = Restoring(tmp_path)
    life = restoring.life
    async with restoring.beside() as early:
        restoring.scope.cancel()
        life.may_restore.open()
        await restoring.has_left.wait()
        assert (life.diary.items, early.global_step.value) == ([0, 1, 2], NUM_SAVED)
        await early.run([], {"x": 3})
        assert early.global_step.value == 4


@pytest.mark.parametrize("feeds", [False, True])
async def test_no_item_is_drawn_while_a_late_saver_restores(feeds: bool, tmp_path: Path) -> None:
    restoring = Restoring(tmp_path)
    life = restoring.life

    async def train(session: MonitoredSession) -> None:
        if feeds:
            await until_stopped(session)
        async for x in session.batches(life.source):
            await session.run([], {"x": x})

    async with restoring.beside(*([life.feed] if feeds else [])) as early, in_task(train, early):
        life.may_restore.open()
    assert life.diary.items == list(range(NUM_ITEMS))


async def test_a_stop_ends_the_wait_for_an_item_while_a_late_saver_restores(tmp_path: Path) -> None:
    restoring = Restoring(tmp_path)
    async with restoring.beside(restoring.life.feed) as early:
        async with in_task(early.run, []) as waiting:
            early.request_stop("enough")
        assert isinstance(waiting.error, StopTraining)
        assert not restoring.has_left.is_set()
        restoring.life.may_restore.open()
        await restoring.has_left.wait()
