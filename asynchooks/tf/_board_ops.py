"""The notice board on a server, as operations of a graph: seats, thresholds, boxes, tickets.

Every process that trains has a seat, and a box that is rung when the step reaches the lowest one
that it waits for. Nothing here runs anything. All is found by its shared name, from any graph of
any process, so that none of it is a variable of the model or of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

NUM_SEATS = 256
"""Processes that may train at once."""
NEVER = int(np.iinfo(np.int64).max)
"""The threshold of a process in which nobody waits."""
_SPARE_BOXES = 8
"""Boxes that each graph rings from the beginning, so that few graphs ever have to grow."""

_EPOCH, _NUM_TAKEN = 0, 1  # in the first row of the seats
_OWNER, _HELD, _BEATS, _EVERY = 0, 1, 2, 3  # in the row of each seat
_ROWS = (NUM_SEATS + 1, 4)

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


class BoardOps:
    """The board of one global step, in one graph, which must not be finalized.

    Every method adds operations and returns a tensor to fetch. A notice is int64, shape (3,): the
    step, the epoch, and how many seats have been taken. A request is fed as one tensor, int64,
    shape (n,): each costs a message of its own.

    Args:
        graph: where to add operations.
        place: where the step lives.
    """

    def __init__(self, graph: tf.Graph, place: Place) -> None:
        self._graph = graph
        self._place = place
        with self._here():
            self._seats = self._variable("seats", _ROWS)
            self._thresholds = self._variable("thresholds", (NUM_SEATS,))
            self._mutex = raw.MutexV2(shared_name=self._name("mutex"))
            self._ready = self._queue("ready")
            self._step = self._step_reader()
        self._boxes: list[Any] = []

    def notice_after(self, op: Any, num_taken: int) -> Any:
        """Ring whom the step concerns once `op` has moved it; a notice."""
        with self._here(), tf.control_dependencies([op]):
            step = self._read_step()
        return self._tell(step, num_taken)

    def notice(self, num_taken: int) -> Any:
        """Ring whom the step concerns now; a notice."""
        with self._here():
            return self.notice_after(tf.no_op(), num_taken)

    def wait(self, seat: int) -> Any:
        """Block until this seat's box is rung; a notice."""
        with self._here():
            rung = raw.QueueDequeueV2(handle=self._box(seat), component_types=[tf.bool])
            with tf.control_dependencies(rung):
                return self._notice(self._read_step())

    def poke(self, seat: int) -> Any:
        """Ring this seat's box."""
        with self._here():
            return self._ring(seat)

    def arm(self, request: Any) -> Any:
        """Have a seat's box rung from a step on: (seat, step); a notice, read afterwards."""
        with self._here():
            seat, threshold = tf.unstack(tf.identity(request), 2)
            armed = raw.ResourceScatterUpdate(
                resource=self._thresholds, indices=[seat], updates=[threshold]
            )
            with tf.control_dependencies([armed]):
                return self._notice(self._read_step())

    def prepare(self) -> Any:
        """Set the board up, where nobody has; 0."""

        def make() -> Any:
            def fresh() -> Any:
                seats = tf.zeros(_ROWS, tf.int64)
                seats = _with(seats, 0, _EPOCH, _microseconds())
                thresholds = tf.fill([NUM_SEATS], tf.constant(NEVER, tf.int64))
                with tf.control_dependencies(
                    [self._assign(self._thresholds, thresholds), self._assign(self._seats, seats)]
                ):
                    return tf.constant(0, tf.int64)

            is_made = raw.VarIsInitializedOp(resource=self._seats)
            return tf.cond(is_made, lambda: tf.constant(0, tf.int64), fresh)

        return self._alone(None, make)

    def join(self, request: Any) -> Any:
        """Take a seat: (owner, microseconds between its beats).

        Returns:
            int64, shape (4,): a notice and the seat, -1 if there is none left.
        """

        def take(request: Any) -> Any:
            owner, every = tf.unstack(request, 2)
            seats = self._read(self._seats)
            owners = seats[1:, _OWNER]
            score = 2 * _count(owners, owner) + _count(owners, 0)
            seat = tf.argmax(score)
            is_free = score[seat] > 0
            nothing = tf.constant(0, tf.int64)
            row = tf.stack([owner, nothing, nothing, every])
            taken = tf.tensor_scatter_nd_update(seats, [[seat + 1]], [row])
            taken = _with(taken, 0, _NUM_TAKEN, tf.maximum(seats[0, _NUM_TAKEN], seat + 1))
            taken = tf.where(is_free, taken, seats)
            index = tf.where(is_free, seat, tf.constant(-1, tf.int64))
            with tf.control_dependencies([self._assign(self._seats, taken)]):
                clear = raw.ResourceScatterUpdate(
                    resource=self._thresholds,
                    indices=tf.boolean_mask([seat], [is_free]),
                    updates=tf.boolean_mask([tf.constant(NEVER, tf.int64)], [is_free]),
                )
            with tf.control_dependencies([clear]):
                return tf.concat([self._notice(self._read_step(), taken), [index]], 0)

        return self._alone(request, take)

    def take(self, request: Any) -> Any:
        """Ask for tickets: (seat, owner, runs wanted, steps still held, steps of one run, limit).

        Returns:
            int64, shape (4,): a notice, and how many runs are granted; -1 if the seat is another's.
        """

        def take(request: Any) -> Any:
            seat, owner, wanted, mine, stride, limit = tf.unstack(request, 6)
            seats = self._read(self._seats)
            # the step after the seats: what others have given back is in it by now
            with tf.control_dependencies([seats]):
                step = self._read_step()
            is_mine = tf.equal(seats[seat + 1, _OWNER], owner)
            others = tf.reduce_sum(seats[1:, _HELD]) - seats[seat + 1, _HELD]
            num_owners = NUM_SEATS - tf.reduce_sum(_count(seats[1:, _OWNER], 0))
            free = tf.maximum((limit - step - others - mine + stride - 1) // stride, 0)
            share = tf.maximum(free // (2 * tf.maximum(num_owners, 1)), 1)
            granted = tf.minimum(tf.minimum(wanted, share), free)
            held = _with(seats, seat + 1, _HELD, mine + granted * stride)
            kept = tf.where(is_mine, held, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                granted = tf.where(is_mine, granted, tf.constant(-1, tf.int64))
                return tf.concat([self._notice(step, kept), [granted]], 0)

        return self._alone(request, take)

    def beat(self, request: Any) -> Any:
        """Say that this process lives: (seat, owner).

        Returns:
            int64, shape (seats + 2, 4): a notice, then the rows.
        """

        def beat(request: Any) -> Any:
            seat, owner = tf.unstack(request, 2)
            seats = self._read(self._seats)
            is_mine = tf.equal(seats[seat + 1, _OWNER], owner)
            beaten = _with(seats, seat + 1, _BEATS, seats[seat + 1, _BEATS] + 1)
            kept = tf.where(is_mine, beaten, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                return tf.identity(kept)

        rows = self._alone(request, beat)
        with self._here(), tf.control_dependencies([rows]):
            notice = self._notice(self._read_step(), rows)
            return tf.concat([[tf.pad(notice, [[0, 1]])], rows], 0)

    def leave(self, request: Any) -> Any:
        """Empty a seat: (seat, owner, beats); -1 for any number of beats.

        Nobody is rung: who is short of tickets asks again by itself.

        Returns:
            int64, shape (): 1, or 0 if the seat is not as said.
        """

        def leave(request: Any) -> Any:
            seat, owner, beats = tf.unstack(request, 3)
            seats = self._read(self._seats)
            found = seats[seat + 1]
            is_it = tf.equal(found[_OWNER], owner) & ((beats < 0) | tf.equal(found[_BEATS], beats))
            empty = tf.tensor_scatter_nd_update(seats, [[seat + 1]], [tf.zeros_like(found)])
            kept = tf.where(is_it, empty, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                return tf.cast(is_it, tf.int64)

        return self._alone(request, leave)

    def begin_epoch(self, num_taken: int) -> Any:
        """Say that the step may have gone back, and ring everybody; a notice."""

        def begin() -> Any:
            seats = self._read(self._seats)
            epoch = tf.maximum(seats[0, _EPOCH] + 1, _microseconds())
            begun = _with(seats, 0, _EPOCH, epoch)
            with tf.control_dependencies([self._assign(self._seats, begun)]):
                return self._notice(self._read_step(), begun)

        notice = self._alone(None, begin)
        return self._then_ring(notice, num_taken)

    def say_ready(self) -> Any:
        """Say that the chief has initialised the model."""
        with self._here():
            return self._put_once(self._ready)

    def wait_ready(self) -> Any:
        """Block until a chief has said so; the next one who waits hears it, too."""
        with self._here():
            heard = raw.QueueDequeueV2(handle=self._ready, component_types=[tf.bool])
            with tf.control_dependencies(heard):
                return self._put_once(self._ready)

    # What follows adds pieces, on the board's device.

    def _here(self) -> Any:
        return _On(self._graph, self._place.device)

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
        shape = _ROWS if variable is self._seats else (NUM_SEATS,)
        return tf.ensure_shape(raw.ReadVariableOp(resource=variable, dtype=tf.int64), shape)

    def _assign(self, variable: Any, value: Any) -> Any:
        return raw.AssignVariableOp(resource=variable, value=value)

    def _notice(self, step: Any, seats: Any = None) -> Any:
        with tf.control_dependencies([step]):
            head = self._read(self._seats)[0] if seats is None else seats[0]
            return tf.concat([[step], head[: _NUM_TAKEN + 1]], 0)

    def _tell(self, step: Any, num_taken: int) -> Any:
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
                return self._notice(step)

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


class _On:
    """`with`: this graph, this device, and no control dependencies but those given inside."""

    def __init__(self, graph: tf.Graph, device: str) -> None:
        self._contexts = [graph.as_default, lambda: tf.device(device)]
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        for make in self._contexts:
            context = make()
            context.__enter__()
            self._entered.append(context)

    def __exit__(self, *raised: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(*raised)


def _with(rows: Any, row: Any, column: int, value: Any) -> Any:
    index = tf.stack([tf.cast(row, tf.int64), tf.constant(column, tf.int64)])
    return tf.tensor_scatter_nd_update(rows, [index], [tf.cast(value, tf.int64)])


def _count(values: Any, value: Any) -> Any:
    """1 where they are equal: in a graph `==` may compare the tensors themselves."""
    return tf.cast(tf.equal(values, tf.cast(value, tf.int64)), tf.int64)


def _microseconds() -> Any:
    return tf.cast(tf.timestamp() * 1e6, tf.int64)
