"""Drawer: one who takes items from a pipeline, one at a time, and says when they were used.

Waits: how long the drawers of one owner waited.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._engine import current_engine
from .._stop import Stop

if TYPE_CHECKING:
    from ._draws import Draws


class Draw:
    """An item that somebody has in hand."""

    __slots__ = ("generation", "item", "place")

    def __init__(self, item: Any, place: int, generation: int) -> None:
        self.item = item
        self.place = place
        self.generation = generation  # how often the position was loaded


class Drawer:
    """One user of a pipeline, with at most one item in hand."""

    def __init__(
        self, draws: Draws, owner: object, *, loop: weakref.ref[Any] | None = None
    ) -> None:
        self.draws = draws
        self.owner = owner  # the session's stop
        self.loop = loop  # what gives its items to a loop over `session.batches`
        self.wait_secs = 0.0
        self.has_run: Callable[[], bool] | None = None  # whether the step with its item has ended
        self._in_hand: Draw | None = None
        self._has_joined = False

    def join(self) -> None:
        """Keep the pipeline open, until `leave`."""
        if not self._has_joined:
            self._has_joined = True
            self.draws.drawers.append(self)

    async def take(self, stop: Stop | None) -> Any:
        """The item in hand, or the next one.

        Raises:
            StopAsyncIteration, StopTraining, BaseException: as `Draws.draw`.
        """
        if self._in_hand is None or not self.draws.is_current(self._in_hand):
            self._in_hand = None
            engine = current_engine()
            asked = engine.tick()
            try:
                self._in_hand = await self.draws.draw(stop)
            finally:
                self.wait_secs += engine.tick() - asked
        return self._in_hand.item

    @property
    def num_before(self) -> int:
        """How many items came before the one in hand, since the position was loaded."""
        return -1 if self._in_hand is None else self._in_hand.place

    @property
    def place_run(self) -> int:
        """The place of the item in hand, if its run has ended, though not yet for all hooks; -1."""
        draw = self._in_hand
        if draw is None or self.has_run is None or not self.has_run():
            return -1
        return draw.place if self.draws.is_current(draw) else -1

    def carry(self, generation: int, base: int) -> int | None:
        """Keep what a loop has in hand where the pipeline goes back; its place from there on."""
        draw = self._in_hand
        if draw is None or self.loop is None or draw.generation != generation - 1:
            return None
        self._in_hand = Draw(draw.item, draw.place - base, generation)
        return self._in_hand.place

    def use(self) -> None:
        """A run has used the item in hand, if there is one."""
        draw, self._in_hand = self._in_hand, None
        if draw is not None:
            self.draws.use(draw)

    def give_back(self) -> None:
        """The item in hand will not be used."""
        draw, self._in_hand = self._in_hand, None
        if draw is not None:
            self.draws.give_back(draw)

    async def leave(self) -> None:
        self.give_back()
        if self._has_joined:
            self._has_joined = False
            await self.draws.leave(self)


class Waits:
    """How long all drawers of one owner waited, those among them who have left since this is open.

    Whoever asks makes it, and closes it.
    """

    def __init__(self, draws: Draws, owner: object) -> None:
        self._draws = draws
        self._owner = owner
        self._secs_of_left = 0.0
        draws.waits.append(self)

    @property
    def secs(self) -> float:
        here = (each.wait_secs for each in self._draws.drawers if each.owner is self._owner)
        return self._secs_of_left + sum(here)

    def keep(self, drawer: Drawer) -> None:
        """It leaves."""
        if drawer.owner is self._owner:
            self._secs_of_left += drawer.wait_secs

    def close(self) -> None:
        if self in self._draws.waits:
            self._draws.waits.remove(self)
