"""What `asynchooks plan` prints: what was recorded, and the answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..planning import Check, Estimate, Plan, Prediction, Service
from .output import figure, print_json, print_table

_FIGURES = {
    "rate": "updates/s",
    "staleness": "staleness",
    "max_staleness": "max",
    "idle_share": "idle",
}
"""The figures of every prediction, and their titles."""
Row = tuple[Mapping[str, Any], Prediction | str]
"""Of each setting the prediction, or what has failed, in words."""


def print_recorded(plan: Plan, checks: Sequence[Check]) -> None:
    """What was recorded, how it was fitted, and the recorded settings beside the plan's."""
    rows, notes = [], []
    for service in plan.services.values():
        about = _described(service)
        millis = [f"{about[name] * 1e3:.4g}" for name in ("mean_secs", "p99_secs")]
        load = f"{service.load_low:.0f} to {service.load_high:.0f}"
        rows.append([service.name, service.law_words(), f"{about['num']:,}", *millis, load])
        notes += [f"{service.name}: {each}" for each in service.notes]
    titles = ["recorded", "dependence", "spans", "mean ms", "99 % below ms", "load"]
    print_table(titles, rows, num_left=2)
    print(*notes, "", sep="\n")
    rows = []
    for check in checks:
        for name in ("rate", "staleness"):
            measured, estimate = getattr(check.measured, name), getattr(check.prediction, name)
            if not math.isnan(measured):
                off = f"{measured / estimate.value - 1:+.1%}" if estimate.value > 0 else ""
                own = [_named(check.prediction.settings), _FIGURES[name]]
                rows.append([*own, f"{measured:.4g}", _shown(estimate), off])
    if rows:
        titles = ["recorded settings", "figure", "measured", "predicted (90 %)", "off"]
        print_table(titles, rows, num_left=2)
    else:
        print(
            "The recorded settings are not known, so the plan is not checked against them: "
            "record(path, settings={...}) keeps them."
        )


def _described(service: Service) -> dict[str, Any]:
    """What was fitted, for JSON: the fields of a service that JSON can hold, and its samples'."""
    law, samples = service.size_law, service.samples
    fields = vars(service).items()
    return {
        **{name: each for name, each in fields if isinstance(each, int | float | str)},
        "dependence": service.dependence.value,
        "num": len(samples),
        "mean_secs": float(samples.mean()),
        "p99_secs": float(np.quantile(samples, 0.99)),
        "max_secs": float(samples.max()),
        "sizes": service.size_range(),
        "base_secs": None if law is None else law.base_secs,
        "secs_per_unit": None if law is None else law.secs_per_unit,
        "notes": service.notes,
    }


def print_answer(
    options: argparse.Namespace, plan: Plan, checks: Sequence[Check], rows: Sequence[Row]
) -> None:
    """Print JSON or the table: what the settings that were asked for would give."""
    target = options.target
    kept = [
        (settings, found)
        for settings, found in rows
        if isinstance(found, Prediction)
        and (target is None or getattr(found, target.figure).high <= target.most)
    ]
    best = max(kept, key=lambda row: row[1].rate.value, default=None)
    if not options.json:
        _print_table(options, rows, None if best is None else best[0])
        print(_about(options, rows, best))
        return
    print_json(
        {
            "services": [_described(each) for each in plan.services.values()],
            "recorded": [
                {
                    "settings": each.prediction.settings,
                    "measured": each.measured._asdict(),
                    "predicted": _as_json(options, each.prediction),
                    "is_mismatch": each.is_mismatch,
                }
                for each in checks
            ],
            "settings": [
                {"settings": settings, "error": found}
                if isinstance(found, str)
                else {
                    "settings": settings,
                    **_as_json(options, found),
                    "num_updates": options.updates,
                    "is_extrapolated": found.is_extrapolated,
                    "notes": found.notes,
                }
                for settings, found in rows
            ],
            "best": None if best is None else best[0],
            "target": None if target is None else str(target),
        }
    )


def _print_table(
    options: argparse.Namespace, rows: Sequence[Row], best: Mapping[str, Any] | None
) -> None:
    """A row for each setting, of which the best one stands out, and the reasons behind."""
    shown, bold = [], None
    reasons: dict[str, int] = {}  # the number of each
    for settings, found in rows:
        if isinstance(found, str):
            mark, reason, estimates = "failed", found, [""] * 6
        else:
            mark = "EXTRAPOLATED" if found.is_extrapolated else ""
            reason = "; ".join(found.notes)
            estimates = [_shown(each) for each in _estimates(options, found).values()]
        if mark:
            mark += f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
        row = [*map(_value, settings.values()), *estimates, mark]
        if settings is best:
            bold = row
        shown.append(row)
    names = list(rows[0][0])
    titles = [*names, *_FIGURES.values(), f"s to {options.updates:,}", "cost", ""]
    print()
    print_table(titles, shown, num_left=len(names), bold=bold)
    for reason, number in reasons.items():
        print(f"[{number}] {reason}")


def _about(
    options: argparse.Namespace,
    rows: Sequence[Row],
    best: tuple[Mapping[str, Any], Prediction] | None,
) -> str:
    """Which setting is the best, or why none is."""
    target = options.target
    within = "" if target is None else f" with {target}"
    if best is not None:
        settings, found = best
        beyond = ""
        if found.is_extrapolated:
            beyond = (
                ", beyond what was recorded. Record a run at or near this setting, too, and "
                "give both traces: that makes its interval narrow"
            )
        return f"Best{within}: {_named(settings)} with {_shown(found.rate)} updates/s{beyond}."
    predictions = [found for _, found in rows if isinstance(found, Prediction)]
    if predictions and all(math.isnan(getattr(each, target.figure).value) for each in predictions):
        within += (
            f": {target.figure} is not known of this program. Only rollouts(...) and "
            "parameter servers measure staleness"
        )
    return f"There is no setting{within}."


def _estimates(options: argparse.Namespace, prediction: Prediction) -> dict[str, Estimate | None]:
    """All that is shown of a prediction; without a price there is no cost."""
    num, price = options.updates, options.price
    return {
        **{name: getattr(prediction, name) for name in _FIGURES},
        "secs": prediction.secs_to(num),
        "cost": None if price is None else prediction.cost(num, price),
    }


def _as_json(options: argparse.Namespace, prediction: Prediction) -> dict[str, Any]:
    estimates = _estimates(options, prediction).items()
    return {name: each._asdict() for name, each in estimates if each is not None}


def _shown(estimate: Estimate | None) -> str:
    """For a table: nothing where there is no such number."""
    return "" if estimate is None or math.isnan(estimate.value) else figure(*estimate)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(settings: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name}={_value(value)}" for name, value in settings.items())
    return named or "the recorded settings"
