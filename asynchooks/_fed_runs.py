"""What a source of other processes' steps does to a counter, and what it is asked for.

Between `StepRuns` and `GlobalStep`, which adds the waiting.
"""

from __future__ import annotations

import logging

from ._signal import Signal
from ._step_runs import StepRuns, wake_all
from ._step_source import Demand, SourceState, StepSource

logger = logging.getLogger("asynchooks")

UNREACHABLE = Signal("UNREACHABLE")
"""What a waiter is woken with when its step can no longer come."""
LOST = Signal("LOST")
"""What one is woken with that asked to be told when no news of other processes arrives."""


class FedRuns(StepRuns):
    """The runs of a counter that other processes may move, too."""

    __slots__ = ()

    def feed_from(self, source: StepSource | None, stride: int = 1) -> None:
        """Have a source bring the steps that other processes make; None: it brings no more.

        Args:
            source: what brings them, and the tickets below a limit if it `rations` them.
            stride: by how much one run moves the step, >= 1.
        """
        if not (isinstance(stride, int) and stride >= 1):
            raise ValueError(f"stride is {stride!r}; give the steps that a run makes, >= 1")
        with self._lock:
            gate = self._gate
            gate.source = source
            gate.is_rationed = source is not None and source.rations
            gate.allowance = 0
            if source is not None:
                gate.stride = stride
            news = self._news()
        wake_all(news)
        if source is None:
            self.set_source_state(None)
        else:
            self.set_source_state(SourceState.LIVE)
            source.look_again()

    def demand(self) -> Demand:
        """What is needed from other processes now; for the source."""
        with self._lock:
            gate, waiters = self._gate, self._waiters
            return Demand(
                next_step=waiters.next_step,
                limit=gate.limit,
                num_short=len(gate.askers) if gate.is_rationed and gate.allowance <= 0 else 0,
                num_spare=max(0, gate.allowance),
                num_out=gate.tickets,
                num_granted=gate.grants,
                workers_open=len(waiters.workers),
                epoch=gate.epoch,
            )

    def grant(self, runs: int, *, epoch: int) -> bool:
        """Let this process run so many steps more below the limit; from any thread.

        A negative number takes back what is not used yet.

        Returns:
            Whether it did: not what belongs to another epoch, and never more back than there is.
        """
        with self._lock:
            gate = self._gate
            if epoch != gate.epoch or gate.allowance + runs < 0:
                return False
            gate.allow(runs)
            news = self._news()
        wake_all(news)
        return True

    def set_source_state(self, state: SourceState | None, reason: str = "") -> None:
        """Say whether news of other processes arrives, and why not; from any thread.

        Once the source is closed every wait for a step ends; it may come back.
        """
        with self._lock:
            before, self._waiters.source_state = self._waiters.source_state, state
            if SourceState.CLOSED in (before, state) and before is not state:
                self._waiters.is_closed = state is SourceState.CLOSED
            lost = self._waiters.take_lost()
            told = self._waiters.take_told() if state is SourceState.LOST else []
        # that the last session here has closed, or the first one opened, is no news to anybody
        is_news = before is not state and not (before is None and state is SourceState.LIVE)
        if is_news and state is not None:
            level = logging.WARNING if state is SourceState.LOST else logging.INFO
            why = reason and f": {reason}"
            logger.log(level, "The source of %s is %s%s", self.name, state.value, why)
        wake_all([(each.slot, UNREACHABLE) for each in lost])
        wake_all([(each.slot, LOST) for each in told])
