"""Records: what is recorded of one session's hooks and runs, by any number of recorders.

Without a recorder it is empty, and a run does not look at it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .._engine.recording import Kind, SessionRecord, ended

Groups = tuple[Any, ...]
"""Calls of one moment, as `HookList` has them."""


class Records:
    """The records of one session; its list of hooks makes it."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: tuple[SessionRecord, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, record: SessionRecord) -> None:
        self._records += (record,)

    def around_runs(self, before_runs: Groups, after_runs: Groups) -> tuple[Groups, Groups]:
        """These calls, so that runs are recorded."""
        for record in self._records:
            before_runs, after_runs = record.around_runs(before_runs, after_runs)
        return before_runs, after_runs

    @contextmanager
    def span(self, kind: Kind, name: str) -> Iterator[None]:
        """The block, as one span of the session."""
        with ExitStack() as stack:
            for record in self._records:
                stack.enter_context(ended(record.span(kind, name)))
            yield

    def put_off(
        self, fn: Callable[[], Awaitable[None]], name: str
    ) -> Callable[[], Awaitable[None]]:
        """What a hook has put off to the end of a run, recorded."""
        if not self._records:
            return fn

        async def recorded() -> None:
            with self.span(Kind.FINISH, name):
                await fn()

        return recorded

    def cut_run(self, error: BaseException) -> None:
        """The run under way has failed."""
        for record in self._records:
            record.cut_run(error)

    async def aclose(self, error: BaseException | None) -> None:
        """The session has ended."""
        for record in reversed(self._records):
            await record.aclose(error)

    def drop(self) -> None:
        """The session was dropped: see `SessionRecord.drop`."""
        for record in self._records:
            record.drop()
