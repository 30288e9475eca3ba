"""Handles: the holds of sessions on a graph and its server; and the base of their creators."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from ..._check import instance, seconds
from ..._engine.base import Engine, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, LostPeer
from ..._engine.sync import Lock
from ..._engine.threads import Outcome, close_unrun, is_async, run_blocking
from ..._errors import add_note, is_preemption
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ...backends._creator import SessionCreator, SessionHandle
from ...backends._raw_session import RawSession
from ..cluster._heartbeat import Heartbeat
from ..cluster._publishing import Publishing
from ..cluster._server import Server
from ._default_graph import Driven, entered_graph, entering, step_name
from ._session import GraphCoordinator, GraphSession

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_TURN_SECS = 30.0
"""How long a session that is being created waits for an earlier attempt to end."""
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.25, 10.0
"""Between a worker's attempts to find its model ready."""


def _check_init_fn(scaffold: Any) -> None:
    """Have it raise TypeError where its `init_fn` is a coroutine, which TensorFlow would drop."""
    init_fn = scaffold.init_fn
    if init_fn is None:
        return

    def call(session: Any) -> None:
        result = init_fn(session)
        close_unrun(result)
        if isinstance(result, Awaitable):
            raise TypeError(
                f"init_fn of the Scaffold returned {result!r}, and would never be run: TensorFlow "
                "calls it in a thread, and awaits nothing. Give a plain function, or await it in "
                "after_create_session of a hook"
            )

    scaffold._init_fn = call


class GraphSessionCreator(SessionCreator):
    """The common base of the creators of TensorFlow sessions: scaffold, server, graph."""

    is_default = False  # whether the session was given no creator
    max_wait_secs: float  # of workers alone
    is_chief: bool  # whether it initialises the model, or waits until another has

    def _set_up(self, scaffold: Any, master: str, config: Any, heartbeat_secs: float) -> None:
        scaffold = v1.train.Scaffold() if scaffold is None else scaffold
        expected = (
            "a tf.compat.v1.train.Scaffold, or None (a directory is given as checkpoint_dir=...)"
        )
        self.scaffold: Any = instance("scaffold", scaffold, v1.train.Scaffold, expected)
        self.master = instance(
            "master", master, str, 'the address of a server ("grpc://host:port"), or ""'
        )
        if ":" in master and "://" not in master:
            raise ValueError(f'master is {master!r}; give the protocol, too: "grpc://{master}"')
        self.config = config
        self.heartbeat_secs = seconds("heartbeat_secs", heartbeat_secs)
        _check_init_fn(self.scaffold)
        self._made_in = entered_graph()

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        graph = entered_graph() or self._made_in or v1.get_default_graph()
        server = Server.at(self.master, step_name(graph))
        return GraphHandle(self, graph, server, num_workers)


class GraphState:
    """State that all sessions on one graph share; an attribute of the graph."""

    def __init__(self) -> None:
        self.lock = Lock("the graph")  # held while a session opens on it
        self.num_users = 0
        self.was_finalized = False
        self.publishing: dict[int | None, Publishing] = {}  # by the task that runs the graph

    @classmethod
    def of(cls, graph: tf.Graph) -> GraphState:
        state: GraphState | None = getattr(graph, "_asynchooks_state", None)
        if state is None:
            state = graph._asynchooks_state = cls()
        return state


