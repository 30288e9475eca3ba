"""All ways to ask for a stop, after the third run of a worker: for tests of what follows."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio

from asynchooks import MonitoredSession, SessionCreator, SessionRunHook, StopReason
from asynchooks.testing import RecordingHook

from .helpers import turns

AT = 3
REASON = StopReason("the test", "it is enough")
ERROR = OSError("the simulator is gone")

IN_RUN = ("before_run", "after_run", "the end of a run", "a plain hook")
WITH_ERROR = ("the caller, an error", "the coordinator, an error", "a side task that fails")
"""What asks with an error, which leaves the block, so that all workers stop."""
WAYS = (
    *IN_RUN, *WITH_ERROR, "the caller", "a thread", "the coordinator", "a thread, the coordinator",
    "a side task", "a side task of the session",
)  # fmt: skip


class Asks(SessionRunHook):
    """Asks in one of the `WAYS`: in a run, or in `between`, which the body of the block awaits."""

    def __init__(self, way: str, *, all_workers: bool) -> None:
        self.way = way
        self.how = {"all_workers": all_workers}
        self.num_runs = 0
        self.error = ERROR if way in WITH_ERROR else None

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord

    async def before_run(self, run_context: Any) -> None:
        self.num_runs += 1
        self.ask_if("before_run", run_context)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        async def ask() -> None:
            self.ask_if("the end of a run", run_context)

        self.ask_if("after_run", run_context)
        run_context.finish_with(ask)

    def ask_if(self, way: str, run_context: Any) -> None:
        if self.way == way and self.num_runs == AT:
            run_context.request_stop(REASON, **self.how)

    async def between(self, session: MonitoredSession) -> None:
        """After each run of the worker that asks."""
        if self.num_runs != AT:
            return
        by_session = partial(session.request_stop, REASON, **self.how)
        by_coord = partial(self.coord.request_stop, reason=REASON, **self.how)
        match self.way:
            case "the caller":
                by_session()
            case "the caller, an error":
                session.request_stop(ERROR, **self.how)
            case "a thread":
                call_in_thread(by_session)
            case "the coordinator":
                by_coord()
            case "the coordinator, an error":
                self.coord.request_stop(ERROR, **self.how)
            case "a thread, the coordinator":
                call_in_thread(by_coord)
            case "a side task":
                await call_in_task(self.coord.start_soon, by_coord)
            case "a side task of the session":
                await call_in_task(session.start_soon, by_session)
            case "a side task that fails":
                session.start_soon(fail, name="rollouts")
                while not session.should_stop():
                    await turns()


class PlainAsks(Asks):
    """With a plain method, which may run in a thread."""

    def after_run(self, run_context: Any, run_values: Any) -> Any:
        self.ask_if("a plain hook", run_context)


def call_in_thread(fn: Callable[[], Any]) -> None:
    thread = threading.Thread(target=fn, name="asks")
    thread.start()
    thread.join()


async def call_in_task(start: Callable[..., None], fn: Callable[[], Any]) -> None:
    has_ended = anyio.Event()

    async def call() -> None:
        fn()
        has_ended.set()

    start(call)
    await has_ended.wait()


async def fail() -> None:
    raise ERROR


class Training:
    """Workers that never look at should_stop(); the first one asks for a stop."""

    def __init__(self, way: str, num_workers: int = 1, *, all_workers: bool = False) -> None:
        self.asks = (PlainAsks if way == "a plain hook" else Asks)(way, all_workers=all_workers)
        self.hooks = [RecordingHook(str(i)) for i in range(num_workers)]
        self.num_runs = [0] * num_workers
        self.left: list[BaseException | None] = [None] * num_workers
        self.sessions: list[MonitoredSession] = []
        self.num_open = 0
        self.all_open = anyio.Event()

    async def run(self, creator: SessionCreator) -> None:
        for i, hook in enumerate(self.hooks):
            self.sessions.append(MonitoredSession([self.asks, hook] if i == 0 else [hook], creator))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for i in range(len(self.hooks)):
                    group.start_soon(self._work, i)

    async def _work(self, i: int) -> None:
        try:
            async with self.sessions[i] as session:
                self.num_open += 1
                if self.num_open == len(self.hooks):
                    self.all_open.set()
                await self.all_open.wait()
                for _ in range(100_000):
                    await session.run("calls")
                    self.num_runs[i] += 1
                    if i == 0:
                        await self.asks.between(session)
                    await turns()
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
