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
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopTraining,
)
from asynchooks.data import Stage, prefetch

from ..hooks.inputs import Diary, until_stopped
from ..hooks.savers import Latch, is_free, until
from ..hooks.training import Holds, tasks
from ..support.afterwards import check_gate, nothing_left
from ..support.helpers import settle

pytestmark = pytest.mark.anyio

NUM_ITEMS, NUM_SAVED = 9, 3
NOW = Recovery(first_pause_secs=0)
EITHER_STEP = pytest.mark.parametrize("is_async", [False, True])


class Life:
    """A model, its input, and the creator that its workers share."""

    def __init__(self, path: Path, *, is_async: bool = False) -> None:
        self.path = path
        self.diary = Diary()
        self.source: Stage[int] = prefetch(range(NUM_ITEMS), 2)
        self.may_restore = Latch()
        step = self._step_async if is_async else self._step
        self.creator = SharedSessionCreator(FunctionSessionCreator(step))

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
    async with life.session(FeedHook(life.source, "x"), life.saver()) as session:
        for _ in range(NUM_SAVED):
            await session.run([])


class Own(SessionRunHook):
    """A user's own saver, which knows of one checkpoint."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    async def restore_model(self, session: Any) -> int | None:
        self.diary.items = [7, 8]
        return 2


class RestoresNothing(SessionRunHook):
    """Such as a wrapper that forwards the moment to a hook which does not have it."""

    async def restore_model(self, session: Any) -> Any:
        return NotImplemented


@EITHER_STEP
async def test_a_saver_that_opens_before_any_step_restores_model_step_and_input(
    is_async: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async)
    async with life.session(FeedHook(life.source, "x")) as early:
        async with life.session(FeedHook(life.source, "x"), life.saver()) as late:
            assert early.global_step.value == late.global_step.value == NUM_SAVED
            assert life.diary.items == [0, 1, 2]
            await early.run([])
            await until_stopped(late)
    assert life.diary.items == list(range(NUM_ITEMS))
    check_gate(life.creator)


@EITHER_STEP
@pytest.mark.parametrize("is_own", [False, True])
async def test_a_saver_that_opens_after_a_step_is_refused_and_the_others_go_on(
    is_async: bool, is_own: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async)
    hook = Own(life.diary) if is_own else life.saver()
    name, step = (
        type(hook).__name__,
        "its worker opens late: others have trained the model to step 1",
    )
    async with nothing_left(), life.session(FeedHook(life.source, "x")) as early:
        await early.run([])
        async with life.refused(hook, f"{name} would restore the model, but {step}"):
            assert (early.stop_reason, early.global_step.value, life.diary.items) == (None, 1, [0])
            await until_stopped(early)
    assert life.diary.items == list(range(NUM_ITEMS))
    check_gate(life.creator)


async def test_it_is_refused_also_where_there_is_no_checkpoint_yet(tmp_path: Path) -> None:
    life = Life(tmp_path)
    async with life.session() as early:
        await early.run([], {"x": 1})
        async with life.refused(life.saver(), "trained the model to step 1"):
            pass


@pytest.mark.parametrize("feeds", [False, True])
async def test_a_saver_that_opens_after_an_item_was_drawn_is_refused(
    feeds: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life, may_go_on = Life(tmp_path), anyio.Event()
    hooks = [FeedHook(life.source, "x"), Holds("before_run", may_go_on)] if feeds else []
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

    life.creator = SharedSessionCreator(FunctionSessionCreator(step))

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

    life.creator = SharedSessionCreator(FunctionSessionCreator(step))
    async with life.session() as early, tasks() as group:
        group.start_soon(early.run, [])
        await has_begun.wait()
        async with life.refused(life.saver(), "a step of another has been under way for 0.05 s"):
            may_end.set()
    assert early.global_step.value == 1


@EITHER_STEP
async def test_a_second_saver_opens_at_any_step_and_leaves_the_model_alone(
    is_async: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async)
    async with life.session(FeedHook(life.source, "x"), life.saver()) as first:
        await first.run([])
        async with life.session(life.saver("second")) as second:
            assert second.global_step.value == 4
            assert life.diary.items == [0, 1, 2, 3]
            await first.run([])
    async with Life(tmp_path / "second").session() as none:
        assert none.global_step.value == 0
    again = Life(tmp_path / "second")
    async with again.session(again.saver()):
        assert again.diary.items == [0, 1, 2, 3, 4]


async def test_of_two_savers_that_open_late_together_before_any_step_one_restores(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path)
    seen: list[int] = []

    async def save(name: str) -> None:
        async with life.session(life.saver(name)) as session:
            seen.append(session.global_step.value)

    async with life.session(), tasks() as group:
        group.start_soon(save, "")
        group.start_soon(save, "second")
    assert seen == [NUM_SAVED, NUM_SAVED]


async def test_workers_wait_for_a_saver_also_where_their_own_hooks_restore_nothing(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life, may_begin = Life(tmp_path), anyio.Event()
    seen: list[int] = []

    async def work(*hooks: SessionRunHook) -> None:
        async with life.session(*hooks) as session:
            seen.append(session.global_step.value)
            await session.run([], {"x": 5})

    async with tasks() as group:
        group.start_soon(work, RestoresNothing())
        group.start_soon(work, Holds("begin", may_begin), life.saver())
        await settle()
        assert seen == []
        may_begin.set()
    assert min(seen) == NUM_SAVED
    assert life.diary.items == [0, 1, 2, 5, 5]


async def test_workers_whose_hooks_restore_nothing_open_together_with_those_that_train_at_once(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path)

    async def work() -> None:
        async with life.session(RestoresNothing()) as session:
            for _ in range(5):
                await session.run([], {"x": 1})

    async with tasks() as group:
        for _ in range(3):
            group.start_soon(work)
    assert life.diary.items == [1] * 15


async def test_a_saver_that_opens_while_the_others_recover_is_refused(tmp_path: Path) -> None:
    await save_some(tmp_path)
    life, may_begin = Life(tmp_path), anyio.Event()
    life.diary.errors = {2: PreemptionError("lost")}

    async def save() -> None:
        with pytest.raises(CheckpointError, match="others have trained the model to step 2"):
            await life.session(Holds("begin", may_begin), life.saver()).open()

    async with life.session() as early, tasks() as group:
        await early.run([], {"x": 7})
        group.start_soon(save)
        await settle()
        group.start_soon(early.run, [], {"x": 8})
        await settle()
        may_begin.set()
    assert life.diary.items == [7, 8]


async def test_a_saver_that_opens_between_two_attempts_of_the_others_is_refused(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life, failing = Life(tmp_path), [PreemptionError("the server is away")]
    make = life.creator.create_session

    class Creator(SessionCreator):
        def create_session(self) -> Any:
            if failing and life.diary.items:
                raise failing.pop()
            return make()

    life.creator = SharedSessionCreator(Creator())
    life.diary.errors = {2: PreemptionError("lost")}
    scope = anyio.CancelScope()
    pause = Recovery(first_pause_secs=3600, longest_pause_secs=3600)

    async def pause_before_the_next_attempt() -> None:
        with scope:
            await early.run([], {"x": 8})

    async with MonitoredSession([], life.creator, recovery=pause) as early:
        await early.run([], {"x": 7})
        async with tasks() as group:
            group.start_soon(pause_before_the_next_attempt)
            while failing:
                await settle()
            async with life.refused(life.saver(), "others have trained the model to step 1"):
                assert life.diary.items == [7]
                scope.cancel()
        await early.run([], {"x": 8})
    assert life.diary.items == [7, 8]


async def test_two_event_loops_do_not_share_a_creator(tmp_path: Path) -> None:
    life, seen = Life(tmp_path), list[str]()

    async def train() -> None:
        try:
            await life.session().open()
        except RuntimeError as error:
            seen.append(str(error))

    async with life.session() as session:
        await session.run([], {"x": 1})
        await anyio.to_thread.run_sync(anyio.run, train)
        await session.run([], {"x": 2})
    assert len(seen) == 1
    assert "is in use in another event loop; open the sessions of all its workers in" in seen[0]


async def test_a_worker_whose_hook_restores_nothing_recovers_beside_others(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.diary.errors = {3: PreemptionError("lost")}
    async with life.session(RestoresNothing()) as a, life.session(RestoresNothing()) as b:
        for session in (a, b, a, b, a):
            await session.run([], {"x": 1})
        assert (a.global_step.value, life.diary.num_calls) == (5, 6)


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


@EITHER_STEP
async def test_a_lost_session_is_restored_by_the_saver_that_opened_late(
    is_async: bool, tmp_path: Path
) -> None:
    """Model and input go back together, whichever worker notices."""
    await save_some(tmp_path)
    life = Life(tmp_path, is_async=is_async)
    life.diary.errors = {4: PreemptionError("lost")}
    async with life.session(FeedHook(life.source, "x")) as early:
        async with life.session(FeedHook(life.source, "x"), life.saver()) as late:
            await late.run([])
            for _ in range(2):
                await early.run([])
            assert life.diary.items == [0, 1, 2, 3, 4, 5]
            await early.run([])  # from the checkpoint of step 4
            assert life.diary.items == [0, 1, 2, 3, 4]
            await until_stopped(late)
    assert life.diary.items == list(range(NUM_ITEMS))


async def test_a_second_saver_opens_after_the_first_has_left_and_the_session_was_lost(
    tmp_path: Path,
) -> None:
    """A step function's model outlives the raw session."""
    await save_some(tmp_path)
    life = Life(tmp_path)
    life.diary.errors = {2: PreemptionError("lost")}
    async with life.session() as other:
        async with life.session(life.saver()) as session:
            await session.run([], {"x": 3})
        await other.run([], {"x": 4})
        async with life.session(life.saver()) as session:
            assert session.global_step.value == 5
            assert life.diary.items == [0, 1, 2, 3, 4]


