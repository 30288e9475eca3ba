"""TensorBoardSink: event files, shared with the hooks that write to the same directory."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from .. import _check
from ._event_files import Events, check, events_in, message_class, names_in
from ._sink import Histogram, Point, Resume, Sink
from ._tracking import need, position_of

_MAX_KNOWN = 100_000
"""Points before a restore that are looked at, at most: more than an outlet writes again."""


class TensorBoardSink(Sink):
    """Writes scalars and histograms for TensorBoard: float32 numbers under the metrics' names.

    Hooks of this process that write to the same directory (StepCounterHook, SummarySaverHook,
    EvaluationHook, ...) share its event file. It needs the extra `tensorboard`, not TensorFlow; in
    a session of a TensorFlow graph it writes to TensorFlow's cached writer.

    Where a session is restored, the points of later steps, which a killed process has written to
    the directory, stay in their files, and TensorBoard hides them; points that are there already
    are not written again. A new training (step 0) hides those of an earlier one alike: give each
    training a directory of its own to see both.

    Args:
        directory: for the event files; it is made where it is missing.

    Raises:
        TypeError: `directory` is no path.
        ImportError: in begin: TensorBoard is not installed.

    Example:
        hooks = [MetricsHook(TensorBoardSink("logs"), "loss", every_n_steps=100)]
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = _check.place("directory", directory)
        """Of the event files, absolute."""
        self._graph: Any = None  # of TensorFlow, which the session runs
        self._checked_at = math.inf  # when its session began to open
        self._events: Events | None = None
        self._forget(0)

    def __repr__(self) -> str:
        return f"TensorBoardSink({self.directory!r})"

    def check(self) -> None:
        self._checked_at = time.monotonic()
        tensorflow = sys.modules.get("tensorflow")
        is_graph = tensorflow is not None and not tensorflow.executing_eagerly()
        self._graph = tensorflow.compat.v1.get_default_graph() if tensorflow and is_graph else None
        need(repr(self), "tensorboard", "tensorboard")
        if self._graph is None:
            check(self.directory)

    def open(self, resume: Resume) -> None:
        self._forget(resume.step)
        names = names_in(self.directory)  # without the one that is opened next
        position = position_of(resume.position, "file")
        size = position.get("bytes")
        if type(size) is not int or size < 0:  # there is none, or it is of another kind of sink
            position, size = {}, 0
        has_later = self._read(names, position.get("file", ""), size)
        events = self._events = self._events or Events(self.directory)
        with nullcontext() if self._graph is None else self._graph.as_default():
            events.open("" if self._graph is None else self.directory)
        events.writer.flush()  # makes the file, and raises what is in the way of that
        if not events.has_begun:
            events.begin(resume.step if has_later else None, self._checked_at)
        events.writer.flush()  # before a checkpoint counts on it

    def write(self, point: Point) -> None:
        events, tags = self._events, point.values.keys()
        if tags <= self._known.get((point.step, point.time), set()):
            return  # it was written before the process was killed
        assert events is not None
        summary = message_class("summary_pb2", "Summary")()
        for name, value in point.values.items():
            if isinstance(value, Histogram):
                _fill(summary.value.add(tag=name).histo, value)
            else:
                summary.value.add(tag=name, simple_value=value)
        event = message_class("event_pb2", "Event")
        events.writer.add_event(event(step=point.step, wall_time=point.time, summary=summary))
        if events.file is not None:
            self._num_added = events.file.num_added

    def flush(self) -> Any:
        assert self._events is not None
        self._events.writer.flush()
        file = self._events.file
        if file is not None:
            return {"file": file.name, "bytes": file.size}
        *_, name = names_in(self.directory) or [""]  # none on another file system of TensorFlow's
        size = os.path.getsize(os.path.join(self.directory, name)) if name else 0
        return {"file": name, "bytes": size}

    def rewind(self, step: int) -> None:
        self._forget_known(step)
        assert self._events is not None
        file = self._events.file
        # a hook that shares the file may have done it, and have gone on since
        if file is None or not file.hides_after(step, self._num_added):
            self._events.hide_after(step)

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _forget(self, step: int) -> None:
        self._restored_step = step
        self._known: dict[tuple[int, float], set[str]] = {}  # metrics by step and time
        self._num_added = 0  # events in the writer, up to the last one of this sink

    def _read(self, names: list[str], first: str, start: int) -> bool:
        """Note what is there up to the restored step; whether there is something of later ones."""
        has_later, known = False, self._known
        for name in names:
            if name < first:
                continue
            for event in events_in(self.directory, name, start if name == first else 0):
                if event.HasField("session_log") and event.session_log.status == 1:  # START
                    self._forget_known(event.step - 1)
                if not event.HasField("summary"):
                    continue
                if event.step > self._restored_step:
                    has_later = True
                    if self._restored_step == 0 and not first:  # a new training
                        return True
                    continue
                known[event.step, event.wall_time] = {value.tag for value in event.summary.value}
                if len(known) > _MAX_KNOWN:
                    del known[next(iter(known))]
        return has_later

    def _forget_known(self, step: int) -> None:
        """What was of later steps is hidden."""
        for key in [key for key in self._known if key[0] > step]:
            del self._known[key]


def _fill(message: Any, value: Histogram) -> None:
    """Make a HistogramProto of it, whose bins begin at `min` and end at the limits."""
    if value.num:
        message.min, message.max = value.least, value.greatest
    message.num, message.sum, message.sum_squares = value.num, value.total, value.total_of_squares
    message.bucket_limit.extend(value.edges[1:].tolist())
    message.bucket.extend(value.counts.tolist())
