"""TensorFlow's hooks and ours leave the same log, values, events and files."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asynchooks
from asynchooks import CheckpointSaverHook, ProfilerHook, StepCounterHook, SummarySaverHook

from .hooks_beside import Program, Setup, check_beside
from .models import (
    TheirMoments,
    aborted,
    counting_model,
    monitored,
    out_of_range,
    raising,
    steps_of_events,
    tf,
    v1,
)

pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

Hooks = Callable[[Setup], list[Any]]


def by(kind: str, *options: dict[str, Any]) -> Hooks:
    """A hook for each of these options, with a directory of its own."""
    return lambda s: [
        getattr(s.train, kind)(output_dir=f"{s.directory}/{number}", **each)
        for number, each in enumerate(options)
    ]


def both(*parts: Hooks) -> Hooks:
    return lambda s: [hook for part in parts for hook in part(s)]


def feeding(*rates: float) -> Hooks:
    """A FeedFnHook that feeds these rates, then 1."""

    def hooks(s: Setup) -> list[Any]:
        rest = iter(rates)
        return [s.train.FeedFnHook(lambda: {s.model.rate: next(rest, 1.0)})]

    return hooks


def with_loss(*rates: float, **options: Any) -> Hooks:
    """A NanTensorHook, and losses that come of these rates."""
    return both(lambda s: [s.train.NanTensorHook(s.model.loss, **options)], feeding(*rates))


def saves(**options: Any) -> Hooks:
    """A CheckpointSaverHook with the scaffold's saver."""
    return lambda s: [s.train.CheckpointSaverHook(s.directory, scaffold=s.scaffold, **options)]


def foreign_tensor() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


def logs(s: Setup) -> list[Any]:
    two, hook = {"x": s.model.x, "a loss": s.model.loss}, s.train.LoggingTensorHook
    return [
        *(hook(two, every_n_iter=each) for each in (1, 5)),
        *(hook(two, every_n_secs=each) for each in (0, 3e4)),
        *(hook(two, at_end=True, **each) for each in ({}, {"every_n_iter": 4})),
        *(hook(each, every_n_iter=5) for each in (["x", "loss:0"], [s.model.loss], ["tiny"])),
        hook({"b": "loss", "a": "pair:1"}, every_n_iter=5),
        hook({"sparse": s.model.sparse, "op": s.model.loss.op}, every_n_iter=5),
        hook(two, every_n_iter=5, at_end=True, formatter=lambda v: f"<{sorted(v)}: {v['x']}>"),
    ]


def logs_one(tensor: Callable[[], Any]) -> Hooks:
    return lambda s: [s.train.LoggingTensorHook([tensor()], every_n_iter=1)]


def finals(s: Setup) -> list[Any]:
    hook, m = s.train.FinalOpsHook, s.model
    fetches = (m.x, [m.x, "loss:0"], {"l": m.loss, "t": m.tiny}, None)
    return [*map(hook, fetches), hook(m.loss, {m.rate: 10.0})]


def ends_with(fetch: Callable[[], Any]) -> Hooks:
    return lambda s: [s.train.FinalOpsHook(fetch())]


def ended_queue() -> Any:
    dataset = v1.data.Dataset.from_tensors(1.0).take(0)
    return v1.data.make_one_shot_iterator(dataset).get_next()


def stops(**options: int) -> Hooks:
    return lambda s: [s.train.StopAtStepHook(**options)]


def waits(step: int) -> Hooks:
    return lambda s: [s.train.GlobalStepWaiterHook(step)]


def begin_at_step_9(scaffold: Any, session: Any) -> None:
    v1.train.get_global_step().load(9, session)


