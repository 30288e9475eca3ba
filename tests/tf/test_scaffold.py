"""A user's Scaffold: completed once, and with an init_fn that TensorFlow can call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import ChiefSessionCreator, MonitoredSession, PreemptionError, Recovery
from asynchooks.tf import Scaffold

from .models import Model, counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def session_with(model: Model, init_fn: Any) -> MonitoredSession:
    with model.graph.as_default():
        return MonitoredSession([], ChiefSessionCreator(Scaffold(init_fn=init_fn)))


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
    session = session_with(counting_model(), COROUTINES[init_fn])
    with pytest.raises(TypeError, match="init_fn of the Scaffold returned .*coroutine") as caught:
        async with session:
            raise AssertionError("it was opened")
    assert "after_create_session of a hook" in str(caught.value)


async def test_a_plain_init_fn_is_called_with_the_user_s_scaffold() -> None:
    model, called = counting_model(), []

    def init_fn(scaffold: Any, session: Any) -> None:
        called.append(scaffold)
        session.run(model.train_op)

    with model.graph.as_default():
        scaffold = Scaffold(init_fn=init_fn)
        session = MonitoredSession([], ChiefSessionCreator(scaffold))
    async with session:
        assert session.global_step.value == 1
    assert called == [scaffold]


async def test_finalizing_the_graph_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def __init__(self) -> None:
            self.num_left = 1

        def __call__(self, step_context: Any) -> None:
            self.num_left -= 1
            if self.num_left == 0:
                raise PreemptionError("lost")

    model = counting_model()
    with model.graph.as_default():
        recovery = Recovery(first_pause_secs=0)
        session = MonitoredSession([], ChiefSessionCreator(), recovery=recovery)
    v1.logging.set_verbosity(v1.logging.INFO)
    with caplog.at_level(logging.INFO, "tensorflow"):
        async with session:
            fails = Fails()
            await session.run_step_fn(lambda step_context: fails(step_context))
            assert await session.run(model.train_op) == 1
            assert model.graph.finalized
    said = [record.getMessage() for record in caplog.records]
    assert said.count("Graph was finalized.") == 1
    assert said.count("Running local_init_op.") == 2  # for the recreated session, too


async def test_sessions_one_after_the_other_find_a_finalized_graph() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = ChiefSessionCreator()
        sessions = [MonitoredSession([], creator) for _ in range(2)]
    for session in sessions:
        async with session:
            assert model.graph.finalized
            assert await session.run(model.train_op) == 1
        assert not model.graph.finalized
