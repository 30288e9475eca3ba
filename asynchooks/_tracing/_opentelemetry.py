"""SpanRecorder: OpenTelemetry's spans of runs, hooks, evaluations, saves, tasks and calls.

Spans are current while what they are of goes on, so that those of other libraries become their
children, also in tasks that are started then. It exports nothing: that is the SDK's, which the
program configures. Only the API is imported.

Source: OpenTelemetry's conventions: names of few values, what differs in attributes in the
namespace `asynchooks`; `error.type` and the status Error where a span ended by an error.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from .._engine.base import Engine
from .._engine.recording import Kind, Place, Recorder, SessionRecord, Span
from ._runs import STEP, Run, RunRows

_SESSION = contexts.create_key("asynchooks-session")
_CANCELLATIONS = ("CancelledError", "Cancelled", "GeneratorExit")


class _OpenSpan(Span):
    """One span, current in the running task until it ends."""

    __slots__ = ("_below", "_has_ended", "_outer", "_place", "_span", "context")

    def __init__(
        self,
        tracer: Any,
        name: str,
        attributes: dict[str, Any],
        place: Place | None = None,
        parent: Any = None,
        *,
        is_session: bool = False,
    ) -> None:
        self._has_ended = False
        self._outer, self._below = _still_open(contexts.get_current(), _innermost.get())
        within = self._outer if parent is None else set_span_in_context(parent, self._outer)
        self._span = tracer.start_span(name, within, attributes=attributes)
        self.context = set_span_in_context(self._span, self._outer)
        if is_session:
            self.context = contexts.set_value(_SESSION, self._span, self.context)
        contexts.attach(self.context)
        _innermost.set(self)
        self._place = place
        if place is not None:
            place.enter()

    @property
    def span(self) -> Any:
        return self._span

    def end(self, error: BaseException | None = None, value: float = math.nan) -> None:
        if not math.isnan(value):
            self._span.set_attribute("asynchooks.value", value)
        end_span(self._span, error)
        self._has_ended = True
        # not `detach`: the task that ends it may be another than the one that began it
        if contexts.get_current() is self.context:
            self._outer, self._below = _still_open(self._outer, self._below)
            contexts.attach(self._outer)
            _innermost.set(self._below)
        if self._place is not None:
            self._place.leave()


_innermost: ContextVar[_OpenSpan | None] = ContextVar("asynchooks_innermost_span", default=None)


def _still_open(context: Any, span: _OpenSpan | None) -> tuple[Any, _OpenSpan | None]:
    """The context, or the first one outside of it that is of no span that has ended.

    Sessions of one task may end in any order, and one may open in a span of another.

    Args:
        context: that is to be current.
        span: whose context it may be.
    """
    while span is not None and span._has_ended and context is span.context:
        context, span = span._outer, span._below
    return context, span


def end_span(span: Any, error: BaseException | None, end_time: int | None = None) -> None:
    """End a span, by an error if there is one; a cancellation is none."""
    if error is not None:
        kind = type(error)
        if kind.__name__ in _CANCELLATIONS:
            span.set_attribute("asynchooks.cancelled", True)
        else:
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            span.set_attribute("error.type", f"{module}{kind.__qualname__}")
            span.set_status(Status(StatusCode.ERROR, str(error)))
            if isinstance(error, Exception):
                span.record_exception(error)
    span.end(end_time)


class SpanRecorder(Recorder):
    """Records by a tracer; the hook that is given the tracer makes it.

    Args:
        tracer: OpenTelemetry's.
        engine: whose clock decides whether a call of a hook is recorded.
        least_secs: calls of hooks that take less are left out.
    """

    def __init__(self, tracer: Any, engine: Engine, *, least_secs: float) -> None:
        self.tracer = tracer
        self.clock = engine.tick
        self.least_secs = least_secs
        self._num_sessions = 0

    def open_session(self, engine: Engine, name: str, step: Any) -> SessionRecord:
        self._num_sessions += 1
        place = Place.current()
        # what is opened in the block is in the file alone that is written beside
        own = None if place is not None and place.track is not None else Place(self)
        span = _OpenSpan(
            self.tracer, "session", {"asynchooks.session.name": name}, own, is_session=True
        )
        return _SpanSession(self, span, name, step)

    def end_session(self) -> None:
        self._num_sessions -= 1
        self.is_closed = self._num_sessions == 0

    def task_span(self, engine: Engine, kind: Kind, name: str, ident: int = -1) -> Span:
        # it may outlive the run in which it began
        return self._open(kind, name, ident, contexts.get_value(_SESSION))

    def work_span(
        self, engine: Engine | None, kind: Kind, name: str, worker: int | None = None
    ) -> Span:
        return self._open(kind, name, -1, None)

    def _open(self, kind: Kind, name: str, ident: int, parent: Any) -> Span:
        attributes: dict[str, Any] = {f"asynchooks.{kind.value}.name": name}
        if ident >= 0:
            attributes["asynchooks.item.place"] = ident & 0xFFFFFFFF
        title = f"{kind.value.replace('_', ' ')} {name}"
        return _OpenSpan(self.tracer, title, attributes, parent=parent)


class _SpanSession(RunRows):
    """The spans of one session; those of hooks are made when the run has ended."""

    def __init__(self, recorder: SpanRecorder, span: _OpenSpan, name: str, step: Any) -> None:
        super().__init__(recorder.clock)
        self._recorder, self._span, self._name, self._step = recorder, span, name, step
        self._run: _OpenSpan | None = None
        self._is_over = False

    def run_begins(self) -> None:
        attributes = {"asynchooks.session.name": self._name}
        self._run = _OpenSpan(self._recorder.tracer, "run", attributes)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        span, self._run, recorder = self._run, None, self._recorder
        if span is None:
            return
        then = time.time_ns() - round(1e9 * self._clock())  # when the clock was 0
        spans = zip(run.labels, pairwise(run.times), strict=False)
        for place, (label, (begun, ended)) in enumerate(spans, 2):
            its_error = error if place == len(run.times) else None
            is_long = ended - begun >= recorder.least_secs
            if label is not STEP and (is_long or its_error is not None):
                of_hook = recorder.tracer.start_span(
                    label.name,
                    span.context,
                    attributes=_of_hook(label.name),
                    start_time=then + round(1e9 * begun),
                )
                end_span(of_hook, its_error, then + round(1e9 * ended))
        if self._step is not None and not run.is_cut:
            span.span.set_attribute("asynchooks.global_step", self._step.last_known)
        span.end(error)

    def span(self, kind: Kind, name: str) -> Span:
        attributes: dict[str, Any] = {"asynchooks.session.name": self._name}
        if kind is Kind.HOOK:
            attributes |= _of_hook(name)
        return _OpenSpan(self._recorder.tracer, name, attributes)

    async def aclose(self, error: BaseException | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if not self._is_over:
            self._is_over = True
            self.cut_run(error)
            self._span.end(error)
            self._recorder.end_session()

    def drop(self) -> None:
        # spans may take locks: what is open stays open, and is not exported
        if not self._is_over:
            self._is_over = True
            self._recorder.end_session()


def _of_hook(name: str) -> dict[str, Any]:
    hook, _, moment = name.partition(".")
    return {"asynchooks.hook.name": hook, "asynchooks.hook.moment": moment}