class GraphHandle(SessionHandle):
    """A hold on a graph: finalized while it is run, and as before when the last one ends."""

    creator: GraphSessionCreator
    coordinator_type = GraphCoordinator

    def __init__(
        self,
        creator: GraphSessionCreator,
        graph: tf.Graph,
        server: Server | None,
        num_workers: int | None,
    ) -> None:
        step = GlobalStep(num_workers=num_workers, name=step_name(graph))
        super().__init__(creator, step if server is None else server.global_step)
        self.graph = graph
        self._server = server
        self._state = GraphState.of(graph)
        self._is_complete = False  # the Scaffold has added what it needs
        self._publishing: Publishing | None = None
        self._turn = threading.Lock()
        self._known_epoch = 0  # before the raw session was made

    def _check_not_empty(self, cause: KeyError | None = None) -> None:
        """Raise RuntimeError if the session was given no creator, and has nothing to run."""
        if self.creator.is_default and not self.graph.version:
            raise RuntimeError(
                "MonitoredSession got no session_creator. To train a step function, give it one: "
                "MonitoredSession(hooks, step). To train a TensorFlow "
                "graph, build it first and make the session inside `with graph.as_default():`; the "
                f"default graph here, {self.graph!r}, has no operations"
            ) from cause

    def has_global_step(self) -> bool:
        self._check_not_empty()
        with self.graph.as_default():
            return v1.train.get_global_step() is not None

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        state = self._state
        if state.num_users == 0:
            state.was_finalized = self.graph.finalized
        state.num_users += 1
        if self._server is not None:
            self._server.enter()
        async with state.lock:
            try:
                yield
                self._check_not_empty()
                await self._finalize()
            except KeyError as error:  # of a name that a hook looks up in the graph
                self._check_not_empty(error)
                raise
            except RuntimeError as error:
                if "Graph is finalized" in str(error) and not state.was_finalized:
                    add_note(
                        error,
                        "another session runs this graph already: where `begin` of a hook adds to "
                        "it, open that session first, or add it when the graph is built",
                    )
                raise

    async def _finalize(self) -> None:
        """Complete the Scaffold and finalize the graph; a large model takes a while."""
        if not self._is_complete:
            name = "asynchooks-finalize"
            engine, complete = current_engine(), partial(self.call, self._complete)
            await run_blocking(engine, complete, self.grace_secs, name)
            self._is_complete = True
        self.graph.finalize()

    def _complete(self) -> None:
        self.creator.scaffold.finalize()
        step = v1.train.get_global_step()
        if self._server is None or step is None:
            return
        known, number = self._state.publishing, self._server.number
        if number not in known:
            if self.graph.finalized:  # by its Scaffold
                self.graph._unsafe_unfinalize()
            known[number] = Publishing(step, len(self._server.names), number)
        self._publishing = known[number]

    async def _create(self) -> tuple[RawSession, int]:
        engine, self._known_epoch = current_engine(), self.global_step.epoch
        if self.creator.is_chief:
            created = await self._create_now(engine)
            if self._server is not None:
                self._server.wake_workers()
            return created
        # a worker waits until the chief has initialised the model
        master, max_wait_secs = self.creator.master, self.creator.max_wait_secs
        waiting = set() if self._server is None else self._server.waiting
        deadline = engine.now() + max_wait_secs
        pause = _FIRST_PAUSE_SECS
        while True:
            slot = Slot(engine, f"a chief on {master!r}")
            waiting.add(slot)  # before the attempt: no chief is missed
            try:
                try:
                    return await self._create_now(engine)
                except tf.errors.OpError as error:
                    is_late = isinstance(error, tf.errors.DeadlineExceededError)
                    if not (is_late or is_preemption(error)):
                        raise
                    reason, cause = "it is not initialised" if is_late else error.message, error
                if engine.now() >= deadline:
                    raise tf.errors.DeadlineExceededError(
                        None,
                        None,
                        f"the model on {master!r} was not ready after waiting for "
                        f"max_wait_secs={max_wait_secs:g} s: {reason}; is its chief running?",
                    ) from cause
                until = min(deadline, engine.now() + pause)
                if self._server is None:
                    logger.warning(
                        "A worker with master=%r waits for its model, but no chief can initialise "
                        "a session within this process; give the address of the chief's server",
                        master,
                    )
                text = "Waiting for model to be ready on %r; next attempt in at most %.2g s: %s"
                logger.info(text, master, until - engine.now(), reason)
                await engine.park(slot, until)
            finally:
                waiting.discard(slot)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    async def _create_now(self, engine: Engine) -> tuple[RawSession, int]:
        heartbeat: Heartbeat | None = None
        lost_peer: LostPeer | None = None
        if self._server is not None:
            master = self._server.master
            heartbeat = Heartbeat(master, self.creator.heartbeat_secs, self._server.ps)
            lost_peer = heartbeat.lost_peer
            await run_blocking(engine, heartbeat.check, self.grace_secs, "asynchooks-heartbeat")
            heartbeat.start()
        make = self.creator.create_session
        is_late = threading.Event()
        try:
            if is_async(make):
                session = await self.in_session_context(make())
                make = lambda: session  # noqa: E731
            created: tuple[RawSession, int] = await run_blocking(
                engine,
                lambda: self._wrap(make, heartbeat, is_late),
                self.grace_secs,
                "asynchooks-create",
                _close_late,
                lost_peer=lost_peer,
            )
        except BaseException:
            is_late.set()
            if heartbeat is not None:
                heartbeat.stop()
            raise
        if self._server is not None and heartbeat is not None:
            # only now: the table that was lost may be that of the server before
            self._server.join(heartbeat, self._publishing, self.creator.config)
        return created

    def _wrap(
        self, make: Callable[[], Any], heartbeat: Heartbeat | None, is_late: threading.Event
    ) -> tuple[RawSession, int]:
        """Make the session, in a thread; returns it with its first step."""
        raw: GraphSession | None = None
        server = self._server
        # an earlier attempt, abandoned while the server was silent, may still restore the model
        has_turn = server is not None and self._turn.acquire(timeout=_TURN_SECS)
        try:
            if is_late.is_set():
                raise tf.errors.CancelledError(
                    None, None, "the session that was created is not needed any more"
                )
            raw = GraphSession(self.call(make), heartbeat, server, self._publishing)
            if raw.publisher is not None:
                raw.publisher.announce(is_chief=self.creator.is_chief)
            step = raw.read_step() or 0
        except BaseException as error:
            if raw is not None:
                raw.close()
            # Else a session that failed would be collected with these frames, perhaps on the event
            # loop; on a server that does not answer that blocks for ever.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if has_turn:
                self._turn.release()
        return raw, step

    def _start_from(self, value: int, *, is_restart: bool) -> None:
        if self._server is None:
            super()._start_from(value, is_restart=is_restart)
        else:  # in a new epoch the step has come with the news
            self.global_step.publish(value, epoch=self._known_epoch)

    def close(self) -> None:
        if self._server is not None:
            self._server.leave()
        self._state.num_users -= 1
        if self._state.num_users == 0 and not self._state.was_finalized and self.graph.finalized:
            self.graph._unsafe_unfinalize()

    def in_session_context(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return Driven(coroutine, self.graph)

    def call(self, fn: Callable[[], Any]) -> Any:
        with entering(self.graph):
            return fn()

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        with self.graph.as_default():
            if self.graph.get_collection(v1.GraphKeys.QUEUE_RUNNERS):
                v1.train.start_queue_runners(sess=raw.exposed, coord=coord)
        if raw.lost_peer is not None:
            coord.start_soon(_report_lost_peer, raw.lost_peer, coord)


async def _report_lost_peer(lost_peer: LostPeer, coord: Coordinator) -> None:
    """A side task: has the session recreated also while tasks wait and no run is under way."""
    slot = Slot(current_engine(), "a failure of the server")
    with EndsAtStop(slot, lost_peer):
        await slot.engine.park(slot)
    if lost_peer.is_set and not coord.joined:
        coord.request_stop(lost_peer.error_now())


def _close_late(outcome: Outcome) -> None:
    """Close a session that was created after its task had been cancelled."""
    if outcome.error is None:
        outcome.value[0].close()
