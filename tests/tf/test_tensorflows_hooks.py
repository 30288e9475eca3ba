"""TensorFlow's hooks as it ships them, under our session: they leave what they leave under its."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, settle
from .hooks_beside import Program, Setup, beside, model_of_one_seed
from .leftovers import differences, read_back
from .models import ChiefSessionCreator, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def saver(s: Setup, **options: Any) -> Any:
    return v1.train.CheckpointSaverHook(s.directory, scaffold=s.scaffold, **options)


def summaries(s: Setup, **options: Any) -> Any:
    return v1.train.SummarySaverHook(output_dir=s.directory, scaffold=s.scaffold, **options)


def feeder(s: Setup, *rates: float) -> Any:
    rest = iter(rates)
    return v1.train.FeedFnHook(lambda: {s.model.rate: next(rest, 1.0)})


def all_ten(s: Setup) -> list[Any]:
    return [
        v1.train.GlobalStepWaiterHook(0),
        saver(s, save_steps=5),
        summaries(s, save_steps=4),
        v1.train.LoggingTensorHook({"loss": "loss"}, every_n_iter=3, at_end=True),
        v1.train.NanTensorHook(s.model.loss),
        v1.train.FinalOpsHook([s.model.loss, "x:0"]),
        v1.train.ProfilerHook(save_steps=6, output_dir=s.directory),
        v1.train.StepCounterHook(5, output_dir=s.directory),
        feeder(s, 2.0, 0.5),
        v1.train.StopAtStepHook(last_step=12),
    ]


def no_more_rates() -> None:
    raise tf.errors.OutOfRangeError(None, None, "no more rates")


def foreign_tensor() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


PROGRAMS = {
    "all ten": Program(all_ten, "Saving checkpoints for 12"),
    "all ten, twice": Program(all_ten, "Saving checkpoints for 12", num_sessions=2),
    "checkpoints, secs": Program(lambda s: [saver(s, save_secs=0)], "Saving checkpoints for 13"),
    "checkpoints go on": Program(
        lambda s: [saver(s, save_steps=10)], "Saving checkpoints for 26", num_sessions=2
    ),
    "saver missing": Program(
        lambda s: [v1.train.CheckpointSaverHook(s.directory, save_steps=1)], "'read': 12"
    ),
    "summaries, secs": Program(lambda s: [summaries(s, save_secs=0)], "(13, 'summary'"),
    "a feed": Program(lambda s: [feeder(s, 2.0, 3.0)], "'read': 12"),
    "two feed the same": Program(lambda s: [feeder(s), feeder(s)], "RuntimeError"),
    "input ends": Program(lambda s: [v1.train.FeedFnHook(no_more_rates)], "[]"),
    "final ops of an ended input": Program(
        lambda s: [v1.train.FinalOpsHook(ended_input())], "OutOfRangeError"
    ),
    "final ops, fed": Program(
        lambda s: [v1.train.FinalOpsHook(s.model.loss, {s.model.rate: 9.0})], "final float32: "
    ),
    "waits for what is there": Program(
        lambda s: [v1.train.GlobalStepWaiterHook(3)],
        "INFO Waiting for global step 3",
        scaffold={"init_fn": lambda: begin_at_step_3},
    ),
    "logs at the end": Program(
        lambda s: [v1.train.LoggingTensorHook(["x"], at_end=True)], "INFO x = "
    ),
    "logs in two sessions": Program(
        lambda s: [v1.train.LoggingTensorHook(["x"], every_n_iter=5)], "INFO x = ", num_sessions=2
    ),
    "nan fails": Program(
        lambda s: [v1.train.NanTensorHook(s.model.loss), feeder(s, 1.0, np.nan)],
        "NanLossDuringTrainingError",
    ),
    "nan stops": Program(
        lambda s: [
            v1.train.NanTensorHook("loss:0", fail_on_nan_loss=False),
            feeder(s, 1.0, np.nan),
        ],
        "WARNING Model diverged",
    ),
    "traces, secs": Program(
        lambda s: [v1.train.ProfilerHook(save_secs=0, output_dir=s.directory)],
        "timeline-3.json",
        num_runs=3,
    ),
    "counts, secs": Program(
        lambda s: [v1.train.StepCounterHook(None, 0, output_dir=s.directory)], "(13, 'summary'"
    ),
    "stops after steps": Program(lambda s: [v1.train.StopAtStepHook(num_steps=3)], "'read': 2"),
    "of another graph": Program(
        lambda s: [v1.train.LoggingTensorHook([foreign_tensor()], every_n_iter=1)], "ValueError"
    ),
}


def ended_input() -> Any:
    dataset = v1.data.Dataset.from_tensors(1.0).take(0)
    return v1.data.make_one_shot_iterator(dataset).get_next()


def begin_at_step_3(scaffold: Any, session: Any) -> None:
    v1.train.get_global_step().load(3, session)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_tensorflows_hooks_leave_under_our_session_what_they_leave_under_its(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its, difference = await beside(PROGRAMS[program], tmp_path, caplog)
    assert PROGRAMS[program].shows in its
    assert difference == ""


def set_up_ten(directory: Path) -> tuple[Any, Any, list[Any]]:
    directory.mkdir()
    model = model_of_one_seed()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        return model, scaffold, all_ten(Setup(v1.train, model, str(directory), scaffold, []))


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_all_ten_leave_the_same_wherever_steps_run(
    step_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorflow")
    model, scaffold, hooks = set_up_ten(tmp_path / "theirs")
    with model.graph.as_default():
        with v1.train.MonitoredSession(v1.train.ChiefSessionCreator(scaffold), hooks) as its:
            while not its.should_stop():
                its.run(model.train_op)
    values = [repr(hooks[5].final_ops_values)]
    under_its = read_back(tmp_path / "theirs", values, [], caplog)
    model, scaffold, hooks = set_up_ten(tmp_path / "ours")
    creator = ChiefSessionCreator(scaffold)
    async with monitored(model.graph, hooks, creator, step_runner=step_runner) as session:
        while not session.should_stop():
            await session.run(model.train_op)
    values = [repr(hooks[5].final_ops_values)]
    under_ours = read_back(tmp_path / "ours", values, [], caplog)
    assert "model.ckpt-12.index" in under_its.files
    assert "\n".join(differences(under_ours, under_its)) == ""


async def test_a_polling_waiter_does_not_hold_the_other_workers_of_its_event_loop() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator(), num_workers=2)
    log: list[tuple[str, int]] = []

    async def worker(name: str, hooks: list[Any]) -> None:
        async with monitored(
            model.graph, [*hooks, StopAtStepHook(last_step=8)], creator
        ) as session:
            while not session.should_stop():
                log.append((name, int(await session.run(model.train_op))))

    async with anyio.create_task_group() as group:
        group.start_soon(worker, "late", [v1.train.GlobalStepWaiterHook(5)])
        await settle()  # it polls now, in a thread
        async with monitored(model.graph, None, creator) as session:
            for _ in range(5):
                log.append(("early", int(await session.run(model.train_op))))
            await settle()
    assert log[:5] == [("early", step) for step in range(1, 6)]
    assert log[5:] == [("late", step) for step in (6, 7, 8)]


def feeds_that_end(model_feed: Any) -> Callable[[], Any]:
    rest = iter([1.0, 2.0])
    return lambda: {model_feed: next(rest)}


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_a_feed_fn_that_ends_by_stop_iteration_ends_training_cleanly(
    step_runner: Any,
) -> None:
    model, other = counting_model(), RecordingHook("b")
    with model.graph.as_default():
        x = v1.placeholder(tf.float32, [])
    hooks = [v1.train.FeedFnHook(feeds_that_end(x)), other]
    results = []
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        while True:
            results.append(await session.run([x, model.train_op]))
    assert results == [[1.0, 1], [2.0, 2]]
    assert other.log[-1] == ("b", "end")


@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_nan_and_feed_hooks_work_on_a_step_function(step_runner: Any) -> None:
    def step(rate: float) -> dict[str, float]:
        return {"loss": rate * 2}

    rates = iter([1.0, float("nan")])
    hooks = [v1.train.FeedFnHook(lambda: {"rate": next(rates)}), v1.train.NanTensorHook("loss")]
    creator = FunctionSessionCreator(step)
    with pytest.raises(v1.train.NanLossDuringTrainingError) as caught:
        async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
            assert await session.run("loss") == 2.0
            await session.run("loss")
    assert "in after_run of NanTensorHook" in caught.value.__notes__


async def test_a_hook_that_needs_a_graphs_global_step_says_so_on_a_step_function() -> None:
    hooks = [v1.train.StopAtStepHook(last_step=3)]
    with pytest.raises(RuntimeError, match="Global step should be created") as caught:
        async with MonitoredSession(hooks, counting_creator()):
            pass
    assert "in begin of StopAtStepHook" in caught.value.__notes__
