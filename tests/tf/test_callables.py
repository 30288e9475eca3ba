"""GraphSession.run against Session.run: any fetch, any feed, compiled and then cached."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks.tf.graph._callables import MAX_CALLABLES
from asynchooks.tf.graph._session import GraphSession

from .models import monitored

tf = pytest.importorskip("tensorflow")
np = pytest.importorskip("numpy")
v1 = tf.compat.v1
pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


Pair = namedtuple("Pair", ["first", "second"])

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


FetchOf = Callable[[Any], Any]

PLAIN_FETCHES: dict[str, FetchOf] = {
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


@pytest.mark.parametrize("kind", PLAIN_FETCHES)
async def test_the_result_is_session_runs_in_type_dtype_and_nesting(kind: str) -> None:
    graph = Graph()
    fetches = PLAIN_FETCHES[kind](graph)
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
