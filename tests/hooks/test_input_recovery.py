"""The input of a session that is lost: it goes back with the model, or goes on and says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import prefetch

from ..support.helpers import settle
from .inputs import (
    PIPELINES,
    SHORT_SECS,
    Counted,
    Diary,
    FromFunction,
    Gate,
    gated,
    items_of,
    saving,
)
from .savers import threads_left

pytestmark = pytest.mark.anyio


def lost_at(*calls: int) -> Diary:
    return Diary({call: PreemptionError("lost") for call in calls})


@pytest.mark.parametrize("kind", sorted(set(PIPELINES) - {"plain", "in a thread"}))
@pytest.mark.parametrize("background", [False, True])
async def test_the_input_goes_back_with_the_model(
    kind: str, background: bool, tmp_path: Path
) -> None:
    make = PIPELINES[kind]
    diary, source = lost_at(3, 11, 12), make(3)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary, background=background)]
    async with MonitoredSession(hooks, diary.creator, step_runner="inline") as session:
        while not session.should_stop():
            await session.run([])
    assert diary.items == await items_of(make(2))
    assert not threads_left()


@pytest.mark.parametrize("kind", ["plain", "in a thread"])
async def test_an_input_that_cannot_go_back_goes_on_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = PIPELINES[kind]
    expected, diary, source = await items_of(make(2)), lost_at(7), make(3)
    width = 2 if kind == "plain" else 1
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        async with MonitoredSession(hooks, diary.creator, step_runner="inline") as session:
            while not session.should_stop():
                await session.run([])
    # saved at 4; item 6 was in hand
    assert diary.items == expected[: 4 * width] + expected[6 * width :]
    text = "The model goes back to a checkpoint, and its input cannot: "
    lines = [each.getMessage() for each in caplog.records if text in each.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("It goes on with the next items")


async def test_a_model_that_goes_back_to_where_it_is_leaves_the_input_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = lost_at(5)
    hooks = [FeedHook(iter(range(9)), "x"), saving(tmp_path, diary)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        async with MonitoredSession(hooks, diary.creator) as session:
            while not session.should_stop():
                await session.run([])
    assert diary.items == list(range(9))
    assert "cannot" not in caplog.text


async def test_losses_before_and_right_after_the_way_back_and_twice_at_once(
    tmp_path: Path,
) -> None:
    diary = lost_at(1, 2, 7, 8, 9, 10, 14)
    hooks = [FeedHook(prefetch(range(20), 3), "x"), saving(tmp_path, diary)]
    recovery = Recovery(first_pause_secs=0.0)
    async with MonitoredSession(hooks, diary.creator, recovery=recovery) as session:
        while not session.should_stop():
            await session.run([])
    assert diary.items == list(range(20))


async def test_workers_go_back_together(tmp_path: Path) -> None:
    for call in (3, 6, 9, 13):
        diary, source = lost_at(call), prefetch(range(40), 3)
        creator = SharedSessionCreator(diary.creator)
        path = tmp_path / str(call)

        async def worker(place: int, diary: Diary, source: Any, creator: Any, path: Path) -> None:
            hooks: list[Any] = [FeedHook(source, "x")]
            hooks += [saving(path, diary)] if place == 0 else []
            async with MonitoredSession(hooks, creator, step_runner="inline") as session:
                while not session.should_stop():
                    await session.run([])
                    await anyio.lowlevel.checkpoint()

        with anyio.fail_after(SHORT_SECS):
            async with anyio.create_task_group() as group:
                for place in range(4):
                    group.start_soon(worker, place, diary, source, creator, path)
        assert sorted(diary.items) == list(range(40))


async def test_an_item_that_another_worker_waits_for_meanwhile_is_not_used_twice(
    tmp_path: Path,
) -> None:
    gate, diary = anyio.Event(), lost_at(3)
    source = prefetch(FromFunction(lambda: gated(range(6), {2: gate})), 1)
    creator = SharedSessionCreator(diary.creator)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary, every=100)]
    async with (
        MonitoredSession(hooks, creator, step_runner="inline") as saves,
        MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline") as waits,
        MonitoredSession([], creator, step_runner="inline") as loses,
    ):
        await saves.run([])
        await saves.run([])
        with anyio.fail_after(SHORT_SECS):
            async with anyio.create_task_group() as group:
                group.start_soon(waits.run, [])
                await settle()
                await loses.run([], {"x": 99})
                assert diary.items == [99], "it went back to the beginning, and ran again"
                gate.set()
        while not saves.should_stop():
            await saves.run([])
    assert sorted(diary.items) == [0, 1, 2, 3, 4, 5, 99]


async def test_a_checkpoint_of_another_worker_holds_as_many_items_as_steps(tmp_path: Path) -> None:
    source, diary, hold = prefetch(range(9), 3), Diary(), Gate()
    creator = SharedSessionCreator(diary.creator)
    hooks: list[Any] = [FeedHook(source, "x"), saving(tmp_path, diary, every=2)]
    async with (
        MonitoredSession([hold, FeedHook(source, "x")], creator, step_runner="inline") as slow,
        MonitoredSession(hooks, creator, step_runner="inline") as saves,
    ):
        hold.after = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(slow.run, [])
            await settle()
            await saves.run([])  # step 2, of which it writes a checkpoint
            hold.after.set()
        assert source.state_dict() == {"stage": "sequence", "items": 2}
    again, later = prefetch(range(9), 3), Diary()
    assert max(each.step for each in CheckpointDirectory(tmp_path).checkpoints()) == 2
    async with MonitoredSession(
        [FeedHook(again, "x"), saving(tmp_path, later)], later.creator
    ) as session:
        while not session.should_stop():
            await session.run([])
    assert sorted(later.items) == list(range(9))


@pytest.mark.parametrize("calls", [(7,), (3,), (3, 6), (1, 2), (7, 9)])
async def test_a_loop_over_batches_that_goes_back_uses_nothing_twice(
    calls: tuple[int, ...], tmp_path: Path
) -> None:
    source, diary = prefetch(range(12), 2), lost_at(*calls)
    hooks = [InputPositionHook(source), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        async for item in session.batches(source):
            await session.run([], {"x": item})
    assert sorted(diary.items) == list(range(12))


async def test_a_loop_over_batches_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    source, diary = prefetch(range(12), 2), lost_at(7)
    hooks = [InputPositionHook(source), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        async for item in session.batches(source):
            await session.run([], {"x": item})
    assert set(diary.items) == set(range(12))
    assert diary.items[:5] == [0, 1, 2, 3, 6], "the run that was lost is made again"


async def test_what_was_read_before_the_way_back_is_closed(tmp_path: Path) -> None:
    source, diary = Counted(9), lost_at(3)
    hooks = [FeedHook(prefetch(source, 2), "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        for _ in range(3):
            await session.run([])
        assert source.log == ["open", "closed", "open"]
    assert source.log == ["open", "closed", "open", "closed"]
    assert diary.items == [0], "the last run was made again"


async def test_a_save_that_waits_for_steps_does_not_hold_up_the_way_back_of_another_worker(
    tmp_path: Path,
) -> None:
    diary, events = Diary(), {"saves": anyio.Event(), "slow": anyio.Event()}
    errors = [PreemptionError("lost")]

    async def step(x: int) -> dict[str, Any]:
        if x == 1:
            await events["slow"].wait()
        if x == 2 and errors:
            raise errors.pop()
        return diary.step(x)

    class Waits(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            await events["saves"].wait()

    shared = SharedSessionCreator(FunctionSessionCreator(step))

    async with MonitoredSession([Waits(), saving(tmp_path, diary, every=1)], shared) as saves:
        async with MonitoredSession([], shared) as slow, MonitoredSession([], shared) as lost:
            with anyio.fail_after(SHORT_SECS):
                async with anyio.create_task_group() as group:
                    group.start_soon(saves.run, [], {"x": 0})
                    await anyio.wait_all_tasks_blocked()
                    group.start_soon(slow.run, [], {"x": 1})
                    await anyio.wait_all_tasks_blocked()
                    group.start_soon(lost.run, [], {"x": 2})
                    await anyio.wait_all_tasks_blocked()  # until the slow step has ended
                    for name in ("saves", "slow"):
                        events[name].set()
                        await anyio.wait_all_tasks_blocked()
    assert diary.items == [2]  # the others were made before the way back