class Restoring:
    """A worker that restores late, and is held while it does."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.scope = anyio.CancelScope()
        self.has_left = anyio.Event()

    async def open(self) -> None:
        with self.scope:
            async with self.life.session(FeedHook(self.life.source, "x"), self.life.saver()):
                pass
        self.has_left.set()


async def test_model_and_step_are_restored_together_when_their_worker_is_cancelled(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path)
    restoring = Restoring(life)
    life.may_restore.close()
    async with life.session() as early, tasks() as group:
        group.start_soon(restoring.open)
        await life.may_restore.wait_for_arrival()
        restoring.scope.cancel()
        life.may_restore.open()
        await restoring.has_left.wait()
        assert (life.diary.items, early.global_step.value) == ([0, 1, 2], NUM_SAVED)
        await early.run([], {"x": 3})
        assert early.global_step.value == 4


@pytest.mark.parametrize("feeds", [False, True])
async def test_no_item_is_drawn_while_a_late_saver_restores(feeds: bool, tmp_path: Path) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path)
    restoring = Restoring(life)

    async def train(session: MonitoredSession) -> None:
        if feeds:
            await until_stopped(session)
        async for x in session.batches(life.source):
            await session.run([], {"x": x})

    life.may_restore.close()
    hooks = [FeedHook(life.source, "x")] if feeds else []
    async with life.session(*hooks) as early, tasks() as group:
        group.start_soon(restoring.open)
        await life.may_restore.wait_for_arrival()
        async with anyio.create_task_group() as training:
            training.start_soon(train, early)
            await settle()
            life.may_restore.open()
    assert life.diary.items == list(range(NUM_ITEMS))


async def test_a_stop_ends_the_wait_for_an_item_while_a_late_saver_restores(tmp_path: Path) -> None:
    await save_some(tmp_path)
    life = Life(tmp_path)
    restoring = Restoring(life)
    life.may_restore.close()
    async with life.session(FeedHook(life.source, "x")) as early, tasks() as group:
        group.start_soon(restoring.open)
        await life.may_restore.wait_for_arrival()
        group.start_soon(settle_and_stop, early)
        with pytest.raises(StopTraining, match="a stop was requested"):
            await early.run([])
        assert not restoring.has_left.is_set()
        life.may_restore.open()
        await restoring.has_left.wait()


async def settle_and_stop(session: MonitoredSession) -> None:
    await settle()
    session.request_stop("enough")
