"""What processes of a cluster leave for each other at a TensorFlow server, and take from there.

A notice, which says who serves there, and a queue of the names of those whose training has ended.
All calls block, and where a server has fallen silent perhaps for ever: they belong into threads.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._errors import ClusterError
from ._server import Heartbeat

v1 = tf.compat.v1

_OPERATION_SECS = 3.0
"""After this time TensorFlow gives up an operation on a server that does not answer."""
_PROBE_SECS = 2.0


class BoardSession:
    """A session that runs at one server alone, with what is shared there; `with` closes it.

    Args:
        target: the server's address, "grpc://host:port".
        queue: the name of the queue there, if it is needed.
        may_wait: whether operations may take as long as they like.
    """

    def __init__(self, target: str, queue: str = "", *, may_wait: bool = False) -> None:
        with tf.Graph().as_default() as graph:
            self.text = v1.placeholder(tf.string, [])
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.string, shape=[], shared_name="asynchooks/notice"
            )
            self.write_notice = tf.raw_ops.AssignVariableOp(resource=handle, value=self.text)
            self.read_notice = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
            if queue:
                names = v1.FIFOQueue(-1, tf.string, shapes=[[]], shared_name=queue)
                self.dequeue = names.dequeue()
                self.enqueue = names.enqueue(self.text)
        # No remote task matches: else the session would wait for all of the server's cluster. Ops
        # without a device are the server's own then, whatever task it takes itself for.
        config = v1.ConfigProto(device_filters=["/job:none"])
        if not may_wait:
            config.operation_timeout_in_ms = int(1000 * _OPERATION_SECS)
        self._target = target
        self._session = v1.Session(target, graph=graph, config=config)

    def run(self, op: Any, text: str | None = None) -> Any:
        try:
            return self._session.run(op, None if text is None else {self.text: text})
        except tf.errors.DeadlineExceededError as error:
            silence = f"the server at {self._target} has not answered for {_OPERATION_SECS:g} s"
            raise tf.errors.DeadlineExceededError(None, None, silence) from error

    def __enter__(self) -> BoardSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()


def write_notice(target: str, text: str) -> None:
    """Say at a server of this process who it is."""
    with BoardSession(target) as session:
        session.run(session.write_notice, text)


def read_notice(target: str) -> str:
    """What the server there says who it is.

    Raises:
        ClusterError: nobody answers, or it is no server that a ClusterTask started.
    """
    try:
        Heartbeat(target, _PROBE_SECS).check()  # where nobody listens, a session has no timeout
        with BoardSession(target) as session:
            text: str = session.run(session.read_notice).decode()
            return text
    except tf.errors.FailedPreconditionError as error:
        raise ClusterError(
            f"the server at {target} has not said which task it is; start it through a ClusterTask"
        ) from error
    except tf.errors.OpError as error:
        raise ClusterError(error.message) from error


def tell_end(target: str, queue: str, name: str) -> bool:
    """Say to a ps that this task's training has ended; True, because None means out of time.

    Raises:
        tf.errors.OpError: nobody answers.
    """
    Heartbeat(target, _PROBE_SECS).check()
    with BoardSession(target, queue) as session:
        session.run(session.enqueue, name)
    return True
