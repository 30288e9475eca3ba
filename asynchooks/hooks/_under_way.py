"""Evaluations that run beside training: begun, and not ended. Nothing here evaluates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine
from .._stopping.backoff import Restart
from .._stopping.coordinator import Coordinator
from .._stopping.tasks import OnFailure


class _Place:
    """What one evaluation takes up, also in the pause before it is called again."""

    __slots__ = ("is_in_pause", "num_failures")

    def __init__(self) -> None:
        self.is_in_pause = False
        self.num_failures = 0


class UnderWay:
    """The side tasks of one hook on one raw session; the hook makes one for each.

    Args:
        coord: the raw session's, by which they end.
        on_failure: as for `coord.start_soon`.
        name: what they are called in logs and reasons.
    """

    def __init__(self, coord: Coordinator, on_failure: OnFailure | Restart, name: str) -> None:
        self._coord = coord
        self._on_failure = on_failure
        self._max_restarts = on_failure.max_attempts if isinstance(on_failure, Restart) else 0
        self._name = name
        self._places: set[_Place] = set()
        self._changed: Slot | None = None  # who waits for the end of all

    def __len__(self) -> int:
        return len(self._places)

    async def start(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Start `fn()` as a side task, and suspend until it is called.

        So what it does before its first wait is done before the caller trains on: a step that
        does not suspend could otherwise be run a thousand times first.
        """
        engine = current_engine()
        place, begun = _Place(), Slot(engine, f"the beginning of {self._name}")
        self._places.add(place)
        self._coord.start_soon(
            self._run, fn, place, begun, on_failure=self._on_failure, name=self._name
        )
        await engine.park(begun)

    async def _run(self, fn: Callable[[], Awaitable[None]], place: _Place, begun: Slot) -> None:
        begun.wake()
        place.is_in_pause = False
        try:
            await fn()
        except Exception:
            # kept: else another one would begin meanwhile, and be one too many
            place.num_failures += 1
            place.is_in_pause = place.num_failures <= self._max_restarts
            raise
        finally:
            if not place.is_in_pause:
                self._places.discard(place)
            if self._changed is not None:
                self._changed.wake()

    async def wait_for_end(self) -> None:
        """Suspend until all have ended; after a stop not for those that it keeps from restarting.

        Cancellation safe.
        """
        engine, stop = current_engine(), self._coord.stop
        while self._places:
            slot = self._changed = Slot(engine, f"the end of {self._name}")
            # a stop does not end the wait for one that runs: it is let finish
            if all(place.is_in_pause for place in self._places):
                stop.add(slot)
            try:
                if await engine.park(slot) is STOPPED:
                    return
            finally:
                stop.discard(slot)
