"""Misuse and broken files on graph sessions: the error says whose, when, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    SummarySaverHook,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import MonitoredTrainingSession, SingularMonitoredSession, WorkerSessionCreator

from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    monitored,
    raising,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def training_in(model: Model, directory: Path) -> MonitoredSession:
    """A session that restores from the directory and saves there."""
    with model.graph.as_default():
        return MonitoredTrainingSession(checkpoint_dir=str(directory))


async def error_of(session: MonitoredSession, fetches: Any = None) -> BaseException:
    """What opening, or a run, raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        async with session:
            await session.run([] if fetches is None else fetches)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


async def test_a_checkpoint_directory_under_a_regular_file_is_an_error(tmp_path: Path) -> None:
    model, recorder = counting_model(), RecordingHook("a")
    file = tmp_path / "file"
    file.write_text("regular")
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        saver = CheckpointSaverHook(str(file / "model"), save_steps=1, scaffold=scaffold)
    session = monitored(model.graph, [recorder, saver], ChiefSessionCreator(scaffold))
    error = await error_of(session)
    assert isinstance(error, tf.errors.OpError)
    assert f"the checkpoint directory {str(file / 'model')!r} cannot be made" in notes(error)
    assert "in begin of CheckpointSaverHook" in notes(error)
    assert recorder.log == [("a", "begin"), ("a", "on_error")]
    assert not model.graph.finalized


DATA = ".data-00000-of-00001"
BREAKS = {
    "cut index": lambda path: cut(path + ".index"),
    "cut data": lambda path: cut(path + DATA),
    "no index": lambda path: os.remove(path + ".index"),
    "no data": lambda path: os.remove(path + DATA),
}


@pytest.mark.parametrize("case", BREAKS)
async def test_a_broken_checkpoint_is_named_with_the_moment_and_nothing_is_overwritten(
    case: str, tmp_path: Path
) -> None:
    model = counting_model()
    path = [checkpoint_of(model, tmp_path, step) for step in (3, 7)][-1]
    BREAKS[case](path)
    before = contents(tmp_path)
    error = await error_of(training_in(model, tmp_path))
    assert isinstance(error, (tf.errors.OpError, ValueError))
    assert "in create_session of ChiefSessionCreator" in notes(error)
    assert repr(path) in notes(error)
    assert contents(tmp_path) | before == contents(tmp_path), "all is as it was"


@pytest.mark.parametrize("case", ["cut index", "no data"])
async def test_a_broken_checkpoint_given_by_name_is_named_with_the_moment(
    case: str, tmp_path: Path
) -> None:
    model = counting_model()
    path = checkpoint_of(model, tmp_path, 7)
    BREAKS[case](path)
    with model.graph.as_default():
        session = SingularMonitoredSession(checkpoint_filename_with_path=path)
    error = await error_of(session)
    assert isinstance(error, tf.errors.OpError)
    assert path in notes(error)
    assert "in create_session of ChiefSessionCreator" in notes(error)


@pytest.mark.parametrize("state", ["", "no proto {", "\0\1\2"])
async def test_a_state_file_that_cannot_be_read_is_an_error_and_nothing_is_overwritten(
    state: str, tmp_path: Path
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 7)
    (tmp_path / "checkpoint").write_text(state)
    before = contents(tmp_path)
    error = await error_of(training_in(model, tmp_path))
    assert isinstance(error, ValueError)
    assert str(tmp_path) in str(error)
    assert state == "" or "which names the newest checkpoint, cannot be read" in str(error)
    assert contents(tmp_path) | before == contents(tmp_path), "all is as it was"


class BrokenWriter:
    """A summary writer on a full disk."""

    def add_summary(self, summary: Any, global_step: int) -> None:
        raise OSError("no space left")

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        pass

    def flush(self) -> None:
        pass


async def test_the_error_of_a_writer_names_hook_and_moment() -> None:
    model = counting_model()
    with model.graph.as_default():
        summary = v1.summary.scalar("value", tf.constant(1.0))
    hook = SummarySaverHook(save_steps=1, summary_writer=BrokenWriter(), summary_op=summary)
    async with monitored(model.graph, [hook]) as session:
        with pytest.raises(OSError, match="no space left") as caught:
            await session.run(model.train_op)
        assert "in after_run of SummarySaverHook" in notes(caught.value)
        assert not session.should_stop()


