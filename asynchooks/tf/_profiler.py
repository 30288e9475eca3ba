"""ProfilerHook: where a step spends its time."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.client import timeline

from .. import _check
from .._hook import SessionRunArgs, SessionRunContext, SessionRunValues, begin_graph
from .._log import fields
from .._stopping.coordinator import Coordinator
from ..backends._raw_session import raw_session_of
from ..hooks._summaries import TimedOutputHook

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1


@_check.names_options
class ProfilerHook(TimedOutputHook):
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
        super().__init__(
            output_dir or ".",
            None,
            every_n_steps=every_n_steps,
            every_n_secs=every_n_secs,
            save_steps=save_steps,
            save_secs=save_secs,
        )
        self._directory = os.fspath(output_dir)
        self._shows = {"show_dataflow": show_dataflow, "show_memory": show_memory}

    async def begin(self) -> None:
        if begin_graph.get() is None:
            raise RuntimeError(
                f"{type(self).__name__} needs a session on a TensorFlow graph "
                "(MonitoredSession(hooks, ChiefSessionCreator())); a step function has none"
            )
        self._has_run, self._next_step = False, 0
        await super().begin()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
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
        if self._is_due:
            self._timer.update_last_triggered_step(step)
            attempt, raw = self._output.attempt, raw_session_of(run_context.session)
            await raw.call_blocking(lambda: attempt(step, self._write, step, metadata))

    def _write(self, step: int, metadata: Any) -> None:
        path = os.path.join(str(self._output.directory), f"timeline-{step}.json")
        extra = fields(self, step=step)
        logger.info("Saving timeline for %d into '%s'.", step, path, extra=extra)
        trace = timeline.Timeline(metadata.step_stats).generate_chrome_trace_format(**self._shows)
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(trace)
        try:
            self._output.writer.add_run_metadata(metadata, f"step_{step}")
        except ValueError:  # a session that was lost has come to the same step again
            text = "The event file holds the metadata of step %d already."
            logger.info(text, step, extra=extra)
