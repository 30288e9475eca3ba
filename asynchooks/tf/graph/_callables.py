"""Runs of a TensorFlow session through compiled callables, each with the results of `Session.run`.

Fetches that have no key, and feeds that cannot be converted, go to `Session.run` itself, which also
raises the errors. What is private of TensorFlow here was tested with 2.16, 2.18 and 2.21.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client.session import _FetchHandler

from ..._engine.current import now
from ._default_graph import run_in_graph

MAX_CALLABLES = 64
TRIED_SECS = 2e-4
"""A step that takes longer in the pool stays there: it may have ops that run in parallel."""
NUM_TIMED = 5
_MAX_OPS = 5000
_NEVER_WAIT = (
    "Apply", "Assert", "Assign", "IsVariableInitialized", "Multinomial", "RandomGamma",
    "RandomPoisson", "RandomStandardNormal", "RandomUniform", "ReadVariable", "ResourceApply",
    "ResourceGather", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign",
    "Scatter", "SparseApply", "TruncatedNormal", "VarHandle", "VarIsInitialized", "Variable",
)  # fmt: skip
"""Prefixes of the types of stateful ops that wait for no other op: variables and random."""
_ELEMENTS = (tf.Tensor, tf.Operation, tf.Variable, tf.SparseTensor)


class Callables:
    """The compiled callables of one TensorFlow session, bounded; they die with it.

    `Session.run` costs 64 to 140 us where a callable costs 10 to 30.

    Args:
        is_remote: whether the session is on a server. There only TensorFlow's public callables are
            used: releasing a private one sends a request, and blocks for ever without an answer.
    """

    def __init__(self, session: Any, *, is_remote: bool = False) -> None:
        self._session, self._is_remote = session, is_remote
        self._steps: dict[Hashable, _Step | None] = {}  # by fetches and feeds; None: impossible

    def clear(self) -> None:
        self._steps.clear()

    def run(self, fetches: Any, feed_dict: dict[Any, Any]) -> Any:
        """As `Session.run(fetches, feed_dict)`; from any thread."""
        key = key_of(fetches)
        if key is None:
            return run_in_graph(self._session, fetches, feed_dict)
        if feed_dict:
            key = (key, *[each if type(each) is str else id(each) for each in feed_dict])
        try:
            step = self._steps[key]
        except KeyError:
            if len(self._steps) >= MAX_CALLABLES:
                self.clear()
            step = self._steps[key] = self._compiled(fetches, list(feed_dict))
        values = None if step is None else step.converted(feed_dict.values())
        if step is None or values is None:
            return run_in_graph(self._session, fetches, feed_dict)
        try:
            return step.run(values)
        except tf.errors.OpError as error:
            is_cancelled = isinstance(error, tf.errors.CancelledError)
            if is_cancelled and "Session has been closed" in str(error):  # as Session.run does
                raise RuntimeError("Attempted to use a closed Session.") from error
            _raise_explained(self._session, [error])
            raise

    def _compiled(self, fetches: Any, feeds: list[Any]) -> _Step | None:
        try:
            return _Step(self._session, fetches, feeds, is_remote=self._is_remote)
        except Exception:  # Session.run will raise the error
            return None


class _Step:
    """One set of fetches with one set of feeds, compiled; the constructor raises if it cannot be.

    TensorFlow's own handler of fetches takes them apart and puts the results together.
    """

    def __init__(self, session: Any, fetches: Any, feeds: list[Any], *, is_remote: bool) -> None:
        # containers that nothing else changes; and the key holds the ids of what is in them
        fetches = tf.nest.map_structure(lambda each: each, fetches)
        self._kept = fetches, feeds
        self._feeds = [_Feed(session.graph, each) for each in feeds]
        fed = [each.name for each in self._feeds]
        parts = parts_of(session.graph, fetches)
        tensors, targets = parts.fetches(), parts.targets()
        if len({*fed, *(each.name for each in tensors)}) < len(fed) + len(tensors):
            raise ValueError("fed twice, or fetched what is fed")

        def make(pool: int | None) -> Callable[..., Any]:
            return compiled(session, tensors, targets, fed, pool=pool)

        if is_remote:
            call = make(None)
        else:
            of_pool = PooledOrAlone(make, ops_of(parts))
            call = lambda *values: of_pool.call(*values)  # noqa: E731 - its `call` changes
        self._call, self._results = call, partial(parts.build_results, session)

    def run(self, values: list[Any]) -> Any:
        return self._results(list(map(_own, self._call(*values))))

    def converted(self, values: Iterable[Any]) -> list[Any] | None:
        """The values to feed as arrays; None if Session.run must convert them."""
        arrays = [feed.converted(each) for feed, each in zip(self._feeds, values, strict=True)]
        return None if any(each is None for each in arrays) else arrays


class PooledOrAlone:
    """One compiled step; `call` runs it, in TensorFlow's pool of threads or in the calling one.

    Handing a small step to the pool and back costs 20 of its 30 us; with the run option for it the
    calling thread computes it alone (seen with TensorFlow 2.21 on 2 cores). A large step would lose
    its parallel ops by that. So the first few calls are timed in the pool.

    Args:
        make: compiles it for a pool of TensorFlow's, by its number; -1 is the calling thread.
        ops: what it runs. With one that may wait for another, as ops of queues do, it stays pooled.
    """

    def __init__(self, make: Callable[[int], Callable[..., Any]], ops: list[tf.Operation]) -> None:
        self._make = make
        self._pooled = make(0)
        self._num_timed, self._fastest = 0, math.inf
        self.call = self._time if _never_wait(ops) else self._pooled

    def _time(self, *values: Any) -> Any:
        begun = now()
        outputs = self._pooled(*values)
        self._fastest = min(self._fastest, now() - begun)
        self._num_timed += 1
        if self._num_timed >= NUM_TIMED:
            self.call = self._make(-1) if self._fastest <= TRIED_SECS else self._pooled
        return outputs


class _Feed:
    """One tensor of numbers that is fed."""

    def __init__(self, graph: tf.Graph, key: Any) -> None:
        tensor = graph.as_graph_element(key, allow_operation=False)
        self._dtype = np.dtype(tensor.dtype.as_numpy_dtype)
        if not graph.is_feedable(tensor) or self._dtype.kind not in "biufc":
            raise TypeError(f"{key!r} must not be fed, or is fed no numbers")
        self.name = tensor.name
        self._shape = tensor.shape
        self._fits: tuple[int, ...] | None = None  # a shape that has been found to fit

    def converted(self, value: Any) -> Any:
        """The value as an array; None if Session.run must convert it, or refuse it."""
        if isinstance(value, tf.Tensor):
            return None
        try:
            array = np.asarray(value, self._dtype)
            if isinstance(value, int) and array != value:
                return None  # an integer must be converted exactly
        except Exception:
            return None
        if array.shape != self._fits:
            if not self._shape.is_compatible_with(array.shape):
                return None
            self._fits = array.shape
        return array


def parts_of(graph: tf.Graph, fetches: Any) -> Any:
    """TensorFlow's `_FetchHandler`: `fetches()` are tensors, `targets()` operations, each once."""
    return _FetchHandler(graph, fetches, {})


