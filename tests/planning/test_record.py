"""record: what of a run is in the file, and that it can be read back."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, StopAtStepHook, TraceHook
from asynchooks._engine.recording import Kind
from asynchooks.planning import Plan, Trace, TraceError, record, span, timed
from asynchooks.simulation import Empirical, Simulation

from ..tracing import reading
from . import programs

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def recorded(path: Path, main: Callable[..., Any], *args: Any, backend: str, **more: Any) -> Trace:
    with record(path, **more):
        anyio.run(main, *args, backend=backend)
    return Trace.read(path)


@BACKENDS
def test_all_of_a_learner_is_read_back(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"
    trace = recorded(path, programs.learner, 4, 30, backend=backend, settings={"concurrency": 4})
    assert trace.settings == {"concurrency": 4}
    assert trace.is_complete
    runs, learn = trace.find("run", Kind.RUN), trace.find("learn", Kind.WORK)
    assert len(runs) == len(learn) == len(trace.find("step", Kind.RUN)) == 30
    assert learn.is_on_session.all()
    assert (runs.begun <= learn.begun).all()
    assert (learn.ended <= runs.ended).all()
    rollouts = trace.find("rollout")
    assert len(rollouts) >= 60
    assert not rollouts.is_on_session.any()
    done = rollouts.pick(~rollouts.is_cut)
    assert set(done.size.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    assert len(trace.marks["use"].time) == 60
    calls = trace.find("rollout", Kind.CALL)
    assert set(trace.marks["use"].ident.tolist()) <= set(calls.ident.tolist())
    found = reading.read(path)
    assert len(found.of("learn")) == 30
    assert {each.path for each in found.of("reward")} == {"session/run/step/learn/reward"}
    assert len(found.of("rollout")) >= 2 * 60  # the stage's call, and the work in it
    assert sum(len(each.flows) for each in found.instants if each.name == "use") == 60


@BACKENDS
def test_workers_and_updates_are_read_back(tmp_path: Path, backend: str) -> None:
    trace = recorded(tmp_path / "run.pftrace", programs.gradients, 3, 30, backend=backend)
    compute = trace.find("compute")
    assert set(compute.worker.tolist()) == {0, 1, 2}
    assert compute.is_on_session.all()
    assert trace.marks["update"].value.tolist() == list(
        range(1, len(trace.marks["update"].time) + 1)
    )
    assert set(trace.marks["push"].worker.tolist()) == {0, 1, 2}
    figures = trace.figures()
    assert figures.num_updates > 20
    assert 0.0 <= figures.idle_share < 0.9
    assert 0.9 < figures.staleness < 2.1  # by how the workers fall into step


@BACKENDS
def test_what_is_cancelled_fails_or_has_not_ended_is_cut(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"

    @timed("work")
    async def work(secs: float, error: bool = False) -> None:
        await anyio.sleep(secs)
        if error:
            raise ValueError("no")

    async def main() -> None:
        await work(0.001)
        with pytest.raises(ValueError, match="no"):
            await work(0.001, error=True)
        with anyio.move_on_after(0.03):
            await work(10)  # its begin is written by itself

    trace = recorded(path, main, backend=backend, flush_secs=0.005)
    found = trace.find("work")
    assert found.is_cut.tolist() == [False, True, True]
    assert found.secs[2] == pytest.approx(0.03, abs=0.02)
    assert found.secs.min() > 0.0
    reading.read(path)


@BACKENDS
def test_work_whose_size_cannot_be_had_has_ended(tmp_path: Path, backend: str) -> None:
    @timed("async", output_size=len)
    async def work() -> int:
        return 3

    @timed("plain", input_size=lambda: math.nan)
    def plain() -> None: ...

    async def main() -> None:
        with pytest.raises(TypeError, match="has no len"):
            await work()
        with pytest.raises(ValueError, match="input_size of 'plain'"):
            plain()
        await anyio.sleep(0.05)

    trace = recorded(tmp_path / "run.pftrace", main, backend=backend)
    for name in ("async", "plain"):
        assert trace.find(name).is_cut.tolist() == [True]
        assert trace.find(name).secs[0] < 0.04  # not until the end of the record


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for make in (record, TraceHook):
        with pytest.raises(FileExistsError, match="a device, a pipe or a socket"):
            make(pipe)
    block = record(tmp_path / "late")
    os.mkfifo(tmp_path / "late")
    with block:
        pass
    assert pipe.is_fifo()
    assert (tmp_path / "late").is_fifo()


@pytest.mark.anyio
async def test_async_with_records_within_a_running_loop(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with record(path):
        await programs.learner(4, 5)
    assert len(Trace.read(path).find("learn")) == 5
    await programs.learner(4, 5)
    assert len(Trace.read(path).find("learn")) == 5


def test_a_plain_step_in_a_thread_is_work_of_the_session(tmp_path: Path) -> None:
    @timed("step in a thread")
    def step() -> dict[str, float]:
        return {"loss": 0.5}

    async def main() -> None:
        creator = FunctionSessionCreator(step)
        hooks = [StopAtStepHook(5)]
        async with MonitoredSession(hooks, creator, step_runner="thread") as session:
            while not session.should_stop():
                await session.run([])

    found = recorded(tmp_path / "run.pftrace", main, backend="asyncio").find("step in a thread")
    assert len(found) == 5
    assert found.is_on_session.all()


def test_work_within_work_counts_once(tmp_path: Path) -> None:
    @timed("inner")
    async def inner() -> None:
        await anyio.sleep(0.004)

    @timed("outer")
    async def outer() -> dict[str, float]:
        await inner()
        await inner()
        return {}

    async def main() -> None:
        hooks = [StopAtStepHook(20)]
        async with MonitoredSession(hooks, FunctionSessionCreator(outer)) as session:
            while not session.should_stop():
                await session.run([])

    trace = recorded(tmp_path / "run.pftrace", main, backend="asyncio")
    assert len(trace.find("inner")) == 2 * len(trace.find("outer")) == 40
    assert 0.0 <= trace.figures().idle_share < 0.5


@BACKENDS
def test_work_outside_of_an_event_loop_is_recorded(tmp_path: Path, backend: str) -> None:
    @timed("plain")
    def plain() -> None:
        with span("block"):
            pass

    async def main() -> None:
        await anyio.to_thread.run_sync(plain)

    path = tmp_path / "run.pftrace"
    with record(path):
        plain()
        anyio.run(main, backend=backend)
    trace = Trace.read(path)
    assert len(trace.find("plain")) == len(trace.find("block")) == 2


@pytest.mark.anyio
async def test_a_trace_hooks_file_is_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    async def step() -> dict[str, float]:
        await programs.compute(0)
        return {}

    hooks = [TraceHook(path), StopAtStepHook(5)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])
    trace = Trace.read(path)
    assert len(trace.find("compute")) == len(trace.find("run")) == 5
    assert trace.is_complete


@BACKENDS
def test_the_record_of_a_program_has_all_of_a_session_with_a_trace_hook(
    tmp_path: Path, backend: str
) -> None:
    @timed("learn")
    async def learn() -> dict[str, float]:
        return {}

    async def main() -> None:
        hooks = [TraceHook(tmp_path / "hook.pftrace"), StopAtStepHook(last_step=5)]
        async with MonitoredSession(hooks, FunctionSessionCreator(learn)) as session:
            while not session.should_stop():
                await session.run([])

    trace = recorded(tmp_path / "run.pftrace", main, backend=backend)
    assert len(trace.find("learn")) == len(trace.find("run")) == 5
    assert len(Trace.read(tmp_path / "hook.pftrace").find("run")) == 5


def test_a_simulated_run_is_recorded_in_virtual_time(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    async def main() -> None:
        async with record(path):
            await programs.gradients(2, 10)

    Simulation(seed=1).run(main)
    trace = Trace.read(path)
    assert trace.find("compute").secs.tolist()[:4] == pytest.approx([0.002] * 4, abs=1e-8)


def test_a_thousand_tasks_have_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    @timed("work")
    async def work() -> None:
        with span("inner"):
            await anyio.sleep(0.01)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(1000):
                group.start_soon(work)

    trace = recorded(path, main, backend="asyncio")
    assert len(set(trace.find("work").track.tolist())) == 1000
    found = trace.find("work")
    assert found.begun.max() < found.ended.min()
    assert len(reading.read(path).of("inner")) == 1000


def test_spans_are_small(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    async def main(num: int) -> None:
        async with record(path):
            for _ in range(num):
                await sized(2)
                await plain()

    @timed("plain")
    async def plain() -> None: ...

    @timed("sized", input_size=lambda size: size)
    async def sized(size: int) -> None: ...

    anyio.run(main, 10)
    before = path.stat().st_size
    anyio.run(main, 5010)
    assert (path.stat().st_size - before) / 10_000 <= 110


def test_files_that_are_joined_are_shown_as_one_and_planned_by_themselves(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.pftrace" for number in range(2)]
    for path in paths:
        recorded(path, programs.learner, 2, 10, backend="asyncio")
    joined = tmp_path / "joined.pftrace"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths))
    assert reading.read(joined).num_processes == 2
    with pytest.raises(TraceError, match=r"joined of 2 files, each .*; give one of them"):
        Trace.read(joined)


def test_a_file_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    recorded(path, programs.learner, 4, 30, backend="asyncio", flush_secs=0.01)
    data = path.read_bytes()
    nums = []
    sizes = random.Random(1).sample(range(1, len(data)), 150)
    for size in sorted([*sizes, *range(len(data) - 300, len(data))]):
        path.write_bytes(data[:size])
        try:
            nums.append(len(Trace.read(path).find("learn")))
        except TraceError as error:
            assert "no span" in str(error) or "no trace" in str(error)
            assert not nums
    assert nums == sorted(nums)
    assert nums[-1] >= 29


def test_a_damaged_file_is_read_or_refused_in_one_way(tmp_path: Path) -> None:
    path, rng = tmp_path / "run.pftrace", random.Random(3)
    recorded(path, programs.learner, 4, 10, backend="asyncio")
    data = path.read_bytes()
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 2, 20])):
            place = rng.randrange(min(len(damaged), rng.choice([2000, len(damaged)])))
            if rng.random() < 0.7:
                damaged[place] = rng.randrange(256)
            else:
                del damaged[place : place + rng.randrange(1, 40)]
        path.write_bytes(damaged)
        try:
            Trace.read(path).figures()
        except TraceError:
            num_refused += 1
    assert 0 < num_refused < 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b'{"traceEvents": []}', "no trace"),
        (b"\x0a\x02\x08\x01", "no trace of asynchooks"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        Trace.read(path)


def test_a_record_of_nothing_and_other_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with record(path):
        pass
    with pytest.raises(TraceError, match="has no span"):
        Trace.read(path)
    path.write_bytes(path.read_bytes().replace(b'"version":3', b'"version":4'))
    with pytest.raises(TraceError, match="version 4, and this release reads version 3"):
        Trace.read(path)


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    recorded(path, programs.learner, 4, 5, backend="asyncio")
    with pytest.raises(TraceError, match=r"run.pftrace is given twice; give each run once"):
        Plan.read(path, path)


def test_a_clock_that_has_gone_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with record(path):
        pass
    lines = path.read_text().splitlines(keepends=True)
    [flush] = [line for line in lines if "flushed" in line]
    at = [re.sub(r'"flushed":[^,]*', f'"flushed":{secs}', flush) for secs in (10.0, 10.5, 8.25)]
    path.write_text("".join([*lines[:2], *at]))
    with pytest.raises(TraceError, match=r"a clock that went back by 2.25 s"):
        Trace.read(path)


def test_work_of_a_trace_is_a_delay_of_simulations(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    trace = recorded(path, programs.learner, 4, 10, backend="asyncio")
    work = trace.find("rollout")
    delay = Empirical.from_trace(path, "rollout")
    assert delay.samples == tuple(work.secs[~work.is_cut].tolist())
    with pytest.raises(TraceError, match=r"no span of 'rollouts' that was not cut; it has .*'run'"):
        Empirical.from_trace(path, "rollouts")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="path is 3"):
        record(3)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match="give the path of a file"):
        record(tmp_path)
    for value in (object(), math.nan, {1: 2}):
        with pytest.raises(TypeError, match=r"settings\['a'\] is .*, which JSON"):
            record(tmp_path / "a", settings={"a": value})
    with pytest.raises(TypeError, match="name in settings"):
        record(tmp_path / "a", settings={1: 2})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="flush_secs"):
        record(tmp_path / "a", flush_secs=0)
    block = record(tmp_path / "a")
    with block, pytest.raises(RuntimeError, match="within another record"), record(tmp_path / "b"):
        pass
    with pytest.raises(RuntimeError, match="was entered before"), block:
        pass
    assert not (tmp_path / "b").exists()


def test_only_files_are_written(tmp_path: Path) -> None:
    for make in (record, TraceHook):
        with pytest.raises(IsADirectoryError, match=r"give the path of a file, such as .*run\.pf"):
            make(tmp_path)
        with pytest.raises(ValueError, match="path is ''; give the path of a file"):
            make("")


def test_a_class_is_not_timed() -> None:
    with pytest.raises(TypeError, match=r"timed\('work'\) decorates the class .*; decorate its"):
        timed("work")(Path)


def test_traces_and_spans_are_shown_in_short(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run.pftrace", programs.learner, 4, 30, backend="asyncio")
    # what there is most of comes first: of short waits there may be any number
    assert re.fullmatch(r"<Trace of \S+ s: 64 rollout, .*30 learn, .*>", repr(trace))
    assert re.fullmatch(r"<30 spans; mean \S+ s>", repr(trace.find("learn")))


def kills(tmp_path: Path, backend: str, num: int) -> float:
    """Kill recorded processes; the most seconds that were lost."""
    context, rng = multiprocessing.get_context("forkserver"), random.Random(backend)
    context.set_forkserver_preload([programs.__name__])
    lost = []
    for number in range(num):
        path = tmp_path / f"{number}.pftrace"
        ours, theirs = context.Pipe()
        process = context.Process(target=programs.record_until_killed, args=(backend, path, theirs))
        process.start()
        try:
            assert ours.poll(60)
            time.sleep(0.8 + rng.random())
        finally:
            process.kill()
            killed_at = time.monotonic()
            process.join(60)
        trace = Trace.read(path)
        assert not trace.is_complete
        assert trace.find("rollout").is_cut.sum() <= 4 + 4
        reading.read(path, is_cut=True)
        lost.append(killed_at - float(trace.find("run").ended.max()))
    return max(lost)


@pytest.mark.faults
@BACKENDS
def test_a_killed_process_leaves_its_record(tmp_path: Path, backend: str) -> None:
    assert kills(tmp_path, backend, 10) < 5.0  # a timing decides no test; see the slow one


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(1200)
@BACKENDS
def test_two_hundred_kills_lose_half_a_second(tmp_path: Path, backend: str) -> None:
    lost = kills(tmp_path, backend, 100)
    print(f"at most {lost:.2f} s lost on {backend}")
    assert lost <= 0.6
