"""GraphSession: a TensorFlow session as a raw session, run through compiled callables."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from .._errors import is_preemption
from .._gate import UNREAD
from .._global_step import GlobalStep
from .._raw_session import RawSession
from .._runner import StepTimes
from .._work_thread import Outcome, drop
from ._board_link import Notice
from ._callables import Callables
from ._graph import in_graph
from ._notices import Notices
from ._server import Heartbeat, Server


class GraphSession(RawSession):
    """Runs a TensorFlow session. The creator makes it, its lease closes it.

    Hooks are given the TensorFlow session itself, with an attribute `global_step`.

    Args:
        session: a `tf.compat.v1.Session`, initialised.
        heartbeat: what watches the server that it runs on; None in this process. It is stopped
            with the session.
        server: where other processes are told of each step; None if there are none.
        notices: the operations for that; None if the graph has no global step.
    """

    evaluates = True

    def __init__(
        self,
        session: Any,
        heartbeat: Heartbeat | None = None,
        server: Server | None = None,
        notices: Notices | None = None,
    ) -> None:
        super().__init__()
        self._heartbeat = heartbeat
        self._server, self._notices = server, notices
        self._reads_always = heartbeat is not None  # elsewhere reading blocks, perhaps for ever
        if heartbeat is not None:
            self.loss = heartbeat.loss
            self.step_times = StepTimes(always_in_thread=True)
        self._session = session
        self._graph: tf.Graph = session.graph
        self._callables = Callables(session, is_remote=heartbeat is not None)
        with self._graph.as_default():
            step = tf.compat.v1.train.get_global_step()
        self._read: Callable[[], Any] | None = None
        if step is not None:
            self._read = _compile_read(session, step)
        self.no_options = (tf.compat.v1.RunOptions(), tf.compat.v1.RunMetadata())

    @property
    def exposed(self) -> Any:
        return self._session

    def attach(self, global_step: GlobalStep) -> None:
        self.global_step = self._session.global_step = global_step
        global_step.read_by(self.read_step)
        self._session.asynchooks_raw = self  # hooks of ours find it at the session they are given

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """As `tf.compat.v1.Session.run`; blocks."""
        if options is None and run_metadata is None:
            if not feed_dict:
                return self._callables.run(fetches, {})
            if type(feed_dict) is dict:
                return self._callables.run(fetches, feed_dict)
        return self._session.run(fetches, feed_dict, options, run_metadata)

    def run_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        if self._server is not None and self._notices is not None:
            return self._run_and_tell(self._server, self._notices, args)
        outputs = self.run(*args)
        if self._read is None or self._reads_always or self.global_step.is_watched:
            return outputs, self.read_step()
        return outputs, UNREAD

    def _run_and_tell(
        self, server: Server, notices: Notices, args: tuple[Any, Any, Any, Any]
    ) -> Any:
        """Run a step, and have the server tell other processes, in the same run if that can be."""
        fetches, *others = args
        fused = notices.fused(self._callables.key_of(fetches), fetches)
        if fused is None:
            return self.run(*args), self.read_step()
        if fused[1] is None:
            outputs, said = self.run(*args), self._session.run(notices.now)
        else:
            outputs, said = self.run(fused, *others)
        notice = Notice.of(said)
        server.note(notice)
        if not notices.is_large_enough(server.num_taken):
            notices.grow(server.num_taken)
        return outputs, notice.step

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await in_graph(self._graph, super().call, fn, *args)

    async def call_blocking(
        self, fn: Callable[[], Any], when_late: Callable[[Outcome], None] = drop
    ) -> Any:
        def call() -> Any:
            with self._graph.as_default():
                return fn()

        return await super().call_blocking(call, when_late)

    async def evaluate(self, fetches: Any, feed_dict: Any = None) -> Any:
        return await self.call_blocking(lambda: self._session.run(fetches, feed_dict))

    def run_key(self, fetches: Any) -> Hashable:
        return self._callables.key_of(fetches)

    def read_step(self) -> int | None:
        return None if self._read is None else int(self._read())

    def read_step_after(self, error: BaseException) -> int | None:
        # the train op may have run beside the op that failed; a lost server would only block
        if not isinstance(error, tf.errors.OpError) or is_preemption(error):
            return None
        try:
            return self.read_step()
        except tf.errors.OpError:
            return None

    def rejects(self, fetches: Any, error: Exception) -> bool:
        if isinstance(fetches, dict):
            fetches = list(fetches.values())
        if isinstance(fetches, (list, tuple)):
            return any(self.rejects(each, error) for each in fetches)
        try:
            if not isinstance(fetches, tf.SparseTensor):
                self._graph.as_graph_element(fetches)
        except (TypeError, ValueError, KeyError):
            return True
        return getattr(fetches, "graph", self._graph) is not self._graph

    def feed_names(self, key: Any) -> tuple[Hashable, ...]:
        if getattr(key, "graph", self._graph) is not self._graph:
            raise ValueError(f"{key!r} is fed, but it is no element of the session's graph")
        if isinstance(key, tf.SparseTensor):
            return (key.indices.name, key.values.name, key.dense_shape.name)
        if isinstance(key, str):
            return (self._graph.as_graph_element(key, allow_operation=False).name,)
        return (getattr(key, "name", key),)

    def merge_options(self, requests: list[Any]) -> Any:
        """Source: TensorFlow's `_HookedSession._merge_run_options`."""
        merged = tf.compat.v1.RunOptions()
        merged.CopyFrom(requests[0])
        for request in requests[1:]:
            for field in ("trace_level", "timeout_in_ms", "inter_op_thread_pool"):
                setattr(merged, field, max(getattr(merged, field), getattr(request, field)))
            for field in ("output_partition_graphs", "report_tensor_allocations_upon_oom"):
                setattr(merged, field, getattr(merged, field) or getattr(request, field))
            debug = merged.debug_options
            debug.debug_tensor_watch_opts.extend(request.debug_options.debug_tensor_watch_opts)
            if request.debug_options.reset_disk_byte_usage:
                debug.reset_disk_byte_usage = True
        return merged

    def new_run_metadata(self) -> Any:
        return tf.compat.v1.RunMetadata()

    def close(self) -> None:
        self.global_step.refresh()
        self.global_step.read_by(None, instead_of=self.read_step)
        try:
            self._session.close()
        finally:
            self._callables.clear()
            if self._heartbeat is not None:  # not before: closing blocks, too, where nobody answers
                self._heartbeat.stop()


def _compile_read(session: Any, step: Any) -> Callable[[], Any]:
    """A callable that reads the global step, in the calling thread where that is possible.

    TensorFlow's own pool of threads makes it 13 to 50 us instead of 6. The private way was tried
    with TensorFlow 2.16, 2.18 and 2.21; where it is missing, the public one serves.
    """
    try:
        make = session._make_callable_from_options
    except AttributeError:
        compiled: Callable[[], Any] = session.make_callable(step)
        return compiled
    options = config_pb2.CallableOptions(fetch=[session.graph.as_graph_element(step).name])
    options.run_options.inter_op_thread_pool = -1
    read = make(options)
    return lambda: read()[0]
