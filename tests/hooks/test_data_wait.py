"""DataWaitHook: the share of waiting, in the log and in real event files."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks._engine.base import Engine
from asynchooks.data import prefetch

from .event_files import scalars
from .training import run_session
from .virtual_time import Writer, on_trampoline, pause

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def numbers(secs: float) -> AsyncIterator[int]:
    for number in range(40):
        if secs:
            await pause(secs)
        yield number


def step_of(secs: float) -> Callable[[int], Any]:
    async def step(x: int) -> dict[str, int]:
        if secs:
            await pause(secs)
        return {}

    return step


@pytest.mark.parametrize(
    ("source_secs", "step_secs", "share"), [(0.75, 0.25, 2 / 3), (0.5, 0.0, 1.0), (0.125, 0.5, 0.0)]
)
def test_the_share_is_that_of_the_time_that_the_step_does_not_cover(
    source_secs: float,
    step_secs: float,
    share: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = prefetch(numbers(source_secs), 2)
    hooks = [FeedHook(source, "x"), DataWaitHook(source, 10, output_dir=str(tmp_path))]
    creator = FunctionSessionCreator(step_of(step_secs))
    with caplog.at_level(logging.INFO, "asynchooks"):
        on_trampoline(lambda engine: run_session(hooks, creator, runs=31))
    assert list(scalars(tmp_path)) == ["data_wait"]
    values = scalars(tmp_path)["data_wait"]
    assert [step for step, _ in values] == [11, 21, 31]
    assert [value for _, value in values] == pytest.approx(3 * [share])
    lines = [each.getMessage() for each in caplog.records if "data wait" in each.getMessage()]
    assert lines == 3 * [f"data wait: {100 * share:.1f} % of the time"]


def test_it_counts_the_waits_of_a_loop_and_only_of_its_own_session() -> None:
    writers = [Writer(), Writer()]

    async def main(engine: Engine) -> None:
        source = prefetch(numbers(1.0), 1)
        creator = SharedSessionCreator(FunctionSessionCreator(step_of(0.25)))
        hooks = [DataWaitHook(source, None, 0.0, summary_writer=each) for each in writers]
        async with (
            MonitoredSession([hooks[0]], creator) as waits,
            MonitoredSession([hooks[1]], creator) as does_not,
        ):
            batches = waits.batches(source)
            for _ in range(3):
                await waits.run([], {"x": await anext(batches)})
                await does_not.run([], {"x": 0})

    on_trampoline(main)
    assert [value for _, value, _ in writers[0].written] == [0.5, 0.5]
    assert [value for _, value, _ in writers[1].written] == [0.0, 0.0]
    assert [writer.flushes for writer in writers] == [1, 1]


def test_the_waits_of_a_loop_that_was_closed_early_count() -> None:
    writer = Writer()

    async def main(engine: Engine) -> None:
        async with prefetch(numbers(1.0), 1) as source:
            waits = DataWaitHook(source, 1, summary_writer=writer)
            hooks = [InputPositionHook(source), waits]
            creator = FunctionSessionCreator(step_of(0.25))
            async with MonitoredSession(hooks, creator) as session:
                for _ in range(3):
                    batches = session.batches(source)
                    for _ in range(2):
                        await session.run([], {"x": await anext(batches)})
                    await batches.aclose()

    on_trampoline(main)
    assert [(step, value) for _, value, step in writer.written] == [
        (step, 0.75) for step in range(2, 7)
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_after_the_session_the_writer_is_flushed(fails: bool) -> None:
    source, writer = prefetch(numbers(1.0), 1), Writer()
    hook = DataWaitHook(source, 1, summary_writer=writer)

    async def main(engine: Engine) -> None:
        async with MonitoredSession([hook], FunctionSessionCreator(step_of(0.25))):
            if fails:
                raise KeyError("in the block")

    with pytest.raises(KeyError) if fails else nullcontext():
        on_trampoline(main)
    assert writer.flushes == 1


def test_a_clock_that_stands_still_gives_no_share() -> None:
    source, writer = prefetch(numbers(0.0), 1), Writer()
    hooks = [FeedHook(source, "x"), DataWaitHook(source, 1, summary_writer=writer)]
    creator = FunctionSessionCreator(step_of(0.0))
    on_trampoline(lambda engine: run_session(hooks, creator, runs=5))
    assert writer.written == []


@pytest.mark.anyio
@pytest.mark.parametrize("is_slow", [True, False])
async def test_in_real_time_slow_sources_differ_from_fast_ones(
    is_slow: bool, tmp_path: Path
) -> None:
    def source() -> Any:
        for number in range(50):
            if is_slow:
                time.sleep(0.01)
            yield number

    def step(x: int) -> dict[str, int]:
        if not is_slow:
            time.sleep(0.01)
        return {}

    stage = prefetch(source(), 4)
    hooks = [FeedHook(stage, "x"), DataWaitHook(stage, 10, output_dir=str(tmp_path))]
    await run_session(hooks, FunctionSessionCreator(step))
    values = scalars(tmp_path)["data_wait"]
    assert [step for step, _ in values] == [11, 21, 31, 41]
    assert all(0.0 <= share <= 1.0 for _, share in values)
    assert all(share > 0.5 if is_slow else share < 0.5 for _, share in values)


@pytest.mark.anyio
async def test_its_timer_goes_on_where_a_checkpoint_left_it() -> None:
    hook, other = DataWaitHook(prefetch([], 1), 10), DataWaitHook(prefetch([], 1), 10)
    hook._timer.update_last_triggered_step(7)
    other.load_state_dict(hook.state_dict())
    assert not other._timer.should_trigger_for_step(16)
    assert other._timer.should_trigger_for_step(17)


@pytest.mark.parametrize(
    ("is_shared", "every", "runs", "steps"),
    [(True, 1, 4, [2, 3, 4, 6, 7, 8]), (False, 5, 12, [6, 11, 6, 11])],
)
def test_a_second_session_starts_its_own_count_also_where_its_step_begins_at_0(
    is_shared: bool, every: int, runs: int, steps: list[int]
) -> None:
    writer = Writer()

    async def main(engine: Engine) -> None:
        alone = FunctionSessionCreator(step_of(0.5))
        creator = SharedSessionCreator(alone) if is_shared else alone
        async with prefetch(numbers(1.0), 1) as source, MonitoredSession([], creator):
            waits = DataWaitHook(source, every, summary_writer=writer)
            for _ in range(2):
                await run_session([FeedHook(source, "x"), waits], creator, runs=runs)

    on_trampoline(main)
    assert [(step, value) for _, value, step in writer.written] == [(step, 0.5) for step in steps]


def test_a_resumed_training_has_a_value_where_an_uninterrupted_one_has(tmp_path: Path) -> None:
    writer = Writer()

    async def main(engine: Engine) -> None:
        for last_step in (16, 38):
            source = prefetch(numbers(0.75), 1)
            hooks = [
                FeedHook(source, "x"),
                DataWaitHook(source, 10, summary_writer=writer),
                CheckpointSaverHook(tmp_path, save_secs=1e9, saver=StateDictSaver(w={"w": [0.0]})),
                StopAtStepHook(last_step=last_step),
            ]
            async with MonitoredSession(hooks, FunctionSessionCreator(step_of(0.25))) as session:
                while not session.should_stop():
                    await session.run([])

    on_trampoline(main)
    assert [step for _, _, step in writer.written] == [11, 21, 31]
