"""TraceHook: a live trace of a session, in a file for Perfetto, or as OpenTelemetry's spans."""

from __future__ import annotations

import os
from typing import Any

from .. import _check
from .._engine.base import Engine
from .._engine.current import current_engine
from .._engine.recording import Recorder
from .._hook import SessionHooks, SessionRunHook


class TraceHook(SessionRunHook):
    """Records when runs, steps, calls of hooks and waits begin and end, while training goes on.

    Recorded are the hook's session, and what is opened in its block: stages of data, side tasks,
    evaluations, other sessions. List it first: of the hooks before it `begin` is missing. Open the
    file at https://ui.perfetto.dev, also while it grows; after a kill it lacks the last half
    second. An existing file is replaced. Sessions that overlap in time may share one hook, and so
    its file, which ends with the last of them. Within `planning.record` the file has the session
    alone, with its runs and hooks: what else happens there is in that record.

    For a file and spans of OpenTelemetry list two hooks: both record the session with its runs and
    hooks, and what is opened in its block is in the file alone.

    A thread writes. Where the disk is full the file ends, the log says so, and training goes on;
    where it is too slow, runs are missing from the trace.

    Args:
        path: of the file; its directory is made. None: there is none, but a tracer.
        tracer: an OpenTelemetry tracer (`opentelemetry.trace.get_tracer(...)`), in place of a path.
            Its spans are made while training runs, so that spans of yours become their children.
        name: of the session, and of its track.
        least_secs: calls of hooks in runs, and waits, that take less are left out; seconds >= 0.
        flush_secs: between two writes, > 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range, or not exactly
            one of a path and a tracer is given.
        ImportError: a tracer was given, and OpenTelemetry is not installed.

    Example:
        async with MonitoredSession([TraceHook("run.pftrace")], creator) as session:
            await session.run("loss")
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("path", "_given"), ("tracer", "_tracer"), ("name", "_name"))

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tracer: Any = None,
        name: str = "session",
        least_secs: float = 10e-6,
        flush_secs: float = 0.5,
    ) -> None:
        if (path is None) == (tracer is None):
            given = "neither a path nor a tracer" if path is None else "both a path and a tracer"
            raise ValueError(
                f"TraceHook got {given}; give TraceHook('run.pftrace'), or "
                "TraceHook(tracer=opentelemetry.trace.get_tracer('training')), or list both hooks"
            )
        self._path = None if path is None else _check.path_of_file("path", path)
        self._given = None if path is None else os.fspath(path)
        self._tracer = tracer
        if tracer is not None and not callable(getattr(tracer, "start_span", None)):
            raise TypeError(
                f"tracer is {tracer!r}; give opentelemetry.trace.get_tracer('training')"
            )
        self._name = _check.instance("name", name, str, "a text, such as 'worker 3'")
        self._least_secs = _check.seconds("least_secs", least_secs, zero=True)
        self._flush_secs = _check.seconds("flush_secs", flush_secs)
        self._recorder: Recorder | None = None  # of the sessions that are open
        self._process = -1  # which made it

    async def begin(self) -> None:
        shared = SessionHooks.of(self)
        if shared.is_by_hand:
            return  # there is no session to record
        # in a forked process the recorder is the parent's
        is_ours = self._process == os.getpid()
        if self._recorder is None or self._recorder.is_closed or not is_ours:
            self._recorder, self._process = self._new_recorder(current_engine()), os.getpid()
        shared.record(self._recorder, self._name)

    def _new_recorder(self, engine: Engine) -> Recorder:
        if self._path is None:
            from .._tracing._opentelemetry import SpanRecorder

            return SpanRecorder(self._tracer, engine, least_secs=self._least_secs)
        from .._tracing._recorder import FileRecorder

        return FileRecorder(
            self._path,
            # of real time one clock for all threads and processes of the machine
            engine.now if engine.is_virtual else engine.tick,
            is_virtual=engine.is_virtual,
            least_secs=self._least_secs,
            flush_secs=self._flush_secs,
        )
