"""ThreadSource: an iterable that is read in a thread, so that the event loop never waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .._engine.recording import blocks_inline
from .._engine.threads import LastingJob, WorkThread
from ._readings import kind_of
from ._source_stage import SourceStage, short_repr
from ._stage import Pair, State, wait_to_end

_PATIENCE_SECS = 1e-3
"""How long a thread reads on, and a reader waits for it, before what is there is handed over: that
costs 30 to 100 us."""
_GRACE_SECS = 10.0
"""What a read under way gets to end when it is not wanted any more: it cannot be interrupted."""


class ThreadSource(SourceStage):
    """An iterable in a thread of its own: opened, read and closed there."""

    kind = "iterable"

    def __init__(self, source: Any) -> None:
        self._source, self._kind = source, kind_of(source)
        self._thread: WorkThread | None = None
        self._job: LastingJob | None = None  # a reader that is cancelled leaves it to the next
        super().__init__(self._kind(source).stateful)

    def _set(self, state: State | None) -> None:
        super()._set(state)
        self._reading = self._kind(self._source)  # a thread that was left alone keeps the old one

    def _start(self) -> None:
        if self._is_for_once:
            self._claim(self._source)
        self._reading.begin_at(self._num_before, self._own, self._is_pass_over, self._beginning)
        self._thread = WorkThread(self._engine, "asynchooks-input")

    async def _pull(self, limit: int) -> Sequence[Pair]:
        reading, engine = self._reading, self._engine
        ready = reading.ready
        while not (ready or reading.is_over):
            # counted from here, as the thread may begin late: an item that comes when the reader
            # has lost patience is handed over before the next one is read
            until = engine.tick() + _PATIENCE_SECS
            read = partial(reading.read, limit, engine.tick, until)
            await self._in_thread(read, 2 * _PATIENCE_SECS)
        pairs: list[Pair] = []
        while ready and len(pairs) < limit:
            item, behind = ready.popleft()
            pairs.append((item, (self, behind, None)))
        if pairs:
            self._note_own(behind)
        elif reading.error is not None:
            raise reading.error
        self._num_given += len(pairs)
        return pairs

    async def _in_thread(self, call: Callable[[], None], patience_secs: float = 0.0) -> None:
        """Call it, unless something else is going on there; return when that has ended.

        Or, after a while, when an item is there.
        """
        if blocks_inline(self._engine):
            call()
            return
        thread = self._thread
        assert thread is not None
        if self._job is None:
            self._job = thread.begin(call)
        job = self._job
        if patience_secs:
            has_ended = await job.wait(self._engine.now() + patience_secs)
            if not has_ended and self._reading.ready:
                return
        await job.wait()
        self._job = None

    async def _release(self) -> None:
        self._unclaim(self._source)
        thread, until = self._thread, self._engine.now() + _GRACE_SECS
        if thread is None:
            return
        try:
            await wait_to_end(self._engine, partial(self._end, until))
        finally:
            if self._job is None:
                thread.close()
            else:
                thread.abandon(self._job)
            self._thread = self._job = None
        if self._reading.closing_error is not None:
            raise self._reading.closing_error

    async def _end(self, until: float) -> None:
        reading, job = self._reading, self._job
        reading.is_closing = True
        if job is not None and not await job.wait(until):
            return  # it is left alone, and closes what it reads when it comes back
        self._job = None
        if not reading.is_closed:
            await self._in_thread(reading.close)

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:  # it was iterated without `async with`, and left early
            thread.drop()

    def _explain(self, error: Exception) -> None:
        self._reading.explain(error)
        super()._explain(error)

    @property
    def _is_for_once(self) -> bool:  # type: ignore[override]
        return self._reading.is_for_once

    def __repr__(self) -> str:
        return short_repr(self._source)
