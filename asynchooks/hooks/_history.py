"""HistoryHook: the metrics of a training as rows in memory, and a plot of them."""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import _check
from .._errors import shown
from .._running.hook_state import HookState
from .._stopping.coordinator import Coordinator
from ..metrics._names import apart_from
from ._interval import names_options
from ._values import KeepsValues, Wanted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_ROWS = 10_000
_OF_ROW = ("step", "secs")
_FEW_POINTS = 30
"""Up to so many are marked;"""
_MANY_POINTS = 200
"""more than so many are drawn pale, with their running mean above them."""


@names_options
class HistoryHook(KeepsValues):
    """Keeps metrics in memory, a row for each step: for pandas, plots and notebooks.

    It takes them after the run of step 1 and of each multiple of `every_n_steps`, labelled with the
    step that the run made, at the end of the session as `MetricsHook` does, and all numbers that
    `session.log_metrics` is given meanwhile; histograms are left out. A value that comes late joins
    the row of its step, or gets one in its place; of two of one name the first stays. One that is
    called step or secs is kept as `step_` or `secs_`. `rows` stays after the session, and
    `pandas.DataFrame(hook.rows)` is a table.

    A checkpoint holds the rows, of which 10,000 numbers are 107 kB, so a resumed training goes on
    with those up to its step. Where a session is set back, and where the hook is used by a second
    session, later rows are dropped in the same way. A copy, also by `pickle`, has the rows, and
    nothing of a session.

    Args:
        values: what to take, as for `MetricsHook`, save `histogram(...)`. None: only what is
            logged.
        every_n_steps: steps between two rows, >= 1; 100 if neither this nor the next is given.
        every_n_secs: seconds between two rows, >= 0.
        max_rows: rows at most, >= 2. When there are more, every second one is dropped. So the
            newest half is always the densest. Rows of rare values, as of evaluations, stay.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, two values have one name, or
            one is called "step" or "secs".
        MetricError: in a run: a value is not a number. NaN and infinities are.
        FetchError: in a run: the step function has no such output (says which there are).

    Example:
        history = HistoryHook("loss", every_n_steps=10)
        async with MonitoredSession([history, StopAtStepHook(last_step=20)], creator) as session:
            while not session.should_stop():
                await session.run([])
        assert [row["step"] for row in history.rows] == [1, 10, 20]
        assert history.rows[-1]["loss"] == 0.5
    """

    uses_default_graph = False
    _shown = (("values", "_wanted"),)

    def __init__(
        self,
        values: Wanted = None,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        *,
        max_rows: int = _NUM_ROWS,
    ) -> None:
        super().__init__(values, every_n_steps, every_n_secs)
        self._max_rows = _check.integer("max_rows", max_rows, least=2)
        for name in self._values.names:
            if name in _OF_ROW:
                raise ValueError(
                    f"a value is called {name!r}, as each row's own {name}; give it another name: "
                    f'{{"my {name}": ...}}'
                )
        if self._values.has_arrays:
            raise TypeError(
                "HistoryHook keeps numbers, not histogram(...); give mean(...), or give the "
                "histogram to a MetricsHook"
            )
        self.rows: list[dict[str, Any]] = []
        """Rows by rising step: "step"; "secs", seconds of training from the first session's opening
        until the row's first value came; and floats by name. A row is never changed, but replaced
        where it gets more."""
        self._lock = threading.Lock()  # guards what is done to rows
        self._began_at = 0.0  # when `secs` was 0, on the session's clock
        self._secs_before = 0.0  # in sessions before this one
        self._is_open = False

    @property
    def names(self) -> list[str]:
        """The names of all values in the rows, in the order of their first row."""
        found = {name: None for row in list(self.rows) for name in row if name not in _OF_ROW}
        return list(found)

    async def begin(self) -> None:
        self._is_open = False
        await super().begin()
        self._secs_before = max((row["secs"] for row in self.rows), default=0.0)
        self._began_at = self._now() - self._secs_before

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        if not self._is_open:
            self._is_open = True
            self._began_at = self._now() - self._secs_before

    def _forget_after(self, step: int) -> None:
        super()._forget_after(step)
        with self._lock:
            del self.rows[bisect_right(self.rows, step, key=_step_of) :]

    def _keep(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {
            apart_from(_OF_ROW, name): value
            for name, value in values.items()
            if isinstance(value, float)
        }
        if not numbers:
            return
        secs = self._now() - self._began_at
        with self._lock:
            rows = self.rows
            is_newest = not rows or rows[-1]["step"] < step
            place = len(rows) if is_newest else bisect_left(rows, step, key=_step_of)
            if place < len(rows) and rows[place]["step"] == step:
                rows[place] = {**rows[place], **(numbers | rows[place])}
                return
            rows.insert(place, {"step": step, "secs": secs, **numbers})
            if len(rows) > self._max_rows:
                rows[:] = _thinned(rows)

    def state_dict(self) -> dict[str, Any]:
        """The rows, by columns."""
        with self._lock:
            rows = list(self.rows)
        secs = self._now() - self._began_at if self._is_open else self._secs_before
        state = {**super().state_dict(), "secs": secs, "rows": _columns(rows)}
        return HookState(state, place=", ".join(sorted(self._values.names)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._is_open:  # else the rows up to the step that the session is set back to stay
            rows = _rows(state["rows"])
            secs = _check.number("the saved secs", state["secs"], least=0)
            with self._lock:
                self.rows[:] = rows
            self._secs_before = secs

    def __getstate__(self) -> dict[str, Any]:
        """What it takes, and its rows, for `pickle` and `copy`; nothing of its session."""
        with self._lock:
            rows = list(self.rows)
        interval = self._interval
        steps = None if interval.every_secs is not None else interval.every_steps
        arguments = (self._wanted, steps, interval.every_secs)
        secs = max([self._secs_before, *(row["secs"] for row in rows)])
        return {"arguments": arguments, "max_rows": self._max_rows, "rows": rows, "secs": secs}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        HistoryHook.__init__(self, *state["arguments"], max_rows=state["max_rows"])
        self.rows[:] = state["rows"]
        self._secs_before = state["secs"]

    def plot(
        self,
        *names: str,
        ax: Axes | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw values against the step by matplotlib; needs the extra `plot`.

        An axis is logarithmic where values that are positive have fallen to less than a tenth.
        Values that are not finite are left out. Of more than 200 points of a name the running mean
        over a 50th of them is drawn above them. It opens no window; a notebook shows what it
        returns.

        Args:
            names: what to draw; all that there is by default.
            ax: draw all into these axes; by default each name has axes of its own in a new figure.
            path: of a file to write, whose ending says the format, such as ".png" or ".svg".

        Raises:
            ValueError: there are rows, but none has such a name.
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.

        Example:
            history.plot("loss", path="loss.png")
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plots need matplotlib, which is not installed; pip install 'asynchooks[plot]'"
            ) from error
        there_are = self.names
        for name in names:
            if there_are and name not in there_are:
                raise ValueError(
                    f"no row has a value {name!r}; there are {', '.join(map(repr, there_are))}"
                )
        chosen, rows = list(names) or there_are, list(self.rows)
        if ax is None:
            num = max(1, len(chosen))
            figure = Figure(figsize=(7.0, 0.8 + 2.4 * num), layout="constrained")
            panels = list(figure.subplots(num, sharex=True, squeeze=False)[:, 0])
            # a notebook shows figures as pictures once pyplot is imported, others by this
            figure._repr_png_ = partial(_png_of, figure)  # type: ignore[attr-defined]
        else:
            figure = ax.get_figure(root=True)  # type: ignore[assignment, call-arg, unused-ignore]
            panels = [ax] * max(1, len(chosen))
        for name, panel in zip(chosen, panels, strict=False):
            points = [(row["step"], row[name]) for row in rows if name in row]
            _draw(panel, name, [point for point in points if math.isfinite(point[1])])
        for panel in dict.fromkeys(panels):
            _finish(panel)
        panels[-1].set_xlabel("step")
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _step_of(row: Mapping[str, Any]) -> int:
    step: int = row["step"]
    return step


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without every second row of the kinds that are as frequent as the average, or more.

    The newest of each kind stays.
    """
    kinds = Counter(tuple(row) for row in rows)
    frequent = {kind: 0 for kind, num in kinds.items() if num * len(kinds) >= len(rows)}
    kept = []
    for row in reversed(rows):
        kind = tuple(row)
        if kind in frequent:
            frequent[kind] += 1
            if frequent[kind] % 2 == 0:
                continue
        kept.append(row)
    if len(kept) == len(rows):  # no two have the same names
        kept = kept[::2]
    return kept[::-1]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows by name: the places of those that have it, None if all do, and its values there."""
    import numpy as np

    columns = {}
    for name in {name: None for row in rows for name in row}:
        places = [place for place, row in enumerate(rows) if name in row]
        values = np.array([rows[place][name] for place in places])
        columns[name] = [None if len(places) == len(rows) else np.array(places, np.int32), values]
    return columns


def _rows(saved: object) -> list[dict[str, Any]]:
    """The rows of these columns; TypeError, ValueError, LookupError: they are not such columns."""
    saved = _check.instance("saved rows", saved, Mapping, "a mapping")
    num = len(_array("step", saved["step"][1], "iu")) if saved else 0
    rows: list[dict[str, Any]] = [{} for _ in range(num)]
    for name, (places, values) in saved.items():
        _check.metric_name(name, "the name of a saved column")
        indices = range(num) if places is None else _array(name, places, "iu")
        numbers = _array(name, values, "iu" if name == "step" else "f")
        for place, value in zip(indices, numbers, strict=True):
            if place < 0:
                raise ValueError(f"a saved value of {name!r} is in the row {place}")
            rows[place][name] = value
    steps = [row["step"] for row in rows if row["secs"] is not None]
    if not all(before < step for before, step in pairwise([-1, *steps])):
        raise ValueError(f"{num} saved rows have the steps {shown(steps)}; give each a later one")
    return rows


def _array(name: str, saved: object, kinds: str) -> list[Any]:
    import numpy as np

    if not isinstance(saved, np.ndarray) or saved.ndim != 1 or saved.dtype.kind not in kinds:
        raise TypeError(f"the saved column {name!r} is {shown(saved)}; give an array of numbers")
    numbers: list[Any] = saved.tolist()
    return numbers


def _png_of(figure: Figure) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


def _draw(axes: Axes, name: str, points: Sequence[tuple[int, float]]) -> None:
    """One line; with its running mean where there are many points."""
    import numpy as np

    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) <= _MANY_POINTS:
        marker = "o" if len(points) <= _FEW_POINTS else None
        axes.plot(steps, values, label=name, linewidth=1.6, marker=marker, markersize=3.5)
        return
    (line,) = axes.plot(steps, values, linewidth=0.8, alpha=0.3)
    half = len(points) // 100
    sums = np.cumsum([0.0, *values])
    places = np.arange(len(points))
    first, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(points))
    means = (sums[end] - sums[first]) / (end - first)
    axes.plot(steps, means, label=name, linewidth=1.8, color=line.get_color())


def _finish(axes: Axes) -> None:
    """What surrounds the lines."""
    import numpy as np

    lines = [np.asarray(line.get_ydata(), float) for line in axes.get_lines()]
    lines = [line for line in lines if line.size]
    most = max((line.max() for line in lines), default=0.0)
    if lines and all(line.min() > 0 and 10 * line[-1] < most for line in lines):
        axes.set_yscale("log")
    labels = [str(line.get_label()) for line in axes.get_lines()]
    labels = [label for label in labels if not label.startswith("_")]
    if len(labels) > 1:
        axes.legend(frameon=False)
    elif labels:
        axes.set_ylabel(labels[0])
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    axes.locator_params(axis="x", integer=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
