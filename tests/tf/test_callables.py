"""GraphSession.run against Session.run: any fetch, any feed, compiled and then cached."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import asynchooks
from asynchooks.tf.graph._callables import MAX_CALLABLES
from asynchooks.tf.graph._session import GraphSession

from .models import monitored

tf = pytest.importorskip("tensorflow")
np = pytest.importorskip("numpy")
slices = pytest.importorskip("tensorflow.python.framework.indexed_slices")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

Pair = namedtuple("Pair", ["first", "second"])
OtherPair = namedtuple("OtherPair", ["first", "second"])

Sessions = tuple[GraphSession, Any]


def matrix() -> Any:
    """Of NumPy's own class for matrices, whose use it discourages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.asmatrix([[1.0, 2.0]], np.float32)


class MyList(list[Any]): ...


class MyDict(dict[str, Any]): ...


NUMBERS = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


class Pool:
    """A graph with something to fetch of each kind, and something to feed of each kind."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.scalar = tf.constant(2.5, name="scalar")
            self.matrix = tf.constant([[1, 2], [3, 4]], tf.int64, name="matrix")
            self.nan = tf.constant([float("nan"), -0.0])
            self.text = tf.constant("text", name="text")
            self.texts = tf.constant(["a", "b\0", ""])
            self.empty = tf.zeros([0, 3], name="empty")
            self.op = tf.no_op(name="op")
            self.variable = v1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
            self.old_variable = v1.get_variable("r", initializer=[3.0, 4.0], use_resource=False)
            self.step = v1.train.get_or_create_global_step()
            self.sparse = tf.SparseTensor([[0, 1]], [7], [2, 2])
            self.ones = [tf.constant([number]) for number in range(100)]
            self.slices = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), None)
            self.ragged = tf.ragged.constant([[1], [2, 3]])
            self.typed = {
                name: [tf.zeros(shape, name) for shape in ((), (2,), (0, 3))] for name in NUMBERS
            }
            self.fed = {
                "rows": v1.placeholder(tf.float32, [None, 4], name="rows"),
                "one": v1.placeholder(tf.float32, [], name="one"),
                "any": v1.placeholder(tf.float32, None, name="any"),
                "words": v1.placeholder(tf.string, None, name="words"),
                "default": v1.placeholder_with_default([1.0, 2.0], [None], name="default"),
                "constant": tf.constant([1.0, 2.0], name="constant"),
                "read": self.variable.read_value(),
                "step": self.graph.as_graph_element(self.step),
                **{name: v1.placeholder(name, None) for name in NUMBERS},
            }
            self.copies = {name: tf.identity(each) for name, each in self.fed.items()}
            self.fed_sparse = v1.sparse_placeholder(tf.int32, [2, 2])
            self.dense = v1.sparse_tensor_to_dense(self.fed_sparse)
            values, indices = v1.placeholder(tf.float32, [None, 1]), v1.placeholder(tf.int64, [1])
            self.fed_slices = tf.IndexedSlices(values, indices, None)
            self.fed_shaped_slices = tf.IndexedSlices(values, indices, tf.constant([4, 1]))
            self.fed_ragged = v1.ragged.placeholder(tf.int32, 1, [])
            self.flat = tf.identity(self.fed_ragged.flat_values)
            self.large = v1.get_variable("large", initializer=[0.0] * 64, use_resource=False)
            variables = self.variable, self.old_variable, self.large
            self.grow = tf.group(*[each.assign_add(tf.ones_like(each)) for each in variables])
            self.init = v1.global_variables_initializer()

    def session(self) -> Sessions:
        raw, session = session_of(self.graph)
        session.run(self.init)
        return raw, session


def session_of(graph: Any) -> Sessions:
    """(what is under test, the TensorFlow session that it runs)."""
    session = v1.Session(graph=graph)
    return GraphSession(session), session


def described(value: Any) -> Any:
    """Type, dtype, shape and content of a result, all the way down; bit by bit, so NaN is NaN."""
    kind = type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        is_objects = value.dtype == object
        content = [described(each) for each in value.ravel()] if is_objects else value.tobytes()
        return kind, str(value.dtype), value.shape, content, value.flags.writeable
    if isinstance(value, (dict, UserDict)):
        factory = getattr(value, "default_factory", None)
        items = [(type(key), key, described(each)) for key, each in value.items()]
        return kind, factory, items
    if isinstance(value, (list, tuple)):
        return kind, [described(each) for each in value]
    if hasattr(value, "nested_row_splits"):
        return kind, described(value.flat_values), described(value.nested_row_splits)
    if hasattr(kind, "__attrs_attrs__"):
        return kind, [described(getattr(value, each.name)) for each in kind.__attrs_attrs__]
    return kind, value


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """What a run gives: its result described, or the type of its error and how that begins."""
    try:
        result = run(*args)
    except (TypeError, ValueError, KeyError) as error:
        return "error", type(error), str(error)[:40]
    except Exception as error:
        return "error", type(error)
    return "result", described(result)


def same(sessions: Sessions, fetches: Any, feed_dict: Any = None) -> Any:
    """What both give, which must be the same, three times."""
    raw, session = sessions
    with session.graph.as_default():  # where TensorFlow's programs run
        expected = outcome(session.run, fetches, feed_dict)
    for _ in range(3):
        assert outcome(raw.run, fetches, feed_dict) == expected
    return expected


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


@pytest.fixture(params=["with the private way", "without"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """TensorFlow's private way to compile a callable with feeds may go in a later version."""
    if request.param == "without":
        name = "_make_callable_from_options"
        owner = next(each for each in v1.Session.__mro__ if name in vars(each))
        monkeypatch.delattr(owner, name)
    return str(request.param)


