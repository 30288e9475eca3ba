"""Messages between the processes of a cluster, which TensorFlow servers hold.

A description of the task that the server is, and a queue of the names of tasks whose training has
ended. Calls that are no coroutines block, perhaps for ever where a server does not answer: call
them in threads.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import tensorflow as tf

from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.threads import run_blocking
from ..._errors import ClusterError
from ..._version import version
from ..graph._default_graph import run_in_graph
from ._server import Heartbeat
from ._spec import differences

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_OPERATION_SECS = 3.0
"""After this time TensorFlow ends an operation on a server that does not answer."""
_PROBE_SECS = 2.0
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two checks of a ps that does not answer yet: nothing reports that it has started."""
_CHECK_SECS = 4.0
_PATIENCE_SECS = 5.0
"""After so long a warning is logged: the ps may not have been started."""


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
        self.close = self._session.close

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
        # without a listening server a session has no timeout
        Heartbeat(target, _PROBE_SECS).check()
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
    """Report to a ps that this task's training has ended; returns True (None means out of time).

    Raises:
        tf.errors.OpError: the server does not answer.
    """
    Heartbeat(target, _PROBE_SECS).check()
    with ServerSession(target, queue) as session:
        session.run(session.enqueue, name)
    return True


async def check_ps(
    name: str, ps: str, addresses: dict[str, str], max_wait_secs: float, until: float
) -> None:
    """Wait until a ps answers, and check that it was given the same cluster. Cancellation safe.

    Args:
        name: of this task.
        ps: the name of that one.
        addresses: name -> "host:port" of the cluster's tasks.
        max_wait_secs: seconds to wait for all ps together, for messages.
        until: the end of that time, on the engine's clock; one check is made in any case.

    Raises:
        ClusterError: it does not answer in time, is another task, is of another cluster, or runs
            another version of asynchooks.
    """
    engine = current_engine()
    target = f"grpc://{addresses[ps]}"
    pause = _FIRST_PAUSE_SECS
    begun = engine.now()
    warn_at = begun + _PATIENCE_SECS
    while True:
        cause: ClusterError | None = None
        latest = max(until, engine.now() + _CHECK_SECS)
        try:
            found = await run_blocking(
                engine, lambda: read_task(target), 0, "asynchooks-check", until=latest
            )
        except ClusterError as error:
            found, cause = None, error
        if found is not None:
            _compare(name, ps, addresses, json.loads(found))
            return
        problem = cause or f"the server at {target} does not answer"
        if engine.now() >= until:
            raise ClusterError(
                f"{name} waited for {ps} for max_wait_secs={max_wait_secs:g} s: {problem}; is it "
                "running?"
            ) from cause
        is_late = engine.now() >= warn_at
        logger.log(
            logging.WARNING if is_late else logging.INFO,
            "%s waits for %s, for %.0f s more at most: %s",
            name, ps, until - engine.now(), problem,
        )  # fmt: skip
        if is_late:
            warn_at = engine.now() + 2 * (warn_at - begun)
        await engine.park(Slot(engine, ps), min(until, engine.now() + pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def _compare(name: str, ps: str, addresses: dict[str, str], found: dict[str, Any]) -> None:
    there = found["task"]
    if found["cluster"] != addresses:
        raise ClusterError(
            f"{name} and the process at {addresses[ps]}, which is {there}, were given different "
            f"clusters: {differences(addresses, found['cluster'])}; give all processes the same"
        )
    if there != ps:
        raise ClusterError(f"{name} found {there} at {addresses[ps]}; start {ps} there")
    if found.get("version") != version():
        raise ClusterError(
            f"{ps} at {addresses[ps]} runs asynchooks {found.get('version')}, {name} "
            f"{version()}; install the same version for both"
        )
