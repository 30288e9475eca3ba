"""TraceHook: what a trace shows of a session, and that training goes on whatever its file does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    TraceHook,
)
from asynchooks._engine.recording import recorded_in
from asynchooks._tracing import _recorder
from asynchooks._tracing._label import Label
from asynchooks.data import map_concurrent, prefetch, rollouts
from asynchooks.metrics._append import append_whole
from asynchooks.protocols import Asynchronous, ParameterServer, ProtocolHook
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..metrics.disks import AlmostFull
from ..simulation.engines import BACKENDS
from ..support.helpers import StartsTask, counting_creator, in_task, raises_at
from ..support.threads import own_threads
from .reading import Read, is_whole, read

pytestmark = pytest.mark.anyio


class Waits(SessionRunHook):
    """Waits in both moments of a run, so that its calls are long enough for the trace."""

    def __init__(self, secs: float = 0.001) -> None:
        self.secs = secs

    async def before_run(self, run_context: SessionRunContext) -> None:
        await anyio.sleep(self.secs)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await anyio.sleep(self.secs)


class Plain(SessionRunHook):
    """Its methods are no coroutines."""

    def before_run(self, run_context: SessionRunContext) -> None:
        time.sleep(0.0001)


class PlainToo(Plain):
    pass


async def train(
    path: Path, *hooks: SessionRunHook, num_runs: int = 3, creator: Any = None, **options: Any
) -> Read:
    """The trace of a session with these hooks."""
    session = MonitoredSession(
        [TraceHook(path / "run.pftrace", **options), *hooks],
        creator or counting_creator(),
        step_runner="inline",
    )
    async with session:
        for _ in range(num_runs):
            if not session.should_stop():
                await session.run([])
    return read(path / "run.pftrace")


async def test_runs_steps_and_long_calls_of_hooks_are_nested_spans(tmp_path: Path) -> None:
    found = await train(tmp_path, Waits())
    run = ["session/run", "session/run/Waits.before_run", "session/run/step",
           "session/run/Waits.after_run"]  # fmt: skip
    assert sorted(found.paths("session")) == sorted(["session", *(3 * run)])
    assert [value for _, value in found.counters["global step"]] == [1, 2, 3]


async def test_what_ends_and_what_begins_then_have_one_time(tmp_path: Path) -> None:
    found = await train(tmp_path, RecordingHook("a"), least_secs=0)
    for run in found.of("run"):
        parts = [each for each in found.slices if each.path.startswith("session/run/")]
        parts = [each for each in parts if run.begun <= each.begun < (run.ended or 0)]
        assert [each.begun for each in parts] == [run.begun, *(each.ended for each in parts[:-1])]
        assert parts[-1].ended == run.ended


async def test_short_calls_of_hooks_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    found = await train(tmp_path, RecordingHook("a"), least_secs=10)
    assert not found.of("RecordingHook.before_run")
    found = await train(tmp_path, RecordingHook("a"), least_secs=0, name="worker 3")
    assert len(found.of("RecordingHook.before_run")) == 3
    assert {each.track for each in found.of("run")} == {"worker 3"}


async def test_the_moments_of_a_session_are_spans(tmp_path: Path) -> None:
    found = await train(tmp_path, RecordingHook("a"), num_runs=0)
    moments = ["begin", "after_create_session", "end"]
    assert found.paths("session") == [
        "session", *(f"session/RecordingHook.{each}" for each in moments)
    ]  # fmt: skip


async def test_a_session_without_other_hooks_has_runs_and_steps(tmp_path: Path) -> None:
    found = await train(tmp_path)
    assert len(found.of("run")) == len(found.of("step")) == 3


async def test_plain_methods_have_spans_of_their_own(tmp_path: Path) -> None:
    found = await train(tmp_path, Plain(), PlainToo())
    assert len(found.of("Plain.before_run")) == len(found.of("PlainToo.before_run")) == 3


async def test_a_hook_that_raises_cuts_its_span_and_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"):
        await train(tmp_path, Waits(), raises_at("after_run", ValueError("bad")))
    found = read(tmp_path / "run.pftrace")
    assert found.of("session (cut)")
    assert [each.path for each in found.slices if "run" in each.path] == [
        "session (cut)/run (cut)",
        "session (cut)/run (cut)/Waits.before_run",
        "session (cut)/run (cut)/step",
        "session (cut)/run (cut)/Waits.after_run",
        "session (cut)/run (cut)/Raises.after_run (cut)",
    ]


async def test_a_run_that_is_cancelled_is_cut_where_it_waited(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with MonitoredSession([TraceHook(path), Waits(10)], counting_creator()) as session:
        with anyio.move_on_after(0.01):
            await session.run([])
    found = read(path)
    assert found.of("Waits.before_run (cut)")
    assert found.of("run (cut)")
    assert found.of("session")


async def test_a_run_that_is_made_again_is_cut_and_then_whole(tmp_path: Path) -> None:
    lost = ScriptedSession([PreemptionError("lost")])
    path = tmp_path / "run.pftrace"
    session = MonitoredSession(
        [TraceHook(path), RecordingHook("a")],
        ScriptedSessionCreator([lost, ScriptedSession()]),
        recovery=Recovery(first_pause_secs=0),
    )
    async with session:
        await session.run([])
    found = read(path)
    assert [each.name for each in found.slices if each.name.startswith("run")] == [
        "run (cut)", "run",
    ]  # fmt: skip
    assert len(found.of("RecordingHook.after_create_session")) == 2


async def test_evaluations_saves_and_side_tasks_are_spans(tmp_path: Path) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": 0.5}

    def evaluate_plainly(session: Any, step: int) -> dict[str, float]:
        return {"loss": 0.5}

    async def follow(coord: Any) -> None:
        await anyio.sleep(0.001)

    weights = {"w": np.zeros(3)}
    saver = CheckpointSaverHook(
        str(tmp_path / "ckpt"), save_steps=2, saver=StateDictSaver(arrays=weights), background=True
    )
    hooks = [EvaluationHook(evaluate, 2), EvaluationHook(evaluate_plainly, 2, name="alone"), saver,
             StartsTask(follow)]  # fmt: skip
    found = await train(tmp_path, *hooks)
    assert {"eval", "session", "write a checkpoint"} <= {each.track for each in found.slices}
    assert found.of("EvaluationHook: evaluate")
    assert found.of("CheckpointSaverHook: save")
    assert [each.name for each in found.slices if "follow" in each.name]


async def test_a_side_task_that_fails_is_cut(tmp_path: Path) -> None:
    async def fails(coord: Any) -> None:
        raise ValueError("away")

    class Starts(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(fails, coord, on_failure=OnFailure.LOG, name="report")

    found = await train(tmp_path, Starts(), Waits())
    assert found.of("report (cut)")


async def test_waits_of_tasks_with_a_track_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with MonitoredSession([TraceHook(path), Waits()], counting_creator()) as session:
        session.start_soon(session.global_step.wait_for, 2, name="follow")
        for _ in range(3):
            await session.run([])
    [wait] = [each for each in read(path).slices if each.track == "follow" and "/" in each.path]
    assert wait.path == "follow/wait for global_step N"


async def test_waits_are_not_recorded_after_the_session(tmp_path: Path) -> None:
    await train(tmp_path)
    assert recorded_in.get() is None


async def answer(item: int) -> int:
    await anyio.sleep(0.0001)
    return item


async def test_calls_of_rollouts_have_arrows_to_the_runs_that_use_them(tmp_path: Path) -> None:
    groups = rollouts(answer, range(20), 2, concurrency=3, max_staleness=2)
    creator = FunctionSessionCreator(lambda groups: {})
    found = await train(tmp_path, FeedHook(groups, "groups"), creator=creator)
    calls = found.of("answer")
    assert {each.track for each in calls} == {"answer", "answer 2", "answer 3"}
    begun = {flow: each.begun for each in calls for flow in each.flows}
    uses = [each for each in found.instants if each.name == "use"]
    assert len(uses) == 6
    assert all(begun[each.flows[0]] <= each.begun for each in uses)
    assert found.counters["staleness"]


async def test_a_call_that_takes_longer_than_a_flush_has_one_arrow(tmp_path: Path) -> None:
    async def think(item: int) -> int:
        await anyio.sleep(0.05)
        return item

    groups = rollouts(think, range(4), 2, concurrency=2, max_staleness=1)
    creator = FunctionSessionCreator(lambda groups: {})
    hook = FeedHook(groups, "groups")
    found = await train(tmp_path, hook, creator=creator, num_runs=2, flush_secs=0.005)
    calls = [each for each in found.of("think") if each.track.startswith("think")]
    assert [len(each.flows) for each in calls] == [1] * len(calls)
    uses = [each for each in found.instants if each.name == "use"]
    assert {each.flows for each in uses} <= {each.flows for each in calls}


@pytest.mark.parametrize("is_async", [True, False])
async def test_calls_and_reads_of_stages_are_spans(tmp_path: Path, is_async: bool) -> None:
    def double(item: int) -> int:
        return 2 * item

    fn: Callable[[int], Any] = answer if is_async else double
    items = prefetch(map_concurrent(fn, range(10), concurrency=2), 2)
    creator = FunctionSessionCreator(lambda item: {})
    found = await train(tmp_path, FeedHook(items, "item"), creator=creator)
    assert len(found.of("answer" if is_async else "double")) >= 3
    assert found.of("prefetch: read map_concurrent")


async def test_a_call_that_fails_is_cut(tmp_path: Path) -> None:
    async def fails(item: int) -> int:
        raise ValueError("bad item")

    items = map_concurrent(fails, range(3), concurrency=1)
    with pytest.raises(ValueError, match="bad item"):
        await train(tmp_path, FeedHook(items, "item"))
    assert read(tmp_path / "run.pftrace").of("fails (cut)")


async def test_how_full_a_stage_is_is_read_at_each_flush(tmp_path: Path) -> None:
    items = prefetch(range(1000), 4)
    creator = FunctionSessionCreator(lambda item: {})
    found = await train(
        tmp_path, FeedHook(items, "item"), Waits(0.01), creator=creator, flush_secs=0.005
    )
    held = [value for _, value in found.counters["prefetch: items held"]]
    assert held
    assert max(held) <= 4


async def test_pushes_and_pulls_of_a_parameter_server_are_marked(tmp_path: Path) -> None:
    server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=1)

    async def step() -> dict[str, Any]:
        parameters, version = server.pull(0)
        server.push(0, parameters + 1, version)
        return {"global_step": server.version}

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    found = await train(tmp_path, ProtocolHook(server, 0), creator=creator)
    assert [each.name for each in found.instants] == ["pull", "push", "update"] * 3
    assert [value for _, value in found.counters["pull: version"]] == [0, 1, 2]
    assert [value for _, value in found.counters["push: staleness"]] == [0, 0, 0]


async def test_one_hook_records_several_sessions_into_one_file(tmp_path: Path) -> None:
    hook = TraceHook(tmp_path / "run.pftrace")
    creator = SharedSessionCreator(counting_creator())

    async def worker() -> None:
        async with MonitoredSession([hook, Waits(), StopAtStepHook(20)], creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(worker)
    found = read(tmp_path / "run.pftrace")
    assert {each.track for each in found.of("run")} == {"session", "session 2", "session 3"}
    assert len(found.of("run")) == 20
    assert found.counters["global step"][-1][1] == 20


async def test_sessions_in_the_block_are_recorded_and_others_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    async with MonitoredSession([TraceHook(tmp_path / "a")], counting_creator()) as outer:
        await outer.run([])
        async with MonitoredSession([], counting_creator()) as inner:
            await inner.run([])
        async with MonitoredSession([TraceHook(tmp_path / "b")], counting_creator()) as other:
            await other.run([])
    assert len(read(tmp_path / "a").of("run")) == 3
    assert len(read(tmp_path / "b").of("run")) == 1


async def test_a_file_grows_while_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    hooks = [TraceHook(path, flush_secs=0.01), Waits()]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])
        with anyio.fail_after(10):
            # a thread writes it
            while not path.exists() or not read(path, is_cut=True).of("run"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        found = read(path, is_cut=True)
        assert found.of("session")
        assert found.num_open == 1


async def test_an_existing_file_is_replaced_and_directories_are_made(tmp_path: Path) -> None:
    path = tmp_path / "traces"
    for _ in range(2):
        found = await train(path)
        assert len(found.of("run")) == 3


async def test_a_dropped_session_ends_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    session = MonitoredSession([TraceHook(path, flush_secs=0.01)], counting_creator())
    await session.__aenter__()
    await session.run([])
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        del session
    recorded_in.set(None)
    for thread in own_threads("asynchooks-trace"):
        thread.join(10)
        assert not thread.is_alive()
    assert len(read(path, is_cut=True).of("run")) == 1


async def test_a_disk_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_writes = tmp_path / "run.pftrace", 0

    def full(file: Any, data: bytes, size: int) -> int:
        nonlocal num_writes
        num_writes += bool(data)
        if num_writes >= 3:  # it takes a part of a chunk
            file = AlmostFull(file, OSError(28, "No space left on device"))
        return append_whole(file, data, size)

    monkeypatch.setattr("asynchooks._tracing._file.append_whole", full)
    hooks = [TraceHook(path, flush_secs=0.005), Waits()]
    async with MonitoredSession(hooks, counting_creator()) as session:
        while num_writes < 3:
            await session.run([])
        for _ in range(10):
            await session.run([])
    said = [each for each in caplog.records if "cannot be written" in each.message]
    assert len(said) == 1
    assert "No space left" in said[0].message
    read(path, is_cut=True)
    assert is_whole(path)
    assert num_writes == 3


async def test_a_directory_that_cannot_be_made_is_said_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    hook = TraceHook(tmp_path / "file" / "run.pftrace")
    async with MonitoredSession([hook], counting_creator()) as session:
        for _ in range(3):
            await session.run([])
    assert len([each for each in caplog.records if "cannot be written" in each.message]) == 1


async def test_a_stuck_disk_costs_bounded_memory_and_the_end_of_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_stuck = threading.Event(), threading.Event()

    def stuck(file: Any, data: bytes, size: int) -> int:
        is_stuck.set()
        goes_on.wait(30)
        return append_whole(file, data, size)

    monkeypatch.setattr("asynchooks._tracing._file.append_whole", stuck)
    monkeypatch.setattr("asynchooks._tracing._file._GRACE_SECS", 0.05)
    monkeypatch.setattr(_recorder, "MOST_ROWS", 10)
    monkeypatch.setattr(_recorder, "MOST_EVENTS", 10)
    hook = TraceHook(tmp_path / "run.pftrace", flush_secs=0.001)
    async with MonitoredSession([hook], counting_creator()) as session:
        session.start_soon(session.global_step.wait_for, 10**6)
        while not is_stuck.is_set():
            await session.run([])
        for _ in range(1000):
            await session.run([])
        session.request_stop()
    assert "was not written to its end" in caplog.text
    goes_on.set()
    for thread in own_threads("asynchooks-trace"):
        thread.join(10)
    assert len([each for each in caplog.records if "its disk is too slow" in each.message]) == 1
    found = read(tmp_path / "run.pftrace")
    assert len(found.of("run")) < 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_simulation_is_recorded_in_virtual_time(tmp_path: Path, backend: Any) -> None:
    simulation = Simulation(backend=backend)
    path = tmp_path / "run.pftrace"

    class Sleeps(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            await simulation.sleep(1.0)

    async def step() -> dict[str, float]:
        await simulation.sleep(2.0)
        return {"loss": 0.5}

    async def main() -> None:
        hooks = [TraceHook(path, least_secs=0.5), Sleeps(), StopAtStepHook(5)]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            session.start_soon(session.global_step.wait_for, 2, name="follow")
            while not session.should_stop():
                await session.run([])

    simulation.run(main)
    found = read(path)
    assert [(each.begun, each.ended) for each in found.of("run")] == [
        (0, 3), (3, 6), (6, 9), (9, 12), (12, 15),
    ]  # fmt: skip
    assert [(each.path, each.begun) for each in found.of("step")] == [
        ("session/run/step", 3 * number + 1) for number in range(5)
    ]
    [wait] = found.of("wait for global_step N")
    assert (wait.begun, wait.ended) == (0, 6)
    assert [value for _, value in found.counters["global step"]] == [1, 2, 3, 4, 5]


async def test_a_run_by_another_task_does_not_cross_a_wait_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with MonitoredSession([TraceHook(path), Waits()], counting_creator()) as session:

        async def run_all() -> None:
            for _ in range(3):
                await session.run([])

        async with in_task(run_all):
            await session.global_step.wait_for(2)
    found = read(path)
    assert len(found.of("run")) == len(found.of("step")) == 3
    assert {each.path for each in found.of("step")} == {"session/run/step"}


async def test_batches_of_a_session_are_read_within_a_recorded_session(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with MonitoredSession([TraceHook(path), Waits()], counting_creator()) as session:
        async for _ in session.batches(range(3)):
            await session.run([])
    found = read(path)
    assert len(found.of("run")) == 3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (TraceHook, "neither a path nor a tracer"),
        (lambda: TraceHook(3), "the path of a file"),  # type: ignore[arg-type]
        (lambda: TraceHook("a", name=3), "a text"),  # type: ignore[arg-type]
        (partial(TraceHook, "a", least_secs=-1), "seconds >= 0"),
        (partial(TraceHook, "a", flush_secs=0), "seconds > 0"),
        (partial(TraceHook, tracer="mine"), "get_tracer"),
        (partial(TraceHook, "run.pftrace", tracer="mine"), "list both hooks"),
    ],
)
def test_what_cannot_be_recorded_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make()


async def test_by_hand_nothing_is_recorded(tmp_path: Path) -> None:
    await TraceHook(tmp_path / "run.pftrace").begin()
    assert not (tmp_path / "run.pftrace").exists()


async def test_a_bug_of_ours_ends_the_trace_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(_recorder.FileRecorder, "_chunk", breaks)
    with caplog.at_level(logging.ERROR):
        async with MonitoredSession([TraceHook(tmp_path / "a")], counting_creator()) as session:
            await session.run([])
    assert "by an error of asynchooks" in caplog.text


async def test_two_steps_have_counters_of_their_own_while_their_sessions_are_open(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.pftrace"
    async with MonitoredSession([TraceHook(path)], counting_creator()) as outer:
        await outer.run([])
        async with MonitoredSession([], counting_creator()) as inner:
            for _ in range(5):
                await inner.run([])
    found = read(path)
    assert found.counters["global step"][-1][1] == 1
    assert found.counters["global step 2"][-1][1] == 5


async def test_a_long_span_shows_while_it_goes_on_and_says_that_it_was_cut(
    tmp_path: Path,
) -> None:
    path, goes_on = tmp_path / "run.pftrace", anyio.Event()

    async def task() -> None:
        await goes_on.wait()
        raise ValueError("away")

    hooks = [TraceHook(path, flush_secs=0.005), Waits()]
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.start_soon(task, name="report", on_failure=OnFailure.LOG)
        with anyio.fail_after(10):
            while not path.exists() or not read(path, is_cut=True).of("report"):
                await session.run([])
        goes_on.set()
        await session.run([])
    found = read(path)
    [report] = [each for each in found.slices if each.track == "report"]
    assert report.is_cut


def test_a_span_may_be_ended_while_the_recorder_is_busy_in_the_same_thread(tmp_path: Path) -> None:
    """The garbage collector may close a coroutine, and so end its span, at any allocation."""

    async def main() -> None:
        async with MonitoredSession([TraceHook(tmp_path / "a")], counting_creator()):
            place = recorded_in.get()
            assert place is not None
            recorder = place.recorder
            assert isinstance(recorder, _recorder.FileRecorder)
            span = recorder.span_on("task", Label("call"))
            with recorder.lock:
                span.end(GeneratorExit())

    anyio.run(main)
    assert read(tmp_path / "a").of("call (cut)")
