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

METRIC_FETCHES = "the metric; that of an evaluation is evaluation.metric(name)"
"""What hooks that decide by a metric fetch, for messages."""


class Results:
    """The newest results of one hook's evaluations, by step; `name` is theirs, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: Mapping[str, float] | None = None
        self.latest_step: int | None = None
        self.followers: tuple[Callable[[int, Mapping[str, float]], None], ...] = ()
        """Called with the step and the results of each evaluation."""
        # else they are of a session that was lost, or of one before
        self._are_of_this_session = False

    def begin_session(self) -> None:
        """Another session begins, perhaps at an earlier step."""
        self._are_of_this_session = False

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Keep them: evaluations of one hook follow each other."""
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


class Result:
    """One of the results of the evaluations of `owner`, a hook.

    All its methods raise MetricError where the evaluations give no result called `key`.
    """

    def __init__(self, results: Results, key: str, owner: Any) -> None:
        self._results, self.key, self.owner = results, key, owner

    @property
    def name(self) -> str:
        """Its tag in TensorBoard, `<name of the evaluations>/<key>`."""
        return f"{self._results.name}/{self.key}"

    def follow(self, take: Callable[[int, float], None]) -> Callable[[], None]:
        """Call `take` with the step and the value of each result; returns what ends that."""
        results = self._results

        def on_results(step: int, numbers: Mapping[str, float]) -> None:
            take(step, results.of(self.key, numbers, step))

        def leave() -> None:
            results.followers = tuple(each for each in results.followers if each is not on_results)

        results.followers += (on_results,)
        return leave

    def newest(self) -> tuple[int, float] | None:
        """The step that was evaluated last, and the value; None if none was."""
        return self._results.newest(self.key)

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

    def __repr__(self) -> str:
        return f"{self.owner!r}.metric({self.key!r})"


class Metric:
    """A number by which hooks decide, and whether smaller or larger is better.

    You make it, or `EvaluationHook.metric` does, and give it to an `EarlyStoppingHook`, to a
    `CheckpointSaverHook` that keeps the best, or to both: so the direction is told once. Where the
    name of the output, of the result or of the function says it plainly, as `val_loss` and
    `accuracy` do, it need not be told, and these hooks take the name or the function as it is.

    Args:
        source: fetches of one number, such as "loss"; or a function that returns a number, or None
            where there is none.
        mode: `Mode.MIN` if smaller is better, `Mode.MAX` if larger is, or their texts. None takes
            it from the name; if that says nothing, the first hook that has to know logs a warning,
            and smaller is better.

    Raises:
        TypeError, ValueError: `source` is None, or `mode` no mode.
        MetricError: when called: the evaluations give no such result.

    Example:
        returns = Metric("episode_return", mode="max")
        keeping = Retention(keep_best=1)
        hooks = [
            EarlyStoppingHook(returns, patience=10, restore_best=True),
            CheckpointSaverHook(
                "best", save_steps=1, saver=saver, metric=returns, retention=keeping
            ),
        ]
    """

    def __init__(self, source: Any, mode: Mode | str | None = None) -> None:
        if source is None:
            raise TypeError('metric is None; give fetches, such as "loss", or a function')
        self.source = source
        self.result = source if isinstance(source, Result) else None
        self.args = None if callable(source) or self.result else SessionRunArgs(source)
        self.told = checked_mode(mode)
        name = _name_of(source)
        self._mode = self.told or (None if name is None else mode_of(name))

    @classmethod
    def of(cls, given: Any, mode: object, taker: str) -> Metric:
        """The metric that was given to a hook, with the mode that was given beside it.

        Raises:
            ValueError: each has a mode, and not the same one; `taker` begins the message.
        """
        metric, told = given if isinstance(given, cls) else cls(given), checked_mode(mode)
        if told is None:
            return metric
        if metric.told not in (None, told):
            raise ValueError(
                f"{taker} got mode={told}, and {metric!r}, which says {metric.told}; say it once, "
                "on the metric"
            )
        return cls(metric.source, told)

    @property
    def mode(self) -> Mode:
        """Which is better; where nothing says it, the first look asks for it in the log."""
        if self._mode is None:
            advice = (
                'Say it on the metric: Metric(..., mode="max"), evaluation.metric(..., mode="max")'
            )
            self._mode = ask_for_mode(f"The name of the metric {self.shown}", advice)
        return self._mode

    @property
    def shown(self) -> str:
        """It, for messages."""
        return named(self.source)

    @property
    def name(self) -> str | None:
        """The tag of an evaluation's result, or the name of the output; None if it has none."""
        return _name_of(self.source) if self.result is None else self.result.name

    @property
    def identity(self) -> dict[str, str]:
        """What tells the state of a hook that decides by it from others; see `HookState`."""
        if self.args is None and self.result is None:  # a function, which may be renamed
            return {"place": getattr(self.source, "__qualname__", "")}
        return {"name": text_of(self.source)}

    def is_same(self, other: Metric) -> bool:
        """Whether both are of the same number: one result, one fetch or one function."""
        mine, its = self.source, other.source
        if self.result is not None and other.result is not None:
            return self.result.owner is other.result.owner and mine.key == its.key
        if self.args is None or other.args is None:
            return mine is its or (self.args is other.args and bool(mine == its))
        return mine is its or text_of(mine) == text_of(its) != ""

    def check_is_taken(self, hooks: Iterable[Any], reader: str) -> None:
        """Raise RuntimeError if none of a session's hooks takes it: `reader` would never decide."""
        if self.result is not None:
            self.result.check_is_taken(hooks, f"{reader} decides by")

    def read(self, results: Any, step: int) -> tuple[int, float] | None:
        """The newest number and its step; None if there is none.

        Args:
            results: what the last run gave for `args`, if it was asked for them.
            step: the global step now.

        Raises:
            MetricError: it is missing, NaN, or not a number.
        """
        if self.args is not None:
            value: Any = results
        elif self.result is None:
            value = self.source()
        else:
            step, value = self.result.newest() or (step, None)
        if value is None and self.args is None:
            return None
        number = self.number(value)
        if math.isnan(number):
            raise MetricError(
                f"the metric {self.shown} is NaN, which is neither better nor worse than any "
                "other; what was saved stays as it is"
            )
        return step, number

    def number(self, value: Any) -> float:
        """The value as a number, perhaps NaN; MetricError if it is none."""
        return to_number(self.shown, value)

    def at(self, step: int) -> float | None:
        """What an evaluation of this step gave, or the function gives now, perhaps NaN; or None."""
        if self.args is not None:
            return None
        value = self.source() if self.result is None else self.result.at(step)
        return None if value is None else self.number(value)

    def __call__(self) -> Any:
        """The newest value; None if there is none yet, and of fetches, which only runs have."""
        if self.args is not None:
            return None
        if self.result is None:
            return self.source()
        newest = self.result.newest()
        return None if newest is None else newest[1]

    def __repr__(self) -> str:
        told = "" if self.told is None else f", mode={self.told}"
        if self.result is not None:
            return f"{self.result!r}"[:-1] + f"{told})"
        return f"Metric({self.shown}{told})"


def _name_of(source: Any) -> str | None:
    """The name of a result, an output, a tensor or a function; None if it has none."""
    if isinstance(source, Result):
        return source.key
    attribute = "__name__" if callable(source) else "name"
    name = source if isinstance(source, str) else getattr(source, attribute, None)
    return name if isinstance(name, str) else None


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
