"""Steps that other processes make: the one seam between a step and the engines that run them.

A source brings what other processes do to the step, and credits for its last steps. Nothing here
waits, and nothing knows an engine.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple

from .._check import integer
from .._engine.base import Sentinel
from .._engine.current import system_now

logger = logging.getLogger("asynchooks")


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
        """`GlobalStep.demand` may have changed. Called from any thread; it must neither block nor
        raise.

        Also from within `restart`: do not hold a lock there that is taken here.
        """


class Remote:
    """What a gate knows of other processes, guarded by the gate's lock."""

    def __init__(self) -> None:
        self.source: StepSource | None = None
        self.state: SourceState | None = None  # None where no other process moves the step
        # below a limit each run takes a credit, which the source granted to this process
        self.needs_credits = False
        self.credits = 0  # >= 0
        self.low_water = 0  # at which more credits are asked for
        self.lease_until = math.inf  # when credits expire, by `system_now`
        self.terms = 0  # how often earlier credits became void

    @property
    def has_credit(self) -> bool:
        return self.credits > 0 and system_now() < self.lease_until

    def spend(self) -> int:
        """A run begins below the limit; returns what `refund` asks for."""
        if self.credits == 0:  # it was granted before there was a limit
            return -1
        self.credits -= 1
        return self.terms

    def refund(self, terms: int) -> None:
        """A run was not made that began on these terms."""
        self.credits += terms == self.terms

    def void_credits(self) -> None:
        """Forget the credits so far; others may have been granted them meanwhile."""
        self.terms += 1
        self.credits = self.low_water = 0

    def is_of(self, source: StepSource | None) -> bool:
        """Whether no other source has taken the place of this one; None stands for the present."""
        return source in (None, self.source)

    def look_again(self) -> None:
        """Tell the source that the demand may have changed; without the lock."""
        if self.source is not None:
            self.source.look_again()


LOST = Sentinel("LOST")
"""What a wait that `fails_on_loss` ends with when no updates of other processes arrive."""


class FedStep:
    """The part of a `GlobalStep` that the source of other processes' steps calls."""

    gate: Any  # that of the step, which has what is told here about other processes

    def feed_from(
        self,
        source: StepSource | None,
        stride: int = 1,
        *,
        instead_of: StepSource | None = None,
    ) -> None:
        """Have a source bring the steps that other processes make; None: it brings no more.

        Args:
            source: what brings them, and credits below a limit if it `grants_credits`.
            stride: by how much one run moves the step, >= 1.
            instead_of: the source so far, if another one may have taken its place by now: then
                nothing changes.
        """
        stride = integer("stride", stride, least=1, expected="the steps that a run makes, >= 1")
        gate, remote = self.gate, self.gate.remote
        with gate.lock:
            if not remote.is_of(instead_of):
                return
            remote.source, remote.lease_until = source, math.inf
            grants = source is not None and source.grants_credits
            remote.needs_credits = grants and not gate.published_only
            remote.void_credits()
            if source is not None:
                gate.stride = stride
        self.set_source_state(None if source is None else SourceState.LIVE, source=source)

    def set_source_state(
        self, state: SourceState | None, reason: str = "", *, source: StepSource | None = None
    ) -> None:
        """Say whether updates of other processes arrive, and why not; from any thread.

        Once the source is closed every wait for a step ends, and for a credit; it may come back.

        Args:
            reason: for the log.
            source: the caller, if another one may have taken its place by now: then nothing
                changes.
        """
        gate, remote = self.gate, self.gate.remote
        with gate.changing():
            if not remote.is_of(source):
                return
            before, remote.state = remote.state, state
        # not that the last session here has closed, or the first one opened
        if before is not state and state is not None and (before or state is not SourceState.LIVE):
            level = logging.WARNING if state is SourceState.LOST else logging.INFO
            why = reason and f": {reason}"
            logger.log(level, "The source of %s is %s%s", gate.name, state.value, why)

    def demand(self) -> Demand:
        """What is needed from other processes now; for the source."""
        gate, remote = self.gate, self.gate.remote
        with gate.lock:
            limit, num_short = gate.limit, 0
            next_step = gate.waiters[0][0] if gate.waiters else math.inf
            if remote.needs_credits and limit is not None:
                if not gate.is_at_limit:
                    next_step = min(next_step, limit)
                if remote.credits == 0 and gate.exclusive is None:
                    # not those that wait behind one that asks for the exclusive side
                    num_short = sum(1 for _ in takewhile(lambda a: not a.is_exclusive, gate.askers))
            return Demand(
                next_step=next_step,
                limit=limit,
                num_short=num_short,
                num_spare=remote.credits,
                num_out=len(gate.tickets) + len(gate.void),
                num_granted=gate.grants,
                workers_open=len(gate.workers),
                epoch=gate.epoch,
                num_lost=len(gate.void & gate.abandoned),
            )

    def grant(
        self,
        runs: int,
        *,
        epoch: int,
        limit: int | None = None,
        source: StepSource | None = None,
    ) -> bool:
        """Let this process run so many steps more below the limit; from any thread.

        A negative number takes back what is not used yet.

        Args:
            epoch: the one that they are for.
            limit: the one that they were asked for under, if there may be a lower one by now:
                the last session may have closed and another one opened.
            source: what grants, if another one may have taken its place by now.

        Returns:
            True if it took them. It takes none of another epoch, with a lower limit or no limit,
            or from a source that no longer feeds the step, and gives back no more than there is.
        """
        gate, remote = self.gate, self.gate.remote
        with gate.changing():
            if not (remote.needs_credits and remote.is_of(source)):
                return False
            if gate.limit is None or epoch != gate.epoch or (limit or 0) > gate.limit:
                return False
            if remote.credits + runs < 0:
                return False
            remote.credits += runs
            remote.low_water = remote.credits // 2
        return True

    def lease(self, until: float) -> None:
        """Let what was granted be used up to a time, in seconds by `system_now`.

        Afterwards others may have been given it: this process may have slept, or been cut off.
        Never called, there is no such time.
        """
        with self.gate.changing():
            self.gate.remote.lease_until = until

    def forget_lost(self, epoch: int) -> None:
        """Count lost runs of older epochs no longer, unless this one is over by now."""
        with self.gate.lock:
            if epoch == self.gate.epoch:
                self.gate.void -= self.gate.abandoned
