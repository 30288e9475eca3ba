"""What a hook may read beside the outputs of runs: means over runs, and statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _check


class Mean(NamedTuple):
    """What `mean` returns."""

    fetches: Any

    def __repr__(self) -> str:
        return f"mean({self.fetches!r})"


class Spread(NamedTuple):
    """What `histogram` returns."""

    fetches: Any

    def __repr__(self) -> str:
        return f"histogram({self.fetches!r})"


def mean(fetches: Any) -> object:
    """The mean of an output over all runs since the last point, in place of its last value.

    Each run is asked for it, so on a TensorFlow graph each run computes it. Runs where it is NaN
    count: the mean is NaN then.

    Args:
        fetches: one number: the name of an output, or a graph's tensor.

    Example:
        hooks = [MetricsHook(CsvSink("metrics.csv"), ["loss", mean("accuracy")])]
    """
    return Mean(fetches)


def histogram(fetches: Any) -> object:
    """The distribution of an output that is an array, for sinks that show histograms.

    The array is copied in the run; the histogram is made in the thread of the sink.

    Args:
        fetches: an array of any shape and a real dtype: the name of an output, or a graph's tensor.

    Example:
        hooks = [MetricsHook(TensorBoardSink("logs"), histogram("gradients"), every_n_steps=500)]
    """
    return Spread(fetches)


class Look(NamedTuple):
    """When a hook reads its statistics. The hook makes it, for `Reading.read`.

    Example:
        assert steps_per_sec().read(Look(secs=2.0, steps=100)) == 50
    """

    secs: float
    """Seconds since the last point, or since the session was opened or recovered."""
    steps: int
    """Global steps since then."""


class Reading(ABC):
    """A statistic that a hook reads when it is due; `steps_per_sec()` and the like make it.

    Example:
        class FreeMemory(Reading):
            name = "free_memory"

            def read(self, look):
                return 1.5e9

        hooks = [MetricsHook(CsvSink("metrics.csv"), FreeMemory())]
    """

    name: str
    """What it is called unless its user says otherwise."""

    @abstractmethod
    def read(self, look: Look) -> float | None:
        """Its value now; None if there is none yet. It must not wait."""


class _StepsPerSec(Reading):
    name = "steps_per_sec"

    def read(self, look: Look) -> float | None:
        return look.steps / look.secs if look.secs > 0 else None


def steps_per_sec() -> Reading:
    """Global steps per second since the last point, or since the session was opened.

    Example:
        hooks = [MetricsHook(CsvSink("metrics.csv"), ["loss", steps_per_sec()])]
    """
    return _StepsPerSec()


class DataWait(NamedTuple):
    """What `data_wait` returns."""

    stage: Any  # of asynchooks.data, a room above

    @property
    def name(self) -> str:
        """What it is called unless its user says otherwise."""
        return "data_wait"


def data_wait(stage: Any) -> object:
    """The share of the time since the last point in which training waited for its input, 0 to 1.

    As `DataWaitHook` has it: it counts the waits of `FeedHook` or `session.batches` in this
    session, not those of a stage that reads ahead.

    Args:
        stage: the last one, which the session reads.

    Example:
        source = prefetch(batch(records, 32), 2)
        hooks = [FeedHook(source, "images"), MetricsHook(CsvSink("m.csv"), data_wait(source))]
    """
    return DataWait(_stage("data_wait", stage))


class _Staleness(Reading):
    name = "staleness"

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self._last: Mapping[int, int] = {}

    def read(self, look: Look) -> float | None:
        ages = dict(self._stage.statistics().staleness)
        last, self._last = self._last, ages
        new = {age: max(0, num - last.get(age, 0)) for age, num in ages.items()}
        num = sum(new.values())
        return sum(age * each for age, each in new.items()) / num if num else None


def staleness(stage: Any) -> Reading:
    """The mean staleness, in steps, of the results that `rollouts` gave out since the last point.

    Args:
        stage: what `rollouts` returned.

    Example:
        groups = rollouts(answer, prompts, 8, concurrency=16, max_staleness=2)
        hooks = [FeedHook(groups, "images"), MetricsHook(CsvSink("m.csv"), staleness(groups))]
    """
    stage = _stage("staleness", stage)
    if not hasattr(stage.statistics(), "staleness"):
        raise TypeError(f"staleness is of {stage!r}; give the stage that rollouts(...) returned")
    return _Staleness(stage)


def _stage(name: str, stage: Any) -> Any:
    statistics = getattr(stage, "statistics", None)
    if statistics is None:
        raise TypeError(f"{name} is of {stage!r}; give a stage, such as prefetch(...) returns")
    _check.function("statistics", statistics)
    return stage
