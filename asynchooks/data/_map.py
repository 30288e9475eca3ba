"""map_concurrent: a function of each item, several at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from .._engine.base import Slot
from .._engine.runner import is_async
from .._engine.threads import WorkThread
from .._errors import InputStateError, is_input_end, is_thrown_away, note_once
from ._arguments import check_count
from ._buffered import Buffered, Worker
from ._hop import HOP_SECS, Hop, Work
from ._sources import Source, stage_of
from ._stage import Stage, T

Made = TypeVar("Made")

_STEAL_SECS = 1e-3
"""After how long somebody else takes what a thread was to take next, and what it has done."""
_GRACE_SECS = 10.0
"""What a call in a thread gets to end when nobody wants it any more."""


@overload
def map_concurrent(
    fn: Callable[[T], Awaitable[Made]], source: Source[T], concurrency: int, ordered: bool = True
) -> Stage[Made]: ...
@overload
def map_concurrent(
    fn: Callable[[T], Made], source: Source[T], concurrency: int, ordered: bool = True
) -> Stage[Made]: ...
def map_concurrent(
    fn: Callable[[Any], Any], source: Source[Any], concurrency: int, ordered: bool = True
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

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        Exception: out of the iteration: what `fn` raised, with a note that names the item. Results
            before it are given out first.
        BaseException: what `fn` raised that is no Exception, such as KeyboardInterrupt or
            asyncio.CancelledError; results that are not ready then, also of items before it, are
            given up, as code that raises these wants to leave.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; give a function that takes an item")
    concurrency = check_count("concurrency", concurrency, 1)
    if not isinstance(ordered, bool):
        raise TypeError(f"ordered is {ordered!r}; give True or False")
    return Mapped(fn, stage_of(source), concurrency, ordered)


class Mapped(Buffered):
    kind = "map_concurrent"

    def __init__(
        self, fn: Callable[[Any], Any], source: Stage[Any], concurrency: int, ordered: bool
    ) -> None:
        super().__init__(source)
        self._fn = fn
        self._is_async = is_async(fn)
        self._concurrency = concurrency
        self._ordered = ordered
        self._under_way: deque[Work] = deque()  # in order of their items
        self._left: deque[Work] = deque()  # of these, those that nobody works on
        self._is_awaited = self._is_async
        self._per_hop = 1  # how many items a thread is given at a time
        self._num_in = 0
        self._has_all = False  # nothing more is read
        self._source_error: Exception | None = None  # why; it comes after all items
        self._failed_place: int | None = None  # of the first item that made a call fail
        self._room: Slot | None = None
        self._idle: deque[Slot] = deque()  # of tasks that wait for an item
        self._hops: list[Hop] = []  # of threads that call the function just now
        self._is_watched = False  # whether a task looks soon at what they have done

    def _start(self) -> None:
        self._begin_worker()  # the first one reads, so that one task alone enters the source

    @property
    def _num_held(self) -> int:
        return len(self._under_way) + len(self._ready)

    async def _work(self, worker: Worker) -> None:
        if worker is self._workers[0]:
            await self._read_all(worker)
        else:
            await self._map(worker)

    async def _read_all(self, worker: Worker) -> None:
        """Read items when there is room for them, and have somebody work on them."""
        engine, clocks = self._engine, self._clocks
        try:
            while not (self._is_over or self._has_all):
                before, room = engine.tick(), self._concurrency - self._num_held
                if room <= 0:
                    self._room = Slot(engine, "room in map_concurrent")
                    worker.is_at_rest = True
                    await engine.park(self._room)
                    worker.is_at_rest = False
                    clocks.blocked += engine.tick() - before
                    continue
                try:
                    items = await self._source._read(min(self._per_hop, room))
                except Exception as error:
                    self._has_all, self._source_error = True, error
                    break
                clocks.input_wait += engine.tick() - before
                works = [Work(item, self._num_in + place) for place, item in enumerate(items)]
                self._has_all = self._has_all or not works
                if self._failed_place is None:
                    self._num_in += len(works)
                    self._under_way.extend(works)
                    self._left.extend(works)
                    self._call_mapper()
        finally:
            worker.protect()
            await self._close_source()
            self._give_out()

    def _call_mapper(self) -> None:
        """Somebody shall look at what is left."""
        if self._idle:
            self._idle.popleft().wake()
        elif (self._left or self._holds_back()) and len(self._workers) <= self._concurrency:
            self._begin_worker()

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
                if self._hops and (self._per_hop > 1 or self._holds_back()):
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
                    work.call(self._fn)
                    await self._complete(work, worker)
                else:
                    hop = Hop(self._engine, work, self._per_hop > 1)
                    await self._call_some(hop, thread, worker)
        finally:
            if thread is not None:
                thread.close()

    async def _call_some(self, hop: Hop, thread: WorkThread, worker: Worker) -> None:
        if self._engine.is_virtual:
            hop.call(self._fn, self._left)
        else:
            self._hops.append(hop)
            try:
                call = partial(hop.call, self._fn, self._left)
                await thread.run(call, _GRACE_SECS, lambda _: hop.give_up())
            finally:
                self._hops.remove(hop)
            self._adapt(hop)
        await self._complete_all(hop, worker)

    def _holds_back(self) -> bool:
        # asked after a look at what is left: a thread that holds something back later takes an item
        # for that which comes later, and for each that comes a task is called
        return bool(self._hops) and any(hop.holds_back for hop in self._hops)

    async def _watch(self, worker: Worker) -> None:
        """Take from the threads what they have done, after a while."""
        self._is_watched = True
        try:
            await self._rest_until_called(worker, self._engine.now() + _STEAL_SECS)
        finally:
            self._is_watched = False
        for hop in [each for each in self._hops if each.is_late]:
            await self._complete_all(hop, worker)

    async def _complete_all(self, hop: Hop, worker: Worker) -> None:
        while hop.done:
            work = hop.done.popleft()
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

    def _adapt(self, hop: Hop) -> None:
        """Give a thread several items at a time where each takes less than handing it over."""
        if self._is_awaited:
            return
        if hop.secs > HOP_SECS / 2:
            self._per_hop = max(1, hop.num_done // 2)
        elif hop.num_done >= self._per_hop:
            self._per_hop = min(2 * self._per_hop, self._concurrency)

    async def _complete(self, work: Work, own: Worker) -> None:
        if work.error is None and isinstance(work.result, Awaitable):
            # what a plain function returns is awaited here, one for each task
            self._per_hop, self._is_awaited = 1, True
            for hop in self._hops:
                hop.takes_more = False
            try:
                work.result = await work.result
            except (Exception, GeneratorExit) as error:
                if is_thrown_away(error):
                    raise
                work.error = error
        work.item = None
        work.is_done = True
        if work.error is not None:
            self._fail_at(work, work.error, own)
        elif not self._ordered:
            self._under_way.remove(work)
            self._put((work.result,))
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
        for worker in self._workers:
            is_later = worker.place > (work.place if self._ordered else -1)
            is_reading = worker is self._workers[0] and not worker.is_at_rest
            if (is_later or is_reading) and worker is not own:
                worker.cancel()

    def _give_out(self) -> None:
        """Results whose turn it is, then the error that is next, or the end."""
        under_way = self._under_way
        while under_way and under_way[0].is_done and under_way[0].error is None:
            self._put((under_way.popleft().result,))
        if under_way:
            first = under_way[0] if self._ordered else _failed_of(under_way)
            if first is not None and first.is_done and first.error is not None:
                # only now: of several items that raised one error, this one names it
                if not self._is_over:
                    note_once(first.error, f"in map_concurrent, at item {first.place}")
                self._finish(first.error)
        elif self._has_all:
            self._finish(self._source_error)
        if self._has_all:  # whoever waits shall look
            self._taken()
            while self._idle:
                self._idle.popleft().wake()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._has_all = True
        for worker in self._workers:
            worker.cancel()

    def _taken(self) -> None:
        if self._room is not None:
            self._room.wake()
            self._room = None
        if self._is_stopping:
            while self._idle:
                self._idle.popleft().wake()

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Mapped(self._fn, sources[0], self._concurrency, self._ordered)

    def _state_at(self, num_out: int) -> dict[str, Any]:
        if not self._ordered:
            raise InputStateError(
                "map_concurrent(..., ordered=False) gives results as they are done, so that there "
                "is no position to save; leave ordered=True"
            )
        return super()._state_at(num_out)

    def _fill(self) -> tuple[int, int]:
        return self._num_held, self._concurrency


def _failed_of(under_way: Iterable[Work]) -> Work | None:
    return next((work for work in under_way if work.is_done and work.error is not None), None)
