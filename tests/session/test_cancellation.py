"""Cancellation at every await: nothing is left running, held or open; every hook ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    GlobalStepWaiterHook,
    MonitoredSession,
    RawSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.current import current_engine
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator
from ..support.moments import HeldStep, at
from ..support.threads import own_threads
from ..support.virtual_kernel import Trampoline


class Awaits:
    """A hook that suspends at every moment, and counts begin and on_error."""

    def __init__(self, pause: Callable[..., Awaitable[None]]) -> None:
        self.pause = pause
        self.begun = self.errors = self.side_tasks = 0
        self.hook: SessionRunHook = at(
            begin=self.begin, after_create_session=self.after_create_session, before_run=self.turn,
            after_run=self.turn, end=self.turn, on_error=self.on_error,
        )  # fmt: skip

    async def turn(self, *_: object) -> None:
        await self.pause()

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

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self.pause()
        self.errors += 1


class Suspensions(Awaitable[None]):
    """Runs a coroutine and calls `act` at its n-th suspension, counted from 1."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], n: int, act: Callable[[], object]):
        self.coroutine = coroutine
        self.n = n
        self.act = act

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
            self.n -= 1
            if self.n == 0:
                self.act()
            value = error = None
            try:
                value = yield yielded
            except BaseException as thrown:
                error = thrown


class Program(ScriptedSessionCreator):
    """One session from opening to its end, with everything in it that waits; makes its model."""

    def __init__(self, pause: Callable[[], Awaitable[None]], step_runner: Any = "auto") -> None:
        self.hooks = [Awaits(pause), Awaits(pause)]
        self.raw = ScriptedSession()
        super().__init__([self.raw])
        self.step_runner = step_runner
        self.has_created = self.has_finished = False

    def create_session(self) -> RawSession:
        self.has_created = True
        return super().create_session()

    async def run(self) -> None:
        first, last = self.hooks
        hooks = [first.hook, GlobalStepWaiterHook(0), StopAtStepHook(2), last.hook]
        creator = SharedSessionCreator(self)
        session = MonitoredSession(hooks, creator, 5, step_runner=self.step_runner)
        self.step = session.global_step
        async with session:
            while not session.should_stop():
                await session.run([])
            async with self.step.exclusive():
                await first.pause()
        self.has_finished = True

    def check(self, num_cancellations: int = 1) -> None:
        for hook in self.hooks:
            assert hook.side_tasks == 0
            if num_cancellations == 1:
                assert hook.errors == (0 if self.has_finished else hook.begun)
        assert self.raw.is_closed == self.has_created
        left = self.step.statistics()
        assert (left.tickets, left.workers_open, left.is_exclusive) == (0, 0, False)
        assert left.tasks_waiting_for_ticket == 0


RUNNERS = pytest.mark.parametrize("step_runner", ["inline", "thread"])


@pytest.mark.anyio
@RUNNERS
async def test_a_cancelled_scope_leaves_nothing_behind_wherever_it_comes(step_runner: Any) -> None:
    for n in range(1, 400):
        program = Program(anyio.lowlevel.checkpoint, step_runner)
        with anyio.CancelScope() as scope:
            await Suspensions(program.run(), n, scope.cancel)
        program.check()
        assert scope.cancelled_caught or program.has_finished
        if not scope.cancel_called:
            break
    assert 15 < n < 399
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


@pytest.mark.parametrize(
    ("step_runner", "gaps"),
    [("inline", []), ("thread", []), ("thread", [1]), ("thread", [2]), ("thread", [4])],
)
def test_native_asyncio_cancellations_leave_nothing_behind(
    step_runner: Any, gaps: list[int]
) -> None:
    """A second one comes so many suspensions after the first."""

    async def main() -> None:
        for n in range(1, 400):
            program = Program(anyio.lowlevel.checkpoint, step_runner)
            task = await cancelled_natively(program, *[n + gap for gap in gaps], n)
            for thread in own_threads():
                thread.join(timeout=5)
            program.check(1 + len(gaps))
            assert len(asyncio.all_tasks()) == 1
            if program.has_finished:
                break
            assert task.cancelled()
        assert 15 < n < 399

    asyncio.run(main())


def test_a_cancellation_on_the_trampoline_leaves_nothing_behind() -> None:
    for n in range(1, 400):
        kernel = Trampoline()
        program = Program(kernel.turn)

        async def main(program: Program = program, n: int = n, kernel: Trampoline = kernel) -> None:
            async def body() -> None:
                await Suspensions(program.run(), n, lambda: task.cancel())

            task = kernel.start(body)
            await task.wait()

        kernel.run(main)
        program.check()
        if program.has_finished:
            break
    assert 10 < n < 399


@pytest.mark.anyio
async def test_a_step_that_never_ends_is_left_after_the_grace_period_and_counts_later() -> None:
    held = HeldStep()
    session = MonitoredSession([], held, 0.05, step_runner="thread")

    async def train() -> None:
        async with session:
            await session.run("x")

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await held.has_begun()
        group.cancel_scope.cancel()
    assert not held.ended.is_set()
    assert session.global_step.statistics().tickets == 1  # the thread still holds it
    held.may_end.set()
    await anyio.to_thread.run_sync(held.thread.join, 5)
    assert session.global_step.statistics().tickets == 0
    assert session.global_step.value == 1


@pytest.mark.anyio
async def test_on_error_is_shielded_but_not_for_ever() -> None:
    log: list[str] = []

    async def slow(*_: object) -> None:
        await anyio.lowlevel.checkpoint()
        log.append("on_error")

    hooks = [at(on_error=lambda *_: anyio.sleep_forever()), at(on_error=slow)]
    with anyio.CancelScope() as scope:
        async with MonitoredSession(hooks, counting_creator(), 0.05):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert log == ["on_error"]
