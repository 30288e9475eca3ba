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
    axes = figure.subplots(1, 1 + has_staleness, squeeze=False)[0]
    varied = _varied([each.settings for each in predictions])
    labels = [_label(each.settings, varied) for each in predictions]
    _draw_rates(axes[0], predictions, labels, checks, varied)
    if has_staleness:
        _draw_frontier(axes[1], predictions, labels, checks)
    _explain(axes[-1])
    with whole_file(path) as new:
        figure.savefig(new, format=Path(path).suffix[1:].lower(), dpi=120)


def _draw_rates(
    axes: Any,
    predictions: Sequence[Prediction],
    labels: Sequence[str],
    checks: Sequence[Check],
    varied: Sequence[str],
) -> None:
    for place, each in enumerate(predictions):
        _point(axes, each.rate, None, place, each, color=f"C{place % 10}")
    measured = [(_label(each.prediction.settings, varied), each.measured) for each in checks]
    shown = [(labels.index(name), each.rate) for name, each in measured if name in labels]
    if shown:
        places, rates = zip(*shown, strict=True)
        axes.plot(rates, places, "kx", zorder=5, label="measured")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("updates per second")
    axes.set_ylabel(", ".join(varied))


def _draw_frontier(
    axes: Any, predictions: Sequence[Prediction], labels: Sequence[str], checks: Sequence[Check]
) -> None:
    for place, each in enumerate(predictions):
        _point(
            axes, each.staleness, each.rate, 0, each, color=f"C{place % 10}", label=labels[place]
        )
    for number, check in enumerate(checks):
        axes.plot(
            [check.measured.staleness], [check.measured.rate], "kx", zorder=5,
            label="" if number else "measured",
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("mean staleness (steps)")
    axes.set_ylabel("updates per second")


def _explain(axes: Any) -> None:
    """The legend, beside the last part of the plot."""
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8,
        title="hollow: beyond\nwhat was recorded", title_fontsize=8,
    )  # fmt: skip


def _point(
    axes: Any, along: Estimate, up: Estimate | None, place: int, prediction: Prediction, **more: Any
) -> None:
    """A marker with its interval along x, and along y where `up` is an estimate."""
    y = place if up is None else up.value
    axes.errorbar(
        [along.value], [y],
        xerr=_sides(along),
        yerr=None if up is None else _sides(up),
        marker="o",
        markerfacecolor="none" if prediction.is_extrapolated else None,
        linestyle="none",
        **_INTERVAL,
        **more,
    )  # fmt: skip


def _sides(estimate: Estimate) -> list[list[float]]:
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ; all if none does."""
    names = list(dict.fromkeys(name for each in settings for name in each))
    varied = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
    return varied or names


def _label(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(str(settings.get(name)) for name in names)
