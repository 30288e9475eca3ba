"""StepSource: brings a global step what other processes do to it, and credits for its last steps.

The seam to engines that run many processes. It waits for nothing, and knows none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import NamedTuple


class SourceState(Enum):
    """Whether updates of other processes arrive.

    Example:
        step = GlobalStep(multi_process=True)
        step.set_source_state(SourceState.LOST)
        assert step.statistics().source is SourceState.LOST
    """

    LIVE = "live"
    """They do."""
    LOST = "lost"
    """They do not for now; waits go on, unless they were begun with `fails_on_loss`."""
    CLOSED = "closed"
    """They will not arrive any more."""


class Demand(NamedTuple):
    """What the tasks of this process need from other processes, at one moment.

    Example:
        step = GlobalStep(multi_process=True)
        assert step.demand().next_step == float("inf")  # no task waits
    """

    next_step: float
    """The lowest step that is waited for, or the limit where tickets need credits; infinite if
    there is none."""
    limit: int | None
    """The step that no run may lead beyond, if any."""
    num_short: int
    """Tasks that wait for a credit, and for nothing else."""
    num_spare: int
    """Credits that were granted to this process and not used yet."""
    num_out: int
    """Runs under way. These and the spare credits are all that this process may still do: others
    may be granted the rest."""
    num_granted: int
    """Runs that have begun since the process began: two equal numbers say that it is idle."""
    workers_open: int
    """Sessions that are open here."""
    epoch: int
    """Which a grant must name: credits of an earlier one are void."""
    num_lost: int = 0
    """Of the runs under way, those of an earlier epoch that were abandoned: they may never end, and
    may still move the step."""


class StepSource(ABC):
    """Brings the steps that other processes make to a `GlobalStep`, and credits for its last ones.

    The engine of a cluster makes it and gives it to `GlobalStep.feed_from`. It holds one blocked
    wait for the whole process, whatever number of tasks wait here, and calls the step's `publish`,
    `restart`, `grant` and `set_source_state`, from any thread.

    Example:
        class Echo(StepSource):
            def look_again(self):
                print("wanted:", step.demand())

        step = GlobalStep(multi_process=True)
        step.feed_from(Echo())
    """

    grants_credits = False
    """Whether it grants credits below a limit; else a limit binds the runs of this process only."""

    @abstractmethod
    def look_again(self) -> None:
        """`GlobalStep.demand` has changed. Called from any thread; it must not block, nor raise.

        Also from within `restart`: do not hold a lock there that is taken here.
        """