def summaries(s: Setup) -> list[Any]:
    ops = {"summary_op": v1.summary.merge_all()}
    steps = [{"save_steps": each, **ops} for each in (0, 1, 4)]
    secs = [{"save_secs": each, **ops} for each in (0, 3e4)]
    two = {"save_steps": 5, "summary_op": s.model.summaries}
    hooks = by("SummarySaverHook", *steps, *secs, two, {"save_steps": 4, "scaffold": s.scaffold})
    return [*hooks(s), s.train.SummarySaverHook(save_steps=1, **ops)]


COUNTERS = by(
    "StepCounterHook",
    *({}, {"every_n_steps": 5}, {"every_n_steps": 8}, {"every_n_steps": None, "every_n_secs": 0}),
)
PROFILERS = by(
    "ProfilerHook",
    *({"save_steps": 1}, {"save_steps": 7}, {"save_secs": 0}, {"save_secs": 3e4}),
    {"save_steps": 6, "show_memory": True},
)


def saves_in_many_ways(s: Setup) -> list[Any]:
    all_of_it = {"saver": v1.train.Saver(max_to_keep=None)}
    ways: list[dict[str, Any]] = [
        *({"save_steps": each, **all_of_it} for each in (0, 1, 5, 12, 13)),
        *({"save_secs": each, **all_of_it} for each in (0, 3e4)),
        {"save_steps": 5, "save_graph_def": False, **all_of_it},
        {"save_steps": 5, "checkpoint_basename": "wise.man", **all_of_it},
        {"save_steps": 3, "saver": v1.train.Saver(max_to_keep=2)},
        {"save_steps": 5, "saver": v1.train.Saver(v1.trainable_variables())},
    ]
    hook = s.train.CheckpointSaverHook
    return [hook(f"{s.directory}/{number}", **each) for number, each in enumerate(ways)]


def saver_of_collection(s: Setup) -> list[Any]:
    return [s.train.CheckpointSaverHook(s.directory, save_steps=5)]


def saver_put_there(s: Setup) -> list[Any]:
    v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(max_to_keep=2))
    return saver_of_collection(s)


