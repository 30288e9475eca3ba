"""CheckpointSaverHook on step functions: when it saves, by which metric, and what stays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MetricError,
    Mode,
    MonitoredSession,
    Retention,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.base import Engine, Slot
from asynchooks._engine.current import current_engine
from asynchooks.checkpoints import CheckpointDirectory

from ..savers import Cell, PlainSaver, saved
from ..virtual_time import on_trampoline

pytestmark = pytest.mark.anyio


async def pause(seconds: float) -> None:
    engine = current_engine()
    await engine.park(Slot(engine, "a pause"), engine.now() + seconds)


async def run_cell(hook: CheckpointSaverHook, cell: Cell, num_runs: int) -> None:
    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
        for _ in range(num_runs):
            await session.run([])


@pytest.mark.parametrize(
    ("num_runs", "save_steps", "steps"),
    [(0, 1, [0]), (1, 5, [0, 1]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 0, [0, 1, 2, 3])],
)
async def test_it_saves_at_creation_each_interval_and_once_at_the_end(
    num_runs: int, save_steps: int, steps: list[int], tmp_path: Path
) -> None:
    cell = Cell()
    saver = PlainSaver(cell)
    await run_cell(
        CheckpointSaverHook(tmp_path, save_steps=save_steps, saver=saver), cell, num_runs
    )
    assert saver.log == [f"{what} {step}" for step in steps for what in ("begin", "end")]


async def test_steps_are_counted_from_the_last_save_not_at_multiples(tmp_path: Path) -> None:
    for until, steps in ((4, [0, 3, 4]), (10, [6, 9, 10])):
        cell = Cell()
        saver = PlainSaver(cell)
        hooks = [
            CheckpointSaverHook(tmp_path, save_steps=3, saver=saver),
            StopAtStepHook(last_step=until),
        ]
        async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
            while not session.should_stop():
                await session.run([])
        assert [line for line in saver.log if "end" in line] == [f"end {step}" for step in steps]


async def test_steps_that_jump_are_saved_where_they_land(tmp_path: Path) -> None:
    cell = Cell()

    def jump() -> dict[str, int]:
        cell.value += 3
        return {"global_step": cell.value}

    hook = CheckpointSaverHook(tmp_path, save_steps=4, saver=PlainSaver(cell))
    async with MonitoredSession([hook], FunctionSessionCreator(jump)) as session:
        for _ in range(5):
            await session.run([])
    assert saved(tmp_path) == {step: str(step) for step in (0, 6, 12, 15)}


async def test_a_restored_step_is_there_for_the_hooks_that_count_from_it(tmp_path: Path) -> None:
    for _ in range(2):
        cell = Cell()
        saver = CheckpointSaverHook(tmp_path, save_steps=100, saver=PlainSaver(cell))
        hooks = [StopAtStepHook(num_steps=4), saver]
        async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
            while not session.should_stop():
                await session.run([])
    assert sorted(saved(tmp_path)) == [0, 4, 8]


async def test_training_that_has_reached_its_end_is_over_at_once(tmp_path: Path) -> None:
    for num_runs in (2, 0):
        cell = Cell()
        saver = CheckpointSaverHook(tmp_path, save_steps=100, saver=PlainSaver(cell))
        creator = FunctionSessionCreator(cell.step)
        async with MonitoredSession([saver, StopAtStepHook(last_step=2)], creator) as session:
            for _ in range(num_runs):
                await session.run([])
            assert session.should_stop()
    assert sorted(saved(tmp_path)) == [0, 2]


def test_seconds_are_those_of_the_engine_counted_from_the_last_save(tmp_path: Path) -> None:
    cell = Cell()

    async def step() -> dict[str, float]:
        await pause(0.75)
        return cell.step()

    async def main(engine: Engine) -> None:
        hook = CheckpointSaverHook(tmp_path, save_secs=2.0, saver=PlainSaver(cell))
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            for _ in range(7):
                await session.run([])

    on_trampoline(main)
    assert saved(tmp_path) == {step: str(step) for step in (0, 3, 6, 7)}
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert [each.seconds for each in found] == [0.0, 2.25, 4.5, 5.25]


def test_seconds_of_training_go_on_where_the_checkpoint_stood(tmp_path: Path) -> None:
    async def main(engine: Engine) -> None:
        for _ in range(2):
            cell = Cell()

            async def step(cell: Cell = cell) -> dict[str, float]:
                await pause(1.5)
                return cell.step()

            hook = CheckpointSaverHook(tmp_path, save_steps=10, saver=PlainSaver(cell))
            async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
                await session.run([])
            await pause(100.0)

    on_trampoline(main)
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert [(each.step, each.seconds) for each in found] == [(0, 0.0), (1, 1.5), (2, 3.0)]


def test_runs_that_do_not_end_are_saved_beside_after_half_a_minute_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell()
    saver = PlainSaver(cell)

    async def main(engine: Engine) -> None:
        is_slow = True

        async def step() -> dict[str, float]:
            nonlocal is_slow
            was_slow, is_slow = is_slow, False
            await pause(100.0 if was_slow else 1.0)
            return cell.step()

        shared = SharedSessionCreator(FunctionSessionCreator(step))

        async def slow() -> None:
            async with MonitoredSession([], shared) as session:
                await session.run([])

        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
        times = []
        async with MonitoredSession([hook], shared) as session:
            task = engine.start(slow)
            await pause(0.5)
            for _ in range(2):
                await session.run([])
                times.append(engine.now())
            await task.wait()
        assert times == [0.5 + 1 + 30, 0.5 + 1 + 30 + 1 + 1]

    with caplog.at_level(logging.WARNING, "asynchooks"):
        on_trampoline(main)
    assert "saved beside them" in caplog.text
    assert sorted(saved(tmp_path)) == [0, 1, 2, 3]


LOSSES = [0.5, 0.25, 0.75, 0.125, 0.875, 1.0]


def metric_hooks(
    path: Path, kind: str, retention: Retention
) -> tuple[Cell, Any, Callable[..., Any]]:
    """A cell, a hook that saves each step, and a step whose losses are those above."""
    cell = Cell()

    def step() -> dict[str, float]:
        cell.step()
        return {"loss": LOSSES[cell.value - 1]}

    metric: Any = {
        "name": "loss",
        "function": lambda: LOSSES[cell.value - 1] if cell.value else None,
    }[kind]
    saver = PlainSaver(cell)
    hook = CheckpointSaverHook(path, save_steps=1, saver=saver, retention=retention, metric=metric)
    return cell, hook, step


@pytest.mark.parametrize("kind", ["name", "function"])
@pytest.mark.parametrize(("mode", "best"), [(Mode.MIN, [2, 4]), (Mode.MAX, [3, 5])])
async def test_the_newest_and_the_best_stay_also_over_a_restart(
    kind: str, mode: Mode, best: list[int], tmp_path: Path
) -> None:
    retention = Retention(max_to_keep=1, keep_best=2, mode=mode)
    for num_runs in (5, 1):
        _, hook, step = metric_hooks(tmp_path, kind, retention)
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            for _ in range(num_runs):
                await session.run([])
    best = [5, 6] if mode is Mode.MAX else best
    assert sorted(saved(tmp_path)) == sorted({*best, 6})
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert {each.step: each.metric for each in found} == {i: LOSSES[i - 1] for i in {*best, 6}}


async def test_five_stay_unless_retention_says_otherwise(tmp_path: Path) -> None:
    for retention, steps in ((None, [2, 3, 4, 5, 6]), (Retention(max_to_keep=None), range(7))):
        cell, path = Cell(), tmp_path / str(retention is None)
        saver = PlainSaver(cell)
        hook = CheckpointSaverHook(path, save_steps=1, saver=saver, retention=retention)
        await run_cell(hook, cell, 6)
        assert sorted(saved(path)) == list(steps)


@pytest.mark.parametrize("kind", ["name", "function"])
async def test_a_metric_that_is_nan_leaves_the_run_and_nothing_is_saved_for_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LOSSES", [0.5, math.nan])
    _, hook, step = metric_hooks(tmp_path, kind, Retention(keep_best=1))
    with pytest.raises(MetricError, match="is NaN"):
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            for _ in range(2):
                await session.run([])
    assert sorted(saved(tmp_path)) == [0, 1]
