"""Stage: one step of an input pipeline, an async iterator that others are put around.

It knows nothing of what its kinds do with items, nor of who uses them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from .._engine.base import AsyncOnly, Engine
from .._engine.current import current_engine
from .._engine.sync import Lock
from .._errors import add_note, is_thrown_away
from ._position import Phase, Positioned
from ._statistics import Clocks, StageStatistics

T = TypeVar("T")

KEEP_EVERY = 256
"""After how many items those below are told what they need not remember."""


class Stage(Positioned, AsyncOnly, Generic[T]):
    """An async iterator over items, made around a source, which may be a stage itself.

    `async with stage as items:` opens it and those below; leaving the block, however that comes,
    ends their tasks and closes their generators and files before anything else goes on. A stage
    without tasks in or below it may also be iterated as it is; then only
    `await stage.aclose()` closes it early. It is used up by one pass; `repeat` makes several.

    Several tasks may draw from one stage: each item goes to one of them. Cancelling one loses no
    item of a stage that runs tasks; elsewhere the cancellation enters the source, and what that
    does with it (a generator ends) is seen by all.
    """

    _in_with = "stage"
    runs_tasks: ClassVar[bool] = False

    def __init__(self, *sources: Stage[Any]) -> None:
        super().__init__()
        self._sources: Sequence[Stage[Any]] = sources
        for each in sources:
            each._num_parents += 1
        self._opened: list[Stage[Any]] = []  # those below that this one has opened, and closes
        self._num_users = 0  # that have opened it and not closed it
        self._successor: Stage[Any] | None = None  # stands in for it after a rewind
        self._engine: Engine
        self._lock = Lock(f"the turn to read {self.kind}")
        self._clocks = Clocks()
        self._keep_next = KEEP_EVERY

    # --- what a kind of stage is made of

    @abstractmethod
    async def _pull(self, limit: int) -> Sequence[T]:
        """The next items, at least one and no more than `limit`; none at the end.

        Called by one task at a time. An error that comes after some items is raised at the next
        call.
        """

    def _start(self) -> None:
        """Begin to work: the sources are open."""

    async def _stop(self) -> None:
        """End tasks and threads; the sources are still open. Shielded by the caller."""

    async def _release(self) -> None:
        """Let go of what is read, when nothing reads any more."""

    def _fill(self) -> tuple[int, int] | None:
        """Items in the buffer, and how many it takes."""
        return None

    # --- what they have in common

    async def _read(self, limit: int) -> Sequence[T]:
        if not self._lock.enter_now():
            await self._lock.wait()
        try:
            if self._phase is not Phase.OPEN:
                self._open_by_itself()
            asked = self._clocks.ask(self._engine)
            try:
                items = await self._pull(limit)
            except (StopAsyncIteration, GeneratorExit) as error:  # it would pass for the end
                if is_thrown_away(error):
                    raise
                raise RuntimeError(f"{self.kind} called what raised {error!r}") from error
            self._num_out += len(items)
            self._clocks.answer(self._engine, asked, items)
        except Exception as error:
            self._explain(error)
            raise
        else:
            return items
        finally:
            self._lock.leave()

    def _explain(self, error: Exception) -> None:
        """Say, in a note, where an error came from; for stages that call what others wrote."""

    async def _read_into(self, items: list[Any], size: int) -> bool:
        """Add items until there are so many; False if the end came first.

        A cancellation leaves those that were read in the list.
        """
        while len(items) < size:
            more = await self._read(size - len(items))
            if not more:
                return False
            items += more
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._successor is not None:
            item: T = await anext(self._successor)
            return item
        self._is_an_end = True
        while True:
            items = await self._read(1)
            if not items:
                raise StopAsyncIteration
            if not self._used_beyond or self._num_out - 1 not in self._used_beyond:
                break
        if self._num_out >= self._keep_next:
            self._keep_next = self._num_out + KEEP_EVERY
            self._keep(self._num_out)
        return items[0]

    def _open_by_itself(self) -> None:
        if self._phase is Phase.CLOSED:
            raise RuntimeError(f"{self!r} is closed; make a new one")
        stage: Stage[Any]
        for stage in self._walk():
            if stage.runs_tasks and stage._phase is Phase.NEW:
                raise RuntimeError(
                    f"{stage!r} runs tasks and must be opened. Got: async for item in "
                    f"{self.kind}(...); write: async with {self.kind}(...) as items: and then "
                    "async for item in items"
                )
        # what is open below belongs to whoever opened it
        self._open([each for each in self._sources if each._phase is Phase.NEW])

    def _open(self, sources: Sequence[Stage[Any]] | None = None) -> None:
        if self._phase is not Phase.OPEN:
            for stage in self._walk():
                if stage._phase is Phase.CLOSED:
                    raise RuntimeError(f"{stage!r} is closed; make a new one")
            for source in self._sources if sources is None else sources:
                source._open()
                self._opened.append(source)
            self._phase = Phase.OPEN
            self._engine = current_engine()
            self._start()
        self._num_users += 1

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except BaseException as closing:
            if exc is None or not isinstance(closing, Exception):
                raise
            add_note(exc, f"then, closing {self!r}: {closing!r}")

    async def aclose(self) -> None:
        """End tasks, and close generators and files; those of the stages below, too.

        A cancellation waits for tasks and threads to end; it enters a generator that is closed.
        What several have opened, the last one closes.
        """
        if self._phase is Phase.CLOSED:
            if self._successor is not None:
                await self._successor.aclose()
            return
        if self._consumers is not None and self._num_users == 2 and not self._consumers.members:
            await self._consumers.close()  # what is read ahead for the next session has no more use
        if self._num_users > 1:
            self._num_users -= 1
            return
        was_open, self._phase, self._num_users = self._phase is Phase.OPEN, Phase.CLOSED, 0
        steps = (self._stop, self._close_sources, self._release)
        await _all(steps if was_open else steps[1:])

    async def _replace_by(self, successor: Stage[Any]) -> None:
        """Close it, though it may be in use: what has opened it closes its successor."""
        if self._phase is Phase.OPEN:
            self._successor, successor._consumers = successor, self._consumers
            successor._num_users, self._num_users = self._num_users, 1
            await self.aclose()

    async def _close_sources(self) -> None:
        opened, self._opened = self._opened, []
        if self._num_users == 0 and not opened:  # nobody has opened it: a generator is closed still
            opened = [each for each in self._sources if each._phase is Phase.NEW]
        await _all([each.aclose for each in opened])

    def statistics(self) -> StageStatistics:
        """Counts and times of this stage and, in `sources`, of those below; from any thread."""
        below = tuple(each.statistics() for each in self._sources)
        return self._clocks.statistics(self.kind, self._fill(), below)

    def __repr__(self) -> str:
        below = ", ".join(repr(each) for each in self._sources)
        return f"{self.kind}({below})"


async def _all(steps: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Take every step, also after one failed or was cancelled; the first error leaves.

    Without a shield, which would be a scope of its own around those that generators hold open.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            await step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
