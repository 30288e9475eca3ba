"""A session on a real graph: moments, merging of what is asked for, cancellation, closing."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
)
from asynchooks.testing import RecordingHook

from .models import (
    ChiefSessionCreator,
    Created,
    Model,
    Moments,
    aborted,
    blocking_op,
    check_closed,
    counting_model,
    monitored,
    out_of_range,
    raising,
    shared,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_hooks_are_given_the_tensorflow_session_which_is_open_in_end_too() -> None:
    model = counting_model()
    seen: list[Any] = []
    hook = Moments(
        created=lambda session, coord: seen.append(session),
        before_run=lambda context: seen.append(context.session),
        end=lambda session: seen.extend([session, session.run(model.step)]),
    )
    async with monitored(model.graph, [hook]) as session:
        raw = session.raw_session()
        await session.run(model.train_op)
    assert isinstance(raw, v1.Session)
    assert seen == [raw, raw, raw, 1]


async def test_a_run_on_the_contexts_session_bypasses_hooks() -> None:
    model = counting_model()
    recorder = RecordingHook("a")
    hook = Moments(before_run=lambda context: context.session.run(model.train_op) and None)
    async with monitored(model.graph, [recorder, hook]) as session:
        assert await session.run(model.train_op) == 2
    assert recorder.log.count(("a", "before_run")) == 1


async def test_after_close_the_session_is_empty_and_the_raw_one_closed() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        raw = session.raw_session()
    assert session.graph is None
    assert session.raw_session() is None
    assert session.should_stop()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        await session.run(model.train_op)
    check_closed(raw)
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
    hook, final = RecordingHook("a"), FinalOpsHook(model.step)
    session = monitored(model.graph, [hook, final])
    await session.__aenter__()
    raw = session.raw_session()
    error = ZeroDivisionError("body")
    assert not await session.__aexit__(ZeroDivisionError, error, None), "the error goes on"
    assert hook.errors == [error]
    assert [moment for _, moment in hook.log] == ["begin", "after_create_session", "on_error"]
    assert final.final_ops_values is None
    check_closed(raw)


@pytest.mark.parametrize("moment", ["begin", "created"])
async def test_an_error_while_opening_closes_the_raw_session_and_unfinalizes(moment: str) -> None:
    model = counting_model()
    session = monitored(model.graph, [Moments(**{moment: raising(ZeroDivisionError(moment))})])
    with pytest.raises(ZeroDivisionError, match=moment):
        await session.__aenter__()
    assert session.raw_session() is None
    assert not model.graph.finalized


async def test_the_end_of_an_input_in_the_body_is_a_clean_end() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    async with monitored(model.graph, [hook]):
        raise out_of_range()
    assert hook.log[-1] == ("a", "end")


MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


async def run_times(model: Model, hooks: list[Any], times: int, creator: Any = None) -> None:
    async with monitored(model.graph, hooks, creator) as session:
        for _ in range(times):
            await session.run(model.train_op)


def events_in(directory: Path) -> list[tuple[int, str]]:
    v1.summary.FileWriterCache.clear()
    return [
        (event.step, event.WhichOneof("what"))
        for path in directory.glob("events.out.*")
        for event in v1.train.summary_iterator(str(path))
        if event.WhichOneof("what") in ("summary", "session_log")
    ]


@pytest.mark.parametrize("body", [None, out_of_range()], ids=["clean", "input ended"])
@pytest.mark.parametrize("error", [ZeroDivisionError("in end"), out_of_range()])
async def test_an_error_in_end_is_not_swallowed(error: Exception, body: Exception | None) -> None:
    model, hook = counting_model(), RecordingHook("a")
    session = monitored(model.graph, [Moments(end=raising(error)), hook])
    with pytest.raises(type(error)) as caught:
        async with session:
            await session.run(model.train_op)
            raising(body)()
    assert caught.value is error
    assert "in end of Moments" in error.__notes__
    assert hook.log[-2:] == [("a", "end"), ("a", "on_error")]
    assert session.raw_session() is None
    assert not model.graph.finalized


async def test_logging_tensor_hook_resets_its_timer_in_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        seven = tf.constant(7)
    hook = LoggingTensorHook({"x": seven}, every_n_iter=3)
    with caplog.at_level(logging.INFO, "asynchooks"):
        await run_times(model, [hook], 5)
        await run_times(model, [hook], 1)
    logged = [record.getMessage() for record in caplog.records if record.name == "asynchooks"]
    assert [message.split(" (")[0] for message in logged] == ["x = 7"] * 3
    assert ["sec)" in message for message in logged] == [False, True, False]


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_step_counter_hook_keeps_its_timer_for_a_second_session(
    train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        saver = CheckpointSaverHook(str(tmp_path), save_steps=100, scaffold=scaffold)
        counter = train.StepCounterHook(5, output_dir=str(tmp_path))
    creator = ChiefSessionCreator(scaffold, checkpoint_dir=str(tmp_path))
    await run_times(model, [saver, counter], 8, creator)
    await run_times(model, [saver, counter], 4, creator)
    counted = [step for step, what in events_in(tmp_path) if what == "summary"]
    assert counted == [6, 11], "11 is five steps after 6, over the end of the first session"


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_a_new_session_is_a_first_one_for_hooks_whatever_their_timers_say(
    train: Any, tmp_path: Path
) -> None:
    model, directory = counting_model(), str(tmp_path)
    with model.graph.as_default():
        v1.summary.scalar("value", tf.constant(1.0))
        scaffold = v1.train.Scaffold()
        hooks = [
            train.CheckpointSaverHook(directory, save_steps=100, scaffold=scaffold),
            train.SummarySaverHook(save_steps=100, output_dir=directory, scaffold=scaffold),
            train.ProfilerHook(save_steps=2, output_dir=directory),
        ]
    for _ in range(2):
        creator = ChiefSessionCreator(scaffold, checkpoint_dir=directory)
        await run_times(model, hooks, 3, creator)
    log, summary = "session_log", "summary"
    first = [(0, log), (1, log), (1, summary), (3, log)]
    assert events_in(tmp_path) == [*first, (3, log), (4, log), (4, summary), (6, log)]
    traces = {name for name in os.listdir(directory) if name.startswith("timeline")}
    assert traces == {"timeline-2.json", "timeline-5.json"}, "4 was the first of its session"


async def test_an_end_of_input_that_is_reported_to_the_coordinator_leaves() -> None:
    model, error = counting_model(), out_of_range()
    created, recorder = Created(), RecordingHook("a")
    with pytest.raises(tf.errors.OutOfRangeError) as caught:
        async with monitored(model.graph, [recorder, created]) as session:
            created.coords[0].request_stop(error)
            assert session.should_stop()
    assert caught.value is error
    assert ("a", "end") in recorder.log, "the body was clean"


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_nan_tensor_hook_fails_or_stops(train: Any) -> None:
    for fails in (True, False):
        model = counting_model()
        with model.graph.as_default():
            x = v1.placeholder_with_default(1.0, shape=())
        async with monitored(model.graph, [train.NanTensorHook(x, fails)]) as session:
            await session.run(model.train_op, {x: float("inf")})
            assert not session.should_stop()
            if fails:
                with pytest.raises(RuntimeError, match="NaN loss during training"):
                    await session.run(model.train_op, {x: float("nan")})
            else:
                assert await session.run(model.train_op, {x: float("nan")}) == 2
            assert session.should_stop() is not fails


async def test_hooks_keep_their_order_at_every_moment_also_through_a_recovery() -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    losing = Moments(after_run=raising(aborted()))
    hooks = [RecordingHook("a", log), RecordingHook("b", log), losing, RecordingHook("c", log)]
    await run_times(model, hooks, 1)
    lost = [(name, moment) for moment in MOMENTS[:3] for name in "abc"]
    whole = [(name, moment) for moment in MOMENTS[1:] for name in "abc"]
    assert log == [*lost, ("a", "after_run"), ("b", "after_run"), *whole]


@pytest.mark.parametrize("body", [ZeroDivisionError("body"), out_of_range(), None])
async def test_the_coordinators_error_goes_before_the_bodys_and_that_of_an_end(
    body: Exception | None,
) -> None:
    model, held, late = counting_model(), OSError("a thread"), ZeroDivisionError("in end")
    hook = Moments(
        created=lambda session, coord: coord.request_stop(held),
        end=raising(late if body is None else None),
    )
    with pytest.raises(OSError, match="a thread") as caught:
        async with monitored(model.graph, [hook]):
            raising(body)()
    assert caught.value is held
    assert held.__context__ is (late if body is None else body)


class Asking(SessionRunHook):
    """Asks for the same in each run and keeps what it was given."""

    def __init__(self, fetches: Any = None, feed_dict: Any = None, options: Any = None) -> None:
        self._args = SessionRunArgs(fetches, feed_dict, options)
        self.values: list[Any] = []
        self.original: list[SessionRunArgs] = []

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        self.original.append(run_context.original_args)
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        self.values.append(run_values)


class Sum:
    """x + y, both to be fed."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = v1.placeholder(tf.float32, [], name="x")
            self.y = v1.placeholder(tf.float32, [], name="y")
            self.total = tf.add(self.x, self.y, name="total")
            self.sparse = v1.sparse_placeholder(tf.float32, name="sparse")

    def session(self, *hooks: SessionRunHook) -> MonitoredSession:
        return monitored(self.graph, hooks)


