"""Cancellation at every await: nothing is left running, held or open; every hook ends once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import anyio
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
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import settle, turns
from ..support.moments import at
from ..support.threads import own_threads


class Awaits:
    """A hook that suspends at every moment, and counts begin and on_error."""

    def __init__(self) -> None:
        self.begun = self.errors = self.side_tasks = 0
        self.hook: SessionRunHook = at(
            begin=self.begin, after_create_session=self.after_create_session, before_run=self.turn,
            after_run=self.turn, end=self.turn, on_error=self.on_error,
        )  # fmt: skip

    async def turn(self, *_: object) -> None:
        await turns()

    async def begin(self) -> None:
        self.begun += 1
        await turns()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        coord.start_soon(self.side_task, coord)
        await turns()

    async def side_task(self, coord: Coordinator) -> None:
        self.side_tasks += 1
        try:
            await coord.wait_stopped()
        finally:
            try:
                with anyio.move_on_after(5, shield=True):
                    await turns(5)  # its clean-up takes a while, too
            finally:
                self.side_tasks -= 1

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await turns()
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

    def __init__(self, step_runner: Any) -> None:
        self.hooks = [Awaits(), Awaits()]
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
                await turns()
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


def join_threads() -> None:
    for thread in own_threads():
        thread.join(timeout=5)
    assert own_threads() == []


RUNNERS = pytest.mark.parametrize("step_runner", ["inline", "thread"])


@RUNNERS
async def test_a_cancelled_scope_leaves_nothing_behind_wherever_it_comes(step_runner: Any) -> None:
    for n in range(1, 400):
        program = Program(step_runner)
        with anyio.CancelScope() as scope:
            await Suspensions(program.run(), n, scope.cancel)
        program.check()
        assert scope.cancelled_caught or program.has_finished
        if not scope.cancel_called:
            break
    assert 15 < n < 399
    join_threads()


async def run_cancelled(program: Program, *at: int) -> None:
    """Run the program in a task of asyncio that is cancelled at its n-th suspensions."""
    task = asyncio.current_task()
    assert task is not None
    run = program.run
    for n in at:
        run = partial(as_coroutine, Suspensions(run(), n, task.cancel))
    await run()


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
            program = Program(step_runner)
            cancelled = run_cancelled(program, *[n + gap for gap in gaps], n)
            await asyncio.wait([task := asyncio.create_task(cancelled)])
            join_threads()
            program.check(1 + len(gaps))
            assert len(asyncio.all_tasks()) == 1
            if program.has_finished:
                break
            assert task.cancelled()
        assert 15 < n < 399

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["on_error", "after_close"])
async def test_a_hook_that_hangs_holds_a_cancelled_session_for_the_grace_period(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []

    async def let_go(*_: object) -> None:
        await turns()  # shielded from the cancellation of the block
        log.append("let go")

    async def hang(*_: object) -> None:
        log.append("hangs")
        await anyio.sleep_forever()

    hooks = [at(**{moment: each}) for each in (let_go, hang)]
    with anyio.CancelScope() as scope:
        async with MonitoredSession(hooks[:: -1 if moment == "on_error" else 1], dict, 0.05):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert log == ["let go", "hangs"]
    assert f"{moment} of At took longer than the grace period" in caplog.text


async def test_an_after_close_of_a_clean_end_may_take_longer_than_the_grace_period() -> None:
    seen: list[str] = []

    async def upload(exception: BaseException | None) -> None:
        await settle()
        seen.append("uploaded")

    async with MonitoredSession([at(after_close=upload)], dict, stop_grace_period_secs=0):
        pass
    assert seen == ["uploaded"]
