"""Step runners: which thread a step runs in, and how long others wait."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, SharedSessionCreator
from asynchooks._engine.current import current_engine
from asynchooks._engine.threads import StepRunner, StepTimes, WorkThread, check_runner, is_async

from ..support.helpers import another_task, settle

pytestmark = pytest.mark.anyio

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@contextmanager
def a_runner(name: Any = "auto") -> Iterator[StepRunner]:
    runner = StepRunner(current_engine(), name, 1)
    yield runner
    runner.thread.close()


@contextmanager
def a_thread() -> Iterator[WorkThread]:
    thread = WorkThread(current_engine(), "asynchooks-test")
    yield thread
    thread.close()


async def left_loop(
    runner: StepRunner, step: Callable[[], Any], times: StepTimes, kind: str = "step"
) -> bool:
    """Run a step; whether it left the event loop's thread."""
    idents = [threading.get_ident()]

    def run() -> None:
        idents.append(threading.get_ident())
        step()

    await runner.call(run, runner.kind(times, kind))
    return idents[0] != idents[1]


class Clock:
    """In place of the engine's, so that steps take as long as the test says."""

    def __init__(self) -> None:
        self.secs = 0.0

    def __enter__(self) -> Clock:
        self._engine = current_engine()
        self._now, self._engine.now = self._engine.now, lambda: self.secs
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.now = self._now

    def pass_by(self, secs: float) -> Callable[[], None]:
        """A step that takes so long."""

        def step() -> None:
            self.secs += secs

        return step


FAST, SLOW = 0.0, 0.004
"""Seconds of a step, by the test's clock."""


async def threads_of(name: Any, steps: list[float]) -> list[bool]:
    """For each step whether it left the event loop's thread, where others could run meanwhile."""
    times = StepTimes()
    async with another_task():
        with a_runner(name) as runner, Clock() as clock:
            return [await left_loop(runner, clock.pass_by(secs), times) for secs in steps]


def fast() -> None:
    pass


def slow() -> None:
    until = time.perf_counter() + 0.004
    while time.perf_counter() < until:
        pass


async def test_inline_and_thread_stay_where_they_are() -> None:
    assert await threads_of("inline", [FAST] * 3) == [False] * 3
    assert await threads_of("thread", [FAST] * 3) == [True] * 3


async def test_auto_calls_a_fast_step_inline_after_the_first() -> None:
    assert await threads_of("auto", [FAST] * 6) == [True] + [False] * 5


async def test_auto_keeps_a_slow_step_off_the_loop() -> None:
    assert await threads_of("auto", [SLOW] * 10) == [True] * 10


async def test_auto_leaves_the_loop_when_two_steps_in_a_row_have_become_slow() -> None:
    left = await threads_of("auto", [FAST] * 3 + [SLOW, FAST] + [SLOW] * 5)
    assert left == [True] + [False] * 6 + [True] * 3


async def test_auto_returns_to_the_loop_when_the_step_has_become_fast() -> None:
    left = await threads_of("auto", [SLOW] * 5 + [FAST] * 55)
    assert left == [True] * 6 + [False] * 54


BACKENDS = pytest.mark.parametrize(
    "backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})]
)


@BACKENDS
def test_a_slow_step_stays_on_the_loop_while_its_task_is_the_only_one(backend: Any) -> None:
    left: list[bool] = []

    async def main() -> None:
        times = StepTimes()
        with a_runner() as runner, Clock() as clock:

            async def run(num: int, secs: float) -> None:
                step = clock.pass_by(secs)
                left[:] = [await left_loop(runner, step, times, f"{secs} s") for _ in range(num)]

            await run(12, 0.09)
            assert left == [True] + [False] * 11
            async with another_task():
                await run(8, 0.09)
            assert left == [True] * 8, "another task could run meanwhile"
            await run(40, 0.09)
            assert left == [True] * 9 + [False] * 31, "after 16 calls it looks again"
            await run(4, 0.11)
            assert left == [True] * 4, "timers would wait too long"

    anyio.run(main, backend=backend[0], backend_options=backend[1])


@BACKENDS
def test_timers_and_cancellations_come_between_slow_steps_on_the_loop(backend: Any) -> None:
    async def main() -> None:
        times = StepTimes()
        with a_runner() as runner, anyio.move_on_after(0.05) as scope:
            for _ in range(200):
                await left_loop(runner, slow, times)
        assert scope.cancelled_caught

    anyio.run(main, backend=backend[0], backend_options=backend[1])


@BACKENDS
def test_what_was_slow_once_and_is_not_forgiven_leaves_the_loop_also_alone(backend: Any) -> None:
    async def main() -> None:
        times = StepTimes(forgives=False)
        with a_runner() as runner, Clock() as clock:
            left = [await left_loop(runner, clock.pass_by(0.003), times) for _ in range(6)]
        assert left == [True] * 6

    anyio.run(main, backend=backend[0], backend_options=backend[1])


async def test_kinds_of_steps_are_measured_separately() -> None:
    times = StepTimes()
    with a_runner() as runner, Clock() as clock:
        for _ in range(3):
            await left_loop(runner, clock.pass_by(SLOW), times, "slow")
        assert await left_loop(runner, clock.pass_by(FAST), times, "fast")
        assert not await left_loop(runner, clock.pass_by(FAST), times, "fast")


async def test_what_one_worker_learns_serves_all_on_its_raw_session() -> None:
    times = StepTimes()
    with Clock() as clock:
        for expected in (True, False, False):
            with a_runner() as runner:
                assert await left_loop(runner, clock.pass_by(FAST), times) is expected


