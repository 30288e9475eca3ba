"""Which graph a session runs, whatever is the default one around it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import FunctionSessionCreator, LoggingTensorHook, MonitoredSession, SessionRunHook
from asynchooks.tf import CheckpointSaverHook, ProfilerHook

from .models import ChiefSessionCreator, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

WITHOUT_EAGER = """
import logging, sys
import anyio
import tensorflow as tf
import asynchooks as ah

v1 = tf.compat.v1
v1.disable_eager_execution()
logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("asynchooks").setLevel(logging.INFO)

with tf.Graph().as_default() as graph:
    train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    creator = ah.ChiefSessionCreator()


async def main():
    async with ah.MonitoredSession([ah.StopAtStepHook(last_step=3)], creator) as session:
        assert session.graph is graph
        while not session.should_stop():
            print(await session.run(train_op))
    step = ah.FunctionSessionCreator(lambda: {"loss": 1})
    hook = ah.LoggingTensorHook(["loss"], every_n_iter=1)
    async with ah.MonitoredSession([hook], step) as session:
        await session.run([])


anyio.run(main)
step = v1.assign_add(v1.train.get_or_create_global_step(), 1)


async def in_the_default_graph():
    async with ah.MonitoredSession([ah.StopAtStepHook(last_step=1)]) as session:
        print(await session.run(step))


anyio.run(in_the_default_graph)
"""


def test_without_eager_execution_the_graphs_are_the_same_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EAGER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", "2", "3", "loss = 1", "1"]


async def test_inside_a_graph_a_step_function_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": 1})
    with counting_model().graph.as_default():
        with caplog.at_level("INFO", "asynchooks"):
            hook = LoggingTensorHook(["loss"], every_n_iter=1)
            async with MonitoredSession([hook], creator) as session:
                await session.run([])
        for needy in (
            CheckpointSaverHook(str(tmp_path), save_steps=1),
            ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
        ):
            with pytest.raises(RuntimeError, match="Hook (needs a session|on a step function)"):
                async with MonitoredSession([needy], creator):
                    pass
    assert "loss = 1" in [r.getMessage() for r in caplog.records]


async def test_a_session_made_outside_of_its_graph_is_an_error() -> None:
    counting_model()
    with tf.Graph().as_default():
        session = MonitoredSession([asynchooks.StopAtStepHook(last_step=3)])
    with pytest.raises(RuntimeError, match="build it first and make the session inside"):
        async with session:
            pass


async def test_what_a_failing_creation_leaves_is_freed_off_the_event_loop() -> None:
    """A TensorFlow session that is collected closes, which may block on a dead server."""
    freed: list[int] = []

    class Tracked:
        def __del__(self) -> None:
            freed.append(threading.get_ident())

    class Failing(ChiefSessionCreator):
        def create_session(self) -> Any:
            session = Tracked()
            raise ZeroDivisionError(str(session))

    model = counting_model()
    with model.graph.as_default():
        creator = Failing()
    with pytest.raises(ZeroDivisionError):
        async with monitored(model.graph, [SessionRunHook()], creator):
            pass
    assert len(freed) == 1
    assert freed[0] != threading.get_ident()


async def test_the_wrong_with_is_an_error() -> None:
    with pytest.raises(TypeError, match="opened by `async with session:`"):
        with MonitoredSession([], FunctionSessionCreator(dict)):
            pass


def test_an_address_without_its_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match='give the protocol, too: "grpc://localhost:2222"'):
        ChiefSessionCreator(master="localhost:2222")


async def test_a_feed_of_another_graph_names_the_hook_and_the_moment() -> None:
    model = counting_model()
    with tf.Graph().as_default():
        other = v1.placeholder(tf.float32, [])
    hook = asynchooks.FeedFnHook(lambda: {other: 1.0})
    async with monitored(model.graph, [hook]) as session:
        with pytest.raises(ValueError, match="no element of the session's graph") as caught:
            await session.run(model.train_op)
    assert "in before_run of FeedFnHook" in caught.value.__notes__


async def test_a_worker_that_opens_on_a_graph_in_use_has_it_for_itself_in_begin() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = asynchooks.SharedSessionCreator(ChiefSessionCreator())
    is_alone: list[bool] = []

    class Looks(SessionRunHook):
        async def begin(self) -> None:
            is_alone.append(first.global_step.statistics().is_exclusive)

    async with monitored(model.graph, None, creator) as first:
        async with monitored(model.graph, [Looks()], creator):
            assert not first.global_step.statistics().is_exclusive
    assert is_alone == [True]


FORGETFUL: dict[str, Callable[[], list[Any]]] = {
    "no hooks": list,
    "a hook that needs a step": lambda: [asynchooks.StopAtStepHook(last_step=3)],
    "a hook with a name": lambda: [LoggingTensorHook(["loss"], every_n_iter=1)],
    "a hook that fetches": lambda: [asynchooks.NanTensorHook("loss")],
}


@pytest.mark.parametrize("hooks", FORGETFUL)
async def test_a_forgotten_creator_is_reported_before_missing_parts_of_the_graph(
    hooks: str,
) -> None:
    with tf.Graph().as_default():
        session = MonitoredSession(FORGETFUL[hooks]())
    with pytest.raises(RuntimeError) as caught:
        async with session:
            await session.run("loss")
    assert str(caught.value).startswith(
        "MonitoredSession got no session_creator. To train a step function, give it one: "
        "MonitoredSession(hooks, FunctionSessionCreator(step_fn))."
    )


async def test_a_graph_that_a_hook_builds_needs_no_creator() -> None:
    class Build(SessionRunHook):
        async def begin(self) -> None:
            self.one = tf.constant(1, name="one")

    with tf.Graph().as_default():
        session = MonitoredSession([Build()])
    async with session:
        assert await session.run("one:0") == 1


async def test_other_errors_of_begin_stay_what_they_are() -> None:
    class Fails(SessionRunHook):
        async def begin(self) -> None:
            raise ZeroDivisionError

    with tf.Graph().as_default():
        session = MonitoredSession([Fails()])
    with pytest.raises(ZeroDivisionError):
        async with session:
            raise AssertionError("it was opened")
