"""Messages between the processes of a cluster, which TensorFlow servers hold.

A description of the task that the server is, and a queue of the names of tasks whose training has
ended. Calls that are no coroutines block, perhaps for ever where a server does not answer: call
them in threads.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import tensorflow as tf

from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.threads import LastingJob, Outcome, WorkThread, run_blocking
from ..._errors import ClusterError
from ..._version import __version__
from ..graph._default_graph import run_in_graph
from ._heartbeat import Heartbeat
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
_REPORT_SECS = 5.0
"""How long a process tries to report its end to each ps."""
_GRACE_SECS = 1.0


class ServerSession:
    """A session on one server alone, which reads and writes its messages; its maker closes it.

    The queue is that of `ps`, if given. With `may_wait` operations may take any time.
    """

    def __init__(self, target: str, ps: str = "", *, may_wait: bool = False) -> None:
        with tf.Graph().as_default() as graph:
            self.text = v1.placeholder(tf.string, [])
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.string, shape=[], shared_name="asynchooks/task"
            )
            self.write_task = tf.raw_ops.AssignVariableOp(resource=handle, value=self.text)
            self.read_task = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
            if ps:
                shared_name = f"asynchooks/done:{ps}"
                names = v1.FIFOQueue(-1, tf.string, shapes=[[]], shared_name=shared_name)
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

    def receive(self) -> str:
        """Block until there is a name in the queue, and take it."""
        name: str = self.run(self.dequeue).decode()
        return name

    def run(self, op: Any, text: str | None = None) -> Any:
        try:
            return run_in_graph(self._session, op, None if text is None else {self.text: text})
        except tf.errors.DeadlineExceededError as error:
            silence = f"the server at {self._target} has not answered for {_OPERATION_SECS:g} s"
            raise tf.errors.DeadlineExceededError(None, None, silence) from error


def write_task(target: str, text: str) -> None:
    """Write the description of the task to a server of this process."""
    with closing(ServerSession(target)) as session:
        session.run(session.write_task, text)


def read_task(target: str) -> str:
    """The task that the server is; ClusterError if it does not answer, or describes none."""
    try:
        # without a listening server a session has no timeout
        Heartbeat(target, _PROBE_SECS).check()
        with closing(ServerSession(target)) as session:
            text: str = session.run(session.read_task).decode()
            return text
    except tf.errors.FailedPreconditionError as error:
        raise ClusterError(
            f"the server at {target} does not describe its task; start it through a ClusterTask"
        ) from error
    except tf.errors.OpError as error:
        raise ClusterError(error.message) from error


async def check_ps(
    name: str, ps: str, addresses: dict[str, str], max_wait_secs: float, until: float
) -> None:
    """Wait until a ps answers, and check that it was given the same cluster. Cancellation safe.

    One check is made after `until`, too. Raises ClusterError if it does not answer in time, is
    another task, is of another cluster, or runs another version of asynchooks.
    """
    engine = current_engine()
    target = f"grpc://{addresses[ps]}"
    pause, patience, begun = _FIRST_PAUSE_SECS, _PATIENCE_SECS, engine.now()
    while True:
        problem: object = f"the server at {target} does not answer"
        cause: ClusterError | None = None
        latest = max(until, engine.now() + _CHECK_SECS)
        try:
            found = await run_blocking(
                engine, lambda: read_task(target), 0, "asynchooks-check", until=latest
            )
        except ClusterError as error:
            found, problem, cause = None, error, error
        if found is not None:
            _compare(name, ps, addresses, json.loads(found))
            return
        now = engine.now()
        if now >= until:
            raise ClusterError(
                f"{name} waited for {ps} for max_wait_secs={max_wait_secs:g} s: {problem}; is it "
                "running?"
            ) from cause
        is_late = now >= begun + patience
        text = "%s waits for %s, for %.0f s more at most: %s"
        logger.log(
            logging.WARNING if is_late else logging.INFO, text, name, ps, until - now, problem
        )
        if is_late:
            patience += 2 * (now - begun)
        await engine.park(Slot(engine, ps), min(until, now + pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def _compare(name: str, ps: str, addresses: dict[str, str], found: dict[str, Any]) -> None:
    at, there, version = addresses[ps], found["task"], found.get("version")
    if found["cluster"] != addresses:
        raise ClusterError(
            f"{name} and the process at {at}, which is {there}, were given different clusters: "
            f"{differences(addresses, found['cluster'])}; give all processes the same"
        )
    if there != ps:
        raise ClusterError(f"{name} found {there} at {at}; start {ps} there")
    if version != __version__:
        raise ClusterError(
            f"{ps} at {at} runs asynchooks {version}, {name} {__version__}; install the same "
            "version for both"
        )


async def report_end(name: str, targets: dict[str, str]) -> set[str]:
    """Report the end of this task's training to each ps, in 5 s; returns those that have it."""
    engine = current_engine()
    until = engine.now() + _REPORT_SECS
    reported: set[str] = set()

    async def report(ps: str, target: str) -> None:
        def send() -> bool:
            Heartbeat(target, _PROBE_SECS).check()
            with closing(ServerSession(target, ps)) as session:
                session.run(session.enqueue, name)
            return True  # None means out of time

        problem: object = "it does not answer"
        try:
            if await run_blocking(engine, send, 0, "asynchooks-end", until=until):
                reported.add(ps)
                return
        except Exception as error:  # TensorFlow's mostly; it would end in a task of its own
            problem = error  # a ps that has the message may end before its answer is here
        logger.info("%s could not report its end to %s: %s", name, ps, problem)

    # concurrently: a silent server does not use up the others' time
    tasks = [engine.start(report, *each) for each in targets.items()]
    try:
        for each in tasks:
            await each.wait()
    finally:
        for each in tasks:
            each.cancel()
    return reported


