"""ProgressHook: how far training is, in a terminal, a notebook, or lines."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, TextIO

from ... import _check
from ..._engine.base import Engine, Slot
from ..._engine.current import current_engine, system_now
from ..._engine.stop import StopReason
from ..._errors import shown
from ..._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import raw_session_of
from .._evaluation import EvaluationHook
from .._values import ValueReader, Wanted
from ._display import DISPLAYS, Display
from ._rows import Outcome, Row
from ._surfaces import surface_for

_LAST_DRAW_SECS = 1.0
"""How long the end of a session waits for its last line; a terminal may be stopped by Ctrl-S."""
_MAX_VALUES = 4
"""Metrics that are shown where the user chose none."""


@_check.names_options
class ProgressHook(SessionRunHook):
    """Shows how far training is: steps, epochs, rate, time left, and values.

    In a terminal it draws a bar, which stays below what the program prints and logs. That needs
    the extra `progress`. In a Jupyter notebook it updates the output of the cell in which the
    session opened. Anywhere else, such as in a file, it writes a line at the start, every
    `every_n_secs`, and at the end.

    All sessions of the process share one display, with a row for each model, which its workers
    share. Side tasks and running evaluations are named beside. A thread
    draws, so that a terminal that takes nothing holds up neither training nor, by more than a
    second, its end. Runs are asked for values at most a few times a second. In virtual time the
    hook shows nothing.

    Epochs are the passes of `repeat` around the data of the session's FeedHook; of several, of the
    first one.

    Give it to one session at a time.

    Args:
        values: what to show beside: names of outputs, tensors, `mean(...)`, statistics, metrics of
            an `EvaluationHook`, or functions without arguments that return a number; one, a list,
            or a mapping with names of their own. None: the first four metrics of the session, as
            other hooks read them or `session.log_metrics` is given them.
        name: what the session is called; by default models are numbered.
        every_n_secs: seconds between two lines where there is no terminal, > 0.
        file: a text stream to show it on; None for standard error, or the notebook.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or two values one name.
        MetricError: in a run: a value is not a number. NaN and infinities are.
        FetchError: in a run: the step function has no such output (says which there are).

    Example:
        hooks = [StopAtStepHook(last_step=1000), ProgressHook("loss")]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])
    """

    acts_outside = True
    uses_default_graph = False
    needs_global_step = True
    _shown = (("values", "_wanted"), ("name", "_name"))

    def __init__(
        self,
        values: Wanted = None,
        *,
        name: str | None = None,
        every_n_secs: float = 10.0,
        file: TextIO | None = None,
    ) -> None:
        self._wanted = values
        self._values = ValueReader(values, "ProgressHook")
        if self._values.has_arrays:
            raise TypeError(
                f"values are {shown(values)}; a histogram cannot be shown as one number, so give "
                "mean(...) of a number, or a MetricsHook the histogram"
            )
        self._name = _check.instance("name", name, (str, type(None)), "a text, or None") or ""
        self._every_n_secs = _check.seconds("every_n_secs", every_n_secs)
        if file is not None and not callable(getattr(file, "write", None)):
            raise TypeError(f"file is {shown(file)}; give a text stream, such as sys.stdout")
        self._file = file
        self._display: Display | None = None
        # before the first session it is like that of one that has ended
        self._row = Row("", 0.0, self._look_beside, outcome=Outcome.DONE)

    async def begin(self) -> None:
        session = SessionHooks.of(self)
        if self._row.outcome is None:
            if session is self._session:
                return  # it is listed twice
            self._row.outcome = Outcome.DROPPED  # of another session: nothing updates it any more
        self._session: SessionHooks = session
        self._values.begin(session)
        self._engine: Engine = current_engine()
        self._display = None
        self._last_step: int | None = None
        row = self._row = Row(self._name, system_now(), self._look_beside)
        self._of_due, self._of_each = self._values.args_of_due, self._values.args_of_each
        if self._engine.is_virtual:
            row.is_wanted = False
            self._of_each = None
            return
        place = None if self._file is None else id(self._file)  # which the display keeps
        self._display = display = DISPLAYS.add(row, place, lambda: surface_for(self._file))
        display.surface.ask_every(self._every_n_secs)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        row, step = self._row, session.global_step
        if self._display is None:
            return
        self._session.live.set_back(step.value)
        self._values.begin_session(raw_session_of(session), self._engine.now())
        if row.step is None:
            row.begun_at_step = step.value
        row.step, row.model = step, step.gate
        if not self._display.has_others(row):
            self._display.change()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        row, step = self._row, self._row.step
        limit = None if step is None else step.limit
        if step is not None and limit is not None and step.last_known + 1 >= limit:
            row.is_wanted = True  # the last line shows the values of the last step
        return self._of_due if row.is_wanted else self._of_each

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        row, results = self._row, run_values.results
        row.num_runs += 1
        self._last_step = run_context.step
        if results is not None or row.is_wanted:
            self._take(run_context, results)

    def _take(self, run_context: SessionRunContext, results: Any) -> None:
        row = self._row
        if results is not None:
            self._values.take(results)
        if not row.is_wanted or not self._values.has_all(results):
            return  # the display has just asked; the next run is asked
        row.is_wanted = False
        step = run_context.step
        row.limit = run_context.global_step.limit
        feed = self._session.epochs
        row.epoch = "" if feed is None else feed.shown_epoch
        live = self._session.live
        if self._wanted is None:
            row.values = _first(live.latest)
            return
        values = self._values.read(results, self._engine.now(), step)
        if values:
            row.values = {**row.values, **values}
            live.publish(step, values)

    def _look_beside(self) -> tuple[str, tuple[str, ...]]:
        """Phase, and what runs beside training; called by the display."""
        stop, row = self._session.stop, self._row
        names = () if stop is None else stop.names_of_tasks()
        hooks = [*self._session.hooks, *self._session.begun]
        ours = {type(each).__name__ for each in hooks}  # the tasks of guards are called so
        beside = tuple(name.rpartition("<locals>.")[2] for name in names if name not in ours)
        is_evaluating = any(
            isinstance(each, EvaluationHook) and each.is_exclusive and each.num_running
            for each in self._session.begun
        )
        if is_evaluating:
            return "evaluating", beside
        if row.step is None:
            return "opening", beside
        if stop is not None and (stop.is_ending or stop.is_set):
            by = "" if stop.reason is None else f", by {stop.reason.who}"
            return f"stopping{by}", beside
        return ("training" if row.num_runs else "starting"), beside

    async def end(self, session: Any) -> None:
        if self._display is not None and self._last_step is not None:
            last = self._values.read_last(None, self._last_step)
            self._row.values = {**self._row.values, **last}
        if self._session.is_by_hand:  # no session calls the moments after this one
            await self.after_close(None)

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._session.is_by_hand:
            await self.after_close(exception)

    async def after_close(self, exception: BaseException | None) -> bool | None:
        row, display = self._row, self._display
        self._values.close()
        if display is None or row.outcome is not None:
            return None
        if self._wanted is None:
            row.values = _first(self._session.live.latest)
        outcome, row.reason = self._ending(exception)
        engine, slot = self._engine, Slot(self._engine, "the last line of progress")
        row.on_shown = slot.wake
        row.outcome = outcome
        if display.is_over:  # the session was opened before a fork
            return None
        if not display.has_others(row):  # else another one's end has the line
            display.change()
            with engine.shielded(_LAST_DRAW_SECS + 1):
                await engine.park(slot, engine.now() + _LAST_DRAW_SECS)
        return None

    def _ending(self, exception: BaseException | None) -> tuple[Outcome, str]:
        """How the session has ended, and why."""
        stop = self._session.stop
        reason: StopReason | None = None if stop is None else stop.reason
        if exception is None:
            if reason is None or reason.who == "the limit":
                return Outcome.DONE, ""
            return Outcome.STOPPED, str(reason)
        if isinstance(exception, KeyboardInterrupt):
            return Outcome.CANCELLED, "KeyboardInterrupt"
        if self._engine.failure_in(exception) is None:
            return Outcome.CANCELLED, ""
        return Outcome.FAILED, repr(exception)

    def on_drop(self) -> None:
        if self._row.outcome is None:
            self._row.outcome = Outcome.DROPPED  # which the display finds at its next look


def _first(values: Mapping[str, float]) -> Mapping[str, float]:
    return dict(islice(values.items(), _MAX_VALUES))
