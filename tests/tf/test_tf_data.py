"""tf.data as the input: items are arrays, TensorFlow itself skips, and a graph's one is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputError,
    MonitoredSession,
)
from asynchooks.data import prefetch

from ..hooks.inputs import Diary, saving, until_stopped
from ..hooks.savers import threads_left
from .models import monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def dataset_of(num_items: int) -> Any:
    return tf.data.Dataset.range(num_items)


class Seen:
    """A step that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def step(self, **feeds: Any) -> dict[str, Any]:
        self.items.append(feeds)
        return {}

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.step)


async def seen_of(source: Any, names: Any) -> list[Any]:
    model = Seen()
    async with MonitoredSession([FeedHook(source, names)], model.creator) as session:
        await until_stopped(session)
    return model.items


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
    assert totals == [3, 12]
    totals.clear()
    async with monitored(graph) as session:
        async for batch in session.batches(dataset):
            totals.append(int(await session.run(total, {x: batch})))
    assert totals == [3, 12]
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

    model = Seen()
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad item"):
        async with MonitoredSession([FeedHook(dataset_of(5).map(fails), "x")], model.creator) as s:
            await until_stopped(s)
    assert len(model.items) == 3


PROGRAM = """
    import asyncio
    import tensorflow as tf
    from asynchooks import FeedHook, FunctionSessionCreator, InputError, MonitoredSession

    tf.compat.v1.disable_eager_execution()

    async def main():
        hook = FeedHook(tf.data.Dataset.range(5), "x")
        creator = FunctionSessionCreator(lambda x: {})
        async with MonitoredSession([hook], creator) as session:
            await session.run([])

    try:
        asyncio.run(main())
    except InputError as error:
        assert "with eager execution" in str(error), error
        print("refused")
"""


def test_without_eager_execution_it_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr[-2000:]
