"""Runs of a TensorFlow session through compiled callables, each with the results of `Session.run`.

Fetches that cannot be compiled, and feeds that cannot be converted, go to `Session.run` itself,
which also raises the errors.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from ..._engine.current import now
from ._default_graph import entering, run_in_graph

MAX_CALLABLES = 64
TRIED_SECS = 2e-4
"""A step that takes longer in the pool stays there: less than a tenth could be gained."""
_NUM_TIMED = 4
_MAX_OPS = 5000
_NEVER_WAIT = (
    "Apply", "Assert", "Assign", "IsVariableInitialized", "Multinomial", "RandomGamma",
    "RandomPoisson", "RandomStandardNormal", "RandomUniform", "ReadVariable", "ResourceApply",
    "ResourceGather", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign",
    "Scatter", "SparseApply", "TruncatedNormal", "VarHandle", "VarIsInitialized", "Variable",
)  # fmt: skip
"""Prefixes of the types of stateful ops that wait for no other op: variables and random."""

Pack = Callable[[list[Any]], Any]
"""Makes the outputs, nested as the fetches, out of the values of a callable."""


class Callables:
    """The compiled callables of one TensorFlow session, bounded; they die with it.

    `Session.run` costs 64 to 140 us where a callable costs 10 to 30. Feeds need
    `Session._make_callable_from_options`, which is private: tested with TensorFlow 2.16, 2.18 and
    2.21. Where it is missing, the public `make_callable` is used, which takes none; also on a
    server: releasing a private one sends a request to it, and blocks for ever without an answer.
    """

    def __init__(self, session: Any, *, is_remote: bool = False) -> None:
        self._session = session
        self._make = None if is_remote else getattr(session, "_make_callable_from_options", None)
        self._lock = threading.Lock()  # guards changes of the next one
        self._steps: dict[Hashable, _Step | None] = {}  # by fetches and feeds; None: impossible

    def clear(self) -> None:
        with self._lock:
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
            step = self._compile(key, fetches, feed_dict)
        values = None if step is None else step.convert(feed_dict)
        if step is None or values is None:
            return run_in_graph(self._session, fetches, feed_dict)
        try:
            return step.run(values)
        except tf.errors.OpError as error:
            is_cancelled = isinstance(error, tf.errors.CancelledError)
            if is_cancelled and "Session has been closed" in str(error):  # as Session.run does
                raise RuntimeError("Attempted to use a closed Session.") from error
            raise_explained(self._session, [error])
            raise

    def _compile(self, key: Hashable, fetches: Any, feed_dict: dict[Any, Any]) -> _Step | None:
        try:
            step: _Step | None = _Step(self._session, self._make, fetches, list(feed_dict))
        except Exception:  # Session.run will raise the error
            step = None
        with self._lock:
            self._steps[key] = step
            while len(self._steps) > MAX_CALLABLES:
                del self._steps[next(iter(self._steps))]
        return step


class _Step:
    """One set of fetches with one set of feeds, compiled; the constructor raises if it cannot be.

    Args:
        make_private: TensorFlow's private method for that; None uses the public one.
    """

    def __init__(self, session: Any, make_private: Any, fetches: Any, feeds: list[Any]) -> None:
        parts = _Parts(session.graph)
        pack = parts.packer(fetches)
        self._feeds = [_Feed(session.graph, each) for each in feeds]
        fed = [each.name for each in self._feeds]
        if len(set(fed)) < len(fed) or not parts.names.keys().isdisjoint(fed):
            raise ValueError("fed twice, or fetched what is fed")
        self._kept = parts.elements, feeds  # the key holds their ids

        def make(pool: int) -> Callable[..., Any]:
            options = config_pb2.CallableOptions(
                fetch=list(parts.names), target=parts.targets, feed=fed
            )
            options.run_options.inter_op_thread_pool = pool
            compiled: Callable[..., Any] = make_private(options)
            return compiled

        if make_private is not None:
            compiled = PooledOrAlone(make, parts.ops)
            self.run: Callable[[list[Any]], Any] = lambda values: pack(compiled.call(*values))
        elif feeds:
            raise NotImplementedError("the public callables take no feeds")
        else:
            public = session.make_callable(_copy(fetches))
            self.run = lambda values: public()

    def convert(self, feed_dict: dict[Any, Any]) -> list[Any] | None:
        """The values to feed as arrays; None if Session.run must convert them."""
        values = []
        for feed, value in zip(self._feeds, feed_dict.values(), strict=True):
            converted = feed.convert(value)
            if converted is None:
                return None
            values.append(converted)
        return values


class PooledOrAlone:
    """One compiled step; `call` runs it. It times the first few calls, then chooses the faster way.

    Handing a small step to TensorFlow's pool of threads and back costs 20 of its 30 us; with the
    run option for it the calling thread computes it alone (seen with TensorFlow 2.21 on 2 cores). A
    large step would lose its parallel ops by that, so both ways are timed.

    Args:
        make: compiles it for a pool of TensorFlow's, by its number; -1 is the calling thread.
        ops: what it runs. With one that may wait for another, as ops of queues do, it stays pooled.
    """

    def __init__(self, make: Callable[[int], Callable[..., Any]], ops: list[tf.Operation]) -> None:
        self._make = make
        self._pooled = make(0)
        self._alone: Callable[..., Any] = self._pooled
        self._num_calls = 0
        self._fastest = [math.inf, math.inf]  # seconds, in the pool and alone
        self.call = self._time if _never_wait(ops) else self._pooled

    def _time(self, *values: Any) -> Any:
        """Run it, in the pool at first, then alone; of each the first call only warms up."""
        place, number = divmod(self._num_calls, _NUM_TIMED + 1)
        if place > 1:  # the last of the timed calls failed, or is another thread's
            self._settle(1)
            return self.call(*values)
        if place and self._alone is self._pooled:
            self._alone = self._make(-1)
        self._num_calls += 1
        run = self._alone if place else self._pooled
        begun = now()
        outputs = run(*values)
        if number:
            self._fastest[place] = min(self._fastest[place], now() - begun)
        if number == _NUM_TIMED:
            self._settle(place)
        return outputs

    def _settle(self, place: int) -> None:
        pooled, alone = self._fastest
        if place == 0 and pooled > TRIED_SECS:
            self.call = self._pooled
        elif place:
            self.call = self._alone if alone < pooled else self._pooled


def _never_wait(ops: list[tf.Operation]) -> bool:
    """Whether no op among these, and those that they need, waits for another one to run."""
    seen, todo = set(ops), list(ops)
    while todo and len(seen) <= _MAX_OPS:
        op = todo.pop()
        if op.op_def.is_stateful and not op.type.startswith(_NEVER_WAIT):
            return False
        new = {each.op for each in op.inputs} | set(op.control_inputs)
        todo += new - seen
        seen |= new
    return not todo


class _Parts:
    """The elements of a graph that fetches stand for."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self.names: dict[str, int] = {}  # of tensors, with their places among the values
        self.targets: list[str] = []
        self.ops: list[tf.Operation] = []
        self.elements: list[Any] = []

    def packer(self, fetches: Any) -> Pack:
        """Take the fetches apart; returns what puts their values together."""
        if type(fetches) in (dict, OrderedDict):
            kind, keys = type(fetches), list(fetches)
            parts = [self.packer(each) for each in fetches.values()]

            def pack_dict(values: list[Any]) -> Any:
                return kind((key, pack(values)) for key, pack in zip(keys, parts, strict=True))

            variables = [each for each in tf.nest.flatten(keys) if isinstance(each, tf.Variable)]
            if not variables:
                return pack_dict
            self.elements += variables  # the key of the step holds their ids

            def pack_in_graph(values: list[Any]) -> Any:
                with entering(self._graph):
                    return pack_dict(values)

            return pack_in_graph
        if isinstance(fetches, (list, tuple)):
            parts = [self.packer(each) for each in fetches]
            make = getattr(type(fetches), "_make", type(fetches))
            return lambda values: make([pack(values) for pack in parts])
        if isinstance(fetches, tf.SparseTensor):
            inner = (fetches.indices, fetches.values, fetches.dense_shape)
            pack = self.packer(inner)
            self.elements.append(fetches)
            return lambda values: tf.compat.v1.SparseTensorValue(*pack(values))
        return self._leaf(fetches)

    def _leaf(self, fetch: Any) -> Pack:
        self.elements.append(fetch)
        element = self._graph.as_graph_element(fetch)
        if not self._graph.is_fetchable(element):
            raise ValueError(f"{fetch!r} must not be fetched")
        if isinstance(element, tf.Operation):
            self.ops.append(element)
            self.targets.append(element.name)
            return _nothing
        self.ops.append(element.op)
        place = self.names.setdefault(element.name, len(self.names))
        return lambda values: _own(values[place])


