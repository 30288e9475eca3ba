"""A plan writes no file, opens no socket, and waits for nothing that virtual time cannot see."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    HistoryHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    MetricsHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionHook,
    ProgressHook,
    Retention,
    SessionRunHook,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks._engine.recording import Kind
from asynchooks.data import batch
from asynchooks.hooks import __all__ as hook_names
from asynchooks.metrics import CsvSink
from asynchooks.planning import PlanError, _outside, timed

from ..support.threads import threads_left
from .planned import plan_of, service_of

PLAN = plan_of(service_of("work", [0.5]))


@timed("work", returns={"loss": 1.0})
async def work() -> dict[str, float]:
    raise AssertionError("a plan does not call it")


async def do(act: Callable[[], Any]) -> None:
    await work()
    act()
    await work()


def refused(act: Callable[[], Any], match: str, backend: Any = "asyncio") -> None:
    with pytest.raises(PlanError, match=match) as caught:
        PLAN.run(partial(do, act), backend=backend)
    assert "test_outside.py:" in str(caught.value)


def test_a_file_that_is_opened_for_writing_is_refused(tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "out.txt"
    refused(lambda: path.write_text("x"), "opens the file .*out.txt' for writing", backend)
    refused(lambda: os.open(path, os.O_CREAT | os.O_WRONLY), "opens the file")
    refused(lambda: tempfile.mkstemp(dir=tmp_path), "opens the file")
    assert not path.exists()


def test_a_file_may_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    PLAN.run(partial(do, path.read_text))


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda: Path("nowhere").mkdir(), "makes a directory"),
        (lambda: os.rename("a", "b"), "renames a file"),
        (lambda: os.remove("nowhere"), "removes a file"),
        (lambda: os.chmod("nowhere", 0o600), "changes a file's mode"),
        (lambda: os.utime("nowhere"), "changes a file's times"),
        (lambda: os.execv("/nowhere", ["nowhere"]), "replaces its process"),
        (lambda: socket.socket(), "opens a socket"),
        (lambda: os.system("true"), "starts a process"),
        (lambda: threading.Thread(target=print).start(), "starts a thread"),
        (lambda: ThreadPoolExecutor().submit(print), "starts a thread"),
        pytest.param(
            lambda: subprocess.run([sys.executable, "-c", ""], check=True),
            "starts a process",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_what_acts_outside_is_refused_with_its_place(act: Callable[[], Any], match: str) -> None:
    refused(act, match)


def test_what_a_program_has_caught_is_refused_in_the_end(tmp_path: Path) -> None:
    def act() -> None:
        with suppress(Exception):
            (tmp_path / "out.txt").write_text("x")

    refused(act, "opens the file")


def test_outside_of_a_plan_nothing_is_refused(tmp_path: Path) -> None:
    PLAN.run(work)
    (tmp_path / "out.txt").write_text("x")
    with socket.socket():
        pass


def test_a_file_may_be_written_in_another_thread_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    go, done = threading.Event(), threading.Event()

    def write() -> None:
        go.wait(10)
        path.write_text("x")
        done.set()

    thread = threading.Thread(target=write)
    thread.start()

    def act() -> None:
        go.set()
        done.wait(10)

    PLAN.run(partial(do, act))
    thread.join()
    assert path.read_text() == "x"


def test_a_real_sleep_is_refused_with_its_place() -> None:
    refused(lambda: time.sleep(1.0), r"time.sleep\(1.0\) in a simulation.*make what waits here")


def test_clocks_of_the_program_show_virtual_time(backend: Any) -> None:
    async def main() -> list[float]:
        began = time.monotonic(), time.perf_counter(), time.time(), time.time_ns()
        await work()
        now = time.monotonic(), time.perf_counter(), time.time(), time.time_ns()
        assert [round(b - a, 6) for a, b in zip(began, now, strict=True)] == [
            0.5, 0.5, 0.5, 500_000_000,
        ] or abs(now[3] - began[3] - 500_000_000) < 1000  # fmt: skip
        return []

    PLAN.run(main, backend=backend)


def test_clocks_are_the_systems_again_after_a_plan() -> None:
    before = time.monotonic, time.perf_counter, time.time, time.time_ns

    async def main() -> None:
        await work()
        assert time.monotonic is not before[0]

    PLAN.run(main)
    assert (time.monotonic, time.perf_counter, time.time, time.time_ns) == before


def test_a_program_that_ends_its_process_is_refused() -> None:
    async def main() -> None:
        await work()
        sys.exit(3)

    with pytest.raises(PlanError, match="ends its process, with code 3 at .*test_outside.py:"):
        PLAN.run(main)


def test_a_loop_by_the_clock_ends_in_virtual_time() -> None:
    async def main() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 100.0:
            await work()

    assert PLAN.run(main).ended == pytest.approx(100.0, abs=0.6)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outside, "STALL_SECS", 0.25)


def spin() -> None:
    while True:
        pass


@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize(
    "act",
    [
        spin,
        lambda: queue.Queue[int]().get(),
        lambda: threading.Lock().acquire() and threading.Event().wait(60),
        lambda: threading.Event().wait(),
    ],
)
def test_a_wait_that_virtual_time_cannot_see_is_refused(act: Callable[[], Any]) -> None:
    refused(act, "without an event in virtual time, which stands at 0.5 s at .*make what waits")


@pytest.mark.usefixtures("little_patience")
def test_a_wait_is_refused_on_every_kernel(backend: Any) -> None:
    refused(lambda: threading.Event().wait(), "without an event in virtual time", backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_that_takes_turns_is_no_stall(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts its turns, however long they take on a machine that does other work."""
    monkeypatch.setattr(_outside, "STALL_SECS", 0.05)

    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(PlanError, match="spent no virtual time"):
        PLAN.run(main, backend=backend)


