"""Consumers of a stage: FeedHook and `session.batches`, and which of its items runs have used.

`Consumers` is one object for all that train with a stage, in whichever session of a training.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine
from .._engine.stop import Stop
from .._engine.sync import Lock
from .._errors import InputError, InputStateError
from .._hook import SessionRunContext
from .._step.global_step import GlobalStep
from .._stopping.session_stop import SessionStop
from ._position import Position
from ._prefetch import Buffered, Prefetch, Taken
from ._repeat import Repeat
from ._sources import stage_of
from ._stage import Phase, Stage, epoch_of, take_all

logger = logging.getLogger("asynchooks")


class TrainingEnd(Stop):
    """What ends a consumer's wait: a stop, or the limit, which another worker may reach."""

    def __init__(self, stop: Stop, step: GlobalStep) -> None:
        self.stop = stop
        self._step = step
        self._forget: dict[Slot, Callable[[], None]] = {}

    @property
    def is_set(self) -> bool:  # type: ignore[override]
        return self.stop.is_set or self._step.is_at_limit

    @property
    def step(self) -> GlobalStep:
        """The step of the session that takes."""
        return self._step

    @property
    def training(self) -> object:
        """The training that ends, for comparison with others."""
        return self._step.gate

    def add(self, slot: Slot) -> None:
        self.stop.add(slot)
        limit = math.inf if self._step.limit is None else self._step.limit
        self._forget[slot] = self._step.gate.watch(slot, limit)
        if self.is_set:
            slot.wake(STOPPED)

    def discard(self, slot: Slot) -> None:
        self.stop.discard(slot)
        self._forget.pop(slot)()


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
        self.has_warned = False  # that there is no position
        self.is_saved = False  # a hook saves the position, or has restored it
        self._reader: Buffered | None = None  # from the first take on
        self._opening = Lock("the opening of a pipeline")
        self._has_given = False  # an item, to any consumer
        self._ended_in: object = None  # the training that has met the end
        self._rewind_to: Mapping[str, Any] | None = None  # where the next take is to go on
        # of its consumers together, by session; hooks that are called by hand have none
        self._wait_secs: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        # places that are not to come once more when the input goes back
        self._left_out: set[int] = set()
        self._vouched = -1  # the last place whose run is known to have gone well
        self.num_epochs_ended: int | None = None
        """Passes whose end FeedHooks have reported; None before the first item of a training."""

    def waited(self, stop: SessionStop | None, secs: float = 0.0) -> float:
        """Seconds that the consumers of a session have waited, with these."""
        key = stop or self
        total = self._wait_secs[key] = self._wait_secs.get(key, 0.0) + secs
        return total

    def join(self, run: CurrentRun, loop: weakref.ref[Any] | None = None) -> Consumer:
        """A new consumer, which keeps the pipeline open until it leaves."""
        consumer = Consumer(self, run, loop)
        self.members.append(consumer)
        return consumer

    async def leave(self, consumer: Consumer) -> None:
        self.members.remove(consumer)
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
            reader, position = self._reader, self.stage._used()
            assert reader is not None
            try:
                taken = await reader.take(end)
            except RuntimeError:
                if position is self.stage._used():
                    raise
                continue  # it was closed to go back
            if taken is not Buffered.END:
                if self.is_current(taken):
                    self._has_given = True
                    found: Taken = taken
                    return found
            elif position is self.stage._used():  # else the input has gone back meanwhile
                if not (self._has_given or position.is_loaded):
                    raise InputError(self.stage._why_empty())
                self._ended_in = None if end is None else end.training
                raise StopAsyncIteration

    def _has_ended_in(self, end: TrainingEnd | None) -> bool:
        is_closed = self.stage._phase is Phase.CLOSED and self._rewind_to is None
        return is_closed and end is not None and end.training is self._ended_in

    async def _open(self) -> None:
        if self._rewind_to is not None:
            await self._rewind()
        if self._reader is not None:
            return  # another worker has opened it meanwhile, and it may have read ahead
        stage = self.stage
        reader = stage if isinstance(stage, Buffered) else Prefetch(stage, 1)
        if reader is not stage:
            stage._num_parents -= 1  # this reader is no stage of the pipeline
            stage._is_taken_from = True
            reader.counted = stage
        reader._open()
        self._reader = reader

    async def _rewind(self) -> None:
        """Close the pipeline, of any opener, and open it at the state for all consumers."""
        stage, reader = self.stage, self._reader
        num_others = stage._num_users - (reader is not None)
        self._reader = self._ended_in = None
        try:
            await take_all([each._close for each in (reader, stage) if each is not None])
        finally:  # the state is looked at now, as it may have gone back once more meanwhile
            state, self._rewind_to = self._rewind_to, None
            stage._begin(state, ())
            for _ in range(num_others):
                stage._open()

    @property
    def num_epochs(self) -> int:
        """Passes, at the end of the source."""
        return epoch_of(self.stage._used().last_mark) + 1

    def shown_epoch(self) -> str:
        """The pass of the item that was used last, for people; "" without `repeat`."""
        repeats = [stage for stage in self.stage._walk() if isinstance(stage, Repeat)]
        try:
            number = epoch_of(self.stage._used().after()[1]) + 1
        except InputStateError:  # items of several passes are mixed
            repeats.clear()
        total = repeats[0].num_epochs if repeats else None
        return f"epoch {number}{'' if total is None else f' of {total}'}" if repeats else ""

    def is_current(self, taken: Taken) -> bool:
        """Whether the input did not go back since it was taken."""
        return taken.position is self.stage._used()

    def use(self, taken: Taken) -> None:
        """A run that used it has ended."""
        position = self.stage._used()
        if taken.position is position:
            position.finish(taken.places)
            self.stage._note_used(taken)

    def give_back(self, taken: Taken) -> None:
        """It was not used: the next consumer that asks gets it."""
        if not self.is_current(taken):
            return
        in_hand = self.stage._used().in_hand
        if in_hand.issuperset(taken.places):  # it comes once more, as no loop has it now
            in_hand.difference_update(taken.places)
        elif self._reader is not None:
            self._reader.put_back(taken)

    def vouch(self, taken: Taken) -> None:
        """The run that used it went well."""
        if self.is_current(taken):
            self._vouched = max(self._vouched, *taken.places)

    def leave_out(self, taken: Taken) -> bool:
        """Do not give it once more when the input goes back; says whether it is left out then.

        Nor what others have used behind the last item that was vouched for: it may be to blame.
        """
        if not self.is_current(taken):
            return False
        try:
            self.stage._check_repeatable()
            self.stage._check_alone()
        except (InputStateError, TypeError):  # it goes on with the next items
            return False
        self._left_out.update(taken.places)
        if len(self.members) > 1:
            position, run = self.stage._used(), set(self.places_run())
            for place in range(self._vouched + 1, position.end):
                if place in run or position.is_finished(place):
                    self._left_out.add(place)
        return True

    def places_run(self) -> list[int]:
        """Places of items in the hands of consumers whose step is made."""
        return [place for each in self.members for place in each.places_run]

    def state_dict(self) -> dict[str, Any]:
        self.is_saved = True
        return self.stage.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: at once where nothing was taken yet, else from the next take on."""
        stage, self.is_saved = self.stage, True
        if stage._phase is Phase.NEW:
            stage.load_state_dict(state)
            return
        position, own = stage._position_in(state, self._left_out)
        now, _, beyond = stage._used().after(self.places_run())
        if (now, beyond) == position.after()[::2]:
            return  # it is there already
        try:
            stage._check_repeatable()
        except TypeError as error:
            logger.warning(
                "The model goes back to a checkpoint, and its input cannot: %s. It goes on "
                "with the next items",
                error,
            )
            return
        self._vouched = -1
        for each in self.members:
            each.carry(position)
        stage._position, self._rewind_to = position, own


class Consumer:
    """A FeedHook, or a loop over `session.batches`: it has at most one item in hand."""

    def __init__(
        self, consumers: Consumers, run: CurrentRun, loop: weakref.ref[Any] | None
    ) -> None:
        self.run = run
        self.loop = loop  # the iterator that gives its items to a loop; None for a hook
        self._consumers = consumers
        self._taken: Taken | None = None
        # of a run whose step is made, and behind which model and input went back meanwhile
        self._undone: SessionRunContext | None = None
        self._last: Taken | None = None  # what was used last, without the item

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
                self._consumers.waited(self.run.stop, engine.stopwatch() - asked)
        return self._taken.item

    @property
    def stage(self) -> Stage[Any]:
        return self._consumers.stage

    @property
    def num_before(self) -> int:
        """Items before the one in hand, since the first training; -1: nothing is in hand."""
        return -1 if self._taken is None else self._taken.places[0]

    @property
    def epoch(self) -> int:
        """Which pass the item in hand is of."""
        assert self._taken is not None
        return epoch_of(self._taken.mark)

    @property
    def places_run(self) -> Sequence[int]:
        """The places of the item in hand, if the step is made that used it."""
        taken = self._taken
        if taken is None or not self.run.has_ended() or self._is_undone:
            return ()
        return taken.places if self._consumers.is_current(taken) else ()

    @property
    def _is_undone(self) -> bool:
        return self._undone is not None and self._undone is self.run.context

    @property
    def was_left(self) -> bool:
        """Whether the loop was left early, and its iterator collected."""
        return self.loop is not None and self.loop() is None

    def carry(self, position: Position) -> None:
        """The input goes back: a loop keeps what it has in hand, if that is not used there."""
        taken = self._taken
        if taken is None or self.loop is None or not self._consumers.is_current(taken):
            return
        if all(map(position.is_finished, taken.places)):
            return
        if self.run.has_ended():  # if it is not made again, its item is to come once more
            self._undone = self.run.context
        taken.position = position
        position.in_hand.update(taken.places)

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
            self._last = Taken(None, None, taken.places, taken.position)
            self._consumers.use(taken)

    def leave_out(self) -> bool:
        """As `Consumers.leave_out`, what the last run was fed."""
        if self.places_run:  # its run has not said so yet
            self.use()
        return self._last is not None and self._consumers.leave_out(self._last)

    def vouch(self) -> None:
        """As `Consumers.vouch`, for what the last run was fed."""
        last = self._taken or self._last  # the present run may not have said so yet
        if last is not None and len(self._consumers.members) > 1:
            self._consumers.vouch(last)

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