class _Feed:
    """One tensor that is fed."""

    def __init__(self, graph: tf.Graph, key: Any) -> None:
        if not isinstance(key, (str, tf.Tensor, tf.Variable)):
            raise TypeError(f"{key!r} is fed, which is no tensor")
        tensor = graph.as_graph_element(key, allow_operation=False)
        dtype = np.dtype(tensor.dtype.as_numpy_dtype)
        if not graph.is_feedable(tensor) or not (dtype.kind in "biufcO" or dtype == _BFLOAT16):
            raise TypeError(
                f"{key!r} must not be fed, or is of a kind that is fed in no simple way"
            )
        self.name = tensor.name
        self._dtype = dtype
        self._shape = None if tensor.shape.rank is None else tensor.shape.as_list()

    def convert(self, value: Any) -> Any:
        """The value as an array; None if Session.run must convert it."""
        if type(value) is not np.ndarray or value.dtype != self._dtype:
            value = self._converted(value)
        shape = self._shape
        if value is None or shape is None:
            return value
        if len(shape) != value.ndim or any(
            size != known and known is not None
            for size, known in zip(value.shape, shape, strict=True)
        ):
            return None
        return value

    def _converted(self, value: Any) -> Any:
        dtype = self._dtype
        if not isinstance(value, _VALUES):
            return None
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "c" != dtype.kind:
            return None
        try:
            array = np.asarray(value, dtype)
        except Exception:
            return None
        if isinstance(value, int) and (dtype.kind == "O" or array != value):
            return None  # an integer must be converted exactly
        return array


