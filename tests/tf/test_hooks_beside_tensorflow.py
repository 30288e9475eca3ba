"""TensorFlow's hooks and ours leave the same log, values, events and files."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asynchooks
from asynchooks import CheckpointSaverHook, ProfilerHook, StepCounterHook, SummarySaverHook

from .hooks_beside import Program, Setup, beside, checkpoints, feeding, with_loss
from .models import aborted, counting_model, monitored, raising, steps_of_events

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


Hooks = Callable[[Setup], list[Any]]


def loss_and_x(s: Setup) -> dict[str, Any]:
    return {"x": s.model.x, "a loss": s.model.loss}


def logs(tensors: Callable[[Setup], Any] = loss_and_x, **options: Any) -> Hooks:
    return lambda s: [s.train.LoggingTensorHook(tensors(s), **options)]


LOGGING = {
    "by runs": Program(logs(every_n_iter=3), "INFO a loss = "),
    "every run": Program(logs(every_n_iter=1), "(# sec)"),
    "by seconds": Program(logs(every_n_secs=0), "(# sec)"),
    "by seconds that never pass": Program(logs(every_n_secs=3e4), "a loss = "),
    "at the end alone": Program(logs(at_end=True), "a loss = "),
    "at the end, just logged": Program(logs(every_n_iter=4, at_end=True), "(# sec)"),
    "at the end, seconds": Program(logs(every_n_secs=0, at_end=True), "(# sec)"),
    "at the end without a run": Program(logs(every_n_iter=4, at_end=True), "a loss = ", num_runs=0),
    "a list of names": Program(logs(lambda s: ["x", "loss:0"], every_n_iter=5), "x = "),
    "a list of tensors": Program(logs(lambda s: [s.model.loss], every_n_iter=5), "Tensor("),
    "names in a dict": Program(
        logs(lambda s: {"b": "loss", "a": "pair:1"}, every_n_iter=5), "a = "
    ),
    "small numbers": Program(logs(lambda s: ["tiny"], every_n_iter=5), "tiny = [0. "),
    "a sparse tensor": Program(
        logs(lambda s: {"sparse": s.model.sparse}, every_n_iter=5), "SparseTensorValue("
    ),
    "an op": Program(logs(lambda s: {"op": s.model.loss.op}, every_n_iter=5), "op = None"),
    "a formatter": Program(
        logs(every_n_iter=5, formatter=lambda v: f"<{sorted(v)}: {v['x']}>"),
        "<['a loss', 'x']: ",
    ),
    "a formatter at the end": Program(
        logs(at_end=True, formatter=lambda v: f"<{v['x']}>"), "INFO <"
    ),
    "the same hook in two sessions": Program(
        logs(every_n_iter=5), "a loss = ", num_runs=4, num_sessions=2
    ),
    "a name with several outputs": Program(logs(lambda s: ["pair"], every_n_iter=1), "ValueError"),
    "an unknown name": Program(logs(lambda s: ["missing"], every_n_iter=1), "KeyError"),
    "a tensor of another graph": Program(
        logs(lambda s: [foreign_tensor()], every_n_iter=1), "ValueError"
    ),
}


def foreign_tensor() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


NAN = {
    "no nan": Program(with_loss(1.0), "'read': 12"),
    "nan fails": Program(with_loss(1.0, 1.0, np.nan), "NanLossDuringTrainingError"),
    "nan at once": Program(with_loss(np.nan), "ERROR Model diverged with loss = NaN."),
    "nan stops": Program(
        with_loss(1.0, 1.0, np.nan, fail_on_nan_loss=False), "WARNING Model diverged"
    ),
    "infinity passes, then infinity less infinity": Program(
        with_loss(1.0, np.inf), "NanLossDuringTrainingError"
    ),
    "by name": Program(
        lambda s: [s.train.NanTensorHook("loss:0"), feeding(np.nan)(s)], "NanLossDuringTraining"
    ),
}

FEEDS = {
    "feeds": Program(lambda s: [feeding(2.0, 3.0, 0.5)(s)], "'read': 12"),
    "by name": Program(lambda s: [s.train.FeedFnHook(lambda: {"rate:0": 2.0})], "'read': 12"),
    "nothing": Program(lambda s: [s.train.FeedFnHook(lambda: None)], "'read': 12"),
    "twice the same": Program(
        lambda s: [feeding(2.0)(s), feeding(3.0)(s)], "RuntimeError", num_runs=1
    ),
    "an end of input": Program(lambda s: [s.train.FeedFnHook(out_of_range_later())], "'read': 2"),
    "an error": Program(lambda s: [s.train.FeedFnHook(lambda: {}[1])], "KeyError"),  # type: ignore[index]
}


def out_of_range_later() -> Callable[[], None]:
    calls = []

    def feed() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise tf.errors.OutOfRangeError(None, None, "no more rates")

    return feed


def final(ops: Callable[[Setup], Any], *feeds: Callable[[Setup], Any]) -> Any:
    return lambda s: [s.train.FinalOpsHook(ops(s), *(feed(s) for feed in feeds))]


FINAL = {
    "one": Program(final(lambda s: s.model.x), "final float32: "),
    "list": Program(final(lambda s: [s.model.x, "loss:0"]), "final list: ["),
    "dict": Program(final(lambda s: {"l": s.model.loss, "t": s.model.tiny}), "'t': array("),
    "fed": Program(
        final(lambda s: s.model.loss, lambda s: {s.model.rate: 10.0}), "final float32: "
    ),
    "none": Program(final(lambda s: None), "None"),
    "without a run": Program(final(lambda s: s.model.x), "final float32: ", num_runs=0),
    "once more at each end": Program(final(lambda s: s.model.x), "final float32: ", num_sessions=2),
    "an end of input": Program(final(lambda s: ended_queue()), "WARNING FinalOpsHook: input ended"),
    "an error": Program(final(lambda s: "missing:0"), "ValueError"),
    "not after a failure": Program(
        lambda s: [s.train.FinalOpsHook(s.model.x), *with_loss(np.nan)(s)], "NanLoss"
    ),
}


def ended_queue() -> Any:
    dataset = v1.data.Dataset.from_tensors(1.0).take(0)
    return v1.data.make_one_shot_iterator(dataset).get_next()


STEPS = {
    "last_step": Program(lambda s: [s.train.StopAtStepHook(last_step=7)], "'read': 6"),
    "num_steps": Program(lambda s: [s.train.StopAtStepHook(num_steps=3)], "'read': 2"),
    "num_steps after a restore": Program(
        lambda s: [*checkpoints(s), s.train.StopAtStepHook(last_step=17)],
        "'read': 16",
        num_sessions=2,
    ),
    "two, the smaller first": Program(
        lambda s: [s.train.StopAtStepHook(last_step=n) for n in (3, 5)], "'read': 2"
    ),
    "a waiter for nothing": Program(lambda s: [s.train.GlobalStepWaiterHook(0)], "'read': 12"),
    "a waiter below zero": Program(lambda s: [s.train.GlobalStepWaiterHook(-1)], "'read': 12"),
    "a waiter for a step that is there": Program(
        lambda s: [s.train.GlobalStepWaiterHook(9), s.train.StopAtStepHook(num_steps=20)],
        "INFO Waiting for global step 9 before starting training.",
        num_sessions=2,
        scaffold={"init_fn": lambda: begin_at_step_9},
    ),
}


def begin_at_step_9(scaffold: Any, session: Any) -> None:
    v1.train.get_global_step().load(9, session)


def merged(s: Setup) -> Any:
    return v1.summary.merge_all()


def summaries(op: Callable[[Setup], Any] = merged, **options: Any) -> Hooks:
    return lambda s: [s.train.SummarySaverHook(output_dir=s.directory, summary_op=op(s), **options)]


def by_scaffold(s: Setup) -> list[Any]:
    return [s.train.SummarySaverHook(4, output_dir=s.directory, scaffold=s.scaffold)]


SUMMARIES = {
    "by steps": Program(summaries(save_steps=4), "(9, 'summary'"),
    "every step": Program(summaries(save_steps=1), "(13, 'summary'"),
    "by steps of zero": Program(summaries(save_steps=0), "(13, 'summary'"),
    "by seconds": Program(summaries(save_secs=0), "(13, 'summary'"),
    "by seconds that never pass": Program(summaries(save_secs=3e4), "(1, 'summary'"),
    "a list of two": Program(
        summaries(lambda s: s.model.summaries, save_steps=5), "(11, 'summary'"
    ),
    "the scaffold's": Program(by_scaffold, "(13, 'summary'"),
    "nowhere": Program(
        lambda s: [s.train.SummarySaverHook(save_steps=1, summary_op=merged(s))], "'read': 12"
    ),
    "a step that stands still": Program(
        summaries(save_steps=1), "(0, 'summary'", num_runs=4, trains=False
    ),
    "the same hook in two sessions": Program(
        lambda s: [*checkpoints(s), *summaries(save_steps=5)(s)],
        "status: START",
        num_sessions=2,
    ),
    "a failure": Program(
        lambda s: [*summaries(save_steps=2)(s), *with_loss(1.0, 1.0, np.nan)(s)],
        "(3, 'summary'",
    ),
}


def counter(**options: Any) -> Hooks:
    return lambda s: [s.train.StepCounterHook(output_dir=s.directory, **options)]


COUNTERS = {
    "by steps": Program(counter(every_n_steps=5), "(11, 'summary'"),
    "by seconds": Program(counter(every_n_steps=None, every_n_secs=0), "(13, 'summary'"),
    "too few": Program(counter(), "file_version"),
    "only the log": Program(lambda s: [s.train.StepCounterHook(5)], "INFO global_step/sec: #"),
    # TensorFlow warns five times a process in all: two of these tests may be in it
    "stands still": Program(counter(), "WARNING the step stands still", num_runs=2, trains=False),
    "the same hook in two sessions": Program(
        lambda s: [*checkpoints(s), *counter(every_n_steps=8)(s)],
        "global_step/sec",
        num_runs=5,
        num_sessions=3,
    ),
}


def profiler(**options: Any) -> Hooks:
    return lambda s: [s.train.ProfilerHook(output_dir=s.directory, **options)]


PROFILERS = {
    "by steps": Program(profiler(save_steps=4), "timeline-8.json"),
    "every step": Program(profiler(save_steps=1), "step_13: "),
    "by seconds": Program(profiler(save_secs=0), "timeline-2.json"),
    "by seconds that never pass": Program(profiler(save_secs=3e4), "file_version"),
    "memory": Program(profiler(save_steps=6, show_memory=True), "('O', 'Tensor')"),
    "the same hook in two sessions": Program(
        lambda s: [*profiler(save_steps=7)(s), *checkpoints(s)],
        "timeline-20.json",
        num_sessions=2,
    ),
    "a failure": Program(
        lambda s: [*profiler(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)],
        "timeline-2.json",
    ),
}


@pytest.mark.parametrize("show_dataflow", [True, False])
async def test_a_timeline_connects_tensors_if_asked(show_dataflow: bool, tmp_path: Path) -> None:
    model = counting_model()
    both = threading.Barrier(2, timeout=30)  # so that they run side by side, in two rows

    def meet() -> Any:
        both.wait()
        return np.float32(1.0)

    with model.graph.as_default():
        met = tf.add_n([tf.numpy_function(meet, [], tf.float32) for _ in range(2)])
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path), show_dataflow=show_dataflow)
    async with monitored(model.graph, [hook]) as session:
        for _ in range(2):
            await session.run([model.train_op, met])
    v1.summary.FileWriterCache.clear()
    events = json.loads((tmp_path / "timeline-2.json").read_text())["traceEvents"]
    assert any(event["ph"] == "s" for event in events) == show_dataflow


@pytest.mark.parametrize(
    ("kind", "what", "steps"),
    [
        ("checkpoint", "session_log", [0, 1, 2]),
        ("summary", "summary", [1, 2]),
        ("counter", "summary", [2]),
        ("profiler", "tagged_run_metadata", [0]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_events_are_in_the_file_when_the_session_is_over(
    kind: str, what: str, steps: list[int], fails: bool, tmp_path: Path
) -> None:
    model = counting_model()
    to = str(tmp_path)
    with model.graph.as_default():
        op = v1.summary.scalar("step", model.step)
        make: dict[str, Callable[[], Any]] = {
            "checkpoint": lambda: CheckpointSaverHook(to, save_steps=1, saver=v1.train.Saver()),
            "summary": lambda: SummarySaverHook(save_steps=1, output_dir=to, summary_op=op),
            "counter": lambda: StepCounterHook(1, output_dir=to),
            "profiler": lambda: ProfilerHook(save_steps=1, output_dir=to),
        }
        hook = make[kind]()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        async with monitored(model.graph, [hook]) as session:
            for _ in range(2):
                await session.run(model.train_op)
            if fails:
                raise ZeroDivisionError
    assert steps_of_events(tmp_path, what) == steps


def saver(**options: Any) -> Hooks:
    """A CheckpointSaverHook with the scaffold's saver."""
    return lambda s: [s.train.CheckpointSaverHook(s.directory, scaffold=s.scaffold, **options)]


