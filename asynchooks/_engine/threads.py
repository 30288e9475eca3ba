"""Threads for blocking calls: how cancellation leaves them behind, and which steps need one.

A thread belongs to one owner: more would never be used, and fewer for all sessions together would
deadlock steps that wait for each other. Nothing here knows what is called.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from contextvars import copy_context
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
FIRST_CALL_SECS = 0.05
"""How long the first call of a kind may take before its siblings get threads of their own."""
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MAX_KEYS = 256


class Outcome:
    """How a call ended: a value or an error. StopIteration passes a future no other way."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error

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

    __slots__ = ("_engine", "_is_busy", "_jobs", "_name", "_thread", "_what")

    # Those that were abandoned, for the end of the process: the process's, not an owner's.
    left_alone: ClassVar[WeakSet[threading.Thread]] = WeakSet()

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._what = f"a call in the thread {name}"
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

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
        job = _Job(fn, when_late, slot)
        if engine.is_virtual and (stand_in := current_stand_in()) is not None:
            stand_in.call_apart(engine, functools.partial(job.run, engine), slot)
        else:
            self._begin(engine)
            self._jobs.put(job)
        self._is_busy = True
        if lost_peer is not None:
            lost_peer.add(slot)
        try:
            outcome = await engine.park(slot, until)
        except BaseException:
            # opened only now: before the cancellation came, a scope would cost each step
            try:
                with engine.shielded(max(0.0, min(grace_secs, until - engine.now()))):
                    await engine.park(slot)
            finally:
                if not slot.is_woken or slot.value is STOPPED:
                    self._abandon(job)
                else:
                    if slot.value.error is not None:
                        logger.warning("A cancelled call failed: %r", slot.value.error)
                    when_late(slot.value)
            raise
        finally:
            self._is_busy = False
            if lost_peer is not None:
                lost_peer.discard(slot)
        if outcome is TIMED_OUT:
            return self._abandon(job)
        if outcome is STOPPED:
            assert lost_peer is not None
            self._abandon(job)
            raise lost_peer.error()
        return outcome.unwrap()

    def _begin(self, engine: Engine) -> None:
        if self._thread is None:
            args = (self._jobs, engine)
            self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
            self._thread.start()

    def _abandon(self, job: _Job) -> None:
        thread = self.drop()
        if thread is not None:
            self.left_alone.add(thread)
        job.abandon()
        logger.warning("A call in the thread %s did not end in time and is left alone", self._name)

    def close(self) -> None:
        """End the thread, if it is idle now; the next `run` begins a new one.

        A call that another task has under way goes on, and is the thread's last.
        """
        is_busy, thread = self._is_busy, self.drop()
        if thread is not None and not is_busy:
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
            self._jobs = queue.SimpleQueue()
        return thread


class _Job:
    """One call; its outcome goes to the task that waits, or to `when_late` if none does."""

    __slots__ = ("_context", "_fn", "_late", "_outcome", "is_abandoned", "slot")

    def __init__(self, fn: Callable[[], Any], when_late: WhenLate, slot: Slot) -> None:
        self._fn = fn
        self._context = copy_context()
        self._late = [when_late]  # the thread that pops it calls it: a lock would cost each call
        self._outcome: Outcome | None = None
        self.slot = slot
        self.is_abandoned = False

    def run(self, engine: Engine) -> Outcome:
        outcome = self._outcome = self._context.run(_call_in, engine, self._fn)
        if self.is_abandoned:  # looked at after the outcome is there, which `abandon` looks for
            self._pass_on(outcome)
        return outcome

    def abandon(self) -> None:
        self.is_abandoned = True
        if self._outcome is not None:
            self._pass_on(self._outcome)

    def _pass_on(self, outcome: Outcome) -> None:
        when_late: WhenLate = drop
        with suppress(IndexError):  # passed on already
            when_late = self._late.pop()
        when_late(outcome)


