"""Workers that share a model and its input resume exactly, whichever of them saves."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, MonitoredSession, SharedSessionCreator
from asynchooks.data import prefetch

from .inputs import Diary, saving
from .lives import NUM_ITEMS, DiaryModel, Life
from .training import Calls, Holds, run_session

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]

IN_ANY_ORDER = [
    (num, place, {"feeds": feeds})
    for num in (1, 2, 3, 5, 8) for place in {0, num // 2, num - 1} for feeds in (True, False)
]  # fmt: skip
AFTER_THE_STEPS_OF_THE_SAVER: list[tuple[int, int, dict[str, Any]]] = [
    (num, 0, {"num_turns": 2, "feeds": feeds, "holds_item": holds_item})
    for num in (2, 3, 5, 8)
    for feeds, holds_item in ((True, False), (True, True), (False, False))
]


@pytest.mark.parametrize(
    ("num_workers", "saver_place", "options"), [*IN_ANY_ORDER, *AFTER_THE_STEPS_OF_THE_SAVER]
)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int, saver_place: int, options: Any, tmp_path: Path
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model = DiaryModel()
        options["crashes_at"] = crashes_at
        await Life(model, tmp_path, num_workers, saver_place, **options).train()
    assert model.items == list(range(NUM_ITEMS))


@pytest.mark.parametrize("others_stay", [True, False])
async def test_the_last_checkpoint_of_a_worker_that_ends_first_has_the_position_of_its_model(
    others_stay: bool, tmp_path: Path
) -> None:
    diary, others_ran, saved = Diary(), anyio.Event(), anyio.Event()
    creator = SharedSessionCreator(diary.step)
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

    async with anyio.create_task_group() as group:
        group.start_soon(train_beside)
        hooks = [FeedHook(source, "x"), ends, saving(tmp_path, diary)]
        await run_session(hooks, creator, runs=2)
        saved.set()
    again = Diary()
    hooks = [FeedHook(prefetch(range(9), 2), "x"), saving(tmp_path, again)]
    await run_session(hooks, again.step)
    assert again.items == list(range(9))


@pytest.mark.parametrize("fails", [True, False])
async def test_no_worker_waits_for_a_saver_that_does_not_come(fails: bool, tmp_path: Path) -> None:
    async def refuse() -> None:
        await anyio.wait_all_tasks_blocked()
        if fails:
            raise OSError("no such disk")
        scope.cancel()
        await anyio.sleep_forever()

    creator, scope, has_run = SharedSessionCreator(dict), anyio.CancelScope(), anyio.Event()

    async def train() -> None:
        await run_session([], creator, runs=0 if fails else 1)
        has_run.set()

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        with scope, pytest.raises(OSError, match="no such disk") if fails else nullcontext():
            await run_session([Calls(begin=refuse), saving(tmp_path, Diary())], creator)
        await has_run.wait()
