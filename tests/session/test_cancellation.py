"""Cancellation at every await: nothing is left running, held or open; every hook ends once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    RawSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.current import current_engine
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, settle
from ..support.threads import own_threads
from ..support.virtual_kernel import Trampoline


class Awaits(SessionRunHook):
    """Suspends at every moment, and counts begin, end and on_error."""

    def __init__(self, pause: Callable[[], Awaitable[None]]) -> None:
        self.pause = pause
        self.begun = self.ended = self.errors = 0
        self.side_tasks = 0

    async def begin(self) -> None:
        self.begun += 1
        await self.pause()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        coord.start_soon(self.side_task, coord)
        await self.pause()

    async def side_task(self, coord: Coordinator) -> None:
        self.side_tasks += 1
        try:
            await coord.wait_stopped()
        finally:
            try:
                with current_engine().shielded(5):
                    for _ in range(5):  # its clean-up takes a while, too
                        await self.pause()
            finally:
                self.side_tasks -= 1

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self.pause()

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self.pause()

    async def end(self, session: Any) -> None:
        self.ended += 1
        await self.pause()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self.pause()
        self.errors += 1


class Suspensions(Awaitable[None]):
    """Runs a coroutine and calls `act` at its n-th suspension, counted from 1."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], n: int, act: Callable[[], object]):
        self.coroutine = coroutine
        self.n = n
        self.act = act
        self.seen = 0

    def __await__(self) -> Generator[Any, Any, None]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is None:
                    yielded = self.coroutine.send(value)
                else:
                    yielded = self.coroutine.throw(error)
            except StopIteration:
                return
            self.seen += 1
            if self.seen == self.n:
                self.act()
            value = error = None
            try:
                value = yield yielded
            except BaseException as thrown:
                error = thrown


class Program:
    """One session from opening to its end, with everything in it that waits."""

    def __init__(self, pause: Callable[[], Awaitable[None]], step_runner: Any) -> None:
        self.hooks = [Awaits(pause), Awaits(pause)]
        self.raw = ScriptedSession()
        self.has_created = False
        self.creator = SharedSessionCreator(Creates(self))
        self.step_runner = step_runner
        self.has_finished = False

    async def run(self) -> None:
        hooks = [self.hooks[0], GlobalStepWaiterHook(0), StopAtStepHook(2), self.hooks[1]]
        session = MonitoredSession(hooks, self.creator, 5, step_runner=self.step_runner)
        self.step = session.global_step
        async with session:
            while not session.should_stop():
                await session.run([])
            async with self.step.exclusive():
                await self.hooks[0].pause()
        self.has_finished = True

    def check(self) -> None:
        for hook in self.hooks:
            assert hook.errors == (0 if self.has_finished else hook.begun)
            assert hook.side_tasks == 0
        assert self.raw.is_closed == self.has_created
        statistics = self.step.statistics()
        assert statistics.tickets == 0
        assert statistics.workers_open == 0
        assert not statistics.is_exclusive
        assert statistics.tasks_waiting_for_ticket == 0


class Creates(ScriptedSessionCreator):
    """Gives the program's raw session, and notes that it did."""

    def __init__(self, program: Program) -> None:
        super().__init__([program.raw])
        self.program = program

    def create_session(self) -> RawSession:
        self.program.has_created = True
        return super().create_session()


@pytest.mark.anyio
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_cancelled_scope_leaves_nothing_behind_wherever_it_comes(step_runner: Any) -> None:
    for n in range(1, 400):
        program = Program(anyio.lowlevel.checkpoint, step_runner)
        with anyio.CancelScope() as scope:
            await Suspensions(program.run(), n, scope.cancel)
        program.check()
        assert scope.cancelled_caught or program.has_finished
        if not scope.cancel_called:
            assert n > 15
            break
    else:
        raise AssertionError("the program never ended")
    for thread in own_threads():
        thread.join(timeout=5)
    assert own_threads() == []


