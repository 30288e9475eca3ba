"""Why a session stops, in words. It stops nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class StopReason:
    """Who stopped a session, and why. Made by whoever asks for the stop; the first one stands.

    Args:
        who: "TimeLimitHook", "the side task 'watch'", "another worker", ...
        why: in a few words.
        error: what leaves the session for it, if that is an error.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=9)], creator) as session:
            while not session.should_stop():
                await session.run("loss")
        print(session.stop_reason)  # the limit: global_step is at 9 of 9
    """

    who: str
    why: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


def reason_for(
    error: BaseException | None, reason: StopReason | str | BaseException | None, who: str
) -> StopReason:
    """The reason that was given, or the best that can be said without one.

    Raises:
        TypeError: it is no reason.
    """
    if isinstance(reason, StopReason):
        return reason
    if isinstance(reason, BaseException):
        error, reason = reason, None
    if not isinstance(reason, (str, type(None))):
        raise TypeError(f"reason is {reason!r}; give a text, an exception, or nothing")
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        who = f"{who} in the thread {thread.name!r}"
    return StopReason(who, reason or ("no reason given" if error is None else repr(error)), error)
