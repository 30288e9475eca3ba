"""Why a run ends: what the launcher says of it at the end, and its exit code. It ends nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from ._process import Process


@dataclass(frozen=True)
class Finished:
    """The first stage has exited with 0."""


@dataclass(frozen=True)
class Failed:
    """A process exited with another code, or a signal ended it."""

    process: Process


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal."""

    number: signal.Signals


@dataclass(frozen=True)
class Broken:
    """The launcher cannot go on itself; the error's last note says with what."""

    error: OSError


Cause = Finished | Failed | Signalled | Broken


def exit_code(cause: Cause, say: Callable[[str, bytes], None]) -> int:
    """The launcher's, once it is said what the cause was.

    Raises:
        OSError: the launcher could not go on.
    """
    if isinstance(cause, Broken):
        raise OSError(f"{cause.error.__notes__[-1]} ({cause.error})") from cause.error
    if isinstance(cause, Signalled):
        is_ctrl_c = cause.number is signal.SIGINT
        say("interrupted" if is_ctrl_c else f"ended by {cause.number.name}", b"")
        return 128 + cause.number
    if isinstance(cause, Failed):
        return _of_failure(cause.process, say)
    return 0


def _of_failure(process: Process, say: Callable[[str, bytes], None]) -> int:
    status = process.status
    assert status is not None
    how = f"exit code {status}" if status > 0 else f"signal {_name(-status)}"
    last = "its stderr ended so:" if process.last_lines else "it wrote nothing to stderr"
    who = f"{process.name} (process {process.pid})"
    say(f"error: {who} ended with {how}; {last}", b"\n".join(process.last_lines))
    return status if status > 0 else 128 - status


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
