"""Consumers of a stage: FeedHook and `session.batches`, and which of its items runs have used.

`Consumers` is one object for all that train with a stage, in whichever session of a training.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._engine.current import current_engine
from .._engine.sync import Lock
from .._errors import InputError, InputStateError
from .._hook import SessionRunContext
from .._stopping.session_stop import SessionStop
from ._prefetch import Buffered, Prefetch
from ._source_stage import fingerprint
from ._sources import stage_of
from ._stage import Phase, Stage
from ._training_end import TrainingEnd

logger = logging.getLogger("asynchooks")

_NUM_SAVED = 4096
"""Saved positions whose place is remembered: more than checkpoints are kept, and than are asked for
between two of them."""


class CurrentRun:
    """The run of a session in which items are used: another worker may save during `after_run`."""

    __slots__ = ("context", "stop")

    def __init__(self, stop: SessionStop | None) -> None:
        self.stop = stop  # of the session; None where hooks are called by hand
        self.context: SessionRunContext | None = None  # of the present run, or one that failed

    @property
    def handle(self) -> Any:  # a SessionHandle, of a room above, or None
        return None if self.stop is None else self.stop.handle

    def begin(self, context: SessionRunContext | None) -> None:
        self.context = context

    def end(self) -> None:
        self.begin(None)

    def has_ended(self) -> bool:
        """Whether its step is made: for other hooks it may go on, or it was cancelled, or failed.

        Whatever becomes of it, its items are used.
        """
        return self.context is not None and self.context.step_is_made


class Taken(NamedTuple):
    """An item in a consumer's hand."""

    item: Any
    place: int  # items before it, since the position was loaded
    generation: int  # how often the position had been loaded


def consumers_of(source: Any) -> Consumers:
    """The consumers of a stage; a source that is no stage becomes one of its own."""
    stage = stage_of(source)
    if stage._consumers is None:
        stage._consumers = Consumers(stage)
    consumers: Consumers = stage._consumers
    return consumers


def consumers_of_last_stage(source: Any, user: str) -> Consumers:
    """The consumers of the last stage of a pipeline; TypeError or ValueError if it is none."""
    if not isinstance(source, Stage):
        raise TypeError(
            f"{user} got {source!r}; give the stage that the session reads, such as "
            "prefetch(source, 8)"
        )
    if source._num_parents:
        raise ValueError(
            f"{user} got {source!r}, which another stage reads, ahead of the session perhaps; give "
            "the last stage, which the session reads"
        )
    return consumers_of(source)


