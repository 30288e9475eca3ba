"""The table beside the global step on a server, as operations of a graph; it runs none of them.

Each task of the cluster that may train has one row in it and one queue, its box. The row says which
steps the task has reserved and for which step it waits; a run that reaches that step puts an item
into the box. All is found by its shared name, from the graph of any process, so that none of it is
a variable of the model or of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ...distributed._credits import share_of
from ..graph._callables import needed_by

NEVER = int(np.iinfo(np.int64).max)
"""The threshold of a process that waits for no step."""

OWNER, HELD, THRESHOLD = 0, 1, 2
"""Columns of the row of a task: who has it (0: no one), steps reserved, the step waited for."""
ANY, REFUSED = -1, -1
"""An owner that is none in particular; and what is granted to a process without the row."""

raw = tf.raw_ops
v1 = tf.compat.v1


class StepTable:
    """The table of a global step, as operations of its graph, which must not be finalized.

    News are the step and its epoch, 0 until a chief has begun one: int64, shape (2,).

    Args:
        step: the variable, of either kind.
        num_tasks: how many tasks may train; 0 if no cluster is known: then there are no boxes.
        index: of the task that this process is; None if it is none of them.
    """

    def __init__(self, step: Any, num_tasks: int, index: int | None) -> None:
        op = step.handle.op if hasattr(step, "handle") else step.op
        self._step, self.graph = step, op.graph
        self.name: str = op.get_attr("shared_name").decode() or op.name
        spec = tf.DeviceSpec.from_string(op.device or "")
        self.device: str = spec.replace(device_type="CPU", device_index=0).to_string()
        self._shape = (num_tasks + 1, 3)  # the first row holds the epoch
        name = f"asynchooks/{self.name}"
        with self._here():
            self._table = raw.VarHandleOp(
                dtype=tf.int64, shape=self._shape, shared_name=f"{name}/table"
            )
            self._mutex = raw.MutexV2(shared_name=f"{name}/mutex")
            # a publisher fills empty boxes only: more than one item is there for a moment
            self._boxes = [
                raw.FIFOQueueV2(
                    component_types=[tf.bool],
                    shapes=[()],
                    capacity=4096,
                    shared_name=f"{name}/box{index}",
                )
                for index in range(num_tasks)
            ]
            self.known_epoch = v1.placeholder(tf.int64, ())
            """The newest epoch that the chief knows of: the clock of a new server may be behind."""
            self.begin_epoch = self._begin_epoch()
            """To fetch: begin an epoch, as the step may have gone back, and fill all boxes; news.

            It creates the table on a new server."""
            self.request = v1.placeholder(tf.int64, (8,))
            """Index, owner so far, owner, steps held, threshold, runs wanted, steps of one run,
            limit: in one tensor, as each tensor costs a message of its own. An owner of `ANY` so
            far takes the row from any owner, and a new owner of 0 frees it."""
            self.exchange = self._locked(self.request, self._exchange)
            """To fetch: write a task's row and ask for credits.

            int64, shape (tasks + 2, 3): step, epoch and the number of runs granted, then the table.
            Where the row has another owner, nothing changes, and `REFUSED` is granted."""
            self.news = self.news_after(tf.no_op())
            """To fetch: news in a run of its own, which fills boxes, too."""
            self.wait: Any = None
            """To fetch: block until there is an item in this task's box; news, read afterwards."""
            if index is not None:
                item = raw.QueueDequeueV2(handle=self._boxes[index], component_types=[tf.bool])
                with tf.control_dependencies(item):
                    self.wait = tf.stack([*self._step_and_epoch()])

    def graph_alone(self) -> tf.Graph:
        """The operations to fetch but `begin_epoch`, by their names, in a graph of their own.

        A session keeps its whole graph, once more on its server, and first has it placed there.
        """
        fetches = self.exchange, self.news, self.wait
        names = {op.name for op in needed_by([each.op for each in fetches if each is not None])}
        graph_def = self.graph.as_graph_def()
        nodes = [each for each in graph_def.node if each.name in names]
        for each in nodes:
            if "_class" in each.attr:  # what the step is colocated with may be left out
                del each.attr["_class"]
        del graph_def.node[:]
        graph_def.node.extend(nodes)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(graph_def, name="")
        return graph

    def news_after(self, op: Any) -> Any:
        """News once `op` has moved the step, and an item in the box of each task that is due."""
        with self._here():
            with tf.control_dependencies([op]):
                step, epoch = self._step_and_epoch()
            news = tf.stack([step, epoch])
            if not self._boxes:
                return news
            with tf.control_dependencies([step]):
                rows = self._rows()[1:]
            due = tf.unstack((rows[:, OWNER] > 0) & (rows[:, THRESHOLD] <= step))

            def notify() -> Any:
                with tf.control_dependencies(self._fill(due)):
                    return tf.constant(True)

            filled = tf.cond(tf.reduce_any(due), notify, lambda: tf.constant(False))
            with tf.control_dependencies([filled]):
                return tf.identity(news)

    def _begin_epoch(self) -> Any:
        def begin(known: Any) -> Any:
            is_made = raw.VarIsInitializedOp(resource=self._table)
            rows = tf.cond(is_made, self._rows, lambda: tf.zeros(self._shape, tf.int64))
            now = tf.cast(tf.timestamp() * 1e6, tf.int64)
            epoch = tf.maximum(tf.maximum(rows[0, 0], known) + 1, now)
            begun = tf.tensor_scatter_nd_update(rows, [[0, 0]], [epoch])
            # the step is read once the epoch is there: a later one is announced by its own run
            with tf.control_dependencies([self._assign(begun)]):
                return tf.stack([self._read_step(), epoch])

        news = self._locked(self.known_epoch, begin)
        with tf.control_dependencies([news]):
            filled = self._fill([True] * len(self._boxes))
        with tf.control_dependencies(filled):
            return tf.identity(news)

    def _exchange(self, request: Any) -> Any:
        index, before, owner, mine, threshold, wanted, stride, limit = tf.unstack(request)
        rows = self._rows()
        # the step after the rows: steps that others have given back are counted by then
        with tf.control_dependencies([rows]):
            step = self._read_step()
        own = rows[index + 1]
        may_write = tf.equal(before, ANY) | tf.equal(before, own[OWNER])
        others = tf.reduce_sum(rows[1:, HELD]) - own[HELD]
        num_owners = tf.reduce_sum(tf.cast(rows[1:, OWNER] > 0, tf.int64))
        free = tf.maximum((limit - step - others - mine + stride - 1) // stride, 0)
        share = share_of(free, num_owners, tf.maximum)
        granted = tf.minimum(tf.minimum(wanted, share), free)
        row = tf.stack([owner, mine + granted * stride, threshold])
        written = tf.where(may_write, row, own)
        rows = tf.tensor_scatter_nd_update(rows, [[index + 1]], [written])
        granted = tf.where(may_write, granted, tf.constant(REFUSED, tf.int64))
        # once more: a run that has made the awaited step meanwhile has found the old threshold
        with tf.control_dependencies([self._assign(rows)]):
            head = tf.stack([self._read_step(), rows[0, 0], granted])
        return tf.concat([[head], rows], 0)

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self.graph.as_default(), tf.device(self.device):
            yield

    def _read_step(self) -> Any:
        # a bare read of the old kind of variable may be its own memory, which goes on
        zero = tf.zeros((), self._step.dtype.base_dtype)
        return tf.cast(self._step.read_value() + zero, tf.int64)

    def _rows(self) -> Any:
        return tf.ensure_shape(
            raw.ReadVariableOp(resource=self._table, dtype=tf.int64), self._shape
        )

    def _assign(self, rows: Any) -> Any:
        return raw.AssignVariableOp(resource=self._table, value=rows)

    def _step_and_epoch(self) -> tuple[Any, Any]:
        """The epoch is read first: a step of the next epoch may then pass for one of the epoch
        before, which is late at most, and never the other way round."""
        epoch = self._rows()[0, 0]
        with tf.control_dependencies([epoch]):
            return self._read_step(), epoch

    def _fill(self, are_due: list[Any]) -> list[Any]:
        """Put an item into each box that is due and empty."""
        filled = []
        for box, is_due in zip(self._boxes, are_due, strict=True):
            is_empty = raw.QueueSizeV2(handle=box) < 1
            # a batch of one or none: a branch for each box made graphs three times as slow to build
            num_items = tf.cast(is_empty & is_due, tf.int32)
            items = tf.fill([num_items], True)
            filled.append(raw.QueueEnqueueManyV2(handle=box, components=[items]))
        return filled

    def _locked(self, request: Any, body: Callable[..., Any]) -> Any:
        """What `body` returns, run under the table's lock.

        The lock is taken when the request has arrived, and released before anything is sent, so
        that no process can hold it while it is stopped. It is freed when the run ends, in any way.
        """
        arrived = tf.identity(request)
        with tf.control_dependencies([arrived]):
            lock = raw.MutexLock(mutex=self._mutex)
        with tf.control_dependencies([lock]):
            result = tf.identity(body(arrived))
        with tf.control_dependencies([result]):
            freed = raw.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([freed]):
            return tf.identity(result)
