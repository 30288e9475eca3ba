"""Workers that share a model and its input resume exactly, whichever of them saves."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path

import anyio
import pytest

from asynchooks import (
    FeedHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import prefetch

from .inputs import Diary, saving, until_stopped
from .lives import NUM_ITEMS, DiaryModel, Life
from .training import Calls, Holds, run_session, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]


async def check_lives(
    path: Path,
    num_workers: int,
    saver_place: int = 0,
    *,
    feeds: bool,
    num_turns: int = 0,
    holds_item: bool = False,
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model = DiaryModel()
        await Life(
            model,
            path,
            num_workers,
            saver_place,
            feeds=feeds,
            num_turns=num_turns,
            holds_item=holds_item,
            crashes_at=crashes_at,
        ).train()
    assert model.items == list(range(NUM_ITEMS))


@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
@pytest.mark.parametrize(
    ("num_workers", "saver_place"), [(n, place) for n in range(1, 9) for place in range(n)]
)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int, saver_place: int, feeds: bool, tmp_path: Path
) -> None:
    await check_lives(tmp_path, num_workers, saver_place, feeds=feeds)


@pytest.mark.parametrize(
    ("feeds", "holds_item"),
    [(True, False), (True, True), (False, False)],
    ids=["feed", "feed-with-item", "loop"],
)
@pytest.mark.parametrize("num_workers", range(2, 9))
async def test_each_item_is_trained_once_where_workers_open_after_the_steps_of_the_saver(
    num_workers: int, feeds: bool, holds_item: bool, tmp_path: Path
) -> None:
    await check_lives(tmp_path, num_workers, feeds=feeds, num_turns=2, holds_item=holds_item)


async def save_after(path: Path, num_items: int) -> None:
    """A checkpoint of a life that was trained with so many items."""
    diary = Diary()
    async with MonitoredSession([saving(path, diary)], diary.creator) as session:
        for item in range(num_items):
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
