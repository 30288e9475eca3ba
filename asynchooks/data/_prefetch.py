"""prefetch: a task that reads ahead; and Buffered, which every stage with tasks is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

from .. import _check as check
from .._engine.base import STOPPED, EngineTask, Slot
from .._engine.recording import Kind, ended
from .._engine.stop import EndsAtStop, Stop
from .._errors import StopTraining
from ._position import Position
from ._sources import Source, stage_of
from ._stage import Epoch, Mark, Pair, Phase, Stage, State, T, wait_to_end
from ._statistics import CALLS, CONSUMER, SOURCE

_REST_EVERY_SECS = 0.005
"""How long a loop over items may go on without letting all others run."""


def prefetch(source: Source[T], buffer_size: int) -> Stage[T]:
    """Read ahead in a separate task: the source works while its items are used.

    Its position is that of its source, so you may add or remove it between a save and a restore.

    Args:
        source: see `asynchooks.data`.
        buffer_size: the most items that it holds, >= 1, including the one being read.

    Example:
        async with (
            MonitoredSession([], creator) as session,
            prefetch(batch(records, 32), 2) as batches,
        ):
            async for images in batches:
                await session.run("loss", {"images": images})
    """
    buffer_size = check.integer("buffer_size", buffer_size, least=1)
    return Prefetch(stage_of(source), buffer_size)


@dataclass(eq=False)
class Task:
    """A task of a stage."""

    task: EngineTask | None = None
    scope: Any = None  # of all that it does
    is_unwanted: bool = False
    is_at_rest: bool = False  # it waits for room, or closes its source: no need to cancel it

    def protect(self) -> None:
        """Let no cancellation interrupt what it does from now on."""
        self.is_at_rest = True
        if self.scope is not None:
            self.scope.shield = True

    def cancel(self) -> None:
        if not self.is_at_rest:
            self.is_unwanted = True
            if self.task is not None:
                self.task.cancel()


@dataclass(eq=False, slots=True)
class Taken:
    """What leaves a pipeline with tasks."""

    item: Any
    mark: Mark = None
    places: Sequence[int] = ()
    """Of the items of the input that it is made of; known when a consumer takes it."""
    position: Position | None = None
    """In which these places are counted: another one, when the input has gone back."""


class Buffered(Stage[Any]):
    """One of its tasks reads the source, and closes it: a generator belongs to the task within it.

    Others may work on what was read. What is ready goes to those that ask, first come, first
    served; one that is cancelled while it waits loses nothing, and so there is no turn to read.
    """

    runs_tasks = True
    END: ClassVar[Any] = object()

    def __init__(self, source: Stage[Any]) -> None:
        super().__init__(source)
        self._source = source
        self.counted: Stage[Any] = self  # whose position says which of the items were used
        self._takers: deque[Slot] = deque()
        self._rest_at = 0.0
        self._set(None)

    def _set(self, state: State | None) -> None:
        self._ready: deque[Taken] = deque()
        self._tasks: list[Task] = []
        self._room: Slot | None = None  # of the task that reads, while there is no room
        self._has_all = False  # nothing more is read
        self._is_over = False  # nothing will come any more
        self._error: BaseException | None = None  # why
        self._closing_error: BaseException | None = None

    def _start(self) -> None:
        self._counting = self.counted._used()
        self._watch_fill()
        self._begin_reader()

    def _begin_reader(self) -> None:
        self._reader = self._begin_task(self._read_all)

    def _watch_fill(self) -> None:
        """Have a recorder look now and then at how many items wait to be taken."""
        if self._recorder is None:
            return
        stage = ref(self)

        def num_ready() -> float | None:
            this = stage()
            return None if this is None or this._phase is Phase.CLOSED else this._fill()[0]

        self._recorder.watch(f"{self.kind}: items held", num_ready)

    # Reading the source

    @abstractmethod
    def _num_room(self) -> int:
        """How many items may be read now."""

    @abstractmethod
    def _accept(self, pairs: Sequence[Pair]) -> None:
        """Items were read."""

    def _end_source(self, error: Exception | None) -> None:
        """The source has ended."""
        self._finish(error)

    async def _read_all(self, task: Task) -> None:
        try:
            while not (self._is_over or self._has_all):
                room = self._num_room()
                if room > 0:
                    await self._read_more(task, room)
                else:
                    await self._wait_for_room(task)
        finally:
            task.protect()
            self._wait_for_others()
            await self._close_source()

    async def _read_more(self, task: Task, room: int) -> None:
        error = None
        if self._clocks.waits_for != SOURCE:
            self._wait_for(SOURCE)
        try:
            pairs = await self._read_source(room)
        except Exception as raised:
            if task.is_unwanted and self._is_of_clean_up(raised):
                self._closing_error = self._closing_error or raised
            pairs, error = (), raised
        if pairs:
            self._accept(pairs)
        else:
            self._has_all = True
            self._end_source(error)

    async def _read_source(self, limit: int) -> Sequence[Pair]:
        return await self._source._read(limit)

    async def _wait_for_room(self, task: Task) -> None:
        self._wait_for_others()
        self._room = Slot(self._engine, f"room in {self.kind}")
        task.is_at_rest = True
        await self._engine.park(self._room)
        task.is_at_rest = False

    def _wait_for_others(self) -> None:
        """Nothing is read: it waits for its calls if a consumer waits for it, else to be read."""
        self._wait_for(CALLS if self._takers else CONSUMER)

    def _make_room(self) -> None:
        """An item has left: there is room for another."""
        slot, self._room = self._room, None
        if slot is not None:
            slot.wake()

    # Taking

    async def _pull(self, limit: int) -> Sequence[Pair]:
        raise NotImplementedError("a buffered stage is read without a turn")

    async def _read(self, limit: int) -> Sequence[Pair]:
        if not (self._is_at_hand() or await self.wait(None)):
            return ()
        ready = self._ready
        found = [ready.popleft() for _ in range(min(limit, len(ready)))]
        self._clocks.count([taken.item for taken in found])
        self._make_room()
        return [(taken.item, taken.mark) for taken in found]

    async def __anext__(self) -> Any:
        taken = await self.take(None)
        if taken is self.END:
            raise StopAsyncIteration
        taken.position.finish(taken.places)
        return taken.item

    async def take(self, stop: Stop | None) -> Any:
        """The next item as `Taken`, or END; raises as `wait`."""
        while self._is_at_hand() or await self.wait(stop):
            taken = self._ready.popleft()
            self._is_taken_from = True
            if taken.position is None:
                self._clocks.count((taken.item,))
                taken.position, taken.places = self._counting, self._places_of(taken)
            self._make_room()
            if taken.places:
                return taken
        return self.END

    def _places_of(self, taken: Taken) -> Sequence[int]:
        """The places of an item that no consumer has had yet; none if none is to get it."""
        place = self._counting.add(taken.mark)
        return () if place is None else (place,)

    def put_back(self, taken: Taken) -> None:
        """The next one that asks gets it."""
        self._ready.appendleft(taken)
        self._wake_takers(1)

    def _is_at_hand(self) -> bool:
        """Whether an item is ready, and no other task need have a turn before it is taken."""
        return bool(self._ready) and self._engine.tick() <= self._rest_at

    async def wait(self, stop: Stop | None) -> bool:
        """Wait for an item; False at the end.

        Raises StopTraining, or what ended the source or a task.
        """
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        while True:
            if self._ready and not self._is_at_hand():
                # a loop and a task that do nothing but wake each other are never seen waiting, and
                # asyncio never gets to cancel them
                await self._engine.checkpoint()
                self._rest_at = self._engine.tick() + _REST_EVERY_SECS
            if self._ready:
                return True
            if self._is_over:
                if self._phase is Phase.CLOSED:
                    raise RuntimeError(f"{self!r} is closed; make a new one")
                if self._error is not None:
                    raise self._error
                return False
            slot = Slot(self._engine, f"an item of {self.kind}")
            self._takers.append(slot)
            if self._clocks.waits_for == CONSUMER:
                self._wait_for(CALLS)
            try:
                with EndsAtStop(slot, stop):
                    await self._engine.park(slot)
            finally:
                if slot in self._takers:
                    self._takers.remove(slot)
                elif self._ready:  # woken, but cancelled: the next one may have it
                    self._wake_takers(1)
                if self._clocks.waits_for == CALLS:
                    self._wait_for_others()
            is_stopped = slot.value is STOPPED or (
                slot.value is not None and stop is not None and stop.is_set
            )
            if is_stopped and not self._ready:
                raise StopTraining(f"a stop was requested while waiting for {self.kind}")

    def _put(self, found: Iterable[Taken]) -> None:
        before = len(self._ready)
        self._ready.extend(found)
        self._wake_takers(len(self._ready) - before)

    def _wake_takers(self, num: int) -> None:
        for _ in range(min(num, len(self._takers))):
            self._takers.popleft().wake()

    def _finish(self, error: BaseException | None = None) -> None:
        """Nothing will come any more."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._wake_takers(len(self._takers))

    # Tasks

    def _begin_task(self, work: Callable[..., Awaitable[None]], task: Task | None = None) -> Task:
        task = task or Task()
        self._tasks.append(task)
        task.task = self._engine.start(self._guarded, task, work)
        return task

    async def _guarded(self, task: Task, work: Callable[..., Awaitable[None]]) -> None:
        """A task, whose error ends the stage."""
        # entered before all scopes that generators hold open, so that those may be closed within it
        with self._engine.shielded(math.inf) as scope:
            scope.shield = False
            task.scope = scope
            try:
                await work(task)
            except BaseException as error:
                failure = self._engine.failure_in(error)
                if failure is None:
                    if not task.is_unwanted:
                        foreign = RuntimeError(
                            f"a task of {self!r} was cancelled from outside; cancel the task that "
                            "reads it instead"
                        )
                        foreign.__cause__ = error
                        self._fail(foreign)
                    raise
                if task.is_unwanted and self._is_of_clean_up(failure):
                    self._closing_error = self._closing_error or failure
                self._fail(failure)
            finally:
                self._tasks.remove(task)

    def _is_of_clean_up(self, error: BaseException) -> bool:
        """Whether a source raised it as its read was cancelled; else it failed by itself.

        A failure by itself belongs to an item that nothing will take any more. The context of a
        group says nothing: on asyncio it is a cancellation, too, where a child failed by itself.
        """
        if isinstance(error, BaseExceptionGroup):
            return any(self._is_of_clean_up(each) for each in error.exceptions)
        context = error.__context__
        while context is not None and self._engine.failure_in(context) is not None:
            context = context.__context__
        return context is not None

    def _fail(self, error: BaseException) -> None:
        """A task has failed: the others are not wanted any more."""
        self._finish(error)
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        self._make_room()  # one that waits for room sees that it is over, and closes its source
        for task in self._tasks:
            task.cancel()

    async def _close_source(self) -> None:
        """In the task that read it: what it holds open may belong to that task."""
        try:
            await self._close_sources()
        except BaseException as error:
            failure = self._engine.failure_in(error)
            if failure is None:
                raise
            self._closing_error = self._closing_error or failure

    async def _stop(self) -> None:
        self._finish()
        self._cancel_tasks()
        try:
            await wait_to_end(self._engine, self._wait_for_tasks)
        finally:
            self._tasks.clear()
            self._ready.clear()
        error, self._closing_error = self._closing_error, None
        if error is not None:
            raise error

    async def _wait_for_tasks(self) -> None:
        for task in list(self._tasks):
            if task.task is not None:
                await task.task.wait()


