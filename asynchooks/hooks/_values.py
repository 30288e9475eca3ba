"""What hooks that keep or show metrics read of runs, and when. It writes nothing anywhere."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import _check
from .._engine.current import current_engine
from .._engine.threads import is_async
from .._errors import MetricError, shown
from .._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
)
from .._stopping.coordinator import Coordinator
from ..backends._raw_session import RawSession, raw_session_of
from ..data._consumers import Consumers, consumers_of_last_stage
from ..metrics._live import number_of
from ..metrics._readings import DataWait, Mean, Spread, StepsPerSec
from ._interval import Interval
from ._logging_tensor import _as_graph_element
from ._metrics import Metric, Result

Wanted = Any
"""What a user asks for: a name, a tensor, `mean`, `histogram`, a statistic, a metric of an
evaluation, a function; or a list of these, or a mapping with names of their own."""

_LAST_RUNS = 16
"""So many steps before the limit each run may be a worker's last one: it is asked for all."""
_MOST_GIVEN = 4096
"""Steps whose values are remembered, so that none is given twice."""


class _MeanOverRuns:
    __slots__ = ("fetches", "num", "total")

    def __init__(self, fetches: Any) -> None:
        self.fetches = fetches
        self.reset()

    def reset(self) -> None:
        self.num, self.total = 0, 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value


class _DataWaitReading:
    """What share of the time a session waits for the last stage of its input."""

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._stop: Any = None
        self._last = 0.0

    def begin(self, session: SessionHooks) -> None:
        self._stop = session.stop
        self._last = self._consumers.waited(self._stop)

    def read(self, secs: float, steps: int) -> float | None:
        waited = self._consumers.waited(self._stop)
        last, self._last = self._last, waited
        return min(1.0, max(0.0, waited - last) / secs) if secs > 0 else None


