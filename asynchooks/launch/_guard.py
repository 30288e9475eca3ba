"""A program that lets no process outlive the launcher. It imports nothing of asynchooks.

`_guard.py start FD COMMAND...` writes its process id to the pipe FD, and becomes the command.
`_guard.py watch` is at the other end of that pipe. When it is closed, the launcher has
ended, in any way: then it kills the process groups that are left.

A process writes its own id before it becomes the command: if the launcher wrote it and were killed
in between, it would leave a process behind. Linux's PR_SET_PDEATHSIG would kill the process
alone, not its children, and is there on Linux only.
"""

from __future__ import annotations

import os
import signal
import sys


def start(pipe: int, command: list[str]) -> None:
    """Become the command, once the watcher knows of this process."""
    # a shell has its background jobs ignore SIGINT, and that is inherited
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(pipe, b"+%d\n" % os.getpid())
    os.close(pipe)
    os.execv(command[0], command)


def watch() -> None:
    """Keep the ids of process groups that are read from stdin, and kill these at its end."""
    if sys.platform == "win32":
        raise NotImplementedError
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:  # it has ended by itself, or runs as another user by now
            continue


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3:])
    else:
        watch()
