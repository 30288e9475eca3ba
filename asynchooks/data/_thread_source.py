"""ThreadSource: an iterable that is read in a thread, so that the event loop never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._errors import note_once
from ._arguments import saved_count, too_short
from ._claims import claim, release
from ._openers import Opened, Opener
from ._reading_thread import ReadingThread
from ._saved import OwnState, own_state
from ._stage import Stage


class _Reading:
    """What the thread does with the iterable; it must not hold the stage, which ends the thread."""

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.begin = 0  # items to pass over at first
        self.saved: OwnState | None = None  # the iterator's own, to begin with
        self.states: deque[tuple[int, OwnState]] = deque()  # behind how many items
        self._num_read = 0

    def open(self) -> Opened:
        saved = self.saved
        opened = self.opener.open(self.begin, None if saved is None else saved.value)
        for place in range(opened.num_to_pass):
            if next(opened.iterator, self) is self:
                raise too_short(self.opener, place, opened.num_to_pass)
        if opened.state is not None:
            at_first = self.opener.passes.begin(saved, opened.state, self.begin == 0)
            self.states.append((0, at_first))
        return opened if saved is None or not saved.begins else replace(opened, again=self._again)

    def _again(self) -> Opened:
        last = None if self.saved is None else self.saved.last
        if last is not None:
            next(self.opener.open(0, last).iterator, None)
        return self.opener.open(0, None)

    def note(self, opened: Opened) -> None:
        """An item was read."""
        self._num_read += 1
        if opened.state is not None:
            self.states.append((self._num_read, self.opener.passes.go_on(opened.state())))


class ThreadSource(Stage[Any]):
    """An iterable in a thread of its own: opened, read and closed there."""

    kind = "iterable"

    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self._opener = opener
        self._thread: ReadingThread | None = None
        self._has_claimed = False
        self._reading = _Reading(opener)

    def _start(self) -> None:
        if self._is_for_once:
            claim(self._reading.opener.source, self)
            self._has_claimed = True
        self._thread = ReadingThread(self._engine, self._reading.open, self._reading.note)

    async def _pull(self, limit: int) -> Sequence[Any]:
        thread = self._thread
        assert thread is not None
        if not thread.items:
            await thread.read(limit)
        items = [thread.items.popleft() for _ in range(min(limit, len(thread.items)))]
        if not items and thread.error is not None:
            raise thread.error
        return items

    async def _release(self) -> None:
        thread, self._thread = self._thread, None
        if self._has_claimed:
            release(self._reading.opener.source)
        if thread is not None:
            await thread.close()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is not None:  # it was iterated without `async with`, and left early
            thread.dismiss()

    def _explain(self, error: Exception) -> None:
        self._opener.explain(error)
        note_once(error, f"in {self!r}, after {self._reading.begin + self._num_out} items")

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return ThreadSource(self._opener)

    @property
    def _is_for_once(self) -> bool:  # type: ignore[override]
        return self._opener.is_for_once

    def _state_at(self, num_out: int) -> dict[str, Any]:
        for count, state in list(self._reading.states):  # the thread may be adding one
            if count == num_out:
                return state.described()
        if self._reading.saved is not None:  # nothing was read yet
            return self._reading.saved.described()
        return {"items": self._reading.begin + num_out}

    def _load(self, state: Mapping[str, Any]) -> None:
        if "state" in state:
            self._reading.saved = own_state(state)
        else:
            self._reading.begin = saved_count(state["items"])
            if not (self._reading.begin or any(self._epoch)):  # it may have moved since
                self._reading.saved = self._opener.passes.first

    def _keep(self, num_out: int) -> None:
        while self._reading.states and self._reading.states[0][0] < num_out:
            self._reading.states.popleft()

    def __repr__(self) -> str:
        return repr(self._opener)
