"""Errors on graphs: of a run as TensorFlow's own; of misuse with whose, when, and what to do."""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedFnHook,
    FinalOpsHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunArgs,
)
from asynchooks.tf import MonitoredTrainingSession, WorkerSessionCreator

from ..support.moments import at
from .models import (
    ChiefSessionCreator,
    TheirMoments,
    checkpoint_of,
    chief,
    counting_model,
    hide_private_way,
    monitored,
    tf,
    v1,
)


async def error_of(session: MonitoredSession, fetches: Any = ()) -> tuple[BaseException, str]:
    """What opening, a run, or the end raises, and its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        async with session:
            await session.run(fetches)
    return caught.value, "\n".join(getattr(caught.value, "__notes__", []))


async def test_a_checkpoint_directory_under_a_regular_file_is_an_error(tmp_path: Path) -> None:
    model, file = counting_model(), tmp_path / "file"
    file.write_text("regular")
    hook = CheckpointSaverHook(file / "model", save_steps=1)
    error, notes = await error_of(monitored(model.graph, [hook]))
    assert isinstance(error, tf.errors.OpError)
    assert f"the checkpoint directory {str(file / 'model')!r} cannot be made" in notes
    assert "in begin of CheckpointSaverHook" in notes


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("harm", [cut, os.remove, lambda path: os.truncate(path, 4)])
@pytest.mark.parametrize("argument", ["checkpoint_dir", "checkpoint_filename_with_path"])
async def test_a_broken_checkpoint_is_named_with_the_moment_and_nothing_is_overwritten(
    argument: str, harm: Callable[[str], None], suffix: str, tmp_path: Path
) -> None:
    """One that is too short does not pass for the end of input."""
    model = counting_model()
    path = [checkpoint_of(model, tmp_path, step) for step in (3, 7)][-1]
    harm(path + suffix)
    before = contents(tmp_path)
    creator = chief(model.graph, **{argument: str(tmp_path) if "dir" in argument else path})
    hook = CheckpointSaverHook(tmp_path, save_steps=1)
    error, notes = await error_of(monitored(model.graph, [hook], creator))
    assert isinstance(error, (tf.errors.OpError, ValueError))
    assert not isinstance(error, tf.errors.OutOfRangeError)
    assert "in create_session of ChiefSessionCreator" in notes
    assert repr(path) in notes
    assert contents(tmp_path) | before == contents(tmp_path), "all is as it was"


@pytest.mark.parametrize("state", ["", "no proto {", "\0\1\2"])
async def test_a_state_file_that_cannot_be_read_is_an_error(state: str, tmp_path: Path) -> None:
    """TensorFlow would start from scratch, and overwrite checkpoints."""
    model = counting_model()
    checkpoint_of(model, tmp_path, 7)
    (tmp_path / "checkpoint").write_text(state)
    with model.graph.as_default():
        session = MonitoredTrainingSession(checkpoint_dir=str(tmp_path))
    error, _ = await error_of(session)
    assert isinstance(error, ValueError)
    assert str(tmp_path) in str(error)
    assert (tmp_path / "checkpoint").read_text() == state


def add_op(*_: object) -> None:
    tf.constant(1.0)


with tf.Graph().as_default():
    FOREIGN = tf.constant("", name="foreign")

MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    "after_create_session of At": (lambda: at(after_create_session=add_op), "Graph is finalized"),
    "before_run of At": (lambda: at(before_run=add_op), "Graph is finalized"),
    "before_run of TheirMoments": (lambda: TheirMoments(before_run=add_op), "Graph is finalized"),
    "before_run of NanTensorHook": (lambda: NanTensorHook(FOREIGN), "foreign"),
    "in before_run of NanTensorHook": (lambda: v1.train.NanTensorHook(FOREIGN), "foreign"),
    "end of FinalOpsHook": (lambda: FinalOpsHook(FOREIGN), "foreign"),
    "before_run of FeedFnHook": (lambda: FeedFnHook(lambda: {FOREIGN: ""}), "foreign"),
}


@pytest.mark.parametrize("blamed", MISUSES)
async def test_misuse_of_a_graph_names_hook_and_moment(blamed: str) -> None:
    make, message = MISUSES[blamed]
    error, notes = await error_of(monitored(counting_model().graph, [make()]))
    assert isinstance(error, (RuntimeError, ValueError, TypeError))
    assert message in str(error)
    assert blamed in notes


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ChiefSessionCreator("model"), TypeError, "scaffold is 'model'; give a"),
    (lambda: ChiefSessionCreator(master="host:2"), ValueError, 'give .*: "grpc://host:2"'),
    (lambda: WorkerSessionCreator(max_wait_secs=-1), ValueError, "max_wait_secs is -1; give"),
    (
        lambda: MonitoredSession([], v1.train.ChiefSessionCreator()),
        TypeError,
        "TensorFlow's own; give asynchooks.ChiefSessionCreator",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_where_they_are_given(
    make: Any, error: type[Exception], message: str
) -> None:
    with counting_model().graph.as_default(), pytest.raises(error, match=message):
        make()


class Failing:
    """A graph with runs that fail, each in another way; `x` fed with 0 lets `numbers` fail."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            x = self.x = v1.placeholder_with_default(0.0, (), "x")
            numbers = tf.debugging.check_numerics(1.0 / x, "no number", name="numbers")
            rest = v1.data.make_one_shot_iterator(tf.data.Dataset.range(0)).get_next("rest")
            # in no collection, so that it is neither initialized nor missed
            unset = v1.get_variable("unset", initializer=1.0, use_resource=True, collections=[])
            self.step = v1.train.get_or_create_global_step()
            self.fetches: dict[str, Any] = {
                "tensor": numbers,
                "nested": {"a": [x, numbers], "b": (x.op,)},
                "end of input": rest,
                "assertion": tf.debugging.Assert(x > 0.0, [x], name="assertion"),
                "uninitialized": tf.identity(unset, name="uninitialized"),
            }

    def arguments(self, kind: str) -> list[tuple[Any, ...]]:
        fetches, options = self.fetches[kind], (v1.RunOptions(), v1.RunMetadata())
        return [(fetches,), (fetches, {self.x: 0.0}), (fetches, None, *options)]


