"""map_concurrent: a function of each item, several at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from .. import _check as check
from .._engine.base import Slot
from .._engine.recording import Kind, Span, blocks_inline, ended
from .._engine.threads import WorkThread, close_unrun, is_async
from .._errors import InputStateError, is_input_end, is_thrown_away, note_once
from ._prefetch import Buffered, Taken, Task
from ._sources import Source, stage_of
from ._stage import Mark, Pair, Stage, State, T

Made = TypeVar("Made")

_CHUNK_SECS = 5e-4
"""How long a thread works on, before it hands over what is done: that takes 30 to 100 us."""
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
    put `prefetch` around it for a buffer behind it. While calls in threads take less than it costs
    to hand an item over (0.1 ms), a thread gets several items at a time; a slow one among them
    holds up the others.

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
    check.function("fn", fn, "a function that takes an item", num_args=1)
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
        elif self._left and len(self._tasks) <= self._concurrency:
            self._begin_task(self._map, Worker())

    def _call_idle(self) -> None:
        while self._idle:
            self._idle.popleft().wake()

    async def _map(self, worker: Worker) -> None:
        thread = None if self._is_async else WorkThread(self._engine, "asynchooks-map")
        left = self._left
        try:
            while not self._is_over:
                if left:
                    taken = [left.popleft() for _ in range(min(self._per_chunk, len(left)))]
                    worker.place = taken[0].place
                    if left:
                        self._call_mapper()
                    if thread is None:
                        self._call(taken[0])  # the only one
                    else:
                        taken = await self._call_some(taken, thread)
                    for work in taken:
                        worker.place = work.place
                        await self._complete(work, worker)
                elif self._has_all:
                    return
                else:
                    await self._rest_until_called(worker)
        finally:
            if thread is not None:
                thread.close()

    async def _call_some(self, taken: list[Work], thread: WorkThread) -> list[Work]:
        """Call the function with some of the items, at least one; the others are left over."""
        call_all = partial(self._call_all, taken)
        if blocks_inline(self._engine):
            num = call_all()
        else:
            num = await thread.run(call_all, _GRACE_SECS, lambda _: _give_up(taken))
        # as many at a time as are called in less time than it takes to hand them over
        secs = math.fsum(work.secs for work in taken)
        if secs > _CHUNK_SECS / 2:
            self._per_chunk = max(1, num // 2)
        elif num >= self._per_chunk and not self._is_awaited:
            self._per_chunk = max(1, min(2 * self._per_chunk, self._concurrency // 2))
        if num < len(taken):
            self._left.extendleft(reversed(taken[num:]))
            self._call_mapper()
        return taken[:num]

    def _call_all(self, taken: Sequence[Work]) -> int:
        """Call the function with one item after the other, until one fails or they take long.

        It runs in a thread; what a call returns to be awaited, the task is to await at once.
        """
        secs = 0.0
        for num, work in enumerate(taken, 1):
            self._call(work)
            secs += work.secs
            if work.error is not None or secs > _CHUNK_SECS or isinstance(work.result, Awaitable):
                return num
        return len(taken)

    async def _rest_until_called(self, worker: Worker) -> None:
        slot = Slot(self._engine, "an item for map_concurrent")
        self._idle.append(slot)
        worker.is_at_rest = True
        worker.place = -1
        try:
            await self._engine.park(slot)
        finally:
            worker.is_at_rest = False
            if slot in self._idle:
                self._idle.remove(slot)

    async def _complete(self, work: Work, own: Worker) -> None:
        if work.error is None and isinstance(work.result, Awaitable):
            self._per_chunk, self._is_awaited = 1, True  # what a plain function returns, too
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


def _give_up(works: Sequence[Work]) -> None:
    """What was made of them is not wanted any more."""
    for work in works:
        close_unrun(work.result)


async def _recorded(span: Span, pending: Awaitable[Any]) -> Any:
    with ended(span):
        return await pending
