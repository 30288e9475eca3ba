"""Results of evaluations, and the numbers by which hooks decide. Nothing here evaluates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .. import _check
from .._errors import MetricError
from .._hook import SessionRunArgs
from ..checkpoints import Mode
from ..checkpoints._mode import ask_for_mode, checked_mode, mode_of
from ..metrics._live import to_number


class Results:
    """The newest results of one hook's evaluations, by step; `name` is theirs, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: Mapping[str, float] | None = None
        self.latest_step: int | None = None
        self.followers: tuple[Callable[[int, Mapping[str, float]], None], ...] = ()
        """Called with the step and the results of each evaluation, also of one overtaken."""
        # else they are of a session that was lost, or of one before: any result is newer
        self._are_of_this_session = False

    def begin_session(self) -> None:
        """Another session begins, perhaps at an earlier step: the next results are the newest."""
        self._are_of_this_session = False

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Keep them if they are the newest by step; an evaluation may overtake an earlier one."""
        known = self.latest_step if self._are_of_this_session else None
        if known is None or step >= known:
            self.latest, self.latest_step = MappingProxyType(numbers), step
            self._are_of_this_session = True
        for follow in self.followers:
            follow(step, numbers)

    def are_of(self, step: int) -> bool:
        """Whether the newest belong to this step of this session."""
        return self._are_of_this_session and self.latest_step == step

    def newest(self, key: str) -> tuple[int, float] | None:
        """The step of the newest value of one metric, and the value; None before the first."""
        if self.latest is None or self.latest_step is None:
            return None
        return self.latest_step, self.of(key, self.latest, self.latest_step)

    def of(self, key: str, results: Mapping[str, float], step: int) -> float:
        """The value of one metric in these results; MetricError if there is none."""
        if key not in results:
            raise MetricError(
                f"{self.name!r} gave no {key!r} at step {step}, but "
                f"{', '.join(map(repr, results)) or 'nothing'}; ask for one of those"
            )
        return results[key]

    def state_dict(self) -> dict[str, Any]:
        latest = None if self.latest is None else dict(self.latest)
        return {"latest": latest, "latest_step": self.latest_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        latest, step = state["latest"], None
        if latest is not None:
            _check.instance("the saved results", latest, Mapping, "a mapping, or None")
            numbers = {
                _check.metric_name(key): _check.real(f"the saved {key}", value)
                for key, value in latest.items()
            }
            latest = MappingProxyType(numbers)
            step = _check.integer("the saved latest_step", state["latest_step"], least=0)
        self.latest, self.latest_step = latest, step
        self._are_of_this_session = latest is not None


class Metric:
    """One of the results of the evaluations of `owner`, a hook: `EvaluationHook.metric`.

    All its methods raise MetricError where the evaluations give no result called `key`.
    """

    def __init__(self, results: Results, key: str, owner: Any) -> None:
        self._results = results
        self._key = key
        self.owner = owner

    @property
    def key(self) -> str:
        """Its name among the results."""
        return self._key

    @property
    def name(self) -> str:
        """Its tag in TensorBoard, `<name of the evaluations>/<key>`."""
        return f"{self._results.name}/{self._key}"

    def follow(self, take: Callable[[int, float], None]) -> Callable[[], None]:
        """Call `take` with the step and the value of each result; returns what ends that."""
        results = self._results

        def on_results(step: int, numbers: Mapping[str, float]) -> None:
            take(step, results.of(self._key, numbers, step))

        def leave() -> None:
            results.followers = tuple(each for each in results.followers if each is not on_results)

        results.followers += (on_results,)
        return leave

    def newest(self) -> tuple[int, float] | None:
        """The step that was evaluated last, and the value; None if none was."""
        return self._results.newest(self._key)

    def at(self, step: int) -> float | None:
        """The value at this step of the present session; None if another one was evaluated last."""
        newest = self.newest()  # first: it raises where there is no such result
        return newest[1] if newest is not None and self._results.are_of(step) else None

    def check_is_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if its hook is none of a session's; `reader` begins the message."""
        if not any(each is self.owner for each in hooks):
            name = type(self.owner).__name__
            raise RuntimeError(
                f"{reader} a metric of an {name} that is none of the session's hooks, so it would "
                f"never be taken; add it: MonitoredSession([{name.lower()}, ...])"
            )

    def of(self, results: Mapping[str, float]) -> float | None:
        """The value in results of one evaluation, perhaps NaN; None if it gave none."""
        return results.get(self._key)

    def __call__(self) -> float | None:
        """The last value; None if there is none yet."""
        newest = self.newest()
        return None if newest is None else newest[1]

    def __repr__(self) -> str:
        return f"{self.owner!r}.metric({self._key!r})"


