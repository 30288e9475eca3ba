"""One fault at one place of one worker among several, and what all of them came to.

What should come of it the tests say.
"""

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum, auto
from importlib.util import find_spec
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

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

from .helpers import turns

MANY_SECS = 10
"""How long all workers together may take: a hang is what a broken stop looks like."""

current_worker: ContextVar[int] = ContextVar("current_worker", default=-1)


class FaultError(Exception):
    """What is made to happen."""


class Halt(BaseException):
    """An error of the user's own that no `except Exception` catches."""


class Kind(Enum):
    """What happens at the place of the fault."""

    ERROR = auto()
    CANCEL = auto()
    INPUT_ENDS = auto()
    HALT = auto()
    SKIP = auto()
    CANCELLED_ELSEWHERE = auto()
    """Something that was awaited, such as an upload, was cancelled, not the worker."""
    INTERRUPT = auto()
    EXIT = auto()

    @property
    def is_error(self) -> bool:
        """Whether an error is raised that should leave as itself."""
        return self not in (Kind.CANCEL, Kind.INPUT_ENDS)

    def new_error(self, place: str) -> BaseException:
        """What is raised if it is an error."""
        kinds: dict[Kind, Callable[[str], BaseException]] = {
            Kind.HALT: Halt,
            Kind.SKIP: pytest.skip.Exception,
            Kind.CANCELLED_ELSEWHERE: asyncio.CancelledError,
            Kind.INTERRUPT: KeyboardInterrupt,
            Kind.EXIT: SystemExit,
        }
        return kinds.get(self, FaultError)(f"{self.name} at {place}")


class Start(Enum):
    """When the worker of the fault begins to open."""

    TOGETHER = auto()
    FIRST = auto()
    """The others begin when it is open, or has left."""
    LAST = auto()
    """Each of the others has made a step; for a fault at "restore", each is open, as no model is
    restored after a step."""


UVLOOP: Any = ("asyncio", {"use_uvloop": True})
LOOPS: list[Any] = ["asyncio", "trio", *([UVLOOP] if find_spec("uvloop") else [])]
"""Values of `anyio_backend`, for tests that thin the product of all that they vary."""


def covering(*axes: Iterable[Any], strength: int = 2) -> list[Any]:
    """Combinations of one value of each axis, among which any `strength` axes meet in every way.

    They are some of the whole product, the same each time.
    """
    product = list(itertools.product(*[list(enumerate(each)) for each in axes]))
    random.Random(1).shuffle(product)
    met: set[Any] = set()
    found = []
    for values in product:
        places = [(axis, index) for axis, (index, _) in enumerate(values)]
        ways = set(itertools.combinations(places, strength))
        if not ways <= met:
            met |= ways
            named = [name_of(value) for _, value in values]
            found.append(pytest.param(*[value for _, value in values], id="-".join(named)))
    return found


def name_of(value: Any) -> str:
    """How a value is called in the name of a test."""
    if value == UVLOOP:
        return "uvloop"
    return str(getattr(value, "name", getattr(value, "__name__", value)))


class Fault:
    """One fault, at the n-th time that its worker comes to its place; the test makes it.

    A model is restored by whichever worker opens first: at "restore" it is any worker's.
    """

    def __init__(self, place: str, kind: Kind, worker: int = 0, nth: int = 1) -> None:
        self.place = place
        self.kind = kind
        self.worker = worker
        self.error = kind.new_error(place)
        self.scope = anyio.CancelScope()
        self.has_opened = anyio.Event()  # its worker has, or has left
        self.is_over = anyio.Event()  # its worker has left
        self.num_played = 0
        self.num_closes: list[int] = []  # of each raw session that was made
        self._left = nth
        self._token = anyio.lowlevel.current_token()
        self._loop_thread = threading.get_ident()

    def _plays(self, place: str, end_of_input: type[Exception]) -> bool:
        """Raise or cancel, if it is now; returns whether it has cancelled."""
        is_mine = current_worker.get() == self.worker or place == "restore"
        if place != self.place or not is_mine:
            return False
        self._left -= 1
        if self._left != 0:
            return False
        self.num_played += 1
        if self.kind.is_error:
            raise self.error
        if self.kind is Kind.INPUT_ENDS:
            raise end_of_input
        if threading.get_ident() == self._loop_thread:
            self.scope.cancel()
        else:
            anyio.from_thread.run_sync(self.scope.cancel, token=self._token)
        return True

    async def at(self, place: str) -> None:
        """A coroutine comes to the place."""
        await turns()
        if self._plays(place, StopAsyncIteration):
            await turns()

    def at_plain(self, place: str) -> None:
        """A plain function comes to it, on the event loop or in a thread."""
        self._plays(place, StopIteration)


