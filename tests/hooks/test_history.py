"""HistoryHook: rows in memory, in checkpoints, after recoveries, and their plot."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    HistoryHook,
    Metric,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.metrics import Histogram, steps_per_sec

from ..support.kept import Model
from .preemptions import saving
from .training import rows_of, run_session
from .virtual_time import pause, quarter_step, simulate


async def train(
    history: HistoryHook,
    last_step: int,
    model: Model | None = None,
    directory: Path | None = None,
    log: Callable[[MonitoredSession], object] = lambda session: None,
) -> HistoryHook:
    """Train to a step; after each run there is something to log."""
    model = model or Model()
    hooks: list[Any] = [history, StopAtStepHook(last_step=last_step)]
    if directory is not None:
        hooks.append(saving(directory, model, 10))
    async with MonitoredSession(hooks, model) as session:
        while not session.should_stop():
            await session.run([])
            log(session)
    return history


def steps(history: HistoryHook) -> list[int]:
    return [row["step"] for row in history.rows]


async def test_histograms_are_left_out_and_numbers_called_as_the_rows_own_are_renamed() -> None:
    values: dict[str, Any] = {"step": 9, "step_": 8, "secs": 7, "weights": Histogram.of([1.0, 2.0])}
    history = await train(HistoryHook(), 1, log=lambda session: session.log_metrics(values))
    assert rows_of(history) == [{"step": 1, "step_": 9.0, "step__": 8.0, "secs_": 7.0}]


def test_seconds_are_those_of_training() -> None:
    async def main() -> None:
        await pause(5.0)
        await run_session([history], quarter_step, runs=3)

    history = HistoryHook({"one": lambda: 1}, every_n_steps=1)
    simulate(main)
    assert [row["secs"] for row in history.rows] == [0.25, 0.5, 0.75]


async def test_a_resumed_history_has_each_step_once(tmp_path: Path) -> None:
    loss = Metric("loss", mode="min")
    whole, first, second = (HistoryHook([loss], every_n_steps=3) for _ in range(3))

    def interrupt(session: MonitoredSession) -> None:
        if session.global_step.value == 17:
            raise KeyError("the power is gone")

    await train(whole, 30)
    with pytest.raises(KeyError):
        await train(first, 30, directory=tmp_path, log=interrupt)
    await train(second, 30, directory=tmp_path)
    assert steps(first)[-2:] == [15, 17], "the last one is of the end"
    assert rows_of(second) == rows_of(whole)
    assert (second.names, list(second.rows[0])) == (["loss"], ["step", "secs", "loss"])
    secs = [row["secs"] for row in second.rows]
    assert secs == sorted(secs)


async def test_a_recovery_removes_the_rows_after_its_step(tmp_path: Path) -> None:
    history, seen = HistoryHook("loss", every_n_steps=1), []
    await train(history, 20, Model(15), tmp_path, lambda session: seen.append(steps(history)))
    assert steps(history) == list(range(1, 21))
    assert seen[13] == list(range(1, 15))
    assert seen[14] == list(range(1, 12)), "it went on from the checkpoint of step 10"


async def test_a_second_session_drops_the_rows_after_its_first_step() -> None:
    history, creator = HistoryHook("loss", every_n_steps=1), SharedSessionCreator(Model())
    async with MonitoredSession([], creator):  # keeps the step
        for last_step in (2, 4):
            await run_session([history], creator, to=last_step)
    assert steps(history) == [1, 2, 3, 4]
    assert steps(await train(history, 1)) == [1]


async def test_of_too_many_rows_every_second_is_dropped_and_the_newest_stays() -> None:
    history, newest = HistoryHook(["loss", steps_per_sec()], 1, max_rows=100), list[int]()
    await train(history, 300, log=lambda session: newest.append(steps(history)[-1]))
    assert 50 <= len(history.rows) <= 100
    assert newest == list(range(1, 301))
    assert steps(history) == sorted(set(steps(history)))


async def test_threads_may_log_at_once() -> None:
    def log(name: str) -> None:
        for value in range(200):
            session.log_metrics({f"{name} {value}": value})

    history = HistoryHook("loss", 1)
    async with MonitoredSession([history], Model()) as session:
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(anyio.to_thread.run_sync, log, name)
            for _ in range(50):
                await session.run([])
    assert steps(history) == sorted(set(steps(history)))
    assert len(history.names) == 601


def drawn(num: int) -> HistoryHook:
    history = HistoryHook("loss")
    history.rows[:] = [
        {"step": step, "secs": 0.1 * step, "loss": 1.0 / step, "accuracy": 1 - 1.0 / step}
        for step in range(1, num + 1)
    ]
    return history


def test_a_plot_has_axes_for_each_name_or_is_drawn_into_given_ones(tmp_path: Path) -> None:
    figures, history = pytest.importorskip("matplotlib.figure"), drawn(40)
    history.rows[5]["loss"] = math.inf
    figure: Any = history.plot(path=tmp_path / "loss.svg")
    loss, accuracy = figure.axes
    assert [each.get_ylabel() for each in figure.axes] == ["loss", "accuracy"]
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    assert len(loss.get_lines()[0].get_xdata()) == 39
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    assert figure._repr_png_().startswith(b"\x89PNG"), "as a notebook shows it"
    axes = figures.Figure().add_subplot()
    history.plot("accuracy", "loss", ax=axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["accuracy", "loss"]


def test_a_plot_names_what_there_is_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no row has a value 'los'; there are 'loss', 'accuracy'"):
        drawn(3).plot("los")
    assert len(HistoryHook("loss").plot("loss").axes) == 1, "before the first row"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[plot\]'"):
        drawn(3).plot()
