"""TensorFlow's hooks and ours leave the same log, values, events and files."""

import re
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .hooks_beside import Program, Setup, check_beside
from .models import (
    TheirMoments,
    aborted,
    out_of_range,
    raising,
    v1,
)

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
    v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(max_to_keep=2))
    return [s.train.CheckpointSaverHook(s.directory, save_steps=5)]


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
    "nan fails": Program(FAILS, "NanLossDuringTrainingError"),
    "nan stops": Program(with_loss(1.0, np.nan, fail_on_nan_loss=False), "WARNING Model diverged"),
    "feeds": Program(feeding(2.0, 3.0, 0.5), "'read': 12"),
    "feeds the same twice": Program(both(feeding(2.0), feeding(3.0)), "RuntimeError", num_runs=1),
    "input ends": Program(
        lambda s: [s.train.FeedFnHook(raising(None, None, None, out_of_range()))], "'read': 2"
    ),
    "final ops": Program(finals, ("final float32: ", "'t': array(", "None"), num_sessions=2),
    "final ops of an ended input": Program(ends_with(ended_queue), "FinalOpsHook: input ended"),
    "no final ops after a failure": Program(both(finals, FAILS), "NanLoss"),
    "stops at a step": Program(both(stops(last_step=7), stops(last_step=9)), "'read': 6"),
    "stops after a restore": Program(
        both(saves(save_steps=100), stops(last_step=17)), "'read': 16", num_sessions=2
    ),
    "waits for what is there": Program(
        both(waits(9), stops(num_steps=20)),
        "INFO Waiting for global step 9 before starting training.",
        num_sessions=2,
        scaffold={"init_fn": lambda: begin_at_step_9},
    ),
    "summaries": Program(
        both(saves(save_steps=100), summaries), ("(9, 'summary'", "status: START"), num_sessions=2
    ),
    "rates": Program(both(saves(save_steps=100), COUNTERS), "global_step/sec", 5, num_sessions=3),
    # TensorFlow warns five times a process in all: two of these tests may be in it
    "a step that stands still": Program(
        lambda s: [s.train.StepCounterHook()], "WARNING the step stands still", 2, trains=False
    ),
    "traces": Program(
        both(saves(save_steps=100), PROFILERS), ("timeline-20", "('O', 'Tensor')"), num_sessions=2
    ),
    "saves": Program(saves_in_many_ways, ("wise.man-5.meta", "model.ckpt-5.index': {'variable': ")),
    "saves by the scaffold's own saver": Program(
        saves(save_steps=3), "ckpt-13.index", scaffold={"saver": lambda: v1.train.Saver()}
    ),
    "saves by the one in the collection": Program(saver_of_collection, "model.ckpt-10.index"),
    "saves by two": Program(
        both(saves(save_steps=3), saves(save_steps=4, checkpoint_basename="b")), "b-12.index"
    ),
    "saves until a failure": Program(both(saves(save_steps=2), FAILS), "NanLoss"),
    "all": Program(lambda s: all_hooks(s)[::-1], "timeline-6.json"),
}


TENSORFLOWS = {
    **dict.fromkeys(("logs", "feeds", "input ends", "final ops", "summaries", "saves"), "auto"),
    **dict.fromkeys(("stops after a restore", "waits for what is there", "rates"), "inline"),
    **dict.fromkeys(("nan fails", "feeds the same twice", "traces", "all"), "thread"),
}
"""With TensorFlow's own hooks under our session, too; and where steps run then."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "anyio_backend"), [*zip(PROGRAMS, cycle(["asyncio", "trio"]))])
async def test_what_is_left_is_tensorflows(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await check_beside(PROGRAMS[program], tmp_path, caplog) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "anyio_backend"), [*zip(TENSORFLOWS, cycle(["trio", "asyncio"]))]
)
async def test_what_tensorflows_own_hooks_leave_under_ours_is_the_same(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, its = TENSORFLOWS[program], PROGRAMS[program]
    assert await check_beside(its, tmp_path, caplog, v1.train, step_runner=runner) == ""


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
