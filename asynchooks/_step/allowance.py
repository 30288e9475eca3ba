"""What a source of other processes' steps does to a counter, and what it is asked for.

Between `StepRuns` and `GlobalStep`, which adds the waiting.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from .._engine.base import Sentinel
from .admission import StepRuns, wake_all
from .source import Demand, SourceState, StepSource

logger = logging.getLogger("asynchooks")

UNREACHABLE = Sentinel("UNREACHABLE")
"""What a waiter is woken with when its step can no longer come."""
LOST = Sentinel("LOST")
"""What one is woken with that asked to be told when no news of other processes arrives."""


class FedRuns(StepRuns):
    """The runs of a counter that other processes may move, too."""

    __slots__ = ()

    def feed_from(
        self,
        source: StepSource | None,
        stride: int = 1,
        *,
        instead_of: StepSource | None = None,
    ) -> None:
        """Have a source bring the steps that other processes make; None: it brings no more.

        Args:
            source: what brings them, and the tickets below a limit if it `rations` them.
            stride: by how much one run moves the step, >= 1.
            instead_of: who fed it so far, if another one may have taken its place by now: then
                nothing changes.
        """
        if not (isinstance(stride, int) and stride >= 1):
            raise ValueError(f"stride is {stride!r}; give the steps that a run makes, >= 1")
        with self._lock:
            gate = self._gate
            if instead_of not in (None, gate.source):
                return
            gate.source = source
            gate.is_rationed = source is not None and source.rations and not gate.keeps_limit
            gate.void()
            gate.lease_until = math.inf
            if source is not None:
                gate.stride = stride
            state = None if source is None else SourceState.LIVE
            news, before = self._change_state(state)
        self._tell_state(before, state)
        wake_all(news)
        if source is not None:
            source.look_again()

    def demand(self) -> Demand:
        """What is needed from other processes now; for the source."""
        with self._lock:
            gate, waiters = self._gate, self._waiters
            next_step = waiters.next_step
            if gate.is_rationed and gate.limit is not None and gate.value < gate.limit:
                next_step = min(next_step, gate.limit)
            return Demand(
                next_step=next_step,
                limit=gate.limit,
                num_short=gate.num_short,
                num_spare=gate.allowance,
                num_out=gate.tickets + gate.num_void + gate.is_running_here,
                num_granted=gate.grants,
                workers_open=len(waiters.workers),
                epoch=gate.epoch,
                num_lost=gate.num_lost,
            )

    def forget_lost(self, epoch: int) -> None:
        """Reckon no longer with lost runs of older epochs, unless this one is over by now."""
        with self._lock:
            if epoch == self._gate.epoch:
                self._gate.forget_lost()

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
            source: who grants, if another one may have taken its place by now.

        Returns:
            Whether it did: not for another epoch, nor a lower limit or none, nor from a source
            that feeds the step no more, and never more back than there is.
        """
        with self._lock:
            gate = self._gate
            if not gate.is_rationed or gate.limit is None or epoch != gate.epoch:
                return False
            if source not in (None, gate.source) or (limit is not None and limit > gate.limit):
                return False
            if gate.allowance + runs < 0:
                return False
            gate.allow(runs)
            news = self._news()
        wake_all(news)
        return True

    def lease(self, until: float) -> None:
        """Let what was granted be used up to a time, in seconds by `system_now`.

        Afterwards others may have been given it: this process may have slept, or been cut off.
        Never called, there is no such time.
        """
        with self._lock:
            self._gate.lease_until = until
            news = self._news()
        wake_all(news)

    def set_source_state(
        self, state: SourceState | None, reason: str = "", *, source: StepSource | None = None
    ) -> None:
        """Say whether news of other processes arrives, and why not; from any thread.

        Once the source is closed every wait for a step ends, and for a ticket; it may come back.

        Args:
            reason: for the log.
            source: who says so, if another one may have taken its place by now: then nothing
                changes.
        """
        with self._lock:
            if source not in (None, self._gate.source):
                return
            news, before = self._change_state(state)
        self._tell_state(before, state, reason)
        wake_all(news)

    def _change_state(self, state: SourceState | None) -> tuple[list[Any], SourceState | None]:
        """(Whom to wake with what, the state before); under the lock."""
        before, self._waiters.source_state = self._waiters.source_state, state
        self._gate.is_cut_off = state is SourceState.CLOSED
        news: list[Any] = self._news()
        news += [(each.slot, UNREACHABLE) for each in self._waiters.take_lost()]
        told = self._waiters.take_told() if state is SourceState.LOST else []
        return news + [(each.slot, LOST) for each in told], before

    def _tell_state(
        self, before: SourceState | None, state: SourceState | None, reason: str = ""
    ) -> None:
        # that the last session here has closed, or the first one opened, is no news to anybody
        is_news = before is not state and not (before is None and state is SourceState.LIVE)
        if is_news and state is not None:
            level = logging.WARNING if state is SourceState.LOST else logging.INFO
            why = reason and f": {reason}"
            logger.log(level, "The source of %s is %s%s", self.name, state.value, why)
