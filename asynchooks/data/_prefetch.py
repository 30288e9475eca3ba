"""prefetch: a task that reads ahead; and Buffered, which `map_concurrent` is, too."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

from .. import _check as check
from .._engine.base import STOPPED, EngineTask, Slot
from .._engine.recording import Kind, Recorder, ended
from .._engine.stop import EndsAtStop, Stop
from .._errors import StopTraining
from ._sources import Source, stage_of
from ._stage import Phase, Stage, T, wait_to_end

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


class Buffered(Stage[Any]):
    """Its tasks read the source and fill the buffer; several may take items, first come first."""

    runs_tasks = True
    END: ClassVar[Any] = object()

    def __init__(self, source: Stage[Any], *args: Any) -> None:
        super().__init__(source, args=args)
        self._source = source
        self._ready: deque[Any] = deque()
        self._takers: deque[Slot] = deque()
        self._room: Slot | None = None  # of the task that reads, while there is no room
        self._is_over = False  # nothing will come any more
        self._error: BaseException | None = None  # why
        self._closing_error: BaseException | None = None
        self._workers: list[Worker] = []
        self._rest_at = 0.0
        self._num_working = 0
        self._is_stopping = False

    @abstractmethod
    async def _work(self, worker: Worker) -> None:
        """What a task of this stage does."""

    def _start(self) -> None:
        self._watch_fill()
        self._begin_worker()  # the first one reads, so that one task alone enters the source

    def _watch_fill(self) -> None:
        """Have a recorder look now and then at how many items wait to be taken."""
        if self._recorder is None:
            return
        stage = ref(self)

        def num_ready() -> float | None:
            this = stage()
            return None if this is None or this._phase is Phase.CLOSED else this._fill()[0]

        self._recorder.watch(f"{self.kind}: items held", num_ready)

    async def _pull(self, limit: int) -> Sequence[Any]:
        raise NotImplementedError("a buffered stage is read without a turn")

    # Without a lock: a waiting reader loses nothing by being cancelled

    async def _read(self, limit: int) -> Sequence[Any]:
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        if not self._ready:
            await self.wait(None)
        if self._engine.tick() > self._rest_at:
            await self._rest()
            if self._phase is Phase.OPEN and not self._ready:  # another one has taken it
                return await self._read(limit)
        ready = self._ready
        items = [ready.popleft() for _ in range(min(limit, len(ready)))]
        self._num_out += len(items)
        self._clocks.count(items)
        if items:
            self._taken()
        return items

    async def __anext__(self) -> Any:
        if self._successor is not None:
            return await anext(self._successor)
        while True:
            item = await self.take(None)
            if item is self.END:
                raise StopAsyncIteration
            if not self._used_beyond or self._num_out - 1 not in self._used_beyond:
                break
        if self._num_out >= self._trim_next:
            self._trim_due(self._num_out)
        return item

    async def take(self, stop: Stop | None) -> Any:
        """The next item, or END; raises as `wait`."""
        ready = self._ready
        if not ready:
            if self._phase is not Phase.OPEN:
                self._open_by_itself()
            await self.wait(stop)
            if not ready:
                return self.END
        if self._engine.tick() > self._rest_at:
            await self._rest()
            if not ready:  # another one has taken it
                return await self.take(stop)
        item = ready.popleft()
        self._is_taken_from = True
        self._num_out += 1
        self._clocks.count((item,))
        self._taken()
        return item

    async def _rest(self) -> None:
        # a loop and a task that do nothing but wake each other are never seen waiting, and asyncio
        # never gets to cancel them
        await self._engine.checkpoint()
        self._rest_at = self._engine.tick() + _REST_EVERY_SECS

    def put_back(self, item: Any) -> None:
        """The next one that asks gets it."""
        self._num_out -= 1
        self._ready.appendleft(item)
        self._wake_taker()

    async def wait(self, stop: Stop | None) -> None:
        """Wait for an item, or the end; raises StopTraining, or what ended the source or a task."""
        while not self._ready:
            if self._is_over:
                if self._phase is Phase.CLOSED:
                    raise RuntimeError(f"{self!r} is closed; make a new one")
                if self._error is not None:
                    raise self._error
                return
            asked = self._engine.stopwatch()
            slot = Slot(self._engine, f"an item of {self.kind}")
            self._takers.append(slot)
            try:
                with EndsAtStop(slot, stop):
                    await self._engine.park(slot)
            finally:
                if slot in self._takers:
                    self._takers.remove(slot)
                elif self._ready:  # woken, but cancelled: the next one may have it
                    self._wake_taker()
                self._clocks.consumer_wait += self._engine.stopwatch() - asked
            is_stopped = slot.value is STOPPED or (
                slot.value is not None and stop is not None and stop.is_set
            )
            if is_stopped and not self._ready:
                raise StopTraining(f"a stop was requested while waiting for {self.kind}")

    def _wake_taker(self) -> None:
        if self._takers:
            self._takers.popleft().wake()

    def _put(self, items: Sequence[Any]) -> None:
        self._ready.extend(items)
        for _ in range(min(len(items), len(self._takers))):
            self._takers.popleft().wake()

    def _taken(self) -> None:
        """An item has left the buffer: there is room for another."""
        if self._room is not None:
            self._room.wake()
            self._room = None

    async def _wait_for_room(self, worker: Worker) -> None:
        before = self._engine.stopwatch()
        self._room = Slot(self._engine, f"room in {self.kind}")
        worker.is_at_rest = True
        await self._engine.park(self._room)
        worker.is_at_rest = False
        self._clocks.blocked += self._engine.stopwatch() - before

    def _finish(self, error: BaseException | None = None) -> None:
        """Nothing will come any more."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            while self._takers:
                self._takers.popleft().wake()

    def _begin_worker(self, worker: Worker | None = None) -> None:
        if self._is_stopping:
            return
        worker = worker or Worker()
        self._num_working += 1
        self._workers.append(worker)
        worker.task = self._engine.start(self._guarded, worker)

    async def _guarded(self, worker: Worker) -> None:
        """A task: its error ends the stage, and the last one closes the source, which it read."""
        # entered before all scopes that generators hold open, so that those may be closed within it
        with self._engine.shielded(math.inf) as scope:
            scope.shield = False
            worker.scope = scope
            try:
                await self._work(worker)
            except BaseException as error:
                failure = self._engine.failure_in(error)
                if failure is None:
                    if not worker.is_unwanted:
                        foreign = RuntimeError(
                            f"a task of {self!r} was cancelled from outside; cancel the task that "
                            "reads it instead"
                        )
                        foreign.__cause__ = error
                        self._fail(foreign)
                    raise
                if worker.is_unwanted and self._is_of_clean_up(failure):
                    self._closing_error = self._closing_error or failure
                self._fail(failure)
            finally:
                self._num_working -= 1
                worker.protect()
                if self._num_working == 0 and (self._is_over or self._is_stopping):
                    await self._close_source()

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
        self._finish(error)

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
        self._is_stopping = True
        self._finish()
        self._taken()  # one that waits for room sees that it is over, and closes its source
        for worker in self._workers:
            if not worker.is_at_rest:
                worker.cancel()
        try:
            await wait_to_end(self._engine, self._wait_for_workers)
        finally:
            self._workers.clear()
            self._ready.clear()
        error, self._closing_error = self._closing_error, None
        if error is not None:
            raise error

    async def _wait_for_workers(self) -> None:
        for worker in self._workers:
            if worker.task is not None:
                await worker.task.wait()


