"""Input of real graphs: FeedHook, session.batches, tf.data."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    FeedHook,
    FunctionSessionCreator,
    InputError,
    InputPositionHook,
    InputStructureError,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    StopAtStepHook,
)
from asynchooks.data import batch, prefetch, shuffle

from ..hooks.inputs import Diary, saving, until_stopped
from ..support.faults import FaultError
from ..support.threads import threads_left
from .models import Moments, aborted, monitored, raising, shared
from .test_event_files import scalars

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Fed(NamedTuple):
    """A graph that adds up what it is fed: 100 * a + b at each step."""

    graph: Any
    a: Any
    b: Any
    given: Any
    train_op: Any


def fed_model() -> Fed:
    graph = tf.Graph()
    with graph.as_default():
        a = v1.placeholder(tf.int64, (), "a")
        b = v1.placeholder_with_default(tf.constant(0, tf.int64), (), "b")
        given = 100 * a + b
        total = v1.get_variable("total", (), tf.int64, v1.zeros_initializer())
        with tf.control_dependencies([v1.assign_add(total, given)]):
            step = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        with tf.control_dependencies([step]):
            train_op = tf.identity(total)
    return Fed(graph, a, b, given, train_op)


async def run_until_stopped(model: Fed, session: MonitoredSession, seen: list[int]) -> None:
    """Note what a session is fed; the end of the input leaves as an error."""
    while not session.should_stop():
        given, _ = await session.run([model.given, model.train_op])
        seen.append(int(given))
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("structure", ["None", "one", "list", "mapping"])
async def test_items_are_fed_by_tensor_and_by_name(by_name: bool, structure: str) -> None:
    model = fed_model()
    a, b = ("a:0", "b:0") if by_name else (model.a, model.b)
    names, items = {
        "None": (None, [{a: 1, b: 2}, {a: 3, b: 4}]),
        "one": (a, [1, 3]),
        "list": ([a, b], [(1, 2), (3, 4)]),
        "mapping": ({"x": a, "y": b}, [{"x": 1, "y": 2}, {"x": 3, "y": 4, "z": 5}]),
    }[structure]
    seen: list[int] = []
    async with monitored(model.graph, [FeedHook(items, names)]) as session:
        await run_until_stopped(model, session, seen)
    assert seen == ([100, 300] if structure == "one" else [102, 304])


async def test_an_item_of_another_structure_is_named() -> None:
    model = fed_model()
    with pytest.raises(InputStructureError, match="^item 1 of a list of 2 is 7; FeedHook expected"):
        async with monitored(model.graph, [FeedHook([(1, 2), 7], [model.a, model.b])]) as session:
            await run_until_stopped(model, session, [])


async def test_a_lost_session_is_fed_the_same_item_again() -> None:
    model, fail = fed_model(), raising(None, aborted(), None, aborted())
    seen: list[int] = []
    hooks = [FeedHook(range(5), model.a), Moments(before_run=fail)]
    async with monitored(model.graph, hooks) as session:
        await run_until_stopped(model, session, seen)
    assert seen == [0, 100, 200, 300, 400]


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_graph_uses_an_item_with_its_step_wherever_the_run_breaks_behind_it(
    is_cancelled: bool, is_first: bool, runner: Any
) -> None:
    model, scope = fed_model(), [anyio.CancelScope()]

    class Breaks(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            if run_context.global_step.value == 3:
                scope[0].cancel()
                if is_cancelled:
                    await anyio.sleep_forever()
                raise FaultError

    hooks = [Breaks(), FeedHook(range(5), model.a)][:: -1 if is_first else 1]
    async with monitored(model.graph, hooks, step_runner=runner) as session:
        while not session.should_stop():
            scope[:] = [anyio.CancelScope()]
            with scope[0], contextlib.suppress(FaultError):
                total = await session.run(model.train_op)
    assert total == 100 * (0 + 1 + 2 + 3 + 4)
    assert session.global_step.value == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("by_loop", [True, False])
async def test_a_resumed_graph_is_fed_what_comes_next(
    background: bool, by_loop: bool, tmp_path: Path
) -> None:
    seen: list[int] = []
    for last_step in (5, 5, 12, 99):
        model = fed_model()
        source = prefetch(batch(shuffle(range(40), 7, seed=1), 2), last_step % 4 + 1)
        with model.graph.as_default():
            creator = asynchooks.ChiefSessionCreator(checkpoint_dir=str(tmp_path))
            saver = v1.train.Saver()
        saving = CheckpointSaverHook(tmp_path, save_steps=3, saver=saver, background=background)
        feeding: Any = InputPositionHook(source) if by_loop else FeedHook(source, ["a:0", "b:0"])
        hooks = [feeding, saving, StopAtStepHook(last_step=last_step)]
        async with monitored(model.graph, hooks, creator) as session:
            if by_loop:
                async for a, b in session.batches(source):
                    feeds = {model.a: a, model.b: b}
                    seen.append((await session.run([model.given, model.train_op], feeds))[0])
            else:
                await run_until_stopped(model, session, seen)
    async with batch(shuffle(range(40), 7, seed=1), 2) as batches:
        assert seen == [100 * a + b async for a, b in batches]


async def test_workers_on_one_graph_share_a_source(tmp_path: Path) -> None:
    model, source = fed_model(), prefetch(range(60), 3)
    seen: list[int] = []
    creator = shared(model.graph)

    async def worker(hooks: list[Any]) -> None:
        async with monitored(model.graph, [FeedHook(source, "a:0"), *hooks], creator) as session:
            await run_until_stopped(model, session, seen)

    waiting = DataWaitHook(source, 1, output_dir=str(tmp_path))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for hooks in ([waiting], [], [], []):
                group.start_soon(worker, hooks)
    assert sorted(seen) == list(range(0, 6000, 100))
    shares = [share for _, share in scalars(tmp_path, "data_wait")]
    assert shares
    assert all(0.0 <= share <= 1.0 for share in shares)


async def test_a_source_of_arrays_is_fed_whole() -> None:
    graph = tf.Graph()
    with graph.as_default():
        images = v1.placeholder(tf.float32, (None, 3), "images")
        mean = tf.reduce_mean(images)
    source = batch(np.arange(18, dtype=np.float32).reshape(6, 3), 2)
    with graph.as_default():
        v1.train.get_or_create_global_step()
    async with monitored(graph, [FeedHook(source, images)]) as session:
        means = [await session.run(mean) for _ in range(3)]
    assert means == [2.5, 8.5, 14.5]


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("structure", ["one", "list", "tuple", "mapping"])
async def test_variables_are_fed_by_hooks_that_are_made_outside_of_their_graph(
    structure: str, use_resource: bool
) -> None:
    graph = tf.Graph()
    with graph.as_default():
        a, b = (v1.get_variable(name, initializer=1, use_resource=use_resource) for name in "ab")
        fetches = [tf.identity(graph.as_graph_element(each)) for each in (a, b)]
    names, items, expected = {
        "one": (a, [2, 4], [[2, 1], [4, 1]]),
        "list": ([a, b], [(2, 3), (4, 5)], [[2, 3], [4, 5]]),
        "tuple": ((a, b), [[2, 3], [4, 5]], [[2, 3], [4, 5]]),
        "mapping": ({"x": a, "y": b}, [{"x": 2, "y": 3}, {"x": 4, "y": 5}], [[2, 3], [4, 5]]),
    }[structure]
    seen = []
    async with monitored(graph, [FeedHook(items, names)]) as session:
        while not session.should_stop():
            seen.append(await session.run(fetches))
    assert seen == expected


def test_a_variable_that_is_fed_twice_is_refused_outside_of_its_graph() -> None:
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=1.0)
    with pytest.raises(ValueError, match="feeds one of them twice"):
        FeedHook([], [variable, variable])


def dataset_of(num_items: int) -> Any:
    return tf.data.Dataset.range(num_items)


def keeping(items: list[Any]) -> FunctionSessionCreator:
    """Its step keeps what it is given."""

    def step(**feeds: Any) -> dict[str, Any]:
        items.append(feeds)
        return {}

    return FunctionSessionCreator(step)


async def seen_of(source: Any, names: Any) -> list[Any]:
    items: list[Any] = []
    async with MonitoredSession([FeedHook(source, names)], keeping(items)) as session:
        await until_stopped(session)
    return items


async def test_batches_of_a_dictionary_are_fed_by_name() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(
        {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "y": [b"a", b"b", b"c"]}
    ).batch(2)
    first, last = await seen_of(dataset, None)
    assert type(first["x"]) is np.ndarray
    np.testing.assert_array_equal(first["x"], np.array([[0, 1], [2, 3]], np.float32), strict=True)
    assert list(first["y"]) == [b"a", b"b"]
    np.testing.assert_array_equal(last["x"], np.array([[4, 5]], np.float32), strict=True)


@pytest.mark.parametrize("is_iterator", [True, False])
async def test_tuples_are_fed_in_their_order(is_iterator: bool) -> None:
    dataset = tf.data.Dataset.zip((dataset_of(3), dataset_of(3).map(lambda x: -x)))
    items = await seen_of(iter(dataset) if is_iterator else dataset, ["a", "b"])
    assert [(int(each["a"]), int(each["b"])) for each in items] == [(0, 0), (1, -1), (2, -2)]
    assert not any(tf.is_tensor(value) for each in items for value in each.values())


async def test_an_iterator_under_way_goes_on() -> None:
    iterator = iter(dataset_of(5))
    assert int(next(iterator)) == 0
    assert [int(each["x"]) for each in await seen_of(iterator, "x")] == [1, 2, 3, 4]
    assert "asynchooks-input" not in threads_left()  # other tests leave threads of steps that hang


@pytest.mark.parametrize("is_iterator", [True, False])
async def test_a_resumed_training_goes_on_behind_the_last_item(
    is_iterator: bool, tmp_path: Path
) -> None:
    for last in (3, 3, 7, 99):
        diary, dataset = Diary(), dataset_of(20).shuffle(20, seed=5).batch(2)
        source = prefetch(iter(dataset) if is_iterator else dataset, last % 4 + 1)
        hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
        async with MonitoredSession(hooks, diary.creator) as session:
            while session.global_step.value < last:
                await session.run([])
    assert diary.items == [int(x) for x in dataset_of(20).shuffle(20, seed=5)]


async def test_inside_a_session_on_a_graph_the_data_is_read_outside_of_it() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.int64, (None,), "x")
        train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
        total = tf.reduce_sum(x)
    size, totals = len(graph.get_operations()), []
    dataset = dataset_of(6).batch(3)
    async with monitored(graph, [FeedHook(dataset, x)]) as session:
        while not session.should_stop():
            totals.append(int((await session.run([total, train_op]))[0]))
    async with monitored(graph) as session:
        async for batch in session.batches(dataset):
            totals.append(int(await session.run(total, {x: batch})))
    assert totals == [3, 12] * 2
    names = [each.type for each in graph.get_operations()[size:]]
    assert not [each for each in names if "Dataset" in each or "Iterator" in each]


@pytest.mark.parametrize("num_to_skip", [0, 2])
async def test_a_dataset_of_a_graph_is_refused(num_to_skip: int) -> None:
    with tf.Graph().as_default():
        dataset = dataset_of(5)
    hook = FeedHook(dataset, "x")
    if num_to_skip:
        hook.load_state_dict({"stage": "iterable", "items": num_to_skip})
    with pytest.raises(InputError, match="belongs to a graph, .* make it outside of any graph"):
        async with MonitoredSession([hook], Diary().creator) as session:
            await session.run([])


async def test_errors_of_a_dataset_leave_as_themselves() -> None:
    def fails(x: Any) -> Any:
        return tf.debugging.check_numerics(1.0 / tf.cast(3 - x, tf.float32), "bad item")

    items: list[Any] = []
    hook = FeedHook(dataset_of(5).map(fails), "x")
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad item"):
        async with MonitoredSession([hook], keeping(items)) as session:
            await until_stopped(session)
    assert len(items) == 3
