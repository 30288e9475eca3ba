"""Threads for blocking calls: how cancellation leaves them behind, and which steps need one.

`StepRunner` decides for a session: by its name, or for "auto" by the last calls of the same kind.
A call in the session's `WorkThread` is waited for when its task is cancelled, for the grace period;
then thread and call are abandoned, and the session takes a new thread. A thread belongs to one
owner: more would never be used, and fewer for all sessions together would deadlock steps that wait
for each other. Nothing here knows what is called.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import queue
import sys
import threading
from collections.abc import Callable, Hashable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakSet

from .base import STOPPED, TIMED_OUT, Engine, Slot
from .current import engine_in_use
from .recording import blocks_inline, current_stand_in
from .stop import LostPeer

logger = logging.getLogger("asynchooks")

StepRunnerName = Literal["auto", "inline", "thread"]

INLINE_SECS = 0.002
"""A step slower than this leaves the event loop; a thread and back costs 0.1 ms."""
ALONE_SECS = 0.1
"""A step slower than this leaves the event loop even if no other task could run meanwhile."""
_FIRST_LOOK, _LAST_LOOK = 16, 1024
"""Calls until the next look whether a slow kind has become fast."""
_MAX_KEYS = 256


@dataclass(slots=True, eq=False)
class Outcome:
    """How a call ended: a value or an error. StopIteration passes a future no other way."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


WhenLate = Callable[[Outcome], None]


def drop(outcome: Outcome) -> None:
    """Discard an outcome that no task waits for."""
    close_unrun(outcome.value)


def close_unrun(awaitable: object) -> None:
    """Close a coroutine that will not be run, with the one that it was given to await.

    Else Python warns, when it is freed, that it was never awaited.
    """
    while inspect.iscoroutine(awaitable):
        pending = inspect.getcoroutinelocals(awaitable).get("pending")
        awaitable.close()
        awaitable = pending


def call(fn: Callable[[], Any]) -> Outcome:
    """Call the function here and keep its value or error."""
    try:
        return Outcome(fn())
    except BaseException as error:
        return Outcome(error=error)


