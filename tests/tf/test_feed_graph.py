"""Input of real graphs: FeedHook, session.batches, tf.data."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    InputError,
    StateDictSaver,
)
from asynchooks.data import prefetch

from ..support.moments import at
from ..support.step_loops import run_steps
from ..support.threads import threads_left
from .models import aborted, monitored, raising, tf, v1


class Fed(NamedTuple):
    """A graph that adds up what it is fed: 100 * a + b at each step."""

    graph: Any
    a: Any
    b: Any
    fetches: Any


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
            return Fed(graph, a, b, [given, tf.identity(total)])


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("structure", ["None", "mapping"])
async def test_items_are_fed_by_tensor_and_by_name(by_name: bool, structure: str) -> None:
    model, seen = fed_model(), []  # type: tuple[Fed, list[int]]
    a, b = ("a:0", "b:0") if by_name else (model.a, model.b)
    names, items = {
        "None": (None, [{a: 1, b: 2}, {a: 3, b: 4}]),
        "mapping": ({"x": a, "y": b}, [{"x": 1, "y": 2}, {"x": 3, "y": 4, "z": 5}]),
    }[structure]
    loses = at(before_run=raising(None, aborted()))  # then the same item is fed again
    async with monitored(model.graph, [FeedHook(items, names), loses]) as session:
        while not session.should_stop():
            seen.append(int((await session.run(model.fetches))[0]))
    assert seen == [102, 304]


async def fed_by(source: Any, names: Any = "x", hooks: Any = (), last: int = 99) -> list[Any]:
    """What a step function is given."""
    items: list[Any] = []

    def step(**feeds: Any) -> dict[str, Any]:
        items.append(feeds)
        return {}

    await run_steps(step, last, FeedHook(source, names), *hooks)
    return items


async def test_elements_of_a_dataset_are_fed_as_arrays_by_name_or_in_order() -> None:
    slices = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "y": [b"a", b"b", b"c"]}
    first, last = await fed_by(tf.data.Dataset.from_tensor_slices(slices).batch(2), None)
    np.testing.assert_array_equal(first["x"], np.array([[0, 1], [2, 3]], np.float32), strict=True)
    assert (list(first["y"]), last["x"].tolist()) == ([b"a", b"b"], [[4, 5]])
    pairs = tf.data.Dataset.zip((tf.data.Dataset.range(3), tf.data.Dataset.range(3, 6)))
    iterator = iter(pairs)
    next(iterator)
    for source, expected in ((pairs, [0, 1, 2]), (iterator, [1, 2])):  # it was under way
        items = await fed_by(source, ["a", "b"])
        assert items == [{"a": i, "b": i + 3} for i in expected]
        assert not any(tf.is_tensor(value) for each in items for value in each.values())
    assert "asynchooks-input" not in threads_left()


class Stateless:
    def state_dict(self) -> dict[str, Any]:
        return {"nothing": np.zeros(1)}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("is_iterator", [True, False])
async def test_a_resumed_training_goes_on_behind_the_last_element(
    is_iterator: bool, tmp_path: Path
) -> None:
    seen: list[int] = []
    for last in (3, 3, 7, 99):
        dataset = tf.data.Dataset.range(20).shuffle(20, seed=5).batch(2)
        source = prefetch(iter(dataset) if is_iterator else dataset, last % 4 + 1)
        saver = CheckpointSaverHook(tmp_path, save_steps=3, saver=StateDictSaver(model=Stateless()))
        for each in await fed_by(source, "x", [saver], last):
            seen += [int(x) for x in each["x"]]
    assert seen == [int(x) for x in tf.data.Dataset.range(20).shuffle(20, seed=5)]


async def test_inside_a_session_on_a_graph_a_dataset_is_read_outside_of_it() -> None:
    graph, totals = tf.Graph(), []  # type: tuple[Any, list[int]]
    with graph.as_default():
        x = v1.placeholder(tf.int64, (None,), "x")
        total = tf.reduce_sum(x)
        v1.train.get_or_create_global_step()
    dataset = tf.data.Dataset.range(6).batch(3)
    async with monitored(graph, [FeedHook(dataset, x)]) as session:
        while not session.should_stop():
            totals.append(int(await session.run(total)))
    async with monitored(graph) as session:
        async for each in session.batches(dataset):
            totals.append(int(await session.run(total, {x: each})))
    assert totals == [3, 12] * 2
    kinds = [each.type for each in graph.get_operations()]
    assert not [each for each in kinds if "Dataset" in each or "Iterator" in each]


async def test_a_dataset_of_a_graph_is_refused_and_errors_of_others_leave_as_themselves() -> None:
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.range(5)
    for num_to_skip in (0, 2):
        hook = FeedHook(dataset, "x")
        if num_to_skip:
            hook.load_state_dict({"stage": "iterable", "items": num_to_skip})
        with pytest.raises(InputError, match="belongs to a graph, .* make it outside of any graph"):
            await run_steps(lambda x: {}, 1, hook)
    divided = tf.data.Dataset.range(5).map(
        lambda x: tf.debugging.check_numerics(1.0 / tf.cast(3 - x, tf.float32), "bad item")
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad item"):
        await fed_by(divided)
