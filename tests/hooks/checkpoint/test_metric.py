"""CheckpointSaverHook on step functions: metrics that are missing or are no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    FetchError,
    FunctionSessionCreator,
    MetricError,
    MonitoredSession,
    Retention,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..savers import Cell, PlainSaver, saved

pytestmark = pytest.mark.anyio


def metrics_of(path: Path) -> dict[int, float | None]:
    return {each.step: each.metric for each in CheckpointDirectory(path).checkpoints()}


@pytest.mark.parametrize("value", ["low", None, [1.0, 2.0]])
async def test_a_metric_that_is_no_number_leaves_the_run(value: Any, tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(Cell()), metric="loss")
    with pytest.raises(MetricError, match=r"the metric 'loss' is .*; give one number"):
        async with MonitoredSession([hook], FunctionSessionCreator(lambda: {"loss": value})) as run:
            await run.run([])


async def test_a_metric_that_the_step_does_not_give_names_it(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(Cell()), metric="loss")
    with pytest.raises(FetchError, match="'loss' is not among the step function's outputs"):
        async with MonitoredSession([hook], FunctionSessionCreator(dict)) as session:
            await session.run([])


async def test_what_is_not_known_yet_is_saved_without_a_metric(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=PlainSaver(Cell()), metric=lambda: None,
        retention=Retention(max_to_keep=1, keep_best=1),
    )  # fmt: skip
    async with MonitoredSession([hook], FunctionSessionCreator(dict)) as session:
        await session.run([])
    assert metrics_of(tmp_path) == {1: None}


async def test_an_error_of_the_metric_leaves_as_itself_and_the_step_is_due_again(
    tmp_path: Path,
) -> None:
    asked: Iterator[Any] = iter([0.0, ZeroDivisionError("no examples"), 2.0])

    def measure() -> float:
        found: float = next(asked)
        if isinstance(found, Exception):
            raise found
        return found

    cell = Cell()
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(cell), metric=measure)
    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
        with pytest.raises(ZeroDivisionError, match="no examples"):
            await session.run([])
    assert metrics_of(tmp_path) == {0: 0.0, 1: 2.0}


async def test_infinities_are_metrics(tmp_path: Path) -> None:
    cell = Cell()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=PlainSaver(cell), metric=lambda: math.inf
    )
    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)):
        pass
    assert metrics_of(tmp_path) == {0: math.inf}


async def test_a_step_whose_metric_was_nan_is_not_saved_with_that_of_the_step_before(
    tmp_path: Path,
) -> None:
    losses = iter([0.5, math.nan])
    cell = Cell()

    def step() -> dict[str, float]:
        cell.step()
        return {"loss": next(losses)}

    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(cell), metric="loss")
    with pytest.raises(MetricError, match="'loss' is NaN"):
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            await session.run([])
            with pytest.raises(MetricError, match="'loss' is NaN"):
                await session.run([])
    assert metrics_of(tmp_path).keys() == {0}


def test_keeping_the_best_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r'keep_best=1.* needs a metric; give metric="loss"'):
        CheckpointSaverHook(tmp_path, save_steps=1, retention=Retention(keep_best=1))


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="when_busy is 'skip'; give WhenBusy"):
        CheckpointSaverHook(tmp_path, save_steps=1, when_busy="skip")  # type: ignore[arg-type]
    assert len(WhenBusy) == 3
    assert saved(tmp_path) == {}
