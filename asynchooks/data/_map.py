"""map_concurrent: a function of each item, several at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from .. import _check as check
from .._engine.base import Engine, Slot
from .._engine.recording import Kind, Span, blocks_inline, ended
from .._engine.threads import WorkThread, close_unrun, is_async
from .._errors import InputStateError, is_input_end, is_thrown_away, note_once
from ._prefetch import Buffered, Taken, Task
from ._sources import Source, stage_of
from ._stage import Mark, Pair, Stage, State, T

Made = TypeVar("Made")

_CHUNK_SECS = 5e-4
"""How long a thread works on, before it hands over what is done: that takes 30 to 100 us."""
_STEAL_SECS = 1e-3
"""After how long a task takes what a thread was to take next, and what the thread has done."""
_GRACE_SECS = 10.0
"""What a call in a thread gets to end when its result is not wanted any more."""


@overload
def map_concurrent(
    fn: Callable[[T], Awaitable[Made]],
    source: Source[T],
    concurrency: int,
    ordered: bool = True,
    *,
    max_failures: int = 0,
) -> Stage[Made]: ...
@overload
def map_concurrent(
    fn: Callable[[T], Made],
    source: Source[T],
    concurrency: int,
    ordered: bool = True,
    *,
    max_failures: int = 0,
) -> Stage[Made]: ...
def map_concurrent(
    fn: Callable[[Any], Any],
    source: Source[Any],
    concurrency: int,
    ordered: bool = True,
    *,
    max_failures: int = 0,
) -> Stage[Any]:
    """The function of each item, of up to `concurrency` items at a time.

    No more than `concurrency` items are in it, those that are done and not yet taken among them:
    put `prefetch` around it for a buffer behind it.

    Args:
        fn: takes an item; async, then called in tasks, or sync, then called in threads.
        source: see `asynchooks.data`.
        concurrency: >= 1.
        ordered: whether results come in the order of their items; else as they are done, and then
            the pipeline has no position to save.
        max_failures: how many calls in all may fail, >= 0. Of each a warning names the item and
            the error, and the item is left out; the next error ends the stage.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        Exception: out of the iteration: what `fn` raised, with a note that names the item. Results
            before it are given out first.
        BaseException: what `fn` raised that is no Exception, such as KeyboardInterrupt or
            asyncio.CancelledError; results that are not ready then, also of items before it, are
            given up, as code that raises these wants to leave.

    Example:
        async def fetch(index):
            return 10 * index  # a request, say

        async with map_concurrent(fetch, range(4), concurrency=2) as results:
            assert [result async for result in results] == [0, 10, 20, 30]
    """
    check.function("fn", fn, "a function that takes an item")
    concurrency = check.integer("concurrency", concurrency, least=1)
    check.instance("ordered", ordered, bool, "True or False")
    max_failures = check.integer("max_failures", max_failures, least=0)
    return Mapped(stage_of(source), fn, concurrency, ordered, max_failures)


@dataclass(eq=False, slots=True)
class Work:
    """One item on its way."""

    item: Any
    mark: Mark
    place: int
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None
    secs: float = 0.0  # that the call took


class Chunk:
    """Calls of a function, one after the other, until one fails or they took long.

    `call_all` runs in the thread; what is done can be taken out while that is in a long call.
    """

    def __init__(self, engine: Engine, first: Work, takes_more: bool) -> None:
        self._engine = engine
        self._first = first
        self._is_long = takes_more
        self._is_over = False  # the event loop is notified a little later
        self._begun = math.inf  # by the engine's tick, when the thread begins
        self.takes_more = takes_more  # the event loop may set it to False meanwhile
        self.done: deque[Work] = deque()
        self.num_done = 0
        self.secs = 0.0  # that the calls took

    def call_all(self, call: Callable[[Work], None], left: deque[Work]) -> None:
        """Call the function with the first item, then with those that are left over."""
        tick, work = self._engine.tick, self._first
        self._begun = begun = tick()
        while True:
            call(work)
            has_failed = work.error is not None  # looked at before the event loop may take it
            self.num_done += 1
            self.done.append(work)
            self.secs = tick() - begun
            if has_failed or not self.takes_more or self.secs > _CHUNK_SECS:
                break
            try:
                work = left.popleft()
            except IndexError:
                break
        self._is_over = True

    def give_up(self) -> None:
        """What it has done is not wanted any more."""
        while self.done:
            close_unrun(self.done.popleft().result)

    @property
    def holds_back(self) -> bool:
        """Whether something is done while the thread goes on."""
        return self._is_long and len(self.done) > 0 and not self._is_over

    @property
    def is_late(self) -> bool:
        """Whether it would have ended by now, but for the call that it is in."""
        return self._engine.tick() > self._begun + _CHUNK_SECS


@dataclass(eq=False)
class Worker(Task):
    """A task that calls the function, of one item after the other."""

    place: int = -1  # of the item that it has


class Mapped(Buffered):
    kind = "map_concurrent"

    def __init__(
        self,
        source: Stage[Any],
        fn: Callable[[Any], Any],
        concurrency: int,
        ordered: bool,
        max_failures: int,
    ) -> None:
        self._max_failures = max_failures
        self._fn = fn
        self._is_async = is_async(fn)
        self._concurrency = concurrency
        self._ordered = ordered
        super().__init__(source)
        self._name = getattr(fn, "__name__", self.kind)
        self._parameters = {"fn": self._name, "concurrency": concurrency, "ordered": ordered}

    def _set(self, state: State | None) -> None:
        super()._set(state)
        self._under_way: deque[Work] = deque()  # in order of their items
        self._left: deque[Work] = deque()  # of these, those not yet begun
        self._is_awaited = self._is_async
        self._per_chunk = 1  # how many items a thread is given at a time
        self._num_in = 0
        self._source_error: Exception | None = None  # why nothing more is read; behind all items
        self._failed_place: int | None = None  # of the first item that made a call fail
        self._idle: deque[Slot] = deque()  # of tasks that wait for an item
        self._chunks: list[Chunk] = []  # of threads that call the function just now
        self._is_watched = False  # whether a task looks soon at what they have done

    @property
    def _num_held(self) -> int:
        return len(self._under_way) + len(self._ready)

    def _num_room(self) -> int:
        return min(self._per_chunk, self._concurrency - self._num_held)

    def _accept(self, pairs: Sequence[Pair]) -> None:
        if self._failed_place is not None:
            return
        for item, mark in pairs:
            work = Work(item, mark, self._num_in)
            self._num_in += 1
            self._under_way.append(work)
            self._left.append(work)
        self._call_mapper()

    def _end_source(self, error: Exception | None) -> None:
        self._source_error = error
        self._give_out()

    def _call(self, work: Work) -> None:
        """Call the function with an item, in whichever task or thread."""
        recorder = self._recorder
        span = None if recorder is None else recorder.task_span(self._engine, Kind.CALL, self._name)
        begun = self._engine.stopwatch()
        try:
            work.result = self._fn(work.item)
        except (Exception, GeneratorExit) as error:
            work.error = error
        work.secs = self._engine.stopwatch() - begun
        if span is None:
            return
        if work.error is None and isinstance(work.result, Awaitable):
            work.result = _recorded(span, work.result)
        else:
            span.end(work.error)

    def _call_mapper(self) -> None:
        """Have a task look at what is left."""
        if self._idle:
            self._idle.popleft().wake()
        elif (self._left or self._holds_back()) and len(self._tasks) <= self._concurrency:
            self._begin_task(self._map, Worker())

    def _call_idle(self) -> None:
        while self._idle:
            self._idle.popleft().wake()

    async def _map(self, worker: Worker) -> None:
        thread = None if self._is_async else WorkThread(self._engine, "asynchooks-map")
        left = self._left
        try:
            while not self._is_over:
                if not left:
                    if self._holds_back() and not self._is_watched:
                        await self._watch(worker)
                    elif self._has_all:
                        return
                    else:
                        await self._rest_until_called(worker, math.inf)
                    continue
                head = left[0]
                if self._chunks and (self._per_chunk > 1 or self._holds_back()):
                    # a thread is about to take it, unless the item that it has takes long
                    await self._watch(worker)
                    if not left or left[0] is not head:
                        continue
                try:
                    work = left.popleft()
                except IndexError:  # a thread took it just now
                    continue
                worker.place = work.place
                if left or self._holds_back():
                    self._call_mapper()
                if thread is None:
                    self._call(work)
                    await self._complete(work, worker)
                else:
                    await self._call_chunk(work, thread, worker)
        finally:
            if thread is not None:
                thread.close()

    async def _call_chunk(self, first: Work, thread: WorkThread, worker: Worker) -> None:
        chunk = Chunk(self._engine, first, self._per_chunk > 1)
        if blocks_inline(self._engine):
            chunk.call_all(self._call, self._left)
        else:
            self._chunks.append(chunk)
            try:
                call = partial(chunk.call_all, self._call, self._left)
                await thread.run(call, _GRACE_SECS, lambda _: chunk.give_up())
            finally:
                self._chunks.remove(chunk)
            self._adapt(chunk)
        await self._complete_all(chunk, worker)

    def _holds_back(self) -> bool:
        # asked after a look at what is left: a thread that holds something back later takes an item
        # for that which comes later, and for each that comes a task is called
        return bool(self._chunks) and any(chunk.holds_back for chunk in self._chunks)

    async def _watch(self, worker: Worker) -> None:
        """Take from the threads what they have done, after a while."""
        self._is_watched = True
        try:
            await self._rest_until_called(worker, self._engine.now() + _STEAL_SECS)
        finally:
            self._is_watched = False
        for chunk in [each for each in self._chunks if each.is_late]:
            await self._complete_all(chunk, worker)

    async def _complete_all(self, chunk: Chunk, worker: Worker) -> None:
        while chunk.done:
            work = chunk.done.popleft()
            worker.place = work.place
            await self._complete(work, worker)

    async def _rest_until_called(self, worker: Worker, until: float) -> None:
        slot = Slot(self._engine, "an item for map_concurrent")
        self._idle.append(slot)
        worker.is_at_rest = True
        worker.place = -1
        try:
            await self._engine.park(slot, until)
        finally:
            worker.is_at_rest = False
            if slot in self._idle:
                self._idle.remove(slot)

    def _adapt(self, chunk: Chunk) -> None:
        """Give a thread several items at a time where each takes less than handing it over."""
        if self._is_awaited:
            return
        if chunk.secs > _CHUNK_SECS / 2:
            self._per_chunk = max(1, chunk.num_done // 2)
        elif chunk.num_done >= self._per_chunk:
            self._per_chunk = min(2 * self._per_chunk, self._concurrency)

    async def _complete(self, work: Work, own: Worker) -> None:
        if work.error is None and isinstance(work.result, Awaitable):
            # what a plain function returns is awaited here, one for each task
            self._per_chunk, self._is_awaited = 1, True
            for chunk in self._chunks:
                chunk.takes_more = False
            begun = self._engine.stopwatch()
            try:
                work.result = await work.result
            except (Exception, GeneratorExit) as error:
                if is_thrown_away(error):
                    raise
                work.error = error
            work.secs += self._engine.stopwatch() - begun
        self._clocks.add_call(work.secs)
        work.item = None
        work.is_done = True
        failure = work.error
        if isinstance(failure, Exception) and self._leaves_out(work.place, failure):
            self._under_way.remove(work)
            self._make_room()
        elif failure is not None:
            self._fail_at(work, failure, own)
        elif not self._ordered:
            self._under_way.remove(work)
            self._put((Taken(work.result),))
        self._give_out()

    def _fail_at(self, work: Work, error: BaseException, own: Worker) -> None:
        """Nothing more is begun, and what is made of later items is not wanted any more."""
        if is_input_end(error) or isinstance(error, GeneratorExit):  # it would pass for an end
            work.error = RuntimeError(f"map_concurrent called what raised {error!r}")
            work.error.__cause__ = error
        self._has_all = True
        if self._failed_place is None or work.place < self._failed_place:
            self._failed_place = work.place
        self._left.clear()
        for task in self._tasks:
            is_later = isinstance(task, Worker) and task.place > (
                work.place if self._ordered else -1
            )
            if (is_later or task is self._reader) and task is not own:
                task.cancel()

    def _give_out(self) -> None:
        """Results whose turn it is, then the error that is next, or the end."""
        under_way = self._under_way
        while under_way and under_way[0].is_done and under_way[0].error is None:
            work = under_way.popleft()
            self._put((Taken(work.result, (self, {}, work.mark)),))
        if under_way:
            for work in (under_way[0],) if self._ordered else under_way:
                if work.is_done and work.error is not None:
                    # only now: of several items that raised one error, this one names it
                    if not self._is_over:
                        note_once(work.error, f"in map_concurrent, at item {work.place}")
                    self._finish(work.error)
                    break
        elif self._has_all:
            self._finish(self._source_error)
        if self._has_all:  # all that wait shall look
            self._make_room()
            self._call_idle()

    def _cancel_tasks(self) -> None:
        self._has_all = True
        super()._cancel_tasks()
        self._call_idle()

    def _check_position(self) -> None:
        if not self._ordered:
            raise InputStateError(
                "map_concurrent(..., ordered=False) gives results as they are done, so that there "
                "is no position to save; leave ordered=True"
            )

    def _fill(self) -> tuple[int, int]:
        return self._num_held, self._concurrency


async def _recorded(span: Span, pending: Awaitable[Any]) -> Any:
    with ended(span):
        return await pending