class Prefetch(Buffered):
    kind = "prefetch"

    def __init__(self, source: Stage[Any], buffer_size: int) -> None:
        super().__init__(source)
        self._parameters = {"buffer_size": buffer_size}
        self._size = buffer_size
        self._is_handing_out = False  # several items at once, to others that wait for them

    def _num_room(self) -> int:
        return self._size - len(self._ready)

    def _accept(self, pairs: Sequence[Pair]) -> None:
        self._is_handing_out = len(pairs) > 1 and bool(self._takers)
        self._put([Taken(item, mark) for item, mark in pairs])

    async def _read_source(self, limit: int) -> Sequence[Pair]:
        if self._is_handing_out:  # to ask a thread once for all that goes, not for what is left now
            self._is_handing_out = False
            await self._engine.checkpoint()
            limit = max(limit, self._num_room())  # one may have been put back: 0 would read the end
        recorder = self._recorder
        if recorder is None:
            return await self._source._read(limit)
        name = f"{self.kind}: read {self._source.kind}"
        with ended(recorder.task_span(self._engine, Kind.READ, name)):
            return await self._source._read(limit)

    # Its position is that of its source

    def _begin(self, state: State | None, epoch: Epoch) -> None:
        self._source._begin(state, epoch)
        if self._phase is not Phase.OPEN:
            self._phase, self._is_set = Phase.NEW, True
            self._set(state)

    def _origin(self) -> Mark:
        return self._source._origin()

    def _fill(self) -> tuple[int, int]:
        return len(self._ready), self._size
