"""All ways to ask for a stop, after the third run of a worker: for tests of what follows."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import (
    Coordinator,
    MonitoredSession,
    SessionCreator,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopReason,
)
from asynchooks.testing import RecordingHook

AT = 3
REASON = StopReason("the test", "it is enough")
ERROR = OSError("the simulator is gone")


class Asks(SessionRunHook):
    """A way to ask: overrides a moment, or `between`, which the body of the block awaits."""

    error: BaseException | None = None
    """What leaves the block for it."""

    def __init__(self, all_workers: bool) -> None:
        self.all_workers = all_workers
        self.num_runs = 0
        self.has_asked = anyio.Event()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coord = coord

    async def before_run(self, run_context: SessionRunContext) -> None:
        self.num_runs += 1

    async def between(self, session: MonitoredSession) -> None:
        """After each run of the worker that asks."""

    @property
    def is_due(self) -> bool:
        return self.num_runs == AT


class BeforeRun(Asks):
    async def before_run(self, run_context: SessionRunContext) -> None:
        await super().before_run(run_context)
        if self.is_due:
            run_context.request_stop(REASON, all_workers=self.all_workers)


class AfterRun(Asks):
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self.is_due:
            run_context.request_stop(REASON, all_workers=self.all_workers)


class AtTheEndOfARun(Asks):
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        async def ask() -> None:
            run_context.request_stop(REASON, all_workers=self.all_workers)

        if self.is_due:
            run_context.finish_with(ask)


class Plain(Asks):
    """A plain method, which may run in a thread."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self.is_due:
            run_context.request_stop(REASON, all_workers=self.all_workers)


class Caller(Asks):
    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            session.request_stop(REASON, all_workers=self.all_workers)


class CallersThread(Asks):
    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            call_in_thread(lambda: session.request_stop(REASON, all_workers=self.all_workers))


class TheCoordinator(Asks):
    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            self.coord.request_stop(reason=REASON, all_workers=self.all_workers)


class CoordinatorsThread(Asks):
    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            call_in_thread(
                lambda: self.coord.request_stop(reason=REASON, all_workers=self.all_workers)
            )


class SideTask(Asks):
    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        self.wants = anyio.Event()
        coord.start_soon(self.ask)

    async def ask(self) -> None:
        await self.coord.or_stop(self.wants.wait)
        self.coord.request_stop(reason=REASON, all_workers=self.all_workers)
        self.has_asked.set()

    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            self.wants.set()
            await self.has_asked.wait()


class SessionsSideTask(Asks):
    async def between(self, session: MonitoredSession) -> None:
        async def ask() -> None:
            session.request_stop(REASON, all_workers=self.all_workers)
            self.has_asked.set()

        if self.is_due:
            session.start_soon(ask)
            await self.has_asked.wait()


class CallerWithError(Asks):
    error = ERROR

    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            session.request_stop(ERROR, all_workers=self.all_workers)


class CoordinatorWithError(Asks):
    error = ERROR

    async def between(self, session: MonitoredSession) -> None:
        if self.is_due:
            self.coord.request_stop(ERROR, all_workers=self.all_workers)


class SideTaskFails(Asks):
    """Which stops all workers in any case, as an error of one of them does."""

    error = ERROR

    async def between(self, session: MonitoredSession) -> None:
        async def fail() -> None:
            raise ERROR

        if self.is_due:
            session.start_soon(fail, name="rollouts")
            while not session.should_stop():
                await anyio.lowlevel.checkpoint()


WAYS: list[type[Asks]] = [
    BeforeRun,
    AfterRun,
    AtTheEndOfARun,
    Plain,
    Caller,
    CallersThread,
    TheCoordinator,
    CoordinatorsThread,
    SideTask,
    SessionsSideTask,
    CallerWithError,
    CoordinatorWithError,
    SideTaskFails,
]


def call_in_thread(fn: Callable[[], Any]) -> None:
    thread = threading.Thread(target=fn, name="asks")
    thread.start()
    thread.join()


class Training:
    """Workers that never look at should_stop(); the first one asks for a stop."""

    def __init__(self, way: type[Asks], num_workers: int, *, all_workers: bool) -> None:
        self.asks = way(all_workers)
        self.hooks = [RecordingHook(str(i)) for i in range(num_workers)]
        self.num_runs = [0] * num_workers
        self.left: list[BaseException | None] = [None] * num_workers
        self.sessions: list[MonitoredSession] = []
        self.num_open = 0
        self.all_open = anyio.Event()

    async def run(
        self,
        make: Callable[[Iterable[Any], SessionCreator], MonitoredSession],
        creator: SessionCreator,
        fetches: Any,
    ) -> None:
        for i, hook in enumerate(self.hooks):
            self.sessions.append(make([self.asks, hook] if i == 0 else [hook], creator))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for i in range(len(self.hooks)):
                    group.start_soon(self._work, i, fetches)

    async def _work(self, i: int, fetches: Any) -> None:
        between: Callable[[MonitoredSession], Awaitable[None]] | None = None
        if i == 0:
            between = self.asks.between
        try:
            async with self.sessions[i] as session:
                self.num_open += 1
                if self.num_open == len(self.hooks):
                    self.all_open.set()
                await self.all_open.wait()
                for _ in range(100_000):
                    await session.run(fetches)
                    self.num_runs[i] += 1
                    if between is not None:
                        await between(session)
                    await anyio.lowlevel.checkpoint()
                raise AssertionError("a stop was asked for, and no run ended the block")
        except OSError as error:
            self.left[i] = error

    def check(self) -> None:
        """Each run was whole, none began in vain, every block ended well, for one reason."""
        assert self.num_runs[0] == AT
        assert self.left == [self.asks.error] + [None] * (len(self.hooks) - 1)
        reason = str(self.sessions[0].stop_reason)
        assert [str(each.stop_reason) for each in self.sessions] == [reason] * len(self.hooks)
        if self.asks.error is None:
            assert reason == str(REASON)
        for hook, num_runs in zip(self.hooks, self.num_runs, strict=True):
            moments = [moment for _, moment in hook.log]
            assert moments.count("end") == 1
            assert moments.count("after_run") == num_runs