@pytest.fixture
def sessions(ways: str, pool: Pool) -> Iterator[Sessions]:
    raw, session = pool.session()
    yield raw, session
    raw.close()


Case = Callable[[Pool], Any]


def entry(where: str, name: str) -> Case:
    return lambda pool: getattr(pool, where)[name]


FETCHES: dict[str, Case] = {
    "tensor": lambda p: p.scalar,
    "nan": lambda p: p.nan,
    "text": lambda p: p.text,
    "texts": lambda p: p.texts,
    "empty tensor": lambda p: p.empty,
    "operation": lambda p: p.op,
    "operation with an output": lambda p: p.scalar.op,
    "variable": lambda p: p.variable,
    "variable without resource": lambda p: p.old_variable,
    "name of a tensor": lambda p: "scalar:0",
    "name of an operation": lambda p: "op",
    "name of an operation with an output": lambda p: "scalar",
    "name in bytes": lambda p: b"scalar:0",
    "sparse": lambda p: p.sparse,
    "indexed slices": lambda p: p.slices,
    "ragged": lambda p: p.ragged,
    "list": lambda p: [p.scalar, p.op, "matrix:0"],
    "tuple": lambda p: (p.scalar, p.matrix),
    "dict": lambda p: {"b": p.scalar, "a": p.op},
    "namedtuple": lambda p: Pair(p.scalar, [p.op]),
    "ordered dict": lambda p: OrderedDict(b=p.scalar, a=p.matrix),
    "defaultdict": lambda p: defaultdict(list, a=p.scalar),
    "subclass of list": lambda p: MyList([p.scalar, p.text]),
    "subclass of dict": lambda p: MyDict(a=p.scalar, b=p.op),
    "mapping that is no dict": lambda p: UserDict(a=p.scalar),
    "keys of several types": lambda p: {1: p.scalar, (2, 3): p.op, None: p.text, p.text: p.matrix},
    "the same three times": lambda p: [p.scalar, (p.scalar, {"again": "scalar:0"})],
    "an operation twice": lambda p: [p.op, p.op, p.scalar, p.scalar.op],
    "composites in a tuple": lambda p: (p.sparse, p.slices, p.ragged, p.sparse.values),
    "variables in a dict": lambda p: {"new": p.variable, "old": [p.old_variable, "r:0"]},
    "empty list": lambda p: [],
    "empty tuple": lambda p: (),
    "empty dict": lambda p: {},
    "nothing but nests": lambda p: [[], (), {"a": Pair([], {})}],
    "nests with a tensor": lambda p: [[], (p.scalar,), {"a": ()}],
    **{name: entry("typed", name) for name in NUMBERS},
}


