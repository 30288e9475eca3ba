"""Outlet: a bounded queue by step, and the thread that writes what is in it to one sink.

A point keeps its step, also where it comes after points of later steps. Putting one never waits.
What the sink does not take in time is thinned out and counted, and a thread that hangs in the sink
is left alone at the end. It knows nothing of hooks and sessions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from .. import _check
from .._engine.background import BackgroundThread
from .._engine.base import Engine, Slot
from ._sink import Histogram, Point, Resume, Sink

logger = logging.getLogger("asynchooks")

CAPACITY = 16_384
"""Points in the queue, at most: at 100 steps a second each, 160 s of a sink that hangs."""
_CYCLE_SECS = 0.5
"""Points of this long are written in one go, and flushed."""
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0
"""Between two attempts to open a sink."""
_VIRTUAL_BATCH = 256
_LARGEST_STEP = (1 << 63) - 1
_UNFLUSHED_SECS = 1.0
"""A sink that always has more to write is flushed this often."""
_ARRAY_BYTES = 32 << 20
"""Arrays in the queue, of which histograms are to be made, take this much memory at most."""

Values = Mapping[str, Any]
"""By name: floats, Histograms, or arrays (owned by the outlet) whose histogram is to be made."""


@dataclass(slots=True, eq=False)
class _Queued:
    """A point on its way to the sink; without values: what is of later steps is to be forgotten."""

    step: int
    time: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    is_written: bool = False

    def add(self, values: Values) -> None:
        """Have these values, too, save those of names that it has."""
        self.values = {**values, **self.values}

    def point(self) -> Point:
        return Point(self.step, self.time, self.with_histograms())

    def with_histograms(self) -> dict[str, Any]:
        """Its values; a histogram is made once, however long the point waits."""
        self.values = {
            name: value if isinstance(value, (float, Histogram)) else Histogram.of(value)
            for name, value in self.values.items()
        }
        return self.values


class Outlet:
    """What a hook gives the points of one sink to. `open` it once, and `close` it.

    Args:
        sink: called in the outlet's own thread alone.
        on_error: called with the first error of the sink, in the outlet's thread.
        capacity: points that wait, at most.
    """

    def __init__(
        self,
        sink: Sink,
        on_error: Callable[[BaseException], None] | None = None,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self.sink = sink
        self.num_dropped = 0
        """Points that were not written, since `open`."""
        self._on_error = on_error
        self._capacity = capacity
        # so many wake the thread: on busy CPUs it was seen to come 200 ms later
        self._crowd = max(1, capacity // 16)
        self._lock = Lock()  # guards the next nine
        self._queue: dict[tuple[int, int], _Queued] = {}  # by life and step, which is their order
        self._life = 0  # the steps that follow a set-back, or a restore, are other ones
        self._unflushed: list[_Queued] = []  # the sink may have them, but not durably
        self._position: Any = None
        self._last_step = 0  # the greatest of a point
        self._is_thinned = False
        self._num_bytes = 0  # of the arrays in the queue
        self._is_abandoned = False
        self._has_ended = False  # nothing more is written
        self._has_failed = self._is_open = False
        self._engine: Engine | None = None  # set by `open`, as the next two
        self._resume: Resume
        self._opened: Slot
        self._errors: type[BaseException] = BaseException
        # else, if it were given again what it was given after a save, steps would go back in it
        self._has_position = type(sink).flush is not Sink.flush
        self._thread = BackgroundThread(f"asynchooks-{type(sink).__name__}", self._serve)
        self._previous: BackgroundThread | None = None  # of the sink

    def claim(self) -> None:
        """Before `open`: have the sink, from when the outlet that had it last has ended."""
        last: Outlet | None = self.sink._outlet
        self._previous = None if last is None else last._thread
        vars(self.sink)["_outlet"] = self  # also of a frozen dataclass

    @staticmethod
    def is_used(sink: Sink) -> bool:
        """Whether an outlet has the sink, and nothing has asked it to close."""
        last: Outlet | None = sink._outlet
        return last is not None and not last._thread.is_ending

    async def open(self, engine: Engine, resume: Resume, pending: Sequence[Any]) -> None:
        """Start the thread, and wait for the sink to open for as long as it says.

        Args:
            engine: of the session; in virtual time there is no thread, and the sink may block.
            resume: for the sink.
            pending: of `state_dict`: what is to be written first.
        """
        points = restored(pending)
        early = _Queued(resume.step, _now(engine))  # of values from before the step was known
        with self._lock:
            for each in self._queue.values():
                early.add(each.values)
            self._queue = {(life, each.step): each for life, each in enumerate(points)}
            self._life = len(points)
            if early.values:
                self._queue[self._life, resume.step] = early
            self._position = resume.position
            self._last_step = max([resume.step, *(each.step for each in points)])
        self._engine, self._resume = engine, resume
        self._opened = Slot(engine, f"the opening of {self.sink!r}")
        if engine.is_virtual:
            self._errors = Exception  # in the session's task
            self._open()
            return
        self._thread.start()
        if self.sink.open_secs:
            await engine.park(self._opened, engine.now() + self.sink.open_secs)

    def put(self, step: int, values: Values) -> None:
        """Give the sink values of a step; from any thread, and without waiting.

        They join the point of this step if that still waits, and else are a further one. Of two
        values of one name the first stays. Before `open` they are of the step at which that
        resumes.
        """
        assert values  # a point without any stands for a step that the session was set back to
        engine = self._engine
        now = 0.0 if engine is None else _now(engine)
        with self._lock:
            if self._has_ended:
                self.num_dropped += 1
                return
            self._last_step = max(step, self._last_step)
            self._num_bytes += _bytes_of(values)
            key = self._life, step
            if key not in self._queue:
                self._queue[key] = _Queued(step, now)
            self._queue[key].add(values)
            num, was_thinned = len(self._queue), self._is_thinned
            if num > self._capacity or self._num_bytes > _ARRAY_BYTES:
                self._thin(with_arrays=num <= self._capacity)
        if self._is_thinned and not was_thinned:
            logger.warning(
                "%r does not keep up: every second of the %d points that wait for it is dropped, "
                "whenever there are so many. Training goes on",
                self.sink,
                min(num, self._capacity),
            )
        if engine is None:
            return
        if engine.is_virtual:
            if num >= _VIRTUAL_BATCH:
                self._write_all()
        elif num == self._crowd:
            self._thread.ring()

    def _thin(self, *, with_arrays: bool) -> None:
        """Drop every second point of the queue, or of those with arrays; the newest one stays."""
        points = self._queue.items()
        thinned = [
            key for key, each in points if (_bytes_of(each.values) if with_arrays else each.values)
        ]
        dropped = {*thinned[::-1][1::2]}
        self._set_queue({key: each for key, each in points if key not in dropped})
        self.num_dropped += len(dropped)
        self._is_thinned = self._is_thinned or bool(dropped)

    def _waiting(self) -> list[_Queued]:
        """What waits, in the order in which it is written, in this process or in the next one."""
        return [each for _, each in sorted(self._queue.items())]

    def _drop(self, points: Iterable[_Queued]) -> None:
        """Count them."""
        self.num_dropped += sum(1 for each in points if each.values)

    def _set_queue(self, queue: dict[tuple[int, int], _Queued]) -> None:
        self._queue = queue
        self._num_bytes = sum(_bytes_of(each.values) for each in queue.values())

    def complete(self) -> None:
        """Let no value join the points that wait: the steps that follow are other ones."""
        with self._lock:
            self._life += 1

    def rewind(self, step: int) -> None:
        """The session was set back to this step: what was put of later ones is to be forgotten."""
        with self._lock:
            if step >= self._last_step:
                return
            self._last_step = step
            self._life += 1
            # what waits of later steps is not written first
            kept = {key: each for key, each in self._queue.items() if each.step <= step}
            self._set_queue({**kept, (self._life, -1): _Queued(step)})
        self._thread.ring()

    def state_dict(self) -> dict[str, Any]:
        """Where the sink's durable points end, and those after them, if it is one that flushes."""
        if self._engine is not None and self._engine.is_virtual:
            self._write_all()
        with self._lock:
            pending = [*self._unflushed, *self._waiting()] if self._has_position else []
            return {"position": self._position, "pending": [*map(_saved, pending)]}

    async def close(self, until: float) -> None:
        """Write what waits, flush and close the sink; leave the thread alone if it is not done.

        Args:
            until: on the engine's clock. Cancellation safe: call it again.
        """
        engine = self._engine
        if engine is None or self._is_abandoned:
            return
        self._thread.end()
        if engine.is_virtual:
            if not self._has_ended:
                self._write_all()
                self._close()
            return
        if await self._thread.wait_for_end(engine, until):
            if self.num_dropped:
                logger.warning(
                    "%d points of this session were not written to %r", self.num_dropped, self.sink
                )
            return
        with self._lock:
            self._is_abandoned = self._has_ended = True
            self._drop([*self._unflushed, *self._queue.values()])
            self._unflushed = []
            self._set_queue({})
        logger.warning(
            "%r did not take its last points in time and is left alone; %d points of this "
            "session were not written to it",
            self.sink,
            self.num_dropped,
        )

    def drop(self) -> None:
        """Let the thread write what waits and end by itself; waits for nothing, takes no lock."""
        self._thread.end()

    # What follows is called in the thread, or in virtual time by the session's task.

    def _serve(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.join()  # of a session before: it may be stuck in the sink
            if self._is_abandoned:
                return
        secs = _FIRST_PAUSE_SECS
        while not self._open() and not self._thread.is_ending:
            self._thread.pause(secs)
            secs = min(2 * secs, _LONGEST_PAUSE_SECS)
        while not self._thread.pause(_CYCLE_SECS):
            self._write_all()
        self._write_all()
        self._close()

    def _open(self) -> bool:
        self._is_open = self._call(self.sink.open, self._resume) is not _FAILED
        self._write_all()
        if self._is_open and self._position is None:
            self._flush()  # so that the first checkpoint knows where the sink writes to
        self._opened.wake()
        return self._is_open

    def _write_all(self) -> None:
        if not self._is_open:
            return
        assert self._engine is not None
        now = self._engine.now
        flushed_at = now()
        while not self._is_abandoned:
            with self._lock:  # once for all of them: to wait for it may cost milliseconds
                items = self._waiting()
                self._set_queue({})
                self._unflushed += items
            if not items:
                break
            for each in items:
                self._write(each)
                if now() - flushed_at >= _UNFLUSHED_SECS:
                    self._flush()
                    flushed_at = now()
        if self._unflushed:
            self._flush()

    def _write(self, each: _Queued) -> None:
        if self._is_abandoned:
            return
        if not each.values:
            self._call(self.sink.rewind, each.step)
            each.is_written = True
            return
        each.is_written = self._call(lambda: self.sink.write(each.point())) is not _FAILED
        if not each.is_written:
            with self._lock:
                if each in self._unflushed:
                    self._unflushed.remove(each)
                    self.num_dropped += 1

    def _flush(self) -> None:
        """Flush what was written."""
        if self._is_abandoned:
            return
        position = self._call(self.sink.flush)
        with self._lock:
            if self._is_abandoned:
                return
            if position is not _FAILED:
                self._position = position
            else:
                self._drop(each for each in self._unflushed if each.is_written)
            self._unflushed = [each for each in self._unflushed if not each.is_written]

    def _close(self) -> None:
        if self._is_open:
            self._call(self.sink.close)
        with self._lock:
            self._has_ended = True
            self._drop(self._queue.values())
            self._set_queue({})

    def _call(self, fn: Callable[..., object], *args: Any) -> object:
        """Call the sink; `_FAILED` where it raises, of which the first time is logged."""
        try:
            return fn(*args)
        except self._errors as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "%r failed, and may go on failing: what it does not take is dropped and "
                    "counted%s",
                    self.sink,
                    ", and training goes on" if self._on_error is None else "",
                    exc_info=error,
                )
                if self._on_error is not None:
                    self._on_error(error)
            return _FAILED