class WorkThread:
    """A daemon thread that calls one function at a time for one owner; the owner closes it.

    Daemon, so that a step that never ends cannot hold the process's exit.
    """

    # Those that were abandoned, for the end of the process: the process's, not an owner's.
    left_alone: ClassVar[WeakSet[threading.Thread]] = WeakSet()

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._what = f"a call in the thread {name}"
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Job | None]  # of the present thread
        self._is_busy = False

    async def run(
        self,
        fn: Callable[[], Any],
        grace_secs: float,
        when_late: WhenLate = drop,
        until: float = math.inf,
        lost_peer: LostPeer | None = None,
    ) -> Any:
        """Call `fn` in the thread and return its value, or raise its error.

        A cancellation waits for the call for the grace period, then the thread is abandoned and
        the cancellation leaves; a second one leaves at once.

        Args:
            fn: what to call; runs in a copy of the caller's context.
            grace_secs: seconds, >= 0.
            when_late: gets an outcome that no task waits for: of a call that was cancelled, or,
                in its thread, of one that was abandoned.
            until: when to abandon it in any case, on the engine's clock; then this returns None.
            lost_peer: says that the call will never return; it is abandoned, the error raised.
        """
        engine = self._engine
        slot = Slot(engine, self._what)
        job = Job(fn, when_late, slot)
        self._put(job)
        self._is_busy, is_waited_for = True, False
        if lost_peer is not None:
            lost_peer.add(slot)
        try:
            try:
                await engine.park(slot, until)
                is_waited_for = True
            except BaseException:
                # opened only now: before the cancellation came, a scope would cost each step
                with engine.shielded(max(0.0, min(grace_secs, until - engine.now()))):
                    await engine.park(slot)
                raise
        finally:
            self._is_busy = False
            if lost_peer is not None:
                lost_peer.discard(slot)
            outcome = slot.value
            if not isinstance(outcome, Outcome):  # lost, out of time, or out of patience
                self.abandon(job)
            elif not is_waited_for:
                if outcome.error is not None:
                    logger.warning("A cancelled call failed: %r", outcome.error)
                when_late(outcome)
        if outcome is STOPPED and lost_peer is not None:
            raise lost_peer.error_now()
        return None if outcome is TIMED_OUT else outcome.unwrap()

    def begin(self, fn: Callable[[], Any]) -> LastingJob:
        """Have the thread call `fn`, whether or not a task waits for it."""
        job = LastingJob(fn, drop, _Ending(self._engine, self._what))
        self._put(job)
        return job

    def _put(self, job: Job) -> None:
        engine = self._engine
        if engine.is_virtual and (stand_in := current_stand_in()) is not None:
            stand_in.call_apart(engine, job.run, job.slot)
            return
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            args = (self._jobs,)
            self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def abandon(self, job: Job) -> None:
        """Wait no more for a call, and leave its thread to it."""
        thread = self.drop()
        if thread is not None:
            self.left_alone.add(thread)
        job.end()
        logger.warning("A call in the thread %s did not end in time and is left alone", self._name)

    def close(self) -> None:
        """End the thread, if it is idle now; the next `run` begins a new one.

        A call that another task has under way goes on, and is the thread's last.
        """
        thread = self.drop()
        if thread is not None and not self._is_busy:
            # it has nothing left to do; a thread that the end of the process meets within a
            # library's code makes the process abort
            thread.join()

    def drop(self) -> threading.Thread | None:
        """Let the thread end after its present call; from any thread, also the garbage collector's.

        It is not joined: that might be this very thread.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
        return thread


class Job:
    """One call; its outcome goes to the task that waits, or to `when_late` if none does."""

    _outcome: Outcome

    def __init__(self, fn: Callable[[], Any], when_late: WhenLate, slot: Slot) -> None:
        self._fn, self._when_late, self.slot = fn, when_late, slot
        self._context = copy_context()
        self._is_first = threading.Lock()  # taken by the first that calls `end`

    def run(self) -> Outcome:
        self._outcome = self._context.run(_call_in, self.slot.engine, self._fn)
        self.end()
        return self._outcome

    def end(self) -> None:
        """The call has ended, or is waited for no more; both: what it came to is late."""
        if not self._is_first.acquire(blocking=False):
            self._when_late(self._outcome)


class LastingJob(Job):
    """One that goes on when its task is cancelled; tasks may wait for it one after the other."""

    slot: _Ending

    async def wait(self, until: float = math.inf) -> bool:
        """Whether it has ended by then, on `Engine.now`; raises what it has raised.

        Cancellation safe.
        """
        ending = self.slot
        if not ending.is_woken:
            ending.waiting = slot = Slot(ending.engine, ending.what)
            if not ending.is_woken:  # by the thread, just now, which saw no task wait
                await ending.engine.park(slot, until)
        if ending.is_woken:
            ending.value.unwrap()
        return ending.is_woken


class _Ending(Slot):
    """Wakes the slot of the task that waits at that time, if one does."""

    __slots__ = ("waiting",)

    def __init__(self, engine: Engine, what: str) -> None:
        super().__init__(engine, what)
        self.waiting: Slot | None = None

    def wake(self, value: Any = None) -> None:
        self.value, self.is_woken = value, True
        if self.waiting is not None:
            self.waiting.wake()


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        slot, outcome = job.slot, job.run()
        del job  # the task that is woken may end the process: free the step's arrays first
        slot.wake(outcome)
        del outcome, slot


def _call_in(engine: Engine, fn: Callable[[], Any]) -> Outcome:
    # the copied context says which event loop the task runs on; this thread runs none, or its own
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
    engine_in_use.set(engine)  # the context is this call's own
    return call(fn)


async def run_blocking(
    engine: Engine,
    fn: Callable[[], Any],
    grace_secs: float,
    name: str,
    when_late: WhenLate = drop,
    until: float = math.inf,
    lost_peer: LostPeer | None = None,
) -> Any:
    """Call a blocking function once, off the event loop; inline where time is simulated."""
    if blocks_inline(engine):
        return fn()
    thread = WorkThread(engine, name)
    try:
        return await thread.run(fn, grace_secs, when_late, until, lost_peer)
    finally:
        thread.close()


@dataclass(slots=True, eq=False)
class CallKind:
    """What "auto" knows of one kind of call: `in_thread` says where the next one is made."""

    in_thread: bool = True
    forgives: bool = True
    is_fixed: bool = False  # whatever calls take
    last_secs: float = math.inf  # of the last call, wherever it was made
    num_slow: int = 0  # slow calls in a row on the event loop
    # calls in the thread until one that is fast there is made on the event loop again
    num_until_look: int = 0
    patience: int = 0

    def learn(self, secs: float) -> None:
        """Take note of a call on the event loop."""
        self.last_secs = secs
        if secs <= INLINE_SECS or self.is_fixed:
            if self.forgives:
                self.num_slow = 0
            return
        self.num_slow += 1
        if self.num_slow >= 2:  # one alone may have been held up by another process
            self.in_thread, self.num_slow = True, 0
            self.patience = min(max(2 * self.patience, _FIRST_LOOK), _LAST_LOOK)
            self.num_until_look = self.patience if self.forgives else sys.maxsize

    def learn_in_thread(self, secs: float) -> None:
        """Take note of a call in the thread, where others make it take longer."""
        if self.is_fixed:
            return
        self.last_secs = secs
        self.num_until_look -= 1
        if secs <= INLINE_SECS and self.num_until_look <= 0:
            self.in_thread = False


_INLINE, _IN_THREAD = CallKind(is_fixed=True, in_thread=False), CallKind(is_fixed=True)


class StepTimes(dict[Hashable, CallKind]):
    """What "auto" knows of the calls on one raw session, by kind; all workers on it share it.

    Args:
        always_in_thread: whether no call may hold the event loop, as it may never return.
        forgives: whether what was slow on the event loop is tried there again. What is slow only
            now and then (a hook that saves every 1,000 steps) would hold it each time.
    """

    def __init__(self, *, always_in_thread: bool = False, forgives: bool = True) -> None:
        super().__init__()
        self.always_in_thread, self._forgives = always_in_thread, forgives

    def __missing__(self, key: Hashable) -> CallKind:
        if len(self) >= _MAX_KEYS:
            self.clear()
        kind = self[key] = CallKind(forgives=self._forgives)
        return kind


class StepRunner:
    """Makes a session's blocking calls where they are best made. The session closes its thread.

    Args:
        engine: the session's engine; a virtual one makes all on the event loop, except in a plan.
        name: "inline" calls on the event loop, "thread" in a thread of the session's own, "auto"
            chooses for each kind: in the thread until a call there took at most 2 ms, then on the
            event loop until two in a row took longer; slow ones also there while no other task
            could run meanwhile.
        grace_secs: seconds that a cancellation waits for a call in the thread.
    """

    def __init__(self, engine: Engine, name: StepRunnerName, grace_secs: float) -> None:
        self._engine = engine
        self._name = "inline" if blocks_inline(engine) else name
        self.grace_secs = grace_secs
        self.thread = WorkThread(engine, "asynchooks-step")
        self._num_until_look = 0  # slow calls until the next look at whether others could run

    def kind(self, times: StepTimes, key: Hashable, *, blocks: bool = True) -> CallKind:
        """What is known of this kind of call: whether the next one is made in a thread."""
        if self._name == "inline" or not blocks:
            return _INLINE
        return _IN_THREAD if self._name == "thread" or times.always_in_thread else times[key]

    async def call(
        self,
        fn: Callable[[], Any],
        kind: CallKind,
        lost_peer: LostPeer | None = None,
        when_late: WhenLate = drop,
    ) -> Any:
        """Call `fn` where calls of its kind are best made, and return its value.

        Args:
            kind: what is known of calls that take about the same time.
            lost_peer: ends the wait for a call in a thread that will never return.
            when_late: gets the outcome of a call in a thread after a cancellation.
        """
        engine = self._engine
        is_here, learn = not kind.in_thread, kind.learn
        if kind.in_thread:
            learn = kind.learn_in_thread
            is_here = kind.forgives and kind.last_secs <= ALONE_SECS and self._is_alone()
            if is_here:
                await engine.turn()  # for signals, timers and a cancellation
        begun = engine.now()
        try:
            if is_here:
                return fn()
            return await self.thread.run(fn, self.grace_secs, when_late, lost_peer=lost_peer)
        finally:
            learn(engine.now() - begun)
            if not kind.in_thread:
                self.thread.close()  # a thousand workers need not keep a thousand threads

    def _is_alone(self) -> bool:
        """Whether no other task could run while a slow call holds the event loop.

        Then a thread would only cost: the hand-over, and caches that hold other things.
        """
        if self._num_until_look:
            self._num_until_look -= 1
            return False
        is_alone = self._engine.is_alone()
        self._num_until_look = 0 if is_alone else _FIRST_LOOK
        return is_alone


def check_runner(name: object) -> StepRunnerName:
    """The name of a step runner, or an error that lists them."""
    if name not in get_args(StepRunnerName):
        known = ", ".join(get_args(StepRunnerName))
        raise ValueError(f"step_runner is {name!r}; give one of {known}")
    return name  # type: ignore[return-value]


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it only makes a coroutine (also an object, or a partial of one)."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    called: Any = fn if inspect.isroutine(fn) else fn.__call__  # type: ignore[operator]
    return inspect.iscoroutinefunction(called)
