"""TraceHook: what a trace shows of a session, and that training goes on whatever its file does.

Private is what makes a disk stuck and a limit small, and what a task is recorded by: nothing
public shows these.
"""

import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
    TraceHook,
)
from asynchooks._engine.recording import recorded_in
from asynchooks._tracing import _recorder
from asynchooks._tracing._label import Label
from asynchooks.data import map_concurrent, prefetch, rollouts
from asynchooks.metrics._append import append_whole
from asynchooks.protocols import Asynchronous, ProtocolHook
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook, ScriptedSessionCreator

from ..hooks.preemptions import saving
from ..hooks.training import run_session
from ..metrics.disks import AlmostFull
from ..protocols.worlds import make_server
from ..simulation.engines import BACKENDS
from ..support.helpers import cancelled_when_settled, counting_creator, in_task, raises_at
from ..support.kept import Model
from ..support.moments import NOW, losing, together
from ..support.moments import train as run_until_stopped
from ..support.step_loops import run_steps
from ..support.threads import own_threads
from .reading import Read, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces" / "run.pftrace"


def written(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


class Waits(SessionRunHook):
    """Waits in both moments of a run, so that its calls are long enough for the trace."""

    def __init__(self, secs: float = 0.001) -> None:
        self.secs = secs

    async def before_run(self, run_context: SessionRunContext) -> None:
        await anyio.sleep(self.secs)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await anyio.sleep(self.secs)


class Follows(SessionRunHook):
    """A task beside it waits for the second step."""

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        coord.start_soon(session.global_step.wait_for, 2, name="follow")


async def sleepy(item: int) -> int:
    await anyio.sleep(0.0001)
    return item


async def train(
    path: Path, *hooks: SessionRunHook, num_runs: int = 3, creator: Any = None, **options: Any
) -> Read:
    """The trace of a session with these hooks, and no others that would show in it."""
    hooks = (TraceHook(path, **options), *hooks)
    await run_session(hooks, creator, runs=num_runs, step_runner="inline")
    return read(path)


async def test_runs_steps_and_long_calls_of_hooks_are_nested_spans(path: Path) -> None:
    await TraceHook(path).begin()  # by hand nothing is recorded
    assert not written(path)
    for _ in range(2):  # an existing file is replaced, and directories are made
        found = await train(path, Waits())
        run = ["session/run", "session/run/Waits.before_run", "session/run/step",
               "session/run/Waits.after_run"]  # fmt: skip
        assert sorted(found.paths("session")) == sorted(["session", *(3 * run)])
        assert [value for _, value in found.counters["global step"]] == [1, 2, 3]


async def test_short_calls_of_hooks_and_waits_are_left_out_unless_asked_for(path: Path) -> None:
    plain: Any = type("Plain", (SessionRunHook,), {"before_run": lambda *_: None})

    hooks = [RecordingHook("a"), plain(), Follows(), Waits()]
    found = await train(path, *hooks, least_secs=10)
    assert not found.of("wait for global_step N")
    assert {each for each in found.paths("session") if "run" in each} == {
        "session/run",
        "session/run/step",
    }
    found = await train(path, *hooks, least_secs=0, name="worker 3")
    assert found.of("wait for global_step N")
    assert len(found.of("RecordingHook.before_run")) == len(found.of("Plain.before_run")) == 3
    for moment in ("begin", "after_create_session", "end"):
        assert [each.track for each in found.of(f"RecordingHook.{moment}")] == ["worker 3"]


async def test_a_hook_that_raises_cuts_its_span_and_the_run(path: Path) -> None:
    with pytest.raises(ValueError, match="bad"):
        await train(path, Waits(), raises_at("after_run", ValueError("bad")))
    found = read(path)
    assert found.of("session (cut)")
    assert [each.path for each in found.slices if "run" in each.path] == [
        "session (cut)/run (cut)",
        "session (cut)/run (cut)/Waits.before_run",
        "session (cut)/run (cut)/step",
        "session (cut)/run (cut)/Waits.after_run",
        "session (cut)/run (cut)/Raises.after_run (cut)",
    ]


async def test_a_run_that_is_cancelled_is_cut_where_it_waited(path: Path) -> None:
    async with MonitoredSession([TraceHook(path), Waits(10)], counting_creator()) as session:
        assert await cancelled_when_settled(session.run, [])
    found = read(path)
    assert found.of("Waits.before_run (cut)")
    assert found.of("run (cut)")
    assert found.of("session")


async def test_a_run_that_is_made_again_is_cut_and_then_whole(path: Path) -> None:
    creator = ScriptedSessionCreator(losing())
    hooks = [TraceHook(path), RecordingHook("a")]
    await run_session(hooks, creator, runs=1, recovery=NOW)
    found = read(path)
    names = [each.name for each in found.slices]
    assert [each for each in names if each.startswith("run")] == ["run (cut)", "run"]
    assert names.count("RecordingHook.after_create_session") == 2


async def test_evaluations_saves_and_side_tasks_are_spans(tmp_path: Path) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": 0.5}

    found = await train(
        tmp_path / "run.pftrace",
        EvaluationHook(evaluate, 2),
        EvaluationHook(lambda session, step: {"loss": 0.5}, 2, name="alone"),
        saving(tmp_path / "ckpt", Model(), 2, background=True),
        Follows(),
    )
    assert {"eval", "session", "write a checkpoint", "follow"} <= {
        each.track for each in found.slices
    }
    for name in ("EvaluationHook: evaluate", "CheckpointSaverHook: save"):
        assert [each for each in found.slices if name in each.name]


@pytest.mark.parametrize("secs", [0.0001, 0.05])  # a long one is written in two parts
async def test_calls_of_rollouts_have_one_arrow_each_to_the_run_that_uses_them(
    path: Path, secs: float
) -> None:
    async def answer(item: int) -> int:
        await anyio.sleep(secs)
        return item

    groups = rollouts(answer, range(20), 2, concurrency=3, max_staleness=2)
    found = await train(
        path, FeedHook(groups, "groups"), creator=lambda groups: {}, flush_secs=0.005
    )
    calls = found.of("answer")
    assert {each.track for each in calls} == {"answer", "answer 2", "answer 3"}
    assert [len(each.flows) for each in calls] == [1] * len(calls)
    begun = {each.flows[0]: each.begun for each in calls}
    uses = [each for each in found.instants if each.name == "use"]
    assert len(uses) == 6
    assert all(begun[each.flows[0]] <= each.begun for each in uses)
    assert found.counters["staleness"]


@pytest.mark.parametrize("double", [lambda item: 2 * item, sleepy])
async def test_calls_and_reads_of_stages_are_spans(path: Path, double: Any) -> None:
    items = prefetch(map_concurrent(double, range(100), concurrency=2), 4)
    hooks = [FeedHook(items, "item"), Waits(0.01)]
    found = await train(path, *hooks, creator=lambda item: {}, flush_secs=0.005)
    assert len(found.of(double.__name__)) >= 3
    assert found.of("prefetch: read map_concurrent")
    held = [value for _, value in found.counters["prefetch: items held"]]
    assert 0 < max(held) <= 4


async def test_pushes_and_pulls_of_a_parameter_server_are_marked(path: Path) -> None:
    server = make_server(Asynchronous(), 1)

    async def step() -> dict[str, Any]:
        parameters, version = server.pull(0)
        server.push(0, parameters, version)
        return {}

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    found = await train(path, ProtocolHook(server, 0), creator=creator)
    assert [each.name for each in found.instants] == ["pull", "push", "update"] * 3
    assert [value for _, value in found.counters["pull: version"]] == [0, 1, 2]
    assert [value for _, value in found.counters["push: staleness"]] == [0, 0, 0]


async def test_one_hook_records_several_sessions_into_one_file(path: Path) -> None:
    hook = TraceHook(path)
    creator = SharedSessionCreator(counting_creator())

    async def worker() -> None:
        async with MonitoredSession([hook, Waits(), StopAtStepHook(20)], creator) as session:
            await run_until_stopped(session)

    await together(*[worker] * 3)
    found = read(path)
    runs = found.of("run")
    assert len(runs) == found.counters["global step"][-1][1] == 20
    assert {each.track for each in runs} == {"session", "session 2", "session 3"}


async def test_sessions_in_the_block_are_recorded_and_others_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    async with MonitoredSession([TraceHook(tmp_path / "a")], counting_creator()) as outer:
        await outer.run([])
        await run_steps(counting_creator(), 5)
        await run_steps(counting_creator(), 1, TraceHook(tmp_path / "b"))
    found = read(tmp_path / "a")
    assert (len(found.of("run")), len(read(tmp_path / "b").of("run"))) == (7, 1)
    assert found.counters["global step"][-1][1] == 1
    assert found.counters["global step 2"][-1][1] == 5


async def test_a_dropped_session_ends_its_file(path: Path) -> None:
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
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes = 0

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
    assert caplog.text.count("cannot be written") == caplog.text.count("No space left") == 1
    read(path, is_cut=True)
    assert written(path).endswith(b"\n")
    assert num_writes == 3


async def test_a_stuck_disk_costs_bounded_memory_and_the_end_of_the_trace(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
    hook = TraceHook(path, flush_secs=0.001)
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
    found = read(path)
    assert len(found.of("run")) < 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_simulation_is_recorded_in_virtual_time(path: Path, backend: Any) -> None:
    simulation = Simulation(backend=backend)

    class Sleeps(Follows):
        async def before_run(self, run_context: SessionRunContext) -> None:
            await simulation.sleep(1.0)

    async def step() -> dict[str, float]:
        await simulation.sleep(2.0)
        return {}

    simulation.run(run_steps, step, 3, TraceHook(path, least_secs=0.5), Sleeps())
    found = read(path)
    assert [(each.begun, each.ended) for each in found.of("run")] == [(0, 3), (3, 6), (6, 9)]
    assert [(each.path, each.begun) for each in found.of("step")] == [
        ("session/run/step", begun) for begun in (1, 4, 7)
    ]
    [wait] = found.of("wait for global_step N")
    assert (wait.track, wait.path.count("/"), wait.begun, wait.ended) == ("follow", 1, 0, 6)


async def test_a_run_by_another_task_does_not_cross_a_wait_of_the_first(path: Path) -> None:
    async with MonitoredSession([TraceHook(path), Waits()], counting_creator()) as session:

        async def run_all() -> None:
            for _ in range(3):
                await session.run([])

        async with in_task(run_all):
            await session.global_step.wait_for(2)
    found = read(path)
    assert len(found.of("run")) == len(found.of("step")) == 3
    assert {each.path for each in found.of("step")} == {"session/run/step"}


async def test_a_file_grows_while_training_goes_on_and_a_long_span_says_that_it_was_cut(
    path: Path,
) -> None:
    goes_on = anyio.Event()

    async def task() -> None:
        await goes_on.wait()
        raise ValueError("away")

    hooks = [TraceHook(path, flush_secs=0.005), Waits()]
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.start_soon(task, name="report", on_failure=OnFailure.LOG)
        with anyio.fail_after(10):
            while not written(path) or not read(path, is_cut=True).of("report"):
                await session.run([])
        assert read(path, is_cut=True).num_open >= 2
        goes_on.set()
        await session.run([])
    [report] = [each for each in read(path).slices if each.track == "report"]
    assert report.is_cut


def test_a_span_may_be_ended_while_the_recorder_is_busy_in_the_same_thread(tmp_path: Path) -> None:
    """The garbage collector may close a coroutine, and so end its span, at any allocation."""
    recorder = _recorder.FileRecorder(str(tmp_path / "a"), time.monotonic)
    span = recorder.span_on("task", Label("call"))
    with recorder.lock:
        span.end(GeneratorExit())
    recorder.close()
    assert read(tmp_path / "a").of("call (cut)")
