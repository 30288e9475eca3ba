"""Locks: for tasks of one event loop, and for calls that must not overlap in any thread.

They run nothing, and know neither steps nor hooks.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

from .._errors import OverlappingCallError, StopTraining
from .base import STOPPED, Engine, Sentinel, Slot
from .current import current_engine, system_now
from .stop import EndsAtStop, LostPeer, Stop

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 30.0
"""How long a call may take until the log says that others wait for it."""
_SHORT_SECS = 5e-4
"""Between two looks whether a step on another thread's event loop has ended."""
_LOOK = Sentinel("LOOK")
"""What a waiting call is woken with: it has the lock, or the call under way was abandoned."""


class Lock:
    """`async with lock:` lets one task in at a time, in order of asking. Cancellation safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_held = False
        self._queue: deque[Slot] = deque()

    async def __aenter__(self) -> None:
        if not self.enter_now():
            await self.wait()

    def enter_now(self) -> bool:
        """Enter if no task is inside, and return whether that was so; then call `leave`."""
        if self._is_held:
            return False
        self._is_held = True
        return True

    async def wait(self) -> None:
        """Enter in turn, after the tasks that wait already."""
        engine = current_engine()
        slot = Slot(engine, self._what)
        self._queue.append(slot)
        try:
            await engine.park(slot)
        except BaseException:
            if slot.is_woken:  # the lock came together with the cancellation: pass it on
                self.leave()
            else:
                self._queue.remove(slot)
            raise

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._queue:
            self._queue.popleft().wake()
        else:
            self._is_held = False


class Condition:
    """Tasks that wait for another task's run or close to end."""

    __slots__ = ("slots",)

    def __init__(self) -> None:
        self.slots: tuple[Slot, ...] = ()

    async def wait_until(
        self, is_done: Callable[[], bool], what: str, until: float = math.inf
    ) -> None:
        """Return when it is done, or the time has come on the engine's clock."""
        engine = current_engine()
        while not is_done() and engine.now() < until:
            slot = Slot(engine, what)
            self.slots += (slot,)
            await engine.park(slot, until)

    def notify(self) -> None:
        """Have all of them check again."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            slot.wake()


class Counter(Protocol):
    """A step on which sessions run: a `GlobalStep`."""

    @property
    def is_running_here(self) -> bool: ...


_under_way: ContextVar[tuple[Hold, ...]] = ContextVar("asynchooks_calls_under_way", default=())
"""Of the calls that the running code is part of, in its thread or in tasks that it started."""


class Hold:
    """One call's place in the queue, then its lock on the model until `end`. `CallLock` makes it.

    The task that asked for it ends it, or gives it to the thread that makes the call. One that is
    abandoned keeps the lock until that thread ends it.
    """

    __slots__ = ("_lock", "abandoned_at", "is_over", "thread", "wake")

    def __init__(self, lock: CallLock | None, wake: Callable[[], None] | None = None) -> None:
        self._lock = lock
        self.wake = wake
        self.thread = 0  # that makes the call, once it has begun
        self.abandoned_at: float | None = None  # on the system's clock
        self.is_over = False

    def begin(self) -> None:
        """The call begins, in this thread; OverlappingCallError if it was abandoned before."""
        lock = self._lock
        if lock is None:
            return
        with lock.mutex:
            if self.is_over:
                raise OverlappingCallError(f"a call was abandoned before it began: {lock.what}")
            self.thread = threading.get_ident()

    def is_of(self, lock: CallLock) -> bool:
        """Whether it keeps others from this lock."""
        return self._lock is lock and not self.is_over

    def end(self) -> None:
        """The call has returned, or is not made; from any thread, and more than once."""
        if self._lock is not None and not self.is_over:
            self._lock.release(self)

    def abandon(self) -> bool:
        """Its task waits for the call no more: others wait for its end for a while only.

        Returns whether it has begun; else it will not, and is over.
        """
        lock = self._lock
        if lock is None or self.is_over:
            return True
        with lock.mutex:
            if not self.thread:
                lock.let_go(self)
                return False
            self.abandoned_at = system_now()
            lock.wake_queue()
        return True

    def around(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """`fn` as the call of this hold, for the thread that makes it."""
        if self._lock is None:
            return fn

        def call() -> Any:
            self.begin()
            token = _under_way.set((*_under_way.get(), self))
            try:
                return fn()
            finally:
                _under_way.reset(token)
                self.end()

        return call


class CallLock:
    """First come, first served. Cancellation safe. Creators of one function have one: see `Callee`.

    A call within a call, such as a run of a session that a step function itself opens, takes no
    turn: it would wait for its own end.

    A step on the one event loop of all users takes no hold, as no task there can ask meanwhile:
    once it counts as running, it looks at `is_free`. A call from another thread unsets that first,
    and then waits for the end of such a step by looking again and again, which is rare and short.
    (A plain hook there sets `here`, and passes the lock on.) All that is so under the GIL.

    Args:
        what: what must not overlap, for people.
    """

    __slots__ = (
        "_has_warned", "_holder", "_one_loop", "_queue", "_users", "here", "is_free", "mutex",
        "what",
    )  # fmt: skip

    def __init__(self, what: str) -> None:
        self.what = what
        self.mutex = threading.Lock()  # guards all below; `here` and `is_free` are read without it
        self._holder: Hold | None = None
        self._queue: deque[Hold] = deque()
        # by the thread of each event loop: how many sessions there are on a step of it
        self._users: dict[int, dict[Counter, int]] = {}
        self._one_loop = 0  # the thread of the event loop of all users, if there is one
        self._has_warned = False
        self.is_free = True  # no hold is taken or waited for, and all users are of one event loop
        self.here = 0  # the thread of that event loop, while it calls plain hooks

    @property
    def is_needed(self) -> bool:
        """Whether calls must not overlap at all."""
        return True

    @property
    def is_taken(self) -> bool:
        """Whether a call has a hold, so that it may be under way in a thread."""
        return self._holder is not None

    @property
    def _is_mine(self) -> bool:
        """Whether the running code is part of the call that is under way."""
        ident, holder = threading.get_ident(), self._holder
        return (
            self.here == ident
            or (holder is not None and holder.thread == ident)
            or any(hold.is_of(self) for hold in _under_way.get())
        )

    @property
    def _is_here_elsewhere(self) -> bool:
        """Whether a step without a hold is under way on another thread's event loop."""
        ident = threading.get_ident()
        if ident == self._one_loop:
            return False
        users = list(self._users.items())  # in one piece, as the steps of each
        steps = [step for thread, each in users if thread != ident for step in list(each)]
        return any(step.is_running_here for step in steps)

    def join(self, step: Counter) -> int:
        """A session on this step uses it from now on, in this thread; what to give to `leave`."""
        thread = threading.get_ident()
        with self.mutex:
            steps = self._users.setdefault(thread, {})
            steps[step] = steps.get(step, 0) + 1
            self._find_free()
        return thread

    def leave(self, step: Counter, thread: int) -> None:
        """It uses it no more."""
        with self.mutex:
            steps = self._users.get(thread, {})
            num_others = steps.pop(step, 1) - 1
            if num_others:
                steps[step] = num_others
            elif not steps:
                self._users.pop(thread, None)
            self._find_free()

    def pass_on(self) -> None:
        """A call `here` has ended, and another one has asked meanwhile."""
        with self.mutex:
            if self._holder is None and self._queue:
                self._grant(self._queue.popleft())
            self._find_free()

    def take_nowait(self) -> Hold | None:
        """A hold, if no call is under way and none waits, or the running code is part of it."""
        if not self.is_free and self._is_mine:
            return NO_HOLD
        with self.mutex:
            if self._holder is not None or self._queue:
                return None
            self.is_free = False
            if self.here or self._is_here_elsewhere:
                self._find_free()
                return None
            hold = self._holder = Hold(self)
            return hold

    def _enter(self, hold: Hold) -> None:
        """Take the lock now, or else stand in the queue."""
        with self.mutex:
            self.is_free = False
            if self._holder is None and not self._queue and not self.here:
                self._holder = hold
            else:
                self._queue.append(hold)

    async def take(
        self,
        engine: Engine,
        grace_secs: float,
        *,
        stop: Stop | None = None,
        lost_peer: LostPeer | None = None,
    ) -> Hold:
        """Wait for a hold.

        Args:
            grace_secs: seconds, >= 0, for which it waits for a call that was abandoned.
            stop: ends the wait, as the call is not worth making then.
            lost_peer: says that the call under way will never return.

        Raises:
            OverlappingCallError: a call that was abandoned has not returned.
            StopTraining: the stop came.
        """
        slot: Slot | None = None

        def wake() -> None:
            if slot is not None:
                slot.wake(_LOOK)

        hold = Hold(self, wake)
        self._enter(hold)
        begun = system_now()
        warn_at = begun + _PATIENCE_SECS
        try:
            while True:
                slot = Slot(engine, f"the end of another call of {self.what}")
                has_it = self._holder is hold
                if has_it and not self._is_here_elsewhere:
                    return hold
                until = self._until(begun, grace_secs)  # not before the slot can be woken
                now = system_now()
                if now >= until:
                    self._refuse(grace_secs)
                if now >= warn_at:
                    self._warn(now - begun)
                    warn_at = math.inf
                pause = _SHORT_SECS if has_it else min(until, warn_at) - now
                if lost_peer is not None:
                    lost_peer.add(slot)
                try:
                    with EndsAtStop(slot, stop):
                        value = await engine.park(slot, engine.now() + pause)
                finally:
                    if lost_peer is not None:
                        lost_peer.discard(slot)
                if value is STOPPED and self._holder is not hold:
                    if lost_peer is not None and lost_peer.is_set:
                        raise lost_peer.error()
                    raise StopTraining(f"a stop was requested while waiting for {slot.what}")
        except BaseException:
            self.release(hold)
            raise

    @contextmanager
    def held(self, grace_secs: float) -> Iterator[None]:
        """In a thread: block until no other call is under way, and keep others out of the block.

        Within a call that this thread makes already it does nothing.

        Raises:
            OverlappingCallError: in a thread whose event loop other users need: it cannot wait
                there. Elsewhere: a call that was abandoned has not returned.
        """
        if self._is_mine:
            yield
            return
        hold = self._take_blocking(grace_secs)
        hold.begin()
        try:
            yield
        finally:
            hold.end()

    def _take_blocking(self, grace_secs: float) -> Hold:
        ident = threading.get_ident()
        if ident in self._users:
            if (hold := self.take_nowait()) is not None:
                return hold
            raise OverlappingCallError(
                f"another call of {self.what} is under way in a thread, and the event loop cannot "
                "wait for it here. Run it through `await session.run(...)` or `await "
                "step_context.run_with_hooks(...)`, or in a plain hook method or step_fn; if calls "
                "may overlap, write FunctionSessionCreator(step, thread_safe=True)"
            )
        event = threading.Event()
        hold = Hold(self, event.set)
        self._enter(hold)
        begun = system_now()
        while not (has_it := self._holder is hold) or self._is_here_elsewhere:
            until = self._until(begun, grace_secs)
            if system_now() >= until:
                self.release(hold)
                self._refuse(grace_secs)
            event.wait(_SHORT_SECS if has_it else min(until - system_now(), _PATIENCE_SECS))
            event.clear()  # before the next look
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold, or leave the queue."""
        with self.mutex:
            self.let_go(hold)

    def let_go(self, hold: Hold) -> None:
        """As `release`, with the mutex held."""
        if hold.is_over:
            return
        hold.is_over = True
        if self._holder is hold:
            self._holder = None
            if self._queue and not self.here:
                self._grant(self._queue.popleft())
                return
        elif hold in self._queue:
            self._queue.remove(hold)
        self.is_free = bool(self._one_loop) and self._holder is None and not self._queue

    def wake_queue(self) -> None:
        """Have all waiting calls look again; with the mutex held."""
        for each in self._queue:
            if each.wake is not None:
                each.wake()

    def _grant(self, hold: Hold) -> None:
        self._holder = hold
        if hold.wake is not None:
            hold.wake()

    def _find_free(self) -> None:
        self._one_loop = next(iter(self._users)) if len(self._users) == 1 else 0
        self.is_free = bool(self._one_loop) and self._holder is None and not self._queue

    def _until(self, begun: float, grace_secs: float) -> float:
        """When to give up waiting, which began then: never, for a call that is waited for."""
        with self.mutex:
            holder = self._holder
            abandoned_at = None if holder is None else holder.abandoned_at
        return math.inf if abandoned_at is None else max(begun, abandoned_at) + grace_secs

    def _refuse(self, grace_secs: float) -> NoReturn:
        raise OverlappingCallError(
            f"a call of {self.what} that was cancelled or given up still runs in its thread, "
            f"{grace_secs:g} s later, and calls must not overlap. Find out why it does not return, "
            "or give the session a longer stop_grace_period_secs; if calls may overlap, write "
            "FunctionSessionCreator(step, thread_safe=True)"
        )

    def _warn(self, seconds: float) -> None:
        with self.mutex:
            is_first, self._has_warned = not self._has_warned, True
            num_waiting = len(self._queue)
        if is_first:
            logger.warning(
                "Calls of %s run one at a time, and %d wait, for %.3g s by now. If the one under "
                "way waits for another worker, it never returns: then write "
                "FunctionSessionCreator(step, thread_safe=True), if calls may overlap",
                self.what, num_waiting, seconds,
            )  # fmt: skip


class _NoLock(CallLock):
    """For calls that may overlap."""

    __slots__ = ()

    @property
    def is_needed(self) -> bool:
        return False

    def join(self, step: Counter) -> int:
        """It is free for all."""
        return 0

    def leave(self, step: Counter, thread: int) -> None:
        """It stays so."""

    def take_nowait(self) -> Hold:
        return NO_HOLD

    @contextmanager
    def held(self, grace_secs: float) -> Iterator[None]:
        yield


NO_LOCK = _NoLock("nothing")
NO_HOLD = Hold(None)
