"""Sessions in a worker_fn of TensorFlow's distribute coordinator: whose they are, what they write.

TensorFlow's own session, made in the same context, is what they are compared with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import MonitoredSession, MonitoredTrainingSession
from asynchooks.testing import RecordingHook

from .models import counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
coordinator = pytest.importorskip("tensorflow.python.distribute.distribute_coordinator")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

CLUSTER = {"chief": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]}
PARAMETER_SERVER = v1.distribute.experimental.ParameterServerStrategy
COLLECTIVE = v1.distribute.experimental.MultiWorkerMirroredStrategy


@contextmanager
def task(strategy: Any, kind: str, index: int, config: Any = None) -> Iterator[None]:
    """As in a worker_fn of this task, in a graph of its own; no server runs."""
    jobs = {**CLUSTER, "ps": ["localhost:4"]} if strategy is PARAMETER_SERVER else CLUSTER
    spec = tf.train.ClusterSpec(jobs)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=kind, task_id=index
    )
    with tf.Graph().as_default():
        context = coordinator._WorkerContext(
            strategy(cluster_resolver=resolver), spec, kind, index, session_config=config
        )
        v1.train.get_or_create_global_step()
        with context:
            yield


def described(hooks: list[Any]) -> list[Any]:
    """What the hooks are, and where they write: TensorFlow's and ours alike."""
    found = []
    for hook in hooks:
        directories = [
            getattr(hook, "_checkpoint_dir", None),
            getattr(hook, "_output_dir", None),
            getattr(hook, "_directory", None),
            getattr(getattr(hook, "_output", None), "_directory", None),
        ]
        timer = getattr(hook, "_timer", None)
        every = None if timer is None else (timer._every_secs, timer._every_steps)
        where = next((each for each in directories if each), None)
        found.append((type(hook).__name__, where, every))
    return found


class Opened(Exception):  # noqa: N818 - it is how far the session shall come
    """TensorFlow's session would now wait for its servers."""


def hooks_of_tensorflow(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, list[Any]]:
    """The creator and the hooks that TensorFlow's MonitoredTrainingSession makes."""
    made: dict[str, Any] = {}
    module = pytest.importorskip("tensorflow.python.training.monitored_session")

    def keep(session_creator: Any, hooks: Any, stop_grace_period_secs: float) -> None:
        made.update(creator=session_creator, hooks=hooks)
        raise Opened

    monkeypatch.setattr(module, "MonitoredSession", keep)
    with pytest.raises(Opened):
        v1.train.MonitoredTrainingSession(**arguments)
    return made["creator"], made["hooks"]


TASKS = [("chief", 0), ("worker", 0), ("worker", 1)]


@pytest.mark.parametrize("strategy", [PARAMETER_SERVER, COLLECTIVE])
@pytest.mark.parametrize(("kind", "index"), TASKS)
@pytest.mark.parametrize(
    "times",
    [{"save_checkpoint_steps": 7, "log_step_count_steps": 3}, {"save_checkpoint_secs": 60.0}],
)
def test_hooks_and_creator_are_tensorflows(
    strategy: Any,
    kind: str,
    index: int,
    times: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = v1.ConfigProto(intra_op_parallelism_threads=3)
    with task(strategy, kind, index, config):
        given = {"checkpoint_dir": str(tmp_path), "config": v1.ConfigProto(), **times}
        theirs = RecordingHook("a"), RecordingHook("b")
        creator, hooks = hooks_of_tensorflow(
            monkeypatch, hooks=[theirs[0]], chief_only_hooks=[theirs[1]], **given
        )
        session = MonitoredTrainingSession(hooks=[theirs[0]], chief_only_hooks=[theirs[1]], **given)
        ours: Any = session._handle.creator
        assert type(ours).__name__ == type(creator).__name__
        assert (ours._master, ours._config) == (creator._master, creator._config)
        assert described(session._hooks.hooks) == described(hooks)


def test_collective_saves_by_seconds_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with task(COLLECTIVE, "worker", 1), caplog.at_level(logging.WARNING, "asynchooks"):
        MonitoredTrainingSession(checkpoint_dir=str(tmp_path), save_checkpoint_secs=60)
    assert "instead of each 60 s checkpoints are saved each 1000 steps" in caplog.text


def test_checkpoints_are_saved_where_summaries_are_off(tmp_path: Path) -> None:
    with task(PARAMETER_SERVER, "chief", 0):
        session = MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_summaries_steps=None, log_step_count_steps=None
        )
    assert [type(hook).__name__ for hook in session._hooks.hooks] == ["CheckpointSaverHook"]


@pytest.mark.parametrize(("kind", "index"), TASKS)
def test_a_session_without_a_creator_is_of_the_task(kind: str, index: int) -> None:
    with task(PARAMETER_SERVER, kind, index):
        creator: Any = MonitoredSession([])._handle.creator
    is_chief = kind == "chief"
    expected = asynchooks.ChiefSessionCreator if is_chief else asynchooks.WorkerSessionCreator
    assert type(creator) is expected
    assert creator.master == f"grpc://{CLUSTER[kind][index]}"


async def test_a_local_worker_fn_trains_and_saves(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        context = coordinator._WorkerContext(
            v1.distribute.OneDeviceStrategy("/cpu:0"), None, None, None
        )
        with context:
            session = MonitoredTrainingSession(checkpoint_dir=str(tmp_path))
    async with session:
        for _ in range(3):
            await session.run(model.train_op)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-3")


def test_other_threads_have_no_context(tmp_path: Path) -> None:
    made = []
    with task(PARAMETER_SERVER, "worker", 1):

        def make() -> None:
            with tf.Graph().as_default():
                made.append(MonitoredTrainingSession()._handle.creator.master)  # type: ignore[attr-defined]

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    assert made == [""]
