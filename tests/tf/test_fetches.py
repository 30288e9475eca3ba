"""Fetches without feeds run through compiled callables: the results must be Session.run's."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest

from asynchooks.tf.graph._callables import MAX_CALLABLES
from asynchooks.tf.graph._session import GraphSession

from .models import monitored

tf = pytest.importorskip("tensorflow")
np = pytest.importorskip("numpy")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

Pair = namedtuple("Pair", ["first", "second"])
FetchOf = Callable[[Any], Any]

FETCHES: dict[str, FetchOf] = {
    "tensor": lambda g: g.scalar,
    "bool": lambda g: g.flag,
    "matrix": lambda g: g.matrix,
    "text": lambda g: g.text,
    "texts": lambda g: g.texts,
    "empty tensor": lambda g: g.empty,
    "operation": lambda g: g.op,
    "variable": lambda g: g.variable,
    "name of a tensor": lambda g: "scalar:0",
    "name of an operation": lambda g: "op",
    "sparse": lambda g: g.sparse,
    "indexed slices": lambda g: g.slices,
    "ragged": lambda g: g.ragged,
    "list": lambda g: [g.scalar, g.op, "matrix:0"],
    "empty list": lambda g: [],
    "empty tuple": lambda g: (),
    "empty dict": lambda g: {},
    "tuple": lambda g: (g.scalar, g.matrix),
    "the same twice": lambda g: [g.scalar, g.scalar, "scalar:0"],
    "nested": lambda g: {"a": [g.scalar, (g.op, g.sparse)], "b": {"c": g.text}},
    "ordered dict": lambda g: OrderedDict(b=g.scalar, a=g.matrix),
    "namedtuple": lambda g: Pair(g.scalar, [g.matrix]),
    "list with a variable": lambda g: [g.variable, g.sparse],
}


class Graph:
    """One of each kind of thing that a graph can be asked for."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.scalar = tf.constant(2.5, tf.float32, name="scalar")
            self.flag = tf.constant(True)
            self.matrix = tf.constant([[1, 2], [3, 4]], tf.int64, name="matrix")
            self.text = tf.constant("text")
            self.texts = tf.constant(["a", "b"])
            self.empty = tf.zeros([0, 3], tf.float16)
            self.op = tf.no_op(name="op")
            self.variable = v1.get_variable("v", initializer=[1.0, 2.0])
            self.sparse = tf.SparseTensor([[0, 1]], [7], [2, 2])
            self.slices = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), None)
            self.ragged = tf.ragged.constant([[1], [2, 3]])


def described(value: Any) -> Any:
    """Type, dtype, shape and content of a result, all the way down."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(key, described(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [described(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, str(value.dtype), value.shape, value.tolist()
    if hasattr(value, "to_list"):
        return kind, value.to_list()
    return kind, value


@pytest.mark.parametrize("kind", FETCHES)
async def test_the_result_is_session_runs_in_type_dtype_and_nesting(kind: str) -> None:
    graph = Graph()
    fetches = FETCHES[kind](graph)
    async with monitored(graph.graph) as session:
        expected = session.raw_session().run(fetches)
        for _ in range(2):
            assert described(await session.run(fetches)) == described(expected)


async def test_fetches_of_equal_form_are_distinguished() -> None:
    graph = Graph()
    async with monitored(graph.graph) as session:
        assert await session.run([graph.scalar]) == [2.5]
        assert await session.run((graph.scalar,)) == (2.5,)
        assert await session.run({"a": graph.scalar}) == {"a": 2.5}
        assert await session.run({"b": graph.scalar}) == {"b": 2.5}
        assert await session.run([[graph.scalar], []]) == [[2.5], []]
        assert await session.run([graph.scalar, []]) == [2.5, []]


async def test_one_list_that_changes_between_runs_gives_what_it_holds_now() -> None:
    graph = Graph()
    fetches = [graph.scalar]
    async with monitored(graph.graph) as session:
        assert await session.run(fetches) == [2.5]
        fetches[0] = graph.text
        assert await session.run(fetches) == [b"text"]
        fetches.append(graph.scalar)
        assert await session.run(fetches) == [b"text", 2.5]


async def test_one_namedtuple_type_and_another_are_distinguished() -> None:
    other = namedtuple("other", ["first", "second"])
    graph = Graph()
    async with monitored(graph.graph) as session:
        for kind in (Pair, other, Pair):
            result = await session.run(kind(graph.scalar, graph.text))
            assert type(result) is kind
            assert result == (2.5, b"text")


def test_the_cache_of_callables_is_bounded_and_dies_with_the_session() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tensors = [tf.constant(i) for i in range(3 * MAX_CALLABLES)]
        raw = GraphSession(v1.Session())
    for _ in range(2):
        assert [raw.run(each) for each in tensors] == list(range(3 * MAX_CALLABLES))
        assert len(raw._callables) <= MAX_CALLABLES
    raw.close()
    assert len(raw._callables) == 0


@pytest.mark.parametrize("fetches", [None, 3, "nothing:0", "nothing", object(), [None]])
async def test_what_cannot_be_fetched_is_tensorflows_error(fetches: Any) -> None:
    graph = Graph()
    async with monitored(graph.graph) as session:
        with pytest.raises((TypeError, ValueError, KeyError)) as expected:
            session.raw_session().run(fetches)
        with pytest.raises(expected.type, match="."):
            await session.run(fetches)


async def test_the_global_step_published_is_read_after_the_run() -> None:
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        train_op = v1.assign_add(step, 1).op
    async with monitored(graph) as session:
        for count in range(1, 51):
            await session.run([step, train_op])
            assert session.global_step.value == count
