"""Step runners: where a blocking step runs, and how cancellation passes a thread by.

One thread a session, made at its first threaded step: more would never be used, and fewer for
all sessions together would deadlock steps that wait for each other. Nothing here knows what a
step is.
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
from contextvars import Context, copy_context
from typing import Any, Literal, get_args

from ._engine import STOPPED, TIMED_OUT, Engine, Slot, use_engine
from ._stop import Loss

logger = logging.getLogger("asynchooks")

StepRunnerName = Literal["auto", "inline", "thread"]

INLINE_SECS = 0.002
"""A step slower than this leaves the event loop; a hop to a thread and back costs 0.1 ms."""
FIRST_CALL_SECS = 0.05
"""How long the first call of a kind may take before its siblings get threads of their own."""
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MAX_KEYS = 256


class Outcome:
    """What a call came to: a value or an error. StopIteration passes a future no other way."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def call(fn: Callable[[], Any]) -> Outcome:
    """Call the function here and keep whatever it comes to."""
    try:
        return Outcome(fn())
    except BaseException as error:
        return Outcome(error=error)


class WorkThread:
    """A daemon thread that calls one function at a time for one owner, who closes it.

    Daemon, so that a step that never ends cannot hold the process's exit.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._jobs: queue.SimpleQueue[tuple[Context, _Job, Slot] | None] = queue.SimpleQueue()

    async def run(
        self,
        fn: Callable[[], Any],
        grace_secs: float,
        when_late: Callable[[Outcome], None] = lambda outcome: None,
        until: float = math.inf,
        loss: Loss | None = None,
    ) -> Any:
        """Call `fn` in the thread and return its value, or raise its error.

        A cancellation waits for the call for the grace period, then the thread is abandoned and
        the cancellation leaves; a second one leaves at once.

        Args:
            fn: what to call; runs in a copy of the caller's context.
            grace_secs: seconds, >= 0.
            when_late: gets the outcome that nobody waits for: of a call that was cancelled, or
                in the thread of one that was abandoned.
            until: when to abandon it in any case, on the engine's clock; then this returns None.
            loss: what says that the call will never return; it is abandoned, the error raised.
        """
        engine = self._engine
        slot = Slot(engine, f"a call in the thread {self._name}")
        if self._thread is None:
            args = (self._jobs, engine)
            self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
            self._thread.start()
        job = _Job(fn, when_late)
        self._jobs.put((copy_context(), job, slot))
        self._is_busy = True
        if loss is not None:
            loss.add(slot)
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
            if loss is not None:
                loss.discard(slot)
        if outcome is TIMED_OUT:
            return self._abandon(job)
        if outcome is STOPPED:
            assert loss is not None
            self._abandon(job)
            raise loss.error()
        return outcome.unwrap()

    def _abandon(self, job: _Job) -> None:
        self._dismiss()
        job.abandon()
        logger.warning("A call in the thread %s did not end in time and is left alone", self._name)

    def close(self) -> None:
        """End the thread, if it is idle now; the next `run` begins a new one.

        A call that another task has under way goes on, and is the thread's last.
        """
        is_busy, thread = self._is_busy, self._dismiss()
        if thread is not None and not is_busy:
            # it has nothing left to do; a thread that the end of the process meets within a
            # library's code makes the process abort
            thread.join()

    def _dismiss(self) -> threading.Thread | None:
        """Let the thread end after its present call."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            self._jobs = queue.SimpleQueue()
        return thread


class _Job:
    """One call; its outcome goes to whoever waits, or to `when_late` once nobody does."""

    def __init__(self, fn: Callable[[], Any], when_late: Callable[[Outcome], None]) -> None:
        self._fn = fn
        self._when_late = when_late
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._is_abandoned = False

    def __call__(self) -> Outcome:
        outcome = call(self._fn)
        with self._lock:
            self._outcome = outcome
            is_late = self._is_abandoned
        if is_late:
            self._when_late(outcome)
        return outcome

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            outcome = self._outcome
        if outcome is not None:
            self._when_late(outcome)


def _serve(jobs: queue.SimpleQueue[Any], engine: Engine) -> None:
    while (item := jobs.get()) is not None:
        context, job, slot = item
        outcome = context.run(_call_in, engine, job)
        del item, context, job  # whoever is woken may end the process: free the step's arrays first
        slot.wake(outcome)
        del outcome, slot


def _call_in(engine: Engine, job: Callable[[], Outcome]) -> Outcome:
    # the copied context says which event loop the task runs on; this thread runs none, or its own
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
    with use_engine(engine):
        return job()


