"""ChiefSessionCreator: what initialises, what restores, and what does neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import MonitoredSession
from asynchooks.testing import RecordingHook

from .models import (
    ChiefSessionCreator,
    Moments,
    checkpoint_of,
    counting_model,
    monitored,
    unavailable,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def creator_of(graph: Any, scaffold: dict[str, Any] | None = None, **args: Any) -> Any:
    with graph.as_default():
        return ChiefSessionCreator(v1.train.Scaffold(**(scaffold or {})), **args)


async def test_without_a_checkpoint_init_op_runs_and_then_init_fn() -> None:
    model = counting_model()
    with model.graph.as_default():
        init_op = v1.assign(model.step, 5)

    def init_fn(scaffold: Any, session: Any) -> None:
        session.run(model.train_op)

    with model.graph.as_default():
        args = {
            "init_fn": init_fn,
            "init_op": init_op,
            "ready_op": tf.constant([], dtype=tf.string),
        }
    async with monitored(model.graph, None, creator_of(model.graph, args)) as session:
        assert session.global_step.value == 6


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


async def test_the_newest_checkpoint_of_the_directory_is_restored(tmp_path: Path) -> None:
    model = counting_model()
    for step in (3, 7):
        checkpoint_of(model, tmp_path, step)
    creator = creator_of(model.graph, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, None, creator) as session:
        assert session.global_step.value == 7


async def test_a_named_checkpoint_is_restored(tmp_path: Path) -> None:
    model = counting_model()
    path = checkpoint_of(model, tmp_path, 11)
    creator = creator_of(model.graph, checkpoint_filename_with_path=path)
    async with monitored(model.graph, None, creator) as session:
        assert session.global_step.value == 11


@pytest.mark.parametrize("has_checkpoint", [False, True])
async def test_local_init_op_runs_always(tmp_path: Path, has_checkpoint: bool) -> None:
    model = counting_model()
    if has_checkpoint:
        checkpoint_of(model, tmp_path, 42)
    with model.graph.as_default():
        key = v1.GraphKeys.LOCAL_VARIABLES
        local = v1.get_variable("local", initializer=8, collections=[key], trainable=False)
    creator = creator_of(model.graph, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, None, creator) as session:
        assert await session.run(local) == 8
        assert session.global_step.value == (42 if has_checkpoint else 0)


async def test_init_feed_dict_reaches_init_op() -> None:
    model = counting_model()
    with model.graph.as_default():
        first = v1.placeholder(tf.int64, [])
        args = {"init_op": v1.assign(model.step, first), "init_feed_dict": {first: 9}}
    async with monitored(model.graph, None, creator_of(model.graph, args)) as session:
        assert session.global_step.value == 9


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


async def test_unavailable_in_init_fn_is_retried_with_a_new_session() -> None:
    model = counting_model()
    tried: list[Any] = []

    def init_fn(scaffold: Any, session: Any) -> None:
        tried.append(session)
        if len(tried) == 1:
            raise unavailable()

    hook = RecordingHook("a")
    creator = creator_of(model.graph, {"init_fn": init_fn})
    async with monitored(model.graph, [hook], creator) as session:
        assert session.raw_session() is tried[1]
    assert len(tried) == 2
    assert hook.log == [("a", "begin"), ("a", "after_create_session"), ("a", "end")]


async def test_a_run_in_after_create_session_finds_an_initialised_model() -> None:
    model = counting_model()
    read: list[int] = []
    hook = Moments(created=lambda session, coord: read.append(session.run(model.step)))
    async with monitored(model.graph, [hook]):
        assert read == [0]


async def test_the_config_reaches_the_tensorflow_session() -> None:
    model = counting_model()
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    creator = creator_of(model.graph, config=config)
    async with monitored(model.graph, None, creator) as session:
        assert session.raw_session()._config.intra_op_parallelism_threads == 1


async def test_the_creators_own_graph_counts_where_none_is_default() -> None:
    model = counting_model()
    creator = creator_of(model.graph)
    async with MonitoredSession(None, creator) as session:
        assert session.graph is model.graph
        assert await session.run(model.train_op) == 1


async def test_two_savers_in_the_collection_are_an_error_at_opening() -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(2):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
    with pytest.raises(RuntimeError, match="More than one item in collection savers"):
        await monitored(model.graph).__aenter__()
