"""Merging what the caller and the hooks ask for, with TensorFlow's feeds and run options."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunContext, SessionRunHook
from asynchooks.testing import RecordingHook

from .models import Moments, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


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
        assert await session.run(model.y, feeds) == 2.0
    assert hook.values[0].results == 3.0
    assert other.values[0].results == [1.0]
    assert feeds == {model.y: 2.0}


async def test_original_args_are_what_the_caller_asked_for() -> None:
    model = Sum()
    hook = Asking(model.total, {model.x: 1.0})
    feeds = {model.y: 2.0}
    async with model.session(hook) as session:
        await session.run([model.y], feeds, v1.RunOptions(timeout_in_ms=60_000))
    assert hook.original == [SessionRunArgs([model.y], feeds)]


async def test_a_hook_that_asks_for_nothing_gets_none() -> None:
    model = Sum()
    hook = RecordingHook("a")
    async with model.session(hook) as session:
        await session.run(model.total, {"x:0": 1.0, model.y: 2.0})
    assert hook.results == [None]


@pytest.mark.parametrize("key", ["tensor", "name"])
async def test_a_hook_and_the_caller_that_feed_the_same_tensor_clash(key: str) -> None:
    model = Sum()
    hook = Asking(None, {model.x if key == "tensor" else "x:0": 1.0})
    async with model.session(hook) as session:
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by a SessionRunHook and user"):
            await session.run(model.total, {model.x: 1.0, model.y: 1.0})


async def test_two_hooks_that_feed_the_same_tensor_clash_though_one_names_it() -> None:
    model = Sum()
    async with model.session(Asking(None, {model.x: 1.0}), Asking(None, {"x:0": 1.0})) as session:
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by two hooks.*x:0"):
            await session.run(model.total, {model.y: 1.0})


async def test_a_sparse_feed_clashes_with_a_feed_of_its_values() -> None:
    model = Sum()
    value = v1.SparseTensorValue([[0]], [1.0], [1])
    hook = Asking(None, {model.sparse.values: [1.0]})
    async with model.session(hook) as session:
        with pytest.raises(RuntimeError, match="Same tensor is fed by a SessionRunHook and user"):
            await session.run(model.sparse, {model.sparse: value})


async def test_a_feed_that_the_graph_does_not_hold_is_tensorflows_error() -> None:
    model = Sum()
    async with model.session() as session:
        with pytest.raises(TypeError, match="Cannot interpret feed_dict key as Tensor"):
            await session.run(model.total, {"z:0": 1.0})
        assert await session.run(model.total, {model.x: 1.0, model.y: 2.0}) == 3.0


async def test_a_name_that_a_hook_feeds_and_the_graph_does_not_hold_is_an_error() -> None:
    model = Sum()
    async with model.session(Asking(None, {"z:0": 1.0})) as session:
        with pytest.raises((KeyError, TypeError), match="z:0"):
            await session.run(model.total, {model.x: 1.0, model.y: 2.0})


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
        raw = session._lifecycle.raw
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


async def test_without_hooks_what_the_caller_passed_goes_through_untouched() -> None:
    model = Sum()
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    async with model.session() as session:
        await session.run(model.total, {model.x: 1.0, model.y: 2.0}, options, metadata)
    assert metadata.step_stats.dev_stats


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
