"""The step that a value belongs to: that of its run or evaluation, however late it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FunctionSessionCreator,
    GlobalStep,
    HistoryHook,
    LoggingTensorHook,
    MetricsHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.metrics import CsvSink, JsonLinesSink, Point, Sink, TensorBoardSink

from ..metrics.readers import json_lines, rows, steps_shown

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Kept(Sink):
    """Keeps what it is given, as (step, name, value)."""

    def __init__(self) -> None:
        self.given: list[tuple[int, str, Any]] = []
        self.has_reward = threading.Event()

    def write(self, point: Point) -> None:
        self.given += [(point.step, name, value) for name, value in point.values.items()]
        if "reward" in point.values:
            self.has_reward.set()

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(step, value) for step, each, value in self.given if each == name]


def of_rows(history: HistoryHook, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in history.rows if name in row]


def counting(num: int = 0) -> Callable[[], dict[str, float]]:
    """A step whose loss is the global step that its call makes."""

    def step() -> dict[str, float]:
        nonlocal num
        num += 1
        return {"loss": float(num)}

    return step


class LateEvaluation:
    """Evaluations that end at a later step than they began at: at these, by the step of theirs."""

    def __init__(self, ends: dict[int, int], **options: Any) -> None:
        self._ends = ends
        self.hook = EvaluationHook(self._evaluate, at_end=False, **options)
        self.metric = self.hook.metric("at")

    async def _evaluate(self, session: Any, step: int) -> dict[str, float]:
        if step not in self._ends:
            raise StopTraining("it counts as not finished")
        await session.global_step.wait_for(self._ends[step])
        return {"at": float(step)}


class Pauses(SessionRunHook):
    """Lets all other tasks run after each step, so that what waits for a step has it."""

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        for _ in range(10):
            await anyio.lowlevel.checkpoint()


async def train(hooks: list[Any], last_step: int, step: Any = None) -> MonitoredSession:
    hooks = [*hooks, Pauses(), StopAtStepHook(last_step=last_step)]
    creator = FunctionSessionCreator(step or counting())
    async with MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            await session.run("loss")
    return session


async def test_an_evaluation_that_ends_later_is_of_the_step_that_was_evaluated() -> None:
    evaluation, sink = LateEvaluation({4: 7, 8: 11}, every_n_steps=4), Kept()
    history = HistoryHook(["loss", evaluation.metric], every_n_steps=1)
    metrics = MetricsHook(sink, ["loss", evaluation.metric], every_n_steps=1)
    await train([evaluation.hook, metrics, history], 11)
    every_step = [(step, float(step)) for step in range(1, 12)]
    assert sink.of("loss") == every_step
    assert sink.of("eval/at") == [(4, 4.0), (8, 8.0)]
    assert of_rows(history, "loss") == every_step
    assert of_rows(history, "eval/at") == [(4, 4.0), (8, 8.0)]
    assert metrics.num_dropped == 0


async def test_a_late_value_of_a_step_without_a_row_gets_its_own_row_in_its_place() -> None:
    evaluation = LateEvaluation({4: 7}, every_n_steps=4)
    history = HistoryHook(["loss", evaluation.metric], every_n_steps=3)
    await train([evaluation.hook, history], 7)
    found = [{name: row[name] for name in row if name != "secs"} for row in history.rows]
    assert found == [
        {"step": 1, "loss": 1.0}, {"step": 3, "loss": 3.0}, {"step": 4, "eval/at": 4.0},
        {"step": 6, "loss": 6.0}, {"step": 7, "loss": 7.0},
    ]  # fmt: skip


async def test_of_two_values_of_one_name_and_step_the_first_stays_and_other_names_join() -> None:
    sink = Kept()
    history = HistoryHook("loss", every_n_steps=1)
    hooks = [MetricsHook(sink, "loss", every_n_steps=1), history, StopAtStepHook(last_step=2)]
    async with MonitoredSession(hooks, FunctionSessionCreator(counting())) as session:
        await session.run("loss")
        session.log_metrics({"loss": 7.0, "reward": 1.0})
        # once the point is written, nothing can join it any more
        assert await anyio.to_thread.run_sync(sink.has_reward.wait, 10)
        session.log_metrics({"loss": 8.0, "reward": 2.0, "length": 3.0})
        await session.run("loss")
    assert sorted(sink.given) == [
        (1, "length", 3.0), (1, "loss", 1.0), (1, "reward", 1.0), (2, "loss", 2.0),
    ]  # fmt: skip
    row = {name: value for name, value in history.rows[0].items() if name != "secs"}
    assert row == {"step": 1, "loss": 1.0, "reward": 1.0, "length": 3.0}


@pytest.mark.parametrize("num_hooks", [1, 4])
async def test_values_of_each_worker_are_of_the_step_that_its_own_run_made(num_hooks: int) -> None:
    step_here = counting()

    async def step() -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return step_here()

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=4)
    sinks = [Kept() for _ in range(num_hooks)]
    histories = [HistoryHook("loss", every_n_steps=1) for _ in sinks]

    async def work(number: int) -> None:
        hooks: list[Any] = [Pauses(), StopAtStepHook(last_step=40)]
        if number < num_hooks:
            hooks.insert(1, MetricsHook(sinks[number], "loss", every_n_steps=1))
            hooks.insert(1, histories[number])
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(work, number)
    for sink, history in zip(sinks, histories, strict=True):
        assert sink.of("loss") == of_rows(history, "loss")
        assert all(step == loss for step, loss in sink.of("loss"))
    if num_hooks == 4:
        found = sorted(step for sink in sinks for step, _ in sink.of("loss"))
        assert found == list(range(1, 41))


async def test_lines_of_the_log_have_the_step_of_the_workers_own_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynchooks")
    step_here = counting()

    async def step() -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return step_here()

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=3)

    async def work() -> None:
        logs = LoggingTensorHook(["loss"], every_n_iter=1, at_end=True)
        async with MonitoredSession([Pauses(), logs, StopAtStepHook(last_step=12)], creator) as s:
            while not s.should_stop():
                await s.run([])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(work)
    said = [record for record in caplog.records if "loss =" in record.getMessage()]
    assert len(said) == 12 + 3, "each worker's last value comes twice"
    for record in said:
        assert record.getMessage().startswith(f"loss = {float(record.step)}")  # type: ignore[attr-defined]


class PowerCutError(Exception):
    """Ends a training without an orderly end."""


FILES: dict[str, Callable[[Path], Sink]] = {
    "json": lambda at: JsonLinesSink(at / "m.jsonl"),
    "csv": lambda at: CsvSink(at / "m.csv"),
    "tensorboard": lambda at: TensorBoardSink(at / "events"),
}


def read(kind: str, at: Path, name: str) -> list[int]:
    """The steps of one metric."""
    if kind == "tensorboard":
        return steps_shown(at / "events", name)
    lines: Any = json_lines(at / "m.jsonl") if kind == "json" else rows(at / "m.csv")
    return [int(line["step"]) for line in lines if line.get(name) not in (None, "")]


@pytest.mark.parametrize("kind", FILES)
async def test_a_resumed_training_has_each_late_value_once_at_its_step(
    kind: str, tmp_path: Path
) -> None:
    """It ended at step 27, was saved at step 20, and what is of steps behind that comes again."""
    weights = {"w": np.zeros(1)}

    async def life(last_step: int, *, fails: bool) -> None:
        def step() -> dict[str, float]:
            weights["w"] += 1
            return {"loss": float(weights["w"][0])}

        ends = {5: 8, 10: 13, 15: 18, 20: 24, 25: 27}
        evaluation = LateEvaluation(ends, every_n_steps=5)
        saver = CheckpointSaverHook(
            str(tmp_path / "model"), save_steps=20, saver=StateDictSaver(model=weights)
        )
        values = ["loss", evaluation.metric]
        hooks = [
            saver, evaluation.hook, MetricsHook(FILES[kind](tmp_path), values, every_n_steps=3),
            Pauses(), StopAtStepHook(last_step=last_step),
        ]  # fmt: skip
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run([])
            if fails:
                raise PowerCutError

    with pytest.raises(PowerCutError):
        await life(27, fails=True)
    assert sorted(read(kind, tmp_path, "eval/at")) == [5, 10, 15, 20, 25]
    weights["w"][:] = 0
    await life(30, fails=False)
    assert read(kind, tmp_path, "loss") == [1, *range(3, 31, 3)]
    # those of steps 5 to 20 are of the model that was restored; that of step 25 came again
    assert sorted(read(kind, tmp_path, "eval/at")) == [5, 10, 15, 20, 25]


async def test_where_a_program_sets_the_step_back_values_are_those_of_the_new_steps() -> None:
    """As of a curriculum that begins again; sinks keep what they were given before, too."""
    step, sink = GlobalStep(), Kept()
    history = HistoryHook("loss", every_n_steps=2)
    metrics = MetricsHook(sink, "loss", every_n_steps=2)
    creator = FunctionSessionCreator(counting(), global_step=step)
    async with MonitoredSession([metrics, history], creator) as session:
        for _ in range(6):
            await session.run([])
        step.restart(3)
        for _ in range(4):
            await session.run([])
        status = session.status()
    # the run of step 4 was not asked, because that of step 7 was expected: step 5 makes up for it
    assert of_rows(history, "loss") == [(1, 1.0), (2, 2.0), (5, 8.0), (6, 9.0), (7, 10.0)]
    values = sorted(value for _, value in sink.of("loss"))
    assert values == [1, 2, 4, 6, 8, 9, 10]
    assert {(5, 8.0), (6, 6.0), (6, 9.0)} <= set(sink.of("loss"))
    assert (status.metrics["loss"], status.metrics_step) == (9.0, 6)