def saver_with(own: Callable[[], Any], **options: Any) -> Hooks:
    """A CheckpointSaverHook with a saver of its own, made in the graph."""
    return lambda s: [s.train.CheckpointSaverHook(s.directory, saver=own(), **options)]


def saver_of_collection(s: Setup) -> list[Any]:
    return [s.train.CheckpointSaverHook(s.directory, save_steps=5)]


def saver_put_there(s: Setup) -> list[Any]:
    v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(max_to_keep=2))
    return saver_of_collection(s)


SAVES = {
    "by steps": Program(saver(save_steps=5), "model.ckpt-10.index"),
    "every step": Program(saver(save_steps=1), "model.ckpt-12.index"),
    "by steps of zero": Program(saver(save_steps=0), "model.ckpt-12.index"),
    "by seconds": Program(saver(save_secs=0), "model.ckpt-12.index"),
    "by seconds that never pass": Program(saver(save_secs=3e4), "model.ckpt-13.index"),
    "the last step when due": Program(saver(save_steps=13), "model.ckpt-13.index"),
    "one step before the last": Program(saver(save_steps=12), "model.ckpt-12.index"),
    "without a run": Program(saver(save_steps=5), "model.ckpt-0.index", num_runs=0),
    "a step that stands still": Program(
        saver(save_steps=1), "model.ckpt-0.index", num_runs=3, trains=False
    ),
    "no graph": Program(saver(save_steps=5, save_graph_def=False), "model.ckpt-5.index"),
    "a basename": Program(saver(save_steps=5, checkpoint_basename="wise.man"), "wise.man-5.meta"),
    "a directory to be made": Program(
        lambda s: [s.train.CheckpointSaverHook(f"{s.directory}/below", save_steps=7)],
        "below/model.ckpt-7.index",
    ),
    "a saver that keeps two": Program(
        saver_with(lambda: v1.train.Saver(max_to_keep=2), save_steps=3), "model.ckpt-12.index"
    ),
    "a saver of one variable": Program(
        saver_with(lambda: v1.train.Saver(v1.trainable_variables()), save_steps=5),
        "'model.ckpt-5.index': {'variable': ",
    ),
    "the scaffold's own saver": Program(
        saver(save_steps=3),
        "model.ckpt-13.index",
        scaffold={"saver": lambda: v1.train.Saver(max_to_keep=1)},
    ),
    "the default saver, found": Program(saver_of_collection, "model.ckpt-10.index"),
    "a saver in the collection": Program(saver_put_there, "model.ckpt-10.index"),
    "two hooks": Program(
        lambda s: [*saver(save_steps=3)(s), *saver(save_steps=4, checkpoint_basename="b")(s)],
        "b-12.index",
    ),
    "one hook twice": Program(
        lambda s: saver(save_steps=3)(s) * 2, "model.ckpt-12.index", num_runs=12
    ),
    "the same hook in three sessions": Program(
        saver(save_steps=4), "model.ckpt-15.index", num_runs=5, num_sessions=3
    ),
    "a failure": Program(
        lambda s: [*saver(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)],
        "NanLossDuringTrainingError",
    ),
    "nan in the checkpoint": Program(
        lambda s: [*with_loss(1.0, np.nan, fail_on_nan_loss=False)(s), *saver(save_steps=1)(s)],
        "'variable': nan",
    ),
}