def _serve(jobs: queue.SimpleQueue[_Job | None], engine: Engine) -> None:
    while (job := jobs.get()) is not None:
        slot, outcome = job.slot, job.run(engine)
        del job  # the task that is woken may end the process: free the step's arrays first
        engine.wake(slot, outcome)
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


class Probe:
    """What "auto" knows of one kind of step: `in_thread` says where it is run."""

    __slots__ = (
        "fastest", "forgives", "in_thread", "is_called", "is_timed", "is_warm", "last_secs",
        "next_probe", "num_slow", "since_probe", "waiting",
    )  # fmt: skip

    def __init__(self, forgives: bool = True, *, is_timed: bool = True) -> None:
        self.forgives = forgives
        self.is_timed = is_timed  # whether the next place depends on how long calls take
        # the first call is slow, as it compiles; until it has returned the others wait a while
        self.is_called = False
        self.is_warm = False
        self.waiting: list[Slot] = []
        self.in_thread = True
        self.num_slow = 0  # slow calls in a row on the event loop
        self.fastest = 0.0  # smallest threaded time: wall time in a thread overestimates
        self.last_secs = 0.0  # of the last call, wherever it ran
        self.since_probe = 0
        self.next_probe = 0  # threaded calls until the next probe

    def learn(self, inline_secs: float) -> None:
        """Take note of a call on the event loop."""
        if not self.is_timed:
            return
        self.last_secs = inline_secs
        was_in_thread = self.in_thread
        if inline_secs > INLINE_SECS:
            self.num_slow += 1
        elif self.forgives:
            self.num_slow = 0
        # a step that was fast so far may have been held up by another process, once
        self.in_thread = self.num_slow >= (1 if was_in_thread else 2)
        if not self.in_thread:
            return
        again = was_in_thread and self.next_probe > 0  # it looked fast in the thread, and was not
        self.next_probe = min(2 * self.next_probe, _LAST_PROBE) if again else _FIRST_PROBE
        if not self.forgives:
            self.next_probe = sys.maxsize
        self.since_probe = 0
        self.fastest = math.inf


_INLINE, _IN_THREAD = Probe(is_timed=False), Probe()
_INLINE.is_warm = _IN_THREAD.is_warm = True
_INLINE.in_thread = False


class StepTimes:
    """What "auto" knows of the steps of one raw session; all workers on it share it.

    Args:
        always_in_thread: whether no call may hold the event loop, as it may never return.
        forgives: whether what was slow on the event loop is tried there again. What is slow only
            now and then (a hook that saves every 1,000 steps) would hold it each time.
    """

    def __init__(self, *, always_in_thread: bool = False, forgives: bool = True) -> None:
        self.always_in_thread = always_in_thread
        self._forgives = forgives
        self._probes: dict[Hashable, Probe] = {}

    def of(self, key: Hashable) -> Probe:
        probe = self._probes.get(key)
        if probe is None:
            if len(self._probes) >= _MAX_KEYS:
                self._probes.clear()
            probe = self._probes[key] = Probe(self._forgives)
        return probe


