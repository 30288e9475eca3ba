"""The leases by which sessions hold a graph, and the server that it is run on."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import Engine, Slot, current_engine
from .._errors import LateVariableError
from .._global_step import GlobalStep, GlobalStepStatistics
from .._raw_session import RawSession
from .._runner import is_async
from .._session_creator import Lease
from .._stop import EndsAtStop, Loss
from .._work_thread import Outcome, run_blocking
from ._board_link import Notice
from ._cluster_server import Servers
from ._coordinator import GraphCoordinator
from ._graph import Driven, entered_graph
from ._graph_session import GraphSession
from ._graph_state import GraphState, step_name
from ._notices import Notices
from ._owners import Owners
from ._server import Heartbeat, Server

if TYPE_CHECKING:
    from ._creators import ChiefSessionCreator, WorkerSessionCreator

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_PATIENCE_SECS = 1.0
"""How long a session that opens on a graph waits for the runs that are under way there."""
_TURN_SECS = 30.0
"""How long one is made beside nobody else's, once the server answers again."""


class GraphLease(Lease):
    """A hold on a graph: finalized while it is run, as it was before when the last one ends."""

    _is_chief = True
    creator: ChiefSessionCreator | WorkerSessionCreator

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
        self._state = GraphState.of(graph)
        self._is_complete = False  # the Scaffold has added what it needs
        self._is_on_board = False
        self._num_openings = 0  # by the sessions that share this
        self._turn = threading.Lock()
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
        self._num_openings += 1
        async with state.lock:
            if not self.graph.finalized or state.was_finalized:
                yield
                await self._finalize(engine, grace_secs)
                return
            # The graph is being run. New ops are fine beside running threads, yet a run that
            # mixes old and new is not; new variables nobody would initialise.
            with await self._alone_or_not():
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

    async def _alone_or_not(self) -> ExitStack:
        """The gate's exclusive side, unless runs do not end: they may wait for who opens here."""
        stack = ExitStack()
        try:
            release = await self.global_step.take_exclusive(timeout=_PATIENCE_SECS)
            stack.callback(release)
        except TimeoutError:
            logger.info("A session opens beside runs that are under way: %r", self.global_step)
        return stack

    async def _finalize(self, engine: Engine, grace_secs: float) -> None:
        """Have TensorFlow's Scaffold add what it needs; a large model takes a while."""
        if not self._is_complete:
            name = "asynchooks-finalize"
            await run_blocking(engine, lambda: self.call(self._complete), grace_secs, name)
            self._is_complete = True
        self.graph.finalize()

    def _complete(self) -> None:
        self._scaffold.finalize()
        step = v1.train.get_global_step() if self._server is not None else None
        if step is None or self._state.notices is not None:
            return
        if self.graph.finalized:
            self.graph._unsafe_unfinalize()
        self._state.notices = Notices(self.graph, step)

    def _variables(self) -> list[Any]:
        keys = v1.GraphKeys
        locals_ = self.graph.get_collection(keys.LOCAL_VARIABLES)
        return [*locals_, *self.graph.get_collection(keys.GLOBAL_VARIABLES)]

    async def _create(self, engine: Engine, grace_secs: float) -> tuple[RawSession, int]:
        heartbeat = None
        if self._server is not None:
            master = self._server.master
            heartbeat = Heartbeat(master, self._heartbeat_secs, Servers.ps_of(master))
            await run_blocking(engine, heartbeat.check, grace_secs, "asynchooks-heartbeat")
            heartbeat.start()
        loss = None if heartbeat is None else heartbeat.loss
        make = self.creator.create_session
        is_late = threading.Event()
        try:
            if is_async(make):
                session = await self.drive(make(), lambda: "create_session")
                make = partial(_itself, session)
            created: tuple[RawSession, int] = await run_blocking(
                engine,
                lambda: self._wrap(make, heartbeat, is_late),
                grace_secs,
                "asynchooks-create",
                _close_late,
                loss=loss,
            )
        except BaseException:
            is_late.set()
            if heartbeat is not None:
                heartbeat.stop()
            raise
        if self._server is not None and heartbeat is not None:
            # only now: what the board then finds lost may be the server before
            self._server.add_heartbeat(heartbeat)
        self._join_board()
        return created

    def _wrap(
        self, make: Callable[[], Any], heartbeat: Heartbeat | None, is_late: threading.Event
    ) -> tuple[RawSession, int]:
        """Make the session, in a thread; returns it with the step where it begins."""
        raw: GraphSession | None = None
        server, notices = self._server, self._state.notices
        # an earlier try, left behind in a silence, may restore the model yet: never beside this one
        has_turn = server is not None and self._turn.acquire(timeout=_TURN_SECS)
        try:
            if is_late.is_set():
                raise tf.errors.CancelledError(None, None, "nobody waits for this session")
            raw = GraphSession(self.call(make), heartbeat, server, notices)
            if server is not None and notices is not None:
                self._tell_board(raw.exposed, server, notices)
            return raw, raw.read_step() or 0
        except BaseException as error:
            if raw is not None:
                raw.close()
            # A session that failed on the way would be collected with these frames, on the event
            # loop perhaps; where nobody answers, that blocks for ever.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if has_turn:
                self._turn.release()

    def _tell_board(self, session: Any, server: Server, notices: Notices) -> None:
        session.run(notices.prepare)
        if not self._is_chief:
            if not server.note(Notice.of(session.run(notices.now)), begins=True):
                raise tf.errors.DeadlineExceededError(None, None, "its chief has not said so")
            return
        # It has initialised or restored the model: the step may have gone back, and others must
        # hear of it.
        said = session.run(notices.begin_epoch, {notices.known_epoch: server.epoch})
        notice = Notice.of(said)
        server.note(notice, begins=True)
        if not notices.is_large_enough(notice.num_taken):
            notices.grow(notice.num_taken)
            session.run(notices.ring_all)
        session.run(notices.say_ready)

    def _join_board(self) -> None:
        server, notices = self._server, self._state.notices
        if server is None:
            return
        if notices is not None and not self._is_on_board:
            self._is_on_board = True
            owners = Owners(*Servers.cluster_of(server.master))
            server.join_board(notices, self.creator.config, owners, self._heartbeat_secs)
        if self._is_chief:
            server.note_chief(self, has_come=True)

    def _start_from(self, value: int, known: GlobalStepStatistics) -> None:
        if self._server is None:
            super()._start_from(value, known)
        elif not self._server.epoch and value < known.value:
            # it has restarted, and its chief, which is not one of ours, says nothing
            self.global_step.restart(value)
        else:  # in a new epoch the board has told the step already
            self.global_step.publish(value, epoch=known.epoch)

    def close(self) -> None:
        self._num_openings -= 1
        if self._server is not None and self._num_openings == 0:
            if self._is_on_board:
                self._is_on_board = False
                self._server.leave_board()
            if self._is_chief:
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
        if raw.loss is not None:
            coord.start_soon(_report_loss, raw.loss, coord)

    def new_coordinator(self) -> Coordinator:
        return GraphCoordinator(clean_stop_exception_types=())


async def _report_loss(loss: Loss, coord: Coordinator) -> None:
    """A side task: have the session recreated also when no run is under way, but waits are."""
    slot = Slot(current_engine(), "the loss of the server")
    with EndsAtStop(slot, loss):
        await slot.engine.park(slot)
    if loss.is_set and not coord.joined:
        coord.request_stop(loss.error())


def _itself(value: Any) -> Any:
    return value


def _close_late(outcome: Outcome) -> None:
    """A session that came after its task was cancelled belongs to nobody."""
    if outcome.error is None:
        outcome.value[0].close()
