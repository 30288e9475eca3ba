"""plot_plan: rate against staleness of planned settings, with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _check
from .._errors import shown
from ..simulation.output._plots import check_format, check_matplotlib
from ..simulation.output._whole_file import whole_file
from ._prediction import Check, Estimate, Prediction

if TYPE_CHECKING:
    import os

_INTERVAL = {"capsize": 2, "linewidth": 1, "alpha": 0.7}


def plot_plan(
    path: str | os.PathLike[str], predictions: Sequence[Prediction], checks: Sequence[Check] = ()
) -> None:
    """Write a plot of predictions: the rate of each, and its rate against its staleness.

    Bars are intervals of 90 %. Settings beyond what was recorded have hollow markers. Of what was
    measured there is a cross.

    Args:
        path: of the file, as .png, .svg or .pdf.
        predictions: in the order in which they are shown.
        checks: of recorded settings.

    Raises:
        TypeError, ValueError: there is no prediction, or the path ends otherwise.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.

    Example:
        plot_plan("plan.png", [plan.predict(main, concurrency=num) for num in (8, 16, 32)])
    """
    if isinstance(predictions, Prediction) or not isinstance(predictions, Iterable):
        raise TypeError(
            f"predictions is {shown(predictions)}; give a list of what Plan.predict returns"
        )
    predictions = [
        _check.instance("each prediction", each, Prediction, "what Plan.predict returns")
        for each in predictions
    ]
    if not predictions:
        raise ValueError("predictions is empty; give what Plan.predict returns for some settings")
    has_staleness = any(not math.isnan(each.staleness.value) for each in predictions)
    check_format(path)
    check_matplotlib()
    from matplotlib.figure import Figure

    height = max(3.5, 1.2 + 0.28 * len(predictions))
    figure = Figure(figsize=(5.5 * (1 + has_staleness), height), layout="constrained")
    rates, *others = figure.subplots(1, 1 + has_staleness, squeeze=False)[0]
    varied = _varied([each.settings for each in predictions])
    labels = [_label(each.settings, varied) for each in predictions]
    for place, (each, label) in enumerate(zip(predictions, labels, strict=True)):
        _draw(rates, each, each.rate, Estimate(place, place, place), color=f"C{place % 10}")
        for axes in others:
            _draw(axes, each, each.staleness, each.rate, color=f"C{place % 10}", label=label)
    for check in checks:
        measured, label = check.measured, _label(check.prediction.settings, varied)
        if label in labels:
            rates.plot([measured.rate], [labels.index(label)], "kx", zorder=5)
        for axes in others:
            axes.plot([measured.staleness], [measured.rate], "kx", zorder=5)
    rates.set(xlabel="updates per second", ylabel=", ".join(varied))
    rates.set_yticks(range(len(labels)), labels)
    rates.invert_yaxis()
    rates.set_xlim(left=0)
    for axes in others:
        axes.set(xlabel="mean staleness (steps)", ylabel="updates per second")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    (others or [rates])[0].legend(
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        title="x: measured\nhollow: beyond\nwhat was recorded",
        title_fontsize=8,
    )
    with whole_file(path) as new:
        figure.savefig(new, format=Path(path).suffix[1:].lower(), dpi=120)


def _draw(axes: Any, prediction: Prediction, x: Estimate, y: Estimate, **more: Any) -> None:
    """A marker with its intervals; one that is hollow is beyond what was recorded."""
    sides = [
        [[max(0.0, each.value - each.low)], [max(0.0, each.high - each.value)]] for each in (x, y)
    ]
    axes.errorbar(
        [x.value],
        [y.value],
        xerr=sides[0],
        yerr=sides[1],
        marker="o",
        linestyle="none",
        markerfacecolor="none" if prediction.is_extrapolated else None,
        **_INTERVAL,
        **more,
    )


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ; all if none does."""
    names = list(dict.fromkeys(name for each in settings for name in each))
    varied = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
    return varied or names


def _label(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(str(settings.get(name)) for name in names)
