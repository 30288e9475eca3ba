"""One fault at one place of one worker among several, and what all of them came to.

What should come of it the tests say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopReason,
)

MANY_SECS = 10
"""How long all workers together may take: a hang is what a broken stop looks like."""

current_worker: ContextVar[int] = ContextVar("current_worker", default=-1)


class FaultError(Exception):
    """What is made to happen."""


class Kind(Enum):
    """What happens at the place of the fault."""

    ERROR = auto()
    CANCEL = auto()
    INPUT_ENDS = auto()


class Fault:
    """One fault, at the n-th time that its worker comes to its place; the test makes it.

    A model is restored by whichever worker opens first: at "restore" it is any worker's.
    """

    def __init__(self, place: str, kind: Kind, worker: int = 0, nth: int = 1) -> None:
        self.place = place
        self.kind = kind
        self.worker = worker
        self.error: Exception = FaultError(f"{kind.name} at {place}")
        self.scope = anyio.CancelScope()
        self.is_over = anyio.Event()  # its worker has left
        self.num_played = 0
        self._left = nth
        self._token = anyio.lowlevel.current_token()
        self._loop_thread = threading.get_ident()

    def _is_now(self, place: str) -> bool:
        is_mine = current_worker.get() == self.worker or place == "restore"
        if place != self.place or not is_mine:
            return False
        self._left -= 1
        self.num_played += self._left == 0
        return self._left == 0

    async def at(self, place: str) -> None:
        """A coroutine comes to the place."""
        await anyio.lowlevel.checkpoint()
        if not self._is_now(place):
            return
        if self.kind is Kind.ERROR:
            raise self.error
        if self.kind is Kind.INPUT_ENDS:
            raise StopAsyncIteration
        self.scope.cancel()
        await anyio.lowlevel.checkpoint()

    def at_plain(self, place: str) -> None:
        """A plain function comes to it, on the event loop or in a thread."""
        if not self._is_now(place):
            return
        if self.kind is Kind.ERROR:
            raise self.error
        if self.kind is Kind.INPUT_ENDS:
            raise StopIteration
        if threading.get_ident() == self._loop_thread:
            self.scope.cancel()
        else:
            anyio.from_thread.run_sync(self.scope.cancel, token=self._token)


class Witness(SessionRunHook):
    """Counts what it is told, and plays a fault, if it is given one."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.begun = self.ended = self.told = 0

    async def _at(self, place: str) -> None:
        if self.fault is None:
            await anyio.lowlevel.checkpoint()
        else:
            await self.fault.at(place)

    async def begin(self) -> None:
        self.begun += 1
        await self._at("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self.fault is not None and self.fault.place == "side task of coord":
            coord.start_soon(self.fault.at, "side task of coord")
        await self._at("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        await self._at("before_run")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._at("after_run")
        run_context.finish_with(lambda: self._at("finish_with"))

    async def end(self, session: Any) -> None:
        self.ended += 1
        await self._at("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.told += 1
        await anyio.lowlevel.checkpoint()


class Worker:
    """One worker's hooks, and what it came to."""

    def __init__(self, hooks: list[SessionRunHook]) -> None:
        self.hooks = hooks
        self.left: BaseException | None = None
        self.reason: StopReason | None = None

    @property
    def begun(self) -> list[int]:
        return [hook.begun for hook in self.hooks if isinstance(hook, Witness)]

    @property
    def ended(self) -> list[int]:
        return [hook.ended for hook in self.hooks if isinstance(hook, Witness)]

    @property
    def told(self) -> list[int]:
        return [hook.told for hook in self.hooks if isinstance(hook, Witness)]


def step_of(fault: Fault) -> tuple[Callable[[], Any], Any]:
    """A step function that plays the fault, and the `step_runner` that its place asks for."""

    def plain() -> dict[str, float]:
        fault.at_plain(fault.place)
        return {"loss": 0.5}

    async def in_a_coroutine() -> dict[str, float]:
        await fault.at("async step")
        return {"loss": 0.5}

    if fault.place == "async step":
        return in_a_coroutine, "auto"
    if fault.place in ("inline step", "step in a thread"):
        return plain, "inline" if fault.place == "inline step" else "thread"
    return lambda: {"loss": 0.5}, "inline"


async def play(
    fault: Fault, workers: list[Worker], *, num_steps: int, waits_for_stop: bool
) -> SharedSessionCreator:
    """Open a session per worker, each in a task of its own, and train until all have left.

    Args:
        num_steps: runs that the worker of the fault makes in its block, unless it is stopped.
        waits_for_stop: whether the others train until they are stopped, however long that takes;
            else until the worker of the fault has left.
    """
    step, runner = step_of(fault)
    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def train(session: MonitoredSession, place: int) -> None:
        if place == fault.worker and fault.place == "side task of the session":
            session.start_soon(fault.at, fault.place)
        if place == fault.worker:
            for _ in range(num_steps):
                if not session.should_stop():
                    await session.run("loss")
                    await anyio.lowlevel.checkpoint()
            return
        while not session.should_stop() and (waits_for_stop or not fault.is_over.is_set()):
            await session.run("loss")
            # An event loop that is never idle keeps Python's lock: each of the hundred system calls
            # of a save then waits 5 ms for it, and all saves of a test for seconds.
            await anyio.sleep(0.001)

    async def run(place: int) -> None:
        current_worker.set(place)
        worker = workers[place]
        session = MonitoredSession(worker.hooks, creator, 5, step_runner=runner)
        with fault.scope if place == fault.worker else anyio.CancelScope():
            try:
                async with session:
                    await train(session, place)
            except BaseException as error:
                worker.left = error
                if not isinstance(error, Exception):
                    raise
            finally:
                worker.reason = session.stop_reason
                if place == fault.worker:
                    fault.is_over.set()

    with anyio.fail_after(MANY_SECS):
        async with anyio.create_task_group() as group:
            for place in range(len(workers)):
                group.start_soon(run, place)
    return creator
