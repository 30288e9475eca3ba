"""TensorFlow's hooks, and users' hooks for it, alone and with ours in our session."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import asynchooks
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
from .models import ChiefSessionCreator, Model, aborted, counting_model, monitored

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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


class Noting(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Notes each moment, what is the default graph then, the thread, and the coordinators."""

    def __init__(self, name: str = "a", log: list[tuple[str, str]] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.graphs: list[tuple[str, Any]] = []
        self.threads: list[tuple[str, int]] = []
        self.coords: list[Any] = []

    def note(self, moment: str) -> None:
        self.log.append((self.name, moment))
        self.graphs.append((moment, v1.get_default_graph()))
        self.threads.append((moment, threading.get_ident()))

    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session")
        self.coords.append(coord)

    def before_run(self, run_context: Any) -> None:
        self.note("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run")

    def end(self, session: Any) -> None:
        self.note("end")


MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]

RUNNERS = ["auto", "inline", "thread"]


@pytest.mark.parametrize("step_runner", RUNNERS)
async def test_both_kinds_keep_the_order_of_the_list_at_every_moment(step_runner: Any) -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    kinds: list[Any] = [Noting, RecordingHook, Noting, Noting, RecordingHook, Noting]
    hooks = [kind(name, log) for kind, name in zip(kinds, "abcdef", strict=True)]
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        for _ in range(3):
            await session.run(model.train_op)
    runs = ["before_run", "after_run"] * 3
    moments = ["begin", "after_create_session", *runs, "end"]
    assert log == [(name, moment) for moment in moments for name in "abcdef"]


@pytest.mark.parametrize("step_runner", RUNNERS)
async def test_the_graph_is_the_default_one_in_every_method(step_runner: Any) -> None:
    model, hook = counting_model(), Noting()
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        await session.run(model.train_op)
    assert hook.graphs == [(moment, model.graph) for moment in MOMENTS]
    here = [moment for moment, thread in hook.threads if thread == threading.get_ident()]
    assert here == (MOMENTS if step_runner == "inline" else ["begin"])


async def test_after_create_session_gets_an_instance_of_tensorflows_coordinator() -> None:
    model, hook = counting_model(), Noting()
    async with monitored(model.graph, [hook]) as session:
        assert isinstance(hook.coords[0], v1.train.Coordinator)
        assert not hook.coords[0].should_stop()
        hook.coords[0].request_stop()
        assert session.should_stop()


async def test_a_looper_thread_ends_with_the_session() -> None:
    model, hook = counting_model(), Noting()
    looped = threading.Event()
    async with monitored(model.graph, [hook]):
        looper = v1.train.LooperThread(hook.coords[0], 0.0, target=looped.set)
        looper.start()
        assert looped.wait(60)
        assert looper.is_alive()
    assert not looper.is_alive()


async def test_an_error_of_a_looper_thread_leaves_the_session() -> None:
    model, hook = counting_model(), Noting()

    def fail() -> None:
        raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError, match="in the loop"):
        async with monitored(model.graph, [hook]) as session:
            v1.train.LooperThread(hook.coords[0], 0.0, target=fail).start()
            assert hook.coords[0].wait_for_stop(60)
            assert session.should_stop()


class Asking(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Uses all that a run context offers; tells what it saw as plain data."""

    def __init__(self, model: Model, rate: Any) -> None:
        self.model, self.rate, self.seen = model, rate, []  # type: ignore[var-annotated]

    def before_run(self, run_context: Any) -> Any:
        self.context = run_context
        asked = run_context.original_args
        step = run_context.session.run(self.model.step)
        self.seen.append((int(step), asked.fetches, asked.feed_dict, asked.options))
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        return v1.train.SessionRunArgs([self.rate, {"r": self.rate}], {self.rate: 2.5}, options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        is_same, was_stopped = run_context is self.context, run_context.stop_requested
        if run_context.session.run(self.model.step) == 2:
            run_context.request_stop()
        traced = len(run_values.run_metadata.step_stats.dev_stats) > 0
        level = run_values.options.trace_level
        self.seen.append((run_values.results, traced, level, is_same, was_stopped))
        self.seen.append(run_context.stop_requested)


@pytest.mark.parametrize("step_runner", RUNNERS)
async def test_a_users_hook_sees_what_it_sees_under_tensorflows_session(step_runner: Any) -> None:
    seen: list[Any] = []
    for kind in ("theirs", "ours"):
        model = counting_model()
        with model.graph.as_default():
            rate = v1.placeholder_with_default(1.0, shape=(), name="rate")
            other = v1.placeholder_with_default(1.0, shape=(), name="other")
        hook, feeds = Asking(model, rate), {"other:0": 3.0}
        results = []
        fetches = ["global_step/read:0", "other:0"]
        if kind == "theirs":
            with model.graph.as_default(), v1.train.MonitoredSession(hooks=[hook]) as its:
                while not its.should_stop():
                    results.append(its.run([model.train_op.name, *fetches[1:]], feeds))
        else:
            async with monitored(model.graph, [hook], step_runner=step_runner) as session:
                while not session.should_stop():
                    results.append(await session.run([model.train_op.name, *fetches[1:]], feeds))
        assert other.name == fetches[1]
        seen.append((results, hook.seen))
    assert len(seen[0][0]) == 2
    assert seen[0][1][-1], "it asked to stop"
    assert seen[1] == seen[0]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_error_names_the_hook_and_the_moment(moment: str) -> None:
    class Faulty(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        pass

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    setattr(Faulty, moment, fail)
    model = counting_model()
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        async with monitored(model.graph, [Noting(), Faulty()]) as session:
            await session.run(model.train_op)
    assert f"in {moment} of Faulty" in caught.value.__notes__


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_method_that_a_hook_leaves_alone_is_not_called(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(v1.train.SessionRunHook, moment, lambda *_: called.append(moment))

    model, hook = counting_model(), Noting()
    monkeypatch.delattr(Noting, moment)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
    assert called == []
    assert [each for _, each in hook.log] == [each for each in MOMENTS if each != moment]


class Losing(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Loses the session at one of its moments, once."""

    def __init__(self, moment: str, call: int) -> None:
        self.calls = {moment: [None] * (call - 1) + [aborted()]}

    def play(self, moment: str) -> None:
        errors = self.calls.get(moment)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.play("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.play("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.play("after_run")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("moment", "call"), [("after_create_session", 1), ("before_run", 8), ("after_run", 7)]
)
async def test_through_a_recovery_tensorflows_hooks_leave_what_they_leave_under_its_session(
    moment: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(
        lambda s: [*all_ten(s), Losing(moment, call)], "Saving checkpoints for 12", num_runs=20
    )
    its, difference = await beside(program, tmp_path, caplog)
    assert program.shows in its
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    said = "".join(line.strip("+ ',") for line in changed)
    assert re.fullmatch(r"WARNING The session was lost \(AbortedError: .*\); recreating it.*", said)
    assert all(line.startswith("+") for line in changed), "nothing is missing"


def test_tensorflow_s_threads_accept_a_coordinator_of_ours_outside_of_a_session() -> None:
    coord = asynchooks.tf.GraphCoordinator()
    called: list[int] = []

    def look() -> None:
        called.append(len(called))
        if len(called) == 3:
            raise ValueError("enough")

    v1.train.LooperThread(coord, 0.0, target=look).start()
    with pytest.raises(ValueError, match="enough"):
        coord.join()
    assert called == [0, 1, 2]
    with pytest.raises(ValueError, match="must be a Coordinator"):
        v1.train.LooperThread(asynchooks.Coordinator(), 0.0, target=look)