class Consumers:
    """All consumers of one stage: the first take opens its pipeline, the last leave closes it."""

    def __init__(self, stage: Stage[Any]) -> None:
        self.stage = stage
        self.members: list[Consumer] = []
        self.wait_times: list[WaitTime] = []
        self.has_warned = False  # that there is no position
        self._reader: Buffered | None = None  # from the first take on
        self._opening = Lock("the opening of a pipeline")
        # places: how many items came before one, since the position was loaded
        self._num_taken = 0
        self._num_used = 0  # all before this place
        self._used_beyond: set[int] = set()  # places behind it, also from before a restore
        self._returned: list[int] = []  # places of items that lie in the reader again, last first
        self._num_seen = -1  # items that had left the stage at the last take
        self._generation = 0
        self._ended_in: object = None  # the training that has met the end
        self._rewind_to: Mapping[str, Any] | None = None  # where the next take is to go on
        # of items that loops had in hand at the rewind, whose runs are made again: the new places
        self._carried: set[int] = set()
        self._carried_used: set[int] = set()
        # of a stage that gives other items after a restore: these items themselves, by new place
        self._kept: dict[int, Any] = {}
        # what is not to come once more when the input goes back: places, and also below 0, before
        # the position that was loaded; or items, where places say nothing
        self._left_out: set[int] = set()
        self._left_out_items: list[Any] = []
        self._vouched = -1  # the last place whose run is known to have gone well
        # places of saved positions, by fingerprint; below 0 before the one that was loaded
        self._saved: dict[bytes, int] = {}
        self.num_epochs_ended: int | None = None
        """Passes whose end FeedHooks have reported; None before the first item of a training."""

    def join(self, run: CurrentRun, loop: weakref.ref[Any] | None = None) -> Consumer:
        """A new consumer, which keeps the pipeline open until it leaves."""
        consumer = Consumer(self, run, loop)
        self.members.append(consumer)
        return consumer

    async def leave(self, consumer: Consumer) -> None:
        self.members.remove(consumer)
        for each in self.wait_times:
            each.keep(consumer)
        if not self._is_kept_for_others(consumer):
            await self.close_unused()

    def _is_kept_for_others(self, consumer: Consumer) -> bool:
        """Whether sessions that share the creator of this consumer's may still come to take."""
        handle, reader = consumer.run.handle, self._reader
        if self.members or handle is None or reader is None or self.stage._num_users > 1:
            return False
        if reader._phase is not Phase.OPEN:
            return False
        training = handle.global_step.gate
        return training is not self._ended_in and bool(handle.keep_open(self.close_unused))

    async def close_unused(self) -> None:
        """Close the pipeline, unless it has a consumer."""
        # what is read ahead of a stage that others have opened stays for the next session
        if not self.members and (self._reader is self.stage or self.stage._num_users <= 1):
            await self.close()

    async def close(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            await reader.aclose()

    async def take(self, end: TrainingEnd | None) -> Taken:
        """The next item; cancelling this loses none.

        StopTraining: the end of training came first. StopAsyncIteration: there is no further item,
        or others of the training have used up and closed the pipeline. InputError: never was one.
        """
        while True:
            if self._reader is None or self._rewind_to is not None:
                if self._has_ended_in(end):
                    raise StopAsyncIteration
                async with self._opening:
                    await self._open()
            reader = self._reader
            assert reader is not None
            try:
                item = await reader.take(end)
            except RuntimeError:
                if reader is self._reader:
                    raise
                continue  # a rewind closed it
            if reader is not self._reader or self._rewind_to is not None:
                continue  # rewound meanwhile
            self._num_seen = self.stage._num_out
            if item is Buffered.END:
                if self._num_taken == 0 and not self.stage._is_loaded:
                    raise InputError(self.stage._why_empty())
                self._ended_in = None if end is None else end.training
                raise StopAsyncIteration
            if self._returned:
                return Taken(item, self._returned.pop(), self._generation)
            place = self._num_taken
            self._num_taken += 1
            if place in self._carried:
                self._carried.discard(place)
            elif place >= self._num_used and place not in self._used_beyond:
                return Taken(item, place, self._generation)
            else:
                self._advance()  # used before the restore

    def _has_ended_in(self, end: TrainingEnd | None) -> bool:
        is_closed = self.stage._phase is Phase.CLOSED and self._rewind_to is None
        return is_closed and end is not None and end.training is self._ended_in

    async def _open(self) -> None:
        if self._rewind_to is not None:
            await self._rewind(self._rewind_to)
        elif self._reader is not None:
            return  # another worker has opened it meanwhile, and it may have read ahead
        stage = self.stage
        reader = stage if isinstance(stage, Buffered) else Prefetch(stage, 1)
        if reader is not stage:
            stage._num_parents -= 1  # this reader is no stage of the pipeline
            stage._is_taken_from = True
        reader._open()
        self._reader = reader
        if stage._num_out != self._num_seen:  # items were taken by others, or a state was loaded
            self._num_taken = self._num_used = self._num_seen = stage._num_out
            self._used_beyond = set(stage._used_beyond)
            self._returned.clear()

    async def _rewind(self, state: Mapping[str, Any]) -> None:
        reader, self._reader, self._rewind_to = self._reader, None, None
        self._ended_in = None
        before, self.stage = self.stage, self.stage._restarted(self.stage._epoch)
        self._load(self.stage, state)
        try:
            if reader is before:
                before._num_users -= 1  # closed below, with a successor
            elif reader is not None:
                await reader.aclose()
        finally:
            await before._replace_by(self.stage)

    @property
    def num_epochs(self) -> int:
        """Passes, at the end of the source."""
        return self.stage._epoch_of(self._num_taken) + 1

    def use(self, taken: Taken) -> None:
        """A run that used it has ended."""
        if taken.generation != self._generation:
            return
        if self._rewind_to is not None:
            self._carried_used.add(taken.place)
        else:
            self._used_beyond.add(taken.place)
            self._advance()
            self.stage._note_used(taken.place)

    def _advance(self) -> None:
        while self._num_used < self._num_taken and self._num_used in self._used_beyond:
            self._used_beyond.remove(self._num_used)
            self._num_used += 1
        if self._num_used >= self.stage._trim_next:
            self.stage._trim_due(self._num_used)

    def give_back(self, taken: Taken) -> None:
        """It was not used: the next consumer that asks gets it."""
        if taken.generation != self._generation:
            return
        if taken.place in self._carried:  # it comes once more, as no loop has it now
            self._carried.discard(taken.place)
        elif self._rewind_to is not None:
            self._kept.pop(taken.place, None)
        elif self._reader is not None:
            self._returned.append(taken.place)
            self._reader.put_back(taken.item)
            self._num_seen = self.stage._num_out

    def vouch(self, place: int, generation: int) -> None:
        """The run that used what was there went well."""
        if generation == self._generation:
            self._vouched = max(self._vouched, place)

    def leave_out(self, taken: Taken) -> bool:
        """Do not give it once more when the input goes back; says whether it is left out then.

        Nor what others have used behind the last item that was vouched for: it may be to blame.
        """
        if taken.generation != self._generation:
            return False
        try:
            self.stage._check_repeatable()
            self.stage._check_alone()
            self.state_dict()
        except (InputStateError, TypeError):  # it goes on with the next items
            return False
        if self.stage.gives_others_after_restore:
            self._left_out_items.append(taken.item)
        else:
            self._left_out.add(taken.place)
            in_runs = {each.place_run for each in self.members}
            for place in range(self._vouched + 1, self._num_taken if len(self.members) > 1 else 0):
                if place < self._num_used or place in self._used_beyond or place in in_runs:
                    self._left_out.add(place)
        return True

    def is_current(self, taken: Taken) -> bool:
        """Whether there was no rewind since."""
        return taken.generation == self._generation

    def state_dict(self) -> dict[str, Any]:
        in_runs = {each.place_run for each in self.members} - {-1}
        if self._rewind_to is not None:
            used = self._carried_used | in_runs
            items = {place: self._kept.get(place, ()) for place in used}
            state = self.stage._state_with(self._rewind_to, items)
            self._remember(state, 0)
            return state
        self.stage._check_alone()
        used = self._used_beyond | in_runs
        num_used = self._num_used
        if self._num_seen < 0:  # nothing was taken yet; the program may have read a few items
            num_used, used = self.stage._num_out, used | self.stage._used_beyond
        while num_used < self._num_taken and num_used in used:
            num_used += 1
        state = self.stage._saved_used(num_used, used)
        self._remember(state, num_used)
        return state

    def _remember(self, state: Mapping[str, Any], place: int) -> None:
        key = fingerprint(state)
        self._saved.pop(key, None)  # the last place counts, and is forgotten last
        self._saved[key] = place
        if len(self._saved) > _NUM_SAVED:
            del self._saved[next(iter(self._saved))]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: at once where nothing was taken yet, else from the next take on."""
        if self.stage._phase is Phase.NEW and not self._generation:  # else it is just rewound
            self._load(self.stage, state)
            self._saved.clear()
        elif fingerprint(state) != fingerprint(self.state_dict()):
            try:
                self.stage._check_repeatable()
            except TypeError as error:
                logger.warning(
                    "The model goes back to a checkpoint, and its input cannot: %s. It goes on "
                    "with the next items", error,
                )  # fmt: skip
                return
            self._generation += 1
            self._vouched = -1
            self._carry(state)
            self._rewind_to = state
        else:
            return
        self._remember(state, 0)

    def _carry(self, state: Mapping[str, Any]) -> None:
        """Loops make their runs again with what they have in hand: it must not come once more."""
        self._carried.clear()
        self._carried_used.clear()
        if self.stage.gives_others_after_restore:
            self._kept = {}
            for consumer in self.members:
                if consumer.place_run >= 0 and not self.stage._unfinished_in(state, consumer.item):
                    continue  # the position is behind it
                if consumer.carry(self._generation, to=len(self._kept)) is not None:
                    self._kept[len(self._kept)] = consumer.item
            for each in self._left_out_items:
                if (item := self.stage._unfinished_in(state, each)) is not None:
                    self._carried_used.add(len(self._kept))
                    self._kept[len(self._kept)] = item
            return
        base = self._saved.get(fingerprint(state))
        if base is None:  # the place of that position is not known
            self._saved.clear()
            self._left_out.clear()
            return
        self._saved = {key: place - base for key, place in self._saved.items()}
        self._left_out = {place - base for place in self._left_out}
        self._carried_used |= {place for place in self._left_out if place >= 0}
        for consumer in self.members:
            place = consumer.carry(self._generation, back_by=base)
            if place is not None:
                self._carried.add(place)

    def _load(self, stage: Stage[Any], state: Mapping[str, Any]) -> None:
        stage.load_state_dict(state)
        self._used_beyond = stage._used_beyond | self._carried_used
        self._carried -= self._carried_used
        self._num_taken = self._num_used = self._num_seen = 0
        self._returned.clear()
        self._keep_in_hand(stage)

    def _keep_in_hand(self, stage: Stage[Any]) -> None:
        """Have what loops have in hand count as the first items of the stage."""
        kept, self._kept = self._kept, {}
        num = max(kept, default=-1) + 1
        for place in range(num):
            stage._keep(kept.get(place, ()))
            if place not in kept:  # it was given back since
                self._used_beyond.add(place)
        self._num_taken = self._num_seen = num
        self._advance()


class Consumer:
    """A FeedHook, or a loop over `session.batches`: it has at most one item in hand."""

    def __init__(
        self, consumers: Consumers, run: CurrentRun, loop: weakref.ref[Any] | None
    ) -> None:
        self.run = run
        self.loop = loop  # the iterator that gives its items to a loop; None for a hook
        self.wait_secs = 0.0
        self._consumers = consumers
        self._taken: Taken | None = None
        # of a run whose step is made, and behind which model and input went back meanwhile
        self._undone: SessionRunContext | None = None
        self._last: tuple[int, int] | None = None  # place and generation of what was used last
        self._last_item: Any = None  # that itself, only where places say nothing

    async def take(self, end: TrainingEnd | None) -> Any:
        """The item in hand, or the next one; raises as `Consumers.take`."""
        if self._taken is None or not self._consumers.is_current(self._taken):
            self._taken = None
            engine, handle = current_engine(), self.run.handle
            asked = engine.stopwatch()
            try:
                if handle is not None and end is not None:
                    await handle.before_item(self.stage, end)
                self._taken = await self._consumers.take(end)
            finally:
                self.wait_secs += engine.stopwatch() - asked
        return self._taken.item

    @property
    def stage(self) -> Stage[Any]:
        return self._consumers.stage

    @property
    def num_before(self) -> int:
        """Items before the one in hand, since the position was loaded; -1: nothing is in hand."""
        return -1 if self._taken is None else self._taken.place

    @property
    def epoch(self) -> int:
        """Which pass the item in hand is of."""
        assert self._taken is not None
        return self.stage._epoch_of(self._taken.place)

    @property
    def place_run(self) -> int:
        """The place of the item in hand, if the step is made that used it; else -1."""
        taken = self._taken
        if taken is None or not self.run.has_ended() or self._is_undone:
            return -1
        return taken.place if self._consumers.is_current(taken) else -1

    @property
    def _is_undone(self) -> bool:
        return self._undone is not None and self._undone is self.run.context

    @property
    def was_left(self) -> bool:
        """Whether the loop was left early, and its iterator collected."""
        return self.loop is not None and self.loop() is None

    @property
    def item(self) -> Any:
        """The item in hand."""
        return None if self._taken is None else self._taken.item

    def carry(self, generation: int, *, back_by: int = 0, to: int | None = None) -> int | None:
        """Keep what a loop has in hand at a rewind; its place from there on."""
        taken = self._taken
        if taken is None or self.loop is None or taken.generation != generation - 1:
            return None
        place = taken.place - back_by if to is None else to
        if self.run.has_ended():  # if it is not made again, its item is to come once more
            self._undone = self.run.context
        self._taken = Taken(taken.item, place, generation)
        return place

    def end_run(self) -> None:
        """The run has ended: what it used in a model that has gone back comes once more."""
        if self._is_undone:
            self.give_back()
        else:
            self.use()

    def use(self) -> None:
        """A run has used the item in hand, if there is one."""
        taken, self._taken = self._taken, None
        if taken is not None:
            item, place, generation = taken
            self._last = (place, generation)
            if self._consumers.stage.gives_others_after_restore:
                self._last_item = item
            self._consumers.use(taken)

    def leave_out(self) -> bool:
        """As `Consumers.leave_out`, what the last run was fed."""
        if self.place_run >= 0:  # its run has not said so yet
            self.use()
        if self._last is None:
            return False
        return self._consumers.leave_out(Taken(self._last_item, *self._last))

    def vouch(self) -> None:
        """As `Consumers.vouch`, for what the last run was fed."""
        taken = self._taken  # the present run may not have said so yet
        last = self._last if taken is None else (taken.place, taken.generation)
        if last is not None and len(self._consumers.members) > 1:
            self._consumers.vouch(*last)

    def settle(self) -> None:
        """Look whether the last run has used the item in hand, and may not have said so."""
        if self._taken is not None and self.run.has_ended():
            self.end_run()

    def give_back(self) -> None:
        """The item in hand will not be used."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._consumers.give_back(taken)

    async def leave(self) -> None:
        self.settle()
        self.give_back()
        if self in self._consumers.members:
            await self._consumers.leave(self)


class WaitTime:
    """Seconds that the consumers of one session wait, with those that leave before it is closed."""

    def __init__(self, consumers: Consumers, stop: SessionStop | None) -> None:
        self._consumers = consumers
        self._stop = stop
        self._secs_of_left = 0.0
        consumers.wait_times.append(self)

    @property
    def secs(self) -> float:
        present = (
            each.wait_secs for each in self._consumers.members if each.run.stop is self._stop
        )
        return self._secs_of_left + math.fsum(present)

    def keep(self, consumer: Consumer) -> None:
        """A consumer leaves."""
        if consumer.run.stop is self._stop:
            self._secs_of_left += consumer.wait_secs

    def close(self) -> None:
        if self in self._consumers.wait_times:
            self._consumers.wait_times.remove(self)
