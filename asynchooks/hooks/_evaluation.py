"""EvaluationHook: how good the model is, every so often, beside training or between its steps."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Any

from .._engine.current import current_engine
from .._errors import StopTraining
from .._hook import SessionHooks, SessionRunContext, SessionRunHook, SessionRunValues
from .._stopping.backoff import Restart
from .._stopping.coordinator import Coordinator
from .._stopping.tasks import OnFailure
from ..backends._raw_session import RawSession, raw_session_of
from ._arguments import as_timer
from ._evaluate_fn import EvaluateFn
from ._metrics import Metric
from ._results import Results
from ._summaries import Output, SummaryWriter, scalar_summary
from ._under_way import UnderWay

logger = logging.getLogger("asynchooks")


class Evaluate(Enum):
    """Whether training stands still while `EvaluationHook` evaluates."""

    BESIDE = auto()
    """Training goes on, and the weights may move meanwhile.

    A plain function then runs in a thread beside steps, which may run in threads, too. It must
    share nothing with them that is not thread-safe: of PyTorch no module (`model.eval()` would put
    the training steps into evaluation mode, and their updates tear what it reads), but a copy.
    TensorFlow's graphs may be shared.
    """
    BETWEEN = auto()
    """No worker that shares the model runs a step meanwhile."""


class EvaluationHook(SessionRunHook):
    """Evaluates the model every n steps or seconds, and at the end.

    Results go to the log, to TensorBoard as `<name>/<key>`, and to `latest`; all are labelled with
    the step at which the evaluation began. You make it, for one session at a time, whose end ends
    it. It counts from the step at which the session was created, or else from the last evaluation,
    also of a restored state: `every_n_steps=100` evaluates at 100, 200, ..., not at the first run.
    What is due while `max_at_once` are under way is put off, to the next run after one has ended.
    After a recovery the count begins anew.

    A plain function evaluates between steps, a coroutine function beside training, unless `mode`
    says otherwise. Beside training, a coroutine has come to its first wait before this worker runs
    its next step; then the weights may move. What must see one step throughout takes
    `async with session.global_step.exclusive():`, around all of it or around making a copy.
    Between steps the hook holds that itself: `evaluate` must not ask for it again, nor run a step
    (a RuntimeError in a coroutine); and a run under way that waits for this worker would hang.

    A clean end waits for what is under way, however long that takes, so `evaluate` should not wait
    for a later step. Where training was asked to stop, waits of asynchooks in it raise
    StopTraining: let out, that counts as not finished.

    Args:
        evaluate: `evaluate(session, global_step_value)`, given what hooks are given as the
            session. A coroutine function, or a plain one, which runs in a thread (with the graph,
            if any, as the default one). It returns a mapping of names to numbers: Python's,
            NumPy's, arrays and tensors of shape (); NaN is one. On a step function
            `session.run` in it would be one more training step.
        every_n_steps: steps between two evaluations, >= 0.
        every_n_secs: seconds between two evaluations, >= 0; exactly one of the two is given.
        mode: `Evaluate.BESIDE` or `Evaluate.BETWEEN`; None: as `evaluate` is, see above. Of a plain
            function beside training, `Evaluate.BESIDE` says what it must not share.
        max_at_once: evaluations that may be under way beside training, >= 1.
        at_end: whether to evaluate at a clean end, unless there is a result of that step. Not
            after an error, of whichever side task or worker.
        output_dir: directory for an event file, if no writer is given; hooks of a process share it.
        summary_writer: a writer with `add_summary(summary, global_step)` and `flush()`; it stays
            open.
        on_failure: what an error in `evaluate` leads to beside training, as for `start_soon`.
            Between steps it leaves the run.
        name: what the evaluations are called in the log, in tags and in errors.

    Raises:
        ValueError: both or neither interval are given, `max_at_once` is below 1, or `on_failure`
            is given for evaluations between steps.
        TypeError: an argument is not what it should be; in an evaluation: its results are not.
        RuntimeError: in an evaluation: it read an input to its end, and let that out.
        ImportError: in begin: output_dir needs TensorBoard, which is not installed.

    Example:
        def evaluate(session, step):
            return {"accuracy": model.accuracy()}

        evaluation = EvaluationHook(evaluate, every_n_steps=100)
        async with MonitoredSession([evaluation], creator) as session:
            await session.run("loss")
        print(evaluation.latest_step, evaluation.latest["accuracy"])
    """

    needs_global_step = True
    _looks_at_default_graph = False
    _shown = (
        ("evaluate", "_fn._fn"),
        ("every_n_steps", "_timer._every_steps"),
        ("every_n_secs", "_timer._every_secs"),
        ("name", "_name"),
    )

    def __init__(
        self,
        evaluate: Callable[[Any, int], Any],
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        *,
        mode: Evaluate | None = None,
        max_at_once: int = 1,
        at_end: bool = True,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str = "eval",
    ) -> None:
        if not isinstance(mode, (Evaluate, type(None))):
            raise TypeError(f"mode is {mode!r}; give Evaluate.BESIDE or Evaluate.BETWEEN, or None")
        self._fn = EvaluateFn(evaluate, name)
        by_default = Evaluate.BETWEEN if self._fn.is_plain else Evaluate.BESIDE
        if not isinstance(max_at_once, int) or max_at_once < 1:
            raise ValueError(f"max_at_once is {max_at_once!r}; give an integer >= 1")
        if not isinstance(on_failure, (OnFailure, Restart)):
            raise TypeError(
                f"on_failure is {on_failure!r}; give OnFailure.STOP, OnFailure.LOG or a "
                "Restart(max_attempts=...)"
            )
        if (mode or by_default) is Evaluate.BETWEEN and on_failure is not OnFailure.STOP:
            why = "" if mode else ", where a plain function evaluates by default,"
            raise ValueError(
                f"on_failure is {on_failure!r}, but an error in an evaluation between steps{why} "
                "leaves the run; leave it out, or evaluate beside training: mode=Evaluate.BESIDE"
            )
        self._timer = as_timer(every_n_secs=every_n_secs, every_n_steps=every_n_steps)
        self._mode = mode or by_default
        self._max_at_once = max_at_once
        self._at_end = at_end
        self._output = Output(output_dir, summary_writer)
        self._on_failure = on_failure
        self._name = name
        self._results = Results(name)
        self._is_restored = False  # since the last session was created
        self.followers: list[Callable[[int, Mapping[str, float]], Awaitable[None]]] = []
        """Awaited with the step and the results of each evaluation that ends beside training."""
        # between steps the user's code runs in a run; a side task has the graph around it anyhow
        self._looks_at_default_graph = self._mode is Evaluate.BETWEEN

    @property
    def latest(self) -> Mapping[str, float] | None:
        """The newest results by step; None before the first."""
        return self._results.latest

    @property
    def latest_step(self) -> int | None:
        """The step at which the evaluation that gave `latest` began."""
        return self._results.latest_step

    def metric(self, key: str) -> Metric:
        """One of the results, for `EarlyStoppingHook` or `CheckpointSaverHook` to decide by.

        Called, it returns the newest value, None before the first; MetricError if evaluations give
        no result of that name.
        """
        return Metric(self._results, key, self)

    def state_dict(self) -> dict[str, Any]:
        """When the last evaluation began, and the newest results; not what is under way."""
        return {"timer": self._timer.state_dict(), **self._results.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the session is created: go on where `state_dict` was called."""
        self._timer.load_state_dict(state["timer"])
        self._results.load_state_dict(state)
        # a state that was saved before the first session was created says nothing
        self._is_restored = self._timer.last_triggered_step() is not None

    async def begin(self) -> None:
        self.followers = []
        self._output.open()
        SessionHooks.of(self)  # for those that decide by its metrics

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._coord = coord
        self._is_over = False
        self._under_way = UnderWay(coord, self._on_failure, self._name)
        if not self._is_restored:
            self._timer.update_last_triggered_step(session.global_step.value)
            self._results.begin_anew()
        self._is_restored = False

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.global_step.value
        if not self._timer.should_trigger_for_step(step):
            return
        if self._mode is Evaluate.BETWEEN:
            raw = raw_session_of(run_context.session)
            run_context.finish_with(lambda: self._evaluate_alone(raw), exclusive=True)
        elif len(self._under_way) < self._max_at_once:
            await self._evaluate_beside(raw_session_of(run_context.session), step)

    async def end(self, session: Any) -> None:
        await self.evaluate_last(session)
        await self._output.finish()

    async def evaluate_last(self, session: Any) -> None:
        """Wait for what is under way, and evaluate at the end, once.

        A saver that decides by a metric of this hook calls it before its last save.
        """
        if self._is_over:
            return
        self._is_over = True
        await self._under_way.wait_for_end()
        if self._at_end and not self._has_failed():
            raw = raw_session_of(session)
            step = raw.global_step.value
            if not self._results.are_of(step) and self._mode is Evaluate.BETWEEN:
                async with raw.global_step.exclusive():
                    # another worker that shares it may have replaced it until then
                    await self._evaluate_alone(raw_session_of(session))
            elif not self._results.are_of(step):
                await self._evaluate_beside(raw, step)
                await self._under_way.wait_for_end()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._output.finish()

    def _has_failed(self) -> bool:
        """Whether an error will leave the session, or has left another worker's."""
        reason = self._coord.stop_reason
        return self._coord.error is not None or (reason is not None and reason.error is not None)

    async def _evaluate_beside(self, raw: RawSession, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        await self._under_way.start(lambda: self._evaluate(raw))

    async def _evaluate_alone(self, raw: RawSession) -> None:
        # others may have moved it until they stood still
        self._timer.update_last_triggered_step(raw.global_step.value)
        await self._evaluate(raw)

    async def _evaluate(self, raw: RawSession) -> None:
        engine = current_engine()
        begun, step = engine.now(), raw.global_step.value
        try:
            is_alone = self._mode is Evaluate.BETWEEN
            numbers = await self._fn.call(raw, step, is_alone=is_alone, is_held=self._is_over)
        except StopTraining as stop:
            logger.info("%s at step %d was not finished: %s", self._name, step, stop)
        else:
            self._record(step, numbers, engine.now() - begun)
            if self._mode is Evaluate.BESIDE:
                for follow in self.followers:
                    await follow(step, numbers)

    def _record(self, step: int, numbers: dict[str, float], seconds: float) -> None:
        self._results.add(step, numbers)
        text = ", ".join(f"{key} = {value:g}" for key, value in numbers.items()) or "no results"
        logger.info("%s at step %d: %s (%.2f sec)", self._name, step, text, seconds)
        if self._output.writer is not None:
            for key, value in numbers.items():
                summary = scalar_summary(f"{self._name}/{key}", value)
                self._output.writer.add_summary(summary, step)
