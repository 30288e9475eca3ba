"""HookDriver on a graph: the ten hooks of TensorFlow's list, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import asynchooks
from asynchooks import NanLossDuringTrainingError, StopTraining
from asynchooks.testing import HookDriver

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Model(NamedTuple):
    """A graph with a value that is fed, and a global step."""

    graph: Any
    x: Any
    total: Any
    train_op: Any


def model_of_one_value() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder_with_default(1.0, (), name="x")
        step = v1.train.get_or_create_global_step()
        total = v1.get_variable("total", initializer=0.0)
        with tf.control_dependencies([total.assign_add(x)]):
            train_op = v1.assign_add(step, 1)
    return Model(graph, x, total, train_op)


Make = Callable[[Any, Model, str], Any]
HOOKS: dict[str, Make] = {
    "CheckpointSaverHook": lambda train, model, path: train.CheckpointSaverHook(path, save_steps=2),
    "FeedFnHook": lambda train, model, path: train.FeedFnHook(lambda: {model.x: 2.0}),
    "FinalOpsHook": lambda train, model, path: train.FinalOpsHook("x:0"),
    "GlobalStepWaiterHook": lambda train, model, path: train.GlobalStepWaiterHook(0),
    "LoggingTensorHook": lambda train, model, path: train.LoggingTensorHook(["x"], every_n_iter=1),
    "NanTensorHook": lambda train, model, path: train.NanTensorHook(model.x),
    "ProfilerHook": lambda train, model, path: train.ProfilerHook(save_steps=1, output_dir=path),
    "StepCounterHook": lambda train, model, path: train.StepCounterHook(1, output_dir=path),
    "StopAtStepHook": lambda train, model, path: train.StopAtStepHook(last_step=3),
    "SummarySaverHook": lambda train, model, path: train.SummarySaverHook(
        save_steps=1, output_dir=path, summary_op=v1.summary.scalar("summary", model.x)
    ),
}


def driver_of(make: Make, train: Any, path: Path) -> tuple[Model, Any, HookDriver]:
    v1.summary.FileWriterCache.clear()
    model = model_of_one_value()
    with model.graph.as_default():
        hook = make(train, model, str(path))
        return model, hook, HookDriver(hook)


def left_in(directory: Path) -> tuple[set[str], list[tuple[int, str]]]:
    """The names of files, and step and tag of each summary."""
    v1.summary.FileWriterCache.clear()
    events = [
        (event.step, value.tag)
        for path in directory.glob("events*")
        for event in v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    return {path.name for path in directory.iterdir()}, events


@pytest.mark.parametrize("library", [asynchooks, v1.train], ids=["ours", "theirs"])
@pytest.mark.parametrize("name", HOOKS)
async def test_each_hook_of_tensorflows_list_is_driven(
    name: str, library: Any, tmp_path: Path
) -> None:
    model, hook, driver = driver_of(HOOKS[name], library, tmp_path)
    async with driver:
        for number in (1, 2, 3):
            run_context = await driver.make_step(model.train_op)
            assert run_context.step == driver.global_step.value == number
            assert run_context.stop_requested == (name == "StopAtStepHook" and number == 3)
    files, events = left_in(tmp_path)
    match name:
        case "CheckpointSaverHook":
            assert {f"model.ckpt-{step}.index" for step in (0, 2, 3)} < files
        case "ProfilerHook":
            assert {"timeline-2.json", "timeline-3.json"} < files
        case "StepCounterHook":
            assert events == [(2, "global_step/sec"), (3, "global_step/sec")]
        case "SummarySaverHook":
            assert events == [(1, "summary"), (2, "summary"), (3, "summary")]
        case "FinalOpsHook":
            assert hook.final_ops_values == 1.0


async def test_what_a_hook_feeds_logs_and_raises_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, driver = driver_of(HOOKS["FeedFnHook"], asynchooks, tmp_path)
    async with driver:
        await driver.make_step(model.train_op)
        assert driver.raw_session().run(model.total) == 2.0

    model, _, driver = driver_of(HOOKS["LoggingTensorHook"], asynchooks, tmp_path)
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with driver:
            await driver.make_step(model.train_op, {model.x: 3.0})
    assert "x = 3.0" in caplog.messages

    model, _, driver = driver_of(HOOKS["NanTensorHook"], asynchooks, tmp_path)
    with pytest.raises(NanLossDuringTrainingError):
        async with driver:
            await driver.make_step(model.train_op, {model.x: float("nan")})


async def test_a_hook_that_has_stopped_training_makes_no_further_step(tmp_path: Path) -> None:
    model, _, driver = driver_of(HOOKS["StopAtStepHook"], asynchooks, tmp_path)
    async with driver:
        while not driver.should_stop():
            run_context = await driver.make_step(model.train_op)
        assert run_context.stop_requested
        with pytest.raises(StopTraining):
            await driver.make_step(model.train_op)
    assert driver.global_step.value == 3
