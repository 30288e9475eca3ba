"""Event files of graph sessions, ours and TensorFlow's: summaries, steps per second, profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    Evaluate,
    EvaluationHook,
    MetricsHook,
    ProfilerHook,
    StepCounterHook,
    SummarySaverHook,
)
from asynchooks.metrics import Histogram, Point, Resume, TensorBoardSink

from ..hooks.event_files import largest_file
from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    monitored,
    raising,
    train,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
Summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2").Summary
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def read(directory: Path) -> Any:
    return event_accumulator.EventAccumulator(str(directory)).Reload()


def scalars(directory: Path, tag: str = "global_step/sec") -> list[tuple[int, float]]:
    """(step, value) of each event with the tag."""
    events = read(directory)
    found = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    return [(event.step, event.value) for event in found]


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
    await train(model, hooks, 12)
    assert len(event_files(tmp_path / "logs")) == 1
    events = read(tmp_path / "logs")
    steps = steps_of(events)
    assert steps["loss"] == [1, 4, 7, 10]
    assert steps["eval/score"] == [4, 8, 12]
    assert sorted(set(steps["global_step/sec"])) == [3, 5, 7, 9, 11]
    assert events.Tags()["run_metadata"]
    assert events.Tags()["graph"]


async def test_a_sink_of_metrics_shares_the_file_and_hides_an_earlier_training(
    tmp_path: Path,
) -> None:
    earlier = TensorBoardSink(tmp_path)
    earlier.open(Resume(0, None))
    earlier.write(Point(9, 0.0, {"step": 9.0, "loss": 9.0}))
    earlier.flush()
    earlier.close()
    [file] = event_files(tmp_path)
    file.rename(tmp_path / "events.out.tfevents.0000000001.host")

    model, summary = model_with_summary()
    hooks = [
        MetricsHook(TensorBoardSink(tmp_path), {"step": model.step}, every_n_steps=1),
        SummarySaverHook(1, output_dir=str(tmp_path), summary_op=summary),
    ]
    async with monitored(model.graph, hooks) as session:
        for _ in range(6):
            await session.run(model.train_op)
        session.log_metrics({"spread": Histogram.of([0.0, 1.0])})
    assert len(event_files(tmp_path)) == 2
    events = read(tmp_path)
    assert steps_of(events) == {tag: [1, 2, 3, 4, 5, 6] for tag in ("step", "loss")}
    assert [each.step for each in events.Histograms("spread")] == [6]


async def test_the_file_is_the_one_of_tensorflows_cache(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        writer = v1.summary.FileWriterCache.get(str(tmp_path))
    await train(model, [evaluation(str(tmp_path))], 12)
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
    await train(model, [evaluation(str(tmp_path))], 12)
    assert steps_of(read(tmp_path)) == {"eval/score": [4, 8, 12]}


async def test_a_later_session_writes_on_in_the_same_file(tmp_path: Path) -> None:
    for num_steps in (4, 8):
        counter = StepCounterHook(every_n_steps=1, output_dir=str(tmp_path))
        await train(counting_model(), [evaluation(str(tmp_path)), counter], num_steps)
    (path,) = event_files(tmp_path)
    events = [each for each in v1.train.summary_iterator(str(path)) if each.HasField("summary")]
    rates = [each.step for each in events if each.summary.value[0].tag == "global_step/sec"]
    assert rates == [2, 3, 4, 2, 3, 4, 5, 6, 7, 8], "the events of both"


def model_in_a_scope() -> Model:
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("model"):
        step = v1.train.create_global_step()
        return Model(graph, step, v1.assign_add(step, 1))


@pytest.mark.parametrize(
    ("options", "num_steps", "steps"),
    [
        ({"every_n_steps": 10}, 35, [11, 21, 31]),  # the first trigger writes nothing
        ({}, 205, [101, 201]),
        ({"every_n_steps": None, "every_n_secs": 0}, 4, [2, 3, 4]),
    ],
)
async def test_steps_per_second_are_labelled_with_the_step_after_the_run(
    options: dict[str, Any], num_steps: int, steps: list[int], tmp_path: Path
) -> None:
    """In the tag of the global step's name; as TensorFlow's hook does."""
    model, ours, theirs = model_in_a_scope(), tmp_path / "ours", tmp_path / "theirs"
    await train(model, [StepCounterHook(output_dir=str(ours), **options)], num_steps)
    events = scalars(ours, "model/global_step/sec")
    assert [step for step, _ in events] == steps
    assert all(value > 0 for _, value in events)
    other = model_in_a_scope()
    with other.graph.as_default():
        its = v1.train.StepCounterHook(output_dir=str(theirs), **options)
        with v1.train.MonitoredSession(hooks=[its]) as session:
            for _ in range(num_steps):
                session.run(other.train_op)
        v1.summary.FileWriterCache.get(str(theirs)).flush()
    assert [step for step, _ in scalars(theirs, "model/global_step/sec")] == steps


async def test_a_writer_of_the_users_is_written_to_and_stays_open(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        with tf.Graph().as_default():
            writer = v1.summary.FileWriter(str(tmp_path))
        hook = StepCounterHook(every_n_steps=1, summary_writer=writer)
    await train(model, [hook], 3)
    assert [step for step, _ in scalars(tmp_path)] == [2, 3], "flushed at the end"
    writer.add_summary(v1.Summary(value=[v1.Summary.Value(tag="own", simple_value=7.0)]), 9)
    writer.close()
    assert scalars(tmp_path, "own") == [(9, 7.0)]


async def test_timelines_go_to_any_file_system_of_tensorflow(tmp_path: Path) -> None:
    directory = f"ram:/{tmp_path}"  # a name of its own
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=directory)
    await train(model, [hook], 2)
    with tf.io.gfile.GFile(f"{directory}/timeline-2.json") as file:
        assert json.loads(file.read())["traceEvents"]


async def test_a_disk_of_traces_that_is_full_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path))
    async with monitored(model.graph, [hook]) as session:
        with largest_file(400):
            steps = [await session.run(model.train_op) for _ in range(4)]
    assert steps == [1, 2, 3, 4]
    assert "Events could not be written" in caplog.text
    assert "Training goes on" in caplog.text


async def test_a_step_may_be_traced_again_after_a_recovery(tmp_path: Path) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hooks = [
        ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
        Moments(before_run=raising(None, None, aborted())),
    ]
    creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, hooks, creator) as session:
        steps = [await session.run(model.train_op) for _ in range(4)]
    assert steps == [11, 12, 11, 12]
    assert json.loads((tmp_path / "timeline-12.json").read_text())["traceEvents"]


async def test_runs_that_do_not_move_the_step_are_no_error(tmp_path: Path) -> None:
    """Unlike in TensorFlow's, whose writer refuses the second trace of a step."""
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path))
    async with monitored(model.graph, [hook]) as session:
        assert [await session.run(model.step) for _ in range(4)] == [0, 0, 0, 0]
        await session.run(model.train_op)
        assert [await session.run(model.step) for _ in range(2)] == [1, 1]
    assert (tmp_path / "timeline-1.json").exists()