async def test_feeds_of_the_caller_and_of_two_hooks_go_into_one_run() -> None:
    model = Sum()
    hook, other = Asking(model.total, {model.x: 1.0}), Asking([model.x], None)
    feeds = {model.y: 2.0}
    async with model.session(hook, other) as session:
        assert await session.run([model.y], feeds, v1.RunOptions(timeout_in_ms=60_000)) == [2.0]
    assert hook.values[0].results == 3.0
    assert other.values[0].results == [1.0]
    assert hook.original == [SessionRunArgs([model.y], feeds)], "what the caller asked for"
    assert feeds == {model.y: 2.0}


@pytest.mark.parametrize("case", ["tensor", "name", "values of a sparse tensor", "two hooks"])
async def test_a_hook_and_the_caller_or_another_hook_that_feed_the_same_tensor_clash(
    case: str,
) -> None:
    model = Sum()
    cases: dict[str, tuple[list[Any], dict[Any, Any]]] = {
        "tensor": ([{model.x: 1.0}], {model.x: 1.0, model.y: 1.0}),
        "name": ([{"x:0": 1.0}], {model.x: 1.0, model.y: 1.0}),
        "values of a sparse tensor": (
            [{model.sparse.values: [1.0]}],
            {model.sparse: v1.SparseTensorValue([[0]], [1.0], [1])},
        ),
        "two hooks": ([{model.x: 1.0}, {"x:0": 1.0}], {model.y: 1.0}),
    }
    hook_feeds, feeds = cases[case]
    message = "two hooks.*x:0" if case == "two hooks" else "a SessionRunHook and user"
    async with model.session(*[Asking(None, each) for each in hook_feeds]) as session:
        with pytest.raises(RuntimeError, match=f"Same tensor is fed by {message}"):
            await session.run([model.total, model.sparse], feeds)


