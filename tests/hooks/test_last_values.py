"""What hooks that keep values give at the end of a session, and how they begin the next one."""

import io
import logging
from contextlib import suppress
from typing import Any

import pytest

from asynchooks import (
    FeedHook,
    HistoryHook,
    MetricsHook,
    ProgressHook,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.metrics import mean

from ..support.kept import Model
from ..support.moments import at
from .training import rows_of, run_session
from .virtual_time import pause, simulate


class Points(list[tuple[int, dict[str, Any]]]):
    """What a MetricsHook has given."""

    def hook(self, values: Any, *interval: Any, **options: Any) -> MetricsHook:
        return MetricsHook(
            lambda step, given: self.append((step, dict(given))), values, *interval, **options
        )


def points_of(history: HistoryHook) -> list[tuple[int, dict[str, Any]]]:
    return [(row.pop("step"), row) for row in rows_of(history)]


async def train(hooks: list[Any], last_step: int, step: Any = None) -> None:
    await run_session([*hooks, StopAtStepHook(last_step=last_step)], step or Model())


@pytest.mark.parametrize(("last_step", "of_mean"), [(7, 4.5), (20, 15.5), (25, 23.0)])
async def test_the_last_step_before_the_limit_is_given_once_with_all_its_values(
    last_step: int, of_mean: float
) -> None:
    wanted = {"loss": "loss", "mean": mean("loss")}
    points, history = Points(), HistoryHook(wanted, 10)
    await train([points.hook(wanted, 10), history], last_step)
    expected = (last_step, {"loss": float(last_step), "mean": of_mean})
    assert points[-1] == points_of(history)[-1] == expected
    assert [each[0] for each in points].count(last_step) == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError("the model's")])
async def test_a_mean_of_a_part_of_the_interval_is_given_however_training_ends(
    error: Exception | None,
) -> None:
    def end(run_context: Any, run_values: Any) -> None:
        if run_context.step == 14:
            if error is not None:
                raise error
            run_context.request_stop()

    points, history = Points(), HistoryHook(mean("loss"), every_n_steps=10)
    with suppress(ZeroDivisionError):
        await train([points.hook(mean("loss"), 10), history, at(after_run=end)], 100)
    assert points == points_of(history)
    assert points[-2:] == [(10, {"loss": 6.0}), (14, {"loss": 12.5})]


async def test_a_session_without_a_run_since_it_opened_gives_nothing_at_its_end() -> None:
    points = Points()
    await run_session([points.hook({"mean": mean("loss"), "rate": lambda: 0.1}, 10)], runs=0)
    assert points == []


def test_hooks_with_a_timer_are_due_as_often_in_a_second_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whose model, and whose clock, begin at 0 again."""

    async def step() -> dict[str, Any]:
        await pause(1.0)
        return {"loss": 0.5}

    caplog.set_level(logging.INFO, "asynchooks")
    points, history = Points(), HistoryHook("loss", every_n_secs=5.0)
    counters = [StepCounterHook(5), StepCounterHook(None, 5.0)]
    hooks = [points.hook("loss", every_n_secs=5.0), history, *counters]
    for num_sessions in (1, 2):
        points.clear()
        simulate(lambda: train(hooks, 12, step))
        assert [each[0] for each in points] == [row["step"] for row in history.rows] == [1, 7, 12]
        assert caplog.text.count("/sec") == 4 * num_sessions


async def test_the_last_step_has_its_values_where_the_data_end() -> None:
    history, shown = HistoryHook("loss", every_n_steps=100), io.StringIO()
    hooks = [history, ProgressHook("loss", file=shown), FeedHook(range(130), "number")]
    await run_session(hooks, lambda number: {"loss": number + 1.0})
    assert points_of(history)[-1] == (130, {"loss": 130.0})
    assert "loss 130 " in shown.getvalue().splitlines()[-1]
