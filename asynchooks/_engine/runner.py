"""Step runners: where a blocking step runs, on the event loop or in the session's thread.

The thread is made at the first threaded step. Nothing here knows what a step is.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Literal, get_args

from .base import Engine, Slot
from .stop import Loss
from .threads import WhenLate, WorkThread, drop

StepRunnerName = Literal["auto", "inline", "thread"]

INLINE_SECS = 0.002
"""A step slower than this leaves the event loop; a hop to a thread and back costs 0.1 ms."""
FIRST_CALL_SECS = 0.05
"""How long the first call of a kind may take before its siblings get threads of their own."""
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MAX_KEYS = 256


class Probe:
    """What "auto" knows of one kind of step: `in_thread` says where it is run."""

    __slots__ = (
        "fastest", "forgives", "in_thread", "is_called", "is_warm", "next_probe", "num_slow",
        "since_probe", "waiting",
    )  # fmt: skip

    is_timed = True
    """Whether the next place depends on how long calls take."""

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


class _Inline(Probe):
    """Runs here, whatever it takes."""

    is_timed = False

    def __init__(self) -> None:
        super().__init__()
        self.is_warm, self.in_thread = True, False

    def learn(self, inline_secs: float) -> None:
        """Nothing to learn."""


_INLINE, _IN_THREAD = _Inline(), Probe()
_IN_THREAD.is_warm = True


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
        engine: the session's engine; a virtual one runs everything inline.
        name: "inline" runs on the event loop, "thread" in a thread of the session's own, "auto"
            chooses for each kind of step: the first call in a thread, the second inline, then in
            a thread if that took more than 2 ms. No step can be bounded beforehand, so the
            inline call may hold the loop once.
        grace_secs: seconds that a cancellation waits for a step in a thread.
    """

    __slots__ = ("_engine", "_name", "_thread", "grace_secs", "last_in_thread")

    def __init__(self, engine: Engine, name: StepRunnerName, grace_secs: float) -> None:
        self._engine = engine
        self._name = "inline" if engine.is_virtual else name
        self.grace_secs = grace_secs
        self._thread: WorkThread | None = None
        self.last_in_thread: Probe | None = None  # the kind that ran last in the thread, if open

    def probe(self, times: StepTimes, key: Hashable, *, blocks: bool = True) -> Probe:
        """What is known of this kind of step, and so where the next one is to run."""
        if self._name == "inline" or not blocks:
            return _INLINE
        if self._name == "thread" or times.always_in_thread:
            return _IN_THREAD
        return times.of(key)

    async def wait_for_first(self, probe: Probe) -> None:
        """If the first call of this kind is under way elsewhere, wait for it, but not long.

        It may wait for us. Unlike a thread for each of a thousand workers that begin together,
        this costs nothing.
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

    async def run(
        self, fn: Callable[[], Any], times: StepTimes, key: Hashable, loss: Loss | None = None
    ) -> Any:
        """Call `fn` and return its value; steps of one `key` take about the same time.

        In a thread, `loss` ends the wait for a call that will never return.
        """
        return await self.run_probed(fn, self.probe(times, key), loss)

    def run_probed(
        self,
        fn: Callable[[], Any],
        probe: Probe,
        loss: Loss | None = None,
        when_late: WhenLate = drop,
    ) -> Awaitable[Any]:
        """As `run`, with what is known of the step at hand.

        Args:
            when_late: gets what a call in a thread comes to after a cancellation.
        """
        if probe is _IN_THREAD:
            return self._call_in_thread(fn, probe, loss, when_late)
        return self._run_probed(fn, probe, loss, when_late)

    async def _run_probed(
        self, fn: Callable[[], Any], probe: Probe, loss: Loss | None, when_late: WhenLate
    ) -> Any:
        if probe is _INLINE:
            return fn()
        probe.is_called = True
        is_probe = probe.since_probe >= probe.next_probe and probe.fastest < INLINE_SECS
        begun = self._engine.now()
        if probe.is_warm and (is_probe or not probe.in_thread):
            try:
                return fn()
            finally:
                self.learn(probe, self._engine.now() - begun)
        try:
            return await self._call_in_thread(fn, probe, loss, when_late)
        finally:
            if probe.is_warm:
                probe.since_probe += 1
                probe.fastest = min(probe.fastest, self._engine.now() - begun)
            probe.is_warm = True
            waiting, probe.waiting = probe.waiting, []
            for slot in waiting:
                slot.wake()

    def _call_in_thread(
        self, fn: Callable[[], Any], probe: Probe, loss: Loss | None, when_late: WhenLate
    ) -> Awaitable[Any]:
        self.last_in_thread = probe
        if self._thread is None:
            self._thread = WorkThread(self._engine, "asynchooks-step")
        return self._thread.run(fn, self.grace_secs, when_late, loss=loss)

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
