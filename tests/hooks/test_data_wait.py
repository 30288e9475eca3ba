"""DataWaitHook: the share of waiting, in the log and in real event files."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    DataWaitHook,
    FeedHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import prefetch

from .event_files import scalars
from .inputs import Diary, saving
from .training import run_session
from .virtual_time import Writer, pause, simulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def numbers(secs: float) -> AsyncIterator[int]:
    for number in range(40):
        await pause(secs)
        yield number


def step_of(secs: float) -> Callable[[int], Any]:
    async def step(x: int) -> dict[str, int]:
        await pause(secs)
        return {}

    return step


@pytest.mark.parametrize(
    ("source_secs", "step_secs", "shares"),
    [(0.75, 0.25, [2 / 3] * 3), (0.125, 0.5, [0.0] * 3), (0.0, 0.0, [])],
)
def test_the_share_is_that_of_the_time_that_the_step_does_not_cover(
    source_secs: float,
    step_secs: float,
    shares: list[float],
    tmp_path: Path,
) -> None:
    source = prefetch(numbers(source_secs), 2)
    hooks = [FeedHook(source, "x"), DataWaitHook(source, 10, output_dir=str(tmp_path))]
    simulate(lambda: run_session(hooks, step_of(step_secs), runs=31))
    values = scalars(tmp_path).get("data_wait", [])
    assert [step for step, _ in values] == [11, 21, 31][: len(shares)]
    assert [value for _, value in values] == pytest.approx(shares)


def test_it_counts_the_waits_of_loops_also_closed_ones_and_only_of_its_own_session() -> None:
    writers = [Writer(), Writer()]

    async def main() -> None:
        async with prefetch(numbers(1.0), 1) as source:
            creator = SharedSessionCreator(step_of(0.25))
            hooks = [DataWaitHook(source, None, 0.0, summary_writer=each) for each in writers]
            async with (
                MonitoredSession([hooks[0]], creator) as waits,
                MonitoredSession([hooks[1]], creator) as does_not,
            ):
                for _ in range(3):
                    batches = waits.batches(source)
                    await waits.run([], {"x": await anext(batches)})
                    await batches.aclose()
                    await does_not.run([], {"x": 0})

    simulate(main)
    assert [value for _, value, _ in writers[0].written] == [0.5, 0.5]
    assert [value for _, value, _ in writers[1].written] == [0.0, 0.0]
    assert [writer.flushes for writer in writers] == [1, 1]


def test_a_second_session_starts_its_own_count_also_where_its_step_begins_at_0() -> None:
    writer = Writer()

    async def main() -> None:
        async with prefetch(numbers(1.0), 1) as source:
            waits = DataWaitHook(source, 5, summary_writer=writer)
            for _ in range(2):
                await run_session([FeedHook(source, "x"), waits], step_of(0.5), runs=12)

    simulate(main)
    assert writer.written == [("data_wait", 0.5, step) for step in (6, 11, 6, 11)]


def test_a_resumed_training_has_a_value_where_an_uninterrupted_one_has(tmp_path: Path) -> None:
    writer = Writer()

    async def main() -> None:
        for last_step in (16, 38):
            source = prefetch(numbers(0.75), 1)
            hooks = [
                FeedHook(source, "x"),
                DataWaitHook(source, 10, summary_writer=writer),
                saving(tmp_path, Diary(), every=1000),
                StopAtStepHook(last_step=last_step),
            ]
            await run_session(hooks, step_of(0.25))

    simulate(main)
    assert [step for _, _, step in writer.written] == [11, 21, 31]
