"""Messages between the processes of a cluster, which TensorFlow servers hold.

A description of the task that the server is, and a queue of the names of tasks whose training has
ended. All calls block, perhaps for ever where a server does not answer: call them in threads.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..._errors import ClusterError
from ..graph._default_graph import run_in_graph
from ._server import Heartbeat

v1 = tf.compat.v1

_OPERATION_SECS = 3.0
"""After this time TensorFlow ends an operation on a server that does not answer."""
_PROBE_SECS = 2.0


class ServerSession:
    """A session on one server alone, which reads and writes its messages; `with` closes it.

    Args:
        target: the server's address, "grpc://host:port".
        queue: the name of the queue there, if it is used.
        may_wait: whether operations may take any time.
    """

    def __init__(self, target: str, queue: str = "", *, may_wait: bool = False) -> None:
        with tf.Graph().as_default() as graph:
            self.text = v1.placeholder(tf.string, [])
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.string, shape=[], shared_name="asynchooks/task"
            )
            self.write_task = tf.raw_ops.AssignVariableOp(resource=handle, value=self.text)
            self.read_task = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
            if queue:
                names = v1.FIFOQueue(-1, tf.string, shapes=[[]], shared_name=queue)
                self.dequeue = names.dequeue()
                self.enqueue = names.enqueue(self.text)
        # No remote task matches: else the session would wait for the server's whole cluster. Ops
        # without a device are the server's own then, whichever task it is.
        config = v1.ConfigProto(device_filters=["/job:none"])
        if not may_wait:
            config.operation_timeout_in_ms = int(1000 * _OPERATION_SECS)
        self._target = target
        self._session = v1.Session(target, graph=graph, config=config)

    def run(self, op: Any, text: str | None = None) -> Any:
        try:
            return run_in_graph(self._session, op, None if text is None else {self.text: text})
        except tf.errors.DeadlineExceededError as error:
            silence = f"the server at {self._target} has not answered for {_OPERATION_SECS:g} s"
            raise tf.errors.DeadlineExceededError(None, None, silence) from error

    def __enter__(self) -> ServerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()


def write_task(target: str, text: str) -> None:
    """Write the description of the task to a server of this process."""
    with ServerSession(target) as session:
        session.run(session.write_task, text)


def read_task(target: str) -> str:
    """The description of the task that the server is.

    Raises:
        ClusterError: the server does not answer, or was not started by a ClusterTask.
    """
    try:
        Heartbeat(
            target, _PROBE_SECS
        ).check()  # without a listening server a session has no timeout
        with ServerSession(target) as session:
            text: str = session.run(session.read_task).decode()
            return text
    except tf.errors.FailedPreconditionError as error:
        raise ClusterError(
            f"the server at {target} does not describe its task; start it through a ClusterTask"
        ) from error
    except tf.errors.OpError as error:
        raise ClusterError(error.message) from error


def write_end(target: str, queue: str, name: str) -> bool:
    """Tell a ps that this task's training has ended; True, because None means out of time.

    Raises:
        tf.errors.OpError: the server does not answer.
    """
    Heartbeat(target, _PROBE_SECS).check()
    with ServerSession(target, queue) as session:
        session.run(session.enqueue, name)
    return True
