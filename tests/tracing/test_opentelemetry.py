"""TraceHook with a tracer: OpenTelemetry's SDK gets spans with the right parents."""

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from asynchooks import (
    EvaluationHook,
    FeedHook,
    MonitoredSession,
    OnFailure,
    SessionRunHook,
    TraceHook,
)
from asynchooks._engine.recording import recorded_in
from asynchooks.data import rollouts

from ..hooks.training import run_session
from ..support.helpers import cancelled_when_settled, counting_creator, raises_at
from .reading import read
from .test_trace_hook import Waits


class Exported:
    """A tracer, and the spans that it has ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    @property
    def spans(self) -> dict[int, ReadableSpan]:
        found = {}
        for each in self._exporter.get_finished_spans():
            assert each.context is not None
            found[each.context.span_id] = each
        return found

    def path(self, span: ReadableSpan) -> str:
        above = "" if span.parent is None else f"{self.path(self.spans[span.parent.span_id])}/"
        return f"{above}{span.name}"

    def paths(self) -> Counter[str]:
        return Counter(map(self.path, self.spans.values()))

    def of(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans.values() if each.name == name]


async def train(exported: Exported, *hooks: SessionRunHook) -> None:
    hook = TraceHook(tracer=exported.tracer, name="worker 3")
    await run_session([hook, *hooks], runs=2, step_runner="inline")


async def test_runs_and_long_calls_of_hooks_are_spans_in_that_of_the_session() -> None:
    exported = Exported()
    await train(exported, Waits())
    assert exported.paths() == {
        "session": 1,
        "session/run": 2,
        "session/run/Waits.before_run": 2,
        "session/run/Waits.after_run": 2,
    }
    first, second = exported.of("run")
    assert first.attributes == {"asynchooks.session.name": "worker 3", "asynchooks.global_step": 1}
    assert second.attributes is not None
    assert second.attributes["asynchooks.global_step"] == 2
    assert exported.of("Waits.before_run")[0].attributes == {
        "asynchooks.hook.name": "Waits", "asynchooks.hook.moment": "before_run",
    }  # fmt: skip
    assert {each.status.status_code for each in exported.spans.values()} == {StatusCode.UNSET}
    assert not trace.get_current_span().is_recording()


async def test_spans_of_the_program_are_children_of_what_they_are_made_in() -> None:
    exported = Exported()

    async def ask(item: int) -> int:
        with exported.tracer.start_as_current_span("request"):
            await anyio.lowlevel.checkpoint()
        return item

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        with exported.tracer.start_as_current_span("read"):
            return {"loss": 0.5}

    async def step(groups: Any) -> dict[str, float]:
        with exported.tracer.start_as_current_span("update"):
            return {"loss": 0.5}

    groups = rollouts(ask, range(8), 2, concurrency=2, max_staleness=2)
    hooks = [TraceHook(tracer=exported.tracer), FeedHook(groups, "groups"),
             EvaluationHook(evaluate, 1, at_end=False)]  # fmt: skip
    await run_session(hooks, step, runs=2)
    found = exported.paths()
    assert found["session/run/update"] == 2
    assert found["session/call ask/request"] >= 4
    assert found["session/side task eval/evaluation eval/read"] >= 1
    places = [each.attributes["asynchooks.item.place"]
              for each in exported.of("call ask") if each.attributes]  # fmt: skip
    assert {0, 1} <= set(places)


async def test_an_error_is_the_status_of_the_spans_that_it_ended_and_a_cancellation_is_none() -> (
    None
):
    exported = Exported()
    with pytest.raises(ValueError, match="bad"):
        await train(exported, raises_at("after_run", ValueError("bad")))
    for name in ("Raises.after_run", "run", "session"):
        [span] = exported.of(name)
        assert span.status.status_code is StatusCode.ERROR
        assert dict(span.attributes or {})["error.type"] == "ValueError"
        assert [each.name for each in span.events] == ["exception"]
    exported = Exported()
    assert await cancelled_when_settled(train, exported, Waits(10))
    [span] = exported.of("run")
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {})["asynchooks.cancelled"] is True


@pytest.mark.parametrize("is_file_first", [True, False])
async def test_a_file_beside_a_tracer_has_the_same_runs_and_the_side_tasks(
    tmp_path: Path, is_file_first: bool
) -> None:
    exported = Exported()
    pair = [TraceHook(tmp_path / "run.pftrace"), TraceHook(tracer=exported.tracer)]
    hooks = [*(pair if is_file_first else pair[::-1]), Waits()]
    async with MonitoredSession(hooks, counting_creator(), step_runner="inline") as session:
        session.start_soon(fail_to_report, on_failure=OnFailure.LOG, name="report")
        await session.run([])
    found = read(tmp_path / "run.pftrace")
    assert found.of("report (cut)")
    assert not exported.of("side task report")
    assert found.paths("session").count("session/run") == 1
    assert exported.paths()["session/run/Waits.before_run"] == 1
    assert len(found.of("Waits.before_run")) == 1


async def fail_to_report() -> None:
    raise ConnectionError("away")


@pytest.mark.parametrize("is_last_first", [True, False])
async def test_sessions_that_end_in_any_order_leave_no_recorder_and_no_span_current(
    tmp_path: Path, is_last_first: bool
) -> None:
    exported = Exported()
    tracer = exported.tracer
    hooks = [[TraceHook(tmp_path / name), TraceHook(tracer=tracer)] for name in ("outer", "inner")]
    sessions = [MonitoredSession(both, counting_creator()) for both in hooks]
    for each in sessions:
        await each.open()
        await each.run([])
    for each in reversed(sessions) if is_last_first else sessions:
        await each.close()
        with tracer.start_as_current_span("after"):
            pass
    assert recorded_in.get() is None  # private: nothing public shows it
    assert not trace.get_current_span().get_span_context().is_valid
    first, second = exported.of("after")
    assert second.parent is None
    assert exported.path(first).startswith("session/" if is_last_first else "")
    assert "TraceHook.begin/after" not in exported.path(first)
