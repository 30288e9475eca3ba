"""ThreadSource: an iterable that is read in a thread, so that the event loop never waits for it."""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._engine.base import TIMED_OUT, Engine, Slot
from .._engine.current import engine_in_use
from ._openers import Opened, Opener
from ._source_stage import Beginning, Own, SourceStage, too_short
from ._stage import Pair, wait_to_end

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 1e-3
"""How long a reader waits for all that was asked for, before taking what is there: a wake-up from
a thread costs 30 to 100 us."""
_GRACE_SECS = 10.0
"""What a read under way gets to end when it is not wanted any more: it cannot be interrupted."""


class ThreadSource(SourceStage):
    """An iterable in a thread of its own: opened, read and closed there."""

    kind = "iterable"

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._thread: ReadingThread | None = None
        super().__init__(opener.stateful)

    def _start(self) -> None:
        if self._is_for_once:
            self._claim(self._opener.source)
        own = None if self._own is None else self._own.value
        reading = Reading(self._opener, self._num_before, own, self._is_pass_over, self._beginning)
        self._thread = ReadingThread(self._engine, reading)

    async def _pull(self, limit: int) -> Sequence[Pair]:
        thread = self._thread
        assert thread is not None
        if not thread.items:
            await thread.read(limit)
        found = [thread.items.popleft() for _ in range(min(limit, len(thread.items)))]
        if not found and thread.error is not None:
            raise thread.error
        self._num_given += len(found)
        return [(item, self._behind(data)) for item, data in found]

    async def _release(self) -> None:
        thread, self._thread = self._thread, None
        self._unclaim(self._opener.source)
        if thread is not None:
            await thread.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:  # it was iterated without `async with`, and left early
            thread.dismiss()

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
    num_read: int = 0
    _opened: Opened | None = None

    def next(self) -> tuple[Any, int | Own]:
        """The next item, and how many there were, or the state behind it."""
        opened = self._opened = self._opened or self._open()
        try:
            item = next(opened.iterator)
        except StopIteration:
            if self.num_read or not self.is_pass_over:
                raise
            self.is_pass_over = False
            self.close()
            self._opened = self.opener.open(0, None)
            return self.next()
        self.num_read += 1
        if opened.state is not None:
            return item, Own(opened.state())
        return item, self.num_before + self.num_read

    def _open(self) -> Opened:
        opened = self.opener.open(self.num_before, self.own)
        for place in range(opened.num_to_pass):
            if next(opened.iterator, self) is self:
                raise too_short(self.opener, place, opened.num_to_pass)
        self.beginning.ask(self.opener.stateful)
        return opened

    def close(self) -> None:
        """A generator, or a file; iterators of other libraries end by being forgotten."""
        opened, self._opened = self._opened, None
        close = None if opened is None else getattr(opened.iterator, "close", None)
        if callable(close):
            close()


class ReadingThread:
    """Reads one iterator, as far as it was asked to, item by item, and closes it."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        self.items: deque[Any] = deque()
        self.error: BaseException | None = None
        self.is_over = False  # no further item will come
        self._closing_error: BaseException | None = None
        self._engine = engine
        self._reading = reading
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_asked = 0
        self._num_read = 0
        self._is_closing = False
        self._is_closed = False
        self._is_patient = True  # the reader would rather have several items
        self._slot: Slot | None = None  # of the reader, or of the end
        self._thread: threading.Thread | None = None

    async def read(self, limit: int) -> None:
        """Return when an item is there, or none will come; at most `limit` are read ahead."""
        missing = limit - (self._num_asked - self._num_read) - len(self.items)
        if missing > 0 and not self.is_over:
            self._num_asked += missing
            if self._engine.is_virtual:
                self._read(missing)
            else:
                self._begin()
                self._asked.put(missing)
        self._is_patient = True  # all that was asked for may come at once: one wake-up for all
        while not (self.items or self.is_over):
            slot = self._slot = Slot(self._engine, "an item that a thread reads")
            if self.items or self.is_over:  # looked at after the slot is there
                return
            until = self._engine.now() + _PATIENCE_SECS if self._is_patient else math.inf
            await self._engine.park(slot, until)  # the thread may have taken it from `self` by now
            self._is_patient = False

    def _begin(self) -> None:
        if self._thread is None:
            run = copy_context().run
            self._thread = (
                threading.Thread(  # daemon: a read that never ends must not hold the exit
                    target=run, args=(self._serve,), name="asynchooks-input", daemon=True
                )
            )
            self._thread.start()

    def _serve(self) -> None:
        # the copied context says which event loop the task runs on; this thread runs none
        sniffio = sys.modules.get("sniffio")
        if sniffio is not None:
            sniffio.current_async_library_cvar.set(None)
        engine_in_use.set(self._engine)
        while (num := self._asked.get()) is not None:
            self._read(num)
        self._close()

    def _read(self, num: int) -> None:
        for _ in range(num):
            if self._is_closing or self.is_over:
                return
            try:
                item = self._reading.next()
            except StopIteration:
                self.is_over = True
            except BaseException as error:
                self.error = error
                self.is_over = True
            else:
                self.items.append(item)
                self._num_read += 1  # last: `read` must not ask for it again
            if self.is_over or not self._is_patient:
                self._wake()
        self._wake()

    def _wake(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._engine.wake(slot)

    def _close(self) -> None:
        try:
            self._reading.close()
        except BaseException as error:
            self._closing_error = error
        self._is_closed = True
        self._wake()

    async def close(self) -> None:
        """Close the iterator in the thread, and end that; what `close` of it raises leaves."""
        self.dismiss()
        if self._thread is None:
            self._close()
        until = self._engine.now() + _GRACE_SECS
        self._wake()  # a reader that waits for an item: there will be none
        try:
            await wait_to_end(self._engine, partial(self._wait_until_closed, until))
        finally:
            if self._is_closed and self._thread is not None:
                self._thread.join()
        if self._closing_error is not None:
            raise self._closing_error

    async def _wait_until_closed(self, until: float) -> None:
        while not self._is_closed:
            slot = self._slot = Slot(self._engine, "the end of a thread that reads")
            if not self._is_closed and await self._engine.park(slot, until) is TIMED_OUT:
                logger.warning(
                    "What is read in the thread asynchooks-input did not end within %g s, and is "
                    "left alone; it is closed when it comes back", _GRACE_SECS,
                )  # fmt: skip
                return

    def dismiss(self) -> None:
        """Have the thread close what it reads and end, when its call comes back."""
        self._is_closing = self.is_over = True
        self._asked.put(None)
