"""What hooks that keep values give at the end of a session, and how they begin the next one."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    HistoryHook,
    MetricsHook,
    MonitoredSession,
    ProgressHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.metrics import Histogram, histogram, mean, steps_per_sec
from asynchooks.simulation import Simulation

pytestmark = pytest.mark.anyio

Points = list[tuple[int, dict[str, Any]]]


def counting(num: int = 0) -> Callable[[], dict[str, Any]]:
    """A step whose loss is its number."""

    def step() -> dict[str, Any]:
        nonlocal num
        num += 1
        return {"loss": float(num), "weights": np.full(2, num)}

    return step


def points_of(history: HistoryHook) -> Points:
    return [
        (row["step"], {name: row[name] for name in row if name not in ("step", "secs")})
        for row in history.rows
    ]


async def train(hooks: list[Any], last_step: int, step: Any = None) -> None:
    creator = FunctionSessionCreator(step or counting())
    async with MonitoredSession([*hooks, StopAtStepHook(last_step=last_step)], creator) as session:
        while not session.should_stop():
            await session.run([])


class StopsAt(SessionRunHook):
    """Stops training by a hook's request, or by an error."""

    def __init__(self, step: int, error: Exception | None = None) -> None:
        self._step, self._error = step, error

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.step == self._step:
            if self._error is not None:
                raise self._error
            run_context.request_stop()


@pytest.mark.parametrize("last_step", [7, 25])
async def test_the_last_step_before_the_limit_is_given_with_all_its_values(last_step: int) -> None:
    points: Points = []
    wanted = {"loss": "loss", "mean": mean("loss"), "spread": histogram("weights")}
    history = HistoryHook({"loss": "loss", "mean": mean("loss")}, every_n_steps=10)
    sink = MetricsHook(lambda step, values: points.append((step, values)), wanted, 10)
    await train([sink, history], last_step)
    first_of_mean = last_step // 10 * 10 + 1 if last_step > 10 else 2
    last = {"loss": float(last_step), "mean": (first_of_mean + last_step) / 2}
    assert points_of(history)[-1] == (last_step, last)
    step, values = points[-1]
    spread = values.pop("spread")
    assert (step, values) == (last_step, last)
    assert isinstance(spread, Histogram)
    assert (spread.least, spread.greatest) == (last_step, last_step)


async def test_a_step_at_which_the_hook_was_due_is_not_given_again_at_the_end() -> None:
    points: Points = []
    history = HistoryHook("loss", every_n_steps=10)
    hook = MetricsHook(lambda step, values: points.append((step, values)), "loss", 10)
    await train([hook, history], 20)
    assert points == points_of(history) == [(step, {"loss": float(step)}) for step in (1, 10, 20)]


@pytest.mark.parametrize("error", [None, ZeroDivisionError("the model's")])
async def test_a_mean_of_a_part_of_the_interval_is_given_however_training_ends(
    error: Exception | None,
) -> None:
    points: Points = []
    history = HistoryHook(mean("loss"), every_n_steps=10)
    hook = MetricsHook(lambda step, values: points.append((step, values)), mean("loss"), 10)
    hooks = [hook, history, StopsAt(14, error)]
    if error is None:
        await train(hooks, 100)
    else:
        with pytest.raises(ZeroDivisionError):
            await train(hooks, 100)
    assert points == points_of(history)
    assert points[-2:] == [(10, {"loss": 6.0}), (14, {"loss": 12.5})]


async def test_a_session_without_a_run_since_it_opened_gives_nothing_at_its_end() -> None:
    points: Points = []
    values = {"mean": mean("loss"), "rate": lambda: 0.1}
    hook = MetricsHook(lambda step, given: points.append((step, given)), values, 10)
    async with MonitoredSession([hook], FunctionSessionCreator(counting())):
        pass
    assert points == []