class EndOfTraining:
    """At a ps: the tasks that have reported their end, of those that train. Needs no close."""

    def __init__(self, name: str, trainers: set[str], chief: str) -> None:
        self._name, self._trainers, self._chief = name, trainers, chief
        self._ended: set[str] = set()
        self._chief_ended_at = math.inf
        self._is_awaited = False

    async def wait(self, start: Callable[[], str], linger_secs: float) -> None:
        """Suspend until training has ended, once `start` has; that blocks. Cancellation safe."""
        if self._is_awaited:
            raise RuntimeError(f"{self._name} is being served already; call serve() once")
        self._is_awaited = True
        engine = current_engine()
        thread = WorkThread(engine, "asynchooks-serve")
        session: ServerSession | None = None

        def open_session() -> ServerSession:
            return ServerSession(start(), self._name, may_wait=True)

        try:
            opened = session = await thread.run(open_session, _GRACE_SECS, _close_late)
            job: LastingJob | None = None
            while (until := self._ends_at(engine.now(), linger_secs)) > engine.now():
                job = job or thread.begin(lambda: self._ended.add(opened.receive()))
                if await job.wait(until):
                    job = None
        finally:
            self._is_awaited = False
            with engine.shielded(_GRACE_SECS):
                await run_blocking(engine, lambda: _end(thread, session), 0, "asynchooks-serve-end")

    def _ends_at(self, now: float, linger_secs: float) -> float:
        """When this ps ends, if no other end is reported before."""
        if self._chief in self._ended:
            self._chief_ended_at = min(self._chief_ended_at, now)
        missing = sorted(self._trainers - self._ended)
        if not missing:
            logger.info("Training has ended everywhere; %s ends", self._name)
            return now
        until = self._chief_ended_at + linger_secs
        if now >= until:
            text = "The chief ended %g s ago, and the end of %s was not reported; %s ends"
            logger.warning(text, linger_secs, ", ".join(missing), self._name)
        return until


def _end(thread: WorkThread, session: ServerSession | None) -> None:
    """End the thread: one within TensorFlow when the process exits may abort the process."""
    left = thread.drop()
    if session is not None:
        with suppress(tf.errors.OpError):
            session.run(session.enqueue, "")  # no one's name
    if left is not None:
        left.join(_GRACE_SECS)
    if session is not None:
        session.close()


def _close_late(outcome: Outcome) -> None:
    """Close a session that was made after its task had been cancelled."""
    if outcome.error is None:
        outcome.value.close()
