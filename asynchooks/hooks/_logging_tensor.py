"""LoggingTensorHook: logs values of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

from .. import _check
from .._engine.current import current_engine
from .._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
    worker_of,
)
from .._log import is_shown, show
from .._running.hook_state import TimerState
from .._stopping.coordinator import Coordinator
from .._timer import timer_of
from ..backends._raw_session import raw_session_of
from ._interval import Interval

logger = logging.getLogger("asynchooks")


@_check.names_options
class LoggingTensorHook(SessionRunHook):
    """Logs values every n steps, every n runs of this session, every n seconds, and/or at the end.

    The first run always logs (but not with `at_end` alone). Steps are those of all workers, and
    multiples of n. On a graph, `at_end` computes the
    values once more; with a step function it logs those of the last run, as computing them again
    would be one more training step.

    It counts the runs of one session at a time: of a second one that is open the log tells.
    Unless the program configures logging, the lines go to standard error, behind the global step.

    Args:
        tensors: a mapping of tags to fetches (logged in the order of the tags), or an iterable of
            fetches, which are their own tags. A fetch is a tensor, an op, a SparseTensor or a name
            (`x` means `x:0`), nested or not; on a step function the name of an output.
        every_n_iter: runs between two messages, > 0.
        every_n_secs: seconds between two messages, >= 0.
        every_n_steps: global steps between two messages, > 0; give at most one of the three.
        at_end: whether to log at the end, too, even if the last run was logged.
        formatter: returns the text for a dict of tags to values.

    Raises:
        ValueError: several of `every_n_iter`, `every_n_secs` and `every_n_steps` are given, or
            none without `at_end`; in begin: a name with several outputs, or a tensor of another
            graph.
        KeyError: in begin: the graph has no such name.

    Source: TensorFlow's `tf.compat.v1.train.LoggingTensorHook`.

    Example:
        hooks = [LoggingTensorHook({"loss": "loss"}, every_n_iter=100)]
    """

    acts_outside = True
    uses_default_graph = False
    _session: Callable[[], SessionHooks | None] = staticmethod(lambda: None)
    _shown = (
        ("tensors", "_tags"),
        ("every_n_iter", "_timer._every_steps"),
        ("every_n_secs", "_timer._every_secs"),
        ("every_n_steps", "_interval.every_steps"),
        ("at_end", "_at_end"),
    )

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[Any, Any]], str] | None = None,
        *,
        every_n_steps: int | None = None,
    ) -> None:
        num_given = 3 - (every_n_iter, every_n_secs, every_n_steps).count(None)
        if num_given > 1 or not (num_given or at_end):
            raise ValueError(
                f"got every_n_iter={every_n_iter}, every_n_secs={every_n_secs}, "
                f"every_n_steps={every_n_steps} and at_end={at_end}; give at_end and/or exactly "
                "one of the other three"
            )
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"every_n_iter is {every_n_iter}; give a number of runs > 0")
        if isinstance(tensors, str):
            raise TypeError(f"tensors is the text {tensors!r}; give a list of names: [{tensors!r}]")
        if isinstance(tensors, Mapping):
            pairs = sorted(tensors.items(), key=lambda pair: pair[0])
            self._tags: list[Any] = [tag for tag, _ in pairs]
            self._given = [each for _, each in pairs]
        else:
            self._tags = self._given = list(tensors)
        intervals = {"every_n_secs": every_n_secs, "every_n_iter": every_n_iter}
        has_timer = every_n_iter is not None or every_n_secs is not None
        self._timer = timer_of(**intervals) if has_timer else None
        self._interval = None if every_n_steps is None else Interval(every_n_steps, None)
        if formatter is not None:
            _check.function("formatter", formatter, "a function of a dict of values", num_args=1)
        self._at_end = at_end
        self._formatter = formatter
        self.uses_default_graph = formatter is not None  # which is the user's

    async def begin(self) -> None:
        session, last = SessionHooks.of(self), self._session()
        self._session = ref(session)
        if last is not None and last is not session and last.is_open:
            logger.warning(
                "%r is in two sessions that are open, whose runs it counts together: its lines are "
                "of either. Give each session a LoggingTensorHook of its own",
                self,
            )
        if self._timer is not None:
            self._timer.reset()
        self._num_runs = 0
        graph = begin_graph.get()
        self._fetches = self._given
        if graph is not None:
            self._fetches = [_as_graph_element(graph, each) for each in self._given]
        self._last: list[Any] | None = None
        self._worker: int | None = None  # of that run,
        self._last_step = 0  # with the step that it made

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        # values that cannot be computed at the end are kept from the last run
        self._keeps_last = self._at_end and not raw_session_of(session).evaluates
        if self._interval is not None:
            self._interval.begin(session.global_step.value, current_engine().now)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        timer, interval = self._timer, self._interval
        self._is_due = timer is not None and timer.should_trigger_for_step(self._num_runs)
        if interval is not None:
            self._is_due = interval.is_due(run_context.global_step.last_known + 1)
        return SessionRunArgs(self._fetches) if self._is_due or self._keeps_last else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._is_due:
            if self._interval is not None:
                self._interval.update(run_context.step)
            self._log(run_values.results, lambda: run_context.step, worker_of(run_context))
        if self._keeps_last:
            self._last, self._worker = run_values.results, worker_of(run_context)
            self._last_step = run_context.step
        self._num_runs += 1

    def state_dict(self) -> dict[str, Any]:
        timer = None if self._timer is None else self._timer.state_dict()
        return TimerState({"num_runs": self._num_runs, "timer": timer}, place=str(self._tags))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_runs = _check.integer("the saved num_runs", state["num_runs"], least=0)
        if self._timer is not None and state["timer"] is not None:
            self._timer.load_state_dict(state["timer"])

    async def end(self, session: Any) -> None:
        raw = raw_session_of(session)
        if self._at_end and raw.evaluates:
            self._log(await raw.evaluate(self._fetches), lambda: raw.global_step.value, None)
        elif self._at_end and self._last is not None:
            self._log(self._last, lambda: self._last_step, self._worker)

    def _log(self, values: list[Any], step: Callable[[], int], worker: int | None) -> None:
        tagged, seconds = zip(self._tags, values, strict=True), None
        if self._timer is not None:
            seconds, _ = self._timer.update_last_triggered_step(self._num_runs)
        if self._formatter is not None:
            text = self._formatter(dict(tagged))
        else:
            text = ", ".join(f"{tag} = {_text(value)}" for tag, value in tagged)
            text += "" if seconds is None else f" ({seconds:.3f} sec)"
        if is_shown():  # to read the step of a graph takes a call
            show(self, "%s", text, step=step(), worker=worker)


def _text(value: Any) -> str:
    """As `str`, but arrays show small numbers without an exponent."""
    import numpy as np

    with np.printoptions(suppress=True):  # before NumPy 2.2 of other threads, too, meanwhile
        return str(value)


def _as_graph_element(graph: Any, fetch: Any) -> Any:
    """The graph's elements, nested as `fetch` is; a name `x` means `x:0`."""
    if isinstance(fetch, dict):
        return {key: _as_graph_element(graph, each) for key, each in fetch.items()}
    if isinstance(fetch, (list, tuple)):
        elements = [_as_graph_element(graph, each) for each in fetch]
        return type(fetch)(*elements) if hasattr(fetch, "_fields") else type(fetch)(elements)
    if not isinstance(fetch, str):
        if getattr(fetch, "graph", None) is not graph:
            raise ValueError(
                f"{fetch!r} is no element of the session's graph {graph!r}; build it in the graph "
                "in which the session is made"
            )
        return fetch
    if ":" in fetch:
        return graph.as_graph_element(fetch)
    element = graph.as_graph_element(f"{fetch}:0")
    if len(element.op.outputs) > 1:
        raise ValueError(
            f"the name {fetch!r} has {len(element.op.outputs)} outputs; give one of them, such as "
            f"{fetch + ':0'!r}"
        )
    return element
