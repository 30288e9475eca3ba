"""The seam between what is recorded of a run and the recorders, which are above.

A recorder is found by a context variable, which sessions, stages and side tasks read when they
begin: what is not recorded pays for no more. Nothing here knows of files or of tracing libraries.
"""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .base import Engine, Slot


class Kind(Enum):
    """What a span is of; the value is the field's name for it."""

    SESSION = "session"
    RUN = "run"
    HOOK = "hook"
    FINISH = "finish"
    """What a hook has put off to the end of a run: an evaluation, a decision, a save."""
    SAVE = "save"
    SIDE_TASK = "side_task"
    EVALUATION = "evaluation"
    CALL = "call"
    """Of the user's function, by a stage of data."""
    READ = "read"
    WAIT = "wait"
    WORK = "work"
    """Timed by the user: what a plan draws in place of calling it."""
    BLOCK = "block"
    """A block of the user's code, which a plan runs as it is."""


class Span(ABC):
    """Something that has begun, and is recorded."""

    @abstractmethod
    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        """It has ended, by this error if there is one: then it was cut. Call it once."""


class SessionRecord(ABC):
    """The record of one session, from its opening to its end."""

    @abstractmethod
    def around_runs(
        self, before_runs: tuple[Any, ...], after_runs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The calls as `HookList` has them, so that runs are recorded."""

    @abstractmethod
    def cut_run(self, error: BaseException) -> None:
        """The run under way has failed, or was cancelled."""

    @abstractmethod
    def span(self, kind: Kind, name: str) -> Span:
        """One call on behalf of the session, by whichever task."""

    @abstractmethod
    async def aclose(self, error: BaseException | None) -> None:
        """The session has ended, by this error if there is one.

        The last one of a recorder ends that, and waits a little until all is written.
        """

    @abstractmethod
    def drop(self) -> None:
        """The session was dropped; called by the garbage collector, so it takes no lock."""


class Recorder(ABC):
    """Records what tasks do, of all sessions that it is given."""

    stand_in: Any = None
    """What does timed work and makes blocking calls in a plan; None: the program does both."""
    is_of_program: bool = False
    """Whether it records a whole program: sessions in it may have recorders of their own, too."""
    is_closed: bool = False
    """Whether it records nothing any more."""
    _num_makers: int = 0

    def first_ident(self) -> int:
        """The first of 2**32 idents for what one maker makes; below 2**44."""
        self._num_makers += 1
        return self._num_makers % 4096 << 32

    @abstractmethod
    def open_session(self, engine: Engine, name: str, step: Any) -> SessionRecord:
        """A session opens, in the running task.

        Args:
            engine: of the running task.
            name: of its track.
            step: its global step, with `last_known`; read when the record is written.
        """

    @abstractmethod
    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        """What the running task does until then, on a track of its own.

        Args:
            engine: of the running task.
            kind: what it is.
            name: of the span, and of the track.
            ident: what `use` is given later, if anything is made that can be used; >= 0.
        """

    @abstractmethod
    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        """Work, or a block of code, of the running task: on its track, or on one of its own.

        Args:
            engine: of the running task; None in a thread without an event loop.
            kind: WORK, BLOCK, EVALUATION or SAVE.
            name: of the span, and of the track if a new one is needed.
            worker: whose machine does it; None: a shared service does, or it is not known.

        What `Span.end` gets as value is its size.
        """

    # What follows, not every recorder records.

    def note_inline(self, engine: Engine | None, name: str) -> None:  # noqa: B027
        """The running code computes timed work of this name itself, in whichever thread."""

    def wait(self, engine: Engine, what: str) -> Span | None:
        """A wait of the running task; None if that has no track."""
        return None

    def use(self, engine: Engine, ident: int, staleness: float) -> None:  # noqa: B027
        """The running task takes what a span has made, so many steps after that began."""

    def mark(  # noqa: B027
        self, engine: Engine, name: str, value: float, worker: int | None = None
    ) -> None:
        """A moment of the running task, with a number, such as a push and its staleness."""

    def describe(self, key: str, value: Any) -> None:  # noqa: B027
        """Something about the run that a reader of the record may want, as JSON can hold it."""

    def watch(self, name: str, read: Callable[[], float | None]) -> None:  # noqa: B027
        """A counter: `read` is called now and then, from a thread, until it returns None."""


@dataclass(slots=True, eq=False)
class Place:
    """Where the running task and those that it starts are recorded."""

    recorder: Recorder
    track: Any = None  # the recorder's own
    task: object = None  # whose track it is
    is_session: bool = False  # whether that task has opened a session
    _outer: Place | None = None
    _is_left: bool = False

    def enter(self) -> None:
        """The running task, and those that it starts from now on, are recorded here."""
        self._outer = Place.current()
        recorded_in.set(self)

    def leave(self) -> None:
        """Nothing more is recorded here; sessions of one task may end in any order."""
        self._is_left = True
        recorded_in.set(Place.current())

    @staticmethod
    def current() -> Place | None:
        """Where the running task is recorded now."""
        place = recorded_in.get()
        while place is not None and place._is_left:
            place = place._outer
        return place


recorded_in: ContextVar[Place | None] = ContextVar("asynchooks_recorded_in", default=None)


if sys.platform != "win32":
    # In a forked process the thread that writes, which may hold locks, is the parent's.
    os.register_at_fork(after_in_child=lambda: recorded_in.set(None))


def current_recorder() -> Recorder | None:
    """What records the running task, if anything; read once, where something begins."""
    place = recorded_in.get()
    return None if place is None or place.recorder.is_closed else place.recorder


def begun_span(engine: Engine, kind: Kind, name: str, worker: int | None = None) -> Span | None:
    """`Recorder.work_span` of what records the running task; None if nothing does."""
    recorder = current_recorder()
    return None if recorder is None else recorder.work_span(engine, kind, name, worker)


def current_stand_in() -> Any:
    """What performs the timed work of the running task; None: the program does."""
    recorder = current_recorder()
    return None if recorder is None else recorder.stand_in


def blocks_inline(engine: Engine) -> bool:
    """Whether blocking calls are made on the event loop: time is simulated, and no plan."""
    return engine.is_virtual and current_stand_in() is None


@contextmanager
def ended(span: Span | None) -> Iterator[None]:
    """End the span, if there is one, with the block."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise
    if span is not None:
        span.end()


def record_waits(engine: Engine) -> None:
    """Have the waits of recorded tasks recorded from now on; unrecorded engines pay nothing."""

    async def park(slot: Slot, until: float = math.inf) -> Any:
        place, wait = recorded_in.get(), type(engine).park
        if place is None or slot.is_woken or place.recorder.is_closed:
            return await wait(engine, slot, until)
        with ended(place.recorder.wait(engine, slot.what)):
            return await wait(engine, slot, until)

    engine.park = park  # type: ignore[method-assign]