_BFLOAT16 = np.dtype(tf.bfloat16.as_numpy_dtype)
_ELEMENTS = (tf.Tensor, tf.Operation, tf.Variable, tf.SparseTensor)
_VALUES = (np.ndarray, np.generic, bool, int, float, str, bytes, list)


def _copy(fetches: Any) -> Any:
    """The fetches in containers that nothing else changes."""
    if isinstance(fetches, dict):
        return type(fetches)((key, _copy(each)) for key, each in fetches.items())
    return [_copy(each) for each in fetches] if type(fetches) is list else fetches


def _own(value: Any) -> Any:
    """A copy where the value is shared: it may be a constant's memory, or a fed array."""
    is_shared = type(value) is np.ndarray and value.dtype.kind != "O"
    return value.copy() if is_shared else value


def _nothing(values: list[Any]) -> None:
    """The result of fetching an operation: None."""


def key_of(fetches: Any) -> Hashable:
    """The key of a compiled callable; None for fetches that only TensorFlow can take apart."""
    if isinstance(fetches, str):
        return fetches
    if isinstance(fetches, _ELEMENTS):
        is_tensor = isinstance(fetches, tf.Tensor)
        is_handle = is_tensor and fetches.op.type.startswith("GetSessionHandle")
        return None if is_handle else id(fetches)
    kind: Any = type(fetches)
    names: list[Hashable] = []
    if kind in (dict, OrderedDict):
        names = [(type(name), name if type(name) is str else _hashable(name)) for name in fetches]
        fetches = fetches.values()
    elif kind not in (list, tuple) and not (isinstance(fetches, tuple) and hasattr(kind, "_make")):
        return None
    keys = [key_of(each) for each in fetches]
    return None if None in keys or not keys else (kind, *names, *keys)


def _hashable(name: Any) -> Hashable:
    """The key of a dict of fetches: a variable has no hash where its graph is not entered."""
    if isinstance(name, tf.Variable):
        return id(name)
    return tuple(map(_hashable, name)) if isinstance(name, tuple) else name


def raise_explained(session: Any, failure: list[BaseException]) -> None:
    """Raise the error of a compiled run as `Session.run` does: with op, node and the user's line.

    Returns where TensorFlow's private method is missing: tested with 2.16, 2.18 and 2.21.
    """

    def fail() -> None:
        raise failure.pop()  # frames that held it would make a reference cycle

    if hasattr(session, "_do_call"):
        session._do_call(fail)
