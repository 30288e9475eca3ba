"""GraphSession.run against Session.run: any fetch, any feed, compiled and then cached.

It is private, and made here so that both run one session of TensorFlow, with the same variables.
"""

from __future__ import annotations

import random
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks.tf.graph._callables import MAX_CALLABLES
from asynchooks.tf.graph._session import GraphSession

from .models import hide_private_way, tf, v1

Pair = namedtuple("Pair", ["first", "second"])
OtherPair = namedtuple("OtherPair", ["first", "second"])


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
            self.op = tf.no_op(name="op")
            self.new = v1.get_variable("v", initializer=[1.0, 2.0], use_resource=True)
            self.old = v1.get_variable("r", initializer=[3.0, 4.0], use_resource=False)
            self.large = v1.get_variable("large", initializer=[0.0] * 64, use_resource=False)
            self.step = v1.train.get_or_create_global_step()
            self.sparse = tf.SparseTensor([[0, 1]], [7], [2, 2])
            self.ones = [tf.constant([number]) for number in range(MAX_CALLABLES + 9)]
            self.typed = {
                name: [tf.zeros(shape, name) for shape in ((), (2,), (0, 3))] for name in NUMBERS
            }
            self.one = v1.placeholder(tf.float32, [], name="one")
            self.any = v1.placeholder(tf.float32, None, name="any")
            self.fed = {
                "rows": v1.placeholder(tf.float32, [None, 4], name="rows"),
                "one": self.one,
                "any": self.any,
                "words": v1.placeholder(tf.string, None, name="words"),
                "default": v1.placeholder_with_default([1.0, 2.0], [None], name="default"),
                "read": self.new.read_value(),
                **{name: v1.placeholder(name, None) for name in NUMBERS},
            }
            self.copies = {name: tf.identity(each) for name, each in self.fed.items()}
            self.fed_sparse = v1.sparse_placeholder(tf.int32, [2, 2])
            self.dense = v1.sparse_tensor_to_dense(self.fed_sparse)
            changed = (self.new, self.old, self.large)
            self.grow = tf.group(*[each.assign_add(tf.ones_like(each)) for each in changed])
            self.init = v1.global_variables_initializer()

    def session(self) -> Both:
        session = v1.Session(graph=self.graph)
        session.run(self.init)
        return Both(self, GraphSession(session), session)


class Both(NamedTuple):
    """What is under test, and the TensorFlow session that it runs."""

    pool: Pool
    raw: GraphSession
    session: Any

    def agree(self, fetches: Any, feed_dict: Any = None) -> str:
        """Whether both give a result or an error, which must be the same, three times."""
        with self.session.graph.as_default():  # where TensorFlow's programs run
            expected = outcome(self.session.run, fetches, feed_dict)
        for _ in range(3):
            assert outcome(self.raw.run, fetches, feed_dict) == expected, (fetches, feed_dict)
        return str(expected[0])


