"""The life of a session on a real graph: moments, what a run returns, closing."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SharedSessionCreator, StopTraining
from asynchooks.testing import RecordingHook

from .models import (
    ChiefSessionCreator,
    Moments,
    aborted,
    counting_model,
    monitored,
    out_of_range,
    raising,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_moments_come_in_order_around_real_runs() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        await session.run(model.train_op)
    assert hook.log == [
        ("a", "begin"),
        ("a", "after_create_session"),
        *[("a", "before_run"), ("a", "after_run")] * 2,
        ("a", "end"),
    ]


async def test_default_creator_runs_the_graph_that_was_default_when_the_session_was_made() -> None:
    model = counting_model()
    with model.graph.as_default():
        session = MonitoredSession()
    with tf.Graph().as_default():
        await session.__aenter__()
    assert session.graph is model.graph
    assert await session.run(model.train_op) == 1
    await session.close()


async def test_raw_session_and_contexts_session_are_the_tensorflow_session() -> None:
    model = counting_model()
    seen: list[Any] = []
    hook = Moments(
        created=lambda session, coord: seen.append(session),
        before_run=lambda context: seen.append(context.session),
        end=seen.append,
    )
    async with monitored(model.graph, [hook]) as session:
        raw = session.raw_session()
        await session.run(model.train_op)
    assert isinstance(raw, v1.Session)
    assert seen == [raw] * 3


async def test_a_run_on_the_contexts_session_bypasses_hooks() -> None:
    model = counting_model()
    recorder = RecordingHook("a")
    hook = Moments(before_run=lambda context: context.session.run(model.train_op) and None)
    async with monitored(model.graph, [recorder, hook]) as session:
        assert await session.run(model.train_op) == 2
    assert recorder.log.count(("a", "before_run")) == 1


async def test_in_end_the_session_is_still_open() -> None:
    model = counting_model()
    read: list[int] = []
    hook = Moments(end=lambda session: read.append(session.run(model.step)))
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
    assert read == [1]


async def test_after_close_the_session_is_empty_and_the_raw_one_closed() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        raw = session.raw_session()
    assert session.graph is None
    assert session.raw_session() is None
    assert session.should_stop()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        await session.run(model.train_op)
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raw.run(model.step)
    with pytest.raises(RuntimeError, match=r"^Session is already closed\.$"):
        await session.close()


async def test_a_session_without_hooks_needs_no_global_step() -> None:
    graph = tf.Graph()
    with graph.as_default():
        seven = tf.constant(7)
    async with monitored(graph) as session:
        assert await session.run(seven) == 7
        assert session.global_step.value == 0


async def test_a_fetch_of_another_graph_is_tensorflows_error_and_the_session_goes_on() -> None:
    model, other = counting_model(), counting_model()
    async with monitored(model.graph) as session:
        with pytest.raises(ValueError, match="is not an element of this graph"):
            await session.run(other.train_op)
        assert await session.run(model.train_op) == 1


async def test_an_error_of_a_real_step_leaves_as_itself_and_no_after_run_is_called() -> None:
    model = counting_model()
    with model.graph.as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        checked = v1.debugging.check_numerics(x, "x is bad")
    hooks = [RecordingHook("a"), RecordingHook("b")]
    session = monitored(model.graph, hooks)
    async with session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
            await session.run(checked, {x: float("nan")})
        assert not session.should_stop()
        assert await session.run(checked, {x: 2.0}) == 2.0
    for hook in hooks:
        assert [moment for _, moment in hook.log].count("after_run") == 1
        assert [moment for _, moment in hook.log].count("end") == 1


async def test_an_error_of_the_body_leaves_without_end_and_closes_the_session() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    session = monitored(model.graph, [hook])
    await session.__aenter__()
    raw = session.raw_session()
    error = ZeroDivisionError("body")
    assert not await session.__aexit__(ZeroDivisionError, error, None), "the error goes on"
    assert hook.errors == [error]
    assert [moment for _, moment in hook.log] == ["begin", "after_create_session", "on_error"]
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raw.run(model.step)


@pytest.mark.parametrize("moment", ["begin", "created"])
async def test_an_error_while_opening_closes_the_raw_session_and_unfinalizes(moment: str) -> None:
    model = counting_model()
    session = monitored(model.graph, [Moments(**{moment: raising(ZeroDivisionError(moment))})])
    with pytest.raises(ZeroDivisionError, match=moment):
        await session.__aenter__()
    assert session.raw_session() is None
    assert not model.graph.finalized


async def test_after_an_error_in_after_run_the_session_stays_usable() -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    failing = Moments(after_run=raising(ZeroDivisionError("once")))
    asking = Moments(after_run=lambda context, values: context.request_stop())
    hooks = [RecordingHook("a", log), failing, RecordingHook("b", log)]
    async with monitored(model.graph, [asking, *hooks]) as session:
        with pytest.raises(ZeroDivisionError, match="once"):
            await session.run(model.train_op)
        assert not session.should_stop(), "the stop asked for in that run is lost"
        assert await session.run(model.train_op) == 2
        assert session.should_stop()
    assert log.count(("a", "after_run")) == 2
    assert log.count(("b", "after_run")) == 1


async def test_run_after_a_hooks_stop_is_refused() -> None:
    model = counting_model()
    hook = Moments(before_run=lambda context: context.request_stop())
    async with monitored(model.graph, [hook]) as session:
        assert await session.run(model.train_op) == 1
        assert session.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop"):
            await session.run(model.train_op)


async def test_a_hook_listed_twice_is_called_twice() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)
    async with monitored(model.graph, iter([hook, hook])) as session:
        await session.run([])
    assert [moment for _, moment in hook.log] == [
        moment
        for moment in ("begin", "after_create_session", "before_run", "after_run", "end")
        for _ in range(2)
    ]
    assert hook.results == [0, 0]


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), out_of_range()])
async def test_the_end_of_an_input_in_the_body_is_a_clean_end(error: BaseException) -> None:
    model = counting_model()
    hook = RecordingHook("a")
    async with monitored(model.graph, [hook]):
        raising(error)()
    assert hook.log[-1] == ("a", "end")


async def test_several_shared_workers_see_one_raw_session() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator())
    async with monitored(model.graph, None, creator) as one:
        async with monitored(model.graph, None, creator) as two:
            assert one.raw_session() is two.raw_session()
            await one.run(model.train_op)
            assert await two.run(model.train_op) == 2
            assert one.global_step.value == two.global_step.value == 2
        assert await one.run(model.train_op) == 3, "the last to leave closes it"


async def test_a_hook_that_fetches_what_the_caller_fetches_gets_the_same_value() -> None:
    model = counting_model()
    got: list[Any] = []
    hook = Moments(
        before_run=lambda context: SessionRunArgs(model.train_op),
        after_run=lambda context, values: got.append(values.results),
    )
    async with monitored(model.graph, [hook]) as session:
        assert await session.run(model.train_op) == 1
    assert got == [1]


async def test_aborted_in_begin_leaves_at_once() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    with pytest.raises(tf.errors.AbortedError, match="the server restarted"):
        async with monitored(model.graph, [hook, Moments(begin=raising(aborted()))]):
            pass
    assert [moment for _, moment in hook.log] == ["begin", "on_error"]
