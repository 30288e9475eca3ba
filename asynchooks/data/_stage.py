"""Stage: one step of an input pipeline, an async iterator that others are put around.

Items travel with marks. The mark of an item says how to go on behind it: it is a tuple of the stage
that gave the item, what that stage has to know, and the mark of the last item below that went into
it. The JSON of a position is made of a mark at a save, and only then. What was loaded is
a mark, too. A stage keeps no list of former states: a mark that nothing holds is gone.

A pass is set, not copied: `_begin` sets a stage and all below to a state, or to the beginning of a
pass. Loading, `repeat` and going back to a checkpoint are the same.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from .. import _check as check
from .._engine.base import AsyncOnly, Engine
from .._engine.current import current_engine
from .._engine.recording import Recorder, current_recorder
from .._engine.sync import Lock
from .._errors import InputStateError, add_note, is_stop, is_thrown_away
from ._division import Bounds, bounds_between, mark_below
from ._position import Position
from ._statistics import CLOSED, CONSUMER, SOURCE, Clocks, StageStatistics

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

Mark = Any
"""A tuple (stage, what it has to know, mark below), or a state as `state_dict` returns it."""
Pair = tuple[Any, Mark]
"""An item, and the mark that goes on behind it."""
State = Mapping[str, Any]
Epoch = tuple[int, ...]
"""The number of the pass of each `repeat` around a stage, the outermost first."""


class Gathered:
    """Items of one batch, and the mark behind the last of them."""

    __slots__ = ("items", "mark")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.mark: Mark = None

    def add(self, pairs: Sequence[Pair]) -> None:
        self.items += [item for item, _ in pairs]
        self.mark = pairs[-1][1]


class Phase(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Stage(ABC, AsyncOnly, Generic[T]):
    """An async iterator over items, made around a source, which may be a stage itself.

    `async with stage as items:` opens it and those below; leaving the block, however that comes,
    ends their tasks and closes their generators and files before anything else goes on. A stage
    without tasks in or below it may also be iterated as it is; then only
    `await stage.aclose()` closes it early. It is used up by one pass; `repeat` makes several.

    Several tasks may take items from one stage: each item goes to one of them. Cancelling one
    loses no item of a stage that runs tasks; elsewhere the cancellation enters the source, and
    what that does with it (a generator ends) is seen by all.

    Example:
        async with prefetch(batch(records, 32), 2) as batches:
            shapes = [images.shape async for images in batches]
        assert shapes == [(32, 3), (32, 3)]
    """

    _in_with = "stage"
    kind: ClassVar[str]
    """The name of the function that makes it."""
    runs_tasks: ClassVar[bool] = False
    must_be_last: ClassVar[bool] = False
    """Whether no other stage may read it."""
    _max_failures = 0  # of the function that it calls
    _num_failures = 0  # that count against these
    _is_for_once = False
    """Whether it is a source that can be iterated once only."""

    def __init__(self, *sources: Stage[Any]) -> None:
        self._sources: Sequence[Stage[Any]] = sources
        for each in sources:
            each._check_may_feed(self.kind)
            each._num_parents += 1
        self._num_parents: int = 0  # stages that read it
        self._phase = Phase.NEW
        self._opened: list[Stage[Any]] = []  # those below that this one has opened, and closes
        self._num_users = 0  # that have opened it and not closed it
        self._consumers: Any = None  # see `consumers_of`
        self._is_taken_from = False  # whether items were taken from it by other than stages
        self._is_set = False  # to a state or to the beginning of a pass
        self._loaded: State | None = None  # the state that it was set to
        self._position: Position | None = None  # of what leaves the pipeline here
        self._epoch: Epoch = ()
        self._engine: Engine
        self._parameters: dict[str, Any] = {}  # that a record keeps
        self._recorder: Recorder | None = None  # of its calls, if there is one when it opens
        self._lock = Lock(f"the turn to read {self.kind}")
        self._clocks = Clocks()

    # What each kind of stage defines

    @abstractmethod
    async def _pull(self, limit: int) -> Sequence[Pair]:
        """The next items, at least one and no more than `limit`; none at the end.

        Called by one task at a time. An error that comes after some items is raised at the next
        call. A cancellation loses nothing that was read.
        """

    def _set(self, state: State | None) -> None:
        """Go to a state, or to the beginning of a pass; what is below is there already."""

    def _at_first(self) -> dict[str, Any]:
        """What its state has of its own before the first item of a pass."""
        return {}

    def _state_of(self, data: Any, below: Mark) -> dict[str, Any]:
        """The state of one of its marks."""
        return {**data, "source": state_of(below)}

    def _epoch_of(self, data: Any, below: Mark) -> int:
        """Which pass of a `repeat` the item with one of its marks is of."""
        return epoch_of(below)

    def _is_divided(self) -> bool:
        """Whether a shard is below, and it is known which of its items went into which."""
        return len(self._sources) == 1 and self._sources[0]._is_divided()

    def _bounds_between(self, before: Mark, data: Any, below: Mark) -> Bounds:
        """As of `bounds_between`, where `_is_divided`."""
        return bounds_between(None if before is None else mark_below(before), below)

    def _start(self) -> None:
        """Begin to work: the sources are open."""

    async def _stop(self) -> None:
        """End tasks and threads; the sources are still open. Shielded by the caller."""

    async def _release(self) -> None:
        """Let go of what is read, when nothing reads any more."""

    def _fill(self) -> tuple[int, int]:
        """Items in the buffer, and how many it takes."""
        return 0, 0

    def _explain(self, error: Exception) -> None:
        """Say, in a note, where an error came from; for stages that call what others wrote."""

    def _leaves_out(self, place: int, error: Exception) -> bool:
        """Whether an item is left out, as its call failed, and so many calls may."""
        if self._num_failures >= self._max_failures or is_stop(error):
            return False
        self._num_failures += 1
        self._clocks.num_failures += 1
        logger.warning(
            "Item %d of %r is left out, failure %d of at most %d: %r",
            place,
            self,
            self._num_failures,
            self._max_failures,
            error,
        )
        return True

    def _note_used(self, taken: Any) -> None:
        """A run has used what was `Taken` from here."""

    def _check_position(self) -> None:
        """Raise InputStateError if a pipeline with this stage can have no position."""

    # Positions

    def _begin(self, state: State | None, epoch: Epoch) -> None:
        """Set it, and all below, to a state; None: to the beginning of that pass."""
        if state is None and self._phase is Phase.OPEN:
            return  # by others, who read it as well
        if state is not None and state["stage"] != self.kind:
            raise InputStateError(
                f"the state is that of {state['stage']}, and this stage is {self!r}; make the "
                "pipeline of the same stages, in the same order"
            )
        if self._phase is Phase.CLOSED:
            self._phase, self._loaded = Phase.NEW, None
        self._epoch = epoch
        if state is None and self._loaded is not None:
            return  # loaded before anything was put around it
        self._loaded, self._is_set = state, True
        self._begin_sources(state, epoch)
        self._set(state)

    def _begin_sources(self, state: State | None, epoch: Epoch) -> None:
        for each in self._sources:
            each._begin(None if state is None else state["source"], epoch)

    def _begin_first(self) -> None:
        """Set it to its first pass, unless it is set."""
        for stage in self._walk():
            if stage._phase is Phase.CLOSED:
                raise RuntimeError(f"{stage!r} is closed; make a new one")
        if not self._is_set:
            self._begin(None, ())

    def _origin(self) -> Mark:
        """The mark before the first item of the pass."""
        if self._loaded is not None:
            return self._loaded
        return self, self._at_first(), self._sources[0]._origin()

    def _used(self) -> Position:
        """Which of the items that leave the pipeline here were used."""
        if self._position is None:
            if not self._is_set:
                self._begin_first()
            self._position = Position(self._origin())
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last item that was taken out: JSON, for `load_state_dict`.

        With a `FeedHook` or an `InputPositionHook`, behind the last item that a run has used.

        Raises:
            InputStateError: a stage has no order, feeds several others, or has given items to
                others than the stage around it; or `take` cuts the passes of a `repeat` over a
                source that keeps a position of its own.
        """
        self._check_alone()
        position = self._used()
        place, mark, beyond = position.after(self._places_run())
        relative = [each - place for each in beyond]
        state = {**self._saved(mark), "place": place, "beyond": relative}
        if self._is_divided():
            state["used_beyond"] = position.used(beyond)
        return state

    def _places_run(self) -> Sequence[int]:
        """Of items whose step is made, and whose run has not ended."""
        return () if self._consumers is None else self._consumers.places_run()

    def _saved(self, mark: Mark) -> dict[str, Any]:
        return state_of(mark)

    def _when_saved(self) -> Callable[[], None] | None:
        """What to call once a checkpoint holds its position."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a pipeline of the same stages was; sizes of buffers may differ.

        Raises:
            RuntimeError: it has begun already, or what it reads has.
            InputStateError: the state is that of other stages, or none.
        """
        for stage in self._walk():
            # one below that only gives what it is asked for may be open
            may_be_open = stage is not self and not stage.runs_tasks
            if stage._clocks.num_items or not (may_be_open or stage._phase is Phase.NEW):
                what = repr(self) if stage is self else f"{stage!r}, which {self!r} reads,"
                raise RuntimeError(f"{what} has begun; load its state before it is opened or read")
        try:
            self._position, own = self._position_in(state)
            self._begin(own, ())
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputStateError):
                raise
            raise InputStateError(
                f"{self!r} cannot go on from {state!r}: {error!r}. Give what state_dict() of a "
                "pipeline of the same stages returned"
            ) from error

    def _position_in(
        self, state: Mapping[str, Any], left_out: Iterable[int] = ()
    ) -> tuple[Position, dict[str, Any]]:
        """The saved position, and what the state says to the stages."""
        own = {key: state[key] for key in state if key not in ("place", "beyond", "used_beyond")}
        place = saved_count(state.get("place", 0))
        beyond = [place + saved_count(each) for each in state.get("beyond", ())]
        beyond += [each for each in left_out if each >= place]
        used = state["used_beyond"] if self._is_divided() else ()
        return Position(self._mark_in(own), place, beyond, used, is_loaded=True), own

    def _mark_in(self, state: dict[str, Any]) -> Mark:
        """The mark of the last item of the input in what `_saved` returned."""
        return state

    # Reading

    async def _read(self, limit: int) -> Sequence[Pair]:
        if not self._lock.enter_now():
            await self._lock.wait()
        try:
            if self._phase is not Phase.OPEN:
                self._open_by_itself()
            self._wait_for(SOURCE)
            try:
                pairs = await self._pull(limit)
            except (StopAsyncIteration, GeneratorExit) as error:  # it would pass for the end
                if is_thrown_away(error):
                    raise
                raise RuntimeError(f"{self.kind} called what raised {error!r}") from error
            finally:
                if self._clocks.waits_for != CONSUMER:
                    self._wait_for(CONSUMER)
            self._clocks.count([item for item, _ in pairs])
        except Exception as error:
            self._explain(error)
            raise
        else:
            return pairs
        finally:
            self._lock.leave()

    def _wait_for(self, what: int) -> float:
        """From now on it waits for its source, its calls or its consumer; returns the time."""
        now, clocks = self._stopwatch(), self._clocks
        clocks.secs[clocks.waits_for] += now - clocks.since
        clocks.waits_for, clocks.since = what, now
        return now

    async def _read_into(self, found: Gathered, size: int) -> bool:
        """Add items until there are so many; False if the end came first.

        A cancellation loses none of those that were read.
        """
        while len(found.items) < size:
            pairs = await self._read(size - len(found.items))
            if not pairs:
                return False
            found.add(pairs)
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._is_taken_from = True
        position = self._used()
        while pairs := await self._read(1):
            item, mark = pairs[0]
            if position.add_finished(mark):
                found: T = item
                return found
        raise StopAsyncIteration

    # Opening and closing

    def _walk(self) -> list[Stage[Any]]:
        """This stage and all below."""
        found: list[Stage[Any]] = [self]
        for stage in found:
            found.extend(stage._sources)
        return found

    def _open_by_itself(self) -> None:
        self._begin_first()
        for stage in self._walk():
            if stage.runs_tasks and stage._phase is Phase.NEW:
                raise RuntimeError(
                    f"{stage!r} runs tasks and must be opened. Got: async for item in "
                    f"{self.kind}(...); write: async with {self.kind}(...) as items: and then "
                    "async for item in items"
                )
        # what is open below is closed by what opened it
        self._open([each for each in self._sources if each._phase is Phase.NEW])

    def _open(self, sources: Sequence[Stage[Any]] | None = None) -> None:
        if self._phase is not Phase.OPEN:
            self._begin_first()
            for source in self._sources if sources is None else sources:
                source._open()
                self._opened.append(source)
            self._phase = Phase.OPEN
            self._engine = current_engine()
            self._stopwatch = self._engine.stopwatch
            self._wait_for(CONSUMER)
            self._recorder = current_recorder()
            if self._recorder is not None and self._parameters:
                self._recorder.describe(f"stage {self.kind}", self._parameters)
            self._start()
        self._num_users += 1

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except BaseException as closing:
            if exc is None or not isinstance(closing, Exception):
                raise
            add_note(exc, f"then, closing {self!r}: {closing!r}")

    async def aclose(self) -> None:
        """End tasks, and close generators and files; those of the stages below, too.

        A cancellation waits for tasks and threads to end; it enters a generator that is closed.
        What several have opened, the last one closes.
        """
        if self._phase is Phase.CLOSED:
            return
        if self._consumers is not None and self._num_users == 2 and not self._consumers.members:
            await self._consumers.close()  # what is read ahead for the next session has no more use
        if self._num_users > 1:
            self._num_users -= 1
            return
        await self._close()

    async def _close(self) -> None:
        """Close it, whichever consumer has opened it."""
        if self._phase is Phase.CLOSED:
            return
        was_open, self._phase, self._num_users = self._phase is Phase.OPEN, Phase.CLOSED, 0
        if was_open:
            self._wait_for(CLOSED)
        steps = (self._stop, self._close_sources, self._release)
        await take_all(steps if was_open else steps[1:])

    async def _close_sources(self) -> None:
        opened, self._opened = self._opened, []
        if self._num_users == 0 and not opened:  # never opened: a generator is closed still
            opened = [each for each in self._sources if each._phase is Phase.NEW]
        await take_all([each.aclose for each in opened])

    # Checks

    def _why_empty(self) -> str:
        """What to say where it has ended without an item."""
        return f"{self!r} has no items: there is nothing to train with"

    def _check_may_feed(self, reader: str) -> None:
        if self.must_be_last:
            raise ValueError(
                f"{reader} is to read {self!r}, ahead of the learner, so that its batches would be "
                f"older than promised. Put {self.kind}(...) last, and do the rest in its function "
                "or in the step"
            )

    def _check_alone(self) -> None:
        self._check_position()
        for stage in self._walk()[1:]:
            stage._check_position()
            if stage._num_parents > 1:
                raise InputStateError(
                    f"{stage!r} feeds {stage._num_parents} stages, so that none of them knows its "
                    "position; save that of this stage, and let its readers share it as it is"
                )
            if stage._is_taken_from:
                raise InputStateError(
                    f"{self!r} does not know its position: it reads {stage!r}, of which items were "
                    "also taken by others; take all items from the last stage"
                )

    def _check_repeatable(self) -> None:
        """Raise TypeError if what is below can be read once only."""
        if self._is_for_once:
            raise TypeError(
                f"{self!r} can be read once only, and is needed again. Got: repeat(iterator); "
                "write: repeat(function), where the function takes nothing and returns a new "
                "iterator"
            )
        for each in self._sources:
            each._check_repeatable()

    def _keeps_position(self) -> bool:
        """Whether a source below keeps its position itself, from one pass to the next."""
        return any(each._keeps_position() for each in self._sources)

    def statistics(self) -> StageStatistics:
        """Counts and times of this stage and, in `sources`, of those below; from any thread."""
        below, clocks = tuple(each.statistics() for each in self._sources), self._clocks
        now = self._stopwatch() if self._phase is Phase.OPEN else -math.inf
        return StageStatistics(
            self.kind,
            clocks.num_items,
            None if clocks.num_bytes < 0 else clocks.num_bytes,
            clocks.num_failures,
            *clocks.shares(now),
            clocks.quantile(0.5),
            clocks.quantile(0.9),
            clocks.quantile(0.99),
            *self._fill(),
            below,
        )

    def __repr__(self) -> str:
        below = ", ".join(repr(each) for each in self._sources)
        return f"{self.kind}({below})"