async def run_blocking(
    engine: Engine,
    fn: Callable[[], Any],
    grace_secs: float,
    name: str,
    when_late: Callable[[Outcome], None] = lambda outcome: None,
    until: float = math.inf,
    loss: Loss | None = None,
) -> Any:
    """Call a blocking function once, off the event loop; inline where time is simulated."""
    if engine.is_virtual:
        return fn()
    thread = WorkThread(engine, name)
    try:
        return await thread.run(fn, grace_secs, when_late, until, loss)
    finally:
        thread.close()


class _Probe:
    """What "auto" knows of one kind of step."""

    __slots__ = (
        "fastest", "forgives", "in_thread", "is_called", "is_warm", "next_probe", "num_slow",
        "since_probe", "waiting",
    )  # fmt: skip

    def __init__(self, forgives: bool = True) -> None:
        self.forgives = forgives
        # the first call is slow, as it compiles; until it has returned the others wait a while
        self.is_called = False
        self.is_warm = False
        self.waiting: list[Slot] = []
        self.in_thread = True
        self.num_slow = 0  # slow calls in a row on the event loop
        self.fastest = 0.0  # smallest threaded time: wall time in a thread lies upwards
        self.since_probe = 0
        self.next_probe = 0  # threaded calls until the next probe

    def learn(self, inline_secs: float) -> None:
        """Take note of a call on the event loop."""
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
        self._probes: dict[Hashable, _Probe] = {}

    def of(self, key: Hashable) -> _Probe:
        probe = self._probes.get(key)
        if probe is None:
            if len(self._probes) >= _MAX_KEYS:
                self._probes.clear()
            probe = self._probes[key] = _Probe(self._forgives)
        return probe


class StepRunner:
    """Runs a session's blocking steps where they are best run. The session makes and closes it.

    Args:
        engine: the session's engine; a virtual one runs everything inline.
        name: "inline" runs on the event loop, "thread" in a thread of the session's own, "auto"
            chooses for each kind of step: the first call in a thread, the second inline, then in
            a thread if that took more than 2 ms. No step can be bounded beforehand, so the
            inline call may hold the loop once.
        grace_secs: seconds that a cancellation waits for a step in a thread.
    """

    def __init__(self, engine: Engine, name: StepRunnerName, grace_secs: float) -> None:
        self._engine = engine
        self._name = "inline" if engine.is_virtual else name
        self._grace_secs = grace_secs
        self._thread = WorkThread(engine, "asynchooks-step")

    def is_new(self, times: StepTimes, key: Hashable) -> bool:
        """Whether the first call of this kind is under way, in another session's thread."""
        if self._name != "auto" or times.always_in_thread:
            return False
        probe = times.of(key)
        return probe.is_called and not probe.is_warm

    async def wait_for_first(self, times: StepTimes, key: Hashable) -> None:
        """Let the first call of this kind return, but do not wait long: it may wait for us.

        Unlike a thread for each of a thousand workers that begin together, this costs nothing.
        """
        slot = Slot(self._engine, "the first step of its kind")
        times.of(key).waiting.append(slot)
        await self._engine.park(slot, self._engine.now() + FIRST_CALL_SECS)

    async def run(
        self, fn: Callable[[], Any], times: StepTimes, key: Hashable, loss: Loss | None = None
    ) -> Any:
        """Call `fn` and return its value; steps of one `key` take about the same time.

        In a thread, `loss` ends the wait for a call that will never return.
        """
        if self._name == "inline":
            return fn()
        if self._name == "thread" or times.always_in_thread:
            return await self._thread.run(fn, self._grace_secs, loss=loss)
        probe = times.of(key)
        probe.is_called = True
        is_probe = probe.since_probe >= probe.next_probe and probe.fastest < INLINE_SECS
        begun = self._engine.now()
        if probe.is_warm and (is_probe or not probe.in_thread):
            try:
                return fn()
            finally:
                probe.learn(self._engine.now() - begun)
                if not probe.in_thread:
                    self._thread.close()  # a thousand workers need not keep a thousand threads
        try:
            return await self._thread.run(fn, self._grace_secs, loss=loss)
        finally:
            if probe.is_warm:
                probe.since_probe += 1
                probe.fastest = min(probe.fastest, self._engine.now() - begun)
            probe.is_warm = True
            waiting, probe.waiting = probe.waiting, []
            for slot in waiting:
                slot.wake()

    def close(self) -> None:
        """Let the thread end; a step that still runs there is not waited for."""
        self._thread.close()


def check_runner(name: object) -> StepRunnerName:
    """The name of a step runner, or an error that lists them."""
    for known in get_args(StepRunnerName):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"step_runner is {name!r}; give one of {', '.join(get_args(StepRunnerName))}")


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it only makes a coroutine (also an object, or a partial of one)."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    called: Any = fn if inspect.isroutine(fn) else fn.__call__  # type: ignore[operator]
    return inspect.iscoroutinefunction(called)