async def cancelled_natively(program: Program, *at: int) -> asyncio.Task[None]:
    """Run the program in a task that is cancelled at its n-th suspensions; it has ended."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        coroutine = program.run()
        for n in at:
            coroutine = as_coroutine(Suspensions(coroutine, n, task.cancel))
        await coroutine

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    return task


async def as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
def test_a_native_asyncio_cancellation_leaves_nothing_behind(step_runner: Any) -> None:
    async def main() -> None:
        for n in range(1, 400):
            program = Program(anyio.lowlevel.checkpoint, step_runner)
            task = await cancelled_natively(program, n)
            program.check()
            assert len(asyncio.all_tasks()) == 1
            if not task.cancelled():
                task.result()
                assert program.has_finished
                assert n > 15
                return

    asyncio.run(main())


@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_two_native_cancellations_leave_nothing_running_or_open(gap: int) -> None:
    async def main() -> None:
        for n in range(1, 400):
            program = Program(anyio.lowlevel.checkpoint, "thread")
            await cancelled_natively(program, n + gap, n)
            for thread in own_threads():
                thread.join(timeout=5)
            statistics = program.step.statistics()
            assert statistics.workers_open == 0
            assert statistics.tickets == 0
            assert program.raw.is_closed == program.has_created
            assert [hook.side_tasks for hook in program.hooks] == [0, 0]
            assert len(asyncio.all_tasks()) == 1
            if program.has_finished:
                return

    asyncio.run(main())


def test_a_cancellation_on_the_trampoline_leaves_nothing_behind() -> None:
    for n in range(1, 400):
        kernel = Trampoline()
        program = Program(kernel.turn, "auto")
        finished = False

        async def main(program: Program = program, n: int = n, kernel: Trampoline = kernel) -> None:
            nonlocal finished

            async def body() -> None:
                await Suspensions(program.run(), n, lambda: task.cancel())

            task = kernel.start(body)
            await task.wait()
            finished = True

        kernel.run(main)
        assert finished
        program.check()
        if program.has_finished:
            assert n > 10
            return
    raise AssertionError("the program never ended")


def test_or_stop_hands_a_foreign_cancellation_on() -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()

        async def foreign() -> None:
            await future

        async with MonitoredSession([], counting_creator()) as session:
            asyncio.get_running_loop().call_soon(future.cancel)
            with pytest.raises(asyncio.CancelledError):
                await session.or_stop(foreign)
            assert not session.should_stop()

    asyncio.run(main())


@pytest.mark.anyio
async def test_a_cancelled_step_in_a_thread_is_waited_for_and_counts() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def step() -> dict[str, int]:
        begun.set()
        may_end.wait(30)
        return {"x": 1}

    async with MonitoredSession([], FunctionSessionCreator(step), step_runner="thread") as session:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, "x")
                await anyio.to_thread.run_sync(begun.wait)
                scope.cancel()
                may_end.set()
        assert session.global_step.value == 1
        assert session.global_step.statistics().tickets == 0
        assert await session.run("x") == 1
        assert session.global_step.value == 2


@pytest.mark.anyio
async def test_a_step_that_never_ends_is_left_after_the_grace_period() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> dict[str, int]:
        begun.set()
        may_end.wait(30)
        ended.set()
        return {"x": 1}

    creator = FunctionSessionCreator(step)
    session = MonitoredSession([], creator, 0.05, step_runner="thread")
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def train() -> None:
                async with session:
                    await session.run("x")

            group.start_soon(train)
            await anyio.to_thread.run_sync(begun.wait)
            scope.cancel()
    assert not ended.is_set()
    assert session.global_step.statistics().tickets == 1  # the thread still holds it
    may_end.set()
    await anyio.to_thread.run_sync(ended.wait)
    for thread in own_threads():
        await anyio.to_thread.run_sync(thread.join, 5)
    assert session.global_step.statistics().tickets == 0
    assert session.global_step.value == 1


@pytest.mark.anyio
async def test_on_error_is_shielded_but_not_for_ever() -> None:
    log = []

    class Slow(SessionRunHook):
        def __init__(self, wait: Callable[[], Awaitable[None]]) -> None:
            self.wait = wait

        async def on_error(self, session: Any, exception: BaseException) -> None:
            await self.wait()
            log.append("on_error")

    turn = anyio.lowlevel.checkpoint
    hooks = [Slow(turn), Slow(anyio.sleep_forever), Slow(turn)]
    with anyio.CancelScope() as scope:
        async with MonitoredSession(hooks, counting_creator(), 0.05):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert log[:1] == ["on_error"]


@pytest.mark.anyio
async def test_a_worker_that_is_cancelled_lets_the_others_reach_the_last_step() -> None:
    async def step() -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return {"x": 1}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    steps: list[int] = []

    async def worker(scope: anyio.CancelScope, fails: bool) -> None:
        with scope:
            async with MonitoredSession([StopAtStepHook(last_step=50)], creator) as session:
                while not session.should_stop():
                    await session.run("x")
                    if fails and session.global_step.value > 20:
                        raise StopTraining
                steps.append(session.global_step.value)

    scopes = [anyio.CancelScope() for _ in range(6)]
    async with anyio.create_task_group() as group:
        for i, scope in enumerate(scopes):
            group.start_soon(worker, scope, i == 5)
        await settle()
        scopes[0].cancel()
        scopes[3].cancel()
    assert set(steps) == {50}


class CancelsAfterRun(SessionRunHook):
    """Cancels a task when its own run has ended, so that the task has not run since."""

    task: asyncio.Task[Any]

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.task.cancel()  # as natively, which also reaches a task that is about to go on


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
@pytest.mark.anyio
async def test_a_run_that_is_cancelled_as_its_turn_comes_leaves_the_turn_to_others(
    anyio_backend: Any,
) -> None:
    may_end = anyio.Event()

    async def step() -> dict[str, Any]:
        await may_end.wait()
        return {}

    creator, cancels = SharedSessionCreator(step), CancelsAfterRun()
    async with (
        MonitoredSession([StopAtStepHook(last_step=3), cancels], creator) as first,
        MonitoredSession([], creator) as second,
    ):
        run = asyncio.create_task(first.run([]))  # others wait until its stride is known
        await settle()
        cancels.task = asyncio.create_task(second.run([]))
        await settle()
        assert first.global_step.statistics().tasks_waiting_for_ticket == 1
        may_end.set()
        await run
        with pytest.raises(asyncio.CancelledError):
            await cancels.task
        statistics = first.global_step.statistics()
        assert (statistics.value, statistics.tickets) == (1, 0)
        while not second.should_stop():
            await second.run([])
    assert first.global_step.value == 3
