"""Workers that share a model and its input resume exactly, whichever of them opens first."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    InputPositionHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import Stage, prefetch

from .inputs import Diary, saving, until_stopped
from .lives import NUM_ITEMS, DiaryModel, Life
from .training import Calls, Holds, run_session, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("feeds", "num_turns", "holds_item"),
    [(True, 0, False), (True, 2, False), (True, 2, True), (False, 0, False), (False, 2, False)],
    ids=["feed", "feed-late", "feed-late-with-item", "loop", "loop-late"],
)
@pytest.mark.parametrize(
    ("num_workers", "saver_place"), [(n, place) for n in range(1, 9) for place in range(n)]
)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int,
    saver_place: int,
    feeds: bool,
    num_turns: int,
    holds_item: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model = DiaryModel()
        await Life(
            model, tmp_path, num_workers, saver_place,
            feeds=feeds, num_turns=num_turns, holds_item=holds_item, crashes_at=crashes_at,
        ).train()  # fmt: skip
    assert model.items == list(range(NUM_ITEMS))
    assert "have held an item" not in caplog.text


async def save_after(path: Path, num_items: int) -> None:
    """A checkpoint of a life that was trained with so many items."""
    diary = Diary()
    async with MonitoredSession([saving(path, diary)], diary.creator) as session:
        for item in range(num_items):
            await session.run([], {"x": item})


async def after_a_crash(path: Path) -> tuple[DiaryModel, Stage[int], SharedSessionCreator]:
    """What goes on from the checkpoint that a life has left at its step 4."""
    await Life(DiaryModel(), path, 1, 0, feeds=False, crashes_at=5).train()
    model = DiaryModel()
    return model, prefetch(range(NUM_ITEMS), 4), SharedSessionCreator(model.creator(path))


async def loop(
    session: MonitoredSession, source: Stage[int], has_item: anyio.Event, may_run: anyio.Event
) -> None:
    async with session:
        async for item in session.batches(source):
            has_item.set()
            await may_run.wait()
            await session.run([], {"x": item})


@pytest.mark.parametrize("others_stay", [True, False])
async def test_the_last_checkpoint_of_a_worker_that_ends_first_has_the_position_of_its_model(
    others_stay: bool, tmp_path: Path
) -> None:
    diary, others_ran, saved = Diary(), anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(diary.creator)
    source, ends = prefetch(range(9), 2), Holds("end", others_ran)

    async def train_beside() -> None:
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            await ends.has_come.wait()
            for _ in range(2):
                await session.run([])
            if others_stay:
                others_ran.set()
                await saved.wait()
        others_ran.set()

    hooks: list[SessionRunHook] = [FeedHook(source, "x"), ends, saving(tmp_path, diary)]
    async with anyio.create_task_group() as group:
        async with MonitoredSession(hooks, creator) as session:
            group.start_soon(train_beside)
            for _ in range(2):
                await session.run([])
            await anyio.wait_all_tasks_blocked()
        saved.set()
    again = Diary()
    hooks = [FeedHook(prefetch(range(9), 2), "x"), saving(tmp_path, again)]
    await run_session(hooks, again.creator)
    assert again.items == list(range(9))


@pytest.mark.parametrize("stays", [False, True])
async def test_the_final_checkpoint_holds_the_steps_made_until_its_own_worker_ended(
    stays: bool, tmp_path: Path
) -> None:
    diary, may_run, other_left = Diary(), anyio.Event(), anyio.Event()
    creator, source = SharedSessionCreator(diary.creator), prefetch(range(5), 2)
    holds = Holds("before_run", may_run)

    async def train_beside() -> None:
        await run_session([FeedHook(source, "x"), holds], creator)
        other_left.set()

    async with tasks() as group:
        hooks: list[SessionRunHook] = [FeedHook(source, "x"), saving(tmp_path, diary)]
        async with MonitoredSession(hooks, creator) as session:
            group.start_soon(train_beside)
            await holds.has_come.wait()
            with suppress(StopTraining):
                await until_stopped(session)
            assert diary.items == [1, 2, 3, 4]
            if stays:
                may_run.set()
                await other_left.wait()
        may_run.set()
    assert diary.items == [1, 2, 3, 4, 0]
    again = Diary()
    hooks = [FeedHook(prefetch(range(5), 2), "x"), saving(tmp_path, again)]
    async with MonitoredSession(hooks, again.creator) as session:
        assert again.items == ([1, 2, 3, 4, 0] if stays else [1, 2, 3, 4])
        await until_stopped(session)
    assert again.items == [1, 2, 3, 4, 0], "what the checkpoint lacks is trained in the next life"


async def test_a_worker_waits_for_one_that_may_restore_and_opens_with_it(tmp_path: Path) -> None:
    await save_after(tmp_path, 3)
    log: list[str] = []
    diary, may_begin = Diary(), anyio.Event()
    creator = SharedSessionCreator(diary.creator)

    async def work(name: str, hooks: list[SessionRunHook]) -> None:
        async with MonitoredSession(hooks, creator) as session:
            log.append(f"{name} at {session.global_step.value} with {diary.items}")

    async with anyio.create_task_group() as group:
        early: list[SessionRunHook] = [StopAtStepHook(num_steps=2)]
        group.start_soon(work, "early", early)
        group.start_soon(work, "saver", [Holds("begin", may_begin), saving(tmp_path, diary)])
        await anyio.wait_all_tasks_blocked()
        assert log == []
        may_begin.set()
    assert sorted(log) == ["early at 3 with [0, 1, 2]", "saver at 3 with [0, 1, 2]"]


@pytest.mark.parametrize("fails", [True, False])
async def test_no_worker_waits_for_a_saver_that_does_not_come(fails: bool, tmp_path: Path) -> None:
    async def refuse() -> None:
        await anyio.wait_all_tasks_blocked()
        if fails:
            raise OSError("no such disk")
        raise_cancelled.cancel()
        await anyio.sleep_forever()

    diary, raise_cancelled = Diary(), anyio.CancelScope()
    creator = SharedSessionCreator(diary.creator)
    has_run = anyio.Event()

    async def train() -> None:
        async with MonitoredSession([], creator) as session:
            if not fails:
                await session.run([], {"x": 1})
            has_run.set()

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        hooks = [Calls(begin=refuse), saving(tmp_path, diary)]
        with (
            raise_cancelled,
            pytest.raises(OSError, match="no such disk") if fails else nullcontext(),
        ):
            await MonitoredSession(hooks, creator).__aenter__()
        await has_run.wait()


async def test_a_run_whose_model_went_back_before_its_step_is_begun_again(tmp_path: Path) -> None:
    log: list[str] = []
    notes = Calls(
        before_run=lambda context: log.append(f"before {context.global_step.value}"),
        after_run=lambda context, values: log.append(f"after {context.global_step.value}"),
    )
    await save_after(tmp_path, 3)
    diary, may_go_on = Diary(), anyio.Event()
    creator, holds = SharedSessionCreator(diary.creator), Holds("before_run", may_go_on)
    hooks = [notes, holds]
    async with MonitoredSession(hooks, creator) as early, anyio.create_task_group() as group:
        group.start_soon(early.run, [], {"x": 7})
        await holds.has_come.wait()
        async with MonitoredSession([saving(tmp_path, diary)], creator):
            may_go_on.set()
            await early.global_step.wait_for(4)
    assert log == ["before 0", "before 3", "after 4"]
    assert diary.items == [0, 1, 2, 7]
    assert diary.num_calls == 1


async def test_a_step_fn_whose_model_went_back_before_its_step_is_called_again(
    tmp_path: Path,
) -> None:
    await save_after(tmp_path, 1)
    diary, is_held, may_go_on = Diary(), anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(diary.creator)
    calls = []

    async def step_fn(step_context: Any) -> None:
        calls.append(len(diary.items))
        is_held.set()
        await may_go_on.wait()
        await step_context.run_with_hooks([], {"x": 5})

    async with MonitoredSession([], creator) as early, anyio.create_task_group() as group:
        group.start_soon(early.run_step_fn, step_fn)
        await is_held.wait()
        async with MonitoredSession([saving(tmp_path, diary)], creator):
            may_go_on.set()
            await early.global_step.wait_for(2)
    assert calls == [0, 1]
    assert diary.items == [0, 5]


async def test_a_loop_that_begins_while_a_late_saver_waits_gets_no_item_before_it_has_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, source, creator = await after_a_crash(tmp_path)
    has_item, events = anyio.Event(), [anyio.Event() for _ in range(3)]
    saves = [InputPositionHook(source), model.saving(tmp_path)]
    async with tasks() as group:
        for hooks, may_run in zip(([], saves, []), events, strict=True):
            session = MonitoredSession(hooks, creator)
            group.start_soon(loop, session, source, has_item, may_run)
            await has_item.wait()
            await anyio.wait_all_tasks_blocked()  # the saver waits for the run with that item
        for event in events:
            event.set()
            await anyio.wait_all_tasks_blocked()
    assert model.items == list(range(NUM_ITEMS))
    assert "have held an item" not in caplog.text


async def test_a_late_saver_can_be_cancelled_while_others_hold_an_item(tmp_path: Path) -> None:
    model, source, creator = await after_a_crash(tmp_path)
    has_item, may_run = anyio.Event(), anyio.Event()
    scope, has_left = anyio.CancelScope(), anyio.Event()

    async def save() -> None:
        with scope:
            async with MonitoredSession([model.saving(tmp_path)], creator):
                raise AssertionError("it opened")
        has_left.set()

    async with tasks() as group:
        group.start_soon(loop, MonitoredSession([], creator), source, has_item, may_run)
        await has_item.wait()
        group.start_soon(save)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await has_left.wait()
        may_run.set()
    assert model.items == list(range(NUM_ITEMS))
