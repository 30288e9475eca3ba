"""The membership table on a server, as operations of a graph: slots, thresholds, subscribers.

Every process that trains has a slot, and a queue, its subscriber, that gets an item when the step
reaches the lowest one that the process waits for. All is found by its shared name, from any graph
of any process, so that none of it is a variable of the model or of its checkpoints. Nothing here
runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ...distributed._credits import share_of

NUM_SLOTS = 256
"""Processes that may train at once."""
NEVER = int(np.iinfo(np.int64).max)
"""The threshold of a process that waits for no step."""
_SPARE_SUBSCRIBERS = 8
"""Subscribers that each graph notifies from the beginning, so that few graphs have to grow."""

EPOCH, NUM_TAKEN = 0, 1  # columns of the first row
PROCESS_ID, HELD, HEARTBEATS, EVERY = 0, 1, 2, 3  # columns of the row of each slot
SHAPE = (NUM_SLOTS + 1, 4)

raw = tf.raw_ops


class Place(NamedTuple):
    """Where a global step lives, which is where its membership table is, too."""

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


def num_subscribers_for(num_taken: int) -> int:
    """How many subscribers a graph notifies when so many slots are taken."""
    num = _SPARE_SUBSCRIBERS
    while num < num_taken:
        num *= 2
    return min(num, NUM_SLOTS)


class MembershipTable:
    """The table of the global step at a place, in one graph, which must not be finalized.

    Every method adds operations and returns a tensor to fetch. A notification is int64, shape (3,):
    the step, the epoch, and how many slots have been taken. A request is fed as one tensor, int64,
    shape (n,): each tensor costs a message of its own.
    """

    def __init__(self, graph: tf.Graph, place: Place) -> None:
        self._graph = graph
        self._place = place
        with self._here():
            self._slots = self._variable("slots", SHAPE)
            self._thresholds = self._variable("thresholds", (NUM_SLOTS,))
            self._mutex = raw.MutexV2(shared_name=self._name("mutex"))
            self._ready = self._queue("ready")
            self._step = self._step_reader()
        self._subscribers: list[Any] = []

    def notification_after(self, op: Any, num_taken: int) -> Any:
        """Notify the subscribers that are due once `op` has moved the step; a notification."""
        num_subscribers = num_subscribers_for(num_taken)
        with self._here():
            with tf.control_dependencies([op]):
                step, head = self._news()
            for slot in range(num_subscribers):
                self._subscriber(slot)  # outside of the branches
            with tf.control_dependencies([step]):
                due = self._read(self._thresholds)[:num_subscribers] <= step

            def notify() -> Any:
                with tf.control_dependencies(self._notify(tf.unstack(due))):
                    return tf.constant(True)

            notified = tf.cond(tf.reduce_any(due), notify, lambda: tf.constant(False))
            with tf.control_dependencies([notified]):
                return self._notification(step, head)

    def notification(self, num_taken: int) -> Any:
        """Notify the subscribers that are due now; a notification."""
        with self._here():
            return self.notification_after(tf.no_op(), num_taken)

    def wait(self, slot: int) -> Any:
        """Block until this slot's subscriber is notified; a notification."""
        with self._here():
            notified = raw.QueueDequeueV2(handle=self._subscriber(slot), component_types=[tf.bool])
            with tf.control_dependencies(notified):
                return self._notification(*self._news())

    def arm(self, request: Any) -> Any:
        """Set a slot's threshold: (slot, step); a notification, read afterwards."""
        with self._here():
            slot, threshold = tf.unstack(tf.identity(request), 2)
            armed = raw.ResourceScatterUpdate(
                resource=self._thresholds, indices=[slot], updates=[threshold]
            )
            with tf.control_dependencies([armed]):
                return self._notification(*self._news())

    def prepare(self) -> Any:
        """Create the table unless it exists: in epoch 0, until one is begun; 0."""

        def make() -> Any:
            def fresh() -> Any:
                slots = tf.zeros(SHAPE, tf.int64)
                thresholds = tf.fill([NUM_SLOTS], tf.constant(NEVER, tf.int64))
                with tf.control_dependencies(
                    [self._assign(self._thresholds, thresholds), self._assign(self._slots, slots)]
                ):
                    return tf.constant(0, tf.int64)

            is_made = raw.VarIsInitializedOp(resource=self._slots)
            return tf.cond(is_made, lambda: tf.constant(0, tf.int64), fresh)

        return self._locked(None, make)

    def join(self, request: Any) -> Any:
        """Take a slot: (process id, microseconds between two heartbeats).

        Returns int64, shape (4,): a notification and the slot, -1 if there is none left.
        """

        def take(request: Any) -> Any:
            process_id, every = tf.unstack(request, 2)
            slots = self._read(self._slots)
            process_ids = slots[1:, PROCESS_ID]
            score = 2 * _equals(process_ids, process_id) + _equals(process_ids, 0)
            slot = tf.argmax(score)
            is_free = score[slot] > 0
            nothing = tf.constant(0, tf.int64)
            row = tf.stack([process_id, nothing, nothing, every])
            taken = tf.tensor_scatter_nd_update(slots, [[slot + 1]], [row])
            taken = _with_value(taken, 0, NUM_TAKEN, tf.maximum(slots[0, NUM_TAKEN], slot + 1))
            taken = tf.where(is_free, taken, slots)
            index = tf.where(is_free, slot, tf.constant(-1, tf.int64))
            with tf.control_dependencies([self._assign(self._slots, taken)]):
                clear = raw.ResourceScatterUpdate(
                    resource=self._thresholds,
                    indices=tf.boolean_mask([slot], [is_free]),
                    updates=tf.boolean_mask([tf.constant(NEVER, tf.int64)], [is_free]),
                )
            with tf.control_dependencies([clear]):
                return tf.concat([self._notification(self._read_step(), taken[0]), [index]], 0)

        return self._locked(request, take)

    def take(self, request: Any) -> Any:
        """Ask for credits: (slot, process id, runs wanted, steps held, steps of one run, limit).

        Returns int64, shape (4,): a notification, and the number of runs granted; -1 if another
        process has the slot.
        """

        def take(slots: Any, request: Any) -> tuple[Any, Any]:
            slot, process_id, wanted, mine, stride, limit = tf.unstack(request, 6)
            # the step after the slots: steps that others have given back are counted by then
            with tf.control_dependencies([slots]):
                step = self._read_step()
            is_mine = tf.equal(slots[slot + 1, PROCESS_ID], process_id)
            others = tf.reduce_sum(slots[1:, HELD]) - slots[slot + 1, HELD]
            num_processes = NUM_SLOTS - tf.reduce_sum(_equals(slots[1:, PROCESS_ID], 0))
            free = tf.maximum((limit - step - others - mine + stride - 1) // stride, 0)
            share = share_of(free, num_processes, tf.maximum)
            granted = tf.minimum(tf.minimum(wanted, share), free)
            held = _with_value(slots, slot + 1, HELD, mine + granted * stride)
            kept = tf.where(is_mine, held, slots)
            granted = tf.where(is_mine, granted, tf.constant(-1, tf.int64))
            return kept, tf.concat([self._notification(step, kept[0]), [granted]], 0)

        return self._changed(request, take)

    def heartbeat(self, request: Any) -> Any:
        """Count a heartbeat of this process: (slot, process id).

        Returns int64, shape (slots + 2, 4): a notification, then the rows.
        """

        def count(slots: Any, request: Any) -> tuple[Any, Any]:
            slot, process_id = tf.unstack(request, 2)
            is_mine = tf.equal(slots[slot + 1, PROCESS_ID], process_id)
            counted = _with_value(slots, slot + 1, HEARTBEATS, slots[slot + 1, HEARTBEATS] + 1)
            kept = tf.where(is_mine, counted, slots)
            return kept, kept

        rows = self._changed(request, count)
        with self._here(), tf.control_dependencies([rows]):
            notification = self._notification(self._read_step(), rows[0])
            return tf.concat([[tf.pad(notification, [[0, 1]])], rows], 0)

    def leave(self, request: Any) -> Any:
        """Free a slot: (slot, process id, heartbeats); -1 for any number of heartbeats.

        No subscriber is notified: a process that is short of credits asks again by itself. Returns
        int64, shape (): 1, or 0 if the slot holds anything else.
        """

        def leave(slots: Any, request: Any) -> tuple[Any, Any]:
            slot, process_id, heartbeats = tf.unstack(request, 3)
            found = slots[slot + 1]
            is_it = tf.equal(found[PROCESS_ID], process_id) & (
                (heartbeats < 0) | tf.equal(found[HEARTBEATS], heartbeats)
            )
            empty = tf.tensor_scatter_nd_update(slots, [[slot + 1]], [tf.zeros_like(found)])
            return tf.where(is_it, empty, slots), tf.cast(is_it, tf.int64)

        return self._changed(request, leave)

    def notify_all(self, num_taken: int) -> Any:
        """Notify all subscribers; True."""
        with self._here():
            return self._then_notify_all(tf.constant(True), num_taken)

    def begin_epoch(self, request: Any, num_taken: int) -> Any:
        """Begin an epoch, as the step may have gone back, and notify all; a notification.

        The request is the newest epoch that the chief knows of, shape (): the clock of a new server
        may be behind.
        """

        def begin(known: Any) -> Any:
            slots = self._read(self._slots)
            epoch = tf.maximum(tf.maximum(slots[0, EPOCH], known) + 1, _microseconds())
            begun = _with_value(slots, 0, EPOCH, epoch)
            # the step is read once the epoch is there: a later one is announced by its own run
            with tf.control_dependencies([self._assign(self._slots, begun)]):
                return self._notification(self._read_step(), begun[0])

        return self._then_notify_all(self._locked(request, begin), num_taken)

    def announce_ready(self) -> Any:
        """Record that the chief has initialised the model."""
        with self._here():
            return self._put_once(self._ready)

    def wait_ready(self) -> Any:
        """Block until a chief has done so; the next process that waits is woken, too."""
        with self._here():
            item = raw.QueueDequeueV2(handle=self._ready, component_types=[tf.bool])
            with tf.control_dependencies(item):
                return self._put_once(self._ready)

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._graph.as_default(), tf.device(self._place.device):
            yield

    def _name(self, what: str) -> str:
        return f"asynchooks/{self._place.name}/{what}"

    def _variable(self, what: str, shape: tuple[int, ...]) -> Any:
        return raw.VarHandleOp(dtype=tf.int64, shape=shape, shared_name=self._name(what))

    def _queue(self, what: str) -> Any:
        # each publisher puts into an empty queue only: more than one item is there for a moment
        return raw.FIFOQueueV2(
            component_types=[tf.bool], shapes=[()], capacity=4096, shared_name=self._name(what)
        )

    def _subscriber(self, slot: int) -> Any:
        while len(self._subscribers) <= slot:
            with self._graph.control_dependencies(None):  # several operations may need it
                self._subscribers.append(self._queue(f"subscriber{len(self._subscribers)}"))
        return self._subscribers[slot]

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
        shape = SHAPE if variable is self._slots else (NUM_SLOTS,)
        return tf.ensure_shape(raw.ReadVariableOp(resource=variable, dtype=tf.int64), shape)

    def _assign(self, variable: Any, value: Any) -> Any:
        return raw.AssignVariableOp(resource=variable, value=value)

    def _notification(self, step: Any, head: Any) -> Any:
        return tf.concat([[step], head[: NUM_TAKEN + 1]], 0)

    def _news(self) -> tuple[Any, Any]:
        """(The step, the first row of the slots), read now.

        The row first: a step of the next epoch may then pass for one of the epoch before, which is
        late at most, and never the other way round.
        """
        head = self._read(self._slots)[0]
        with tf.control_dependencies([head]):
            return self._read_step(), head

    def _notify(self, are_due: Sequence[Any]) -> list[Any]:
        """Notify the subscriber of each of the first slots, if it is due."""
        subscribers = map(self._subscriber, range(len(are_due)))
        return [self._put_once(*each) for each in zip(subscribers, are_due, strict=True)]

    def _then_notify_all(self, result: Any, num_taken: int) -> Any:
        """The result, once all subscribers have been notified after it."""
        with self._here():
            with tf.control_dependencies([result]):
                notified = self._notify([True] * num_subscribers_for(num_taken))
            with tf.control_dependencies(notified):
                return tf.identity(result)

    def _put_once(self, queue: Any, is_wanted: Any = True) -> Any:
        """Put an item into a queue that holds none."""
        is_empty = raw.QueueSizeV2(handle=queue) < 1
        # a batch of one or none: a branch for each queue made graphs three times as slow to build
        num_items = tf.cast(is_empty & is_wanted, tf.int32)
        items = tf.fill([num_items], True)
        return raw.QueueEnqueueManyV2(handle=queue, components=[items])

    def _changed(self, request: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        """The result of `change(slots, request)`, which returns the new slots and it, locked."""

        def body(request: Any) -> Any:
            slots, result = change(self._read(self._slots), request)
            with tf.control_dependencies([self._assign(self._slots, slots)]):
                return tf.identity(result)

        return self._locked(request, body)

    def _locked(self, request: Any, body: Callable[..., Any]) -> Any:
        """What `body` returns, run under the table's lock.

        The lock is taken when the request has arrived, and released before anything is sent, so
        that no process can hold it while it is stopped. It is freed when the run ends, in any way.
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


def _with_value(rows: Any, row: Any, column: int, value: Any) -> Any:
    index = tf.stack([tf.cast(row, tf.int64), tf.constant(column, tf.int64)])
    return tf.tensor_scatter_nd_update(rows, [index], [tf.cast(value, tf.int64)])


def _equals(values: Any, value: Any) -> Any:
    """1 where they are equal: in a graph `==` may compare the tensors themselves."""
    return tf.cast(tf.equal(values, tf.cast(value, tf.int64)), tf.int64)


def _microseconds() -> Any:
    return tf.cast(tf.timestamp() * 1e6, tf.int64)
