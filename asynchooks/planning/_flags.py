"""Flags: by what a planned setting goes beyond what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ._service import Service
from ._spans import Floats
from ._station import Use

_OUTSIDE = 0.02
"""Share of work that began at a load, or of sizes, that was not recorded: above it that counts."""
_BEYOND_SIZES = 0.25
"""Of the range of recorded sizes, by which sizes may be outside of it."""
_HEAVY = 0.05
"""Share of all work that its longest hundredth is: above it the longest samples are looked at."""
NUM_LONGEST = 5
"""Samples of which few enough were seen that others may come."""
OFF_BY_TIME = 0.10
"""Relative: how far off a rate may be where all work was slow at the same times."""
_MANY = 15
"""Samples that each worker needs for the slowest of all to be known."""


@dataclass(frozen=True)
class Used:
    """How all runs of one setting have used services."""

    uses: Mapping[str, tuple[Service, Use]]

    @classmethod
    def of(cls, runs: Iterable[Mapping[str, tuple[Service, Use]]]) -> Used:
        uses: dict[str, tuple[Service, Use]] = {}
        for run in runs:
            for name, (service, use) in run.items():
                uses.setdefault(name, (service, Use()))[1].add(use)
        return cls(uses)

    def loads_outside(self) -> list[str]:
        """Of each shared service that is used at a load that was not recorded, a note."""
        notes = []
        for name, (service, use) in self.uses.items():
            if service.dependence.is_queue or service.is_own or max(use.loads, default=0) <= 1:
                continue
            low, high = 0.98 * service.load_low - 0.5, 1.02 * service.load_high + 0.5
            outside = sum(num for load, num in use.loads.items() if not low <= load <= high)
            total = sum(use.loads.values())
            if outside > _OUTSIDE * total:
                least, most = use.load_range()
                used = f"{least} to {most}" if least < most else f"{most}"
                notes.append(
                    f"{name}: {100 * outside / total:.0f} % of the work begins at a load that was "
                    f"not recorded: {used} under way, recorded "
                    f"{service.load_low:.0f} to {service.load_high:.0f}"
                )
        return notes

    def sizes_outside(self) -> list[str]:
        notes = []
        for name, (service, use) in self.uses.items():
            low, high = _size_range(service)
            # several runs have more extreme sizes than one recording, by chance
            beyond = _BEYOND_SIZES * (high - low) + 1e-9 * high
            if use.high_size > high + beyond or use.low_size < low - beyond:
                unknown = "; how long others take is not known" if service.size_law is None else ""
                notes.append(
                    f"{name}: sizes {use.low_size:g} to {use.high_size:g}, recorded {low:g} to "
                    f"{high:g}{unknown}"
                )
        return notes

    @property
    def has_unknown_sizes(self) -> bool:
        return any(
            service.size_law is None and use.high_size > -math.inf
            for service, use in self.uses.values()
        ) and bool(self.sizes_outside())

    @property
    def has_long_work(self) -> bool:
        return any(is_heavy(service) for service, _ in self.uses.values())

    def further_flags(self) -> list[str]:
        notes = []
        for name, (service, use) in self.uses.items():
            known = np.unique(service.workers[service.workers >= 0])
            if 0 < len(known) < use.num_workers:
                notes.append(
                    f"{name}: {use.num_workers} workers, of which {len(known)} were recorded, and "
                    "those differ; further ones are taken to be as these, one after the other"
                )
            num = len(service.samples)
            if use.num_workers > 1 and num < _MANY * use.num_workers:
                notes.append(
                    f"{name}: {num} samples are few for the slowest of {use.num_workers} workers; "
                    f"{_MANY} for each are enough"
                )
        return notes

    def slow_together(self) -> list[str]:
        """Of each service whose work was slow at the same times, a note."""
        return [
            f"{name}: all work was slow at the same times, and it is drawn without regard to that: "
            f"the rate may be off by {100 * OFF_BY_TIME:.0f} %"
            for name, (service, _) in self.uses.items()
            if service.is_slow_together
        ]


def _size_range(service: Service) -> tuple[float, float]:
    """Between which sizes were recorded; NaN if none were."""
    sizes = service.sizes[np.isfinite(service.sizes)]
    return (float(sizes.min()), float(sizes.max())) if len(sizes) else (math.nan, math.nan)


def is_heavy(service: Service) -> bool:
    longest = np.sort(service.samples)[::-1]
    num = max(1, len(longest) // 100)
    return len(longest) >= 20 and float(longest[:num].sum()) > _HEAVY * float(longest.sum())


def capped(service: Service, rng: np.random.Generator) -> Service:
    """Resampled alike, but with the longest samples no longer than the one after them."""
    resampled, law = service.resampled(rng), service.size_law
    if not is_heavy(service):
        return resampled
    if resampled.size_law is not None:
        law = resampled.size_law
        law = replace(law, ratios=_cut_down(law.ratios))
    return replace(resampled, samples=_cut_down(resampled.samples), size_law=law)


def _cut_down(samples: Floats) -> Floats:
    different = np.unique(samples)
    capped: Floats = np.minimum(samples, different[max(0, len(different) - 1 - NUM_LONGEST)])
    return capped
