"""Draws: who takes items from a pipeline to train with, and which of them a run has used.

It knows nothing of sessions; hooks and `session.batches` are its users.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from .._engine.current import current_engine
from .._engine.sync import Lock
from .._errors import InputError
from ._buffered import Buffered
from ._position import BEYOND, Phase
from ._prefetch import Prefetch
from ._saved import fingerprint
from ._sources import stage_of
from ._stage import KEEP_EVERY, Stage
from ._training_end import TrainingEnd

logger = logging.getLogger("asynchooks")

_NUM_SAVED = 4096
"""Of how many saved positions we know where they were: of more than checkpoints are kept, and than
are asked for between two of them."""


def draws_of(source: Any) -> Draws:
    """What all who draw from this source share; a source that is no stage has them for itself."""
    stage = stage_of(source)
    if stage._draws is None:
        stage._draws = Draws(stage)
    draws: Draws = stage._draws
    return draws


class Draws:
    """The users of one pipeline: the first opens it, the last closes it.

    One that has not ended stays open while those may come who share the last one's creator.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.stage = stage
        self._reader: Buffered | None = None  # from the first draw on
        self.drawers: list[Drawer] = []
        self.waits: list[Waits] = []  # of those who watch how long the drawers wait
        self._opening = Lock("the opening of a pipeline")
        # places: how many items came before one, since the position was loaded
        self._num_drawn = 0
        self._num_used = 0  # all before this place
        self._used_beyond: set[int] = set()  # places behind it; a former life's among them
        self._returned: list[int] = []  # places of items that lie in the reader again, last first
        self._num_seen = -1  # that had left the stage when we last looked
        self._keep_next = KEEP_EVERY
        self._generation = 0
        self._ended_in: object = None  # the training in which the last item was used
        self.has_complained = False  # that there is no position
        self._back_to: Mapping[str, Any] | None = None  # where the next draw is to go on
        # of items that loops had in hand then, whose runs are made again, by their new places
        self._carried: set[int] = set()
        self._carried_used: set[int] = set()
        # where saved positions were, by their fingerprints; below 0 before the one that was loaded
        self._saved: dict[bytes, int] = {}

    async def leave(self, drawer: Drawer) -> None:
        self.drawers.remove(drawer)
        for each in self.waits:
            each.keep(drawer)
        if not self._is_kept_for_others(drawer):
            await self.close_unused()

    def _is_kept_for_others(self, drawer: Drawer) -> bool:
        """Whether sessions that share the creator of this drawer's may still come to draw."""
        keeper, reader = drawer.keeper, self._reader
        if self.drawers or keeper is None or reader is None or self.stage._num_users > 1:
            return False
        if reader._phase is not Phase.OPEN:
            return False
        return keeper.training is not self._ended_in and keeper.keep_open(self.close_unused)

    async def close_unused(self) -> None:
        """Let go of the pipeline, unless somebody draws from it."""
        # what is read ahead of a stage that somebody else has opened stays for the next session
        if not self.drawers and (self._reader is self.stage or self.stage._num_users <= 1):
            await self.close()

    async def close(self) -> None:
        """Let go of the pipeline."""
        if self._reader is not None:
            reader, self._reader = self._reader, None
            await reader.aclose()

    async def draw(self, stop: TrainingEnd | None) -> Draw:
        """The next item; cancelling this loses none.

        A worker that comes when the others of its training have used up and closed the pipeline
        finds no further item, either.

        Raises:
            StopTraining: the stop came first.
            StopAsyncIteration: there is no further item.
            InputError: there never was one.
            BaseException: what the pipeline raised.
        """
        while True:
            if self._reader is None or self._back_to is not None:
                if self._has_ended_in(stop):
                    raise StopAsyncIteration
                async with self._opening:
                    await self._open()
            reader = self._reader
            assert reader is not None
            try:
                item = await reader.take(stop)
            except RuntimeError:
                if reader is self._reader:
                    raise
                continue  # it was closed, as the pipeline has gone back
            if reader is not self._reader or self._back_to is not None:
                continue  # the pipeline has gone back meanwhile
            self._num_seen = self.stage._num_out
            if item is Buffered.END:
                if self._num_drawn == 0 and not self.stage._is_loaded:
                    raise InputError(f"{self.stage!r} has no items: there is nothing to train with")
                self._ended_in = None if stop is None else stop.training
                raise StopAsyncIteration
            if self._returned:
                return Draw(item, self._returned.pop(), self._generation)
            draw = Draw(item, self._num_drawn, self._generation)
            self._num_drawn += 1
            if draw.place in self._carried:
                self._carried.discard(draw.place)
                continue
            if draw.place >= self._num_used and draw.place not in self._used_beyond:
                return draw
            self._advance()  # a former life used it

    def _has_ended_in(self, stop: TrainingEnd | None) -> bool:
        is_closed = self.stage._phase is Phase.CLOSED and self._back_to is None
        return is_closed and stop is not None and stop.training is self._ended_in

    async def _open(self) -> None:
        if self._back_to is not None:
            await self._go_back(self._back_to)
        elif self._reader is not None:
            return  # another worker has opened it meanwhile, and it may have read ahead
        stage = self.stage
        reader = stage if isinstance(stage, Buffered) else Prefetch(stage, 1)
        if reader is not stage:
            stage._num_parents -= 1  # it is none of the pipeline
            stage._is_an_end = True
        reader._open()
        self._reader = reader
        if stage._num_out != self._num_seen:  # somebody else has taken some, or loaded it
            self._num_drawn = self._num_used = self._num_seen = stage._num_out
            self._used_beyond = set(stage._used_beyond)
            self._returned.clear()

    async def _go_back(self, state: Mapping[str, Any]) -> None:
        reader, self._reader, self._back_to = self._reader, None, None
        before, self.stage = self.stage, self.stage._again(self.stage._epoch)
        self._load(self.stage, state)
        try:
            if reader is not None:
                await reader.aclose()
        finally:
            await before._give_way(self.stage)

    def use(self, draw: Draw) -> None:
        """A run has ended that used it."""
        if draw.generation != self._generation:
            return
        if self._back_to is not None:
            self._carried_used.add(draw.place)
        else:
            self._used_beyond.add(draw.place)
            self._advance()

    def _advance(self) -> None:
        while self._num_used < self._num_drawn and self._num_used in self._used_beyond:
            self._used_beyond.remove(self._num_used)
            self._num_used += 1
        if self._num_used >= self._keep_next:
            self._keep_next = self._num_used + KEEP_EVERY
            self.stage._keep(self._num_used)

    def give_back(self, draw: Draw) -> None:
        """It was not used: somebody else may have it, first of all."""
        if draw.generation != self._generation:
            return
        if draw.place in self._carried:  # it comes once more, as nobody has it now
            self._carried.discard(draw.place)
        elif self._reader is not None:
            self._returned.append(draw.place)
            self._reader.put_back(draw.item)
            self._num_seen = self.stage._num_out

    def is_current(self, draw: Draw) -> bool:
        """Whether the pipeline has not gone back since."""
        return draw.generation == self._generation

    def state_dict(self) -> dict[str, Any]:
        if self._back_to is not None:
            used = {*self._back_to.get(BEYOND, ()), *self._carried_used}
            state = {**self._back_to, BEYOND: sorted(used)} if used else dict(self._back_to)
            self._remember(state, 0)
            return state
        self.stage._check_alone()
        used = self._used_beyond | {each.place_run for each in self.drawers}
        num_used = self._num_used
        if self._num_seen < 0:  # nothing was drawn yet; somebody may have looked at a few
            num_used, used = self.stage._num_out, used | self.stage._used_beyond
        while num_used < self._num_drawn and num_used in used:
            num_used += 1
        state = self.stage._described(num_used)
        beyond = sorted(place - num_used for place in used if place >= num_used)
        if beyond:
            state[BEYOND] = beyond
        self._remember(state, num_used)
        return state

    def _remember(self, state: Mapping[str, Any], place: int) -> None:
        key = fingerprint(state)
        self._saved.pop(key, None)  # the last place counts, and is forgotten last
        self._saved[key] = place
        if len(self._saved) > _NUM_SAVED:
            del self._saved[next(iter(self._saved))]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: at once where nothing was drawn yet, else from the next draw on."""
        if self.stage._phase is Phase.NEW:
            self._load(self.stage, state)
            self._saved.clear()
        elif fingerprint(state) != fingerprint(self.state_dict()):
            try:
                self.stage._check_again()
            except TypeError as error:
                logger.warning(
                    "The model goes back to a checkpoint, and its input cannot: %s. It goes on "
                    "with the next items", error,
                )  # fmt: skip
                return
            self._generation += 1
            self._carry(state)
            self._back_to = state
        else:
            return
        self._remember(state, 0)

    def _carry(self, state: Mapping[str, Any]) -> None:
        """Loops make their runs again with what they have in hand: it must not come once more."""
        self._carried.clear()
        self._carried_used.clear()
        base = self._saved.get(fingerprint(state))
        if base is None:  # nobody knows where that is
            self._saved.clear()
            return
        self._saved = {key: place - base for key, place in self._saved.items()}
        for drawer in self.drawers:
            place = drawer.carry(self._generation, base)
            if place is not None:
                self._carried.add(place)

    def _load(self, stage: Stage[Any], state: Mapping[str, Any]) -> None:
        stage.load_state_dict(state)
        self._used_beyond = stage._used_beyond | self._carried_used
        self._carried -= self._carried_used
        self._num_drawn = self._num_used = self._num_seen = 0
        self._returned.clear()
        self._keep_next = KEEP_EVERY


class Keeper(Protocol):
    """A session, which may share its creator with others that are yet to draw."""

    @property
    def training(self) -> object:
        """The training that it is part of, for comparison with others."""

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        """Call `close` at the end of the last of them; False if there is no other."""


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
        self,
        draws: Draws,
        owner: object,
        *,
        keeper: Keeper | None = None,
        loop: weakref.ref[Any] | None = None,
    ) -> None:
        self.draws = draws
        self.owner = owner  # the session's stop
        self.keeper = keeper
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

    async def take(self, stop: TrainingEnd | None) -> Any:
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

    @property
    def has_unused_item(self) -> bool:
        """Whether somebody still has to run with the item in hand."""
        draw = self._in_hand
        if draw is None or not self.draws.is_current(draw) or self.place_run >= 0:
            return False
        return self.loop is None or self.loop() is not None

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
