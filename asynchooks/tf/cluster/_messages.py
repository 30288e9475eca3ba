"""Messages between the processes of a cluster, which TensorFlow servers hold.

A description of the task that the server is, and a queue of the names of tasks whose training has
ended. Calls that are no coroutines block, perhaps for ever where a server does not answer: call
them in threads.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.threads import Outcome, run_blocking
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
    """A session on one server alone, which reads and writes its messages; `with` closes it.

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
    """The task that the server is; ClusterError if it does not answer, or describes none."""
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


async def check_ps(
    name: str, ps: str, addresses: dict[str, str], max_wait_secs: float, until: float
) -> None:
    """Wait until a ps answers, and check that it was given the same cluster. Cancellation safe.

    One check is made after `until`, too. Raises ClusterError if it does not answer in time, is
    another task, is of another cluster, or runs another version of asynchooks.
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
    if found.get("version") != __version__:
        raise ClusterError(
            f"{ps} at {addresses[ps]} runs asynchooks {found.get('version')}, {name} "
            f"{__version__}; install the same version for both"
        )


async def report_end(name: str, targets: dict[str, str]) -> set[str]:
    """Report the end of this task's training to each ps, in 5 s; returns those that have it."""
    engine = current_engine()
    until = engine.now() + _REPORT_SECS
    reported: set[str] = set()

    def send(ps: str) -> bool:
        Heartbeat(targets[ps], _PROBE_SECS).check()
        with ServerSession(targets[ps], ps) as session:
            session.run(session.enqueue, name)
        return True  # None means out of time

    async def report(ps: str) -> None:
        problem = "it does not answer"
        try:
            is_reported = await run_blocking(
                engine, lambda: send(ps), 0, "asynchooks-end", until=until
            )
        except Exception as error:  # TensorFlow's mostly; it would end in a task of its own
            # a ps that has the message may end before its answer is here
            is_reported, problem = False, str(error)
        if is_reported:
            reported.add(ps)
        else:
            logger.info("%s could not report its end to %s: %s", name, ps, problem)

    tasks = [engine.start(report, ps) for ps in targets]
    try:
        for each in tasks:  # concurrently: a silent server does not use up the others' time
            await each.wait(until + _GRACE_SECS)
    finally:
        for each in tasks:
            each.cancel()
    return reported


class EndOfTraining:
    """At a ps: the tasks that have reported their end, of those that train. Needs no close."""

    def __init__(self, name: str, trainers: set[str], chief: str) -> None:
        self._name = name
        self._trainers = trainers
        self._chief = chief
        self._ended: set[str] = set()
        self._chief_ended_at = math.inf
        self._is_awaited = False

    async def wait(self, start: Callable[[], str], linger_secs: float) -> None:
        """Suspend until training has ended, once `start` has; that blocks. Cancellation safe."""
        if self._is_awaited:
            raise RuntimeError(f"{self._name} is being served already; call serve() once")
        self._is_awaited = True
        engine = current_engine()
        receiver: _Receiver | None = None
        try:
            receiver = await run_blocking(
                engine,
                lambda: _Receiver(start(), self._name, self._ended),
                _GRACE_SECS,
                "asynchooks-start",
                _close_late,
            )
            while True:
                # the slot before the names are read: none is missed
                slot = receiver.slot = Slot(engine, "the end of training")
                if receiver.error is not None:
                    raise receiver.error
                now = engine.now()
                until = self._ends_at(now, linger_secs)
                if now >= until:
                    return
                await engine.park(slot, until)
        finally:
            self._is_awaited = False
            if receiver is not None:
                with engine.shielded(_GRACE_SECS):
                    await run_blocking(engine, receiver.close, 0, "asynchooks-serve-end")

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
            logger.warning(
                "The chief ended %g s ago, and the end of %s was not reported; %s ends",
                linger_secs, ", ".join(missing), self._name,
            )  # fmt: skip
        return until


class _Receiver:
    """Adds the reported ends to `ended`, in a thread. Making and closing it block for some ms."""

    def __init__(self, target: str, ps: str, ended: set[str]) -> None:
        self.error: BaseException | None = None
        self.slot: Slot | None = None  # is woken at the next name
        self._ended = ended
        self._is_closing = False
        self._session = ServerSession(target, ps, may_wait=True)
        self._thread = threading.Thread(target=self._receive, name="asynchooks-serve", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while self.error is None and not self._is_closing:
            try:
                # "" is sent by `close`
                self._ended.add(self._session.run(self._session.dequeue).decode())
            except BaseException as error:
                self.error = error
            if self.slot is not None:
                self.slot.wake()

    def close(self) -> None:
        """End the thread: one within TensorFlow when the process exits may abort the process."""
        self._is_closing = True
        with suppress(tf.errors.OpError):
            self._session.run(self._session.enqueue, "")
        self._thread.join(_GRACE_SECS)
        self._session.close()


def _close_late(outcome: Outcome) -> None:
    """Close a receiver that was created after its task had been cancelled."""
    if outcome.error is None:
        outcome.value.close()
