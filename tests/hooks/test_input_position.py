"""The position in the input in checkpoints: what several lives are fed is what one would be."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    FeedHook,
    InputPositionHook,
    InputStateError,
    MonitoredSession,
    SharedSessionCreator,
)
from asynchooks.data import Stage, map_concurrent, prefetch, shuffle
from asynchooks.data._consumers import consumers_of_last_stage

from .inputs import PIPELINES, Diary, double, items_of, saving

pytestmark = pytest.mark.anyio
every_pipeline = pytest.mark.parametrize("kind", list(PIPELINES))


class CrashError(Exception):
    """Ends a life without a last checkpoint."""


async def live(
    path: Path,
    source: Any,
    num_steps: int,
    *,
    is_crash: bool = False,
    background: bool = False,
    by_loop: bool = False,
) -> Diary:
    """Resume, train for some steps, or to the end of the input, and end well or badly."""
    diary = Diary()
    hooks: list[Any] = [saving(path, diary, background=background)]
    hooks.insert(0, InputPositionHook(source) if by_loop else FeedHook(source, "x"))
    try:
        async with MonitoredSession(hooks, diary.creator, step_runner="inline") as session:
            if by_loop:
                async for item in session.batches(source):
                    if not num_steps:
                        break
                    await session.run([], {"x": item})
                    num_steps -= 1
            while not by_loop and num_steps:
                await session.run([])
                num_steps -= 1
            if is_crash:
                raise CrashError
    except CrashError:
        pass
    return diary


async def several_lives(
    path: Path, make: Callable[[int], Stage[Any]], seed: int, **how: bool
) -> list[int]:
    """What the model of the last life was trained with, all in all."""
    draw = random.Random(seed)
    for _ in range(4):
        steps, is_crash = draw.randrange(9), draw.random() < 0.5
        await live(path, make(draw.randrange(1, 9)), steps, is_crash=is_crash, **how)
    return (await live(path, make(3), 10_000, **how)).items


@pytest.mark.exhaustive
@every_pipeline
@pytest.mark.parametrize("background", [False, True])
async def test_several_lives_are_fed_what_one_would_be(
    kind: str, background: bool, tmp_path: Path
) -> None:
    make = PIPELINES[kind]
    expected = await items_of(make(2))
    for seed in range(2):
        path = tmp_path / str(seed)
        assert await several_lives(path, make, seed, background=background) == expected


@pytest.mark.exhaustive
@every_pipeline
async def test_several_lives_of_a_loop_over_batches_see_what_one_would(
    kind: str, tmp_path: Path
) -> None:
    make = PIPELINES[kind]
    expected = await items_of(make(2))
    for seed in range(2):
        path = tmp_path / str(seed)
        assert await several_lives(path, make, seed, by_loop=True) == expected


async def test_a_shuffle_itself_can_be_fed() -> None:
    diary = await resumed(shuffle(range(9), 4, seed=1))
    assert sorted(diary.items) == list(range(9))


async def test_items_used_out_of_order_are_in_the_state_and_are_not_fed_again() -> None:
    source = prefetch(range(6), 3)
    slow, fast = FeedHook(source, "x"), FeedHook(source, "x")
    diary = Diary({1: CrashError()})
    creator = SharedSessionCreator(diary.creator)
    async with MonitoredSession([slow], creator) as a, MonitoredSession([fast], creator) as b:
        with pytest.raises(CrashError):
            await a.run([])  # it has item 0 in hand
        await b.run([])
        await b.run([])
        state = json.loads(json.dumps(source.state_dict()))
        assert state == slow.state_dict() == fast.state_dict()
        assert state["used_beyond"] == [1, 2]
    assert diary.items == [1, 2]
    again = prefetch(range(6), 1)
    FeedHook(again).load_state_dict(state)
    assert (await resumed(again)).items == [0, 3, 4, 5]


async def test_a_stage_that_the_program_loads_feeds_nothing_twice() -> None:
    again = prefetch(range(6), 1)
    again.load_state_dict({"stage": "sequence", "items": 0, "used_beyond": [1, 2]})
    assert (await resumed(again)).items == [0, 3, 4, 5]


async def test_a_stage_that_the_program_loads_at_its_end_ends_training_cleanly() -> None:
    again = prefetch(range(6), 1)
    again.load_state_dict({"stage": "sequence", "items": 6})
    assert (await resumed(again)).items == []


async def test_a_checkpoint_at_the_end_of_the_input_ends_training_cleanly(tmp_path: Path) -> None:
    for _ in range(2):
        assert (await live(tmp_path, prefetch(range(6), 1), 99)).items == [0, 1, 2, 3, 4, 5]


async def resumed(source: Stage[Any]) -> Diary:
    diary = Diary()
    async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
        while not session.should_stop():
            await session.run([])
    return diary


async def test_an_item_that_was_drawn_and_not_used_is_behind_the_position() -> None:
    source = prefetch(range(9), 4)
    hook, diary = FeedHook(source, "x"), Diary({3: CrashError()})
    async with MonitoredSession([hook], diary.creator) as session:
        assert hook.state_dict() == {"stage": "sequence", "items": 0}
        await session.run([])
        await session.run([])
        assert hook.state_dict() == {"stage": "sequence", "items": 2}
        with pytest.raises(CrashError):
            await session.run([])
        assert hook.state_dict() == {"stage": "sequence", "items": 2}


async def test_a_batch_counts_as_used_when_the_run_behind_it_has_ended() -> None:
    source = prefetch(range(9), 4)
    hook, diary = InputPositionHook(source), Diary({2: CrashError()})
    async with MonitoredSession([hook], diary.creator) as session:
        batches = session.batches(source)
        await session.run([], {"x": await anext(batches)})
        assert hook.state_dict()["items"] == 1
        item = await anext(batches)
        assert hook.state_dict()["items"] == 1
        with pytest.raises(CrashError):
            await session.run([], {"x": item})
        assert hook.state_dict()["items"] == 1
        await session.run([], {"x": item})
        assert hook.state_dict()["items"] == 2


async def test_a_run_uses_the_items_of_its_own_session_s_loops_in_any_worker_s_hook() -> None:
    source = prefetch(range(9), 4)
    creator = SharedSessionCreator(Diary().creator)
    hook = InputPositionHook(source)
    async with MonitoredSession([hook], creator) as a, MonitoredSession([], creator) as b:
        await anext(a.batches(source))
        await anext(b.batches(source))
        await b.run([], {"x": 5})
        assert hook.state_dict() == {"stage": "sequence", "items": 0, "used_beyond": [1]}
        await a.run([], {"x": 5})
        assert hook.state_dict() == {"stage": "sequence", "items": 2}


async def test_a_pipeline_without_order_says_so_once_and_is_not_in_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = map_concurrent(double, range(20), 3, ordered=False)
    diary, hook = Diary(), FeedHook(source, "x")
    with caplog.at_level(logging.WARNING, "asynchooks"):
        async with MonitoredSession([hook, saving(tmp_path, diary)], diary.creator) as session:
            while not session.should_stop():
                await session.run([])
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 1
    assert "The position in the input is not saved: map_concurrent(..., ordered=False)" in str(
        warnings
    )
    assert hook.state_dict() == {}
    assert sorted(diary.items) == list(range(0, 40, 2))
    caplog.clear()
    again = map_concurrent(double, range(20), 3, ordered=False)
    assert sorted((await live(tmp_path, again, 10_000)).items) == sorted(2 * diary.items)


async def test_a_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    await live(tmp_path, prefetch(range(9), 1), 3)
    with pytest.raises(RuntimeError, match="FeedHook cannot go on .*the state is that of sequence"):
        await live(tmp_path, PIPELINES["epochs"](1), 3)
    with pytest.raises(InputStateError, match="the state is that of take"):
        FeedHook(prefetch(range(9), 1)).load_state_dict({"stage": "take", "taken": 1})


@pytest.mark.parametrize("source", [range(5), iter(()), None])
async def test_only_a_stage_can_be_watched(source: Any) -> None:
    for make in (
        InputPositionHook,
        lambda each: consumers_of_last_stage(each, "InputPositionHook"),
    ):
        with pytest.raises(TypeError, match="InputPositionHook got .*; give the stage that the se"):
            make(source)
