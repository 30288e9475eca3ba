"""Stage: one step of an input pipeline, an async iterator that others are put around.

A position is a number of items that left a stage; each kind knows what it means for its sources.
"""

from __future__ import annotations

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
from .._errors import InputStateError, add_note, is_thrown_away
from ._statistics import Clocks, StageStatistics

T = TypeVar("T")

TRIM_EVERY = 256
"""After how many items the stages below forget states that are asked for no more."""

BEYOND = "used_beyond"
"""In a state: items behind the position that were used already, counted from it."""


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
    gives_others_after_restore: ClassVar[bool] = False
    """Whether its items are put together anew then, so that a place says nothing of them."""
    _is_for_once = False
    """Whether it is a source that can be iterated once only."""

    def __init__(self, *sources: Stage[Any], args: tuple[Any, ...] = ()) -> None:
        self._sources: Sequence[Stage[Any]] = sources
        self._args = args  # what it is made with, behind its sources
        for each in sources:
            each._check_may_feed(self.kind)
            each._num_parents += 1
        self._num_parents: int = 0  # stages that read it
        self._phase = Phase.NEW
        self._opened: list[Stage[Any]] = []  # those below that this one has opened, and closes
        self._num_users = 0  # that have opened it and not closed it
        self._successor: Stage[Any] | None = None  # stands in for it after a rewind
        # makes it once more, for the pass of that number
        self._factory: Callable[[int], Stage[Any]] | None = None
        self._consumers: Any = None  # see `consumers_of`
        self._is_taken_from = False  # whether items were taken from it by other than stages
        self._is_loaded = False
        self._used_beyond: set[int] = set()  # places behind the position, used before the restore
        self._epoch: tuple[int, ...] = ()  # which pass it is, where `repeat` makes several
        self._may_be_cut = False  # whether a `take` above may end a pass before its end
        self._num_out = 0  # items that left it since it was made or its state was loaded
        self._trim_next = TRIM_EVERY
        self._engine: Engine
        self._parameters: dict[str, Any] = {}  # that a record keeps
        self._recorder: Recorder | None = None  # of its calls, if there is one when it opens
        self._lock = Lock(f"the turn to read {self.kind}")
        self._clocks = Clocks()

    @abstractmethod
    async def _pull(self, limit: int) -> Sequence[T]:
        """The next items, at least one and no more than `limit`; none at the end.

        Called by one task at a time. An error that comes after some items is raised at the next
        call.
        """

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

    def _num_in_at(self, num_out: int) -> int:
        """How many items of the source that many items were made of."""
        return num_out

    def _epoch_of(self, place: int) -> int:
        """Which pass of a `repeat` the item at that place is of; 0 where there is none below.

        Asked of items that have been given out, and not before those last trimmed.
        """
        if not self._sources:
            return 0
        return self._sources[0]._epoch_of(max(self._num_in_at(place + 1) - 1, 0))

    def _state_at(self, num_out: int) -> dict[str, Any]:
        """What `_load` needs to go on behind that many items; not before those last trimmed."""
        return {"source": self._sources[0]._saved_at(self._num_in_at(num_out))}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sources[0]._load_saved(state["source"])

    def _trim(self, num_out: int) -> None:
        """Forget states before that many items."""
        self._sources[0]._trim(self._num_in_at(num_out))

    def _trim_due(self, num_out: int) -> None:
        self._trim_next = num_out + TRIM_EVERY
        self._trim(num_out)

    async def _read(self, limit: int) -> Sequence[T]:
        if not self._lock.enter_now():
            await self._lock.wait()
        try:
            if self._phase is not Phase.OPEN:
                self._open_by_itself()
            begun = self._clocks.begin_read(self._engine)
            try:
                items = await self._pull(limit)
            except (StopAsyncIteration, GeneratorExit) as error:  # it would pass for the end
                if is_thrown_away(error):
                    raise
                raise RuntimeError(f"{self.kind} called what raised {error!r}") from error
            self._num_out += len(items)
            self._clocks.end_read(self._engine, begun, items)
        except Exception as error:
            self._explain(error)
            raise
        else:
            return items
        finally:
            self._lock.leave()

    async def _read_into(self, items: list[Any], size: int) -> bool:
        """Add items until there are so many; False if the end came first.

        A cancellation leaves those that were read in the list.
        """
        while len(items) < size:
            more = await self._read(size - len(items))
            if not more:
                return False
            items += more
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._successor is not None:
            item: T = await anext(self._successor)
            return item
        self._is_taken_from = True
        while True:
            items = await self._read(1)
            if not items:
                raise StopAsyncIteration
            if not self._used_beyond or self._num_out - 1 not in self._used_beyond:
                break
        if self._num_out >= self._trim_next:
            self._trim_due(self._num_out)
        return items[0]

    def _walk(self) -> list[Stage[Any]]:
        """This stage and all below."""
        found: list[Stage[Any]] = [self]
        for stage in found:
            found.extend(stage._sources)
        return found

    def _open_by_itself(self) -> None:
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
            for stage in self._walk():
                if stage._phase is Phase.CLOSED:
                    raise RuntimeError(f"{stage!r} is closed; make a new one")
            for source in self._sources if sources is None else sources:
                source._open()
                self._opened.append(source)
            self._phase = Phase.OPEN
            self._engine = current_engine()
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
            if self._successor is not None:
                await self._successor.aclose()
            return
        if self._consumers is not None and self._num_users == 2 and not self._consumers.members:
            await self._consumers.close()  # what is read ahead for the next session has no more use
        if self._num_users > 1:
            self._num_users -= 1
            return
        was_open, self._phase, self._num_users = self._phase is Phase.OPEN, Phase.CLOSED, 0
        steps = (self._stop, self._close_sources, self._release)
        await take_all(steps if was_open else steps[1:])

    async def _replace_by(self, successor: Stage[Any]) -> None:
        """Close it, though it may be in use: what has opened it closes its successor."""
        if self._phase is Phase.OPEN:
            self._successor, successor._consumers = successor, self._consumers
            successor._num_users, self._num_users = self._num_users, 1
            await self.aclose()

    async def _close_sources(self) -> None:
        opened, self._opened = self._opened, []
        if self._num_users == 0 and not opened:  # never opened: a generator is closed still
            opened = [each for each in self._sources if each._phase is Phase.NEW]
        await take_all([each.aclose for each in opened])

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last item that was taken out: JSON, for `load_state_dict`.

        With a `FeedHook` or an `InputPositionHook`, behind the last item that a run has used.

        Raises:
            InputStateError: a stage has no order, feeds several others, or has given items to
                others than the stage around it.
        """
        self._check_alone()
        if self._consumers is not None:
            state: dict[str, Any] = self._consumers.state_dict()
            return state
        return self._saved_used(self._num_out, self._used_beyond)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a pipeline of the same stages was; sizes of buffers may differ.

        Raises:
            RuntimeError: it has begun already, or what it reads has.
            InputStateError: the state is that of other stages, or none.
        """
        self._check_new()
        self._is_loaded = True
        try:
            self._used_beyond = {saved_count(place) for place in state.get(BEYOND, ())}
            self._load_saved({key: state[key] for key in state if key != BEYOND})
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputStateError):
                raise
            raise InputStateError(
                f"{self!r} cannot go on from {state!r}: {error!r}. Give what state_dict() of a "
                "pipeline of the same stages returned"
            ) from error

    def _saved_at(self, num_out: int) -> dict[str, Any]:
        return {"stage": self.kind, **self._state_at(num_out)}

    def _saved_used(self, num_used: int, used: Iterable[int]) -> dict[str, Any]:
        """The position behind that many items, with the places behind it that were used, too."""
        state = self._saved_at(num_used)
        beyond = sorted(place - num_used for place in used if place >= num_used)
        return {**state, BEYOND: beyond} if beyond else state

    def _state_with(self, state: Mapping[str, Any], items: Mapping[int, Any]) -> dict[str, Any]:
        """A position, with items behind it, by place, that were used since."""
        used = {*state.get(BEYOND, ()), *items}
        return {**state, BEYOND: sorted(used)} if used else dict(state)

    def _note_used(self, place: int) -> None:
        """A run has used the item at this place."""

    def _keep(self, item: Any) -> None:
        """Right after its state was loaded: an item of before, in use, counts as the next one."""
        raise NotImplementedError(f"{self.kind} gives the same items after a restore")

    def _unfinished_in(self, state: Mapping[str, Any], item: Any) -> Any:
        """What is left of an item of before, for `_keep`, in that position; None if nothing is."""
        return item

    def _no_epoch(self) -> InputStateError:
        return InputStateError(
            f"{self!r} mixes items of several passes, so that none of them ends at an item; put "
            "repeat around it, or leave after_epoch out"
        )

    def _why_empty(self) -> str:
        """What to say where it has ended without an item."""
        return f"{self!r} has no items: there is nothing to train with"

    def _load_saved(self, state: Mapping[str, Any]) -> None:
        if state["stage"] != self.kind:
            raise InputStateError(
                f"the state is that of {state['stage']}, and this stage is {self!r}; make the "
                "pipeline of the same stages, in the same order"
            )
        self._load(state)

    def _check_may_feed(self, reader: str) -> None:
        if self.must_be_last:
            raise ValueError(
                f"{reader} is to read {self!r}, ahead of the learner, so that its batches would be "
                f"older than promised. Put {self.kind}(...) last, and do the rest in its function "
                "or in the step"
            )

    def _check_alone(self) -> None:
        for stage in self._walk()[1:]:
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

    def _check_new(self) -> None:
        for stage in self._walk():
            # one below that only gives what it is asked for may be open
            may_be_open = stage is not self and not stage.runs_tasks
            if stage._num_out or not (may_be_open or stage._phase is Phase.NEW):
                what = repr(self) if stage is self else f"{stage!r}, which {self!r} reads,"
                raise RuntimeError(f"{what} has begun; load its state before it is opened or read")

    def _check_repeatable(self) -> None:
        """Raise TypeError if what is below can be read once only."""
        if self._factory is not None:
            return
        if self._is_for_once:
            raise TypeError(
                f"{self!r} can be read once only, and is needed again. Got: repeat(iterator); "
                "write: repeat(function), where the function takes nothing and returns a new "
                "iterator"
            )
        for each in self._sources:
            each._check_repeatable()

    def _restarted(self, epoch: tuple[int, ...]) -> Stage[Any]:
        """The pipeline up to here at its beginning, for another pass."""
        if self._factory is not None:
            stage = self._factory(epoch[-1] if epoch else 0)
        else:
            make: Callable[..., Stage[Any]] = type(self)
            below = self._epoch_below(epoch)
            stage = make(*(each._restarted(below) for each in self._sources), *self._args)
        stage._set_epoch(epoch)
        stage._may_be_cut = self._may_be_cut
        return stage

    def _epoch_below(self, epoch: tuple[int, ...]) -> tuple[int, ...]:
        """Which pass of the sources comes first in this one."""
        return epoch

    def _set_epoch(self, epoch: tuple[int, ...]) -> None:
        self._epoch = epoch
        for each in self._sources:
            each._set_epoch(epoch)

    def statistics(self) -> StageStatistics:
        """Counts and times of this stage and, in `sources`, of those below; from any thread."""
        below, clocks = tuple(each.statistics() for each in self._sources), self._clocks
        return StageStatistics(
            self.kind, clocks.num_items, None if clocks.num_bytes < 0 else clocks.num_bytes,
            clocks.input_wait, clocks.blocked, clocks.consumer_wait, *self._fill(), below,
        )  # fmt: skip

    def __repr__(self) -> str:
        below = ", ".join(repr(each) for each in self._sources)
        return f"{self.kind}({below})"


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
