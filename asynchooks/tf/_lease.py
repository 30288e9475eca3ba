"""The leases by which sessions hold a graph, and the server that it is run on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import Engine
from .._errors import LateVariableError
from .._global_step import GlobalStep
from .._lock import Lock
from .._raw_session import Lease, RawSession
from .._runner import Outcome, run_blocking
from ._coordinator import GraphCoordinator
from ._graph import Driven, entered_graph
from ._graph_session import GraphSession
from ._server import Heartbeat, Server

if TYPE_CHECKING:
    from ._creators import ChiefSessionCreator, WorkerSessionCreator

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_FOLLOW_SECS, _LONGEST_FOLLOW_SECS = 0.05, 0.5
"""Between looks at a step that another process may move, while somebody waits for it."""


def step_name(graph: tf.Graph) -> str:
    """What the graph calls its global step."""
    with graph.as_default():
        step = v1.train.get_global_step()
    return "global_step" if step is None else step.op.name


class _GraphState:
    """What all sessions on one graph share; it is kept at the graph."""

    def __init__(self) -> None:
        self.lock = Lock("the graph")  # whoever changes it
        self.num_users = 0
        self.was_finalized = False

    @classmethod
    def of(cls, graph: tf.Graph) -> _GraphState:
        state: _GraphState | None = getattr(graph, "_asynchooks_state", None)
        if state is None:
            state = graph._asynchooks_state = cls()
        return state


class GraphLease(Lease):
    """A hold on a graph: finalized while it is run, as it was before when the last one ends."""

    _is_chief = True

    def __init__(
        self,
        creator: ChiefSessionCreator | WorkerSessionCreator,
        graph: tf.Graph,
        server: Server | None,
        num_workers: int | None,
    ) -> None:
        step = GlobalStep(num_workers=num_workers, name=step_name(graph))
        super().__init__(creator, step if server is None else server.global_step)
        self.graph = graph
        self._server = server
        self._scaffold = creator.scaffold
        self._heartbeat_secs = creator.heartbeat_secs
        self._state = _GraphState.of(graph)
        self._is_complete = False  # the Scaffold has added what it needs
        if server is not None and self._is_chief:
            server.expect_chief(self)

    @property
    def has_global_step(self) -> bool:
        with self.graph.as_default():
            return v1.train.get_global_step() is not None

    @asynccontextmanager
    async def opening(self, engine: Engine, grace_secs: float) -> AsyncIterator[None]:
        state = self._state
        if state.num_users == 0:
            state.was_finalized = self.graph.finalized
        state.num_users += 1
        async with state.lock:
            if not self.graph.finalized or state.was_finalized:
                yield
                await self._finalize(engine, grace_secs)
                return
            # The graph is being run. New ops are fine beside running threads, yet a run that
            # mixes old and new is not; new variables nobody would initialise.
            async with self.global_step.exclusive():
                variables = len(self._variables())
                self.graph._unsafe_unfinalize()
                try:
                    yield
                    await self._finalize(engine, grace_secs)
                finally:
                    self.graph.finalize()
            if len(self._variables()) > variables:
                late = ", ".join(each.name for each in self._variables()[variables:])
                raise LateVariableError(
                    f"begin of a hook added {late} to a graph that is being run already, where "
                    "nothing would initialise it; create variables before the first session opens"
                )

    async def _finalize(self, engine: Engine, grace_secs: float) -> None:
        """Have TensorFlow's Scaffold add what it needs; a large model takes a while."""
        if not self._is_complete:
            finalize = self._scaffold.finalize
            name = "asynchooks-finalize"
            await run_blocking(engine, lambda: self.call(finalize), grace_secs, name)
            self._is_complete = True
        self.graph.finalize()

    def _variables(self) -> list[Any]:
        keys = v1.GraphKeys
        locals_ = self.graph.get_collection(keys.LOCAL_VARIABLES)
        return [*locals_, *self.graph.get_collection(keys.GLOBAL_VARIABLES)]

    async def _create(self, engine: Engine, grace_secs: float) -> tuple[RawSession, int]:
        if inspect.iscoroutinefunction(self.creator.create_session):
            session = await self.drive(self.creator.create_session(), lambda: "create_session")
            return self._wrap(session, None)
        heartbeat = None
        if self._server is not None:
            heartbeat = Heartbeat(self._server.master, self._heartbeat_secs)
            await run_blocking(engine, heartbeat.check, grace_secs, "asynchooks-heartbeat")
            heartbeat.start()
        try:
            created: tuple[RawSession, int] = await run_blocking(
                engine,
                lambda: self._wrap(self.call(self.creator.create_session), heartbeat),
                grace_secs,
                "asynchooks-create",
                _close_late,
                loss=None if heartbeat is None else heartbeat.loss,
            )
        except BaseException:
            if heartbeat is not None:
                heartbeat.stop()
            raise
        if self._server is not None and self._is_chief:
            self._server.note_chief(self, has_come=True)
        return created

    def _wrap(self, session: Any, heartbeat: Heartbeat | None) -> tuple[RawSession, int]:
        raw = GraphSession(session, heartbeat)
        try:
            return raw, raw.read_step() or 0
        except BaseException:
            raw.close()
            raise

    async def _start_from(self, value: int, raw: RawSession) -> None:
        if self._server is None:
            await super()._start_from(value, raw)
            return
        # other sessions move this step, too: below it lies what was read too early, or the step
        # of a server that has restarted
        step = self.global_step
        if value < step.value:
            async with step.exclusive():
                value = await raw.call_blocking(raw.read_step) or 0
                if value < step.value:
                    step.restart(value)
        step.publish(value)

    def close(self) -> None:
        if self._server is not None and self._is_chief:
            self._server.note_chief(self, has_come=False)
        self._state.num_users -= 1
        if self._state.num_users == 0 and not self._state.was_finalized and self.graph.finalized:
            self.graph._unsafe_unfinalize()

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        return Driven(coroutine, self.graph, culprit)

    def call(self, fn: Callable[[], Any]) -> Any:
        if entered_graph() is self.graph:
            return fn()
        with self.graph.as_default():
            return fn()

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        with self.graph.as_default():
            if self.graph.get_collection(v1.GraphKeys.QUEUE_RUNNERS):
                v1.train.start_queue_runners(sess=raw.exposed, coord=coord)
        if self._server is not None:
            coord.start_soon(self._follow, raw, coord)

    async def _follow(self, raw: RawSession, coord: Coordinator) -> None:
        """Publish steps that other processes make, as long as somebody waits for one."""
        pause = _FOLLOW_SECS
        while not await coord.wait_stopped(pause):
            before = self.global_step.value
            if self.global_step.statistics().tasks_waiting_for_step:
                epoch = self.global_step.epoch
                step = await raw.call_blocking(raw.read_step)
                if step is not None:
                    self.global_step.publish(step, epoch=epoch)
            has_moved = self.global_step.value > before
            pause = _FOLLOW_SECS if has_moved else min(2 * pause, _LONGEST_FOLLOW_SECS)

    def new_coordinator(self) -> Coordinator:
        return GraphCoordinator(clean_stop_exception_types=())


def _close_late(outcome: Outcome) -> None:
    """A session that came after its task was cancelled belongs to nobody."""
    if outcome.error is None:
        outcome.value[0].close()