class Witness(SessionRunHook):
    """Counts its first and last moments, and plays a fault, if it is given one."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.begun = self.ended = self.num_errors = 0  # the last: calls of on_error

    async def _at(self, place: str) -> None:
        if self.fault is None:
            await turns()
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
        self.num_errors += 1
        await turns()


class Worker:
    """One worker's hooks, and what it came to."""

    def __init__(self, hooks: list[SessionRunHook]) -> None:
        self.hooks = hooks
        self.left: BaseException | None = None
        self.is_cancelled = False  # it left by its own cancellation
        self.is_late = False  # it began to open when the worker of the fault had left
        self.has_run = anyio.Event()  # or has left
        self.reason: StopReason | None = None

    @property
    def begun(self) -> list[int]:
        return [hook.begun for hook in self.hooks if isinstance(hook, Witness)]

    @property
    def ended(self) -> list[int]:
        return [hook.ended for hook in self.hooks if isinstance(hook, Witness)]

    @property
    def num_errors(self) -> list[int]:
        return [hook.num_errors for hook in self.hooks if isinstance(hook, Witness)]


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


class Creator(FunctionSessionCreator):
    """Counts how often each of the raw sessions that it made is closed."""

    def __init__(self, step: Callable[[], Any], num_closes: list[int]) -> None:
        super().__init__(step)
        self._num_closes = num_closes

    def create_session(self) -> Any:
        raw: Any = super().create_session()
        close, place = raw.close, len(self._num_closes)

        def counted() -> None:
            self._num_closes[place] += 1
            close()

        self._num_closes.append(0)
        raw.close = counted
        return raw


async def play(
    fault: Fault,
    workers: list[Worker],
    *,
    num_steps: int,
    waits_for_stop: bool,
    start: Start = Start.TOGETHER,
) -> SharedSessionCreator:
    """Open a session per worker, each in a task of its own, and train until all have left.

    Args:
        num_steps: runs that the worker of the fault makes in its block, unless it is stopped.
        waits_for_stop: whether the others train until they are stopped, however long that takes;
            else until the worker of the fault has left. Those that began later make one step.
    """
    step, runner = step_of(fault)
    creator = SharedSessionCreator(Creator(step, fault.num_closes))

    async def train(session: MonitoredSession, place: int) -> None:
        if place == fault.worker and fault.place == "side task of the session":
            session.start_soon(fault.at, fault.place)
        if place == fault.worker:
            fault.has_opened.set()
            for _ in range(num_steps):
                if not session.should_stop():
                    await session.run("loss")
                    await turns()
            return
        if start is Start.LAST and fault.place == "restore":
            workers[place].has_run.set()
            await fault.has_opened.wait()
        is_bounded = workers[place].is_late or not waits_for_stop
        while not session.should_stop():
            await session.run("loss")
            workers[place].has_run.set()
            # An event loop that is never idle keeps Python's lock: each of the hundred system calls
            # of a save then waits 5 ms for it, and all saves of a test for seconds.
            await anyio.sleep(0.001)
            if is_bounded and fault.is_over.is_set():
                break

    async def wait_for_turn(place: int) -> None:
        if start is Start.FIRST and place != fault.worker:
            await fault.has_opened.wait()
            workers[place].is_late = fault.is_over.is_set()
        if start is Start.LAST and place == fault.worker:
            for other in range(len(workers)):
                if other != fault.worker:
                    await workers[other].has_run.wait()

    async def run(place: int) -> None:
        current_worker.set(place)
        worker = workers[place]
        await wait_for_turn(place)
        session = MonitoredSession(worker.hooks, creator, 5, step_runner=runner)
        with fault.scope if place == fault.worker else anyio.CancelScope():
            try:
                async with session:
                    await train(session, place)
            except BaseException as error:
                worker.left = error
                if not isinstance(error, Exception) and error is not fault.error:
                    worker.is_cancelled = True
                    raise
            finally:
                worker.reason = session.stop_reason
                worker.has_run.set()
                if place == fault.worker:
                    fault.has_opened.set()
                    fault.is_over.set()

    with anyio.fail_after(MANY_SECS):
        async with anyio.create_task_group() as group:
            for place in range(len(workers)):
                group.start_soon(run, place)
    return creator