with tf.Graph().as_default():
    FOREIGN = v1.placeholder(tf.float32, (), "x")
UNKNOWN: dict[str, Any] = {
    "a name of no tensor": "z:0",
    "a name of no op": "z",
    "the name of an op": "x",
    "a number": 5,
    "None": None,
    "a tensor of another graph": FOREIGN,
    "a tuple of those": ("z:0", FOREIGN),
    "a function": abs,
}


@pytest.mark.parametrize("kind", UNKNOWN)
async def test_a_feed_that_the_graph_does_not_hold_is_a_type_error_whoever_feeds_it(
    kind: str,
) -> None:
    model, key = Sum(), UNKNOWN[kind]
    value = (1.0, 1.0) if isinstance(key, tuple) else 1.0
    others = {model.x: 1.0}
    for hook_feeds, feeds in (
        ({}, {key: value}),
        (others, {key: value}),
        ({key: value}, {}),
        ({key: value}, others),
    ):
        async with model.session(Asking(None, hook_feeds)) as session:
            with pytest.raises(TypeError, match="Cannot interpret feed_dict key as Te") as caught:
                await session.run(model.total, feeds)
            notes = getattr(caught.value, "__notes__", [])
            is_hook_s = key in hook_feeds and kind != "the name of an op"  # which may be fetched
            assert notes == ["fed in before_run of Asking"] * is_hook_s


async def test_options_are_merged_and_all_hooks_see_them_with_the_real_metadata() -> None:
    model = Sum()
    caller = v1.RunOptions(timeout_in_ms=50_000, trace_level=v1.RunOptions.SOFTWARE_TRACE)
    one = Asking(None, None, v1.RunOptions(timeout_in_ms=60_000, output_partition_graphs=True))
    two = Asking(None, None, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))
    three = Asking(None, None, v1.RunOptions(report_tensor_allocations_upon_oom=True))
    before = caller.SerializeToString()
    metadata = v1.RunMetadata()
    async with model.session(one, two, three, Asking()) as session:
        feeds = {model.x: 1.0, model.y: 2.0}
        assert await session.run(model.total, feeds, caller, metadata) == 3.0
    for hook in (one, two, three):
        options = hook.values[0].options
        assert not options.debug_options.debug_tensor_watch_opts
        options.ClearField("debug_options")
        assert options == v1.RunOptions(
            trace_level=v1.RunOptions.FULL_TRACE,
            timeout_in_ms=60_000,
            output_partition_graphs=True,
            report_tensor_allocations_upon_oom=True,
        )
        assert hook.values[0].run_metadata is metadata
    assert metadata.partition_graphs
    assert metadata.step_stats.dev_stats
    assert caller.SerializeToString() == before