def listener(s: Setup, name: str, stop_at: int) -> Any:
    """Logs what it sees of the model in each moment; may ask to stop."""

    class Listener(s.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
        def begin(self) -> None:
            s.log.append((name, "begin", v1.get_default_graph() is s.model.graph))

        def before_save(self, session: Any, global_step_value: int) -> None:
            self.see("before_save", session, global_step_value)

        def after_save(self, session: Any, global_step_value: int) -> bool:
            self.see("after_save", session, global_step_value)
            return global_step_value == stop_at

        def end(self, session: Any, global_step_value: int) -> None:
            self.see("end", session, global_step_value)

        def __repr__(self) -> str:
            return f"the listener {name}"

        def see(self, moment: str, session: Any, step: int) -> None:
            is_default = v1.get_default_graph() is s.model.graph
            s.log.append((name, moment, int(step), session.run("x:0").item(), is_default))

    return Listener()


def listens(save_steps: int, stop_at: int = -1) -> Hooks:
    return lambda s: saves(
        listeners=[listener(s, "a", stop_at), listener(s, "b", -1)], save_steps=save_steps
    )(s)


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


FAILS = with_loss(1.0, 1.0, 1.0, np.nan)

PROGRAMS = {
    "logs": Program(
        logs,
        ("(# sec)", "Tensor(", "tiny = [0. ", "SparseTensorValue(", "op = None", "<['a loss', "),
        num_sessions=2,
    ),
    "logs without a run": Program(logs, "a loss = ", num_runs=0),
    "logs a name with several outputs": Program(logs_one(lambda: "pair"), "ValueError"),
    "logs an unknown name": Program(logs_one(lambda: "missing"), "KeyError"),
    "logs of another graph": Program(logs_one(foreign_tensor), "ValueError"),
    "no nan": Program(with_loss(1.0), "'read': 12"),
    "nan fails": Program(FAILS, "NanLossDuringTrainingError"),
    "nan at once": Program(with_loss(np.nan), "ERROR Model diverged with loss = NaN."),
    "nan stops": Program(with_loss(1.0, np.nan, fail_on_nan_loss=False), "WARNING Model diverged"),
    "infinity passes, then infinity less infinity": Program(with_loss(1.0, np.inf), "NanLoss"),
    "feeds": Program(feeding(2.0, 3.0, 0.5), "'read': 12"),
    "feeds by name": Program(lambda s: [s.train.FeedFnHook(lambda: {"rate:0": 2.0})], "'read': 12"),
    "feeds nothing": Program(lambda s: [s.train.FeedFnHook(lambda: None)], "'read': 12"),
    "feeds the same twice": Program(both(feeding(2.0), feeding(3.0)), "RuntimeError", num_runs=1),
    "input ends": Program(
        lambda s: [s.train.FeedFnHook(raising(None, None, None, out_of_range()))], "'read': 2"
    ),
    "feed fails": Program(lambda s: [s.train.FeedFnHook(raising(KeyError()))], "KeyError"),
    "final ops": Program(finals, ("final float32: ", "'t': array(", "None"), num_sessions=2),
    "final ops without a run": Program(finals, "final float32: ", num_runs=0),
    "final ops of an ended input": Program(ends_with(ended_queue), "FinalOpsHook: input ended"),
    "final ops fail": Program(ends_with(lambda: "missing:0"), "ValueError"),
    "no final ops after a failure": Program(both(finals, FAILS), "NanLoss"),
    "stops at a step": Program(both(stops(last_step=7), stops(last_step=9)), "'read': 6"),
    "stops after steps": Program(stops(num_steps=3), "'read': 2"),
    "stops after a restore": Program(
        both(saves(save_steps=100), stops(last_step=17)), "'read': 16", num_sessions=2
    ),
    "waits for nothing": Program(both(waits(0), waits(-1)), "'read': 12"),
    "waits for what is there": Program(
        both(waits(9), stops(num_steps=20)),
        "INFO Waiting for global step 9 before starting training.",
        num_sessions=2,
        scaffold={"init_fn": lambda: begin_at_step_9},
    ),
    "summaries": Program(
        both(saves(save_steps=100), summaries), ("(9, 'summary'", "status: START"), num_sessions=2
    ),
    "summaries of a step that stands still": Program(
        summaries, "(0, 'summary'", num_runs=4, trains=False
    ),
    "summaries until a failure": Program(both(summaries, FAILS), "(3, 'summary'"),
    "rates": Program(both(saves(save_steps=100), COUNTERS), "global_step/sec", 5, num_sessions=3),
    "rates in the log alone": Program(
        lambda s: [s.train.StepCounterHook(5)], "INFO global_step/sec: #"
    ),
    # TensorFlow warns five times a process in all: two of these tests may be in it
    "a step that stands still": Program(
        lambda s: [s.train.StepCounterHook()], "WARNING the step stands still", 2, trains=False
    ),
    "traces": Program(
        both(saves(save_steps=100), PROFILERS), ("timeline-20", "('O', 'Tensor')"), num_sessions=2
    ),
    "traces until a failure": Program(both(PROFILERS, FAILS), "timeline-2.json"),
    "saves": Program(saves_in_many_ways, ("wise.man-5.meta", "model.ckpt-5.index': {'variable': ")),
    "saves without a run": Program(saves(save_steps=5), "model.ckpt-0.index", num_runs=0),
    "saves a step that stands still": Program(
        saves(save_steps=1), "model.ckpt-0.index", num_runs=3, trains=False
    ),
    "saves in three sessions": Program(
        saves(save_steps=4), "model.ckpt-15.index", num_runs=5, num_sessions=3
    ),
    "saves by the scaffold's own saver": Program(
        saves(save_steps=3), "ckpt-13.index", scaffold={"saver": lambda: v1.train.Saver()}
    ),
    "saves by the default saver": Program(saver_of_collection, "model.ckpt-10.index"),
    "saves by one in the collection": Program(saver_put_there, "model.ckpt-10.index"),
    "saves by two": Program(
        both(saves(save_steps=3), saves(save_steps=4, checkpoint_basename="b")), "b-12.index"
    ),
    "saves by one, twice": Program(lambda s: saves(save_steps=3)(s) * 2, "model.ckpt-12.index", 12),
    "saves until a failure": Program(both(saves(save_steps=2), FAILS), "NanLoss"),
    "saves nan": Program(
        both(with_loss(1.0, np.nan, fail_on_nan_loss=False), saves(save_steps=1)), "'variable': nan"
    ),
    "listeners": Program(listens(5), "('b', 'end', 12, ", num_runs=4, num_sessions=3),
    "a listener stops": Program(listens(3, 9), ("('b', 'end', 9, ", "listener: the listener a")),
    "none stops at creation": Program(listens(5, 0), "('b', 'end', 13, "),
    "listeners until a failure": Program(both(listens(2), FAILS), "NanLoss"),
    "all": Program(all_hooks, "timeline-6.json"),
    "all in reverse": Program(lambda s: all_hooks(s)[::-1], "timeline-6.json"),
}


TENSORFLOWS = [
    *("logs", "nan fails", "feeds", "feeds the same twice", "input ends", "final ops", "summaries"),
    *("stops after a restore", "waits for what is there", "rates", "traces", "saves", "all"),
]
"""With TensorFlow's own hooks under our session, too."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "train"),
    [*((each, asynchooks) for each in PROGRAMS), *((each, v1.train) for each in TENSORFLOWS)],
)
async def test_what_is_left_is_tensorflows(
    program: str, train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await check_beside(PROGRAMS[program], tmp_path, caplog, train) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_tensorflows_hooks_leave_the_same_wherever_steps_run(
    step_runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = PROGRAMS["all"]
    assert not await check_beside(program, tmp_path, caplog, v1.train, step_runner=step_runner)


@cache
def losing(moment: str, call: int) -> Program:
    """It loses the session at that call of one moment."""
    fails: Hooks = lambda s: [  # noqa: E731
        TheirMoments(**{moment: raising(*[None] * (call - 1), aborted())})
    ]
    return Program(both(all_hooks, fails), "Saving checkpoints for 11", num_runs=20)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("moment", "call"), [("after_create_session", 1), ("before_run", 8), ("after_run", 7)]
)
async def test_through_a_recovery_tensorflows_hooks_leave_what_they_leave_under_its_session(
    moment: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    difference = await check_beside(losing(moment, call), tmp_path, caplog, v1.train)
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    said = "".join(line.strip("+ ',") for line in changed)
    assert re.fullmatch(r"WARNING The session was lost \(AbortedError: .*\); recreating it.*", said)
    assert all(line.startswith("+") for line in changed), "nothing is missing"


@pytest.mark.parametrize("fails", [False, True])
async def test_events_are_in_the_files_when_the_session_is_over(
    fails: bool, tmp_path: Path
) -> None:
    model, to = counting_model(), [str(tmp_path / each) for each in "abcd"]
    with model.graph.as_default():
        op = v1.summary.scalar("step", model.step)
        hooks: list[Any] = [
            CheckpointSaverHook(to[0], save_steps=1, saver=v1.train.Saver()),
            SummarySaverHook(save_steps=1, output_dir=to[1], summary_op=op),
            StepCounterHook(1, output_dir=to[2]),
            ProfilerHook(save_steps=1, output_dir=to[3]),
        ]
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        async with monitored(model.graph, hooks) as session:
            for _ in range(2):
                await session.run(model.train_op)
            if fails:
                raise ZeroDivisionError
    kinds = ("session_log", "summary", "summary", "tagged_run_metadata")
    found = [steps_of_events(Path(each), kind) for each, kind in zip(to, kinds, strict=True)]
    assert found == [[0, 1, 2], [1, 2], [2], [0]]
