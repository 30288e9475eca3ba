"""record: write down a run, so that others can be planned."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from .. import _check
from .._engine.current import current_engine, engine_if_any
from .._engine.recording import Place, current_recorder
from .._errors import shown
from .._tracing._recorder import FileRecorder


class record:  # noqa: N801 - read as a statement: `with record("run.pftrace"):`
    """Record what runs in the block, and in tasks that it starts, into one file.

    Threads that a program starts itself take no part, unless they run in a copy of its context
    (`contextvars.copy_context().run`).

    Recorded are sessions with their runs, hooks and waits, stages of data, rollouts, saves,
    evaluations, pushes and pulls, and what `timed` and `span` name. The file is a list of
    Chrome's trace events, as `TraceHook` writes it: open it at https://ui.perfetto.dev, and read it
    with `Trace.read` or `Plan.read`. After a kill it lacks the last half second. Each process
    needs a file of its own.

    Works around `anyio.run` and within it; `with` and `async with` do the same, but the latter
    does not hold up the event loop while the last part is written. In a plan or where nothing is
    to be written it does nothing.

    Args:
        path: of the file; its directory is made. An existing file is replaced.
        settings: the arguments of the program, which a plan predicts first and lets others
            override: what JSON can hold, by name.
        name: of the process, in Perfetto; "": the program's.
        flush_secs: between two writes, > 0.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        IsADirectoryError: the path is a directory's.
        FileExistsError: it is that of a device, a pipe or a socket.
        RuntimeError: what runs here is recorded already, or this block was entered before.

    Example:
        with record("run.pftrace", settings={"concurrency": 16}):
            anyio.run(main, 16)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        settings: Mapping[str, Any] | None = None,
        name: str = "",
        flush_secs: float = 0.5,
    ) -> None:
        self._path = _check.path_of_file("path", path)
        self._settings = _checked_settings({} if settings is None else settings)
        self._name = _check.instance("name", name, str, "a text, such as 'worker 3'")
        self._flush_secs = _check.seconds("flush_secs", flush_secs)
        self._place: Place | None = None
        self._is_used = False

    def __enter__(self) -> None:
        if self._is_used:
            raise RuntimeError(
                f"record({self._path!r}) was entered before; make another one for another run"
            )
        self._is_used = True
        if (outer := current_recorder()) is not None:
            if outer.stand_in is not None:
                return  # a plan writes nothing
            raise RuntimeError(
                f"record({self._path!r}) is within another record; one run has one file a process"
            )
        engine = engine_if_any()
        is_virtual = engine is not None and engine.is_virtual
        recorder = FileRecorder(
            self._path,
            # in real time the builtin itself: a run with 4 hooks reads it 10 times
            engine.now if engine is not None and is_virtual else time.monotonic,
            is_virtual=is_virtual,
            closes_with_sessions=False,
            name=self._name,
            flush_secs=self._flush_secs,
        )
        recorder.describe("settings", self._settings)
        self._place = Place(recorder)
        self._place.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (recorder := self._left()) is not None:
            recorder.close()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (recorder := self._left()) is not None:
            await recorder.aclose(current_engine())

    def _left(self) -> Any:
        """What records here, if anything does."""
        place, self._place = self._place, None
        if place is None:
            return None
        place.leave()
        return place.recorder

    def __repr__(self) -> str:
        return f"record({self._path!r}, settings={self._settings!r})"


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    _check.instance("settings", settings, Mapping, "a dict of the program's arguments, by name")
    for name, value in settings.items():
        _check.instance("a name in settings", name, str, "the name of an argument")
        try:
            same = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            same = None
        if same != value and (same is None or not isinstance(value, tuple)):
            raise TypeError(
                f"settings[{name!r}] is {shown(value)}, which JSON does not hold as it is; give "
                "numbers, texts, booleans, None, lists, and dicts whose keys are texts"
            )
    return dict(settings)
