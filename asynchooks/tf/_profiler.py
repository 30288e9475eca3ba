"""ProfilerHook: where a step spends its time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.client import timeline

from .. import _check
from .._engine.current import current_engine
from .._engine.threads import run_blocking
from .._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, begin_graph
from .._log import fields
from .._stopping.coordinator import Coordinator
from .._timer import timer_of
from ..backends._raw_session import raw_session_of
from ..metrics._event_files import errors_of_writing, tensorflows_writer

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_GRACE_SECS = 30.0
"""What a cancellation gives to the last write."""


@_check.names_options
class ProfilerHook(SessionRunHook):
    """Traces a run every n steps or seconds, never the first, into `timeline-<step>.json`.

    The files are in Chrome's trace format; the run's metadata goes to an event file as
    `step_<step>`. A traced run is slower than others.

    Args:
        save_steps: steps between two traces, >= 0; also called `every_n_steps`.
        save_secs: seconds between two traces, >= 0; also called `every_n_secs`. Exactly one of the
            two is given.
        output_dir: directory for the files; "" is the current one.
        show_dataflow: whether the trace connects producers and consumers of tensors.
        show_memory: whether the trace shows sizes and lifetimes of tensors.

    Raises:
        ValueError: both or neither interval are given.
        RuntimeError: when opening: this is no graph session.

    Source: TensorFlow's `tf.compat.v1.train.ProfilerHook`.

    Example:
        hooks = [ProfilerHook(save_steps=1000, output_dir="profile")]
    """

    acts_outside = True
    needs_global_step = True
    uses_default_graph = False
    _shown = (
        ("save_steps", "_timer._every_steps"),
        ("save_secs", "_timer._every_secs"),
        ("output_dir", "_directory"),
    )

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
    ) -> None:
        self._timer = timer_of(
            every_n_steps=every_n_steps,
            every_n_secs=every_n_secs,
            save_steps=save_steps,
            save_secs=save_secs,
        )
        self._given = os.fspath(output_dir)
        self._place = _check.place("output_dir", output_dir)
        self._directory = self._given
        self._show_dataflow = show_dataflow
        self._show_memory = show_memory
        self._writer: Any = None

    async def begin(self) -> None:
        if begin_graph.get() is None:
            raise RuntimeError(
                f"{type(self).__name__} needs a session on a TensorFlow graph "
                "(MonitoredSession(hooks, ChiefSessionCreator())); a step function has none"
            )
        # which TensorFlow's cache knows by the name that it was given
        self._directory = _check.same_place(self._given, self._place)
        self._writer = tensorflows_writer(self._directory)
        self._has_run = False
        self._next_step = 0

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._next_step = 0  # the one after this hook's last run in this session

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._step_before = run_context.global_step.value
        # as TensorFlow's: where the step has gone back since, one more run goes by the one before
        next_step = max(self._next_step, self._step_before + 1)
        self._is_due = self._has_run and self._timer.should_trigger_for_step(next_step)
        if not self._is_due:
            return None
        return SessionRunArgs(None, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self._has_run:
            self._has_run = True
            self._timer.update_last_triggered_step(self._step_before)
        step, metadata = run_context.global_step.value, run_values.run_metadata
        self._next_step = step + 1
        if not self._is_due:
            return
        self._timer.update_last_triggered_step(step)
        raw = raw_session_of(run_context.session)
        await raw.call_blocking(lambda: self._try(lambda: self._write(step, metadata), step))

    def _try(self, write: Callable[[], None], step: int | None = None) -> None:
        """A disk that takes no trace is no reason to end training."""
        try:
            write()
        except errors_of_writing() as error:
            logger.warning(
                "A trace could not be written into '%s', and is lost. Training goes on: %r",
                self._directory, error, extra=fields(self, step=step, reason=repr(error)),
            )  # fmt: skip

    def _write(self, step: int, metadata: Any) -> None:
        path = os.path.join(self._directory, f"timeline-{step}.json")
        extra = fields(self, step=step)
        logger.info("Saving timeline for %d into '%s'.", step, path, extra=extra)
        trace = timeline.Timeline(metadata.step_stats).generate_chrome_trace_format(
            show_dataflow=self._show_dataflow, show_memory=self._show_memory
        )
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(trace)
        try:
            self._writer.add_run_metadata(metadata, f"step_{step}")
        except ValueError:  # a session that was lost has come to the same step again
            text = "The event file holds the metadata of step %d already."
            logger.info(text, step, extra=extra)

    async def end(self, session: Any) -> None:
        await self._flush()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._flush()

    async def _flush(self) -> None:
        if self._writer is not None:
            flush = partial(self._try, self._writer.flush)
            await run_blocking(current_engine(), flush, _GRACE_SECS, "flush")
