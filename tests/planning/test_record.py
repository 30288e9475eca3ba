"""record: what of a run is in the file, and that it can be read back."""

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
import numpy as np
import pytest

from asynchooks import TraceHook
from asynchooks.planning import Plan, Spans, Trace, TraceError, record, timed
from asynchooks.protocols import Asynchronous
from asynchooks.simulation import Empirical, Simulation

from ..support.step_loops import run_steps
from ..tracing import reading
from . import programs
from .program_of_sleeps import main as learner
from .recorded import spans_of, trace_of_work

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def recorded(path: Path, main: Callable[..., Any], *args: Any, backend: str, **more: Any) -> Trace:
    with record(path, **more):
        anyio.run(main, *args, backend=backend)
    return Trace.read(path)


@BACKENDS
def test_all_of_a_learner_is_read_back(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"
    trace = recorded(path, learner, 4, 2, 2, 20, backend=backend, settings={"concurrency": 4})
    assert trace.settings == {"concurrency": 4}
    assert trace.is_complete
    runs, learn, rollouts = (trace.find(name) for name in ("run", "learn", "rollout"))
    assert len(runs) == len(learn) == len(trace.find("step")) == 20
    assert learn.is_on_session.all()
    assert (runs.begun <= learn.begun).all()
    assert (learn.ended <= runs.ended).all()
    assert len(rollouts) >= 40
    assert not rollouts.is_on_session.any()
    assert set(rollouts.pick(~rollouts.is_cut).size.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    uses = trace.marks["use"].ident.tolist()
    assert len(uses) == 40
    assert set(uses) <= set(spans_of(trace, "call")["rollout"].ident.tolist())
    rewards = trace.find("reward")
    assert len(rewards) == 20
    assert (learn.begun <= rewards.begun).all()
    assert (rewards.ended <= learn.ended).all()


@BACKENDS
def test_workers_and_updates_are_read_back(tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "run.pftrace"

    async def train() -> None:
        async with record(path):
            await programs.gradients(30, Asynchronous(), 0.251, 0.277, 0.307)

    Simulation(backend=backend).run(train)
    trace = Trace.read(path)
    compute, updates = trace.find("compute"), trace.marks["update"].value.tolist()
    assert compute.is_on_session.all()
    assert set(compute.worker.tolist()) == set(trace.marks["push"].worker.tolist()) == {0, 1, 2}
    assert updates == list(range(1, len(updates) + 1))
    figures = trace.figures()
    assert (figures.num_updates, figures.idle_share) == (28, 0.0)
    assert figures.staleness == 57 / 29, "others make two updates meanwhile, and once one"


@BACKENDS
def test_what_fails_is_cancelled_or_has_no_size_is_cut_there(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"

    @timed("work", output_size=lambda number: number)
    async def work(secs: float, what: Any = 1.0) -> Any:
        await anyio.sleep(secs)
        if isinstance(what, Exception):
            raise what
        return what

    async def main() -> None:
        await work(0.001)
        for what in (ValueError("no"), "no number"):
            with pytest.raises((ValueError, TypeError), match="no"):
                await work(0.001, what)
        with anyio.move_on_after(0.03):
            await work(10)  # its begin is written by itself
        await work(0.001)

    found = recorded(path, main, backend=backend, flush_secs=0.005).find("work")
    assert found.is_cut.tolist() == [False, True, True, True, False]
    assert found.ended[3] <= found.begun[4], "not at the end of the record"
    assert found.secs.min() > 0.0


async def test_a_block_in_a_running_loop_records_plain_steps_in_threads(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    @timed("plain")
    def step() -> dict[str, float]:
        return {"loss": 0.5}

    async with record(path):
        await run_steps(step, 5, step_runner="thread")
        await anyio.to_thread.run_sync(step)
    await run_steps(step, 5)
    found = Trace.read(path).find("plain")
    assert found.is_on_session.tolist() == [True] * 5 + [False]


@BACKENDS
def test_work_within_work_counts_once_also_beside_a_trace_hook(
    tmp_path: Path, backend: str
) -> None:
    @timed("inner")
    async def inner() -> None:
        await anyio.sleep(0.004)

    @timed("outer")
    async def outer() -> dict[str, float]:
        await inner()
        await inner()
        return {}

    hook = TraceHook(tmp_path / "hook.pftrace")
    trace = recorded(tmp_path / "run.pftrace", run_steps, outer, 20, hook, backend=backend)
    assert len(trace.find("inner")) == 2 * len(trace.find("outer")) == 40
    assert 0.0 <= trace.figures().idle_share < 0.5
    assert len(Trace.read(tmp_path / "hook.pftrace").find("run")) == 20


def test_files_that_are_joined_are_shown_as_one_and_planned_by_themselves(tmp_path: Path) -> None:
    path, joined = tmp_path / "run.pftrace", tmp_path / "joined.pftrace"
    for _ in range(2):
        recorded(path, learner, 4, 2, 2, 10, backend="asyncio")
        with joined.open("ab") as file:
            file.write(path.read_bytes())
    assert reading.read(joined).num_processes == 2
    with pytest.raises(TraceError, match=r"joined of 2 files, each .*; give one of them"):
        Trace.read(joined)
    with pytest.raises(TraceError, match=r"run.pftrace is given twice; give each run once"):
        Plan.read(path, path)
    delay = Empirical.from_trace(path, "rollout")
    work = Trace.read(path).find("rollout")
    assert delay.samples == tuple(work.secs[~work.is_cut].tolist())
    with pytest.raises(TraceError, match=r"no span of 'rollouts' that was not cut; it has .*'run'"):
        Empirical.from_trace(path, "rollouts")


def test_a_file_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    recorded(path, learner, 4, 2, 2, 20, backend="asyncio", flush_secs=0.01)
    data, nums = path.read_bytes(), list[int]()
    for size in [*range(1, len(data), len(data) // 60), *range(len(data) - 150, len(data))]:
        path.write_bytes(data[:size])
        try:
            nums.append(len(Trace.read(path).find("learn")))
        except TraceError as error:
            assert re.search("no span|no trace", str(error))
            assert not nums
    assert nums == sorted(nums)
    assert nums[-1] >= 19


def flushed(*secs: float) -> Callable[[str], str]:
    """The lines of a record that was written at these seconds."""

    def made(text: str) -> str:
        lines = text.splitlines(keepends=True)
        [flush] = [line for line in lines if "flushed" in line]
        at = [re.sub(r'"flushed":[^,]*', f'"flushed":{each}', flush) for each in secs]
        return "".join([*lines[:2], *at])

    return made


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda _: "", "is empty"),
        (lambda _: "[]", "no trace"),
        (lambda _: "\n\x02\b\x01", "no trace of asynchooks"),
        (lambda text: text, "has no span"),
        (
            lambda text: text.replace('"version":3', '"version":4'),
            "version 4, and this release reads version 3",
        ),
        (flushed(10.0, 10.5, 8.25), "a clock that went back by 2.25 s"),
    ],
)
def test_other_files_records_of_nothing_and_other_clocks_are_refused(
    tmp_path: Path, changed: Callable[[str], str], says: str
) -> None:
    path = tmp_path / "run.pftrace"
    with record(path):
        pass
    path.write_text(changed(path.read_text()))
    with pytest.raises(TraceError, match=says):
        Trace.read(path)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda path: record(""), ValueError, "path is ''; give the path of a file"),
        (record, IsADirectoryError, r"give the path of a file, such as .*run\.pf"),
        (lambda path: record(path / "a", settings={"a": math.nan}), TypeError, "which JSON"),
        (lambda path: record(path / "a", flush_secs=0), ValueError, "flush_secs"),
        (lambda path: timed("work")(Path), TypeError, r"timed\('work'\) decorates the class .*;"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, make: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make(tmp_path)


def test_a_record_is_entered_once_and_within_no_other(tmp_path: Path) -> None:
    block = record(tmp_path / "a")
    with block, pytest.raises(RuntimeError, match="within another record"), record(tmp_path / "b"):
        pass
    with pytest.raises(RuntimeError, match="was entered before"), block:
        pass
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    block = record(pipe)
    os.mkfifo(pipe)
    for make in (record, TraceHook):
        with pytest.raises(FileExistsError, match="a device, a pipe or a socket"):
            make(pipe)
    with block:  # it became one later
        pass
    assert pipe.is_fifo()


@pytest.mark.faults
@BACKENDS
def test_a_killed_process_leaves_its_record(tmp_path: Path, backend: str) -> None:
    context, rng = multiprocessing.get_context("forkserver"), random.Random(backend)
    context.set_forkserver_preload([programs.__name__])
    for number in range(3):
        path = tmp_path / f"{number}.pftrace"
        process = context.Process(target=programs.record_until_killed, args=(backend, path))
        process.start()
        try:
            while not (path.exists() and b"learn" in path.read_bytes()):
                assert process.is_alive()
                process.join(0.02)
            process.join(0.2 * rng.random())  # between two writes
        finally:
            process.kill()
            process.join(60)
        trace = Trace.read(path)
        assert not trace.is_complete
        assert trace.find("rollout").is_cut.sum() <= 4 + 4
        assert len(trace.find("run")) > 1


# What the program's own code takes on the event loop, beside timed work

SPIN_SECS = 0.004


@timed("wait")
async def wait() -> None:
    await anyio.sleep(0.004)


async def main(steps: int = 60, *, spins: bool = True) -> None:
    for _ in range(steps):
        await wait()
        until = time.thread_time() + SPIN_SECS
        while spins and time.thread_time() < until:  # code of the program's own
            pass


def secs_beside(plan: Plan, backend: Any = "turbo") -> float:
    """What a planned call takes beside its work."""
    found = plan.run(main, backend=backend, steps=50, spins=False)
    return (found.ended - found.began - float(found.find("wait").secs.sum())) / 50


SECONDS = range(11)


def plan_of_calls(secs: float, cpu: Any, last: float = 10.0, **about: Any) -> Plan:
    """Ten calls in each second."""
    begun = np.arange(0.05, last, 0.1)
    return Plan([trace_of_work("wait", Spans.of(begun, begun + secs), cpu=cpu, **about)])


@pytest.mark.parametrize("jump", [0.0, 5.0], ids=["even", "an import or compilation"])
def test_processor_time_is_counted_by_the_calls_that_ended_meanwhile(
    jump: float, backend: str
) -> None:
    cpu = [(float(each), 0.02 * each + jump * (each > 3)) for each in SECONDS]
    assert secs_beside(plan_of_calls(0.01, cpu), backend) == pytest.approx(0.002)


@pytest.mark.parametrize(("share", "expected"), [(0.32, 0.002), (0.1, 0.0)])
def test_what_plain_timed_functions_compute_is_theirs(share: float, expected: float) -> None:
    cpu = [(float(each), share * each) for each in SECONDS]
    assert secs_beside(plan_of_calls(0.03, cpu, inline=["wait"])) == pytest.approx(expected)


def test_it_is_not_known_of_a_short_record() -> None:
    for cpu in ([], [(0.0, 0.0), (5.0, 1.0), (9.0, 3.0)]):
        assert secs_beside(plan_of_calls(0.01, cpu, 9.0)) == pytest.approx(0.0)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="there is no such clock")
@BACKENDS
def test_code_that_is_not_timed_is_planned(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.pftrace"
    with record(path, flush_secs=0.05):
        anyio.run(main, backend=backend)
    assert 0.9 * SPIN_SECS <= secs_beside(Plan.read(path)) < 2.0 * SPIN_SECS
