"""EvaluationHook: evaluations of the model every n steps, concurrent with training or exclusive."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Any

from .. import _check
from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine
from .._engine.recording import Kind, begun_span, ended
from .._engine.threads import is_async
from .._errors import is_stop, passes_for_input_end
from .._hook import SessionHooks, SessionRunContext, SessionRunValues
from .._log import fields, show
from .._running.hook_state import HookState
from .._stopping.backoff import Restart
from .._stopping.coordinator import Coordinator
from .._stopping.tasks import OnFailure
from ..backends._creator import close_raw
from ..backends._raw_session import RawSession, raw_session_of
from ..checkpoints import Mode
from ..metrics._live import to_number
from ._metrics import Metric, Result, Results
from ._summaries import SummaryWriter, TimedOutputHook

logger = logging.getLogger("asynchooks")


class Evaluate(Enum):
    """Whether training goes on while `EvaluationHook` evaluates.

    Example:
        def evaluate(session, step):
            return {"accuracy": 0.9}

        hook = EvaluationHook(evaluate, every_n_steps=100, mode=Evaluate.EXCLUSIVE)
    """

    CONCURRENT = auto()
    """Training goes on, and the weights may move meanwhile.

    A plain function then runs in a thread, while steps may run in other threads. It must not share
    anything with them that is not thread-safe. With PyTorch it needs a copy of the module:
    `model.eval()` would put the training steps into evaluation mode, and their updates would tear
    what it reads. TensorFlow's graphs may be shared.
    """
    EXCLUSIVE = auto()
    """No worker that shares the model runs a step meanwhile."""


@_check.names_options
class EvaluationHook(TimedOutputHook):
    """Evaluates the model every n steps or seconds, and at the end.

    Results go to the log, to TensorBoard as `<name>/<key>`, and to `latest`; all are labelled with
    the step at which the evaluation began. The hook belongs to one session at a time, whose end
    ends it. It counts from the step at which the session was created, or from the last evaluation,
    also of a restored state: `every_n_steps=100` evaluates at 100, 200, ..., not at the first run.
    An evaluation that is due while another one runs is put off to the next run after that has
    ended. After a recovery the count starts again.

    By default a plain function is exclusive and a coroutine function is concurrent. A concurrent
    coroutine has come to its first wait before this worker runs its next step; then the weights may
    move. Where it must see one step throughout, it takes
    `async with session.global_step.exclusive():`, around all of it or around making a copy.
    In an exclusive evaluation the hook holds that itself: `evaluate` must not ask for it again, nor
    run a step (a RuntimeError in a coroutine); and a run in progress that waits for this worker
    would hang.

    A clean end waits for the evaluations that still run, however long that takes, so `evaluate`
    should not wait for a later step. Where training was asked to stop, waits of asynchooks in it
    raise StopTraining: one that leaves `evaluate` counts as not finished.

    Args:
        evaluate: `evaluate(session, global_step_value)`, called with what hooks get as the
            session. A coroutine function, or a plain one, which runs in a thread (with the graph,
            if any, as the default one). It returns a mapping of names to numbers: Python's,
            NumPy's, arrays and tensors of shape (); NaN is allowed. On a step function
            `session.run` in it would be one more training step.
        every_n_steps: steps between two evaluations, >= 0.
        every_n_secs: seconds between two evaluations, >= 0.
        every_n_epochs: passes of `repeat` around the data of the session's FeedHook, the first one
            of several, >= 1; exactly one of the three is given. Of one source that several workers
            feed, the epochs are those of all: an item of an epoch that ends may still be in hand of
            another worker. Each run then waits for the next item, before it returns: only that, or
            the end of the data, says that an epoch has ended. One that ends with a stop is left
            to the evaluation `at_end`.
        mode: None for the default of the function, see above. `Evaluate.CONCURRENT` says what a
            plain function must not share.
        at_end: whether to evaluate at a clean end, unless there is a result of that step. Not
            after an error of any side task or worker.
        output_dir: directory for an event file, if no writer is given; hooks of a process share it.
        summary_writer: a writer with `add_summary(summary, global_step)` and `flush()`; it stays
            open.
        on_failure: what an error in a concurrent evaluation leads to, as for `start_soon`. An
            error in an exclusive one leaves the run.
        name: of the evaluations in the log, in tags and in errors.

    Raises:
        ValueError: several intervals or none are given, or `on_failure` is given for exclusive
            evaluations; in begin: there is `every_n_epochs`, and no FeedHook.
        TypeError: an argument is of the wrong type; in an evaluation: its results are no mapping.
        MetricError: in an evaluation: a result is not one number.
        InputStateError: out of `run`: there is `every_n_epochs`, and a stage, such as `interleave`,
            mixes items of several passes.
        RuntimeError: in an evaluation: it read an input to its end, and did not catch that.
        ImportError: in begin: output_dir needs TensorBoard, which is not installed.

    Example:
        def evaluate(session, step):
            return {"accuracy": model.accuracy()}

        evaluation = EvaluationHook(evaluate, every_n_steps=100)
        async with MonitoredSession([evaluation], creator) as session:
            await session.run("loss")
        print(evaluation.latest_step, evaluation.latest["accuracy"])
    """

    uses_default_graph = False
    _shown = (
        ("evaluate", "_fn"),
        ("every_n_steps", "_every_n_steps"),
        ("every_n_secs", "_timer._every_secs"),
        ("every_n_epochs", "_every_n_epochs"),
        ("name", "_name"),
    )

    def __init__(
        self,
        evaluate: Callable[[Any, int], Any],
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        *,
        every_n_epochs: int | None = None,
        mode: Evaluate | None = None,
        at_end: bool = True,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str = "eval",
    ) -> None:
        modes = "Evaluate.CONCURRENT or Evaluate.EXCLUSIVE, or None"
        _check.instance("mode", mode, (Evaluate, type(None)), modes)
        policies = "OnFailure.STOP, OnFailure.LOG or a Restart(max_attempts=...)"
        _check.instance("on_failure", on_failure, (OnFailure, Restart), policies)
        results = (
            "a function of the session and the step that returns a mapping of names to numbers"
        )
        self._fn = _check.function("evaluate", evaluate, results, num_args=2)
        by_default = Evaluate.CONCURRENT if is_async(evaluate) else Evaluate.EXCLUSIVE
        self._is_exclusive = (mode or by_default) is Evaluate.EXCLUSIVE
        if self._is_exclusive and on_failure is not OnFailure.STOP:
            why = "" if mode else " (the default for a plain function)"
            raise ValueError(
                f"on_failure is {on_failure!r}, but an error in an exclusive evaluation{why} "
                "leaves the run; leave it out, or give mode=Evaluate.CONCURRENT"
            )
        super().__init__(
            output_dir,
            summary_writer,
            every_n_epochs=every_n_epochs,
            every_n_secs=every_n_secs,
            every_n_steps=every_n_steps,
        )
        if every_n_epochs is not None:
            every_n_epochs = _check.integer("every_n_epochs", every_n_epochs, least=1)
        self._every_n_steps, self._every_n_epochs = every_n_steps, every_n_epochs
        self._at_end = at_end
        self._on_failure = on_failure
        self._name = _check.metric_name(name, "name")
        self._results = Results(name)
        self._is_restored = False  # since the last session was created
        self.num_running = 0
        """Evaluations that run now."""
        self.followers: list[Callable[[int, Mapping[str, float]], Awaitable[None]]] = []
        """Awaited with the step and the results of each concurrent evaluation that has ended."""
        # an exclusive evaluation runs in a run; a side task has the graph around it anyhow
        self.uses_default_graph = self._is_exclusive

    @property
    def is_exclusive(self) -> bool:
        """Whether no worker runs a step while it evaluates."""
        return self._is_exclusive

    @property
    def latest(self) -> Mapping[str, float] | None:
        """The newest results by step; None before the first."""
        return self._results.latest

    @property
    def latest_step(self) -> int | None:
        """The step at which the evaluation that gave `latest` began."""
        return self._results.latest_step

    def metric(self, key: str, mode: Mode | str | None = None) -> Metric:
        """One of the results, for `EarlyStoppingHook` or `CheckpointSaverHook` to decide by.

        Called, it returns the newest value, None before the first; MetricError if evaluations give
        no result of that name.

        Args:
            key: its name among the results.
            mode: whether smaller or larger is better, where the name does not say it; a `Mode`, or
                "min" or "max".
        """
        return Metric(Result(self._results, key, self), mode)

    def state_dict(self) -> dict[str, Any]:
        """When the last evaluation began, and the newest results; not those that still run."""
        state = {"timer": self._timer.state_dict(), **self._results.state_dict()}
        return HookState(state, name=self._name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the session is created: go on where `state_dict` was called."""
        super().load_state_dict(state)
        self._results.load_state_dict(state)
        # a state that was saved before the first session was created says nothing
        self._is_restored = self._timer.last_triggered_step() is not None

    async def begin(self) -> None:
        self.followers = []
        await super().begin()
        # also for those that decide by its metrics
        self._shared = SessionHooks.of(self)
        self._session_stop = self._shared.stop
        if self._every_n_epochs is not None:
            self._shared.checks.append(self._check_epochs)

    def _check_epochs(self) -> None:
        if self._shared.epochs is None:
            raise ValueError(
                f"EvaluationHook got every_n_epochs={self._every_n_epochs}, and its session has no "
                "FeedHook, whose data has the epochs; give it one, FeedHook(repeat(loader, 10), "
                "names), or evaluate every_n_steps of your own loop"
            )
        self._shared.epochs.counts_epochs = True

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        self._coord = coord
        self._is_over = False
        self._concurrent = _Concurrent(coord, self._on_failure, self._name)
        if not self._is_restored:
            self._timer.update_last_triggered_step(session.global_step.value)
            self._results.begin_session()
        self._is_restored = False

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._every_n_epochs is not None:
            run_context.finish_with(lambda: self._look_at_epochs(run_context))
        elif self._timer.should_trigger_for_step(run_context.global_step.value):
            await self._begin_one(run_context)

    async def _look_at_epochs(self, run_context: SessionRunContext) -> None:
        """After each run: only the next item, or the end of the data, says that an epoch ends."""
        if run_context.stop_requested:
            return  # there may be no next item
        before, ended = await self._shared.epochs.epochs_ended()
        every = self._every_n_epochs
        if every is not None and ended // every > before // every:
            await self._begin_one(run_context)

    async def _begin_one(self, run_context: SessionRunContext) -> None:
        raw = raw_session_of(run_context.session)
        if self._is_exclusive:
            run_context.finish_with(lambda: self._evaluate_now(raw), exclusive=True)
        elif not self._concurrent.is_running:
            await self._start(raw, run_context.global_step.value)

    async def end(self, session: Any) -> None:
        await self.evaluate_last(session)
        await super().end(session)

    async def evaluate_last(self, session: Any) -> None:
        """Wait for the evaluations that still run, and evaluate at the end, once.

        A saver that decides by a metric of this hook calls it before its last save.
        """
        if self._is_over:
            return
        self._is_over = True
        await self._concurrent.wait_for_end()
        if not self._at_end or self._has_failed():
            return
        raw = raw_session_of(session)
        step = raw.global_step.value
        if self._results.are_of(step):
            return
        if self._is_exclusive:
            async with raw.global_step.exclusive():
                # another worker that shares it may have replaced it until then
                await self._evaluate_now(raw_session_of(session))
        else:
            await self._start(raw, step)
            await self._concurrent.wait_for_end()

    @property
    def _worker(self) -> int | None:
        """The number of the session's worker, for the log."""
        return None if self._session_stop is None else self._session_stop.worker_number

    def _has_failed(self) -> bool:
        """Whether an error will leave the session, or has left another worker's."""
        reason = self._coord.stop_reason
        return self._coord.error is not None or (reason is not None and reason.error is not None)

    async def _start(self, raw: RawSession, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        await self._concurrent.start(lambda: self._evaluate(raw))

    async def _evaluate_now(self, raw: RawSession) -> None:
        # other workers may have moved the step until they stood still
        self._timer.update_last_triggered_step(raw.global_step.value)
        await self._evaluate(raw)

    async def _evaluate(self, raw: RawSession) -> None:
        engine = current_engine()
        begun, step = engine.now(), raw.global_step.value
        self.num_running += 1
        try:
            with ended(begun_span(engine, Kind.EVALUATION, self._name)):
                numbers = await self._call(raw, step)
        except Exception as error:
            if not is_stop(error):
                raise
            logger.info(
                "%s at step %d was not finished: %s",
                self._name,
                step,
                error,
                extra=fields(self, step=step, worker=self._worker, reason=error),
            )
            return
        finally:
            self.num_running -= 1
        self._results.add(step, numbers)
        text = ", ".join(f"{key} = {value:g}" for key, value in numbers.items()) or "no results"
        secs = engine.now() - begun
        show(
            self,
            "%s at step %d: %s (%.2f sec)",
            self._name,
            step,
            text,
            secs,
            step=step,
            worker=self._worker,
            says_step=True,
        )
        for key, value in numbers.items():
            self._output.add_scalar(f"{self._name}/{key}", value, step)
        if not self._is_exclusive:
            for follow in self.followers:
                await follow(step, numbers)

    async def _call(self, raw: RawSession, step: int) -> dict[str, float]:
        """Call the user's function once; returns its results as floats by name."""
        # no worker that shares the raw session closes it meanwhile; at the end this one keeps it
        raw.enter_run(is_held=self._is_over)
        source = f"evaluate of EvaluationHook {self._name!r}"
        try:
            results = await raw.call(self._fn, raw.exposed, step, is_alone=self._is_exclusive)
        except Exception as error:
            if passes_for_input_end(error):
                # left as it is, it would pass for the end of training
                raise RuntimeError(
                    f"{source} let {error!r} out: its input has ended; catch that where it reads, "
                    "and return the results"
                ) from error
            raise
        finally:
            if raw.leave():
                await close_raw(raw)
        return _as_numbers(source, results)


def _as_numbers(source: str, results: object) -> dict[str, float]:
    expected = 'a mapping of names to numbers, such as {"accuracy": 0.93}'
    given: Mapping[Any, Any] = _check.instance(
        f"what {source} returned", results, Mapping, expected
    )
    advice = " (of an array its mean, of a graph's tensor what session.run gives for it)"
    return {
        _check.metric_name(key, f"the name of a result of {source}"): to_number(
            f"{key!r} of {source}", value, advice
        )
        for key, value in given.items()
    }


class _Concurrent:
    """The concurrent evaluations of one hook on one raw session, as side tasks, one at a time."""

    def __init__(self, coord: Coordinator, on_failure: OnFailure | Restart, name: str) -> None:
        self._coord = coord
        self._on_failure = on_failure
        self._max_restarts = on_failure.max_attempts if isinstance(on_failure, Restart) else 0
        self._name = name
        self.is_running = False
        """Also in the pause before it is called again."""
        self._is_paused = False  # so
        self._changed: Slot | None = None  # woken whenever it ends or fails

    async def start(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Start `fn()` as a side task, and suspend until it is called.

        So what it does before its first wait is done before the caller trains on: a step that
        does not suspend could otherwise be run a thousand times first.
        """
        engine = current_engine()
        begun = Slot(engine, f"the beginning of {self._name}")
        num_restarts_left = self._max_restarts

        async def run() -> None:
            nonlocal num_restarts_left
            begun.wake()
            self._is_paused = False
            try:
                await fn()
            except Exception:
                # else another one would begin meanwhile
                if num_restarts_left:
                    num_restarts_left -= 1
                    self._is_paused = True
                raise
            finally:
                self.is_running = self._is_paused
                if self._changed is not None:
                    self._changed.wake()

        self.is_running = True
        self._coord.start_soon(run, on_failure=self._on_failure, name=self._name)
        await engine.park(begun)

    async def wait_for_end(self) -> None:
        """Suspend until it has ended; after a stop not for one that waits for a restart.

        Cancellation safe.
        """
        engine, stop = current_engine(), self._coord.stop
        while self.is_running:
            slot = self._changed = Slot(engine, f"the end of {self._name}")
            # a stop does not end the wait for an evaluation that runs: it may finish
            if self._is_paused:
                stop.add(slot)
            try:
                if await engine.park(slot) is STOPPED:
                    return
            finally:
                stop.discard(slot)