class MetricReader:
    """How one hook reads the metric that its user gave.

    All its methods raise MetricError where the metric is missing, or not a number.

    Args:
        metric: fetches of one number, a `Metric`, or a function that returns a number or None.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.evaluation = metric if isinstance(metric, Metric) else None
        self.args = None if callable(metric) else SessionRunArgs(metric)
        self._last_taken: int | None = None

    @property
    def is_function(self) -> bool:
        """Whether the user's function gives it; else the run or the evaluation of a step does."""
        return self.evaluation is None and self.args is None

    @property
    def shown(self) -> str:
        """It, for messages."""
        return named(self._metric)

    @property
    def output(self) -> str | None:
        """The name of the one output that it is; None if it is none."""
        return self._metric if isinstance(self._metric, str) else None

    def mode(self, given: object, advice: str) -> Mode:
        """The mode that was given, or else the one that the metric's name says.

        Where it says none, a warning asks for it; `advice` is what to do.

        Raises:
            TypeError, ValueError: what was given is no mode.
        """
        mode, name = checked_mode(given), _name_of(self._metric)
        if mode is None and name is not None:
            mode = mode_of(name)
        if mode is None:
            mode = ask_for_mode(f"The name of the metric {self.shown}", advice)
        return mode

    def is_same(self, other: MetricReader) -> bool:
        """Whether both read the same metric: one result, one fetch or one function."""
        mine, its = self._metric, other._metric
        if isinstance(mine, Metric) and isinstance(its, Metric):
            return mine.owner is its.owner and mine.key == its.key
        if self.args is None or other.args is None:
            return mine is its or (self.is_function and other.is_function and bool(mine == its))
        names = [_name_of(each) for each in (mine, its)]
        return mine is its or (None not in names and _tensor(names[0]) == _tensor(names[1]))

    def check_is_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if none of a session's hooks takes it: `reader` would never decide."""
        if self.evaluation is not None:
            self.evaluation.check_is_taken(hooks, f"{reader} decides by")

    def read(self, results: Any, step: int) -> tuple[int, float] | None:
        """The step and the number that were not read before, None if there is none.

        Each value of a `Metric` is read once.

        Args:
            results: what the last run gave for `args`, if it was asked for them.
            step: the global step now.

        Raises:
            MetricError: it is NaN, too.
        """
        if self.evaluation is not None:
            newest = self.evaluation.newest()
            if newest is None or newest[0] == self._last_taken:
                return None
            self._last_taken = newest[0]
            return newest[0], as_number(newest[1], self._metric)
        value = self._metric() if self.args is None else results
        if value is None and self.args is None:
            return None
        return step, as_number(value, self._metric)

    def number(self, results: Any) -> float:
        """The number, perhaps NaN, that a run gave for `args`."""
        return to_number(named(self._metric), results)

    def at(self, step: int) -> float | None:
        """What an evaluation of this step gave, or the function gives now, perhaps NaN; or None."""
        value = self._metric() if self.is_function else None
        if self.evaluation is not None:
            value = self.evaluation.at(step)
        return None if value is None else to_number(named(self._metric), value)

    @property
    def identity(self) -> dict[str, str]:
        """What tells the state of a hook that decides by it from others; see `HookState`."""
        if self.evaluation is not None:
            return {"name": self.evaluation.name}
        if self.args is None:  # a function, which may be renamed
            return {"place": getattr(self._metric, "__qualname__", "")}
        return {"name": text_of(self._metric)}

    def state_dict(self) -> dict[str, Any]:
        return {"last_taken": self._last_taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        step = state["last_taken"]
        step = None if step is None else _check.integer("the saved last_taken", step, least=0)
        self._last_taken = step


def _name_of(metric: Any) -> str | None:
    """The name of a result, an output, a tensor or a function; None if it has none."""
    if isinstance(metric, Metric):
        return metric.key
    attribute = "__name__" if callable(metric) else "name"
    name = metric if isinstance(metric, str) else getattr(metric, attribute, None)
    return name if isinstance(name, str) else None


def _tensor(name: str | None) -> str:
    """The name by which TensorFlow knows a fetch, where `loss` means `loss:0`."""
    return "" if name is None else name.removesuffix(":0")


def named(fetches: Any) -> str:
    """The fetches in messages: a tensor by its name."""
    name = getattr(fetches, "name", None)
    return repr(name if isinstance(name, str) else fetches)


def text_of(fetches: Any) -> str:
    """Names in fetches as one text that is the same in each process; "" if there are none."""
    if isinstance(fetches, Mapping):
        return ", ".join(f"{key}: {text_of(each)}" for key, each in fetches.items())
    if isinstance(fetches, (list, tuple)):
        return ", ".join(text_of(each) for each in fetches)
    name = fetches if isinstance(fetches, str) else getattr(fetches, "name", None)
    return name.removesuffix(":0") if isinstance(name, str) else ""


def as_number(value: Any, metric: Any) -> float:
    """The value as a float; MetricError if it is NaN, or not a number."""
    number = to_number(named(metric), value)
    if math.isnan(number):
        raise MetricError(
            f"the metric {named(metric)} is NaN, which is neither better nor worse than any other; "
            "what was saved stays as it is"
        )
    return number
