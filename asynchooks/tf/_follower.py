"""Follower: steps that other processes make, brought to those who wait for one here.

A server's variable tells nobody that it has moved: it must be read.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import Engine, EngineTask, Slot, current_engine
from .._errors import is_preemption
from .._raw_session import RawSession
from .._session_creator import close_raw
from .._work_thread import run_blocking
from ._graph_session import GraphSession
from ._server import Heartbeat, Server

_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 0.5
"""Between looks at the step, while somebody waits for it."""
_GRACE_SECS = 1.0


class Follower:
    """Publishes a server's global step as long as somebody waits for it. A lease owns it.

    Args:
        server: where the step is read; its `global_step` is where to publish it.
        graph: the graph with the variable.
        config, heartbeat_secs: as for the creator of its sessions.
    """

    def __init__(self, server: Server, graph: tf.Graph, config: Any, heartbeat_secs: float) -> None:
        self._server = server
        self._step = server.global_step
        self._graph = graph
        self._master = server.master
        self._config = config
        self._heartbeat_secs = heartbeat_secs
        self._alone: EngineTask | None = None

    async def follow(self, raw: RawSession, coord: Coordinator) -> None:
        """Read through a session's raw session; a side task of its coordinator.

        Raises:
            tf.errors.OpError: the raw session is lost: the session's runs are made again.
        """
        pause = _PAUSE_SECS
        while not await coord.wait_stopped(pause):
            before, now = self._step.value, current_engine().now()
            if self._is_awaited and now >= self._server.last_look + pause:
                self._server.last_look = now  # the others who come now need not look
                try:
                    await self._look(raw)
                except tf.errors.OpError as error:
                    if is_preemption(error):  # waits beside the runs outlast the raw session
                        self._alone = current_engine().start(self._follow_alone)
                    raise
            has_moved = self._step.value > before
            pause = _PAUSE_SECS if has_moved else min(2 * pause, _LONGEST_PAUSE_SECS)

    def stop(self) -> None:
        """There is a raw session again, or nobody waits any more."""
        if self._alone is not None:
            self._alone.cancel()

    @property
    def _is_awaited(self) -> bool:
        return self._step.statistics().tasks_waiting_for_step > 0

    async def _look(self, raw: RawSession) -> None:
        epoch = self._step.epoch
        step = await raw.call_blocking(raw.read_step)
        if step is not None:
            self._step.publish(step, epoch=epoch)

    async def _follow_alone(self) -> None:
        """Read through sessions of its own, one after the other as they are lost."""
        engine = current_engine()
        reader: RawSession | None = None
        try:
            while True:
                look = Slot(engine, f"the next look at {self._step.name}")
                await engine.park(look, engine.now() + _LONGEST_PAUSE_SECS)
                if not self._is_awaited:
                    continue
                try:
                    reader = reader or await self._open(engine)
                    await self._look(reader)
                except tf.errors.OpError:  # it is not there again, or not initialised
                    lost, reader = reader, None
                    if lost is not None:
                        await close_raw(lost, engine, _GRACE_SECS)
        finally:
            if reader is not None:
                engine.start(close_raw, reader, engine, _GRACE_SECS)

    async def _open(self, engine: Engine) -> RawSession:
        heartbeat = Heartbeat(self._master, self._heartbeat_secs)
        await run_blocking(engine, heartbeat.check, _GRACE_SECS, "asynchooks-heartbeat")

        def open_session() -> RawSession:
            session = tf.compat.v1.Session(self._master, graph=self._graph, config=self._config)
            return GraphSession(session, heartbeat)

        heartbeat.start()
        try:
            reader: RawSession = await run_blocking(
                engine, open_session, _GRACE_SECS, "asynchooks-follow", loss=heartbeat.loss
            )
        except BaseException:
            heartbeat.stop()
            raise
        return reader
