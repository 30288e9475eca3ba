"""GraphSession.run against Session.run: forms of feeds, changed fetches, buffers, threads.

The helpers, and what is fetched and fed in plain ways, are in test_callables.py.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from asynchooks.tf.graph._callables import MAX_CALLABLES

from .test_callables import FETCHES, Pool, Sessions, described, outcome, same
from .test_callables import pool as pool
from .test_callables import sessions as sessions
from .test_callables import ways as ways

tf = pytest.importorskip("tensorflow")
np = pytest.importorskip("numpy")
slices = pytest.importorskip("tensorflow.python.framework.indexed_slices")
v1 = tf.compat.v1
pytestmark = pytest.mark.tensorflow

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


@FED_OR_NOT
def test_the_keys_are_those_of_the_dict_that_is_fetched(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    fetches = {"a": pool.scalar}
    same(sessions, fetches, feed_dict)
    fetches["b"] = fetches.pop("a")
    same(sessions, {"a": pool.scalar}, feed_dict)
    same(sessions, fetches, feed_dict)


@FED_OR_NOT
def test_equal_keys_of_different_types_are_distinguished(
    feed_dict: Any, pool: Pool, sessions: Sessions
) -> None:
    for key in (1, True, 1.0, np.int64(1), 1):
        same(sessions, {key: pool.scalar}, feed_dict)


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
    assert 0 < len(raw._callables) <= MAX_CALLABLES


def test_a_fetch_of_an_attrs_class_is_rebuilt(pool: Pool, sessions: Sessions) -> None:
    attr = pytest.importorskip("attr")
    made = attr.make_class("Made", ["first", "second"])
    other = attr.make_class("Other", ["first", "second"])
    raw, session = sessions
    for kind in (made, made, other, made):
        for feed_dict in (None, {pool.fed["one"]: 1.0}):
            fetches = [kind(pool.scalar, {"op": pool.op})]
            result = raw.run(fetches, feed_dict)
            assert type(result[0]) is kind
            assert described(result) == described(session.run(fetches, feed_dict))


def test_lists_and_dicts_that_a_module_tracks_are_fetched_as_session_run_does(
    pool: Pool, sessions: Sessions
) -> None:
    raw, session = sessions
    module = tf.Module()
    module.parts, module.pair, module.named = [pool.scalar, pool.op], (pool.text,), {"a": pool.text}
    for fetches in (module.parts, module.pair, module.named) * 3:
        for feed_dict in (None, {pool.fed["one"]: 1.0}):
            expected = outcome(session.run, fetches, feed_dict)
            assert outcome(raw.run, fetches, feed_dict) == expected


# Buffers. TensorFlow's callables hand out the buffers of constants, of old variables and of fed
# arrays that are aligned to 64 bytes; Session.run copies.


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
    parts = [
        pool.matrix,
        pool.texts,
        pool.variable,
        pool.old_variable,
        pool.nan,
        pool.sparse.values,
    ]
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
