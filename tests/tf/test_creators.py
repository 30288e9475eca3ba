"""Creators: what initialises and restores, the Scaffold, the context of a worker_fn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    ChiefSessionCreator,
    MonitoredSession,
    MonitoredTrainingSession,
    PreemptionError,
    Recovery,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import Scaffold

from .models import Moments, checkpoint_of, chief, counting_model, monitored, raising

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
coordinator = pytest.importorskip("tensorflow.python.distribute.distribute_coordinator")
PARAMETER_SERVER = v1.distribute.experimental.ParameterServerStrategy
COLLECTIVE = v1.distribute.experimental.MultiWorkerMirroredStrategy
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def creator_of(graph: Any, scaffold: dict[str, Any] | None = None, **args: Any) -> Any:
    with graph.as_default():
        return ChiefSessionCreator(Scaffold(**(scaffold or {})), **args)


async def test_without_a_checkpoint_init_op_runs_and_then_init_fn_with_the_users_scaffold() -> None:
    model, called = counting_model(), []

    def init_fn(scaffold: Any, session: Any) -> None:
        called.append(scaffold)
        session.run(model.train_op)

    with model.graph.as_default():
        first = v1.placeholder(tf.int64, [])
        scaffold = Scaffold(
            init_op=v1.assign(model.step, first),
            init_feed_dict={first: 5},
            init_fn=init_fn,
            ready_op=tf.constant([], dtype=tf.string),
        )
    async with monitored(model.graph, None, chief(model.graph, scaffold=scaffold)) as session:
        assert session.global_step.value == 6
    assert called == [scaffold]


async def test_a_checkpoint_goes_before_init_op_and_init_fn(tmp_path: Path) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 42)
    called: list[str] = []
    with model.graph.as_default():
        seen = tf.numpy_function(lambda: called.append("init_op"), [], [])
        args = {
            "init_op": tf.group(seen, v1.global_variables_initializer()),
            "init_fn": lambda scaffold, session: called.append("init_fn"),
        }
    creator = creator_of(model.graph, args, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, None, creator) as session:
        assert session.global_step.value == 42
        assert await session.run(model.train_op) == 43
    assert called == []


@pytest.mark.parametrize("has_checkpoint", [False, True])
async def test_local_init_op_runs_always(tmp_path: Path, has_checkpoint: bool) -> None:
    model = counting_model()
    if has_checkpoint:
        checkpoint_of(model, tmp_path, 42)
    with model.graph.as_default():
        key = v1.GraphKeys.LOCAL_VARIABLES
        local = v1.get_variable("local", initializer=8, collections=[key], trainable=False)
    creator = creator_of(model.graph, checkpoint_dir=str(tmp_path))
    read: list[int] = []
    hook = Moments(created=lambda session, coord: read.append(session.run(local)))
    async with monitored(model.graph, [hook], creator) as session:
        assert await session.run(local) == 8
        assert session.global_step.value == (42 if has_checkpoint else 0)
    assert read == [8]


async def test_a_model_that_is_not_ready_after_init_is_an_error_and_nothing_stays_open() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    with model.graph.as_default():
        args = {"init_op": tf.no_op()}
    session = monitored(model.graph, [hook], creator_of(model.graph, args))
    with pytest.raises(RuntimeError, match=r"Init operations did not make model ready"):
        await session.__aenter__()
    assert hook.log == [("a", "begin"), ("a", "on_error")]
    assert session.raw_session() is None
    assert not model.graph.finalized


async def test_the_creators_own_graph_counts_where_none_is_default_and_so_does_its_config() -> None:
    model = counting_model()
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    async with MonitoredSession(None, creator_of(model.graph, config=config)) as session:
        assert session.graph is model.graph
        assert await session.run(model.train_op) == 1
        assert session.raw_session()._config.intra_op_parallelism_threads == 1


async def test_two_savers_in_the_collection_are_an_error_at_opening() -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(2):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
    with pytest.raises(RuntimeError, match="More than one item in collection savers"):
        await monitored(model.graph).__aenter__()


async def initialise(scaffold: Any, session: Any) -> None:
    raise AssertionError("it was run, and nothing awaits it")


class Callable_:  # noqa: N801 - an object that is called
    async def __call__(self, scaffold: Any, session: Any) -> None:
        await initialise(scaffold, session)


COROUTINES: dict[str, Callable[..., Any]] = {
    "a coroutine function": initialise,
    "a lambda": lambda scaffold, session: initialise(scaffold, session),
    "an object": Callable_(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("init_fn", COROUTINES)
async def test_an_init_fn_that_is_a_coroutine_is_refused(init_fn: str) -> None:
    model = counting_model()
    creator = creator_of(model.graph, {"init_fn": COROUTINES[init_fn]})
    with pytest.raises(TypeError, match="init_fn of the Scaffold returned .*coroutine") as caught:
        async with monitored(model.graph, [], creator):
            raise AssertionError("it was opened")
    assert "after_create_session of a hook" in str(caught.value)


async def test_finalizing_the_graph_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, lose_once = counting_model(), raising(PreemptionError("lost"))
    session = monitored(model.graph, recovery=Recovery(first_pause_secs=0))
    with caplog.at_level(logging.INFO, "tensorflow"):
        async with session:
            await session.run_step_fn(lambda step_context: lose_once())
            assert await session.run(model.train_op) == 1
            assert model.graph.finalized
    said = [record.getMessage() for record in caplog.records]
    assert said.count("Graph was finalized.") == 1
    assert said.count("Running local_init_op.") == 2  # for the recreated session, too


async def test_sessions_one_after_the_other_find_a_finalized_graph() -> None:
    model = counting_model()
    creator = chief(model.graph)
    for session in [monitored(model.graph, [], creator) for _ in range(2)]:
        async with session:
            assert model.graph.finalized
            assert await session.run(model.train_op) == 1
        assert not model.graph.finalized


CLUSTER = {"chief": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]}


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
        assert described(list(session._hooks.hooks)) == described(hooks)


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
