"""Creators of TensorFlow sessions, and the lease by which sessions hold a graph."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import tensorflow as tf

from .._coordinator import Coordinator
from .._engine import Engine
from .._errors import LateVariableError
from .._global_step import GlobalStep
from .._lock import Lock
from .._raw_session import Lease, RawSession, SessionCreator
from .._runner import Outcome, run_blocking
from ._coordinator import GraphCoordinator
from ._graph import Driven, entered_graph
from ._graph_session import GraphSession


class ChiefSessionCreator(tf.compat.v1.train.ChiefSessionCreator, SessionCreator):  # type: ignore[misc]
    """Makes TensorFlow sessions that are initialised, or restored from the newest checkpoint.

    TensorFlow's own Scaffold and SessionManager do both, in a thread. The graph is the one that is
    the default when the `MonitoredSession` is made, or else when this creator is.

    Args:
        scaffold: a `tf.compat.v1.train.Scaffold`; None makes one from the graph's collections.
        master: the address of a TensorFlow server; "" runs in this process.
        config: a `tf.compat.v1.ConfigProto`.
        checkpoint_dir: where to look for the newest checkpoint.
        checkpoint_filename_with_path: a checkpoint to restore instead.

    Raises:
        TypeError: `scaffold` is no Scaffold.
        RuntimeError: when opening: the model is not ready after initialisation.
        tf.errors.OpError: when opening: what TensorFlow says.

    Example:
        with tf.Graph().as_default():
            train_op = build_model()
            session = MonitoredSession(hooks, ChiefSessionCreator(checkpoint_dir="model"))
    """

    def __init__(
        self,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
    ) -> None:
        if scaffold is not None and not isinstance(scaffold, tf.compat.v1.train.Scaffold):
            raise TypeError(
                f"scaffold is {scaffold!r}; give a tf.compat.v1.train.Scaffold, or None "
                "(a directory is given as checkpoint_dir=...)"
            )
        self._made_in = entered_graph()
        super().__init__(scaffold, master, config, checkpoint_dir, checkpoint_filename_with_path)

    def lease(self, num_workers: int | None = None) -> Lease:
        graph = entered_graph() or self._made_in or tf.compat.v1.get_default_graph()
        with graph.as_default():
            step = tf.compat.v1.train.get_global_step()
        name = "global_step" if step is None else step.op.name
        return GraphLease(self, GlobalStep(num_workers=num_workers, name=name), graph)


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

    def __init__(self, creator: SessionCreator, global_step: GlobalStep, graph: tf.Graph) -> None:
        super().__init__(creator, global_step)
        self.graph = graph
        self._state = _GraphState.of(graph)

    @property
    def has_global_step(self) -> bool:
        with self.graph.as_default():
            return tf.compat.v1.train.get_global_step() is not None

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        state = self._state
        if state.num_users == 0:
            state.was_finalized = self.graph.finalized
        state.num_users += 1
        async with state.lock:
            if not self.graph.finalized or state.was_finalized:
                yield
                return
            # The graph is being run. New ops are fine beside running threads, yet a run that
            # mixes old and new is not; new variables nobody would initialise.
            async with self.global_step.exclusive():
                variables = len(self._variables())
                self.graph._unsafe_unfinalize()
                try:
                    yield
                finally:
                    self.graph.finalize()
            if len(self._variables()) > variables:
                late = ", ".join(each.name for each in self._variables()[variables:])
                raise LateVariableError(
                    f"begin of a hook added {late} to a graph that is being run already, where "
                    "nothing would initialise it; create variables before the first session opens"
                )

    def _variables(self) -> list[Any]:
        keys = tf.compat.v1.GraphKeys
        locals_ = self.graph.get_collection(keys.LOCAL_VARIABLES)
        return [*locals_, *self.graph.get_collection(keys.GLOBAL_VARIABLES)]

    async def _create(self, engine: Engine, grace_secs: float) -> tuple[RawSession, int]:
        if inspect.iscoroutinefunction(self.creator.create_session):
            session = await self.drive(self.creator.create_session(), lambda: "create_session")
            return self._wrap(session)
        created: tuple[RawSession, int] = await run_blocking(
            engine,
            lambda: self._wrap(self.call(self.creator.create_session)),
            grace_secs,
            "asynchooks-create",
            _close_late,
        )
        return created

    def _wrap(self, session: Any) -> tuple[RawSession, int]:
        raw = GraphSession(session)
        return raw, raw.read_step() or 0

    def close(self) -> None:
        self._state.num_users -= 1
        if self._state.num_users == 0 and not self._state.was_finalized and self.graph.finalized:
            self.graph._unsafe_unfinalize()

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        return Driven(coroutine, self.graph, culprit)

    def call(self, fn: Callable[[], Any]) -> Any:
        with self.graph.as_default():
            return fn()

    def start_threads(self, raw: RawSession, coord: Coordinator) -> None:
        with self.graph.as_default():
            if self.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
                tf.compat.v1.train.start_queue_runners(sess=raw.exposed, coord=coord)

    def new_coordinator(self) -> Coordinator:
        return GraphCoordinator(clean_stop_exception_types=())


def _close_late(outcome: Outcome) -> None:
    """A session that came after its task was cancelled belongs to nobody."""
    if outcome.error is None:
        outcome.value[0].close()
