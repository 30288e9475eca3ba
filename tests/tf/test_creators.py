"""Creators: what initialises and restores, and the Scaffold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    ChiefSessionCreator,
    MonitoredSession,
)
from asynchooks.testing import RecordingHook
from asynchooks.tf import Scaffold

from .models import Moments, checkpoint_of, chief, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
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


async def test_sessions_one_after_the_other_find_a_finalized_graph() -> None:
    model = counting_model()
    creator = chief(model.graph)
    for session in [monitored(model.graph, [], creator) for _ in range(2)]:
        async with session:
            assert model.graph.finalized
            assert await session.run(model.train_op) == 1
        assert not model.graph.finalized
