"""A session on a real graph: what hooks get and ask for, errors, cancellation, closing."""

import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunHook
from asynchooks.testing import RecordingHook

from ..support.moments import at
from .models import (
    ChiefSessionCreator,
    blocking_op,
    check_closed,
    counting_model,
    monitored,
    tf,
    v1,
)


async def test_hooks_have_the_tensorflow_session_whose_own_runs_bypass_them() -> None:
    model, seen = counting_model(), []  # type: tuple[Any, list[Any]]
    recorder = RecordingHook("a")
    hook = at(
        after_create_session=lambda session, coord: seen.append(session),
        before_run=lambda context: seen.append(context.session.run(model.train_op)),
        end=lambda session: seen.extend([session, session.run(model.step)]),
    )
    async with monitored(model.graph, [recorder, hook]) as session:
        raw = session.raw_session()
        assert await session.run(model.train_op) == 2
    assert isinstance(raw, v1.Session)
    assert seen == [raw, 1, raw, 2]
    assert recorder.log.count(("a", "before_run")) == 1


@pytest.mark.parametrize("in_block", [True, False])
async def test_after_close_the_session_is_empty_and_the_raw_one_closed(in_block: bool) -> None:
    model, hook = counting_model(), RecordingHook("a")
    async with monitored(model.graph, [hook]) as session:
        raw = session.raw_session()
        if in_block:
            await session.close()
            assert session.should_stop()
    assert (session.graph, session.raw_session()) == (None, None)
    with pytest.raises(RuntimeError, match="Session is already closed"):
        await session.run(model.train_op)
    check_closed(raw)
    assert hook.log.count(("a", "end")) == 1


async def test_errors_of_a_run_are_tensorflows_and_the_session_goes_on() -> None:
    graph, hook = tf.Graph(), RecordingHook("a")
    with graph.as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        checked = v1.debugging.check_numerics(x, "x is bad")
    async with monitored(graph, [hook]) as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
            await session.run(checked, {x: float("nan")})
        with pytest.raises(ValueError, match="is not an element of this graph"):
            await session.run(counting_model().train_op)
        assert not session.should_stop()
        assert await session.run(checked, {x: 2.0}) == 2.0
        assert session.global_step.value == 0, "it needs none"
    assert hook.log.count(("a", "after_run")) == 1


class Asking(SessionRunHook):
    """Asks for the same in each run and keeps what it was given."""

    def __init__(self, fetches: Any = None, *args: Any) -> None:
        self.args = SessionRunArgs(fetches, *args)
        self.values: Any = None
        self.original: Any = None

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        self.original = run_context.original_args
        return self.args

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values = run_values


