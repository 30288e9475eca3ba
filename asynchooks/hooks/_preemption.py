"""PreemptionHook: a signal becomes an orderly stop, and the process ends as it was told to.

It saves nothing by itself: a clean end does, where there is a CheckpointSaverHook.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from .._coordinator import Coordinator
from .._engine import TIMED_OUT, Engine, EngineTask, Slot, current_engine
from .._errors import StepUnreachableError, is_preemption
from .._hook import SessionRunHook
from .._raw_session import RawSession, raw_session_of
from .._session_stop import SessionStop
from .._stop_reason import StopReason
from ._checkpoint_saver import CheckpointSaverHook

logger = logging.getLogger("asynchooks")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)


class PreemptionHook(SessionRunHook):
    """Stops training in an orderly way when the process gets a signal, at whatever moment.

    The session is asked to stop: the step under way completes, also in a thread, every wait of
    asynchooks ends, `end` of all hooks runs, and a CheckpointSaverHook saves that step. When the
    session is closed the signal leaves the block: as KeyboardInterrupt for SIGINT, else as
    `SystemExit(128 + signal)`, which is what a shell says of a process that a signal ended (also
    out of trio's task groups, which wrap it: then through `sys.excepthook`). Where
    the block does not end by itself (it waits for another library, outside of `or_stop`), the
    step is saved after half of the time, and when the time is over the process ends at once, with
    that exit code. A second signal ends it at once, too, by that signal.

    One hook may be given to several sessions: all stop, and the signal leaves the last one. Put
    it first, so that it hears of signals while the others begin. Handlers that were there before
    are put back at the end.

    Outside of the main thread no program can handle signals: then the log says so, and nothing
    else happens.

    Args:
        signals: which ones, such as `signal.SIGTERM`.
        deadline_secs: seconds, > 0, from the first signal to the end of the process.

    Raises:
        TypeError, ValueError: `signals` holds what is no signal; `deadline_secs` is not > 0.
        KeyboardInterrupt, SystemExit: at the end of the block: a signal came.

    Example:
        hooks = [PreemptionHook(deadline_secs=20), StopAtStepHook(last_step=100)]
    """

    _looks_at_default_graph = False

    def __init__(
        self, signals: Iterable[signal.Signals] = _SIGNALS, *, deadline_secs: float = 25.0
    ) -> None:
        if not deadline_secs > 0:
            raise ValueError(f"deadline_secs is {deadline_secs!r}; give seconds > 0")
        self._signals = list(dict.fromkeys(_checked(each) for each in signals))
        self._deadline_secs = deadline_secs
        self._num_sessions = 0
        self._found: dict[signal.Signals, Any] = {}  # the handlers that were there before
        self._received: signal.Signals | None = None
        self._savers: list[CheckpointSaverHook] = []
        self._stops: list[SessionStop] = []
        self._raws: list[RawSession] = []
        self._watch: _Watch | None = None  # there while a session is open and signals are handled
        self._news: queue.SimpleQueue[signal.Signals | None]

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came, None before."""
        return self._received

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        self._savers += [each for each in hooks if isinstance(each, CheckpointSaverHook)]
        self._stops.append(stops)

    async def begin(self) -> None:
        self._num_sessions += 1
        if self._num_sessions > 1:
            return
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "PreemptionHook sees no signals: this is the thread %r, and Python handles "
                "signals in the main thread only. Open the session there, or ask it to stop: "
                "session.request_stop()", threading.current_thread().name,
            )  # fmt: skip
            return
        engine = current_engine()
        self._news = queue.SimpleQueue()
        if not engine.is_virtual:
            args = (self._news, self._deadline_secs)
            name = "asynchooks-deadline"
            threading.Thread(target=_enforce, args=args, name=name, daemon=True).start()
        self._watch = _Watch(engine)
        self._watch.task = engine.start(self._serve, self._watch)
        for each in self._signals:
            if signal.getsignal(each) is None:
                logger.warning(
                    "%s is handled by something that is not Python, and could not be put back: it "
                    "is left alone", each.name,
                )  # fmt: skip
            else:
                self._found[each] = signal.signal(each, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions: no locks, no log."""
        received = signal.Signals(number)
        found = self._found.get(received)
        if self._watch is None:  # ours stayed because somebody else had put theirs over it
            _call_handler(found, received, frame)
        elif self._received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            self._received = received
            self._news.put(received)
            self._watch.engine.wake_from_signal(self._watch.news, received)
            if _hook_of(found) is not None:  # of another session that is open
                _call_handler(found, received, frame)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        raw = raw_session_of(session)
        if raw not in self._raws:
            self._raws.append(raw)
        if self._received is not None:  # before there was anything to stop
            self._stop(self._received)

    def _stop(self, received: signal.Signals) -> None:
        reason = StopReason("PreemptionHook", f"the process got {received.name}")
        for stops in self._stops:
            stops.request(None, reason)
        for raw in self._raws:
            raw.stop_workers(reason)

    async def _serve(self, watch: _Watch) -> None:
        """Wait for a signal, or for the end of all sessions, and act."""
        received = await watch.engine.park(watch.news)
        if received is None:
            return
        logger.warning(
            "%s: training stops, and what there is to save is saved, within %g s. A second signal "
            "ends the process at once", received.name, self._deadline_secs,
        )  # fmt: skip
        self._stop(received)
        half = watch.engine.now() + self._deadline_secs / 2
        if await watch.engine.park(watch.ending, half) is TIMED_OUT:
            await self._rescue()

    async def _rescue(self) -> None:
        """A block does not end by itself: save beside it."""
        logger.warning("The block has not ended for %g s: saving now", self._deadline_secs / 2)
        for saver in self._savers:
            try:
                await saver.checkpointer.save_beside(timeout=self._deadline_secs / 4)
            except Exception as error:
                logger.error("Saving before the end failed: %r", error)

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        self._num_sessions -= 1
        if self._num_sessions > 0:
            return error
        watch, self._watch = self._watch, None
        raws, self._raws = self._raws, []
        self._savers, self._stops = [], []
        if watch is None:
            return error
        try:
            await self._see_off(watch, raws)
        except BaseException as interruption:
            error = error or interruption
        finally:
            self._put_back()
            self._news.put(None)
        if self._received is None:
            return error
        if error is not None and not is_preemption(error):  # that one, a recovery would have cured
            error.add_note(f"after the process got {self._received.name}")
            return error
        if self._received is signal.SIGINT:
            return KeyboardInterrupt()
        _exit_out_of_groups(128 + self._received)
        return SystemExit(128 + self._received)

    async def _see_off(self, watch: _Watch, raws: list[RawSession]) -> None:
        """End the watch, and let workers without this hook end before the signal ends them."""
        watch.ending.wake()
        watch.news.wake()
        with watch.engine.shielded(self._deadline_secs):
            if watch.task is not None:
                await watch.task.wait()
            for raw in raws if self._received is not None else ():
                if raw.global_step.statistics().workers_open:
                    with contextlib.suppress(StepUnreachableError, TimeoutError):
                        await raw.global_step.wait_for(sys.maxsize, timeout=self._deadline_secs / 4)

    def _put_back(self) -> None:
        for each, handler in list(self._found.items()):
            if signal.getsignal(each) == self._on_signal:
                signal.signal(each, _original(handler, each))
                del self._found[each]


class _Watch:
    """What waits for a signal, for all sessions of one hook."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.news = Slot(engine, "a signal")
        self.ending = Slot(engine, "the end of the session")
        self.task: EngineTask | None = None


def _hook_of(handler: Any) -> PreemptionHook | None:
    """Whose handler it is, if a hook's."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, PreemptionHook) else None


def _original(handler: Any, number: signal.Signals) -> Any:
    """The handler, or what was there before it, if it is that of a hook whose sessions are over."""
    while (hook := _hook_of(handler)) is not None and hook._watch is None:
        handler = hook._found.get(number, signal.SIG_DFL)
    return handler


def _call_handler(handler: Any, received: signal.Signals, frame: FrameType | None) -> None:
    if callable(handler):
        handler(received, frame)
    elif handler is not signal.SIG_IGN:
        signal.signal(received, signal.SIG_DFL)
        signal.raise_signal(received)


def _enforce(news: queue.SimpleQueue[signal.Signals | None], deadline_secs: float) -> None:
    """In a thread of its own: end the process when its time is over."""
    received = news.get()
    if received is None:
        return
    with contextlib.suppress(queue.Empty):
        if news.get(timeout=min(deadline_secs, threading.TIMEOUT_MAX)) is None:
            return
    logger.critical(
        "The process did not end within %g s of %s: ended", deadline_secs, received.name
    )
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)  # a pipe that nobody reads would hold it for ever
    os._exit(128 + received)


def _exit_out_of_groups(code: int) -> None:
    """Where trio's task groups wrap the exit, and nobody unwraps it, let its code be the process's.

    Python takes the code of a SystemExit that the hook for uncaught exceptions raises.
    """
    found = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, BaseExceptionGroup) and error.split(SystemExit)[1] is None:
            raise SystemExit(code)
        found(kind, error, traceback)

    sys.excepthook = hook


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _checked(number: object) -> signal.Signals:
    try:
        checked = signal.Signals(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"signals holds {number!r}; give signals, such as signal.SIGTERM") from None
    if checked.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"signals holds {checked.name}, which no program can handle; leave it out")
    return checked
