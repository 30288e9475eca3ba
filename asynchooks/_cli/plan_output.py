"""What `asynchooks plan` prints: what was recorded, and the answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def print_recorded(plan: Plan, checks: Sequence[Check]) -> None:
    """What was recorded, how it was fitted, and the recorded settings beside the plan's."""
    rows, notes = [], []
    for service in plan.services.values():
        about = _describe(service)
        millis = [f"{about[name] * 1e3:.4g}" for name in ("mean_secs", "p99_secs")]
        load = "{:.0f} to {:.0f}".format(*about["load"])
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


def _describe(service: Service) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Answer:
    """What the settings that were asked for would give, as the options want it shown."""

    options: argparse.Namespace
    plan: Plan
    checks: Sequence[Check]
    rows: Sequence[tuple[Mapping[str, Any], Prediction | str]]
    """Of each setting the prediction, or what has failed, in words."""

    def print(self) -> None:
        """Print JSON or the table."""
        if self.options.json:
            self._print_json()
        else:
            self._print_table()

    def _print_table(self) -> None:
        """A row for each setting, the reasons behind, and the best one."""
        best = self._best()
        rows, bold = [], None
        reasons: dict[str, int] = {}  # the number of each
        for settings, found in self.rows:
            if isinstance(found, str):
                mark, reason, estimates = "failed", found, [""] * 6
            else:
                mark = "EXTRAPOLATED" if found.is_extrapolated else ""
                reason = "; ".join(found.notes)
                estimates = [_shown(each) for each in self._estimates(found).values()]
            if mark:
                mark += f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
            row = [*map(_value, settings.values()), *estimates, mark]
            if best is not None and settings is best[0]:
                bold = row
            rows.append(row)
        names = list(self.rows[0][0])
        titles = [*names, *_FIGURES.values(), f"s to {self.options.updates:,}", "cost", ""]
        print()
        print_table(titles, rows, num_left=len(names), bold=bold)
        for reason, number in reasons.items():
            print(f"[{number}] {reason}")
        print(self._about(best))

    def _print_json(self) -> None:
        """One object: what was recorded, the recorded settings, the rows and the best of them."""
        best = self._best()
        print_json(
            {
                "services": [_describe(each) for each in self.plan.services.values()],
                "recorded": [
                    {
                        "settings": each.prediction.settings,
                        "measured": each.measured._asdict(),
                        "predicted": _plain(_figures(each.prediction)),
                        "is_mismatch": each.is_mismatch,
                    }
                    for each in self.checks
                ],
                "settings": [self._row(*each) for each in self.rows],
                "best": None if best is None else best[0],
                "target": None if self.options.target is None else str(self.options.target),
            }
        )

    def _row(self, settings: Mapping[str, Any], found: Prediction | str) -> dict[str, Any]:
        if isinstance(found, str):
            return {"settings": settings, "error": found}
        return {
            "settings": settings,
            **_plain(self._estimates(found)),
            "num_updates": self.options.updates,
            "is_extrapolated": found.is_extrapolated,
            "notes": found.notes,
        }

    def _estimates(self, prediction: Prediction) -> dict[str, Estimate | None]:
        """All that is shown of a prediction; without a price there is no cost."""
        num, price = self.options.updates, self.options.price
        cost = None if price is None else prediction.cost(num, price)
        return {**_figures(prediction), "secs": prediction.secs_to(num), "cost": cost}

    def _best(self) -> tuple[Mapping[str, Any], Prediction] | None:
        """The one with the highest rate of those that keep the target."""
        target = self.options.target
        kept = [
            (settings, found)
            for settings, found in self.rows
            if isinstance(found, Prediction) and (target is None or target.is_kept(found))
        ]
        return max(kept, key=lambda row: row[1].rate.value, default=None)

    def _about(self, best: tuple[Mapping[str, Any], Prediction] | None) -> str:
        target = self.options.target
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
        if target is not None:
            all_found = [each for _, each in self.rows if isinstance(each, Prediction)]
            values = [getattr(each, target.figure).value for each in all_found]
            if values and all(map(math.isnan, values)):
                within += (
                    f": {target.figure} is not known of this program. Only rollouts(...) and "
                    "parameter servers measure staleness"
                )
        return f"There is no setting{within}."


def _figures(prediction: Prediction) -> dict[str, Estimate | None]:
    return {name: getattr(prediction, name) for name in _FIGURES}


def _plain(estimates: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """For JSON."""
    return {name: each._asdict() for name, each in estimates.items() if each is not None}


def _shown(estimate: Estimate | None) -> str:
    """For a table: nothing where there is no such number."""
    return "" if estimate is None or math.isnan(estimate.value) else figure(*estimate)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(settings: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name}={_value(value)}" for name, value in settings.items())
    return named or "the recorded settings"