def described(value: Any) -> Any:
    """Type, dtype, shape and content of a result, all the way down; bit by bit, so NaN is NaN."""
    kind = type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        is_objects = value.dtype == object
        content = [described(each) for each in value.ravel()] if is_objects else value.tobytes()
        return kind, str(value.dtype), value.shape, content, value.flags.writeable
    if isinstance(value, (dict, UserDict)):
        factory = getattr(value, "default_factory", None)
        return kind, factory, [(type(key), key, described(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [described(each) for each in value]
    return kind, value


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """What a run gives: its result described, or the type of its error and how that begins."""
    try:
        return "result", described(run(*args))
    except (TypeError, ValueError, KeyError) as error:
        return "error", type(error), str(error)[:40]
    except Exception as error:
        return "error", type(error)


@pytest.fixture(
    scope="module", params=["private", pytest.param("public", marks=pytest.mark.exhaustive)]
)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """TensorFlow's private way to compile a callable with feeds may go in a later version."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "public":
            hide_private_way(patch)
        both = Pool().session()
        yield both
        both.raw.close()


def foreign(*, sparse: bool = False) -> Any:
    with tf.Graph().as_default():
        return tf.SparseTensor([[0, 1]], [7], [2, 2]) if sparse else tf.constant(1.0, name="theirs")


def taken_fetches(p: Pool) -> list[Any]:
    """Neighbours of equal form, and equal keys of other types, are told apart in the cache."""
    one, two = p.scalar, p.text
    module = tf.Module()
    module.parts, module.pair, module.named = [one, two], (two,), {"a": two}
    return [
        *(p.scalar, p.nan, p.texts, p.op, p.scalar.op, p.new, p.old, p.sparse),
        *("scalar:0", "op", "scalar", b"scalar:0", p.typed, [], [[], (), {"a": Pair([], {})}]),
        *([one], (one,), {"a": one}, {"b": one}, [[one], []], [one, []], {"b": one, "a": p.op}),
        *(Pair(one, two), OtherPair(one, two), Pair(one, [p.op]), OrderedDict(b=one, a=two)),
        *(module.parts, module.pair, module.named, UserDict(a=one), defaultdict(list, a=one)),
        *({key: one} for key in (1, True, 1.0, np.int64(1), 1)),
        {(2, 3): p.op, None: p.text, p.text: p.matrix},
        *([p.op, p.op, p.scalar, (p.scalar, {"again": "scalar:0"})], MyList([one]), MyDict(a=one)),
        *((p.sparse, p.sparse.values), {"new": p.new, "old": [p.old, "r:0"]}),
    ]


def refused_fetches(p: Pool) -> list[Any]:
    return [
        *(None, {"a": [p.scalar, None]}, 3, np.zeros(2), "", "none:0", "scalar:1", ["op:0"]),
        *(foreign(), [p.scalar, foreign().op], foreign(sparse=True)),
        *(MappingProxyType({"a": p.scalar}), Counter(a=p.matrix)),
        *(p.copies["rows"], {"a": p.copies["rows"].op}, p.fed["rows"]),
    ]


def test_fetches_give_what_session_run_gives_each_time(both: Both) -> None:
    pool = both.pool
    for feed_dict in (None, {pool.one: 1.0}, {pool.one: 2.0}, {"any:0": [1.0]}):
        for fetches in taken_fetches(pool):
            assert both.agree(fetches, feed_dict) == "result", fetches
        for fetches in refused_fetches(pool):
            assert both.agree(fetches, feed_dict) == "error", fetches


ROWS = np.arange(32, dtype=np.float32).reshape(4, 8)
SQUARE = ROWS[:, :4].copy()
SPARSE = v1.SparseTensorValue([[0, 1]], [7], [2, 2])

VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "rows": (
        [
            *(SQUARE, SQUARE.astype(">f4"), ROWS[::2, ::2], ROWS[::-1, 3::-1], SQUARE.T),
            *(np.broadcast_to(np.float32(1), (3, 4)), np.zeros((0, 4), np.float32)),
            *([[1, 2.5, True, 4]], [ROWS[0, :4], (5, 6, 7, 8)]),
        ],
        [np.zeros((2, 3), np.float32), np.zeros(4, np.float32), None],
    ),
    "one": (
        [1.0, np.array(2.0, np.float32), np.float64(0.1), 3, True, "1.5", None],
        [np.ones(1, np.float32), 10**40, "x", 1j, {}],
    ),
    "any": (
        [
            *([1.0], np.frombuffer(bytes(9), np.float32, 2, offset=1)),  # not aligned
            *(np.ma.masked_array([1.0, 2.0], [False, True]), [None, 2.0], 2**24, []),
        ],
        [[[1], [1, 2]], np.array([1j]), SPARSE],
    ),
    "int32": (
        [1, np.array([1, 2], ">i4"), 3.7, np.array([1.5, -2.5]), range(3)],
        [2**31, 2**70, None, np.array([np.nan])],
    ),
    "uint8": ([1], [-1]),
    "bool": ([True, "x", None], [2]),
    "words": (["a", b"\xff\0", ["ä", b"b\0c"], np.array([["a", b"b\0"]], object)], [3, [1], None]),
    "default": ([[3.0], np.ones(5)], [1.0]),
    "read": ([[3.0, 4.0], [5, 6]], []),
}
"""By what is fed: values that are taken, the first one plain, and some that are refused."""
for name in NUMBERS:
    taken, refused = VALUES.get(name, ([0], []))
    VALUES[name] = [*taken, [[0, 1]], 1, np.ones((2, 0))], refused


@pytest.mark.parametrize("name", VALUES)
def test_values_are_converted_or_refused_as_session_run_does_it(name: str, both: Both) -> None:
    fed, copy = both.pool.fed[name], both.pool.copies[name]
    taken, refused = VALUES[name]
    for value in taken + refused:
        for key, fetches in ((fed, copy), (fed.name, {"a": fed.name, "b": [copy, both.pool.op]})):
            assert both.agree(fetches, {key: taken[0]}) == "result"
            feed_dict = {key: value}
            state = both.agree(fetches, feed_dict)
            assert (list(feed_dict), feed_dict[key] is value) == ([key], True)
            if fetches is copy:
                assert (state == "error") == any(value is each for each in refused), value


def taken_feeds(p: Pool) -> list[Any]:
    parts = p.fed_sparse.indices, p.fed_sparse.values, p.fed_sparse.dense_shape
    return [
        *({p.fed_sparse: SPARSE}, {p.fed_sparse: ([[0, 0]], np.array([8.0]), (2, 2))}),
        *({tf.SparseTensor(*parts): SPARSE}, dict(zip(parts, SPARSE, strict=True))),
        {(p.one, (p.any, p.fed["words"])): (1, ([2], "a"))},
        *({b"one:0": 1}, {p.one: 1, "one:0": 2}, {"one:0": 1, p.one: 2}, [], {p.step: 7}),
        *(OrderedDict([(p.one, 1), (p.any, 2)]), OrderedDict([(p.any, 3), (p.one, 4)])),
        *(MappingProxyType({p.one: 1}), ChainMap({p.one: 1}), {p.new: [5, 6]}, {p.old: [5, 6]}),
    ]


def refused_feeds(p: Pool) -> list[Any]:
    return [
        *({p.one: 1.0, foreign(): 1.0}, {foreign(sparse=True): SPARSE}),
        *({"none:0": 1.0}, {"one": 1.0}, {p.one.op: 1.0}, {3: 1.0}, {None: 1.0}),
        *({(p.one, p.any): (1.0,)}, {p.one: 1.0, (p.one,): (2.0,)}, [(p.one, 1.0)], 1),
        *({p.fed_sparse: 3}, {p.one: p.scalar}, {p.any: p.new}, {p.any: [p.scalar]}),
    ]


def test_a_feed_dict_of_any_form_feeds_what_session_run_feeds(both: Both) -> None:
    p = both.pool
    wanted = [p.copies["one"], p.copies["any"], p.dense, p.copies["read"], p.scalar, p.any]
    wanted += [p.fed_sparse, p.new, p.old, p.step]
    with p.graph.as_default():  # outside of it variables have no hash
        for feed_dict in taken_feeds(p):
            fed = [each for each in wanted if both.agree(each, feed_dict) == "result"]
            assert both.agree(fed, feed_dict) == "result"
            assert len(fed) > 3
        for feed_dict in refused_feeds(p):
            for fetches in (p.scalar, [p.op, p.copies["one"]]):
                assert both.agree(fetches, feed_dict) == "error", feed_dict
                assert both.agree(fetches, {"one:0": 1.0}) == "result"


FED_OR_NOT = pytest.mark.parametrize("feed_dict", [None, {"one:0": 1.0}])


@FED_OR_NOT
def test_a_list_and_a_dict_give_what_they_hold_now(feed_dict: Any, both: Both) -> None:
    pool = both.pool
    inner: dict[Any, Any] = {"a": pool.scalar}
    fetches = [inner, pool.text]
    changes: list[Callable[[], Any]] = [
        lambda: inner.update(a=pool.nan, b=pool.text),
        lambda: inner.update(c=inner.pop("b")),
        lambda: fetches.append(pool.sparse),
        fetches.clear,
    ]
    for change in changes:
        both.agree(fetches, feed_dict)
        change()
        assert both.agree(list(fetches), feed_dict) == both.agree(fetches, feed_dict) == "result"


@FED_OR_NOT
def test_what_was_freed_is_not_taken_for_what_has_its_id_and_the_cache_is_bounded(
    feed_dict: Any, both: Both
) -> None:
    pool, raw, _ = both.pool.session()
    sparse, steps = pool.sparse, raw._callables._steps  # nothing public shows its size
    with pool.graph.as_default():
        for number, values in enumerate(pool.ones):
            fetches = [tf.SparseTensor(sparse.indices, values, sparse.dense_shape)]
            assert raw.run(fetches, feed_dict)[0].values == [number]
            fetches.clear()
            assert 0 < len(steps) <= MAX_CALLABLES
    raw.close()
    assert not steps


def aligned(value: float) -> Any:
    """A batch that TensorFlow uses where it is."""
    buffer = np.empty(64 * 5, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + 64 * 4].view(np.float32).reshape(16, 4)
    array[:] = value
    return array


def test_results_share_no_memory_with_what_was_fed(both: Both) -> None:
    for number in range(4):
        fed = aligned(number)
        fed.flags.writeable = number != 2
        [result] = both.raw.run([both.pool.copies["rows"]], {"rows:0": fed})
        assert result.flags.writeable
        fed.flags.writeable = True
        fed[:] = -1
        assert (result == number).all()


@FED_OR_NOT
def test_a_result_is_the_callers_to_change_and_no_later_run_changes_it(
    feed_dict: Any, both: Both
) -> None:
    pool, raw, session = both.pool.session()
    parts = [pool.matrix, pool.texts, pool.new, pool.old, pool.sparse.values]
    for fetches in (parts, *([each] for each in parts)):
        expected = described(session.run(fetches, feed_dict))
        for _ in range(3):
            result = raw.run(fetches, feed_dict)
            assert described(result) == expected
            for each in result:
                each[:] = 0
    results = []
    for _ in range(4):
        results.append(raw.run([pool.new, pool.old, pool.large], feed_dict))
        raw.run(pool.grow, feed_dict)
    for count, found in enumerate(results):
        values = [[1 + count, 2 + count], [3 + count, 4 + count], [count] * 64]
        assert [each.tolist() for each in found] == values
    raw.close()


@FED_OR_NOT
def test_a_closed_session_runs_nothing(feed_dict: Any, both: Both) -> None:
    pool, raw, session = both.pool.session()
    cached = [pool.scalar, [pool.scalar, pool.op]]
    for fetches in cached:
        raw.run(fetches, feed_dict)
    session.close()
    for _ in ("closed beneath", "closed"):
        for fetches in (*cached, pool.op, "none:0", None):
            with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
                raw.run(fetches, feed_dict)
        raw.close()


def test_threads_that_share_callables_get_their_own_results(
    both: Both, threads_take_turns_at_once: None
) -> None:
    pool, raw, session = both
    copies, shared = [pool.copies["any"], pool.copies["one"]], taken_fetches(pool) + pool.ones
    expected = [described(session.run(each)) for each in shared]

    def work(thread: int) -> None:
        for index in random.Random(thread).sample(range(len(shared)), len(shared)):
            value = np.full((thread + 1,), thread * 1000 + index, np.float32)
            found = raw.run(copies, {pool.any: value, "one:0": index})
            assert described(found) == described([value, np.float32(index)])
            assert described(raw.run(shared[index])) == expected[index]

    with ThreadPoolExecutor(6) as threads:
        assert len([*threads.map(work, range(6))]) == 6


def test_a_run_that_fails_has_run_once_and_keeps_its_error(both: Both) -> None:
    calls: list[float] = []
    error: Exception | None = None

    def count(value: Any) -> Any:
        calls.append(value)
        if error is not None:
            raise error
        return value

    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.float32, [])
        counted = tf.numpy_function(count, [fed], tf.float32)
        raw = GraphSession(session := v1.Session(graph=graph))
    agree = Both(both.pool, raw, session).agree
    for kind in (KeyError("k"), TypeError("t"), ValueError("v"), StopIteration(), OSError()):
        for error in (kind, None, kind):
            calls.clear()
            assert agree(counted, {fed: 1.0}) == ("error" if error else "result")
            assert len(calls) == 4, "once by each run"
    calls.clear()
    for bad in ([1.0], "x", counted, object()):
        with pytest.raises((TypeError, ValueError), match="."):
            raw.run(counted, {fed: bad})
    assert not calls, "what cannot be fed runs nothing"
    raw.close()
