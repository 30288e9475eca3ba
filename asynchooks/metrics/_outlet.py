"""Outlet: a bounded queue by step, and the thread that writes what is in it to one sink.

A point keeps its step, also where it comes after points of later steps. Putting one never waits.
What the sink does not take in time is thinned out and counted, and a thread that hangs in the sink
is left alone at the end. It knows nothing of hooks and sessions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from .. import _check
from .._engine.base import TIMED_OUT, Engine, Slot
from ._sink import Histogram, Point, Resume, Sink

logger = logging.getLogger("asynchooks")

CAPACITY = 4096
"""Points in the queue, at most: at 100 steps a second each, 40 s of a sink that hangs."""
_CYCLE_SECS = 0.5
"""Points of this long are written in one go, and flushed."""
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 60.0
"""Between two attempts to open a sink."""
_PATIENCE = 4
"""So much more may wait for a thread that is not in the sink: on busy CPUs it was seen to wake 200
ms late, in which a session without pauses takes 20,000 steps."""
_JOIN_SECS = 0.1
"""A thread that has waked the session ends within microseconds, unless others hold Python."""
_VIRTUAL_BATCH = 256
_LARGEST_STEP = (1 << 63) - 1
_UNFLUSHED_SECS = 1.0
"""A sink that always has more to write is flushed this often."""
_ARRAY_BYTES = 32 << 20
"""Arrays in the queue, of which histograms are to be made, take this much memory at most."""

Values = dict[str, Any]
"""By name: floats, Histograms, or arrays (owned by the point) whose histogram is to be made."""


@dataclass(slots=True, eq=False)
class _Queued:
    """A point on its way to the sink; without values: what is of later steps is to be forgotten."""

    step: int
    time: float = 0.0
    values: Values = field(default_factory=dict)
    num_bytes: int = 0
    """Of its arrays."""
    is_written: bool = False

    def add(self, values: Values, num_bytes: int) -> None:
        """Have these values, too, save those of names that it has."""
        for name, value in values.items():
            self.values.setdefault(name, value)
        self.num_bytes += num_bytes

    def point(self) -> Point:
        values = self.values
        for name, value in values.items():
            if not isinstance(value, (float, Histogram)):
                values[name] = Histogram.of(value)
        return Point(self.step, self.time, values)


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
        # as many wake the thread at once: at 100,000 steps a second there are 35 ms left for that
        self._crowd = max(1, capacity // 8)
        self._lock = threading.Lock()  # guards the next nine
        self._again: list[_Queued] = []  # written before the queue: of a checkpoint, or complete
        self._queue: dict[int, _Queued] = {}  # by step, in the order of coming
        self._unflushed: list[_Queued] = []  # the sink may have them, but not durably
        self._position: Any = None
        self._last_step = 0  # the greatest of a point
        self._has_failed = False
        self._is_thinned = False
        self._num_bytes = 0  # of the arrays in the queue
        self._has_ended = False  # nothing more is written
        # wakes the thread; a garbage collector's call may put into it while the thread gets
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_closing = self._is_abandoned = False
        self._opened: Slot | None = None
        self._ended: Slot | None = None
        self._engine: Engine | None = None  # set by `open`
        self._is_open = False
        # else, if it were given again what it was given after a save, steps would go back in it
        self._has_position = type(sink).flush is not Sink.flush
        self._is_resting = False  # the thread, not in the sink: it has only to be given the CPU
        self._thread: threading.Thread | None = None
        self._previous: threading.Thread | None = None  # of the sink

    def claim(self) -> None:
        """Before `open`: have the sink, from when the outlet that had it last has ended."""
        last: Outlet | None = self.sink._outlet
        self._previous = None if last is None else last._thread
        vars(self.sink)["_outlet"] = self  # also of a frozen dataclass

    @staticmethod
    def is_used(sink: Sink) -> bool:
        """Whether an outlet has the sink, and nothing has asked it to close."""
        last: Outlet | None = sink._outlet
        return last is not None and not last._is_closing

    async def open(self, engine: Engine, resume: Resume, pending: Sequence[Any]) -> None:
        """Start the thread, and wait for the sink to open for as long as it says.

        Args:
            engine: of the session; in virtual time there is no thread, and the sink may block.
            resume: for the sink.
            pending: of `state_dict`: what is to be written first.
        """
        points = restored(pending)
        with self._lock:
            early, self._queue = self._queue, {}
            for each in early.values():  # before the step was known
                first = self._queue.setdefault(resume.step, each)
                first.step, first.time = resume.step, _now(engine)
                first.add(each.values, each.num_bytes)
            self._again, self._position, self._engine = points, resume.position, engine
            self._last_step = max([resume.step, *(each.step for each in points)])
        self._opened = Slot(engine, f"the opening of {self.sink!r}")
        self._ended = Slot(engine, f"the last points of {self.sink!r}")
        if engine.is_virtual:
            self._is_open = self._open(resume)
            return
        name = f"asynchooks-{type(self.sink).__name__}"
        if self._queue or self._again:
            self._bell.put(None)
        self._thread = threading.Thread(target=self._serve, args=(resume,), name=name, daemon=True)
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
        num_bytes = sum([_size_of(each) for each in values.values() if type(each) is not float])
        with self._lock:
            if self._has_ended:
                self.num_dropped += 1
                return
            self._last_step = max(step, self._last_step)
            self._num_bytes += num_bytes
            queued = self._queue.get(step)
            if queued is not None:
                queued.add(values, num_bytes)
                return
            has_waited = bool(self._queue)
            self._queue[step] = _Queued(step, now, values, num_bytes)
            num = len(self._queue)
            num_dropped = 0
            if num > self._capacity * (_PATIENCE if self._is_resting else 1):
                num_dropped = self._thin()
            elif num_bytes and self._num_bytes > _ARRAY_BYTES:
                num_dropped = self._thin(with_arrays=True)
            is_first, self._is_thinned = not self._is_thinned, self._is_thinned or num_dropped > 0
        if num_dropped and is_first:
            logger.warning(
                "%r does not keep up: every second of the %d points that wait for it is dropped, "
                "whenever there are so many. Training goes on",
                self.sink, self._capacity if num > self._capacity else num,
            )  # fmt: skip
        if engine is None:
            return
        if engine.is_virtual:
            if len(self._queue) >= _VIRTUAL_BATCH:
                self._write_all()
        elif not has_waited or len(self._queue) == self._crowd:
            self._bell.put(None)

    def _thin(self, *, with_arrays: bool = False) -> int:
        """Drop every second point of the queue, or of those with arrays; returns how many.

        The newest one stays.
        """
        points = self._queue.values()
        dropped = [each for each in points if each.num_bytes or not with_arrays][::-1][1::2]
        self._set_queue({*self._queue} - {each.step for each in dropped})
        self.num_dropped += len(dropped)
        return len(dropped)

    def _waiting(self) -> list[_Queued]:
        """What waits, in the order in which it is written, in this process or in the next one."""
        return [*self._again, *sorted(self._queue.values(), key=_step_of)]

    def _drop_queue(self) -> None:
        self._drop([*self._again, *self._queue.values()])
        self._again = []
        self._set_queue(())

    def _drop(self, points: Iterable[_Queued]) -> None:
        """Count them."""
        self.num_dropped += sum(1 for each in points if each.values)

    def _set_queue(self, steps: Container[int]) -> None:
        """Keep the points of these steps."""
        self._queue = {step: each for step, each in self._queue.items() if step in steps}
        self._num_bytes = sum([each.num_bytes for each in self._queue.values()])

    def complete(self) -> None:
        """Let no value join the points that wait: the steps that follow are other ones."""
        with self._lock:
            self._again, self._queue, self._num_bytes = self._waiting(), {}, 0

    def rewind(self, step: int) -> None:
        """The session was set back to this step: what was put of later ones is to be forgotten."""
        with self._lock:
            if step >= self._last_step:
                return
            self._last_step = step
            self._set_queue({each for each in self._queue if each <= step})
            # what waits of later steps is not written first
            self._again = [each for each in self._again if each.step <= step] + [_Queued(step)]
        self._bell.put(None)

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
        assert self._ended is not None
        self._is_closing = True
        if engine.is_virtual:
            if not self._ended.is_woken:
                self._write_all()
                self._close()
            return
        self._bell.put(None)
        outcome = await engine.park(self._ended, until)
        if outcome is not TIMED_OUT and self._thread is not None:
            self._thread.join(_JOIN_SECS)
        with self._lock:
            if outcome is TIMED_OUT:
                self._is_abandoned = self._has_ended = True
                self._drop(self._unflushed)
                self._unflushed = []
                self._drop_queue()
        if outcome is TIMED_OUT:
            logger.warning(
                "%r did not take its last points in time and is left alone; %d points of this "
                "session were not written to it",
                self.sink, self.num_dropped,
            )  # fmt: skip
        elif self.num_dropped:
            logger.warning(
                "%d points of this session were not written to %r", self.num_dropped, self.sink
            )

    def drop(self) -> None:
        """Let the thread write what waits and end by itself; waits for nothing, takes no lock."""
        self._is_closing = True
        self._bell.put(None)

    # What follows is called in the thread, or in virtual time by the session's task.

    def _serve(self, resume: Resume) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.join()  # of a session before: it may be stuck in the sink
            if self._is_abandoned:
                return
        pause = _FIRST_PAUSE_SECS
        while not self._open(resume):
            if self._is_closing:
                break
            self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        else:
            self._is_open = True
            while not self._is_closing:
                self._is_resting = True
                self._bell.get()
                self._write_all()
                self._is_resting = True
                self._sleep(_CYCLE_SECS)
            self._write_all()
        self._close()

    def _sleep(self, secs: float) -> None:
        """Pause, but not once the outlet is to be closed, or its queue is filling."""
        assert self._engine is not None
        until = self._engine.now() + secs
        while not self._is_closing and (left := until - self._engine.now()) > 0:
            with suppress(Empty):
                self._bell.get(timeout=left)
            if len(self._queue) >= self._crowd and self._is_open:
                break
        if not self._is_closing and self._queue:
            self._bell.put(None)

    def _open(self, resume: Resume) -> bool:
        is_open = self._call(self.sink.open, resume)
        assert self._opened is not None
        self._opened.wake()
        return is_open

    def _write_all(self) -> None:
        if not self._is_open:
            return
        assert self._engine is not None
        now = self._engine.now
        flushed_at = now()
        while not self._is_abandoned:
            with self._lock:  # once for all of them: to wait for it may cost milliseconds
                self._is_resting = False
                items = self._waiting()
                self._again, self._queue, self._num_bytes = [], {}, 0
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
        each.is_written = self._call(lambda: self.sink.write(each.point()))
        if not each.is_written:
            with self._lock:
                if each in self._unflushed:
                    self._unflushed.remove(each)
                    self.num_dropped += 1

    def _flush(self) -> None:
        """Flush what was written."""
        if self._is_abandoned:
            return
        position: Any = None

        def flush() -> None:
            nonlocal position
            position = self.sink.flush()

        is_durable = self._call(flush)
        with self._lock:
            if self._is_abandoned:
                return
            if is_durable:
                self._position = position
            else:
                self._drop(each for each in self._unflushed if each.is_written)
            self._unflushed = [each for each in self._unflushed if not each.is_written]

    def _close(self) -> None:
        if self._is_open:
            self._call(self.sink.close)
        with self._lock:
            self._has_ended = True
            self._drop_queue()
        assert self._ended is not None
        self._ended.wake()

    def _call(self, fn: Callable[..., object], *args: Any) -> bool:
        """Call the sink; an error is logged if it is the first one. Whether it returned."""
        try:
            fn(*args)
        except BaseException as error:
            if not isinstance(error, Exception) and self._thread is None:
                raise  # in the session's task
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "%r failed, and may go on failing: what it does not take is dropped and "
                    "counted%s",
                    self.sink, ", and training goes on" if self._on_error is None else "",
                    exc_info=error,
                )  # fmt: skip
                if self._on_error is not None:
                    self._on_error(error)
            return False
        return True


def _now(engine: Engine) -> float:
    return engine.now() if engine.is_virtual else time.time()


def _size_of(value: Any) -> int:
    """In bytes, of an array."""
    size: int = getattr(value, "nbytes", 0)
    return size


def _step_of(each: _Queued) -> int:
    return each.step


def _saved(each: _Queued) -> dict[str, Any]:
    if not each.values:
        return {"rewind": each.step}
    values = {}
    for name, value in list(each.values.items()):
        is_number = isinstance(value, float)
        if not is_number and not isinstance(value, Histogram):
            value = each.values[name] = Histogram.of(value)  # once, however long it waits
        values[name] = value if is_number else value.state_dict()
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