@pytest.mark.parametrize("kind", FETCHES)
def test_a_fetch_gives_what_session_run_gives_each_time(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    raw, session = sessions
    one = pool.fed["one"]
    for feed_dict in (None, None, None, {}, {one: 1.0}, {one: 2.0}, {one: 3.0}):
        expected = outcome(session.run, FETCHES[kind](pool), feed_dict)
        assert outcome(raw.run, FETCHES[kind](pool), feed_dict) == expected
        assert expected[0] == "result"


ROWS = np.arange(32, dtype=np.float32).reshape(4, 8)


# name: (what is fed, a plain value for it, the value in question)
FEEDS: dict[str, tuple[str, Any, Any]] = {
    "float64": ("rows", ROWS[:, :4], ROWS[:2, :4].astype(np.float64)),
    "integers": ("rows", ROWS[:, :4], ROWS[:2, :4].astype(np.int64)),
    "not contiguous": ("rows", ROWS[:, :4].copy(), ROWS[::2, ::2]),
    "reversed": ("rows", ROWS[:, :4].copy(), ROWS[::-1, 3::-1]),
    "fortran order": ("rows", ROWS[:, :4].copy(), np.asfortranarray(ROWS[:, :4])),
    "transposed": ("rows", ROWS[:, :4].copy(), ROWS[:, :4].copy().T),
    "broadcast": ("rows", ROWS[:, :4].copy(), np.broadcast_to(np.float32(1), (3, 4))),
    "read-only": ("rows", ROWS[:, :4].copy(), np.frombuffer(bytes(16), np.float32).reshape(1, 4)),
    "no rows": ("rows", ROWS[:, :4], np.zeros((0, 4), np.float32)),
    "nested list": ("rows", ROWS[:, :4], [[1, 2.5, True, 4]]),
    "list of arrays": ("rows", ROWS[:, :4], [ROWS[0, :4], (5, 6, 7, 8)]),
    "byte order": ("int32", np.arange(3, dtype=np.int32), np.array([1, 2], ">i4")),
    "byte order of floats": ("any", np.float32(1), np.array([1.5, 2], ">f4")),
    "not aligned": ("any", 1.0, np.frombuffer(bytes(9), np.float32, 2, offset=1)),
    "matrix": ("any", 1.0, matrix()),
    "masked": ("any", 1.0, np.ma.masked_array(np.ones(2, np.float32), [0, 1])),
    "array without dimensions": ("one", 1.0, np.array(2.0, np.float32)),
    "numpy scalar": ("one", 1.0, np.float32(2)),
    "numpy scalar of another type": ("one", np.float32(1), np.float64(0.1)),
    "Python int": ("one", 1.0, 3),
    "Python bool": ("one", 1.0, True),
    "number in text": ("one", 1.0, "1.5"),
    "nothing for a float": ("one", 1.0, None),
    "nothing in a list": ("any", [1.0], [None, 2.0]),
    "inexact int": ("any", 1.0, 2**24),
    "other ranks": ("any", [1.0, 2.0], [[[3.0]]]),
    "empty list": ("any", [1.0], []),
    "float for an int": ("int32", 1, 3.7),
    "floats for ints": ("int32", 1, np.array([1.5, -2.5])),
    "range": ("int32", [1], range(3)),
    "bytes in a buffer": ("uint8", [1], memoryview(b"ab")),
    "bool for an int": ("int64", 1, True),
    "int for a bool": ("bool", True, 1),
    "text for a bool": ("bool", True, "x"),
    "nothing for a bool": ("bool", True, None),
    "float for a bfloat16": ("bfloat16", 1.0, [1.2345, 2]),
    "double for a half": ("float16", np.float16(1), np.array([1.2345])),
    "real for a complex": ("complex64", 1j, np.array([1.5])),
    "complex128 for a complex64": ("complex64", 1j, np.array([1.5 + 0.1j])),
    "text": ("words", b"a", "ä"),
    "bytes": ("words", "a", b"\xff\0"),
    "list of text": ("words", [b"a"], ["ä", b"b\0c", ""]),
    "numpy text": ("words", [b"a"], np.array(["ä", "bcd"])),
    "numpy bytes": ("words", [b"a"], np.array([b"a", b"b\0c\0"])),
    "numpy objects": ("words", [b"a"], np.array([["a", b"b\0"]], object)),
    "every second text": ("words", [b"a"], np.array(["a", "b", "c"], object)[::2]),
    "numpy scalar of text": ("words", "a", np.str_("ä")),
    "numpy scalar of bytes": ("words", "a", np.bytes_(b"b")),
    "no text": ("words", [b"a"], np.zeros((0, 3), object)),
    "default": ("default", [3.0], np.ones(5)),
    "constant": ("constant", [3.0, 4.0], (5, 6)),
    "value of a variable": ("read", [3.0, 4.0], [5, 6]),
    "global step": ("step", 7, np.int64(8)),
    **{f"list for {name}": (name, [1], [[0, 1]]) for name in NUMBERS},
    **{f"Python number for {name}": (name, 0, 1) for name in NUMBERS},
    **{f"double for {name}": (name, 0, np.ones((2, 0))) for name in NUMBERS},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FEEDS)
def test_a_feed_is_converted_as_session_run_does_it_each_time(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    raw, session = sessions
    name, plain, value = FEEDS[kind]
    fed, copy = pool.fed[name], pool.copies[name]
    for fetches in (copy, [copy, fed], {"a": (fed.name, pool.op), "b": [copy, copy]}, fed, copy.op):
        for key, order in (fed, (plain, value, value, plain)), (fed.name, (value, plain, value)):
            for each in order:
                feed_dict = {key: each}
                expected = outcome(session.run, fetches, feed_dict)
                assert outcome(raw.run, fetches, feed_dict) == expected
                assert expected[0] == "result"
                assert len(feed_dict) == 1
                assert feed_dict[key] is each


async def test_a_run_of_a_monitored_session_gives_the_same_results_and_errors(pool: Pool) -> None:
    async with monitored(pool.graph) as session:
        raw = session.raw_session()
        for kind, fetches in FETCHES.items():
            expected = described(raw.run(fetches(pool)))
            for _ in range(2):
                assert described(await session.run(fetches(pool))) == expected, kind
        for bad in (None, 3, "nothing:0", "nothing", object(), [None]):
            with pytest.raises((TypeError, ValueError, KeyError)) as error:
                raw.run(bad)
            with pytest.raises(error.type, match="."):
                await session.run(bad)


FED = {"one:0": 1.0}
FED_OR_NOT = pytest.mark.parametrize("feed_dict", [None, FED])

FEED_DICTS: dict[str, Callable[[Pool], Any]] = {
    "sparse value": lambda p: {p.fed_sparse: v1.SparseTensorValue([[0, 1]], [7], [2, 2])},
    "sparse tuple": lambda p: {p.fed_sparse: ([[0, 0]], np.array([8.0]), (2, 2))},
    "new sparse key": lambda p: {tf.SparseTensor(*_parts(p)): ([[1, 0]], [9], [2, 2])},
    "parts of sparse": lambda p: dict(zip(_parts(p), ([[0, 0]], [5], [2, 2]), strict=True)),
    "slices": lambda p: {p.fed_slices: slices.IndexedSlicesValue(np.ones((1, 1)), [0], None)},
    "slices tuple": lambda p: {p.fed_shaped_slices: ([[1.5]], [3], [5, 1])},
    "ragged": lambda p: {p.fed_ragged: v1.ragged.constant_value([[1], [2, 3]], dtype="int32")},
    "tuple of keys": lambda p: {(p.fed["one"], (p.fed["any"], p.fed["words"])): (1, ([2], "a"))},
    "name in bytes": lambda p: {b"one:0": 1},
    "tensor, then its name": lambda p: {p.fed["one"]: 1, "one:0": 2},
    "name, then its tensor": lambda p: {"one:0": 1, p.fed["one"]: 2},
    "ordered dict": lambda p: OrderedDict([(p.fed["one"], 1), (p.fed["any"], 2)]),
    "other order": lambda p: OrderedDict([(p.fed["any"], 3), (p.fed["one"], 4)]),
    "defaultdict": lambda p: defaultdict(int, {p.fed["one"]: 1}),
    "read-only mapping": lambda p: MappingProxyType({p.fed["one"]: 1}),
    "chained mappings": lambda p: ChainMap({p.fed["one"]: 1}, {p.fed["any"]: 2}),
    "empty list": lambda p: [],
    "variable": lambda p: {p.variable: [5, 6]},
    "variable without resource": lambda p: {p.old_variable: [5, 6]},
    "global step": lambda p: {p.step: 7},
}


def _parts(pool: Pool) -> tuple[Any, ...]:
    return pool.fed_sparse.indices, pool.fed_sparse.values, pool.fed_sparse.dense_shape


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FEED_DICTS)
def test_a_feed_dict_of_any_form_feeds_what_session_run_feeds(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    wanted = [pool.copies["one"], pool.copies["any"], pool.dense, pool.flat, pool.copies["read"]]
    wanted += [pool.fed_slices, pool.fed_shaped_slices, pool.fed_ragged, pool.fed_sparse]
    wanted += [pool.variable, pool.old_variable, pool.step, pool.scalar, pool.fed["any"]]
    with pool.graph.as_default():  # outside of it variables have no hash
        for each in ("sparse value", kind, kind):
            results = [same(sessions, fetch, FEED_DICTS[each](pool)) for fetch in wanted]
            fed = [wanted[i] for i, result in enumerate(results) if result[0] == "result"]
            assert same(sessions, fed, FEED_DICTS[each](pool))[0] == "result"
    raw, session = sessions
    assert raw.read_step() == session.run(pool.step) == 0


@FED_OR_NOT
def test_a_list_and_a_dict_give_what_they_hold_now(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    inner: dict[Any, Any] = {"a": pool.scalar}
    fetches = [inner, pool.text]
    changes: list[Callable[[], Any]] = [
        lambda: inner.update(b=pool.text),
        lambda: inner.update(a=pool.nan),
        lambda: fetches.append(pool.sparse),
        fetches.reverse,
        lambda: fetches.__setitem__(1, pool.op),
        fetches.clear,
    ]
    for change in changes:
        same(sessions, fetches, feed_dict)
        change()
        same(sessions, list(fetches), feed_dict)
    keyed = {"a": pool.scalar}
    same(sessions, keyed, feed_dict)
    keyed["b"] = keyed.pop("a")
    same(sessions, {"a": pool.scalar}, feed_dict)
    same(sessions, keyed, feed_dict)


@FED_OR_NOT
def test_fetches_of_equal_form_and_equal_keys_of_different_types_are_distinguished(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    one, two = pool.scalar, pool.text
    forms = [[one], (one,), {"a": one}, {"b": one}, [[one], []], [one, []]]
    forms += [Pair(one, two), OtherPair(one, two), Pair(one, two)]
    forms += [{key: one} for key in (1, True, 1.0, np.int64(1), 1)]
    for fetches in forms:
        assert same(sessions, fetches, feed_dict)[0] == "result"


@FED_OR_NOT
def test_what_was_freed_is_not_taken_for_what_has_its_id_now(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    raw, session = sessions
    with pool.graph.as_default():
        for values in pool.ones:
            fetches = [tf.SparseTensor(pool.sparse.indices, values, pool.sparse.dense_shape)]
            expected = described(session.run(values, feed_dict))
            assert described(raw.run(fetches, feed_dict)[0].values) == expected
            fetches.clear()


@pytest.mark.exhaustive
@FED_OR_NOT
def test_callables_are_bounded_in_number_and_still_right_after_they_were_dropped(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    raw, _ = sessions
    for _ in range(2):
        for size in (1, 2):
            for index in range(100):
                result = raw.run(pool.ones[index:][:size], feed_dict)
                assert result == list(range(index, min(index + size, 100)))
    assert 0 < len(raw._callables._steps) <= MAX_CALLABLES


def test_the_cache_of_callables_is_bounded_and_dies_with_the_session() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tensors = [tf.constant(i) for i in range(3 * MAX_CALLABLES)]
        raw = GraphSession(v1.Session())
    for _ in range(2):
        assert [raw.run(each) for each in tensors] == list(range(3 * MAX_CALLABLES))
        assert len(raw._callables._steps) <= MAX_CALLABLES
    raw.close()
    assert len(raw._callables._steps) == 0


def test_attrs_classes_and_containers_that_a_module_tracks_are_rebuilt_as_session_run_does_it(
    pool: Pool, sessions: Sessions
) -> None:
    attr = pytest.importorskip("attr")
    made = attr.make_class("Made", ["first", "second"])
    other = attr.make_class("Other", ["first", "second"])
    module = tf.Module()
    module.parts, module.pair, module.named = [pool.scalar, pool.op], (pool.text,), {"a": pool.text}
    fetches = [[kind(pool.scalar, {"op": pool.op})] for kind in (made, made, other, made)]
    for each in (*fetches, *(module.parts, module.pair, module.named) * 3):
        for feed_dict in (None, {pool.fed["one"]: 1.0}):
            assert same(sessions, each, feed_dict)[0] == "result"


def aligned(value: float) -> Any:
    buffer = np.empty(64 * 5, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + 64 * 4].view(np.float32).reshape(16, 4)
    array[:] = value
    return array


def test_results_share_no_memory_with_what_was_fed(pool: Pool, sessions: Sessions) -> None:
    raw, _ = sessions
    copy = pool.copies["rows"]
    for fetches in (copy, [copy, pool.scalar], {"a": (copy,), "b": copy}):
        for number in range(4):
            fed = aligned(number)
            fed.flags.writeable = number != 2
            result = raw.run(fetches, {pool.fed["rows"]: fed})
            while not isinstance(result, np.ndarray):
                result = result["a"] if isinstance(result, dict) else result[0]
            assert result.flags.writeable
            assert not np.shares_memory(result, fed)
            fed.flags.writeable = True
            fed[:] = -1
            assert (result == number).all()


@FED_OR_NOT
def test_a_result_is_the_callers_to_change(feed_dict: Any, pool: Pool, sessions: Sessions) -> None:
    raw, session = sessions
    parts = [pool.matrix, pool.texts, pool.variable, pool.old_variable, pool.nan]
    parts.append(pool.sparse.values)
    for fetches in (parts, tuple(parts), *parts):
        expected = outcome(session.run, fetches, feed_dict)
        for _ in range(3):
            result = raw.run(fetches, feed_dict)
            assert ("result", described(result)) == expected
            for each in result if isinstance(fetches, (list, tuple)) else [result]:
                each[:] = 0
        assert outcome(session.run, fetches, feed_dict) == expected


@FED_OR_NOT
def test_a_later_run_does_not_change_a_result(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    raw, _ = sessions
    results = []
    for _ in range(4):
        results.append(raw.run([pool.variable, pool.old_variable, pool.large], feed_dict))
        raw.run(pool.grow, feed_dict)
    for count, (new, old, large) in enumerate(results):
        assert new.tolist() == [1 + count, 2 + count]
        assert old.tolist() == [3 + count, 4 + count]
        assert large.tolist() == [count] * 64


def test_options_and_metadata_go_through(pool: Pool, sessions: Sessions) -> None:
    raw, session = sessions
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    for fetches in (pool.copies["one"], {"a": [pool.copies["one"], pool.op]}):
        for number in range(3):
            raw.run(fetches, {"one:0": number})
            metadata = v1.RunMetadata()
            result = raw.run(fetches, {"one:0": number}, options, metadata)
            assert described(result) == described(session.run(fetches, {"one:0": number}))
            assert metadata.step_stats.dev_stats
            metadata = v1.RunMetadata()
            raw.run(pool.scalar, None, options=options, run_metadata=metadata)
            assert metadata.step_stats.dev_stats


@FED_OR_NOT
def test_a_closed_session_runs_nothing(feed_dict: Any, pool: Pool, sessions: Sessions) -> None:
    raw, session = sessions
    cached = [pool.scalar, [pool.scalar, pool.op], {"a": "text:0"}]
    for fetches in cached:
        same(sessions, fetches, feed_dict)
    session.close()
    for _ in ("closed beneath", "closed"):
        for fetches in (*cached, pool.op, "text", "none:0", None, []):
            with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
                raw.run(fetches, feed_dict)
        raw.close()


def test_threads_that_share_callables_get_their_own_results(pool: Pool, ways: str) -> None:
    raw, session = pool.session()
    copies = [pool.copies["one"], [pool.copies["any"], pool.fed["one"]], {"a": pool.copies["any"]}]
    shared = [(fetches(pool), None) for fetches in FETCHES.values()]
    shared += [(number, None) for number in pool.ones]
    expected = [described(session.run(*each)) for each in shared]
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        order = list(range(len(shared)))
        random.Random(thread).shuffle(order)
        start.wait()
        for index in order:
            value = np.full((thread + 1,), thread * 1000 + index, np.float32)
            feed_dict = {pool.fed["any"]: value, pool.fed["one"]: value[0]}
            found = outcome(raw.run, copies, feed_dict)
            wanted = [value[0], [value, np.asarray(value[0])], {"a": value}]
            if found != ("result", described(wanted)):
                wrong.append((thread, index, found))
            found = outcome(raw.run, *shared[index])
            if found != ("result", expected[index]):
                wrong.append((thread, index, found))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    sys.setswitchinterval(1e-6)
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sys.setswitchinterval(0.005)  # the default
    raw.close()
    assert wrong == []


def foreign(*, sparse: bool = False) -> Any:
    with tf.Graph().as_default():
        return tf.SparseTensor([[0, 1]], [7], [2, 2]) if sparse else tf.constant(1.0, name="theirs")


def eager() -> Any:
    with tf.init_scope():
        return tf.constant(1.0)


def kept(pool: Pool) -> Any:
    """A tensor that may neither be fed nor fetched."""
    with pool.graph.as_default():
        tensor = tf.constant(1.0)
    pool.graph.prevent_feeding(tensor)
    pool.graph.prevent_fetching(tensor.op)
    return tensor


BAD_FETCHES: dict[str, Case] = {
    "nothing": lambda p: None,
    "nothing in a list": lambda p: [p.scalar, None],
    "nothing in a dict": lambda p: {"a": None},
    "number": lambda p: 3,
    "set": lambda p: {"scalar:0"},
    "array": lambda p: np.zeros(2),
    "unknown tensor": lambda p: "none:0",
    "unknown operation": lambda p: "none",
    "no such output": lambda p: "scalar:1",
    "output of an operation without": lambda p: ["op:0"],
    "no name": lambda p: "",
    "of another graph": lambda p: foreign(),
    "operation of another graph": lambda p: [p.scalar, foreign().op],
    "sparse of another graph": lambda p: foreign(sparse=True),
    "not to be fetched": lambda p: [kept(p)],
    "read-only mapping": lambda p: MappingProxyType({"a": p.scalar}),
    "counter": lambda p: Counter(a=p.matrix),
    "needs a feed": lambda p: p.copies["rows"],
    "needs a feed for an operation": lambda p: {"a": p.copies["rows"].op},
    "placeholder": lambda p: p.fed["rows"],
}


@pytest.mark.parametrize("kind", BAD_FETCHES)
def test_what_cannot_be_fetched_is_the_same_error_each_time(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    for feed_dict in (None, FED, {pool.fed["any"]: [1]}):
        assert same(sessions, BAD_FETCHES[kind](pool), feed_dict)[0] == "error"
        assert same(sessions, [pool.scalar, "text:0"], feed_dict)[0] == "result"


PLAIN = {
    "rows": np.ones((1, 4), np.float32), "one": 1.0, "any": [1.0], "words": "a", "bool": True,
    "constant": [1.0, 2.0], "default": [1.0], "int32": 1, "uint8": 1,
}  # fmt: skip

BAD_VALUES: dict[str, tuple[str, Case]] = {
    "shape": ("rows", lambda p: np.zeros((2, 3), np.float32)),
    "rank": ("rows", lambda p: np.zeros(4, np.float32)),
    "nothing for rows": ("rows", lambda p: None),
    "vector for a scalar": ("one", lambda p: np.ones(1, np.float32)),
    "shape of a constant": ("constant", lambda p: [1.0]),
    "shape of a default": ("default", lambda p: 1.0),
    "uneven list": ("any", lambda p: [[1], [1, 2]]),
    "too large": ("int32", lambda p: 2**31),
    "far too large": ("int32", lambda p: 2**70),
    "infinite": ("one", lambda p: 10**40),
    "negative": ("uint8", lambda p: -1),
    "two for a bool": ("bool", lambda p: 2),
    "number for text": ("words", lambda p: 3),
    "bool for text": ("words", lambda p: True),
    "text for a number": ("one", lambda p: "x"),
    "complex for a float": ("one", lambda p: 1j),
    "complexes for floats": ("any", lambda p: np.array([1j])),
    "nothing for an int": ("int32", lambda p: None),
    "not a number for an int": ("int32", lambda p: np.array([np.nan])),
    "object": ("one", lambda p: object()),
    "mapping": ("one", lambda p: {}),
    "generator": ("any", lambda p: (each for each in [1])),
    "tensor": ("one", lambda p: p.scalar),
    "tensor of another graph": ("one", lambda p: foreign()),
    "eager tensor": ("one", lambda p: eager()),
    "list of tensors": ("any", lambda p: [p.scalar]),
    "variable": ("any", lambda p: p.variable),
    "old variable": ("any", lambda p: p.old_variable),
    "sparse for dense": ("any", lambda p: v1.SparseTensorValue([[0, 1]], [7], [2, 2])),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_a_value_that_cannot_be_fed_is_the_same_error_each_time(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    name, value = BAD_VALUES[kind]
    fed = pool.fed[name]
    for fetches in (pool.copies[name], [fed, pool.op], fed.name, []):
        for key in (fed, fed.name):
            assert same(sessions, fetches, {key: value(pool)})[0] == "error"
            assert same(sessions, fetches, {key: PLAIN[name]})[0] == "result"
            assert same(sessions, fetches, {key: value(pool)})[0] == "error"


BAD_KEYS: dict[str, Case] = {
    "of another graph": lambda p: {p.fed["one"]: 1.0, foreign(): 1.0},
    "sparse of another graph": lambda p: {foreign(sparse=True): ([[0, 1]], [7], [2, 2])},
    "unknown": lambda p: {"none:0": 1.0},
    "name of an operation": lambda p: {"one": 1.0},
    "operation": lambda p: {p.fed["one"].op: 1.0},
    "number": lambda p: {3: 1.0},
    "nothing": lambda p: {None: 1.0},
    "not to be fed": lambda p: {kept(p): 1.0},
    "tuple of the wrong length": lambda p: {(p.fed["one"], p.fed["any"]): (1.0,)},
    "tensor twice": lambda p: {p.fed["one"]: 1.0, (p.fed["one"],): (2.0,)},
    "in no mapping": lambda p: [(p.fed["one"], 1.0)],
    "in a number": lambda p: 1,
    "dense for sparse": lambda p: {p.fed_sparse: 3},
    "nothing for sparse": lambda p: {p.fed_sparse: None},
    "shape of a sparse": lambda p: {p.fed_sparse: ([[0, 1, 2]], [7], [2, 2])},
    "list for ragged": lambda p: {p.fed_ragged: [[1], [2, 3]]},
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_key_that_cannot_be_fed_is_the_same_error_each_time(
    kind: str, pool: Pool, sessions: Sessions
) -> None:
    for fetches in (pool.scalar, [pool.op, pool.copies["one"]], pool.scalar):
        assert same(sessions, fetches, BAD_KEYS[kind](pool))[0] == "error"
        assert same(sessions, fetches, FED)[0] == "result"


@pytest.mark.parametrize("value", [[1, 2], 1.5, None, np.array([1]), [None]])
def test_what_is_no_text_is_the_same_error_of_the_runtime(
    value: Any, pool: Pool, sessions: Sessions
) -> None:
    for each in ("a", value, ["b"], value):
        state = same(sessions, pool.copies["words"], {pool.fed["words"]: each})[0]
        assert state == ("error" if each is value else "result")


class Counting:
    """Ops that count how often they ran, and fail where `error` is set; and a queue."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.fed = v1.placeholder(tf.float32, [], name="fed")
            self.count = tf.numpy_function(self._count, [], tf.float32)
            self.count_fed = tf.numpy_function(self._count, [self.fed], tf.float32)
            with tf.control_dependencies([v1.assert_less(self.fed, 10.0)]):
                self.below = tf.identity(self.fed)
            queue = v1.FIFOQueue(9, tf.float32, [()])
            self.put, self.take, self.end = queue.enqueue(self.fed), queue.dequeue(), queue.close()

    def _count(self, value: Any = 0.5) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return np.float32(value)


@pytest.fixture
def counting(ways: str) -> Iterator[tuple[Counting, Any, Any]]:
    model = Counting()
    raw, session = session_of(model.graph)
    yield model, raw, session
    raw.close()


ERRORS = [KeyError("key"), AttributeError("x"), TypeError("t"), ValueError("v"), StopIteration()]
ERRORS += [NotImplementedError(), IndexError(), RuntimeError(), OSError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_run_that_fails_has_run_once(
    error: Exception, counting: tuple[Counting, Any, Any]
) -> None:
    model, raw, session = counting
    for fetches, feed_dict in ((model.count, None), ([model.count_fed], {model.fed: 1.0})):
        for model.error in (error, None, error, error):
            expected = outcome(session.run, fetches, feed_dict)
            before = model.calls
            assert outcome(raw.run, fetches, feed_dict) == expected
            assert model.calls == before + 1
            assert expected[0] == ("result" if model.error is None else "error")


def test_what_cannot_be_fed_runs_nothing(counting: tuple[Counting, Any, Any]) -> None:
    model, raw, _ = counting
    raw.run([model.count, model.count_fed], {model.fed: 1.0})
    for bad in ([1.0], "x", model.below, object()):
        with pytest.raises((TypeError, ValueError), match="."):
            raw.run([model.count, model.count_fed], {model.fed: bad})
    assert model.calls == 2


def test_the_runtimes_errors_keep_their_types(counting: tuple[Counting, Any, Any]) -> None:
    model, raw, session = counting
    for value in (1.0, 11.0, 2.0, 12.0, 12.0, 3.0):
        expected = outcome(session.run, model.below, {model.fed: value})
        assert outcome(raw.run, model.below, {model.fed: value}) == expected
        assert expected[-1] == tf.errors.InvalidArgumentError or value < 10
    options = v1.RunOptions(timeout_in_ms=20)
    for value in range(3):
        raw.run(model.put, {model.fed: value})
        assert raw.run(model.take) == value
        with pytest.raises(tf.errors.DeadlineExceededError):
            raw.run(model.take, None, options)
    raw.run(model.end)
    for feed_dict in (None, {model.fed: 1.0}) * 3:
        with pytest.raises(tf.errors.OutOfRangeError):
            raw.run([model.take], feed_dict)


def nested(inner: Any) -> Any:
    """Builds, for a pool, of fetches in all containers."""

    def built(kind: Callable[[list[Any]], Any]) -> Any:
        return st.lists(inner, max_size=3).map(lambda each: lambda p: kind([of(p) for of in each]))

    named = st.dictionaries(st.sampled_from([1, 2, "a", "b"]), inner, max_size=3).map(
        lambda each: lambda p: {key: of(p) for key, of in each.items()}
    )
    pair = st.tuples(inner, inner).map(lambda each: lambda p: Pair(*[of(p) for of in each]))
    return st.one_of(built(list), built(tuple), named, pair)


NAMES = sorted({name for name, _, _ in FEEDS.values()})
LEAVES = [*FETCHES.values(), *[entry(each, name) for each in ("copies", "fed") for name in NAMES]]
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.uint8, np.bool_])
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
VALUES = st.one_of(ARRAYS, st.integers(), st.floats(), st.text(), st.lists(st.integers(-9, 300)))
ENTRIES = st.sampled_from(list(FEEDS.values())).flatmap(
    lambda feed: st.tuples(st.just(feed[0]), st.one_of(st.sampled_from(feed[1:]), VALUES))
)


@given(
    st.recursive(st.sampled_from(LEAVES), nested, max_leaves=6),
    st.lists(ENTRIES, max_size=3),
    st.lists(st.integers(0, 2), min_size=2, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_any_fetches_with_any_feeds_give_what_session_run_gives(
    lasting: tuple[Pool, Sessions], fetches: Case, entries: list[Any], counts: list[int]
) -> None:
    pool, sessions = lasting
    for count in (len(entries), *counts):
        feed_dict = {pool.fed[name]: value for name, value in entries[:count]}
        same(sessions, fetches(pool), feed_dict)


@pytest.fixture(scope="module")
def lasting(pool: Pool) -> Iterator[tuple[Pool, Sessions]]:
    """One session for all generated cases, whose cache fills up."""
    raw, session = pool.session()
    yield pool, (raw, session)
    raw.close()


ROOT = Path(asynchooks.__file__).parent.parent


@pytest.mark.faults
@pytest.mark.timeout(300)  # 10 s on an idle machine, in a process of its own: a mistake ends it
@pytest.mark.parametrize("behavior", ["v2", "v1"])
def test_each_program_is_as_under_tensorflow(behavior: str, anyio_backend: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.tf.variable_programs"]
    done = subprocess.run(
        [*command, behavior, anyio_backend], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    theirs = outcomes.pop("theirs")
    assert len(theirs) == 10
    assert len(outcomes) == 4
    for side, ours in outcomes.items():
        for program, expected in theirs.items():
            assert ours[program] == expected, f"{program} ({side})"
