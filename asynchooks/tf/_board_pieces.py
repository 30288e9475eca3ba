"""What a notice board on a server is made of: where it lives, its variables, queues and lock.

All is found by its shared name, from any graph of any process, so that none of it is a variable of
the model or of its checkpoints. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

NUM_SEATS = 256
"""Processes that may train at once."""
NEVER = int(np.iinfo(np.int64).max)
"""The threshold of a process in which nobody waits."""
_SPARE_BOXES = 8
"""Boxes that each graph rings from the beginning, so that few graphs ever have to grow."""

EPOCH, NUM_TAKEN = 0, 1  # in the first row of the seats
OWNER, HELD, BEATS, EVERY = 0, 1, 2, 3  # in the row of each seat
ROWS = (NUM_SEATS + 1, 4)

raw = tf.raw_ops


class Place(NamedTuple):
    """Where a global step lives, which is where its board is, too."""

    device: str
    name: str  # the shared name of the variable
    container: str
    dtype: tf.DType
    is_resource: bool

    @classmethod
    def of(cls, step: Any) -> Place:
        """Of the global step of a graph, a variable of either kind."""
        is_resource = hasattr(step, "handle")
        op = step.handle.op if is_resource else step.op
        spec = tf.DeviceSpec.from_string(op.device or "")
        device = spec.replace(device_type="CPU", device_index=0).to_string()
        name = op.get_attr("shared_name").decode() or op.name
        container = op.get_attr("container").decode()
        return cls(device, name, container, step.dtype.base_dtype, is_resource)


def num_boxes_for(num_taken: int) -> int:
    """How many boxes a graph rings when so many seats are taken."""
    boxes = _SPARE_BOXES
    while boxes < num_taken:
        boxes *= 2
    return min(boxes, NUM_SEATS)


class BoardPieces:
    """The pieces of one step's board in one graph; `BoardOps` makes operations of them.

    Args:
        graph: where to add operations.
        place: where the step lives.
    """

    def __init__(self, graph: tf.Graph, place: Place) -> None:
        self._graph = graph
        self._place = place
        with self._here():
            self._seats = self._variable("seats", ROWS)
            self._thresholds = self._variable("thresholds", (NUM_SEATS,))
            self._mutex = raw.MutexV2(shared_name=self._name("mutex"))
            self._ready = self._queue("ready")
            self._step = self._step_reader()
        self._boxes: list[Any] = []

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._graph.as_default(), tf.device(self._place.device):
            yield

    def _name(self, what: str) -> str:
        return f"asynchooks/{self._place.name}/{what}"

    def _variable(self, what: str, shape: tuple[int, ...]) -> Any:
        return raw.VarHandleOp(dtype=tf.int64, shape=shape, shared_name=self._name(what))

    def _queue(self, what: str) -> Any:
        # each publisher looks before it puts: more than one item is there for a moment only
        return raw.FIFOQueueV2(
            component_types=[tf.bool], shapes=[()], capacity=4096, shared_name=self._name(what)
        )

    def _box(self, seat: int) -> Any:
        while len(self._boxes) <= seat:
            with self._graph.control_dependencies(None):  # whatever asks for it first
                self._boxes.append(self._queue(f"box{len(self._boxes)}"))
        return self._boxes[seat]

    def _step_reader(self) -> Callable[[], Any]:
        place = self._place
        if place.is_resource:
            handle = raw.VarHandleOp(
                dtype=place.dtype, shape=(), shared_name=place.name, container=place.container
            )
            return lambda: raw.ReadVariableOp(resource=handle, dtype=place.dtype)
        ref = raw.VariableV2(
            shape=(), dtype=place.dtype, shared_name=place.name, container=place.container
        )
        # not by a bare identity, which may be the variable's own memory
        return lambda: tf.add(ref, tf.zeros((), place.dtype))

    def _read_step(self) -> Any:
        return tf.cast(self._step(), tf.int64)

    def _read(self, variable: Any) -> Any:
        shape = ROWS if variable is self._seats else (NUM_SEATS,)
        return tf.ensure_shape(raw.ReadVariableOp(resource=variable, dtype=tf.int64), shape)

    def _assign(self, variable: Any, value: Any) -> Any:
        return raw.AssignVariableOp(resource=variable, value=value)

    def _notice(self, step: Any, head: Any) -> Any:
        return tf.concat([[step], head[: NUM_TAKEN + 1]], 0)

    def _news(self) -> tuple[Any, Any]:
        """(The step, the first row of the seats), read now.

        The row first: a step of the next epoch is then taken for one of the epoch before, which is
        late news at most, and never the other way round.
        """
        head = self._read(self._seats)[0]
        with tf.control_dependencies([head]):
            return self._read_step(), head

    def _tell(self, step: Any, head: Any, num_taken: int) -> Any:
        with self._here():
            num_boxes = num_boxes_for(num_taken)
            for seat in range(num_boxes):
                self._box(seat)  # outside of the branches
            with tf.control_dependencies([step]):
                due = self._read(self._thresholds)[:num_boxes] <= step

            def ring() -> Any:
                with tf.control_dependencies(
                    [self._ring(each, due[each]) for each in range(num_boxes)]
                ):
                    return tf.constant(True)

            rung = tf.cond(tf.reduce_any(due), ring, lambda: tf.constant(False))
            with tf.control_dependencies([rung]):
                return self._notice(step, head)

    def _ring(self, seat: int, is_due: Any = True) -> Any:
        return self._put_once(self._box(seat), is_due)

    def _ring_all(self, num_taken: int) -> list[Any]:
        return [self._ring(each) for each in range(num_boxes_for(num_taken))]

    def _then_ring(self, result: Any, num_taken: int) -> Any:
        """The result, when everybody has been rung after it."""
        with self._here():
            with tf.control_dependencies([result]):
                rung = self._ring_all(num_taken)
            with tf.control_dependencies(rung):
                return tf.identity(result)

    def _put_once(self, queue: Any, is_wanted: Any = True) -> Any:
        """Put an item into a queue that holds none."""
        is_empty = raw.QueueSizeV2(handle=queue) < 1
        # a batch of one or of none: a branch for each queue made graphs three times as dear to make
        num_items = tf.cast(is_empty & is_wanted, tf.int32)
        items = tf.fill([num_items], True)
        return raw.QueueEnqueueManyV2(handle=queue, components=[items])

    def _alone(self, request: Any, body: Callable[..., Any]) -> Any:
        """What `body` returns, run while nobody else changes the seats.

        The lock is taken when the request has arrived, and given back before anything is sent, so
        that no process can hold it while it sleeps. It is freed with the run, however that ends.
        """
        with self._here():
            arrived = [] if request is None else [tf.identity(request)]
            with tf.control_dependencies(arrived):
                lock = raw.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                result = tf.identity(body(*arrived))
            with tf.control_dependencies([result]):
                freed = raw.ConsumeMutexLock(mutex_lock=lock)
            with tf.control_dependencies([freed]):
                return tf.identity(result)


def with_value(rows: Any, row: Any, column: int, value: Any) -> Any:
    index = tf.stack([tf.cast(row, tf.int64), tf.constant(column, tf.int64)])
    return tf.tensor_scatter_nd_update(rows, [index], [tf.cast(value, tf.int64)])


def equals(values: Any, value: Any) -> Any:
    """1 where they are equal: in a graph `==` may compare the tensors themselves."""
    return tf.cast(tf.equal(values, tf.cast(value, tf.int64)), tf.int64)


def microseconds() -> Any:
    return tf.cast(tf.timestamp() * 1e6, tf.int64)