def listener(s: Setup, name: str, stop_at: tuple[int, ...] = ()) -> Any:
    """Logs what it sees of the model in each moment; may ask to stop."""

    class Listener(s.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
        def begin(self) -> None:
            s.log.append((name, "begin", v1.get_default_graph() is s.model.graph))

        def before_save(self, session: Any, global_step_value: int) -> None:
            self.see("before_save", session, global_step_value)

        def after_save(self, session: Any, global_step_value: int) -> bool:
            self.see("after_save", session, global_step_value)
            return global_step_value in stop_at

        def end(self, session: Any, global_step_value: int) -> None:
            self.see("end", session, global_step_value)

        def __repr__(self) -> str:
            return f"the listener {name}"

        def see(self, moment: str, session: Any, step: int) -> None:
            is_default = v1.get_default_graph() is s.model.graph
            s.log.append((name, moment, int(step), session.run("x:0").item(), is_default))

    return Listener()


def listens(stop_at: tuple[int, ...] = (), **options: Any) -> Hooks:
    def hooks(s: Setup) -> list[Any]:
        listeners = [listener(s, "a", stop_at), listener(s, "b")]
        return saver(listeners=listeners, **options)(s)

    return hooks


LISTENERS = {
    "at each save": Program(listens(save_steps=5), "('b', 'after_save', 10, "),
    "at each end": Program(listens(save_steps=5), "('b', 'end', 12, ", num_runs=4, num_sessions=3),
    "stops": Program(listens((5, 9), save_steps=3), "('b', 'end', 9, "),
    "stops at once": Program(listens((3,), save_steps=3), "listener: the listener a"),
    "stops not at creation": Program(listens((0,), save_steps=5), "('b', 'end', 13, "),
    "stops in vain at the end": Program(listens((13,), save_steps=5), "('b', 'end', 13, "),
    "not at the end of a failure": Program(
        lambda s: [*listens(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)], "NanLoss"
    ),
}


def all_hooks(s: Setup) -> list[Any]:
    train, to = s.train, {"output_dir": s.directory}
    return [
        train.GlobalStepWaiterHook(0),
        train.CheckpointSaverHook(s.directory, save_steps=5, scaffold=s.scaffold),
        train.SummarySaverHook(save_steps=4, scaffold=s.scaffold, **to),
        train.LoggingTensorHook({"loss": "loss"}, every_n_iter=3, at_end=True),
        train.NanTensorHook(s.model.loss),
        train.FinalOpsHook([s.model.loss, s.model.x]),
        train.FeedFnHook(lambda: {s.model.rate: 1.5}),
        train.ProfilerHook(save_steps=6, **to),
        train.StopAtStepHook(last_step=11),
        train.StepCounterHook(5, **to),
    ]


ALL = {
    "all": Program(all_hooks, "timeline-6.json"),
    "in reverse": Program(lambda s: all_hooks(s)[::-1], "timeline-6.json"),
    "until a failure": Program(
        lambda s: (
            [hook for hook in all_hooks(s) if not hasattr(hook, "feed_fn")]
            + with_loss(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, np.nan)(s)
        ),
        "NanLossDuringTrainingError",
    ),
}


TENSORFLOWS = {
    "all": ALL["all"],
    "all, twice": ALL["all"]._replace(num_sessions=2),
    "checkpoints": SAVES["by seconds"],
    "checkpoints go on": SAVES["the same hook in three sessions"],
    "saver missing": SAVES["the default saver, found"],
    "summaries": SUMMARIES["by seconds"],
    "the scaffold's summaries": SUMMARIES["the scaffold's"],
    "feeds": FEEDS["feeds"],
    "two feed the same": FEEDS["twice the same"],
    "input ends": FEEDS["an end of input"],
    "final ops of an ended input": FINAL["an end of input"],
    "final ops, fed": FINAL["fed"],
    "waits for what is there": STEPS["a waiter for a step that is there"],
    "logs at the end": LOGGING["at the end alone"],
    "logs in two sessions": LOGGING["the same hook in two sessions"],
    "logs a tensor of another graph": LOGGING["a tensor of another graph"],
    "nan fails": NAN["nan fails"],
    "nan stops": NAN["nan stops"],
    "traces": PROFILERS["by seconds"],
    "counts": COUNTERS["by seconds"],
    "stops after steps": STEPS["num_steps"],
}
"""TensorFlow's own hooks, under its session and under ours."""

TABLES = {
    "logging": LOGGING,
    "nan": NAN,
    "feed": FEEDS,
    "final": FINAL,
    "steps": STEPS,
    "summary": SUMMARIES,
    "counter": COUNTERS,
    "profiler": PROFILERS,
    "saves": SAVES,
    "listeners": LISTENERS,
    "all": ALL,
    "tensorflow": TENSORFLOWS,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("table", "program"), [(table, name) for table in TABLES for name in TABLES[table]]
)
async def test_what_is_left_is_tensorflows(
    table: str, program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = v1.train if table == "tensorflow" else asynchooks
    its, difference = await beside(TABLES[table][program], tmp_path, caplog, hooks)
    assert TABLES[table][program].shows in its
    assert difference == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_tensorflows_hooks_leave_the_same_wherever_steps_run(
    step_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, difference = await beside(ALL["all"], tmp_path, caplog, v1.train, step_runner=step_runner)
    assert difference == ""


class Losing(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Loses the session at one of its moments, once."""

    def __init__(self, moment: str, call: int) -> None:
        setattr(self, moment, raising(*[None] * (call - 1), aborted()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("moment", "call"), [("after_create_session", 1), ("before_run", 8), ("after_run", 7)]
)
async def test_through_a_recovery_tensorflows_hooks_leave_what_they_leave_under_its_session(
    moment: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(
        lambda s: [*all_hooks(s), Losing(moment, call)], "Saving checkpoints for 11", num_runs=20
    )
    its, difference = await beside(program, tmp_path, caplog, v1.train)
    assert program.shows in its
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    said = "".join(line.strip("+ ',") for line in changed)
    assert re.fullmatch(r"WARNING The session was lost \(AbortedError: .*\); recreating it.*", said)
    assert all(line.startswith("+") for line in changed), "nothing is missing"