@pytest.mark.usefixtures("little_patience")
def test_a_spinning_loop_is_refused_in_another_thread_than_the_main_one() -> None:
    caught: list[BaseException] = []

    def plan() -> None:
        try:
            PLAN.run(partial(do, spin))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=plan)
    thread.start()
    thread.join(30)
    (error,) = caught
    assert isinstance(error, PlanError)
    assert "without an event in virtual time" in str(error)


@pytest.mark.usefixtures("little_patience")
def test_a_wait_for_real_work_in_a_thread_is_refused() -> None:
    over = threading.Event()

    async def main() -> None:
        await work()
        await anyio.to_thread.run_sync(over.wait, abandon_on_cancel=True)

    try:
        with pytest.raises(PlanError, match="without an event in virtual time"):
            PLAN.run(main)
    finally:
        over.set()


def every_hook(directory: Path) -> list[SessionRunHook]:
    """One of each hook of asynchooks, each of which would write, print or watch."""

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await work()
        return {"accuracy": 0.5}

    source = batch(list(range(10**6)), 2, collate=list)
    saver = StateDictSaver(nothing=_Stateful())
    path = str(directory)
    return [
        TraceHook(directory / "run.pftrace"),
        CheckpointSaverHook(
            path, save_steps=1, saver=saver, retention=Retention(keep_best=1), metric="loss"
        ),
        FeedHook(source, "numbers"),
        InputPositionHook(batch([1], 1)),
        FeedFnHook(lambda: {"more": 1}),
        DataWaitHook(source, every_n_steps=1, output_dir=path),
        EvaluationHook(evaluate, every_n_steps=2, output_dir=path),
        EarlyStoppingHook("loss", 100, restore_best=True),
        FinalOpsHook("loss"),
        GlobalStepWaiterHook(0),
        HistoryHook("loss", every_n_steps=1),
        LoggingTensorHook(["loss"], every_n_iter=1),
        LoopLagHook(),
        MetricsHook(CsvSink(f"{path}/metrics.csv"), "loss", every_n_steps=1),
        NanTensorHook("loss"),
        PreemptionHook(),
        ProgressHook(),
        StallHook(10.0),
        StepCounterHook(every_n_steps=1, output_dir=path),
        SummarySaverHook(save_steps=1, output_dir=path, summary_op="loss"),
        TimeLimitHook(100.0),
        StopAtStepHook(last_step=10),
    ]


class _Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"zero": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_list_of_every_hook_is_complete(tmp_path: Path) -> None:
    names = {type(each).__name__ for each in every_hook(tmp_path)}
    assert names == {each for each in hook_names if each.endswith("Hook")}


def test_with_every_hook_a_plan_writes_nothing(
    tmp_path: Path, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    histories: list[HistoryHook] = []

    async def step(numbers: list[int], more: int) -> dict[str, float]:
        assert {each: signal.getsignal(each) for each in handlers} == handlers or (
            signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
        )
        return await work()

    async def main() -> None:
        hooks = every_hook(tmp_path)
        histories.extend(each for each in hooks if isinstance(each, HistoryHook))
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run("loss")

    trace = PLAN.run(main, backend=backend)
    assert len(trace.find("run", Kind.RUN)) == 10
    assert len(trace.find("work")) == 10 + 5  # steps and evaluations
    assert len(histories[0].rows) == 10
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert threads_left() == []


def test_a_hook_of_users_that_acts_outside_says_so_and_is_left_out(tmp_path: Path) -> None:
    class Writes(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            (tmp_path / "steps.txt").write_text("1")

    class SaysSo(Writes):
        acts_outside = True

    async def main(hook: type[SessionRunHook]) -> None:
        hooks = [hook(), StopAtStepHook(last_step=3)]
        async with MonitoredSession(hooks, FunctionSessionCreator(work)) as session:
            while not session.should_stop():
                await session.run("loss")

    PLAN.run(main, hook=SaysSo)
    with pytest.raises(PlanError, match="steps.txt' for writing at .*after_run"):
        PLAN.run(main, hook=Writes)