def ops_of(parts: Any) -> list[tf.Operation]:
    """The operations of fetches that were taken apart."""
    return [*parts.targets(), *(each.op for each in parts.fetches())]


def needed_by(ops: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """These operations, and those that they need, each once."""
    seen = set(ops)
    pending = list(seen)
    while pending:
        yield (op := pending.pop())
        new = {*(each.op for each in op.inputs), *op.control_inputs} - seen
        seen |= new
        pending += new


def _never_wait(ops: list[tf.Operation]) -> bool:
    """Whether no op among these, and those that they need, waits for another one to run."""
    for number, op in enumerate(needed_by(ops)):
        may_wait = op.op_def.is_stateful and not op.type.startswith(_NEVER_WAIT)
        if may_wait or number >= _MAX_OPS:
            return False
    return True


def compiled(
    session: Any,
    tensors: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[str] = (),
    *,
    pool: int | None = 0,
) -> Callable[..., Any]:
    """A callable that takes what is fed, and returns the tensors' values, perhaps their own memory.

    It runs in that pool of TensorFlow's threads; -1 is the calling thread. With None, and where the
    private method is missing, it is TensorFlow's public one, which copies the values.
    """
    make = getattr(session, "_make_callable_from_options", None)
    if make is None or pool is None:
        run = session.make_callable([*tensors, *targets], list(feeds) or None)
        return lambda *values: run(*values)[: len(tensors)]
    options = config_pb2.CallableOptions(
        fetch=[each.name for each in tensors], target=[each.name for each in targets], feed=feeds
    )
    options.run_options.inter_op_thread_pool = pool
    return make(options)  # type: ignore[no-any-return]


def _own(value: Any) -> Any:
    """A copy where the value is shared: it may be a constant's memory, or a fed array."""
    is_shared = type(value) is np.ndarray and value.dtype.kind != "O"
    return value.copy() if is_shared else value


def key_of(fetches: Any) -> Hashable:
    """What two equal nests of the same fetches share; None if they have no such key."""
    if isinstance(fetches, str):
        return fetches
    if isinstance(fetches, _ELEMENTS):
        return id(fetches)
    kind: Any = type(fetches)
    names: list[str] = []
    if kind in (dict, OrderedDict):
        names, fetches = list(fetches), fetches.values()
        if any(type(name) is not str for name in names):
            return None
    elif not isinstance(fetches, (list, tuple)):
        return None
    keys = [key_of(each) for each in fetches]
    return None if None in keys or not keys else (kind, *names, *keys)


def _raise_explained(session: Any, failure: list[BaseException]) -> None:
    """Raise the error of a compiled run as `Session.run` does: with op, node and the user's line.

    Returns where TensorFlow's private method is missing.
    """

    def fail() -> None:
        raise failure.pop()  # frames that held it would make a reference cycle

    if hasattr(session, "_do_call"):
        session._do_call(fail)
