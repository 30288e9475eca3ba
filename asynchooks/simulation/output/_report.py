"""The results of a simulated training: rates, staleness, where the time went, losses.

Floats are added by `math.fsum`: `sum` rounds differently since Python 3.12, and the same seed gives
the same report on every version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..._check import number
from ._timeline import Timeline

SPENT = {
    "computed": "compute",
    "lost": "lost",
    "waited": "wait",
    "pulled": "pull",
    "pushed": "push",
    "down": "down",
}
"""Where a worker's seconds go, and the kind of span of each; the rest is idle."""


@dataclass(frozen=True)
class WorkerReport:
    """The results of one worker; all times in virtual seconds.

    `gradients` is the number of those that it computed. `staleness` counts, by staleness, those
    that took part in an update. Its time went into computing (`secs_computed`), pulling
    (`secs_pulled`), pushing (`secs_pushed`) and crashes or pauses (`secs_down`). `secs_lost` went
    into computations that were discarded, `secs_waited` into waiting for others, as the protocol
    says. In `secs_idle` its program did something else, or had ended. Work under way counts once
    it is done. `worker` is its number.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, protocol=StaleSynchronous(3), compute=Exponential(1.0))
        report = cluster.run(updates=100)
        busy = [worker.secs_computed for worker in report.workers]
        assert len(busy) == 4
    """

    worker: int
    gradients: int
    staleness: dict[int, int]
    secs_computed: float
    secs_lost: float
    secs_waited: float
    secs_pulled: float
    secs_pushed: float
    secs_down: float
    secs_idle: float


@dataclass(frozen=True)
class ServerReport:
    """The use of one parameter server, where `service` takes time; in virtual seconds.

    `requests` pushes came to it; it served them for `secs_busy`, and they waited for their turn
    for `secs_queued` together. `busy_share` is the share of the time in which it served, and
    `mean_queue` the mean number of those that waited. `server` is its number.
    """

    server: int
    requests: int
    secs_busy: float
    secs_queued: float
    busy_share: float
    mean_queue: float


@dataclass(frozen=True)
class Report:
    """The results of a simulated training, in virtual seconds. `Cluster.run` makes it.

    `staleness` counts, by staleness, the gradients that took part in an update. The `*_rows` are
    lists of flat dicts, as `pandas.DataFrame` takes them. `secs` is the time from the begin of
    training to the last update, if their number was given and has been made; else to its end.
    `applied`, `discarded`, `staleness` and `updates` are those of the server: gradients that a
    restore of its state has undone count in `undone` only, whatever their outcome was. `losses` are
    those of `Cluster.run`'s `loss`: (virtual seconds, updates, loss). `protocol` is the protocol's
    repr, `num_workers` the number of `workers`.

    `servers` has one for each parameter server, where `service` takes time: `requests` pushes came
    to it, it served them for `secs_busy`, and they waited for their turn for `secs_queued`
    together; `busy_share` and `mean_queue` are these over time. `bytes_moved` went over a network's
    links until the last update.

    `timeline` is what every worker did when, if the cluster kept it. Its `spans` are (worker, kind,
    begin, end), where the kind is "compute", "lost" (a discarded computation), "wait" (for others),
    "pull", "push", "served" (in the server's queue, and by it) or "down"; a pause cuts a span in
    two. Its `pushes` are (worker, time, outcome, staleness, version), the version afterwards.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, protocol=StaleSynchronous(3), compute=Exponential(1.0))
        report = cluster.run(updates=100)
        assert report.updates == 100
        assert len(report.workers) == 4
    """

    protocol: str
    num_workers: int
    secs: float
    updates: int
    applied: int
    discarded: int
    staleness: dict[int, int]
    workers: list[WorkerReport]
    losses: list[tuple[float, int, float]]
    undone: int = 0
    servers: list[ServerReport] = field(default_factory=list)
    bytes_moved: int = 0
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def updates_per_second(self) -> float:
        """Per virtual second; 0.0 where no time has passed."""
        return self.updates / self.secs if self.secs > 0 else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean over the gradients that took part in an update; 0.0 if there were none."""
        return _mean(self.staleness)

    def secs_to(self, loss: float) -> float:
        """Virtual seconds until the loss was first recorded at or under this; else infinity.

        They count from the begin of training, as `secs` does, at which the first loss is recorded.

        Raises:
            TypeError, ValueError: the loss is no number.
            ValueError: no loss was recorded.
        """
        loss = number("loss", loss, finite=False, expected="a number")
        if not self.losses:
            raise ValueError("no loss was recorded; give Cluster.run a loss")
        began_at = self.losses[0][0]
        return next((secs - began_at for secs, _, each in self.losses if each <= loss), math.inf)

    def worker_rows(self) -> list[dict[str, Any]]:
        """A row for each worker."""
        return [
            {
                "protocol": self.protocol,
                "worker": each.worker,
                "gradients": each.gradients,
                "mean_staleness": _mean(each.staleness),
                **{f"secs_{kind}": getattr(each, f"secs_{kind}") for kind in (*SPENT, "idle")},
            }
            for each in self.workers
        ]

    def staleness_rows(self) -> list[dict[str, Any]]:
        """A row for each worker and staleness that occurred, with how often."""
        return [
            {"protocol": self.protocol, "worker": each.worker, "staleness": value, "count": count}
            for each in self.workers
            for value, count in each.staleness.items()
        ]

    def loss_rows(self) -> list[dict[str, Any]]:
        """A row for each recorded loss, with its time and the updates made."""
        return [
            {"protocol": self.protocol, "secs": secs, "updates": updates, "loss": loss}
            for secs, updates, loss in self.losses
        ]

    def summary_row(self) -> dict[str, Any]:
        """One row for all, to compare protocols."""
        return {
            "protocol": self.protocol,
            "workers": self.num_workers,
            "secs": self.secs,
            "updates": self.updates,
            "updates_per_second": self.updates_per_second,
            "discarded": self.discarded,
            "undone": self.undone,
            "bytes_moved": self.bytes_moved,
            "mean_staleness": self.mean_staleness,
            "max_staleness": max(self.staleness, default=0),
            **{f"share_{kind}": self._share(f"secs_{kind}") for kind in (*SPENT, "idle")},
            "loss": self.losses[-1][2] if self.losses else None,
        }

    def _share(self, what: str) -> float:
        whole = self.secs * self.num_workers
        secs = math.fsum(getattr(each, what) for each in self.workers)
        return secs / whole if whole > 0 else 0.0


def _mean(counts: dict[int, int]) -> float:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else 0.0
