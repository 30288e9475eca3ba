"""What differs from TensorFlow's session on purpose, as "Move from TensorFlow 1" lists it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    ChiefSessionCreator,
    MonitoredSession,
    SessionRunHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from .models import Moments, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_an_empty_graph_is_refused_unless_a_creator_was_given_or_a_hook_builds_it() -> None:
    with tf.Graph().as_default(), v1.train.MonitoredSession() as theirs:
        assert not theirs.should_stop()

    with tf.Graph().as_default():
        session = MonitoredSession()
    with pytest.raises(RuntimeError, match="MonitoredSession got no session_creator"):
        await session.__aenter__()

    with tf.Graph().as_default():
        session = MonitoredSession([], ChiefSessionCreator())
    async with session:
        assert not session.should_stop()

    graph = tf.Graph()
    builds = Moments(begin=lambda: v1.assign_add(v1.train.get_or_create_global_step(), 1).name)
    async with monitored(graph, [builds, StopAtStepHook(last_step=2)]) as session:
        while not session.should_stop():
            await session.run("AssignAddVariableOp")
        assert session.global_step.value == 2


class TheirEnd(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.num_ends = 0

    def end(self, session: Any) -> None:
        self.num_ends += 1


async def test_after_close_in_the_block_its_end_is_clean() -> None:
    model, hook = counting_model(), TheirEnd()
    with model.graph.as_default(), pytest.raises(RuntimeError, match="already closed"):
        with v1.train.MonitoredSession(hooks=[hook]) as theirs:
            theirs.run(model.train_op)
            theirs.close()
    assert hook.num_ends == 2

    model, hook = counting_model(), TheirEnd()
    recorded = RecordingHook("ours")
    async with monitored(model.graph, [hook, recorded]) as session:
        await session.run(model.train_op)
        await session.close()
        assert session.should_stop()
        with pytest.raises(RuntimeError, match="Session is already closed"):
            await session.run(model.train_op)
        with pytest.raises(RuntimeError, match="Session is already closed"):
            await session.close()
    assert hook.num_ends == 1
    assert [moment for _, moment in recorded.log][-1] == "end"


async def test_an_error_after_close_in_the_block_leaves_it() -> None:
    model = counting_model()
    with pytest.raises(ZeroDivisionError):
        async with monitored(model.graph) as session:
            await session.close()
            raise ZeroDivisionError


async def test_a_graph_that_was_finalized_before_needs_a_finalized_scaffold() -> None:
    model = counting_model()
    model.graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized"):
        await monitored(model.graph).__aenter__()

    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        scaffold.finalize()
    async with monitored(model.graph, [], ChiefSessionCreator(scaffold)) as session:
        assert await session.run(model.train_op) == 1
    assert model.graph.finalized


async def test_hooks_go_by_the_step_as_it_is_also_where_runs_move_it_by_three(
    tmp_path: Path,
) -> None:
    model, saved = counting_model(), []

    class Listener(asynchooks.CheckpointSaverListener):
        async def after_save(self, session: Any, step: int) -> None:
            saved.append((type(step), step))

    with model.graph.as_default():
        by_three = v1.assign_add(model.step, 3)
        summary = v1.summary.scalar("one", tf.constant(1.0))
        directory = str(tmp_path / "summaries")
        hooks = [
            asynchooks.CheckpointSaverHook(
                str(tmp_path), save_steps=6, saver=v1.train.Saver(), listeners=[Listener()]
            ),
            asynchooks.SummarySaverHook(save_steps=3, output_dir=directory, summary_op=summary),
        ]
    async with monitored(model.graph, hooks) as session:
        for _ in range(6):
            await session.run(by_three)
    assert saved == [(int, 0), (int, 6), (int, 12), (int, 18)]
    assert summaries_in(tmp_path / "summaries") == [3, 9, 15]


def summaries_in(directory: Path) -> list[int]:
    v1.summary.FileWriterCache.clear()
    return [
        event.step
        for path in directory.glob("events*")
        for event in v1.train.summary_iterator(str(path))
        if event.summary.value
    ]


CHECKS: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "a step that is a text": (lambda train: train.StopAtStepHook(num_steps="3"), TypeError),
    "half a step": (lambda train: train.StopAtStepHook(last_step=2.5), TypeError),
    "an interval below 0": (lambda train: train.StepCounterHook(-1), ValueError),
    "tensors as a text": (lambda train: train.LoggingTensorHook("x", every_n_iter=1), TypeError),
    "no function": (lambda train: train.FeedFnHook(None), TypeError),
    "a wait for a text": (lambda train: train.GlobalStepWaiterHook("x"), TypeError),
    "no listener": (
        lambda train: train.CheckpointSaverHook("model", save_steps=1, listeners=[5]), TypeError,
    ),
    "no scaffold": (lambda train: train.ChiefSessionCreator(5), TypeError),
    "no address": (lambda train: train.ChiefSessionCreator(master=5), TypeError),
}  # fmt: skip


@pytest.mark.parametrize("what", CHECKS)
def test_wrong_arguments_are_refused_where_they_are_given(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, error = CHECKS[what]
    make(v1.train)  # is not
    with pytest.raises(error, match="give"):
        make(asynchooks)


async def test_options_of_the_caller_are_copied_and_metadata_is_its_own() -> None:
    model, seen = counting_model(), []
    options, metadata = v1.RunOptions(), v1.RunMetadata()

    class Traces(SessionRunHook):
        async def before_run(self, run_context: Any) -> asynchooks.SessionRunArgs:
            level = v1.RunOptions.FULL_TRACE
            return asynchooks.SessionRunArgs(None, options=v1.RunOptions(trace_level=level))

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append((run_values.options.trace_level, run_values.run_metadata is metadata))

    async with monitored(model.graph, [Traces()]) as session:
        await session.run(model.train_op, options=options, run_metadata=metadata)
    assert seen == [(v1.RunOptions.FULL_TRACE, True)]
    assert options.trace_level == v1.RunOptions.NO_TRACE
