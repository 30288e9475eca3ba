"""GraphSession: a TensorFlow session as a raw session, run through compiled callables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from ..._engine.stop import StopReason
from ..._engine.threads import Outcome, StepTimes, drop
from ..._errors import is_preemption
from ..._step.gate import UNREAD
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator, ExcInfo
from ...backends._creator import take_alone
from ...backends._raw_session import RawSession
from ...hooks.checkpoint import _format
from ..checkpoint._format import graph_format
from ..cluster._heartbeat import Heartbeat
from ..cluster._publishing import Publishing
from ..cluster._server import Server
from ._callables import Callables, compiled, key_of
from ._default_graph import in_graph, run_in_graph

logger = logging.getLogger("asynchooks")

_format.make_graph_format = graph_format


class StepPublisher:
    """Publishes the steps of one session to other processes on a server; every method blocks."""

    def __init__(self, session: Any, server: Server, publishing: Publishing) -> None:
        self._session, self._server = session, server
        self._publishing, self._table = publishing, publishing.table

    def announce(self, *, is_chief: bool) -> None:
        """Begin: the chief has initialised or restored the model, which a worker needs."""
        if is_chief:
            self.begin_epoch()
            return
        is_new = False
        with suppress(tf.errors.FailedPreconditionError):  # there is no table
            is_new = self._server.note(self._ask(self._table.news), begins=True)
        if not is_new:
            raise tf.errors.DeadlineExceededError(None, None, "its chief has not announced it")

    def begin_epoch(self) -> None:
        """Tell all processes that the step may have gone back."""
        known = {self._table.known_epoch: self._server.epoch}
        self._server.note(self._ask(self._table.begin_epoch, known), begins=True)

    def read_step(self) -> int:
        """The step now, of which other processes learn."""
        return self._noted(self._ask(self._table.news))

    def run_step(self, raw: RawSession, args: tuple[Any, Any, Any, Any]) -> Any:
        """As `raw.run_step`, with the news in the same run if possible."""
        fetches, *others = args
        fused = self._publishing.fused(raw.run_key(fetches), fetches)
        if fused is None:
            return raw.run(*args), raw.read_step(), None
        if fused[1] is None:
            outputs = raw.run(*args)
            return outputs, self.read_step(), None
        outputs, values = raw.run(fused, *others)
        return outputs, self._noted(values), None

    def _noted(self, news: Any) -> int:
        self._server.note(news)
        return int(news[0])

    def _ask(self, *args: Any) -> Any:
        return run_in_graph(self._session, *args)


class GraphSession(RawSession):
    """Runs an initialised `tf.compat.v1.Session`. The handle creates and closes it.

    Hooks are given the TensorFlow session itself, with an attribute `global_step`.

    Args:
        heartbeat: watches the server that it runs on, until `close`; None in this process.
        server: through which other processes learn of each step; None if there are none.
        publishing: the operations for that; None if the graph has no global step.
    """

    evaluates = True

    def __init__(
        self,
        session: Any,
        heartbeat: Heartbeat | None = None,
        server: Server | None = None,
        publishing: Publishing | None = None,
    ) -> None:
        super().__init__()
        self._heartbeat = heartbeat
        self._says_steps = False  # runs read the step that they made, for a saver
        self.publisher = (
            None
            if server is None or publishing is None
            else StepPublisher(session, server, publishing)
        )
        if heartbeat is not None:
            self.lost_peer = heartbeat.lost_peer
            self.step_times = StepTimes(always_in_thread=True)
        self._session = session
        session.asynchooks_raw = self  # for `raw_session_of`, which hooks that restore it ask first
        if heartbeat is None:
            session.run = self._noting(session.run)
        self._graph: tf.Graph = session.graph
        self._callables = Callables(session, is_remote=heartbeat is not None)
        with self._graph.as_default():
            step = tf.compat.v1.train.get_global_step()
        self._read: Callable[[], Any] | None = None
        if step is not None:
            # TensorFlow's own pool of threads makes it 13 to 50 us instead of 6
            tensor = self._graph.as_graph_element(step, allow_operation=False)
            self._read = compiled(session, [tensor], pool=-1)
        self.no_options = (tf.compat.v1.RunOptions(), tf.compat.v1.RunMetadata())

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The session's `run`, which hooks, a step_fn and TensorFlow's own code call directly.

        It may move the step, so that this is read again. On a server other processes learn of
        steps by runs of sessions alone, and see none go back.
        """

        @wraps(run)
        def run_and_note(*args: Any, **options: Any) -> Any:
            try:
                return run(*args, **options)
            finally:
                self.global_step.gate.reread()

        return run_and_note

    @property
    def exposed(self) -> Any:
        return self._session

    def attach(self, global_step: GlobalStep) -> None:
        self.global_step = self._session.global_step = global_step
        global_step.gate.reader = self.read_step

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """As `tf.compat.v1.Session.run`; blocks."""
        if options is None and run_metadata is None:
            if not feed_dict:
                return self._callables.run(fetches, {})
            if type(feed_dict) is dict:
                return self._callables.run(fetches, feed_dict)
        return run_in_graph(self._session, fetches, feed_dict, options, run_metadata)

    def run_and_read_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        if self.publisher is not None:
            return self.publisher.run_step(self, args)
        outputs = self.run(*args)
        # later, on the event loop, a read on a server might block for ever
        must_read = self._read is None or self._heartbeat is not None or self._says_steps
        if must_read or self.global_step.gate.is_watched:
            return outputs, self.read_step(), None
        return outputs, UNREAD, None

    async def call(self, fn: Callable[..., Any], *args: Any, is_alone: bool = False) -> Any:
        call = partial(super().call, fn, *args, is_alone=is_alone)
        return await in_graph(self._graph, call)

    async def call_blocking(
        self, fn: Callable[[], Any], when_late: Callable[[Outcome], None] = drop
    ) -> Any:
        def call() -> Any:
            with self._graph.as_default():
                return fn()

        return await super().call_blocking(call, when_late)

    async def evaluate(self, fetches: Any, feed_dict: Any = None) -> Any:
        return await self.call_blocking(lambda: self._session.run(fetches, feed_dict))

    def keep_outputs(self, fetches: Any) -> bool:
        self._says_steps = True
        return False

    def run_key(self, fetches: Any) -> Hashable:
        return key_of(fetches)

    def read_step(self) -> int | None:
        return None if self._read is None else int(self._read()[0])

    async def take_up_step(self) -> None:
        if self._read is None:
            return
        if self.publisher is None:
            self.global_step.gate.reread()
            return
        # where it has gone back, no other worker runs meanwhile
        publisher = self.publisher
        step, epoch = self.global_step, self.global_step.epoch
        # a step below one that was known before the read is no late news
        known, found = await self.call_blocking(lambda: (step.value, publisher.read_step()))
        if found >= known or step.epoch != epoch:
            step.publish(found, epoch=epoch)
            return
        logger.info("A hook has set %s back from %d to %d", step.name, known, found)
        release = await take_alone(step, self)
        try:
            await self.call_blocking(publisher.begin_epoch)
        finally:
            release()

    def step_after(self, error: BaseException) -> tuple[Any, ...]:
        # the train op may have run although another op failed; a lost server would only block
        if not isinstance(error, tf.errors.OpError) or is_preemption(error):
            return ()
        try:
            return (self.read_step(),)
        except tf.errors.OpError:
            return ()

    def _rejects(self, fetch: Any, error: Exception) -> bool:
        try:
            if not isinstance(fetch, tf.SparseTensor):
                self._graph.as_graph_element(fetch)
        except (TypeError, ValueError, KeyError):
            return True
        return getattr(fetch, "graph", self._graph) is not self._graph

    def feed_names(self, key: Any) -> tuple[Hashable, ...]:
        if isinstance(key, tf.Tensor) and key.graph is self._graph:
            return (key.name,)
        if isinstance(key, tf.SparseTensor):
            key = (key.indices, key.values, key.dense_shape)
        if isinstance(key, tuple):  # feeds of a tuple of values
            return tuple(name for each in key for name in self.feed_names(each))
        try:  # a variable stands for its value
            return (self._graph.as_graph_element(key, allow_operation=False).name,)
        except (TypeError, ValueError, KeyError):  # as the run will say
            return (key if isinstance(key, str) else id(key),)

    def tells_of_close(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "closed Session" in str(error)

    def merge_options(self, requests: list[Any]) -> Any:
        """Source: TensorFlow's `_HookedSession._merge_run_options`."""
        merged = tf.compat.v1.RunOptions()
        merged.CopyFrom(requests[0])
        for request in requests[1:]:
            largest = {
                field: max(getattr(merged, field), getattr(request, field))
                for field in ("trace_level", "timeout_in_ms", "inter_op_thread_pool")
            }
            merged.MergeFrom(request)  # switches that are on, and debug watches of both
            for field, value in largest.items():
                setattr(merged, field, value)
        return merged

    def new_run_metadata(self) -> Any:
        return tf.compat.v1.RunMetadata()

    def close(self) -> None:
        gate = self.global_step.gate
        gate.refresh()
        if gate.reader == self.read_step:  # else a later session has taken its place
            gate.reader = None
        try:
            self._session.close()
        finally:
            self._callables.clear()
            if self._heartbeat is not None:  # last: closing may block on a silent server, too
                self._heartbeat.stop()


class GraphCoordinator(Coordinator, tf.compat.v1.train.Coordinator):  # type: ignore[misc]
    """Behaves as `asynchooks.Coordinator`, and is one of TensorFlow's, too.

    TensorFlow's queue runners, `LooperThread` and hooks accept no other. Hooks of a session on a
    graph get one; make one yourself for TensorFlow's threads outside of a session.

    Example:
        coord = asynchooks.tf.GraphCoordinator()
        tf.compat.v1.train.LooperThread.loop(coord, 0.1, coord.request_stop)
        coord.join()
    """

    def request_stop(
        self,
        ex: BaseException | ExcInfo | None = None,
        *,
        reason: StopReason | str | None = None,
        all_workers: bool = False,
    ) -> None:
        # a queue runner whose enqueue was cancelled by the stop reports that as an error
        error = ex[1] if isinstance(ex, tuple) else ex
        consequences = (tf.errors.CancelledError, tf.errors.OutOfRangeError)
        if (self.should_stop() or self.joined) and isinstance(error, consequences):
            return
        super().request_stop(ex, reason=reason, all_workers=all_workers)
