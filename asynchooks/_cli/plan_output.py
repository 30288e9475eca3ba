"""What `asynchooks plan` prints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..planning import Check, Estimate, Plan, Prediction, Service
    from .plan_settings import Target

_WIDTH = 200
"""Columns, where there is no terminal that could be too narrow."""


@dataclass(frozen=True)
class Row:
    """One setting, and what became of it."""

    settings: dict[str, Any]
    prediction: Prediction | None
    error: str | None


@dataclass(frozen=True)
class Result:
    """All that the command prints."""

    plan: Plan
    checks: Sequence[Check]
    rows: Sequence[Row]
    best: Row | None
    target: Target | None
    num_updates: int
    price: float | None


def print_recorded(plan: Plan, checks: Sequence[Check]) -> None:
    """What was recorded, how it was fitted, and the recorded settings beside the plan's."""
    console = _console()
    table = _table("recorded", "spans", "mean", "99 % below", "dependence", "load")
    for name, service in plan.services.items():
        about = _about(service)
        table.add_row(
            name, f"{about['num']:,}", _secs(about["mean_secs"]), _secs(about["p99_secs"]),
            service.law_words(), f"{about['load'][0]:.0f} to {about['load'][1]:.0f}",
        )  # fmt: skip
    console.print(table)
    for service in plan.services.values():
        for note in service.notes:
            console.print(f"{service.name}: {note}", soft_wrap=True, markup=False, highlight=False)
    for check in checks:
        table = _table("recorded settings", "measured", "predicted (90 %)", "off")
        for name, label in (("rate", "updates/s"), ("staleness", "staleness")):
            measured, estimate = getattr(check.measured, name), getattr(check.prediction, name)
            if not math.isnan(measured):
                off = f"{measured / estimate.value - 1:+.1%}" if estimate.value > 0 else ""
                table.add_row(label, f"{measured:.4g}", _shown(estimate), off)
        console.print()
        console.print(_named(check.prediction.settings), markup=False, highlight=False)
        console.print(table)
    if not checks:
        console.print(
            "\nThe recorded settings are not known, so the plan is not checked against them: "
            "record(path, settings={...}) keeps them.", soft_wrap=True,
        )  # fmt: skip


def print_result(result: Result) -> None:
    """A row for each setting, the reasons behind, and the best one."""
    console = _console()
    names = list(dict.fromkeys(name for row in result.rows for name in row.settings))
    titles = ["updates/s", "idle", f"s to {result.num_updates:,}"]
    if has_staleness := _is_known("staleness", result):
        titles[1:1] = ["staleness", "max"]
    if result.price is not None:
        titles.append("cost")
    table = _table(*names, *titles, "")
    reasons: list[str] = []
    for row in result.rows:
        own = [_value(row.settings.get(name)) for name in names]
        if row.prediction is None:
            reasons.append(str(row.error))
            blank = [""] * len(titles)
            table.add_row(*own, *blank, f"failed [{len(reasons)}]".replace("[", "\\["))
            continue
        estimates = _estimates(row.prediction, result)
        if not has_staleness:
            del estimates[1:3]
        shown = [_shown(each) for each in estimates]
        mark = ""
        if row.prediction.is_extrapolated:
            text = "; ".join(row.prediction.notes)
            if text not in reasons:
                reasons.append(text)
            mark = f"EXTRAPOLATED \\[{reasons.index(text) + 1}]"
        table.add_row(*own, *shown, mark, style="bold" if row is result.best else None)
    console.print()
    console.print(table)
    for place, reason in enumerate(reasons, 1):
        console.print(f"[{place}] {reason}", soft_wrap=True, markup=False, highlight=False)
    console.print(_about_best(result), soft_wrap=True, markup=False, highlight=False)


def _is_known(figure: str, result: Result) -> bool:
    """Whether a planned setting has this figure, or none has any."""
    values = [
        getattr(row.prediction, figure).value for row in result.rows if row.prediction is not None
    ]
    return not values or not all(math.isnan(each) for each in values)