@dataclass(eq=False)
class Worker:
    """A task of a stage."""

    task: EngineTask | None = None
    scope: Any = None  # of all that it does
    is_unwanted: bool = False
    place: int = -1  # of the item that it has
    is_at_rest: bool = False  # it waits for room, or closes its source: no need to cancel it

    def protect(self) -> None:
        """Let no cancellation interrupt the closing of what it has read."""
        self.is_at_rest = True
        if self.scope is not None:
            self.scope.shield = True

    def cancel(self) -> None:
        self.is_unwanted = True
        if self.task is not None:
            self.task.cancel()


class Prefetch(Buffered):
    kind = "prefetch"

    def __init__(self, source: Stage[Any], buffer_size: int) -> None:
        super().__init__(source, buffer_size)
        self._parameters = {"buffer_size": buffer_size}
        self._size = buffer_size

    async def _work(self, worker: Worker) -> None:
        read: Callable[[int], Coroutine[Any, Any, Sequence[Any]]] = self._source._read
        ready, clocks, engine = self._ready, self._clocks, self._engine
        if self._recorder is not None:
            read = self._recorded_read(self._recorder)
        while not self._is_over:
            room = self._size - len(ready)
            if room <= 0:
                await self._wait_for_room(worker)
                continue
            before = engine.stopwatch()
            items = await read(room)
            clocks.input_wait += engine.stopwatch() - before
            if not items:
                self._finish()
                return
            self._put(items)

    def _recorded_read(
        self, recorder: Recorder
    ) -> Callable[[int], Coroutine[Any, Any, Sequence[Any]]]:
        name = f"{self.kind}: read {self._source.kind}"

        async def read(limit: int) -> Sequence[Any]:
            with ended(recorder.task_span(self._engine, Kind.READ, name)):
                return await self._source._read(limit)

        return read

    def _saved_at(self, num_out: int) -> dict[str, Any]:
        return self._source._saved_at(num_out)

    def _load_saved(self, state: Mapping[str, Any]) -> None:
        self._source._load_saved(state)

    def _fill(self) -> tuple[int, int]:
        return len(self._ready), self._size
