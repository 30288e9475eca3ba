"""Event files of graph sessions: TensorFlow's hooks and ours write one in each directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    ProfilerHook,
    StepCounterHook,
    SummarySaverHook,
)

from .models import Model, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
Summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2").Summary
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def read(directory: Path) -> Any:
    return event_accumulator.EventAccumulator(str(directory)).Reload()


def steps_of(events: Any) -> dict[str, list[int]]:
    return {tag: [each.step for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def event_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if "tfevents" in path.name]


def evaluation(output_dir: str, name: str = "eval") -> EvaluationHook:
    return EvaluationHook(
        lambda session, step: {"score": 1.0},
        every_n_steps=4,
        mode=Evaluate.EXCLUSIVE,
        output_dir=output_dir,
        name=name,
    )


def model_with_summary() -> tuple[Model, Any]:
    model = counting_model()
    with model.graph.as_default():
        return model, v1.summary.scalar("loss", 0.5)


async def train(model: Model, hooks: list[Any], num_steps: int = 12) -> None:
    async with monitored(model.graph, hooks) as session:
        for _ in range(num_steps):
            await session.run(model.train_op)


async def test_tensorflows_hooks_and_ours_share_a_file_of_which_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    v1.summary.FileWriterCache.clear()  # of "logs" elsewhere
    (tmp_path / "logs").mkdir()
    absolute = str(tmp_path / "logs")
    model, summary = model_with_summary()
    with model.graph.as_default():
        saver = v1.train.Saver()
    hooks = [
        v1.train.StepCounterHook(2, output_dir="logs"),
        SummarySaverHook(3, output_dir="./logs", summary_op=summary),
        CheckpointSaverHook(absolute, save_steps=100, saver=saver),
        ProfilerHook(save_steps=6, output_dir=absolute),
        evaluation("logs/"),
        StepCounterHook(2, output_dir=absolute),
    ]
    await train(model, hooks)
    assert len(event_files(tmp_path / "logs")) == 1
    events = read(tmp_path / "logs")
    steps = steps_of(events)
    assert steps["loss"] == [1, 4, 7, 10]
    assert steps["eval/score"] == [4, 8, 12]
    assert sorted(set(steps["global_step/sec"])) == [3, 5, 7, 9, 11]
    assert events.Tags()["run_metadata"]
    assert events.Tags()["graph"]


async def test_the_file_is_the_one_of_tensorflows_cache(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        writer = v1.summary.FileWriterCache.get(str(tmp_path))
    await train(model, [evaluation(str(tmp_path))])
    value = v1.Summary.Value(tag="mine", simple_value=1.0)
    writer.add_summary(v1.Summary(value=[value]), 13)  # it is open yet
    writer.flush()
    assert len(event_files(tmp_path)) == 1
    assert steps_of(read(tmp_path)) == {"eval/score": [4, 8, 12], "mine": [13]}


@pytest.mark.filterwarnings("error:Attempting to use a closed FileWriter")
async def test_a_cached_writer_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        v1.summary.FileWriterCache.get(str(tmp_path)).close()
    await train(model, [evaluation(str(tmp_path))])
    assert steps_of(read(tmp_path)) == {"eval/score": [4, 8, 12]}


async def test_a_step_function_joins_the_file_that_tensorflow_has_open(tmp_path: Path) -> None:
    model = counting_model()
    async with monitored(model.graph, [evaluation(str(tmp_path))]) as session:
        message = Summary(value=[Summary.Value(tag="message", simple_value=1.0)])
        creator = FunctionSessionCreator(lambda: {"loss": 0.5, "message": message})
        hooks = [
            evaluation(str(tmp_path), "other"),
            SummarySaverHook(2, output_dir=str(tmp_path), summary_op="message"),
        ]
        async with MonitoredSession(hooks, creator) as other:
            for _ in range(4):
                await session.run(model.train_op)
                await other.run("loss")
    assert len(event_files(tmp_path)) == 1
    assert steps_of(read(tmp_path)) == {"eval/score": [4], "other/score": [4], "message": [1, 3]}


async def test_a_later_session_writes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        model = counting_model()
        await train(model, [evaluation(str(tmp_path))], 4)
    assert len(event_files(tmp_path)) == 1
