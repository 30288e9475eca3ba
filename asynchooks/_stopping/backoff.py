"""Retry policy: attempts and backoff. It tries nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from .._check import integer, number


@dataclass(frozen=True)
class Backoff:
    """A number of attempts with pauses between them: none, then the first, doubled each time."""

    max_attempts: int = 20
    first_pause_secs: float = 0.1
    longest_pause_secs: float = 10.0

    def __post_init__(self) -> None:
        integer("max_attempts", self.max_attempts, least=0)
        expected = "0 <= first_pause_secs <= longest_pause_secs"
        first, most = self.first_pause_secs, self.longest_pause_secs
        number("longest_pause_secs", most, finite=False, expected=expected)
        number("first_pause_secs", first, least=0, most=most, finite=False, expected=expected)

    def pause_before(self, attempt: int) -> float:
        """Seconds to wait before the attempt with this number, counted from 1."""
        if attempt == 1:
            return 0.0
        doubled = self.first_pause_secs * 2.0 ** min(attempt - 2, 60)
        return min(doubled, self.longest_pause_secs)


@dataclass(frozen=True)
class Recovery(Backoff):
    """Bounds on recreating a raw session; a successful run resets the count.

    The first attempt comes at once, the second after `first_pause_secs`, each further one after
    twice the pause before it. TensorFlow recreates for ever and without a pause.

    Args:
        max_attempts: attempts in a row before the error leaves, >= 0 (0: never recreate).
        first_pause_secs: seconds, >= 0.
        longest_pause_secs: seconds, >= first_pause_secs.

    Raises:
        TypeError: `max_attempts` is no integer.
        ValueError: a bound is negative, or the longest pause is shorter than the first.

    Example:
        recovery = Recovery(max_attempts=3, first_pause_secs=1.0)
        session = MonitoredSession(hooks, creator, recovery=recovery)
    """


@dataclass(frozen=True)
class Restart(Backoff):
    """Have a side task that failed called again, a bounded number of times in all.

    The first time at once, then after pauses that double. When the attempts are used up, its next
    error stops the session. Unlike `Recovery`, nothing resets the count. With `rollouts` each item
    has a count of its own: `Restart(max_attempts=2)` allows three calls of its function in all.

    Args:
        max_attempts: restarts, >= 0.
        first_pause_secs: seconds, >= 0, before the second restart.
        longest_pause_secs: seconds, >= first_pause_secs.

    Raises:
        TypeError: `max_attempts` is no integer.
        ValueError: a bound is negative, or the longest pause is shorter than the first.

    Example:
        session.start_soon(sync_weights, on_failure=Restart(max_attempts=3))
    """


def checked_grace_secs(value: object) -> float:
    """The grace period in seconds, or a ValueError."""
    if not (isinstance(value, (int, float)) and value >= 0):
        raise ValueError(
            f"stop_grace_period_secs is {value!r}; give seconds >= 0 "
            "(step_runner and recovery are given by keyword)"
        )
    return float(value)
