"""Which checkpoints are kept. It deletes nothing."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .. import _check as check
from ._manifest import Checkpoint


class Mode(enum.Enum):
    """Which metric is better: the smaller one (a loss), or the greater one (an accuracy).

    Example:
        Retention(keep_best=1, mode=Mode.MAX)
    """

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class Retention:
    """What stays in a directory of checkpoints.

    Kept are the newest `max_to_keep`, the `keep_best` ones with the best metric (of equal ones the
    newer), and one for every `keep_every_n_hours` of training. Those last ones are determined from
    the checkpoints that are there, so that restarts change nothing: the oldest is one, and then,
    in the order in which they were saved, each at which that many hours of training had passed
    since the last such one. Training that goes back keeps none until it is past that point again.
    A later run with other hours chooses by those.

    Args:
        max_to_keep: how many of the newest stay, >= 1; None keeps all.
        keep_every_n_hours: hours of training, > 0; None keeps none for that reason.
        keep_best: how many of the best stay, >= 0; above 0 a metric is needed. A save without
            one is none of the best.
        mode: which metric is the better one.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of another type; mode is a Mode.

    Example:
        retention = Retention(max_to_keep=3, keep_best=2, mode=Mode.MAX)
        directory = CheckpointDirectory("checkpoints", retention=retention)
    """

    max_to_keep: int | None = 5
    keep_every_n_hours: float | None = None
    keep_best: int = 0
    mode: Mode = Mode.MIN

    def __post_init__(self) -> None:
        if self.max_to_keep is not None:
            expected = "an integer >= 1, or None for all"
            check.integer("max_to_keep", self.max_to_keep, least=1, expected=expected)
        check.integer("keep_best", self.keep_best, least=0)
        check.instance("mode", self.mode, Mode, "Mode.MIN or Mode.MAX")
        if self.keep_every_n_hours is not None:
            hours = self.keep_every_n_hours
            check.number("keep_every_n_hours", hours, above=0.0, expected="hours > 0, or None")


def best_first(checkpoints: Iterable[Checkpoint], mode: Mode) -> list[Checkpoint]:
    """Those with a metric, the best first, of equal ones the newer first."""
    sign = 1.0 if mode is Mode.MIN else -1.0
    measured = [(each.metric, each) for each in checkpoints if each.metric is not None]
    measured.sort(key=lambda pair: (sign * pair[0], -pair[1].serial))
    return [each for _, each in measured]


def superfluous(checkpoints: Iterable[Checkpoint], retention: Retention) -> list[Checkpoint]:
    """Those to delete, oldest first.

    What is kept does not depend on earlier deletions: of the kept ones alone all are kept, and the
    same ones stay as if nothing had ever been deleted.
    """
    if retention.max_to_keep is None:
        return []
    ordered = sorted(checkpoints, key=lambda each: each.serial)
    kept = {each.serial for each in ordered[-retention.max_to_keep :]}
    kept |= {each.serial for each in best_first(ordered, retention.mode)[: retention.keep_best]}
    if retention.keep_every_n_hours is not None:
        kept |= _milestones(ordered, retention.keep_every_n_hours * 3600.0)
    return [each for each in ordered if each.serial not in kept]


def _milestones(ordered: list[Checkpoint], interval_secs: float) -> set[int]:
    milestones: set[int] = set()
    due = -math.inf
    for each in ordered:
        if each.seconds >= due:
            milestones.add(each.serial)
            due = each.seconds + interval_secs
    return milestones