async def test_until_the_first_call_has_returned_the_others_stay_off_the_loop() -> None:
    times, barrier = StepTimes(), threading.Barrier(2)

    async def call() -> None:
        with a_runner() as runner:
            assert await left_loop(runner, lambda: barrier.wait(30), times)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        group.start_soon(call)


async def test_a_thread_sees_the_caller_s_context_and_engine() -> None:
    variable.set("set")
    with a_thread() as thread:
        assert await thread.run(variable.get, 1) == "set"
        assert await thread.run(current_engine, 1) is current_engine()


async def test_errors_of_every_kind_come_back_as_themselves() -> None:
    with a_thread() as thread:
        for error in (ValueError("x"), StopIteration(3), KeyboardInterrupt()):

            def fail(error: BaseException = error) -> None:
                raise error

            with pytest.raises(BaseException) as caught:  # noqa: PT011
                await thread.run(fail, 1)
            # PEP 479: what leaves a coroutine is no StopIteration
            assert error in (caught.value, caught.value.__cause__)


async def test_what_an_abandoned_call_comes_to_is_not_lost() -> None:
    release, late = threading.Event(), []
    thread = WorkThread(current_engine(), "asynchooks-test")
    done = threading.Event()

    def when_late(outcome: Any) -> None:
        late.append(outcome.value)
        done.set()

    with anyio.CancelScope() as scope:
        scope.cancel()
        await thread.run(lambda: release.wait(30) and "late", 0, when_late)
    assert scope.cancelled_caught
    release.set()
    await anyio.to_thread.run_sync(done.wait)
    assert late == ["late"]


async def test_what_a_cancelled_call_comes_to_in_time_is_not_lost_either() -> None:
    release = threading.Event()
    late: list[Any] = []
    thread = WorkThread(current_engine(), "asynchooks-test")
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def call() -> None:
                await thread.run(lambda: release.wait(30) and "late", 30, late.append)

            group.start_soon(call)
            await settle()
            scope.cancel()
            release.set()
    assert [outcome.value for outcome in late] == ["late"]
    thread.close()


async def test_a_call_is_abandoned_when_its_time_has_come() -> None:
    release = threading.Event()
    engine = current_engine()
    thread = WorkThread(engine, "asynchooks-test")
    assert await thread.run(release.wait, 1, until=engine.now()) is None
    release.set()


async def test_thread_safe_steps_in_threads_run_side_by_side() -> None:
    barrier = threading.Barrier(4)

    def step() -> dict[str, int]:
        barrier.wait(30)  # ends only when all four are in it
        return {}

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))

    async def worker() -> None:
        async with MonitoredSession([], creator, step_runner="thread") as session:
            await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(worker)


async def test_a_slow_step_in_a_thread_leaves_the_event_loop_free() -> None:
    begun, release = threading.Event(), threading.Event()

    def step() -> dict[str, int]:
        begun.set()
        release.wait(30)
        return {}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await anyio.to_thread.run_sync(begun.wait)
            await settle()
            release.set()


async def test_busy_inline_sessions_share_the_loop_fairly_and_let_timers_run() -> None:
    stop = False
    counts = [0] * 8
    turns = 0

    def step() -> dict[str, int]:
        until = time.perf_counter() + 3e-5
        while time.perf_counter() < until:
            pass
        return {}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(index: int) -> None:
        async with MonitoredSession([], creator, step_runner="inline") as session:
            while not stop:
                await session.run([])
                counts[index] += 1

    async with anyio.create_task_group() as group:
        for index in range(8):
            group.start_soon(worker, index)
        while sum(counts) < 4000:
            await anyio.lowlevel.checkpoint()
            turns += 1
        stop = True
    assert turns > 20
    assert min(counts) > 0.3 * max(counts)


async def test_a_session_uses_one_thread_and_ends_it() -> None:
    seen = set()

    def step() -> dict[str, int]:
        seen.add(threading.current_thread())
        return {}

    async with MonitoredSession([], FunctionSessionCreator(step), step_runner="thread") as session:
        for _ in range(5):
            await session.run([])
        await settle()
    (thread,) = seen
    assert thread.daemon
    await anyio.to_thread.run_sync(thread.join, 5)
    assert not thread.is_alive()


def test_names_of_runners_are_checked() -> None:
    assert check_runner("auto") == "auto"
    with pytest.raises(ValueError, match="give one of auto, inline, thread"):
        check_runner(None)


def test_what_only_makes_a_coroutine_is_recognised() -> None:
    class Object:
        async def __call__(self) -> None: ...

        async def method(self) -> None: ...

    assert is_async(settle)
    assert is_async(Object())
    assert is_async(Object().method)
    assert not is_async(fast)
    assert not is_async(lambda: settle())


async def test_what_is_not_forgiven_leaves_the_event_loop_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a hook that saves now and then: between two saves it is fast."""
    times, clock = StepTimes(forgives=False), 0.0
    left: list[bool] = []
    durations = [0, 0, 1, 0, 1, *[0] * 2000]

    def call() -> None:
        nonlocal clock
        clock += durations[len(left)]

    with a_runner() as runner:
        monkeypatch.setattr(runner._engine, "now", lambda: clock)
        for _ in durations:
            left.append(await left_loop(runner, call, times))
    assert left[:5] == [True, False, False, False, False]
    assert all(left[5:])
