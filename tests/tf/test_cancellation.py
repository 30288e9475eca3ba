"""Cancellation while TensorFlow blocks: it leaves in time, and the session gets closed."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import SharedSessionCreator
from asynchooks.testing import RecordingHook

from .models import ChiefSessionCreator, Moments, blocking_op, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

ENOUGH_SECS = 60
"""A grace period that a test may not use up."""


def empty_queue(graph: Any) -> tuple[Any, Any]:
    """(an op that waits for an element, for ever, the op that adds one)."""
    with graph.as_default():
        queue = v1.FIFOQueue(1, tf.int32, shapes=[[]])
        return queue.dequeue(), queue.enqueue(7)


async def run_until_cancelled(session: Any, fetches: Any) -> None:
    await session.run(fetches)
    raise AssertionError("the run was to be cancelled")


async def test_cancelling_a_blocked_dequeue_leaves_and_closes_the_session() -> None:
    model = counting_model()
    dequeue, _ = empty_queue(model.graph)
    hook = RecordingHook("a")
    session = monitored(model.graph, [hook], stop_grace_period_secs=0.2)
    opened = anyio.Event()
    raws: list[Any] = []

    async def train() -> None:
        async with session:
            raws.append(session.raw_session())
            opened.set()
            await run_until_cancelled(session, dequeue)

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await opened.wait()
        await anyio.wait_all_tasks_blocked()
        begun = anyio.current_time()
        group.cancel_scope.cancel()
    assert anyio.current_time() - begun < 5, "the grace period, not for ever"
    assert [moment for _, moment in hook.log] == [
        "begin",
        "after_create_session",
        "before_run",
        "on_error",
    ]
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raws[0].run(model.step)
    assert session.raw_session() is None
    assert session.should_stop()
    assert not model.graph.finalized


async def test_cancelling_a_run_in_an_open_session_leaves_it_usable() -> None:
    model = counting_model()
    dequeue, enqueue = empty_queue(model.graph)
    async with monitored(model.graph, stop_grace_period_secs=0.05) as session:
        with anyio.move_on_after(0.05) as scope:
            await run_until_cancelled(session, dequeue)
        assert scope.cancelled_caught
        assert await session.run(model.train_op) == 1
        await session.run(enqueue)


async def test_a_step_that_ends_within_the_grace_period_counts_though_cancelled() -> None:
    model = counting_model()
    blocked, started, released = blocking_op(model.graph)
    with model.graph.as_default(), tf.control_dependencies([blocked]):
        train_op = v1.assign_add(model.step, 1)
    async with monitored(model.graph, stop_grace_period_secs=ENOUGH_SECS) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(run_until_cancelled, session, train_op)
            await anyio.to_thread.run_sync(started.wait)
            group.cancel_scope.cancel()
            released.set()
        assert session.global_step.value == 1
        assert session.global_step.statistics().tickets == 0
        assert session.raw_session().run(model.step) == 1


async def test_a_shared_session_stays_open_for_the_others() -> None:
    model = counting_model()
    dequeue, enqueue = empty_queue(model.graph)
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator())
    async with monitored(model.graph, None, creator) as other:
        with anyio.move_on_after(0.05) as scope:
            async with monitored(
                model.graph, None, creator, stop_grace_period_secs=0.05
            ) as session:
                await run_until_cancelled(session, dequeue)
        assert scope.cancelled_caught
        assert await other.run(model.train_op) == 1
        await other.run(enqueue)  # lets the abandoned thread end


async def test_a_cancelled_body_is_a_failure_and_not_a_clean_end() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    with anyio.CancelScope() as scope:
        async with monitored(model.graph, [hook]) as session:
            await session.run(model.train_op)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert hook.log[-1] == ("a", "on_error")
    assert ("a", "end") not in hook.log


async def test_cancelling_while_the_session_is_created_closes_what_comes_late() -> None:
    model = counting_model()
    blocked, started, released = blocking_op(model.graph)
    with model.graph.as_default():
        init_op = tf.group(blocked, v1.global_variables_initializer())
        creator = ChiefSessionCreator(v1.train.Scaffold(init_op=init_op))
    hook = RecordingHook("a")
    session = monitored(model.graph, [hook], creator, stop_grace_period_secs=0.05)
    async with anyio.create_task_group() as group:
        group.start_soon(session.__aenter__)
        await anyio.to_thread.run_sync(started.wait)
        group.cancel_scope.cancel()
    released.set()
    assert hook.log == [("a", "begin"), ("a", "on_error")]
    assert session.raw_session() is None
    assert not model.graph.finalized


@pytest.mark.parametrize("moment", ["created", "before_run", "after_run"])
async def test_cancelling_from_within_a_hook_closes_the_session(moment: str) -> None:
    model = counting_model()
    raws: list[Any] = []
    scope = anyio.CancelScope()
    noting = Moments(created=lambda session, coord: raws.append(session))
    cancelling = Moments(**{moment: lambda *_: scope.cancel()})
    with scope:
        async with monitored(model.graph, [noting, cancelling]) as session:
            await session.run(model.train_op)
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raws[0].run(model.step)
    assert not model.graph.finalized


async def test_sessions_close_in_any_order_and_from_another_task() -> None:
    models = [counting_model() for _ in range(3)]
    sessions = [monitored(model.graph) for model in models]
    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(session.__aenter__)
    for place in (1, 0, 2):
        assert await sessions[place].run(models[place].train_op) == 1
        async with anyio.create_task_group() as group:
            group.start_soon(sessions[place].close)
    assert not any(model.graph.finalized for model in models)
