"""The notice board on a server, as operations of a graph: seats, thresholds, boxes, tickets.

Every process that trains has a seat, and a box that is rung when the step reaches the lowest one
that it waits for. Nothing here runs anything.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ._board_pieces import (
    BEATS,
    EPOCH,
    HELD,
    NEVER,
    NUM_SEATS,
    NUM_TAKEN,
    OWNER,
    ROWS,
    BoardPieces,
    equals,
    microseconds,
    raw,
    with_value,
)


class BoardOps(BoardPieces):
    """The board of one global step, in one graph, which must not be finalized.

    Every method adds operations and returns a tensor to fetch. A notice is int64, shape (3,): the
    step, the epoch, and how many seats have been taken. A request is fed as one tensor, int64,
    shape (n,): each costs a message of its own.

    Args:
        graph: where to add operations.
        place: where the step lives.
    """

    def notice_after(self, op: Any, num_taken: int) -> Any:
        """Ring whom the step concerns once `op` has moved it; a notice."""
        with self._here(), tf.control_dependencies([op]):
            step, head = self._news()
        return self._tell(step, head, num_taken)

    def notice(self, num_taken: int) -> Any:
        """Ring whom the step concerns now; a notice."""
        with self._here():
            return self.notice_after(tf.no_op(), num_taken)

    def wait(self, seat: int) -> Any:
        """Block until this seat's box is rung; a notice."""
        with self._here():
            rung = raw.QueueDequeueV2(handle=self._box(seat), component_types=[tf.bool])
            with tf.control_dependencies(rung):
                return self._notice(*self._news())

    def arm(self, request: Any) -> Any:
        """Have a seat's box rung from a step on: (seat, step); a notice, read afterwards."""
        with self._here():
            seat, threshold = tf.unstack(tf.identity(request), 2)
            armed = raw.ResourceScatterUpdate(
                resource=self._thresholds, indices=[seat], updates=[threshold]
            )
            with tf.control_dependencies([armed]):
                return self._notice(*self._news())

    def prepare(self) -> Any:
        """Set the board up, where nobody has: in epoch 0, until one is begun; 0."""

        def make() -> Any:
            def fresh() -> Any:
                seats = tf.zeros(ROWS, tf.int64)
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
            owners = seats[1:, OWNER]
            score = 2 * equals(owners, owner) + equals(owners, 0)
            seat = tf.argmax(score)
            is_free = score[seat] > 0
            nothing = tf.constant(0, tf.int64)
            row = tf.stack([owner, nothing, nothing, every])
            taken = tf.tensor_scatter_nd_update(seats, [[seat + 1]], [row])
            taken = with_value(taken, 0, NUM_TAKEN, tf.maximum(seats[0, NUM_TAKEN], seat + 1))
            taken = tf.where(is_free, taken, seats)
            index = tf.where(is_free, seat, tf.constant(-1, tf.int64))
            with tf.control_dependencies([self._assign(self._seats, taken)]):
                clear = raw.ResourceScatterUpdate(
                    resource=self._thresholds,
                    indices=tf.boolean_mask([seat], [is_free]),
                    updates=tf.boolean_mask([tf.constant(NEVER, tf.int64)], [is_free]),
                )
            with tf.control_dependencies([clear]):
                return tf.concat([self._notice(self._read_step(), taken[0]), [index]], 0)

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
            is_mine = tf.equal(seats[seat + 1, OWNER], owner)
            others = tf.reduce_sum(seats[1:, HELD]) - seats[seat + 1, HELD]
            num_owners = NUM_SEATS - tf.reduce_sum(equals(seats[1:, OWNER], 0))
            free = tf.maximum((limit - step - others - mine + stride - 1) // stride, 0)
            share = tf.maximum(free // (2 * tf.maximum(num_owners, 1)), 1)
            granted = tf.minimum(tf.minimum(wanted, share), free)
            held = with_value(seats, seat + 1, HELD, mine + granted * stride)
            kept = tf.where(is_mine, held, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                granted = tf.where(is_mine, granted, tf.constant(-1, tf.int64))
                return tf.concat([self._notice(step, kept[0]), [granted]], 0)

        return self._alone(request, take)

    def beat(self, request: Any) -> Any:
        """Say that this process lives: (seat, owner).

        Returns:
            int64, shape (seats + 2, 4): a notice, then the rows.
        """

        def beat(request: Any) -> Any:
            seat, owner = tf.unstack(request, 2)
            seats = self._read(self._seats)
            is_mine = tf.equal(seats[seat + 1, OWNER], owner)
            beaten = with_value(seats, seat + 1, BEATS, seats[seat + 1, BEATS] + 1)
            kept = tf.where(is_mine, beaten, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                return tf.identity(kept)

        rows = self._alone(request, beat)
        with self._here(), tf.control_dependencies([rows]):
            notice = self._notice(self._read_step(), rows[0])
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
            is_it = tf.equal(found[OWNER], owner) & ((beats < 0) | tf.equal(found[BEATS], beats))
            empty = tf.tensor_scatter_nd_update(seats, [[seat + 1]], [tf.zeros_like(found)])
            kept = tf.where(is_it, empty, seats)
            with tf.control_dependencies([self._assign(self._seats, kept)]):
                return tf.cast(is_it, tf.int64)

        return self._alone(request, leave)

    def ring_all(self, num_taken: int) -> Any:
        """Ring everybody; True."""
        with self._here():
            return self._then_ring(tf.constant(True), num_taken)

    def begin_epoch(self, request: Any, num_taken: int) -> Any:
        """Say that the step may have gone back, and ring so many seats; a notice.

        The request is the newest epoch that the chief knows of, shape (): a new server's clock may
        be behind.
        """

        def begin(known: Any) -> Any:
            seats = self._read(self._seats)
            epoch = tf.maximum(tf.maximum(seats[0, EPOCH], known) + 1, microseconds())
            begun = with_value(seats, 0, EPOCH, epoch)
            with tf.control_dependencies([self._assign(self._seats, begun)]):
                return self._notice(self._read_step(), begun[0])

        notice = self._alone(request, begin)
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