_FAILED = object()


def _now(engine: Engine) -> float:
    return engine.now() if engine.is_virtual else time.time()


def _bytes_of(values: Values) -> int:
    """Of the arrays among them."""
    return sum([getattr(each, "nbytes", 0) for each in values.values() if type(each) is not float])


def _saved(each: _Queued) -> dict[str, Any]:
    if not each.values:
        return {"rewind": each.step}
    values = {
        name: value if isinstance(value, float) else value.state_dict()
        for name, value in each.with_histograms().items()
    }
    return {"step": each.step, "time": each.time, "values": values}


def restored(pending: object) -> list[_Queued]:
    """What a saved state has that the sink is to be given first.

    Raises:
        TypeError, ValueError, LookupError: it is no such state.
    """
    return [*map(_restored, _check.instance("saved points", pending, (list, tuple), "a list"))]


def _restored(saved: object) -> _Queued:
    saved = _check.instance("a saved point", saved, Mapping, "a mapping")
    if "rewind" in saved:
        return _Queued(_check.integer("a saved step", saved["rewind"], least=0))
    step = _check.integer("a saved step", saved["step"], least=0)
    if step > _LARGEST_STEP:
        raise ValueError(f"a saved step is {step}; give one of 64 bits")
    time = _check.number("a saved time", saved["time"])
    values = {}
    saved_values = _check.instance("saved values", saved["values"], Mapping, "a mapping")
    for name, value in saved_values.items():
        _check.metric_name(name)
        is_spread = isinstance(value, Mapping)
        values[name] = Histogram.from_state(value) if is_spread else _check.real(name, value)
    if not values:
        raise ValueError(f"a saved point of step {step} has no values; give at least one")
    return _Queued(step, time, values)