class ValueReader:
    """Reads what the user of one hook asked for.

    Args:
        wanted: see `Wanted`.
        hook: its name, for errors.

    Raises:
        TypeError: something has no name, or cannot be read.
        ValueError: two things have one name.
    """

    def __init__(self, wanted: Wanted, hook: str) -> None:
        self.names: set[str] = set()
        """Of all that was asked for; a function that returns a mapping adds to them."""
        self._outputs: dict[str, Any] = {}  # fetches, or a Spread of them
        self._means: dict[str, _MeanOverRuns] = {}
        self._readings: dict[str, StepsPerSec | _DataWaitReading] = {}
        self._metrics: dict[str, Result] = {}
        self._functions: dict[str, Callable[[], Any]] = {}
        self._leave: list[Callable[[], None]] = []  # ends that evaluations are followed
        self._look: tuple[float, int] = (0.0, 0)
        self._is_restored = False  # the means, from a checkpoint, for the next session
        for name, each in _pairs(wanted, hook):
            if name in self.names:
                raise ValueError(
                    f"{hook} was given two values called {name!r}; give names of their own: "
                    f"{{{name!r}: ..., {name + ' 2'!r}: ...}}"
                )
            self.names.add(name)
            self._add(name, each)

    def _add(self, name: str, each: Any) -> None:
        if isinstance(each, Mean):
            self._means[name] = _MeanOverRuns(each.fetches)
        elif isinstance(each, DataWait):
            consumers = consumers_of_last_stage(each.stage, "data_wait")
            self._readings[name] = _DataWaitReading(consumers)
        elif isinstance(each, StepsPerSec):
            self._readings[name] = each
        elif isinstance(each, Metric):
            self._add(name, each.source)
        elif isinstance(each, Result):
            self._metrics[name] = each
        elif not callable(each) or isinstance(each, Spread):
            self._outputs[name] = each
        elif is_async(each):
            raise TypeError(
                f"the value {name!r} is the async function {each!r}; give a plain one that "
                "does not wait, or call session.log_metrics in a side task"
            )
        else:
            self._functions[name] = each

    @property
    def has_arrays(self) -> bool:
        """Whether histograms are among what was asked for."""
        return any(isinstance(each, Spread) for each in self._outputs.values())

    def begin(self, session: SessionHooks) -> None:
        """In the hook's begin; KeyError, ValueError: the graph has no such name, or several."""
        self.close()  # of a session that was dropped
        if not self._is_restored:
            self._reset_means()
        for reading in self._readings.values():
            if isinstance(reading, _DataWaitReading):
                reading.begin(session)
        means = [mean.fetches for mean in self._means.values()]
        outputs = [
            each.fetches if isinstance(each, Spread) else each for each in self._outputs.values()
        ]
        graph = begin_graph.get()
        if graph is not None:
            means, outputs = (_as_graph_element(graph, each) for each in (means, outputs))
        self.args_of_each = SessionRunArgs(means) if means else None
        """What to ask a run for at which the hook is not due."""
        self.args_of_due = SessionRunArgs([*means, *outputs]) if outputs or means else None
        """What to ask a run for at which it is."""

    def begin_session(self, raw: RawSession, now: float) -> None:
        """A raw session was created: statistics count from here on."""
        self._raw, self._look, self._is_restored = raw, (now, raw.global_step.value), False
        for each in self._outputs.values():  # of the last run, as no run knows that it is the last
            raw.keep_outputs(each)

    def _reset_means(self) -> None:
        for mean in self._means.values():
            mean.reset()

    def has_all(self, results: Sequence[Any] | None) -> bool:
        """Whether these results are of a run that was asked for `args_of_due`."""
        return not self._outputs or (results is not None and len(results) > len(self._means))

    def take(self, results: Sequence[Any]) -> None:
        """Take what each run gives."""
        for (name, mean), value in zip(self._means.items(), results, strict=False):
            mean.add(number_of(name, value))

    def read(self, results: Sequence[Any] | None, now: float, step: int) -> dict[str, Any]:
        """What was asked for, by name: floats, and copies of arrays for histograms.

        Args:
            results: of this run, whose values for each run were taken already.
            now: seconds on the engine's clock.
            step: the global step after the run.

        Raises:
            MetricError: a value is not a number.
        """
        (then, last_step), self._look = self._look, (now, step)
        found = {
            name: reading.read(now - then, step - last_step)
            for name, reading in self._readings.items()
        }
        if not self._leave:
            newest = {name: metric.newest() for name, metric in self._metrics.items()}
            found |= {name: each and each[1] for name, each in newest.items()}
        values = self.read_last(results, step, found)
        self._reset_means()
        return values

    def read_last(
        self,
        results: Sequence[Any] | None,
        step: int,
        found: Mapping[str, float | None] | None = None,
    ) -> dict[str, Any]:
        """What there is at the end of a session, where the hook was not due: no statistics.

        The means go on: a session that is resumed from here has those of an uninterrupted one.

        Args:
            results: of the last run; None if it was not asked for outputs: then those are read that
                the raw session keeps of it.
            step: that of the last run.
            found: what else there is; None where there is no value yet.
        """
        values: dict[str, Any] = {}
        if self._outputs and results is None:
            kept = self._raw.kept_outputs(step)
            values = {
                name: number_of(name, kept[each])
                for name, each in self._outputs.items()
                if isinstance(each, str) and each in kept
            }
        elif self._outputs and results is not None:
            of_due = results[len(self._means) :]
            for (name, each), value in zip(self._outputs.items(), of_due, strict=True):
                is_spread = isinstance(each, Spread)
                values[name] = _copied(name, value) if is_spread else number_of(name, value)
        values |= {name: each.total / each.num for name, each in self._means.items() if each.num}
        values |= {name: float(each) for name, each in (found or {}).items() if each is not None}
        for name, fn in self._functions.items():
            _add_result(values, name, fn())
        return values

    def follow(self, take: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Give each result of evaluations that was asked for to `take`, when it comes.

        With the step that was evaluated, which is no step at which the hook is due. Without this
        `read` gives the newest ones.
        """

        def follow_one(name: str, metric: Result) -> Callable[[], None]:
            return metric.follow(lambda step, value: take(step, {name: value}))

        self._leave = [follow_one(name, metric) for name, metric in self._metrics.items()]

    def check_are_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if an evaluation that was asked for is none of a session's hooks."""
        for metric in self._metrics.values():
            metric.check_is_taken(hooks, f"{reader} keeps")

    def close(self) -> None:
        """The session has ended, or was dropped."""
        leaving, self._leave = self._leave, []
        for leave in leaving:
            leave()

    def state_dict(self) -> dict[str, Any]:
        """The means that are under way."""
        means = {name: [each.num, each.total] for name, each in self._means.items() if each.num}
        return {"means": means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = _check.instance("saved means", state["means"], Mapping, "a mapping")
        for name, mean in self._means.items():
            num, total = saved.get(name, (0, 0.0))
            mean.num = _check.integer("a saved number of runs", num, least=0)
            mean.total = _check.real("a saved sum", total)
        self._is_restored = True


class _Given:
    """Which values there are of each step: a later one of the same name changes none.

    It remembers the last `_MOST_GIVEN` steps that were given values. Any thread may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # by step

    def new(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the values that the step does not have yet; it has them from now on."""
        with self._lock:
            names = self._names.get(step, ())
            if names:
                values = {name: value for name, value in values.items() if name not in names}
            self._names[step] = (*names, *values)
            if len(self._names) > _MOST_GIVEN:
                self._names.popitem(last=False)
            return values

    def set_back(self, step: int) -> None:
        """The session was set back to this step: later ones have no values."""
        with self._lock:
            for later in [each for each in self._names if each > step]:
                del self._names[later]


class KeepsValues(SessionRunHook):
    """A hook that reads values of runs when it is due, and is given those that are logged.

    The one rule for all of them: a value belongs to the step of the run that gave it, of the
    evaluation that did, or at which it was logged, however late it comes; and it stays as it is,
    whatever comes later of the same name and step.

    Its classes say themselves what they do not need: `uses_default_graph` and the like.
    """

    needs_global_step = True

    def __init__(
        self, wanted: Wanted, every_n_steps: int | None, every_n_secs: float | None
    ) -> None:
        self._wanted = wanted
        self._values = ValueReader(wanted, type(self).__name__)
        if isinstance(wanted, str) and isinstance(every_n_steps, str):
            raise TypeError(
                f"every_n_steps is {every_n_steps!r}; give an integer >= 1, and several values as "
                f"a list: [{wanted!r}, {every_n_steps!r}]"
            )
        self._interval = Interval(every_n_steps, every_n_secs)
        self._is_by_hand = False  # before `begin`, and where a class's own `begin` fails
        self._args: SessionRunArgs | None = None  # for the next run
        self._is_due = self._asks_for_all = True  # at the next run
        self._idle_until = 0.0  # below this step there is nothing to do after a run,
        self._idle_until_secs = 0.0  # nor before this time
        self._given = _Given()
        self._last_step = -1  # of the last run; -1 before the first
        self._read_step = -1  # of the last run at which it was due
        self._last_results: Sequence[Any] | None = None  # of the last run, if it was asked for all

    @abstractmethod
    def _keep(self, step: int, values: Mapping[str, Any]) -> None:
        """Take floats and arrays that a run gave, or floats and histograms that were logged.

        The step has no values of these names so far, but it may be earlier than others that have
        some. From any thread, up to the end of side tasks; it must neither wait nor raise.
        """

    def _forget_after(self, step: int) -> None:
        """The step has gone back to this one: the values of later steps are those of old ones."""
        self._given.set_back(step)
        self._live.set_back(step)

    async def begin(self) -> None:
        session = SessionHooks.of(self)
        self._values.begin(session)
        self._values.follow(self._publish)
        name = type(self).__name__
        hooks = session.hooks, session.begun
        session.checks.append(lambda: self._values.check_are_taken([*hooks[0], *hooks[1]], name))
        self._is_by_hand = session.is_by_hand
        self._now = current_engine().now
        self._interval.reset()
        self._given = _Given()
        self._last_step, self._read_step, self._last_results = -1, -1, None
        self._live = session.live
        self._live.loggers += (self._take,)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._step = session.global_step
        # another library's loop says of no step that it is the last one, and has all outputs anyway
        self._is_of_trainer = isinstance(session, RawSession) and session.begins_training
        step = self._step.value
        self._forget_after(step)
        self._last_step, self._read_step, self._last_results = -1, -1, None
        self._interval.begin(step, self._now)
        self._values.begin_session(raw_session_of(session), self._now())
        self._plan(step, is_first=True)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.step
        if step < self._last_step:  # a graph's variable, which the program has set
            self._interval.set_back(step)
            self._forget_after(step - 1)
            self._idle_until = 0
        self._last_step = step
        results = run_values.results
        if results is None and step < self._idle_until and self._now() < self._idle_until_secs:
            return
        if results is not None:
            self._values.take(results)
        if self._is_due:
            self._interval.update(step)
            self._read_step, self._last_results = step, None
            values = self._values.read(results, self._now(), step)
            if values:
                self._publish(step, values)
        else:
            self._last_results = results if self._asks_for_all else None
        self._plan(step)

    def _take(self, step: int, values: Mapping[str, Any]) -> None:
        new = self._given.new(step, values)
        if new:
            self._keep(step, new)

    def _publish(self, step: int, values: Mapping[str, Any]) -> None:
        self._take(step, values)
        self._live.publish(step, values)

    def _publish_last(self) -> None:
        """Give what the last run has given, unless the hook was due at it."""
        step = self._last_step
        if step == self._read_step:
            return
        self._read_step = step
        values = self._values.read_last(self._last_results, step)
        self._last_results = None
        if values:
            self._publish(step, values)

    def _plan(self, step: int, *, is_first: bool = False) -> None:
        """Decide what the next run is asked for; the first one is asked for all."""
        values, interval = self._values, self._interval
        limit = 0 if self._is_of_trainer else self._step.limit  # its last run may be any
        last_runs_from = math.inf if limit is None else limit - _LAST_RUNS
        self._is_due = interval.is_due(step + 1)
        self._asks_for_all = is_first or self._is_due or step >= last_runs_from
        self._args = values.args_of_due if self._asks_for_all else values.args_of_each
        self._idle_until = 0 if self._asks_for_all else min(interval.idle_until, last_runs_from)
        self._idle_until_secs = interval.idle_until_secs

    async def end(self, session: Any) -> None:
        try:
            self._publish_last()
        finally:
            if self._is_by_hand:  # or under TensorFlow's session: neither calls `after_close`
                await self._close()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self.end(session)

    async def after_close(self, exception: BaseException | None) -> bool | None:
        await self._close()  # not in `end`: side tasks log metrics up to their own end
        return None

    async def _close(self) -> None:
        self._values.close()

    def state_dict(self) -> dict[str, Any]:
        return {"interval": self._interval.state_dict(), "values": self._values.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._interval.load_state_dict(state["interval"])
        self._values.load_state_dict(state["values"])


def _pairs(wanted: Wanted, hook: str) -> Iterable[tuple[str, Any]]:
    """The names and what they stand for."""
    if wanted is None:
        return []
    if isinstance(wanted, Mapping):
        for name in wanted:
            _check.metric_name(name, "the name of a value")
        return list(wanted.items())
    kinds = (str, Mean, Spread, DataWait, StepsPerSec, Metric)
    if isinstance(wanted, kinds) or callable(wanted) or not isinstance(wanted, Iterable):
        wanted = [wanted]
    return [(_name_of(each, hook), each) for each in wanted]


def _name_of(each: Any, hook: str) -> str:
    fetches = each.fetches if isinstance(each, (Mean, Spread)) else each
    name = fetches if isinstance(fetches, str) else getattr(fetches, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{hook} was given {shown(each)}, which has no name; give it one: "
            f'{{"my name": {getattr(each, "__name__", "...")}}}'
        )
    return _check.metric_name(name, "the name of a value").removesuffix(":0")


def _add_result(values: dict[str, Any], name: str, result: Any) -> None:
    """What a function of the user returned: a number, several by name, or None for nothing."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            full = _check.metric_name(f"{name}/{key}")
            if full in values:
                raise MetricError(
                    f"the value {name!r} returned {key!r}, whose name {full!r} another value of "
                    "the same hook has, too; give one of them another name"
                )
            values[full] = number_of(full, value)
    elif result is not None:
        values[name] = number_of(name, result)


def _copied(name: str, value: Any) -> Any:
    """A copy of an array: the model may go on writing into its own."""
    import numpy as np

    detach = getattr(value, "detach", None)  # of a PyTorch tensor with a gradient
    if detach is not None:
        value = detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which NumPy does not have
            value = value.float()
    array = np.array(value)
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # of ml_dtypes
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        raise MetricError(
            f"histogram({name!r}) is of {shown(value)}; give an array of real numbers"
        )
    return array