def test_statistics_of_a_part_of_the_interval_are_not_given() -> None:
    simulation = Simulation(seed=1)

    async def step() -> dict[str, float]:
        await simulation.sleep(0.5)
        return {"loss": 1.0}

    history = HistoryHook(["loss", steps_per_sec()], every_n_steps=4)
    simulation.run(lambda: train([history], 6, step))
    assert points_of(history) == [
        (1, {"loss": 1.0, "steps_per_sec": 2.0}),
        (4, {"loss": 1.0, "steps_per_sec": 2.0}),
        (6, {"loss": 1.0}),
    ]


async def test_a_session_that_goes_on_from_the_end_has_the_means_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    weights = {"w": np.zeros(1)}

    def step() -> dict[str, float]:
        weights["w"] += 1
        return {"loss": float(weights["w"][0])}

    histories = [HistoryHook(mean("loss"), every_n_steps=10) for _ in range(2)]
    for history, last_step in zip(histories, (14, 20), strict=True):
        saver = StateDictSaver(model=weights)
        await train(
            [history, CheckpointSaverHook(str(tmp_path), save_steps=100, saver=saver)],
            last_step,
            step,
        )
    assert points_of(histories[0])[-1] == (14, {"loss": 12.5})
    assert points_of(histories[1]) == [
        (1, {"loss": 1.0}),
        (10, {"loss": 6.0}),
        (20, {"loss": 15.5}),
    ]


async def test_a_mean_begins_anew_in_the_next_session_of_the_hook() -> None:
    history = HistoryHook(mean("loss"), every_n_steps=10)
    for _ in range(2):
        await train([history], 12)
        assert points_of(history) == [(1, {"loss": 1.0}), (10, {"loss": 6.0}), (12, {"loss": 11.5})]


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_hooks_with_a_timer_are_due_as_often_in_a_second_session(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose model, and whose clock, begin at 0 again."""
    caplog.set_level(logging.INFO, "asynchooks")
    points: Points = []
    hooks: list[Any] = [
        MetricsHook(lambda step, values: points.append((step, values)), "loss", every_n_secs=5.0),
        HistoryHook("loss", every_n_secs=5.0),
        StepCounterHook(every_n_steps=5),
        StepCounterHook(every_n_steps=None, every_n_secs=5.0),
    ]
    seen = []
    for _ in range(2):
        simulation = Simulation(seed=1, backend=backend)
        inner = counting()

        async def step(simulation: Any = simulation, inner: Any = inner) -> dict[str, Any]:
            await simulation.sleep(1.0)
            return dict(inner())

        points.clear()
        caplog.clear()
        simulation.run(lambda step=step: train(hooks, 12, step))
        rates = [each.getMessage() for each in caplog.records if "/sec" in each.getMessage()]
        seen.append(([step for step, _ in points], [row["step"] for row in hooks[1].rows], rates))
    assert seen[0][:2] == ([1, 7, 12], [1, 7, 12])
    assert len(seen[0][2]) == 4
    assert seen[1] == seen[0]


async def test_a_value_that_is_no_number_in_the_last_step_leaves_the_end() -> None:
    def step() -> dict[str, Any]:
        return {"loss": 1.0 if next(steps) < 12 else "a text"}

    steps = iter(range(1, 100))
    with pytest.raises(ValueError, match="the metric 'loss' is 'a text'"):
        await train([HistoryHook("loss", every_n_steps=10)], 12, step)


@pytest.mark.parametrize("ends", ["data", "request"])
async def test_the_last_step_has_its_values_wherever_the_end_comes(ends: str) -> None:
    history = HistoryHook({"loss": "loss", "mean": mean("loss")}, every_n_steps=100)
    shown = io.StringIO()
    hooks: list[SessionRunHook] = [history, ProgressHook("loss", file=shown)]
    if ends == "data":
        hooks.append(FeedHook(range(130), "number"))
    async with MonitoredSession(hooks, lambda number=7: {"loss": number + 1.0}) as session:
        while not session.should_stop():
            await session.run([])
            if ends == "request" and session.global_step.value == 130:
                session.request_stop()
    assert points_of(history)[-1][0] == 130
    assert points_of(history)[-1][1]["loss"] == (130.0 if ends == "data" else 8.0)
    assert f"loss {130 if ends == 'data' else 8} " in shown.getvalue().splitlines()[-1]
