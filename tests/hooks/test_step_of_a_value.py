"""The step that a value belongs to: that of its run or evaluation, however late it comes."""

import threading
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    EvaluationHook,
    HistoryHook,
    LoggingTensorHook,
    MetricsHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.metrics import Point

from ..support.kept import Kept, Model
from ..support.moments import at
from .training import rows_of, run_session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


async def pause(*given: Any) -> None:
    """Let all other tasks run after each step, so that what waits for a step has it."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def train(hooks: list[Any], last_step: int, creator: Any = None) -> None:
    hooks = [*hooks, at(after_run=pause), StopAtStepHook(last_step=last_step)]
    await run_session(hooks, creator or Model())


async def test_an_evaluation_that_ends_later_is_of_the_step_that_was_evaluated() -> None:
    """Where that step has no row, it gets one in its place."""
    evaluation, sink = LateEvaluation({4: 7, 8: 11}, every_n_steps=4), Kept()
    history = HistoryHook(["loss", evaluation.metric], every_n_steps=3)
    metrics = MetricsHook(sink, ["loss", evaluation.metric], every_n_steps=1)
    await train([evaluation.hook, metrics, history], 11)
    assert sink.of("loss") == [(step, float(step)) for step in range(1, 12)]
    assert sink.of("eval/at") == [(4, 4.0), (8, 8.0)]
    assert metrics.num_dropped == 0
    losses = [{"step": step, "loss": float(step)} for step in (1, 3, 6, 9, 11)]
    late = [{"step": step, "eval/at": float(step)} for step in (4, 8)]
    assert rows_of(history) == sorted(losses + late, key=lambda row: row["step"])


async def test_of_two_values_of_one_name_and_step_the_first_stays_and_other_names_join() -> None:
    class Signals(Kept):
        def write(self, point: Point) -> None:
            super().write(point)
            if "reward" in point.values:
                has_reward.set()

    has_reward, sink = threading.Event(), Signals()
    history = HistoryHook("loss", every_n_steps=1)
    hooks = [MetricsHook(sink, "loss", every_n_steps=1), history, StopAtStepHook(last_step=2)]
    async with MonitoredSession(hooks, Model()) as session:
        await session.run("loss")
        read = history.rows[0]
        session.log_metrics({"loss": 7.0, "reward": 1.0})
        # once the point is written, nothing can join it any more
        assert await anyio.to_thread.run_sync(has_reward.wait, 10)
        session.log_metrics({"loss": 8.0, "reward": 2.0, "length": 3.0})
        await session.run("loss")
    assert (sink.of("loss"), sink.of("reward")) == ([(1, 1.0), (2, 2.0)], [(1, 1.0)])
    assert sink.of("length") == [(1, 3.0)]
    assert rows_of(history)[0] == {"step": 1, "loss": 1.0, "reward": 1.0, "length": 3.0}
    assert "reward" not in read, "a row that was read is not changed later"


async def test_values_of_each_worker_are_of_the_step_that_its_own_run_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "asynchooks")
    creator = SharedSessionCreator(Model(), num_workers=4)
    sinks = [Kept() for _ in range(4)]
    histories = [HistoryHook("loss", every_n_steps=1) for _ in sinks]

    async with anyio.create_task_group() as group:
        for sink, history in zip(sinks, histories, strict=True):
            logs = LoggingTensorHook(["loss"], every_n_iter=1, at_end=True)
            hooks = [logs, MetricsHook(sink, "loss", every_n_steps=1), history]
            group.start_soon(train, hooks, 20, creator)
    for sink, history in zip(sinks, histories, strict=True):
        rows = rows_of(history)
        assert sink.of("loss") == [(row["step"], row["loss"]) for row in rows if "loss" in row]
        assert all(step == loss for step, loss in sink.of("loss"))
    found = sorted(step for sink in sinks for step, _ in sink.of("loss"))
    assert found == list(range(1, 21))
    said: list[Any] = [each for each in caplog.records if "loss =" in each.getMessage()]
    assert len(said) == 20 + 4, "each worker's last value comes twice"
    assert all(each.getMessage().startswith(f"loss = {float(each.step)}") for each in said)