def facts(error: BaseException) -> tuple[Any, ...]:
    assert isinstance(error, tf.errors.OpError)
    op = None if error.op is None else error.op.name
    node = None if error.node_def is None else error.node_def.name
    return type(error), op, node, error.message, str(error)


def theirs(model: Failing, kind: str) -> list[tuple[Any, ...]]:
    """TensorFlow's errors; each but one names the op and shows this file."""
    found = []
    with model.graph.as_default(), v1.train.MonitoredSession() as session:
        for args in model.arguments(kind):
            with pytest.raises(tf.errors.OpError) as caught:
                session.run(*args)
            found.append(facts(caught.value))
            _, op, _, message, text = found[-1]
            assert text.count("Graph execution error") == 1
            assert (f'File "{__file__}"' in message) == (op is not None)
            assert (op is None) == (kind == "assertion")  # which is in a function of the graph
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_the_error_of_a_run_is_tensorflows(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    its, mine = (Failing() for _ in range(2))  # of one stack
    expected = {kind: theirs(its, kind) for kind in its.fetches}
    async with monitored(mine.graph, step_runner=runner) as session:
        for kind, errors in expected.items():
            for args, each in zip(mine.arguments(kind), errors, strict=True):
                for _ in range(3):
                    with pytest.raises(tf.errors.OpError) as caught:
                        await session.run(*args)
                    assert facts(caught.value) == each
    hide_private_way(monkeypatch)
    async with monitored(mine.graph, step_runner=runner) as session:
        for kind, errors in expected.items():
            with pytest.raises(tf.errors.OpError) as caught:
                await session.run(mine.fetches[kind])
            assert facts(caught.value) == errors[0]


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_it_is_so_wherever_the_run_is_made(runner: Any) -> None:
    its, mine = (Failing() for _ in range(2))  # of one stack
    expected = theirs(its, "tensor")[0]
    bad = mine.fetches["tensor"]

    async def raw_in_coroutine(step_context: Any) -> Any:
        return step_context.session.run(bad)

    async def with_hooks(step_context: Any) -> Any:
        return await step_context.run_with_hooks(bad)

    ways: list[tuple[Any, Any]] = [
        *((None, each) for each in (raw_in_coroutine, with_hooks)),
        (None, lambda step_context: step_context.session.run(bad)),
        (at(before_run=lambda context: SessionRunArgs(bad)), None),
        (at(before_run=lambda context: context.session.run(bad)), None),
        (FinalOpsHook(bad), None),
        (EvaluationHook(lambda raw, step: raw.run(bad), every_n_steps=1000), None),
    ]
    for hook, step_fn in ways:
        with pytest.raises(tf.errors.OpError) as caught:
            async with monitored(mine.graph, hook and [hook], step_runner=runner) as session:
                await (session.run_step_fn(step_fn) if step_fn else session.run(mine.step))
        assert facts(caught.value) == expected, (hook, step_fn)


async def test_an_error_that_is_dropped_is_freed_at_once() -> None:
    """Frames that held it would make a ring with it, and keep the session for the collector."""
    model = Failing()
    async with monitored(model.graph, step_runner="inline") as session:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                try:
                    await session.run(model.fetches["tensor"])
                except tf.errors.InvalidArgumentError as error:
                    left = weakref.ref(error)
                assert left() is None
        finally:
            gc.enable()