def _about_best(result: Result) -> str:
    within = f" with {result.target}" if result.target is not None else ""
    row = result.best
    if row is None or row.prediction is None:
        if result.target is not None and not _is_known(result.target.figure, result):
            return (
                f"There is no setting{within}: {result.target.figure} is not known of this "
                "program. Only rollouts(...) and parameter servers measure staleness."
            )
        return f"There is no setting{within}."
    beyond = ""
    if row.prediction.is_extrapolated:
        beyond = (
            ", beyond what was recorded. Record a run at or near this setting, too, and give "
            "both traces: that makes its interval narrow"
        )
    return (
        f"Best{within}: {_named(row.settings)} with {_shown(row.prediction.rate)} "
        f"updates/s{beyond}."
    )


def print_json(result: Result) -> None:
    """One object: what was recorded, the recorded settings, the rows and the best of them."""
    print(
        json.dumps(
            {
                "services": [_about(each) for each in result.plan.services.values()],
                "recorded": [
                    {
                        "settings": _plain(each.prediction.settings),
                        "measured": _finite(each.measured._asdict()),
                        "predicted": _figures(each.prediction),
                        "is_mismatch": each.is_mismatch,
                    }
                    for each in result.checks
                ],
                "settings": [_row(each, result) for each in result.rows],
                "best": None if result.best is None else _plain(result.best.settings),
                "target": None if result.target is None else str(result.target),
            }
        )
    )


def _about(service: Service) -> dict[str, Any]:
    """What was fitted, for JSON: seconds, and None for what there is none of."""
    law, (low, high) = service.size_law, service.size_range()
    dependence = service.dependence
    is_shared = dependence is dependence.SHARED
    return {
        "name": service.name,
        "dependence": dependence.value,
        "num": len(service.samples),
        "num_cut": service.num_cut,
        "mean_secs": float(service.samples.mean()),
        "p99_secs": float(np.quantile(service.samples, 0.99)),
        "max_secs": float(service.samples.max()),
        "slowdown": service.slowdown if is_shared else None,
        "slowdown_interval": None
        if dependence.is_queue or service.is_own
        else [service.slowdown_low, service.slowdown_high],
        "num_servers": service.num_servers if dependence.is_queue else None,
        "is_own": service.is_own,
        "num_workers": len(service.known_workers()) or None,
        "load": [service.load_low, service.load_high],
        "sizes": None if math.isnan(low) else [low, high],
        "base_secs": None if law is None else law.base_secs,
        "secs_per_unit": None if law is None else law.secs_per_unit,
        "is_slow_together": service.is_slow_together,
        "notes": list(service.notes),
    }


def _row(row: Row, result: Result) -> dict[str, Any]:
    if row.prediction is None:
        return {"settings": _plain(row.settings), "error": row.error}
    prediction = row.prediction
    found = {
        "settings": _plain(row.settings),
        **_figures(prediction),
        "secs": _interval(prediction.secs_to(result.num_updates)),
        "num_updates": result.num_updates,
        "is_extrapolated": prediction.is_extrapolated,
        "notes": list(prediction.notes),
    }
    if result.price is not None:
        found["cost"] = _interval(prediction.cost(result.num_updates, result.price))
    return found


def _figures(prediction: Prediction) -> dict[str, Any]:
    names = ("rate", "staleness", "max_staleness", "idle_share")
    return {name: _interval(getattr(prediction, name)) for name in names}


def _interval(estimate: Estimate) -> dict[str, float | None]:
    return _finite(estimate._asdict())


def _estimates(prediction: Prediction, result: Result) -> list[Estimate]:
    found = [
        prediction.rate, prediction.staleness, prediction.max_staleness, prediction.idle_share,
        prediction.secs_to(result.num_updates),
    ]  # fmt: skip
    if result.price is not None:
        found.append(prediction.cost(result.num_updates, result.price))
    return found


def _shown(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    low, high = (f"{each:.3g}" for each in (estimate.low, estimate.high))
    return f"{estimate.value:.3g} ({low} to {high})"


def _secs(secs: float) -> str:
    return f"{secs:.3g} s" if secs >= 1 else f"{secs * 1e3:.3g} ms"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(settings: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name}={_value(value)}" for name, value in settings.items())
    return named or "the recorded settings"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return dict(settings)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of NaN and infinity, which JSON lacks."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH)


def _table(*titles: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title)
    return table


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """Count settings that are done, on stderr, if that is a terminal.

    It is drawn as it is called, by no thread of its own, which a fork would not have.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    with Progress(console=Console(file=sys.stderr), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("settings", total=total)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)