class StepRunner:
    """Runs a session's blocking steps where they are best run. The session makes and closes it.

    Args:
        engine: the session's engine; a virtual one runs everything inline, except in a plan.
        name: "inline" runs on the event loop, "thread" in a thread of the session's own, "auto"
            chooses for each kind of step: the first call in a thread, the second inline, then in
            a thread if that took more than 2 ms, unless no other task could run meanwhile. No step
            can be bounded beforehand, so the inline call may hold the loop once.
        grace_secs: seconds that a cancellation waits for a step in a thread.
    """

    __slots__ = ("_engine", "_name", "_num_until_look", "_thread", "grace_secs", "last_in_thread")

    def __init__(self, engine: Engine, name: StepRunnerName, grace_secs: float) -> None:
        self._engine = engine
        self._name = "inline" if blocks_inline(engine) else name
        self.grace_secs = grace_secs
        self._thread: WorkThread | None = None
        self._num_until_look = 0  # slow calls until the next look at whether others could run
        self.last_in_thread: Probe | None = None  # the kind that ran last in the thread, if open

    def probe(self, times: StepTimes, key: Hashable, *, blocks: bool = True) -> Probe:
        """What is known of this kind of step: where the next one is to run."""
        if self._name == "inline" or not blocks:
            return _INLINE
        if self._name == "thread" or times.always_in_thread:
            return _IN_THREAD
        return times.of(key)

    async def wait_for_first(self, probe: Probe) -> None:
        """If the first call of this kind is under way elsewhere, wait for it, but not long.

        It may wait for this one. Unlike a thread for each of a thousand workers that begin
        together, this costs nothing.
        """
        if probe.is_called and not probe.is_warm:
            slot = Slot(self._engine, "the first step of its kind")
            probe.waiting.append(slot)
            await self._engine.park(slot, self._engine.now() + FIRST_CALL_SECS)

    def learn(self, probe: Probe, inline_secs: float) -> None:
        """Take note of a call on the event loop."""
        probe.learn(inline_secs)
        if not probe.in_thread and probe is self.last_in_thread:
            self.close()  # a thousand workers need not keep a thousand threads

    def run_probed(
        self,
        fn: Callable[[], Any],
        probe: Probe,
        lost_peer: LostPeer | None = None,
        when_late: WhenLate = drop,
    ) -> Awaitable[Any]:
        """Call `fn` where steps of its kind are best run, and return its value.

        Args:
            probe: what is known of the kind; steps of one kind take about the same time.
            lost_peer: ends the wait for a call in a thread that will never return.
            when_late: gets the outcome of a call in a thread after a cancellation.
        """
        if probe is _IN_THREAD:
            return self._call_in_thread(fn, probe, lost_peer, when_late)
        return self._run_probed(fn, probe, lost_peer, when_late)

    async def _run_probed(
        self, fn: Callable[[], Any], probe: Probe, lost_peer: LostPeer | None, when_late: WhenLate
    ) -> Any:
        if probe is _INLINE:
            return fn()
        probe.is_called = True
        is_probe = probe.since_probe >= probe.next_probe and probe.fastest < INLINE_SECS
        if probe.is_warm and probe.in_thread and not is_probe and self._may_hold_loop(probe):
            await self._engine.turn()  # for signals, timers and a cancellation
            is_probe = True
        begun = self._engine.now()
        if probe.is_warm and (is_probe or not probe.in_thread):
            try:
                return fn()
            finally:
                self.learn(probe, self._engine.now() - begun)
        try:
            return await self._call_in_thread(fn, probe, lost_peer, when_late)
        finally:
            if probe.is_warm:
                probe.since_probe += 1
                probe.last_secs = self._engine.now() - begun
                probe.fastest = min(probe.fastest, probe.last_secs)
            probe.is_warm = True
            waiting, probe.waiting = probe.waiting, []
            for slot in waiting:
                slot.wake()

    def _may_hold_loop(self, probe: Probe) -> bool:
        """Whether a slow step may run on the event loop: no other task could run meanwhile.

        Then a thread would only cost: the hand-over, and caches that hold other things.
        """
        if not probe.forgives or probe.last_secs > ALONE_SECS:
            return False
        if self._num_until_look:
            self._num_until_look -= 1
        elif self._engine.is_alone():
            return True
        else:
            self._num_until_look = _FIRST_PROBE
        return False

    def _call_in_thread(
        self, fn: Callable[[], Any], probe: Probe, lost_peer: LostPeer | None, when_late: WhenLate
    ) -> Awaitable[Any]:
        self.last_in_thread = probe
        if self._thread is None:
            self._thread = WorkThread(self._engine, "asynchooks-step")
        return self._thread.run(fn, self.grace_secs, when_late, lost_peer=lost_peer)

    def close(self) -> None:
        """Let the thread end; a step that still runs there is not waited for."""
        self.last_in_thread = None
        if self._thread is not None:
            self._thread.close()

    def drop(self) -> None:
        """Let the thread end, from any thread, and wait for nothing."""
        if self._thread is not None:
            self._thread.drop()


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
