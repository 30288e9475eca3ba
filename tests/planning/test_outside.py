"""A plan runs in a process of its own, in virtual time, and hooks that act outside are left out."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
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
from asynchooks.planning import PlanError, _child, timed

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


def refused(act: Callable[[], Any], match: str, backend: Any = "asyncio") -> PlanError:
    with pytest.raises(PlanError, match=match) as caught:
        PLAN.run(partial(do, act), backend=backend)
    return caught.value


def test_what_a_program_changes_in_its_process_is_not_changed_here(backend: Any) -> None:
    changed: list[int] = []

    async def main() -> None:
        await work()
        changed.append(1)
        os.environ["ASYNCHOOKS_PLANNED"] = "1"
        threading.Thread(target=changed.append, args=(2,)).start()

    PLAN.run(main, backend=backend)
    assert changed == []
    assert "ASYNCHOOKS_PLANNED" not in os.environ
    assert threads_left() == []


class OwnError(Exception):
    pass


class UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()  # other libraries may have taught pickle all else


def test_an_error_of_the_program_has_its_traceback_in_a_note(backend: Any) -> None:
    def act() -> None:
        raise OwnError("diverged")

    with pytest.raises(OwnError, match="diverged") as caught:
        PLAN.run(partial(do, act), backend=backend)
    assert any("in act" in each and "test_outside.py" in each for each in caught.value.__notes__)


def test_an_error_that_cannot_be_sent_is_shown_as_a_plan_error() -> None:
    def act() -> None:
        raise UnsendableError(1, 2)

    assert "in act" in str(refused(act, "UnsendableError: 1 and 2").__notes__)


def test_a_program_that_dies_is_an_error_with_its_exit_code() -> None:
    refused(lambda: os._exit(7), r"process of the plan has died \(exit code 7\)")
    refused(lambda: os.kill(os.getpid(), signal.SIGKILL), r"died \(exit code -9\)")


def test_an_interrupt_of_the_program_is_one_here() -> None:
    def act() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PLAN.run(partial(do, act))


def test_plans_run_in_several_threads_at_a_time() -> None:
    ended: list[float] = []
    threads = [
        threading.Thread(target=lambda: ended.append(PLAN.run(work).ended)) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert ended == [0.5] * 4


@pytest.mark.anyio
async def test_a_plan_is_made_in_a_thread_of_an_event_loop() -> None:
    assert (await anyio.to_thread.run_sync(PLAN.run, work)).ended == 0.5


def run_and_send(connection: Connection) -> None:
    connection.send(PLAN.run(work).ended)


@pytest.mark.faults
def test_a_plan_is_made_in_a_process_of_a_pool() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=run_and_send, args=(theirs,), daemon=True
    )
    process.start()
    assert ours.poll(60)
    assert ours.recv() == 0.5
    process.join(60)


def test_a_warning_of_the_program_is_treated_as_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="slow"):
            PLAN.run(partial(do, lambda: warnings.warn("slow", stacklevel=1)))


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


def test_clocks_of_this_process_are_left_alone() -> None:
    before = time.monotonic, time.perf_counter, time.time, time.time_ns
    PLAN.run(work)
    assert (time.monotonic, time.perf_counter, time.time, time.time_ns) == before


def test_a_program_that_ends_its_process_is_refused() -> None:
    async def main() -> None:
        await work()
        sys.exit(3)

    with pytest.raises(PlanError, match="ends its process, with code 3"):
        PLAN.run(main)


def test_a_loop_by_the_clock_ends_in_virtual_time() -> None:
    async def main() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 100.0:
            await work()

    assert PLAN.run(main).ended == pytest.approx(100.0, abs=0.6)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_child, "STALL_SECS", 1.0)


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
    error = refused(act, "without an event in virtual time, which stands at 0.5 s.*make what waits")
    assert "test_outside.py" in error.__notes__[0]


@pytest.mark.usefixtures("little_patience")
def test_a_wait_is_refused_on_every_kernel(backend: Any) -> None:
    refused(lambda: threading.Event().wait(), "without an event in virtual time", backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_that_takes_turns_is_no_stall(backend: Any) -> None:
    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(PlanError, match="spent no virtual time"):
        PLAN.run(main, backend=backend)


@pytest.mark.usefixtures("little_patience")
def test_a_step_in_a_thread_that_blocks_is_refused_with_its_place() -> None:
    def step() -> dict[str, float]:
        threading.Event().wait()
        return {"loss": 0.0}

    async def main() -> None:
        await work()
        creator = FunctionSessionCreator(step)
        async with MonitoredSession([], creator, step_runner="thread") as session:
            await session.run("loss")

    with pytest.raises(PlanError, match="without an event in virtual time") as caught:
        PLAN.run(main)
    assert "in step" in caught.value.__notes__[0]


@pytest.mark.usefixtures("little_patience")
def test_what_never_comes_back_to_python_is_given_up() -> None:
    def act() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        spin()

    refused(act, "has not come back to Python")


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

    async def step(numbers: list[int], more: int) -> dict[str, float]:
        assert {each: signal.getsignal(each) for each in handlers} == handlers or (
            signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
        )
        return await work()

    async def main() -> None:
        hooks = every_hook(tmp_path)
        (history,) = (each for each in hooks if isinstance(each, HistoryHook))
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run("loss")
        assert len(history.rows) == 10

    trace = PLAN.run(main, backend=backend)
    assert len(trace.find("run", Kind.RUN)) == 10
    assert len(trace.find("work")) == 10 + 5  # steps and evaluations
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
    assert list(tmp_path.iterdir()) == []
    PLAN.run(main, hook=Writes)
    assert (tmp_path / "steps.txt").read_text() == "1"
