"""ThreadSource: an iterable that is read in a thread, so that the event loop never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._engine.base import EngineTask
from .._engine.recording import blocks_inline
from .._engine.threads import WorkThread
from ._openers import Opened, Opener
from ._source_stage import Beginning, Own, SourceStage, too_short
from ._stage import Pair, wait_to_end

_PATIENCE_SECS = 1e-3
"""How long a thread reads on, and a reader waits for it, before what is there is handed over: that
costs 30 to 100 us."""
_GRACE_SECS = 10.0
"""What a read under way gets to end when it is not wanted any more: it cannot be interrupted."""


class ThreadSource(SourceStage):
    """An iterable in a thread of its own: opened, read and closed there."""

    kind = "iterable"

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._thread: WorkThread | None = None
        self._reading: Reading
        # what goes on in the thread: a task of its own, which a cancelled reader leaves to the next
        self._task: EngineTask | None = None
        super().__init__(opener.stateful)

    def _start(self) -> None:
        if self._is_for_once:
            self._claim(self._opener.source)
        own = None if self._own is None else self._own.value
        self._reading = Reading(
            self._opener, self._num_before, own, self._is_pass_over, self._beginning
        )
        self._thread = WorkThread(self._engine, "asynchooks-input")

    async def _pull(self, limit: int) -> Sequence[Pair]:
        reading, engine = self._reading, self._engine
        while not (reading.ready or reading.is_over):
            # counted from here, as the thread may begin late: an item that comes when the reader
            # has lost patience is handed over before the next one is read
            until = engine.tick() + _PATIENCE_SECS
            read = partial(reading.read, limit, engine.tick, until)
            await self._in_thread(read, 2 * _PATIENCE_SECS)
        found = [reading.ready.popleft() for _ in range(min(limit, len(reading.ready)))]
        if not found and reading.error is not None:
            raise reading.error
        self._num_given += len(found)
        return [(item, self._behind(data)) for item, data in found]

    async def _in_thread(self, call: Callable[[], None], patience_secs: float = 0.0) -> None:
        """Call it, unless something else is going on there; return when that has ended.

        Or, after a while, when an item is there.
        """
        if blocks_inline(self._engine):
            call()
            return
        thread = self._thread
        assert thread is not None
        if self._task is None:
            self._task = self._engine.start(thread.run, call, 0.0)
        task = self._task
        if patience_secs:
            has_ended = await task.wait(self._engine.now() + patience_secs)
            if not has_ended and self._reading.ready:
                return
        await task.wait()
        self._task = None

    async def _release(self) -> None:
        self._unclaim(self._opener.source)
        thread, until = self._thread, self._engine.now() + _GRACE_SECS
        if thread is None:
            return
        try:
            await wait_to_end(self._engine, partial(self._end, until))
        finally:
            self._thread = self._task = None
            thread.close()
        if self._reading.closing_error is not None:
            raise self._reading.closing_error

    async def _end(self, until: float) -> None:
        reading, task = self._reading, self._task
        reading.is_closing = True
        if task is not None and not await task.wait(until):
            task.cancel()  # it is left alone, and closes what it reads when it comes back
            await task.wait()
            return
        self._task = None
        if not reading.is_closed:
            await self._in_thread(reading.close)

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:  # it was iterated without `async with`, and left early
            thread.drop()

    def _explain(self, error: Exception) -> None:
        self._opener.explain(error)
        super()._explain(error)

    @property
    def _is_for_once(self) -> bool:  # type: ignore[override]
        return self._opener.is_for_once

    def __repr__(self) -> str:
        return repr(self._opener)


@dataclass
class Reading:
    """What the thread does with the iterable; it must not hold the stage, which ends the thread."""

    opener: Opener
    num_before: int
    own: Any
    is_pass_over: bool
    beginning: Beginning
    ready: deque[tuple[Any, int | Own]] = field(default_factory=deque)
    is_over: bool = False  # no further item will come
    error: BaseException | None = None
    is_closing: bool = False
    is_closed: bool = False
    closing_error: BaseException | None = None
    _num_read: int = 0
    _opened: Opened | None = None

    def read(self, limit: int, tick: Callable[[], float], until: float) -> None:
        """Read so many items, or one at least and as many as come until then."""
        try:
            for _ in range(limit):
                if self.is_closing:
                    break
                self.ready.append(self._next())
                if tick() > until:
                    break
        except StopIteration:
            self.is_over = True
        except BaseException as error:
            self.error, self.is_over = error, True
        if self.is_closing:
            self.close()

    def _next(self) -> tuple[Any, int | Own]:
        """The next item, and how many there were, or the state behind it."""
        opened = self._opened = self._opened or self._open()
        try:
            item = next(opened.iterator)
        except StopIteration:
            if self._num_read or not self.is_pass_over:
                raise
            self.is_pass_over = False
            self._close_opened()
            self._opened = self.opener.open(0, None)
            return self._next()
        self._num_read += 1
        if opened.state is not None:
            return item, Own(opened.state())
        return item, self.num_before + self._num_read

    def _open(self) -> Opened:
        opened = self.opener.open(self.num_before, self.own)
        for place in range(opened.num_to_pass):
            if next(opened.iterator, self) is self:
                raise too_short(self.opener, place, opened.num_to_pass)
        self.beginning.ask(self.opener.stateful)
        return opened

    def close(self) -> None:
        self.is_over = self.is_closed = True
        try:
            self._close_opened()
        except BaseException as error:
            self.closing_error = error

    def _close_opened(self) -> None:
        """A generator, or a file; iterators of other libraries end by being forgotten."""
        opened, self._opened = self._opened, None
        close = None if opened is None else getattr(opened.iterator, "close", None)
        if callable(close):
            close()
