"""What `rollouts` gives out and counts, and what it does with what is too old."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from ._statistics import StageStatistics


class WhenStale(Enum):
    """What `rollouts` does so that nothing older than `max_staleness` steps is trained on.

    Example:
        groups = rollouts(
            answer, prompts, 8, concurrency=16, max_staleness=2, when_stale=WhenStale.DROP
        )
    """

    WAIT = auto()
    """The learner waits for each result that would be too old one step later. The bound is hard,
    nothing is lost, and a slow call holds up the learner."""
    ACCEPT = auto()
    """Results are used however old they are. Only the number of calls under way is bounded, so
    that the bound holds on average; the learner waits for none in particular."""
    DROP = auto()
    """A call is cancelled, and a result thrown away, as soon as it cannot be used in time. The
    bound is hard and the learner fast, and slow items are trained on less often."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The result of one call of the function that `rollouts` was given.

    Example:
        def step(groups):
            return {"age": sum(each.staleness for each in groups) / len(groups)}
    """

    item: Any
    """What the function was called with."""
    result: Any
    """What it returned."""
    version: int
    """The version of the weights when the call began: a global step."""
    staleness: int
    """Steps of the learner between those weights and the ones that this result is to train."""
    place: int
    """Items before it in the source, over all passes and restored runs: it identifies the item."""


@dataclass(frozen=True)
class RolloutStatistics(StageStatistics):
    """As `StageStatistics`, with what became of the items; all counts are numbers of items.

    Those that were not trained on are counted over restored runs, too, as their places are.

    Example:
        groups = rollouts(answer, prompts, 8, concurrency=16, max_staleness=2)
        async with MonitoredSession([FeedHook(groups, "images")], creator) as session:
            await session.run("loss")
        seen = groups.statistics()
        print(f"{seen.num_refused} refused, {seen.num_dropped} dropped, ages {seen.staleness}")
    """

    num_under_way: int = 0
    """Calls under way, among them those that were cancelled and have not ended yet."""
    num_ready: int = 0
    """Results that are in no batch yet."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many results were given out at each staleness, in steps."""
    num_refused: int = 0
    """Results that `accept` refused."""
    num_dropped: int = 0
    """Items given up as too old, under `WhenStale.DROP`."""
    num_failed: int = 0
    """Items whose last call failed."""
    num_retried: int = 0
    """Calls that were made again after one that failed."""

    def _lines(self, indent: str) -> list[str]:
        first, *below = super()._lines(indent)
        counts = {
            "under way": self.num_under_way, "ready": self.num_ready,
            "refused": self.num_refused, "dropped": self.num_dropped,
            "failed": self.num_failed, "retried": self.num_retried,
        }  # fmt: skip
        known = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        ages = ", ".join(f"{age}: {count:,}" for age, count in self.staleness.items())
        more = "; ".join(text for text in (known, ages and f"by staleness {ages}") if text)
        return [f"{first}; {more}" if more else first, *below]

    @property
    def mean_staleness(self) -> float:
        """Of the results given out, in steps; NaN before the first one."""
        num = sum(self.staleness.values())
        total = sum(age * count for age, count in self.staleness.items())
        return total / num if num else float("nan")
