"""The position in the input: in checkpoints, after a loss, in long inputs, and of workers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    InputPositionHook,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
)
from asynchooks.data import batch, map_concurrent, prefetch, shuffle, take

from ..support.helpers import in_task, settle
from ..support.threads import threads_left
from .inputs import (
    PIPELINES,
    Diary,
    double,
    gated,
    items_of,
    saving,
    trained_in_lives,
    trained_with,
    until_stopped,
)
from .training import run_session

feed_or_loop = pytest.mark.parametrize("by_loop", [False, True])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(PIPELINES))
async def test_several_lives_are_fed_what_one_would_be(kind: str, tmp_path: Path) -> None:
    last = await trained_in_lives(PIPELINES[kind], tmp_path, 2, 2, 7, 8, 15, 999)
    assert last.items == await items_of(PIPELINES[kind](2))


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_worker_whose_items_come_again_says_so(
    is_shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another session saves the model, with the position of its own stage."""
    diary = Diary()
    creator, first = SharedSessionCreator(diary.creator), prefetch(range(8), 1)
    second = first if is_shared else prefetch(range(8, 16), 1)
    hooks = [FeedHook(first, "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, creator) as chief:
        async with MonitoredSession([FeedHook(second, "x")], creator) as worker:
            for _ in range(3):
                await chief.run([])
                await worker.run([])
    said = [each for each in caplog.messages if "position is in no checkpoint" in each]
    assert len(said) == (not is_shared)


async def test_a_pipeline_without_order_says_so_once_and_is_not_in_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, same = (map_concurrent(double, range(20), 3, ordered=False) for _ in range(2))
    diary = await trained_with(source, tmp_path)
    [warning] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "The position in the input is not saved: map_concurrent(..., ordered=False)" in warning
    assert sorted(diary.items) == list(range(0, 40, 2))
    assert sorted((await trained_with(same, tmp_path)).items) == sorted(2 * diary.items)


async def test_a_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    await trained_with(prefetch(range(9), 1), tmp_path, 3)
    with pytest.raises(InputStateError, match="the state is that of sequence") as refused:
        await trained_with(PIPELINES["epochs"](1), tmp_path)
    assert "in the saved state of the hook FeedHook" in str(refused.value.__notes__)


class Thing:
    """An item that says how many of its kind are remembered."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


def things() -> Iterator[Thing]:
    while True:
        yield Thing()


@pytest.mark.parametrize("by_loop", [True, False])
async def test_long_inputs_leave_no_more_behind_than_a_few_items(by_loop: bool) -> None:
    most: list[int] = []
    Thing.alive.clear()

    def step(x: Any) -> dict[str, Any]:
        most.append(len(Thing.alive))
        return {}

    source = take(prefetch(batch(shuffle(things, 5, 1), 4), 2), 200)
    hook: Any = InputPositionHook(source) if by_loop else FeedHook(source, "x")
    async with MonitoredSession([hook], step, step_runner="inline") as session:
        if by_loop:
            async for item in session.batches(source):
                await session.run([], {"x": item})
        else:
            await until_stopped(session)
    assert len(most) == 200
    assert 0 < max(most) <= 40


def lost_at(*calls: int) -> Diary:
    return Diary({call: PreemptionError("lost") for call in calls})


@pytest.mark.parametrize("kind", sorted(set(PIPELINES) - {"plain", "in a thread"}))
@pytest.mark.parametrize(
    ("calls", "background"), [((3, 11, 12), True), ((1, 2, 7, 8, 9, 10, 14), False)]
)
async def test_the_input_goes_back_with_the_model(
    kind: str, background: bool, calls: tuple[int, ...], tmp_path: Path
) -> None:
    """Also where losses follow each other, and right after the way back."""
    make, diary = PIPELINES[kind], lost_at(*calls)
    hooks = [FeedHook(make(3), "x"), saving(tmp_path, diary, background=background)]
    recovery = Recovery(first_pause_secs=0.0)
    await run_session(hooks, diary.creator, step_runner="inline", recovery=recovery)
    assert diary.items == await items_of(make(2))
    assert not threads_left()


@pytest.mark.parametrize("kind", ["plain", "in a thread"])
async def test_an_input_that_cannot_go_back_goes_on_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = PIPELINES[kind]
    expected, diary, width = await items_of(make(2)), lost_at(7), 2 if kind == "plain" else 1
    hooks = [FeedHook(make(3), "x"), saving(tmp_path, diary)]
    await run_session(hooks, diary.creator, step_runner="inline")
    # saved at 4; item 6 was in hand
    assert diary.items == expected[: 4 * width] + expected[6 * width :]
    text = "The model goes back to a checkpoint, and its input cannot: "
    assert caplog.text.count(text) == caplog.text.count("It goes on with the next items") == 1


async def test_a_model_that_goes_back_to_where_it_is_leaves_the_input_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = await trained_with(iter(range(9)), tmp_path, errors=lost_at(5).errors)
    assert diary.items == list(range(9))
    assert "cannot" not in caplog.text


@pytest.mark.parametrize("calls", [(7,), (3, 6), (1, 2)])
async def test_a_loop_over_batches_that_goes_back_uses_nothing_twice(
    calls: tuple[int, ...], tmp_path: Path
) -> None:
    source, errors = prefetch(range(12), 2), lost_at(*calls).errors
    diary = await trained_with(source, tmp_path, errors=errors, by_loop=True)
    assert sorted(diary.items) == list(range(12))


async def test_an_item_that_another_worker_waits_for_is_not_used_twice(tmp_path: Path) -> None:
    gate, diary = anyio.Event(), lost_at(3)
    source = prefetch(lambda: gated(range(6), {2: gate}), 1)
    creator = SharedSessionCreator(diary.creator)
    hooks = [FeedHook(source, "x"), saving(tmp_path, diary, every=100)]
    async with (
        MonitoredSession(hooks, creator, step_runner="inline") as saves,
        MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline") as waits,
        MonitoredSession([], creator, step_runner="inline") as loses,
    ):
        await saves.run([])
        await saves.run([])
        async with in_task(waits.run, []):
            await loses.run([], {"x": 99})
            assert diary.items == [99], "it went back to the beginning, and ran again"
            await saves.run([])
            await settle()
            assert sorted(diary.items) == [0, 1, 99], "the other one waits no longer"
            gate.set()
        await until_stopped(saves)
    assert sorted(diary.items) == [0, 1, 2, 3, 4, 5, 99]
