"""Plots of simulated trainings, by matplotlib: losses, and what workers did when.

Nothing here opens a window or needs a display, and pyplot's state is left alone.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..._check import path as checked_path
from ..._errors import shown
from ._report import Report
from ._trace import timeline_of
from ._whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = {
    "compute": "#3b7dd8",
    "push": "#2a9d5c",
    "served": "#14603a",
    "pull": "#8cc152",
    "wait": "#f2c14e",
    "lost": "#d1495b",
    "down": "#3a3a3a",
}
"""Colours of activities, in the legend's order: work is cool, waiting yellow, loss red."""
_LARGEST_LOSS = 1e200
"""Ticks and margins of a logarithmic axis reach several decades further, and would overflow."""
_MOST_TIMELINES = 4
_MOST_WORKERS = 40
_WORKERS_OF_SEVERAL = 16


def plot_reports(
    path: str | os.PathLike[str], reports: Sequence[Report | Sequence[Report]]
) -> None:
    """Draw the losses of one or several trainings, and below them what their workers did when.

    Losses are drawn where any were recorded, timelines (of the first four) where they were kept.

    Args:
        path: ends with .png, .svg or .pdf; the file is replaced whole, or left as it was.
        reports: one for each protocol, say, or a list of those of several seeds; not empty.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `reports` is no list of reports, or of lists of them.
        ValueError: there is no report, or the path has another ending.
        OSError: the file cannot be written.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        report = simulation.cluster(4, compute=Exponential(1.0)).run(updates=100)
        plot_reports("report.svg", [report])
    """
    firsts = [group[0] for group in _groups(reports)]
    check_format(path)
    check_matplotlib()
    from matplotlib.figure import Figure

    lanes = [each for each in firsts if each.timeline is not None][:_MOST_TIMELINES]
    most = _MOST_WORKERS if len(lanes) == 1 else _WORKERS_OF_SEVERAL
    heights = [4.2, *(1.6 + 0.12 * min(each.num_workers, most) for each in lanes)]
    figure = Figure(figsize=(12, math.fsum(heights)), layout="constrained")
    grid = figure.add_gridspec(1 + len(lanes), height_ratios=heights)
    plot_losses(figure.add_subplot(grid[0]), reports)
    for row, report in enumerate(lanes, start=1):
        draw_timeline(figure.add_subplot(grid[row]), report, most)
    with whole_file(path) as new:
        figure.savefig(new, format=Path(path).suffix[1:].lower(), dpi=120)


def plot_losses(axes: Axes, reports: Sequence[Report | Sequence[Report]]) -> None:
    """Draw the losses against virtual time, a line for each report.

    Losses that are not finite, or above 1e200, are left out.

    Of a list of reports, of one training with several seeds, the median is drawn, and a band from
    the lowest to the highest loss at each time, up to the end of the shortest.

    An axis is logarithmic where it spans much: losses more than a factor of ten, or the times that
    the trainings took more than one of twenty.

    Example:
        from matplotlib.figure import Figure

        simulation = Simulation(seed=7, backend="turbo")
        report = simulation.cluster(4, compute=Exponential(1.0)).run(updates=100)
        figure = Figure()
        plot_losses(figure.add_subplot(), [report])
        figure.savefig("losses.png")
    """
    seen = []
    groups = _groups(reports)
    for group in groups:
        rate = math.fsum(each.updates_per_second for each in group) / len(group)
        label = f"{group[0].protocol}, {rate:.3g} updates/s"
        if len(group) > 1:
            label += f", {len(group)} seeds"
        times, low, middle, high = _loss_band(group)
        seen += middle
        (line,) = axes.plot(times, middle, label=label, linewidth=1.5)
        if len(group) > 1:
            axes.fill_between(times, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if seen and min(seen) > 0 and max(seen) > 10 * min(seen):
        axes.set_yscale("log")
    times = [each.secs for group in groups for each in group]
    if min(times) > 0 and max(times) > 20 * min(times):
        axes.set_xscale("log", nonpositive="mask")  # leaves out the loss at 0
    axes.set_title("Loss against virtual time")
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    # below, where it cannot hide a line
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)


def draw_timeline(axes: Axes, report: Report, num_workers: int) -> None:
    """Draw what the first workers did, as coloured bars: from 0, about thirty spans of each."""
    spans = [each for each in timeline_of(report).spans if each.worker < num_workers]
    shown, whole = min(num_workers, report.num_workers), report.secs or 1.0
    window = min(whole, 30 * shown * whole / max(1, len(spans)))
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {kind: {} for kind in _COLOURS}
    for worker, kind, since, until in spans:
        if since < window:
            bars[kind].setdefault(worker, []).append((since, until - since))
    for kind, colour in _COLOURS.items():
        for place, (worker, pieces) in enumerate(bars[kind].items()):
            axes.broken_barh(
                pieces,
                (worker - 0.4, 0.8),
                facecolors=colour,
                edgecolors="white",  # separates neighbours of one kind
                linewidth=0.4,
                label=kind if place == 0 else None,
            )
    of_all = "" if shown == report.num_workers else f" of {report.num_workers}"
    axes.set_title(f"What {shown}{of_all} workers did: {report.protocol}")
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("worker")
    axes.set_xlim(0.0, window)
    axes.set_ylim(shown - 0.4, -0.6)
    axes.locator_params(axis="y", integer=True)  # there is no worker 2.5
    if any(bars.values()):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _groups(reports: object) -> list[list[Report]]:
    """The reports of each training, which has one, or one for each seed."""
    if not isinstance(reports, Sequence):
        raise TypeError(f"reports is {shown(reports)}; give a list, as in [report]")
    if not reports:
        raise ValueError("reports is empty; give at least one, as Cluster.run returns it")
    groups = []
    for each in reports:
        group = [each] if isinstance(each, Report) else each
        if not isinstance(group, Sequence) or not all(isinstance(one, Report) for one in group):
            raise TypeError(
                f"reports have {shown(each)}; give reports, as Cluster.run returns them, or lists "
                "of those of one training with several seeds"
            )
        if not group:
            raise ValueError("a list of reports is empty; give those of one training, one a seed")
        groups.append(list(group))
    return groups


def _loss_band(
    group: Sequence[Report],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """(Times, the lowest, the median and the highest loss), without what no axis can show."""
    curves = [
        [(secs, loss) for secs, _, loss in each.losses if abs(loss) <= _LARGEST_LOSS]
        for each in group
    ]
    if len(curves) == 1 or not all(curves):
        points = [point for curve in curves[:1] for point in curve]
        losses = [loss for _, loss in points]
        return [secs for secs, _ in points], losses, losses, losses
    begin, end = max(each[0][0] for each in curves), min(each[-1][0] for each in curves)
    times = sorted({secs for each in curves for secs, _ in each if begin <= secs <= end})
    columns = []
    for curve in curves:
        secs = [each for each, _ in curve]
        # the last one that was recorded by then
        columns.append([curve[bisect_right(secs, time) - 1][1] for time in times])
    rows = [sorted(row) for row in zip(*columns, strict=True)]
    return times, [row[0] for row in rows], [median(row) for row in rows], [row[-1] for row in rows]


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise TypeError if it is no path, and ValueError unless it ends as a plot's does."""
    if Path(checked_path("path", path, "the path of a file")).suffix.lower() not in FORMATS:
        raise ValueError(f"{os.fspath(path)!r} is no plot; end it with {', '.join(FORMATS)}")


def check_matplotlib() -> None:
    """Raise ImportError that names the extra, unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed; pip install 'asynchooks[plot]'"
        ) from error
