"""StepCounterHook: real event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from asynchooks import StepCounterHook

from .models import Moments, counting_model, monitored

tf = pytest.importorskip("tensorflow")
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def scalars(directory: Path, tag: str = "global_step/sec") -> list[tuple[int, float]]:
    """(step, value) of each event with the tag."""
    accumulator = reader.EventAccumulator(str(directory))
    accumulator.Reload()
    if tag not in accumulator.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def steps_of_all_files(directory: Path) -> list[int]:
    return [
        event.step
        for path in sorted(directory.iterdir())
        for event in v1.train.summary_iterator(str(path))
        if event.HasField("summary")
    ]


async def train(graph: Any, hook: StepCounterHook, train_op: Any, runs: int) -> None:
    async with monitored(graph, [hook]) as session:
        for _ in range(runs):
            await session.run(train_op)


async def test_values_are_labelled_with_the_step_after_the_run(tmp_path: Path) -> None:
    model = counting_model()
    hook = StepCounterHook(every_n_steps=10, output_dir=str(tmp_path))
    await train(model.graph, hook, model.train_op, 35)
    events = scalars(tmp_path)
    assert [step for step, _ in events] == [11, 21, 31], "the first trigger writes nothing"
    assert all(value > 0 for _, value in events)


async def test_the_default_is_every_100_steps(tmp_path: Path) -> None:
    model = counting_model()
    await train(model.graph, StepCounterHook(output_dir=str(tmp_path)), model.train_op, 205)
    assert [step for step, _ in scalars(tmp_path)] == [101, 201]


async def test_the_tag_is_the_name_of_the_global_step(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("model"):
        train_op = v1.assign_add(v1.train.create_global_step(), 1)
    hook = StepCounterHook(every_n_steps=1, output_dir=str(tmp_path))
    await train(graph, hook, train_op, 3)
    assert [step for step, _ in scalars(tmp_path, "model/global_step/sec")] == [2, 3]


async def test_every_n_secs_of_zero_writes_at_each_new_step(tmp_path: Path) -> None:
    model = counting_model()
    hook = StepCounterHook(every_n_steps=None, every_n_secs=0, output_dir=str(tmp_path))
    await train(model.graph, hook, model.train_op, 4)
    assert [step for step, _ in scalars(tmp_path)] == [2, 3, 4]


async def test_a_writer_of_the_users_is_written_to_and_stays_open(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        with tf.Graph().as_default():
            writer = v1.summary.FileWriter(str(tmp_path))
        hook = StepCounterHook(every_n_steps=1, summary_writer=writer)
    await train(model.graph, hook, model.train_op, 3)
    assert [step for step, _ in scalars(tmp_path)] == [2, 3], "flushed at the end"
    writer.add_summary(v1.Summary(value=[v1.Summary.Value(tag="own", simple_value=7.0)]), 9)
    writer.close()
    assert scalars(tmp_path, "own") == [(9, 7.0)]


async def test_two_sessions_into_one_directory_keep_the_events_of_both(tmp_path: Path) -> None:
    for runs in (3, 5):
        model = counting_model()
        hook = StepCounterHook(every_n_steps=1, output_dir=str(tmp_path))
        await train(model.graph, hook, model.train_op, runs)
    written = steps_of_all_files(tmp_path)
    assert written == [2, 3, 2, 3, 4, 5]


async def test_events_are_flushed_when_training_fails(tmp_path: Path) -> None:
    model = counting_model()
    hook = StepCounterHook(every_n_steps=1, output_dir=str(tmp_path))
    with pytest.raises(ZeroDivisionError, match="body"):
        async with monitored(model.graph, [hook]) as session:
            for _ in range(3):
                await session.run(model.train_op)
            raise ZeroDivisionError("body")
    assert [step for step, _ in scalars(tmp_path)] == [2, 3]


async def test_a_step_that_does_not_move_is_warned_of_five_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = counting_model()
    await train(model.graph, StepCounterHook(), model.step, 9)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and r.name == "asynchooks"]
    assert len(warned) == 5
    assert "has not moved" in warned[0].getMessage()


async def test_the_rate_is_that_of_the_time_between_the_triggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = counting_model()
    clock = [0.0]
    monkeypatch.setattr("asynchooks._timer.now", lambda: clock[0])
    hook = StepCounterHook(every_n_steps=4, output_dir=str(tmp_path))

    def half_a_second(context: object) -> None:
        clock[0] += 0.5

    async with monitored(model.graph, [Moments(before_run=half_a_second), hook]) as session:
        for _ in range(9):
            await session.run(model.train_op)
    assert scalars(tmp_path) == [(5, 2.0), (9, 2.0)]


async def test_the_steps_per_second_are_the_same_as_tensorflows_hook_writes(
    tmp_path: Path,
) -> None:
    model = counting_model()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hook = StepCounterHook(every_n_steps=10, output_dir=str(ours))
    await train(model.graph, hook, model.train_op, 35)
    other = counting_model()
    with other.graph.as_default():
        its = v1.train.StepCounterHook(every_n_steps=10, output_dir=str(theirs))
        with v1.train.MonitoredSession(hooks=[its]) as session:
            for _ in range(35):
                session.run(other.train_op)
        v1.summary.FileWriterCache.get(str(theirs)).flush()
    assert [step for step, _ in scalars(ours)] == [step for step, _ in scalars(theirs)]
