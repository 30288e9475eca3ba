"""SeveralRecorders: a file and a tracer at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._engine.base import Engine
from .._engine.recording import Kind, Recorder, SessionRecord, Span, recorded_in


class _SeveralSpans(Span):
    __slots__ = ("_spans",)

    def __init__(self, spans: Iterable[Span | None]) -> None:
        self._spans = [each for each in spans if each is not None]

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        for each in reversed(self._spans):
            each.end(error, value)


class _SeveralRecords(SessionRecord):
    def __init__(self, records: Sequence[SessionRecord]) -> None:
        self._records = records

    def around_runs(
        self, before_runs: tuple[Any, ...], after_runs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        for each in self._records:
            before_runs, after_runs = each.around_runs(before_runs, after_runs)
        return before_runs, after_runs

    def cut_run(self, error: BaseException) -> None:
        for each in self._records:
            each.cut_run(error)

    def span(self, kind: Kind, name: str) -> Span:
        return _SeveralSpans([each.span(kind, name) for each in self._records])

    async def aclose(self, error: BaseException | None) -> None:
        for each in reversed(self._records):
            await each.aclose(error)

    def drop(self) -> None:
        for each in self._records:
            each.drop()


class SeveralRecorders(Recorder):
    """Records by all of these; of those that keep tracks of tasks there is one at most."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders

    @property
    def is_closed(self) -> bool:  # type: ignore[override] # read-only here
        return all(each.is_closed for each in self._recorders)

    def open_session(self, engine: Engine, name: str, step: Any) -> SessionRecord:
        outer = recorded_in.get()
        records = [each.open_session(engine, name, step) for each in self._recorders]
        place = recorded_in.get()
        if place is not None and place is not outer:
            place.recorder = self  # in which all take part
        return _SeveralRecords(records)

    def _spans(self, begin: Callable[[Recorder], Span | None]) -> Span:
        return _SeveralSpans(map(begin, self._recorders))

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        return self._spans(lambda each: each.task_span(engine, kind, name, ident))

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        return self._spans(lambda each: each.work_span(engine, kind, name, worker))

    def wait(self, engine: Engine, what: str) -> Span:
        return self._spans(lambda each: each.wait(engine, what))

    def use(self, engine: Engine, ident: int, staleness: float) -> None:
        for each in self._recorders:
            each.use(engine, ident, staleness)

    def mark(self, engine: Engine, name: str, value: float, worker: int | None = None) -> None:
        for each in self._recorders:
            each.mark(engine, name, value, worker)

    def describe(self, key: str, value: Any) -> None:
        for each in self._recorders:
            each.describe(key, value)

    def watch(self, name: str, read: Callable[[], float | None]) -> None:
        for each in self._recorders:
            each.watch(name, read)
