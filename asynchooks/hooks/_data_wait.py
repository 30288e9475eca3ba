"""DataWaitHook: the share of the time that training waits for its input."""

from __future__ import annotations

from typing import Any

from .._check import names_options
from .._engine.current import now
from .._hook import SessionHooks, SessionRunContext, SessionRunValues, worker_of
from .._log import show
from .._stopping.coordinator import Coordinator
from ..data._consumers import consumers_of_last_stage
from ..data._stage import Stage
from ._summaries import SummaryWriter, TimedOutputHook


@names_options
class DataWaitHook(TimedOutputHook):
    """Logs the share of the time that a session waits for its input, under the tag `data_wait`.

    It is 0 for a loop that never waits, 1 for one that does nothing else, and counts the waits of
    `FeedHook` or `session.batches` in this session. Near 0 the input does not limit training; else
    `source.statistics()` says for which stage all others wait. The first run only starts the clock.

    Args:
        source: the stage that the session reads.
        every_n_steps: steps between two values, >= 0.
        every_n_secs: seconds between two values, >= 0; exactly one of the two is given, so this
            one needs every_n_steps=None.
        output_dir: directory for an event file, if no writer is given; hooks of a process share it.
        summary_writer: as in `StepCounterHook`.

    Raises:
        TypeError: `source` is not a stage.
        ValueError: both or neither interval are given; or another stage reads `source`.
        ImportError: in begin: output_dir needs TensorBoard, which is not installed.

    Example:
        source = prefetch(batch(records, 32), 2)
        hooks = [FeedHook(source, "images"), DataWaitHook(source, output_dir="logs")]
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("source", "_consumers.stage"),)

    def __init__(
        self,
        source: Stage[Any],
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        *,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
    ) -> None:
        self._consumers = consumers_of_last_stage(source, "DataWaitHook")
        super().__init__(
            output_dir, summary_writer, every_n_secs=every_n_secs, every_n_steps=every_n_steps
        )
        self._stop: Any = None  # of this session
        self._last: tuple[float, float] | None = None  # the time, and the seconds waited until then

    async def begin(self) -> None:
        self._stop, self._last = SessionHooks.of(self).stop, None
        self._timer.reset()  # the step may begin at 0 again
        await super().begin()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        if self._last is None and self._timer.last_triggered_step() is not None:  # resumed
            self._last = now(), self._consumers.waited(self._stop)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.global_step.value
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        at, waited = now(), self._consumers.waited(self._stop)
        if self._last is not None and at > self._last[0]:
            share = (waited - self._last[1]) / (at - self._last[0])
            self._output.add_scalar("data_wait", share, step)
            text, worker = "data wait: %.1f %% of the time", worker_of(run_context)
            show(self, text, 100 * share, step=step, worker=worker)
        self._last = (at, waited)
