"""Sink: a store of metrics, with the points that it is given. It decides nothing about time."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .. import _check
from .._engine.threads import is_async

if TYPE_CHECKING:
    import numpy

_NUM_BINS = 30
_LARGEST = sys.float_info.max


@dataclass(frozen=True, eq=False)
class Histogram:
    """How the numbers of an array are distributed, in bins. `Histogram.of` makes it.

    NaN and infinities are left out of it.

    Example:
        spread = Histogram.of(np.array([0.0, 1.0, 1.0, 2.0]))
        assert (spread.least, spread.greatest, spread.num) == (0.0, 2.0, 4)
    """

    counts: numpy.ndarray
    """Numbers in each bin: int64, shape (bins,)."""
    edges: numpy.ndarray
    """Where the bins begin, and the last one ends: float64, shape (bins + 1,), increasing."""
    least: float
    """The least number; NaN if there is none, as the next one."""
    greatest: float
    """The greatest number."""
    num: int
    """How many numbers there are."""
    total: float
    """Their sum."""
    total_of_squares: float
    """The sum of their squares."""

    @classmethod
    def of(cls, numbers: Any, num_bins: int = _NUM_BINS) -> Self:
        """The histogram of an array of any shape and real dtype, in bins of one width."""
        import numpy as np

        num_bins = _check.integer("num_bins", num_bins, least=1)
        values = np.asarray(numbers).astype(np.float64, copy=False).ravel()
        values = values[np.isfinite(values)]
        least, greatest = (values.min(), values.max()) if values.size else (math.nan, math.nan)
        counts, edges = _binned(values, num_bins)
        with np.errstate(over="ignore", invalid="ignore"):
            total, squares = float(values.sum()), float(np.square(values).sum())
        counts = counts.astype(np.int64, copy=False)
        return cls(counts, edges, float(least), float(greatest), values.size, total, squares)

    def state_dict(self) -> dict[str, Any]:
        """What `from_state` takes, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The histogram that gave the state."""
        return cls(**state)


def _binned(values: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and edges; NumPy refuses finite numbers that are very close, or very far apart."""
    import numpy as np

    try:
        with np.errstate(over="raise", invalid="raise"):
            return np.histogram(values, num_bins)
    except (ValueError, FloatingPointError):
        scaled = values / 4  # the width of the bins is finite, too
        least, greatest = float(scaled.min()), float(scaled.max())
        most = max(abs(least), abs(greatest))
        margin = max(2 * num_bins * math.ulp(most), 1e-290) if greatest - least < most else 0.0
        counts, edges = np.histogram(scaled, num_bins, (least - margin, greatest + margin))
        return counts, np.clip(edges, -_LARGEST / 4, _LARGEST / 4) * 4


@dataclass(frozen=True, slots=True)
class Point:
    """The metrics of one step. A session makes it, for `Sink.write`.

    Example:
        point = Point(step=100, time=1_893_456_000.0, values={"loss": 0.25})
    """

    step: int
    """The global step after the run."""
    time: float
    """Seconds since 1970 (of a simulation since its beginning), when the values were taken."""
    values: Mapping[str, float | Histogram]
    """Numbers, which may be NaN or infinite, and histograms, by name."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where the points of an earlier process end. A session makes it, for `Sink.open`.

    Example:
        where = Resume(step=100, position={"bytes": 4096})
    """

    step: int
    """The global step that the session was restored at, or begins with: 0 for a new training."""
    position: Any
    """What `Sink.flush` returned last before the checkpoint; None if there is none."""


class Sink(ABC):
    """Where metrics go: a file, or another library's tracker. A `MetricsHook` opens and closes it.

    All its methods are called in one thread, which belongs to the sink alone, so they may block
    for as long as they like: training goes on, and points that do not fit into the queue are
    dropped. Only `check` is called on the event loop. Steps never go back, except after `rewind`.

    After a restore the points between the last position and the step of the checkpoint are written
    again: a sink that finds some of them in its store already (they were written, and the process
    was killed before the next checkpoint) leaves those out, and removes what is of later steps,
    as far as its store can; else it leaves out what it is given of steps that it has already.

    Example:
        class Printed(Sink):
            def write(self, point):
                print(point.step, dict(point.values))

        hooks = [MetricsHook(Printed(), ["loss"], every_n_steps=10)]
    """

    open_secs: ClassVar[float] = 0.0
    """How long a session waits, at most, for `open` before its first step: 0 for what may hang."""
    _outlet: Any = None  # that calls it, or that did last

    def check(self) -> None:  # noqa: B027 - may be left alone
        """In the hook's begin: raise ImportError if the library is missing. It must not block."""

    def open(self, resume: Resume) -> None:  # noqa: B027 - may be left alone
        """Open the store; called once for each session, before all others."""

    @abstractmethod
    def write(self, point: Point) -> None:
        """Take a point, which has at least one value; it may be kept in memory until `flush`.

        What it raises is logged once, and the point counts as dropped.
        """

    def flush(self) -> Any:
        """Make durable what was written; returns the position behind it, in values of JSON.

        Called when there is nothing to write just now, about every second, and before `close`. A
        sink that leaves this method alone takes each point once, in `write`: after a restore it is
        not given what had not been written at the checkpoint, of the last second or so.
        """
        return None

    def rewind(self, step: int) -> None:  # noqa: B027 - may be left alone
        """Forget what is of later steps than this one: the session was set back to it."""

    def close(self) -> None:  # noqa: B027 - may be left alone
        """Let go of the store; called once, also after an error, unless the thread is stuck."""


class FunctionSink(Sink):
    """A plain function as a sink: what `MetricsHook` makes of a function that it is given.

    Args:
        fn: takes the step, an int, and a dict of numbers and histograms by name. It is called in
            a thread of its own.

    Raises:
        TypeError: `fn` cannot be called, or is async.

    Example:
        hooks = [MetricsHook(lambda step, values: print(step, values), "loss", every_n_steps=10)]
    """

    def __init__(self, fn: Callable[[int, dict[str, float | Histogram]], object]) -> None:
        self._fn = _check.function("fn", fn, "a function that takes a step and a dict of values")
        if is_async(fn):
            raise TypeError(
                f"a sink is the async function {fn!r}; give a plain one: it is called in a thread "
                "of its own, where it may block"
            )

    def __repr__(self) -> str:
        return f"FunctionSink({self._fn!r})"

    def write(self, point: Point) -> None:
        self._fn(point.step, dict(point.values))