def add_op(*_: object) -> None:
    tf.constant(1.0)


class TheirAdding(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def before_run(self, run_context: Any) -> None:
        add_op()


ADDING: dict[str, Any] = {
    "after_create_session of Moments": Moments(created=add_op),
    "before_run of Moments": Moments(before_run=add_op),
    "before_run of TheirAdding": TheirAdding(),
}


@pytest.mark.parametrize("blamed", ADDING)
async def test_ops_added_after_the_graph_is_final_name_hook_and_moment(blamed: str) -> None:
    error = await error_of(monitored(counting_model().graph, [ADDING[blamed]]))
    assert isinstance(error, RuntimeError)
    assert "Graph is finalized and cannot be modified" in str(error)
    assert f"in {blamed}" in notes(error)


FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nan": (NanTensorHook, "before_run of NanTensorHook"),
    "their nan": (v1.train.NanTensorHook, "before_run of NanTensorHook"),
    "logging": (lambda x: LoggingTensorHook([x], every_n_iter=1), "begin of LoggingTensorHook"),
    "final ops": (FinalOpsHook, "end of FinalOpsHook"),
    "summaries": (
        lambda x: SummarySaverHook(save_steps=1, summary_op=x, summary_writer=BrokenWriter()),
        "before_run of SummarySaverHook",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_a_tensor_of_another_graph_names_hook_and_moment(case: str) -> None:
    model = counting_model()
    with tf.Graph().as_default():
        foreign = tf.constant("", name="foreign")
    make, blamed = FOREIGN[case]
    error = await error_of(monitored(model.graph, [make(foreign)]), model.train_op)
    assert isinstance(error, ValueError)
    assert "foreign" in str(error)
    assert f"in {blamed}" in notes(error)


@pytest.mark.parametrize("num_savers", [0, 2])
async def test_a_missing_saver_is_an_error(num_savers: int, tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(num_savers):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        creator = ChiefSessionCreator(v1.train.Scaffold(saver=v1.train.Saver()))
    saving = CheckpointSaverHook(str(tmp_path), save_steps=1)
    error = await error_of(monitored(model.graph, [saving], creator))
    assert isinstance(error, RuntimeError)
    assert f"holds {num_savers} savers, expected one; give CheckpointSaverHook a" in str(error)
    assert "in after_create_session of CheckpointSaverHook" in notes(error)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "class": (
        lambda: SingularMonitoredSession([SessionRunHook]),  # type: ignore[list-item]
        TypeError,
        r"is the class SessionRunHook; give an instance",
    ),
    "one hook": (
        lambda: MonitoredTrainingSession(hooks=SessionRunHook()),  # type: ignore[arg-type]
        TypeError,
        "give a list of hooks|give an iterable",
    ),
    "scaffold": (lambda: ChiefSessionCreator("model"), TypeError, "scaffold is 'model'; give a"),
    "heartbeat": (lambda: ChiefSessionCreator(heartbeat_secs=0), ValueError, "heartbeat_secs is 0"),
    "max wait": (
        lambda: WorkerSessionCreator(max_wait_secs=-1),
        ValueError,
        "max_wait_secs is -1; give seconds >= 0",
    ),
    "their creator": (
        lambda: MonitoredSession([], v1.train.ChiefSessionCreator()),
        TypeError,
        "TensorFlow's own; give asynchooks.ChiefSessionCreator",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    make, error, message = WRONG[case]
    with counting_model().graph.as_default(), pytest.raises(error, match=message):
        make()


async def test_a_checkpoint_that_is_too_short_does_not_pass_for_the_end_of_input(
    tmp_path: Path,
) -> None:
    model = counting_model()
    path = checkpoint_of(model, tmp_path, 7)
    lose_once = Moments(before_run=raising(None, aborted()))
    with pytest.raises(tf.errors.DataLossError, match="less bytes"):
        async with monitored(
            model.graph, [lose_once], ChiefSessionCreator(checkpoint_dir=str(tmp_path))
        ) as session:
            await session.run(model.train_op)
            os.truncate(f"{path}.data-00000-of-00001", 4)
            await session.run(model.train_op)