async def test_the_larger_thread_pool_and_reset_disk_byte_usage_win_and_watches_are_appended() -> (
    None
):
    graph = tf.Graph()
    with graph.as_default():
        one = tf.constant(1, name="one")
    async with monitored(graph) as session:
        raw = session._raw
        assert raw is not None
        requests = [v1.RunOptions(inter_op_thread_pool=pool) for pool in (0, 1, 0)]
        for number, request in enumerate(requests):
            request.debug_options.debug_tensor_watch_opts.add(node_name=f"node_{number}")
        requests[1].debug_options.reset_disk_byte_usage = True
        merged = raw.merge_options(requests)
        assert await session.run(one) == 1
    assert merged.inter_op_thread_pool == 1
    assert merged.debug_options.reset_disk_byte_usage
    watches = merged.debug_options.debug_tensor_watch_opts
    assert [watch.node_name for watch in watches] == ["node_0", "node_1", "node_2"]
    assert len(requests[0].debug_options.debug_tensor_watch_opts) == 1, "not changed"


async def test_hooks_options_bring_metadata_though_the_caller_gave_none() -> None:
    model = Sum()
    hook = Asking(None, None, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))
    bare = Asking()
    async with model.session(bare, hook) as session:
        await session.run(model.total, {model.x: 1.0, model.y: 2.0})
    assert hook.values[0].run_metadata.step_stats.dev_stats
    assert bare.values[0].run_metadata is hook.values[0].run_metadata


async def test_the_timeout_of_merged_options_is_tensorflows_own() -> None:
    graph = tf.Graph()
    with graph.as_default():
        empty = v1.FIFOQueue(1, tf.int32).dequeue()
    hook = Asking(None, None, v1.RunOptions(timeout_in_ms=50))
    async with monitored(graph, [hook]) as session:
        with pytest.raises(tf.errors.DeadlineExceededError, match=r"[Tt]imed out|[Dd]eadline"):
            await session.run(empty)


async def test_a_before_run_that_returns_something_else_is_a_type_error() -> None:
    model = Sum()
    async with model.session(Moments(before_run=lambda context: model.total)) as session:
        with pytest.raises(TypeError, match=r"Moments\.before_run returned <tf\.Tensor"):
            await session.run(model.total, {model.x: 1.0, model.y: 2.0})


@pytest.mark.parametrize("kind", ["the tensor that is its value", "its name", "a tuple with it"])
@pytest.mark.parametrize("use_resource", [True, False])
async def test_a_variable_clashes_with_what_it_stands_for(kind: str, use_resource: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        variable = v1.get_variable("v", initializer=1.0, use_resource=use_resource)
        other = v1.placeholder_with_default(0.0, ())
        value = graph.as_graph_element(variable)
        hook = Asking(None, {variable: 5.0})
        feeds = {
            "the tensor that is its value": {value: 6.0},
            "its name": {value.name: 6.0},
            "a tuple with it": {(other, variable): (6.0, 6.0)},
        }[kind]
    async with monitored(graph, [hook]) as session:
        with pytest.raises(RuntimeError, match="fed by a SessionRunHook and user"):
            await session.run(other, feeds)


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
    check_closed(raws[0])
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
    creator = shared(model.graph)
    async with monitored(model.graph, None, creator) as other:
        with anyio.move_on_after(0.05) as scope:
            async with monitored(
                model.graph, None, creator, stop_grace_period_secs=0.05
            ) as session:
                await run_until_cancelled(session, dequeue)
        assert scope.cancelled_caught
        assert await other.run(model.train_op) == 1
        await other.run(enqueue)  # lets the abandoned thread end


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


@pytest.mark.parametrize("moment", ["created", "before_run", "after_run", "body"])
async def test_cancelling_in_a_hook_or_the_body_is_a_failure_and_closes_the_session(
    moment: str,
) -> None:
    model, scope = counting_model(), anyio.CancelScope()
    hook, created = RecordingHook("a"), Created()
    cancelling = {} if moment == "body" else {moment: lambda *_: scope.cancel()}
    with scope:
        async with monitored(model.graph, [hook, created, Moments(**cancelling)]) as session:
            await session.run(model.train_op)
            if moment == "body":
                scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert hook.log[-1] == ("a", "on_error")
    assert ("a", "end") not in hook.log
    check_closed(created.sessions[0])
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
