"""HistoryHook: rows in memory, in checkpoints, after recoveries, and their plot."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    HistoryHook,
    Metric,
    MetricError,
    MonitoredSession,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks._errors import PreemptionError
from asynchooks._running.hook_state import load_hooks, save_hooks
from asynchooks.metrics import Histogram, histogram, mean, steps_per_sec
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine

pytestmark = pytest.mark.anyio


class Model:
    """Counts its steps; `lost_at`: the steps whose first run is lost."""

    def __init__(self, *lost_at: int) -> None:
        self.state = {"step": 0}
        self.lost_at = set(lost_at)

    def step(self) -> dict[str, float]:
        step = self.state["step"] + 1
        if step in self.lost_at:
            self.lost_at.discard(step)
            raise PreemptionError("the machine is gone")
        self.state["step"] = step
        return {"loss": 1.0 / step}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


async def train(
    history: HistoryHook,
    last_step: int,
    model: Model | None = None,
    directory: Path | None = None,
    log: Callable[[MonitoredSession], object] = lambda session: None,
) -> None:
    model = model or Model()
    hooks: list[Any] = [history, StopAtStepHook(last_step=last_step)]
    if directory is not None:
        saver = StateDictSaver(model=model)
        hooks.append(CheckpointSaverHook(str(directory), save_steps=10, saver=saver))
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        while not session.should_stop():
            await session.run([])
            log(session)


def steps(history: HistoryHook) -> list[int]:
    return [row["step"] for row in history.rows]


async def test_a_metric_of_an_output_is_that_output() -> None:
    history = HistoryHook([Metric("loss", mode="min")], every_n_steps=4)
    await train(history, 4)
    assert [(row["step"], row["loss"]) for row in history.rows] == [(1, 1.0), (4, 0.25)]


async def test_rows_are_those_of_step_1_and_of_multiples() -> None:
    history = HistoryHook("loss", every_n_steps=4)
    await train(history, 10)
    losses = [(row["step"], row["loss"]) for row in history.rows]
    assert losses == [(1, 1.0), (4, 0.25), (8, 0.125), (10, 0.1)], "the last one is of the end"
    assert list(history.rows[0]) == ["step", "secs", "loss"]
    assert history.names == ["loss"]


async def test_what_is_logged_joins_the_row_of_its_step() -> None:
    history = HistoryHook("loss", every_n_steps=2)
    await train(history, 4, log=lambda session: session.log_metrics({"reward": 3}))
    assert [(row["step"], row.get("loss"), row["reward"]) for row in history.rows] == [
        (1, 1.0, 3.0), (2, 0.5, 3.0), (3, None, 3.0), (4, 0.25, 3.0)
    ]  # fmt: skip


async def test_the_first_number_of_a_name_and_step_is_kept() -> None:
    history = HistoryHook()

    def log(session: MonitoredSession) -> None:
        session.log_metrics({"reward": 1, "length": 5})
        session.log_metrics({"reward": 2})

    await train(history, 1, log=log)
    assert [(row["step"], row["reward"], row["length"]) for row in history.rows] == [(1, 1.0, 5.0)]


async def test_histograms_are_left_out_and_numbers_called_as_the_rows_own_are_renamed() -> None:
    history = HistoryHook()
    values: dict[str, Any] = {"step": 9, "step_": 8, "secs": 7, "weights": Histogram.of([1.0, 2.0])}
    await train(history, 1, log=lambda session: session.log_metrics(values))
    [row] = history.rows
    assert (row.pop("step"), row.pop("secs") < 7) == (1, True)
    assert row == {"step_": 9.0, "step__": 8.0, "secs_": 7.0}


async def test_a_row_that_was_read_is_not_changed_later() -> None:
    history, read = HistoryHook("loss", every_n_steps=1), []

    def log(session: MonitoredSession) -> None:
        read.append(history.rows[-1])
        session.log_metrics({"reward": 1})

    await train(history, 1, log=log)
    assert "reward" not in read[0]
    assert "reward" in history.rows[-1]


@on_every_engine
def test_seconds_are_those_of_training(backend: Any) -> None:
    simulation, history = Simulation(backend=backend), HistoryHook("loss", every_n_steps=1)

    async def step() -> dict[str, float]:
        await simulation.sleep(2.0)
        return {"loss": 0.5}

    async def main() -> None:
        await simulation.sleep(5.0)
        creator = FunctionSessionCreator(step)
        async with MonitoredSession([history, StopAtStepHook(last_step=3)], creator) as session:
            while not session.should_stop():
                await session.run([])

    simulation.run(main)
    assert [row["secs"] for row in history.rows] == [2.0, 4.0, 6.0]


async def test_a_resumed_history_has_each_step_once(tmp_path: Path) -> None:
    whole, first, second = (HistoryHook(["loss"], every_n_steps=3) for _ in range(3))
    await train(whole, 30)

    def interrupt(session: MonitoredSession) -> None:
        if session.global_step.value == 17:
            raise KeyError("the power is gone")

    with pytest.raises(KeyError):
        await train(first, 30, directory=tmp_path, log=interrupt)
    await train(second, 30, directory=tmp_path)

    assert steps(first)[-2:] == [15, 17], "the last one is of the end"
    assert steps(second) == steps(whole)
    assert [row["loss"] for row in second.rows] == [row["loss"] for row in whole.rows]
    secs = [row["secs"] for row in second.rows]
    assert secs == sorted(secs)


async def test_a_recovery_removes_the_rows_after_its_step(tmp_path: Path) -> None:
    history, seen = HistoryHook("loss", every_n_steps=1), []

    def look(session: MonitoredSession) -> None:
        seen.append(steps(history))

    await train(history, 20, Model(15), tmp_path, look)
    assert steps(history) == list(range(1, 21))
    assert seen[13] == list(range(1, 15))
    assert seen[14] == list(range(1, 12)), "it went on from the checkpoint of step 10"


async def test_a_second_session_drops_the_rows_after_its_first_step() -> None:
    history, model = HistoryHook("loss", every_n_steps=1), Model()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    async with MonitoredSession([], creator):  # keeps the step
        for last_step in (2, 4):
            hooks = [history, StopAtStepHook(last_step=last_step)]
            async with MonitoredSession(hooks, creator) as session:
                while not session.should_stop():
                    await session.run([])
    assert steps(history) == [1, 2, 3, 4]
    await train(history, 1)
    assert steps(history) == [1]


def rows(num: int, **values: float) -> list[dict[str, Any]]:
    return [{"step": step, "secs": 0.1 * step, **values} for step in range(1, num + 1)]


async def test_rows_come_back_from_a_state_as_they_were() -> None:
    history, other = HistoryHook("loss"), HistoryHook("loss")
    history.rows[:] = rows(6, loss=math.inf)
    history.rows[3]["accuracy"] = 0.5
    del history.rows[4]["loss"]
    load_hooks([other], save_hooks([history]))
    assert other.rows == history.rows
    assert all(type(row["step"]) is int and type(row["secs"]) is float for row in other.rows)


async def test_of_too_many_rows_every_second_is_dropped_and_the_newest_stays() -> None:
    history = HistoryHook(["loss", steps_per_sec()], every_n_steps=1, max_rows=100)
    await train(history, 1000)
    assert 50 <= len(history.rows) <= 100
    assert steps(history)[-1] == 1000
    assert steps(history) == sorted(set(steps(history)))


async def test_threads_may_log_at_once() -> None:
    history = HistoryHook("loss", every_n_steps=1)
    async with MonitoredSession([history], FunctionSessionCreator(Model().step)) as session:

        def log(name: str) -> None:
            for value in range(200):
                session.log_metrics({f"{name} {value}": value})

        threads = [threading.Thread(target=log, args=(f"thread {i}",)) for i in range(4)]
        for each in threads:
            each.start()
        for _ in range(50):
            await session.run([])
        for each in threads:
            each.join()
    assert steps(history) == sorted(set(steps(history)))
    for i in range(4):
        logged = [
            value for row in history.rows for name, value in row.items() if f"thread {i}" in name
        ]
        assert logged == list(range(200))


async def test_a_logged_value_reaches_it_while_the_session_opens_and_closes() -> None:
    history = HistoryHook()
    async with MonitoredSession([history], FunctionSessionCreator(Model().step)) as session:

        async def last_words() -> None:
            try:
                await session.global_step.wait_for(100)
            finally:
                session.log_metrics({"last": 1})

        session.start_soon(last_words)
        await anyio.lowlevel.checkpoint()
    assert [row["last"] for row in history.rows] == [1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"values": {"step": "loss"}}, ValueError, "a value is called 'step'"),
        ({"values": histogram("loss")}, TypeError, "keeps numbers, not histogram"),
        ({"values": "loss", "every_n_steps": "mae"}, TypeError, r"as a list: \['loss', 'mae'\]"),
        ({"values": ["loss", mean("loss")]}, ValueError, "HistoryHook was given two values called"),
        ({"max_rows": 1}, ValueError, "max_rows is 1"),
        ({"every_n_steps": 1, "every_n_secs": 1}, ValueError, "give at most one"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        HistoryHook(**arguments)


async def test_a_value_that_is_no_number_leaves_the_run() -> None:
    creator = FunctionSessionCreator(lambda: {"loss": "high"})
    async with MonitoredSession([HistoryHook("loss")], creator) as session:
        with pytest.raises(MetricError, match="the metric 'loss' is 'high'"):
            await session.run([])


def drawn(num: int) -> HistoryHook:
    history = HistoryHook("loss")
    history.rows[:] = [
        {"step": step, "secs": 0.1 * step, "loss": 1.0 / step, "accuracy": 1 - 1.0 / step}
        for step in range(1, num + 1)
    ]
    return history


def points(line: Any) -> tuple[list[float], list[float]]:
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def test_a_plot_has_axes_for_each_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = drawn(40)
    history.rows[5]["loss"] = math.nan
    figure = history.plot(path=tmp_path / "loss.svg")
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    (line,) = loss.get_lines()
    assert points(line)[0] == [step for step in range(1, 41) if step != 6]
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    shown: Any = figure
    assert shown._repr_png_().startswith(b"\x89PNG"), "as a notebook shows it"


def test_a_plot_into_axes_names_its_lines() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    axes = figure.add_subplot()
    assert drawn(10).plot("accuracy", "loss", ax=axes) is figure
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["accuracy", "loss"]


def test_a_plot_names_what_there_is() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no row has a value 'los'; there are 'loss', 'accuracy'"):
        drawn(3).plot("los")
    assert len(HistoryHook("loss").plot("loss").axes) == 1, "before the first row"
    assert len(HistoryHook("loss").plot().axes) == 1


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[plot\]'"):
        drawn(3).plot()