class Sum:
    """x + y, both to be fed, and a variable of each kind."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [], name="x")
            self.y = v1.placeholder_with_default(2.0, [], name="y")
            self.total = tf.add(self.x, self.y, name="total")
            self.sparse = v1.sparse_placeholder(tf.float32, name="sparse")
            self.new, self.old = (
                v1.get_variable(each, initializer=1.0, use_resource=each == "new")
                for each in ("new", "old")
            )

    def session(self, *hooks: SessionRunHook) -> MonitoredSession:
        return monitored(self.graph, hooks)


async def test_feeds_and_options_of_the_caller_and_of_hooks_go_into_one_run() -> None:
    model, metadata = Sum(), v1.RunMetadata()
    caller = v1.RunOptions(timeout_in_ms=50_000, trace_level=v1.RunOptions.SOFTWARE_TRACE)
    hooks = [
        Asking(model.total, {model.x: 1.0}, v1.RunOptions(timeout_in_ms=60_000)),
        Asking([model.x], None, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)),
        Asking(None, None, v1.RunOptions(output_partition_graphs=True, timeout_in_ms=9)),
        Asking(),
    ]
    before, feeds = caller.SerializeToString(), {model.y: 3.0}
    async with model.session(*hooks) as session:
        assert await session.run([model.y], feeds, caller, metadata) == [3.0]
        assert [each.values.results for each in hooks] == [4.0, [1.0], None, None]
        assert hooks[0].original == SessionRunArgs([model.y], feeds), "of the caller"
        for hook in hooks:
            hook.values.options.ClearField("debug_options")  # it is empty
            assert hook.values.options == v1.RunOptions(
                trace_level=v1.RunOptions.FULL_TRACE,
                timeout_in_ms=60_000,
                output_partition_graphs=True,
            )
            assert hook.values.run_metadata is metadata
        assert metadata.partition_graphs
        assert (feeds, caller.SerializeToString()) == ({model.y: 3.0}, before), "as they were"
        await session.run(model.y)
        assert hooks[-1].values.run_metadata.step_stats.dev_stats, "also if the caller gave none"


CLASHES: list[Any] = [
    lambda m: ({"x:0": 1.0}, {m.x: 1.0}),
    lambda m: ({m.sparse.values: [1.0]}, {m.sparse: v1.SparseTensorValue([[0]], [1.0], [1])}),
    lambda m: ({m.old: 5.0}, {m.graph.as_graph_element(m.old).name: 6.0}),
    lambda m: ({m.new: 5.0}, {(m.x, m.new): (6.0, 6.0)}),
]


async def test_what_two_feed_in_one_run_clashes() -> None:
    model, one, two = Sum(), Asking(), Asking()
    async with model.session(one, two) as session:
        for clash in CLASHES:
            with model.graph.as_default():  # where variables have a hash
                first, second = clash(model)
            for who, of_two, of_caller in (
                ("a SessionRunHook and user", None, second),
                ("two hooks", second, None),
            ):
                one.args, two.args = SessionRunArgs(None, first), SessionRunArgs(None, of_two)
                with pytest.raises(RuntimeError, match=f"Same tensor is fed by {who}"):
                    await session.run(model.y, of_caller)


with tf.Graph().as_default():
    FOREIGN = v1.placeholder(tf.float32, (), "x")
UNKNOWN = ["z:0", "z", "x", None, FOREIGN, ("z:0", FOREIGN)]


async def test_a_feed_that_the_graph_does_not_hold_is_a_type_error_whoever_feeds_it() -> None:
    model, hook = Sum(), Asking()
    async with model.session(hook) as session:
        for key in UNKNOWN:
            feed = {key: (1.0, 1.0) if isinstance(key, tuple) else 1.0}
            for of_hook, of_caller in (({}, feed), ({model.x: 1.0}, feed), (feed, {"x:0": 1})):
                hook.args = SessionRunArgs(None, of_hook)
                with pytest.raises(TypeError, match="Cannot interpret feed_dict key") as caught:
                    await session.run(model.y, of_caller)
                notes = getattr(caught.value, "__notes__", [])
                is_hook_s = of_hook is feed and key is not UNKNOWN[2]  # which may be fetched
                assert notes == ["fed in before_run of Asking"] * is_hook_s


async def run_until_cancelled(session: Any, fetches: Any) -> None:
    await session.run(fetches)
    raise AssertionError("the run was to be cancelled")


async def test_a_cancelled_run_that_hangs_is_left_and_the_session_closed() -> None:
    model, hook, raws = counting_model(), RecordingHook("a"), []  # type: tuple[Any, Any, list[Any]]
    with model.graph.as_default():
        dequeue = v1.FIFOQueue(1, tf.int32, shapes=[[]]).dequeue()  # waits for ever
    begun = anyio.Event()
    hooks = [hook, at(before_run=lambda context: begun.set())]
    session = monitored(model.graph, hooks, stop_grace_period_secs=0.5)

    async def train() -> None:
        async with session:
            raws.append(session.raw_session())
            await run_until_cancelled(session, dequeue)

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await begun.wait()
        group.cancel_scope.cancel()
    moments = ["begin", "after_create_session", "before_run", "on_error"]
    assert hook.log == [("a", each) for each in moments]
    check_closed(raws[0])
    assert session.should_stop()
    assert not model.graph.finalized


async def test_a_step_that_ends_within_the_grace_period_counts_though_cancelled() -> None:
    model = counting_model()
    blocked, started, released = blocking_op(model.graph)
    with model.graph.as_default(), tf.control_dependencies([blocked]):
        train_op = v1.assign_add(model.step, 1)
    async with monitored(model.graph, stop_grace_period_secs=60) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(run_until_cancelled, session, train_op)
            await anyio.to_thread.run_sync(started.wait)
            group.cancel_scope.cancel()
            released.set()
        statistics = session.global_step.statistics()
        assert (statistics.value, statistics.tickets) == (1, 0)
        assert session.raw_session().run(model.step) == 1


async def test_cancelling_while_the_session_is_created_closes_what_comes_late() -> None:
    model, hook = counting_model(), RecordingHook("a")
    started, released, closed = (threading.Event() for _ in range(3))

    class Slow(ChiefSessionCreator):
        def create_session(self) -> Any:
            started.set()
            released.wait()
            made: Any = super().create_session()
            close = made.close

            def note() -> None:
                close()
                closed.set()

            made.close = note
            return made

    with model.graph.as_default():
        creator = Slow()
    session = monitored(model.graph, [hook], creator, stop_grace_period_secs=0.05)
    async with anyio.create_task_group() as group:
        group.start_soon(session.open)
        await anyio.to_thread.run_sync(started.wait)
        group.cancel_scope.cancel()
    assert not model.graph.finalized
    released.set()
    assert await anyio.to_thread.run_sync(closed.wait, 60)
    assert hook.log == [("a", "begin"), ("a", "on_error")]
    assert session.raw_session() is None