def state_of(mark: Mark) -> dict[str, Any]:
    """The state that goes on behind the item with this mark."""
    if not isinstance(mark, tuple):
        return dict(mark)
    stage, data, below = mark
    return {"stage": stage.kind, **stage._state_of(data, below)}


def epoch_of(mark: Mark) -> int:
    """Which pass of the outermost `repeat` the item with this mark is of; 0 where there is none."""
    if mark is None:
        return 0
    if not isinstance(mark, tuple):
        return saved_count(mark["epoch"]) if "epoch" in mark else epoch_of(mark.get("source"))
    stage, data, below = mark
    number: int = stage._epoch_of(data, below)
    return number


def no_epoch(stage: Stage[Any]) -> InputStateError:
    return InputStateError(
        f"{stage!r} mixes items of several passes, so that none of them ends at an item; put "
        "repeat around it, or leave after_epoch out"
    )


def saved_count(value: Any) -> int:
    """A number of items in a saved state; TypeError or ValueError if it is none."""
    return check.integer("a number of items", value, least=0)


async def wait_to_end(engine: Engine, wait: Callable[[], Awaitable[None]]) -> None:
    """Wait for what is ending, also when cancelled meanwhile; the cancellation leaves then.

    A shield does not keep out asyncio's own `task.cancel()`: that one leaves when the wait is
    over, and a second one at once, as in `WorkThread.run`.
    """
    with engine.shielded(math.inf):
        try:
            await wait()
        except BaseException:
            await wait()
            raise


async def take_all(steps: Iterable[Callable[[], Awaitable[None]]], what: str = "") -> None:
    """Take every step, also after one failed or was cancelled; the first error leaves.

    The others are in its notes, where `what` says what a step does.
    """
    # no shield: it would be a scope of its own around those that generators hold open
    first: BaseException | None = None
    for step in steps:
        try:
            await step()
        except BaseException as error:
            if first is not None and what:
                add_note(first, f"then, {what}: {error!r}")
            first = first or error
    if first is not None:
        raise first
