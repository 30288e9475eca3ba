"""What a hook may read beside the outputs of runs: means over runs, and statistics."""

from __future__ import annotations

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


class StepsPerSec:
    """What `steps_per_sec` returns."""

    name = "steps_per_sec"
    """What it is called unless its user says otherwise."""

    def read(self, secs: float, steps: int) -> float | None:
        """Its value, so many seconds and steps after the last point; None if there is none."""
        return steps / secs if secs > 0 else None


def steps_per_sec() -> object:
    """Global steps per second since the last point, or since the session was opened.

    Example:
        hooks = [MetricsHook(CsvSink("metrics.csv"), ["loss", steps_per_sec()])]
    """
    return StepsPerSec()


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
    statistics = getattr(stage, "statistics", None)
    if statistics is None:
        raise TypeError(f"data_wait is of {stage!r}; give a stage, such as prefetch(...) returns")
    _check.function("statistics", statistics)
    return DataWait(stage)
