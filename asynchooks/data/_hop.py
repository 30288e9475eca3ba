"""Hop: what a thread of map_concurrent does for one wake-up: a call, or several short ones.

It neither reads items nor gives results out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from .._engine.base import Engine
from .._engine.threads import close_unrun

HOP_SECS = 5e-4
"""How long a thread works on, before it hands over what is done: that takes 30 to 100 us."""


class Work:
    """One item on its way."""

    __slots__ = ("error", "is_done", "item", "place", "result")

    def __init__(self, item: Any, place: int) -> None:
        self.item = item
        self.place = place
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def call(self, fn: Callable[[Any], Any]) -> None:
        try:
            self.result = fn(self.item)
        except (Exception, GeneratorExit) as error:
            self.error = error


class Hop:
    """Calls of a function, one after the other, until one fails or they took long.

    `call` runs in the thread, if there is one; all else is for the event loop. What is done can be
    taken out while the thread goes on, as its next call may take long.
    """

    __slots__ = (
        "_begun", "_engine", "_first", "_is_long", "_is_over", "done", "num_done", "secs",
        "takes_more",
    )  # fmt: skip

    def __init__(self, engine: Engine, first: Work, takes_more: bool) -> None:
        self._engine = engine
        self._first = first
        self._is_long = takes_more
        self._is_over = False  # the event loop hears of it a little later
        self._begun = math.inf  # by the engine's tick, when the thread begins
        self.takes_more = takes_more  # until somebody says no
        self.done: deque[Work] = deque()
        self.num_done = 0
        self.secs = 0.0  # that the calls took

    def call(self, fn: Callable[[Any], Any], left: deque[Work]) -> None:
        """Call the function with the first item, then with those that are left over."""
        tick, work = self._engine.tick, self._first
        self._begun = begun = tick()
        while True:
            work.call(fn)
            has_failed = work.error is not None  # looked at before somebody else has it
            self.num_done += 1
            self.done.append(work)
            self.secs = tick() - begun
            if has_failed or not self.takes_more or self.secs > HOP_SECS:
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
        return self._engine.tick() > self._begun + HOP_SECS
