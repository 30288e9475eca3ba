"""Lives of a training by several workers, of which one keeps the checkpoints."""

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import anyio

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    InputPositionHook,
    MonitoredSession,
    SessionCreator,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.data import Stage, prefetch

from .inputs import SHORT_SECS

NUM_ITEMS = 60


class CrashError(Exception):
    """What ends a life."""


class Crash(SessionRunHook):
    """Raises in a run of its worker, counted from 1, before the step."""

    def __init__(self, at_run: int) -> None:
        self._num_left = at_run

    async def before_run(self, run_context: SessionRunContext) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise CrashError


class Turns(SessionRunHook):
    """Lets its worker make some runs, and go on only when all may.

    Args:
        all_may: when all may go on.
        holds_item: whether it is held before the next step, not after the last.
    """

    def __init__(self, num_runs: int, all_may: anyio.Event, *, holds_item: bool) -> None:
        self._num_left = num_runs
        self._all_may = all_may
        self._holds_item = holds_item
        self.are_over = anyio.Event()

    async def before_run(self, run_context: SessionRunContext) -> None:
        if self._num_left == 0 and self._holds_item:
            self.are_over.set()
            await self._all_may.wait()

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._num_left -= 1
        if self._num_left == 0 and not self._holds_item:
            self.are_over.set()
            await self._all_may.wait()


class LifeModel(ABC):
    """A model of one life that knows the items that it was trained with."""

    feed: Any = "x"
    fetches: Any = ()

    @abstractmethod
    def creator(self, path: Path) -> SessionCreator:
        """What runs its steps."""

    @abstractmethod
    def saving(self, path: Path) -> CheckpointSaverHook:
        """What saves it every few steps."""


@dataclass
class Life:
    """One process's training."""

    model: LifeModel
    path: Path
    """Of the checkpoints."""
    num_workers: int
    saver_place: int
    """Which worker keeps them; the first, where each begins after the one before has trained."""
    _: KW_ONLY
    feeds: bool
    """Whether FeedHooks feed the items, not loops."""
    num_turns: int = 0
    """How many runs each worker makes before the next one begins, at first."""
    holds_item: bool = False
    """Whether it then has another item in hand; only with `feeds`."""
    crashes_at: int = 0
    """The run of the saver's worker in which all ends; 0: none."""

    def __post_init__(self) -> None:
        self._all_may = anyio.Event()
        self._crash = Crash(self.crashes_at)
        self._shared = SharedSessionCreator(self.model.creator(self.path))
        self._source: Stage[int] = prefetch(range(NUM_ITEMS), 4)
        self._is_over = False
        self._num_others = 0  # that have a session, or are about to
        self._others_left = anyio.Event()

    async def train(self) -> None:
        """Train until a worker ends, by the end of the input or by the crash.

        At the end of the input the worker that saves ends last: its final checkpoint holds what
        the others have trained by then.
        """
        with anyio.fail_after(SHORT_SECS):
            async with anyio.create_task_group() as group:
                for place in range(self.num_workers):
                    turns = Turns(self.num_turns, self._all_may, holds_item=self.holds_item)
                    group.start_soon(self._work, place, turns)
                    if self.num_turns:
                        await turns.are_over.wait()
                self._all_may.set()

    async def _work(self, place: int, turns: Turns) -> None:
        hooks: list[SessionRunHook] = []
        if self.feeds:
            hooks.append(FeedHook(self._source, self.model.feed))
        hooks.append(turns)
        saves = place == self.saver_place
        if saves:
            hooks.append(self._crash)
            if not self.feeds:
                hooks.append(InputPositionHook(self._source))
            hooks.append(self.model.saving(self.path))
        if self._is_over:
            turns.are_over.set()
            return
        self._num_others += not saves
        try:
            async with MonitoredSession(hooks, self._shared) as session:
                await self._run(session)
                if saves:
                    self._end(turns)
                    if self._num_others:
                        await self._others_left.wait()
        except CrashError:
            pass
        finally:
            self._end(turns)
            self._num_others -= not saves
            if not self._num_others:
                self._others_left.set()

    def _end(self, turns: Turns) -> None:
        self._is_over = True
        self._all_may.set()
        turns.are_over.set()

    async def _run(self, session: MonitoredSession) -> None:
        fetches, feed = list(self.model.fetches), self.model.feed
        if self.feeds:
            with suppress(StopTraining):
                while not session.should_stop():
                    await session.run(fetches)
        else:
            async for item in session.batches(self._source):
                await session.run(fetches, {feed: item})
