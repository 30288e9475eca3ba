"""Stop requests and side tasks of one session, and the hold on its input.

It knows nothing of raw sessions, nor of what happens after a stop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .._engine.base import Engine
from .._engine.stop import Stop, StopReason
from .._engine.sync import Condition
from .._errors import add_note
from .tasks import SideTasks


class Owner(Protocol):
    """The lifecycle of the session."""

    has_run: bool  # whether a step in a thread has succeeded since this was set to False

    @property
    def training(self) -> object: ...

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool: ...

    def add_input(self, each: SessionInput) -> None: ...

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]: ...

    def stop_coord(self, error: BaseException | None, reason: StopReason) -> None: ...

    def stop_workers(self, reason: StopReason) -> StopReason: ...


class SessionStop:
    """The stops of one `MonitoredSession`; its list of hooks makes it.

    A stop that no recovery makes forgotten goes to `owner`, too, once there is one.

    Args:
        stop: what the session's waits end at: set by the caller and by the present coordinator.
    """

    __slots__ = (
        "_tasks", "error", "failure", "input", "is_asked", "is_asked_by_hook", "is_ending",
        "is_for_all", "is_over", "owner", "reason", "run_stop", "stop",
    )  # fmt: skip

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.owner: Owner | None = None
        # what waits in a run end at: also when a preemption is reported to the coordinator, by
        # which the run is to be made again
        self.run_stop = Stop()
        self.is_asked = False  # for good
        self.is_asked_by_hook = False  # which a recovery makes forgotten
        self.is_for_all = False  # by this session, for all that share its model
        self.is_ending = False  # no further run begins
        self.is_over = False
        self.error: BaseException | None = None  # that the caller gave with the stop
        self.failure: BaseException | None = None  # the first of the session's own side tasks
        self.reason: StopReason | None = None  # the first request to stop
        self._tasks: SideTasks | None = None
        self.input: SessionInput | None = None  # of loops in the block; closed at the end

    def request(
        self, error: BaseException | None, reason: StopReason, *, all_workers: bool = False
    ) -> None:
        """Stop for good: no recovery makes it forgotten; this session, or all of its model."""
        if all_workers:
            self.is_for_all = True  # first: it may be just opening
            if self.owner is not None:
                reason = self.owner.stop_workers(reason)
        self.is_asked = True
        self.error = self.error or error
        self.reason = self.reason or reason
        self.stop.set()
        self.run_stop.set()
        if self.owner is not None:
            self.owner.stop_coord(error, reason)

    def note(self, reason: StopReason | None) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason

    def set(self, *, for_runs_only: bool) -> None:
        """The coordinator was asked to stop; a preemption stops only the run under way."""
        if not for_runs_only:
            self.stop.set()
        self.run_stop.set()

    def forget(self) -> None:
        """Take back a stop that was not for good."""
        if not self.is_asked:
            self.reason = None
            self.stop.clear()
            self.run_stop.clear()

    @property
    def tasks(self) -> SideTasks:
        """The side tasks of the session, which outlive a lost raw session."""
        if self._tasks is None:
            assert self.owner is not None
            self._tasks = SideTasks(
                self.stop, self.owner.drive, self._fail,
                lambda: self.is_over, lambda: self.is_ending,
            )  # fmt: skip
        return self._tasks

    def _fail(self, error: BaseException, reason: StopReason) -> None:
        self.failure = self.failure or error
        if error is not self.failure:
            add_note(self.failure, f"then, in {reason.who}: {error!r}")
        self.request(None, reason)

    async def close_input(self, error: BaseException | None) -> BaseException | None:
        """The session has ended; returns what leaves it."""
        if self.input is not None:
            try:
                await self.input.close()
            except BaseException as closing:
                if error is not None:
                    add_note(error, f"then, closing the input: {closing!r}")
                error = error or closing
        return error

    @property
    def has_tasks(self) -> bool:
        return self._tasks is not None

    async def end_tasks(self, engine: Engine, until: float, *, cancel: bool) -> None:
        """As `SideTasks.end`."""
        if self._tasks is not None:
            await self._tasks.end(engine, until, cancel=cancel)


class SessionInput(Protocol):
    """What the loops over `session.batches` in one session's block read."""

    @property
    def has_item(self) -> bool:
        """Whether a loop has an item that no run has used yet."""

    def hold(self, hold: Condition | None) -> None:
        """Give out no item until this is called with None; notify `hold` once there is none out."""

    async def close(self) -> None:
        """Let go of the sources."""


class InputHold(Condition):
    """Keeps the inputs of several sessions from giving out items while the model is restored.

    Several may ask for that at once. Inputs that begin meanwhile are held, too: what they gave out
    would be of the time before the restore, and come once more after it.
    """

    __slots__ = ("_num_holders", "inputs")

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[SessionInput] = []
        self._num_holders = 0

    def add(self, each: SessionInput) -> None:
        """Hold this one, too, as long as any are held."""
        if self._num_holders and each not in self.inputs:
            self.inputs.append(each)
            each.hold(self)

    @contextmanager
    def held(self, inputs: Iterable[SessionInput]) -> Iterator[None]:
        """Within the block these, and those that begin meanwhile, give out no items."""
        self._num_holders += 1
        try:
            for each in inputs:
                self.add(each)
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders:
                inputs, self.inputs = self.inputs, []
                for each in inputs:
                    each.hold(None)
                self.tell()
