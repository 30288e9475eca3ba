"""HistoryHook: the metrics of a training as rows in memory, and a plot of them."""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from .. import _check
from .._errors import shown
from .._running.hook_state import HookState
from .._stopping.coordinator import Coordinator
from ..metrics._names import apart_from
from ._values import KeepsValues, Wanted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_ROWS = 10_000
_OF_ROW = ("step", "secs")
_FEW_POINTS = 30
"""Up to so many are marked in a plot."""


@_check.names_options
class HistoryHook(KeepsValues):
    """Keeps metrics in memory, a row for each step: for pandas, plots and notebooks.

    It takes them after the run of step 1 and of each multiple of `every_n_steps`, labelled with the
    step that the run made, at the end of the session as `MetricsHook` does, and all numbers that
    `session.log_metrics` is given meanwhile; histograms are left out. A value that comes late joins
    the row of its step, or gets one in its place; of two of one name the first stays. One that is
    called step or secs is kept as `step_` or `secs_`. `rows` stays after the session, and
    `pandas.DataFrame(hook.rows)` is a table.

    A checkpoint holds the rows, so a resumed training goes on with those up to its step. Where a
    session is set back, and where the hook is used by a second session, later rows are dropped in
    the same way.

    Args:
        values: what to take, as for `MetricsHook`, save `histogram(...)`. None: only what is
            logged.
        every_n_steps: steps between two rows, >= 1; 100 if neither this nor the next is given.
        every_n_secs: seconds between two rows, >= 0.
        max_rows: rows at most, >= 2. When there are more, every second one is dropped, but the
            newest stays. So the newest half is always the densest.

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
                del rows[len(rows) % 2 :: 2]

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

    def plot(
        self,
        *names: str,
        ax: Axes | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw values against the step by matplotlib; needs the extra `plot`.

        An axis is logarithmic where values that are positive have fallen to less than a tenth.
        Values that are not finite are left out. It opens no window; a notebook shows what it
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
            points = [row for row in rows if math.isfinite(row.get(name, math.nan))]
            steps, values = ([row[each] for row in points] for each in ("step", name))
            marker = "o" if len(points) <= _FEW_POINTS else None
            panel.plot(steps, values, label=name, linewidth=1.6, marker=marker, markersize=3.5)
        for panel in dict.fromkeys(panels):
            _finish(panel)
        panels[-1].set_xlabel("step")
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _step_of(row: Mapping[str, Any]) -> int:
    step: int = row["step"]
    return step


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of each name, "secs" among them, and the steps that they belong to."""
    import numpy as np

    names = {name: None for row in rows for name in row if name != "step"}
    return {
        name: [np.array([row[each] for row in rows if name in row]) for each in ("step", name)]
        for name in names
    }


def _rows(saved: object) -> list[dict[str, Any]]:
    """The rows of these columns; TypeError, ValueError, LookupError: they are not such columns."""
    rows: dict[int, dict[str, Any]] = {}
    for name, (steps, values) in _check.instance("saved rows", saved, Mapping, "a mapping").items():
        _check.metric_name(name, "the name of a saved column")
        numbers = zip(_array(name, steps, "iu"), _array(name, values, "f"), strict=True)
        for step, value in numbers:
            rows.setdefault(step, {"step": step})[name] = value
    found = [rows[step] for step in sorted(rows)]
    if any("secs" not in row for row in found):
        raise ValueError("a saved row has no secs; give each the seconds of training until then")
    return found


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
