"""Starts a cluster, waits for it and ends it; the kind of its processes does not matter here.

Normal: the last stage starts first. When all of the first stage have exited with 0, the others get
some seconds to end by themselves, then SIGTERM, stage by stage.
Failure: the first process that exits with another code, or is killed, ends all others at once. Its
last lines are written when all have ended, below the output of the others.
Signal: SIGINT, SIGTERM and SIGHUP go to the first stage; the others get SIGTERM, each stage when
the one before it has ended. Another signal, a second later or more, kills all at once.
A process that has not ended within the grace period after a signal is killed. When the launcher
itself is killed, the guard kills all.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import IO

import anyio
import anyio.abc
import anyio.lowlevel

from .._engine.base import Sentinel
from .._engine.current import now
from ._cluster import Cluster
from ._output import Lines, Output

assert sys.platform != "win32", "_process needs process groups"
from ._process import Guard, Process, adopted_orphans  # noqa: E402

_DRAW_EVERY_SECS = 0.25
_SAME_SIGNAL_SECS = 1.0
"""A signal to the whole process group arrives directly and may be passed on by other processes."""
_KILLED_SECS = 5.0
"""How long to wait for killed processes: a hanging disk may delay their end for ever."""
_UNREAD_SECS = 1.0
"""The same for their output: the launcher's stdout may not be read."""


FINISHED = Sentinel("FINISHED")
"""All processes of the first stage have exited with 0."""
Cause = Sentinel | Process | signal.Signals | OSError
"""Why the cluster ends: `FINISHED`, the process that failed, a signal that the launcher got, or an
error of the launcher itself, whose last note says what failed."""


def launch(cluster: Cluster, grace_secs: float, prog: str) -> int:
    """Run a cluster until it has ended; `prog` is the prefix of the launcher's own lines.

    Returns:
        The exit code: 0; that of the first process that failed; 128 and the number of a signal,
        of the launcher or of the process that failed.

    Raises:
        OSError: a process could not be started, or stdout could not be written to.
    """

    async def run() -> int:
        return await _Launcher(cluster, grace_secs, prog).run()

    with adopted_orphans():
        return anyio.run(run)


class _Launcher:
    """One run of a cluster."""

    def __init__(self, cluster: Cluster, grace_secs: float, prog: str) -> None:
        self._cluster = cluster
        self._grace_secs = grace_secs
        self._prog = prog
        self._stages: list[list[Process]] = [[] for _ in cluster.stages]
        self._cause: Cause | None = None
        self._decided_at = 0.0
        self._changed = anyio.Event()
        self._hurry = anyio.CancelScope()
        """Around the orderly end; cancelled to end at once."""

    async def run(self) -> int:
        self._start_time = now()
        self._output = Output([task.name for task in self._cluster.tasks], self._progress)
        try:
            with anyio.open_signal_receiver(*_numbers()) as received:
                self._guard = Guard()
                try:
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._listen, received)
                        group.start_soon(self._draw)
                        await self._run_all(group)
                        group.cancel_scope.cancel()
                finally:
                    self._guard.close()
            return _exit_code(self._cause, self._say)
        finally:
            self._output.close()

    async def _run_all(self, group: anyio.abc.TaskGroup) -> None:
        with self._hurry:
            await self._run_in_order(group)
        if not self._hurry.cancelled_caught:
            return
        _send(self._all, signal.SIGKILL)
        with anyio.move_on_after(_KILLED_SECS):
            await self._until_cleared(self._all)
        with anyio.move_on_after(_UNREAD_SECS):
            await self._until_shown()

    async def _run_in_order(self, group: anyio.abc.TaskGroup) -> None:
        await self._start(group)
        await self._until(lambda: self._cause is not None or not _running(self._stages[0]))
        with anyio.move_on_after(self._cluster.linger_secs):
            await self._until(lambda: self._cause is not None or not _running(self._all))
        self._decide(FINISHED)
        await self._end_in_order()
        await self._until_shown()

    async def _start(self, group: anyio.abc.TaskGroup) -> None:
        """Start all, unless one fails, or a signal comes, before the last is there."""
        for stage in reversed(range(len(self._stages))):
            for task in self._cluster.stages[stage]:
                if self._cause is not None:
                    return
                try:
                    process = self._guard.start(task)
                except OSError as error:
                    error.add_note(f"{task.name} could not be started")
                    self._decide(error)
                    return
                self._stages[stage].append(process)
                group.start_soon(self._follow, process)
                await anyio.lowlevel.checkpoint()

    async def _follow(self, process: Process) -> None:
        async with anyio.create_task_group() as readers:
            readers.start_soon(self._read, process, process.stdout)
            readers.start_soon(self._read, process, process.stderr)
            status = await process.wait()
            if status != 0:
                self._decide(process)
            self._change()
            await process.clear(self._grace_secs)
            self._guard.forget(process)
            self._change()
        process.close()
        self._change()

    async def _read(self, process: Process, pipe: IO[bytes]) -> None:
        lines = Lines()
        while data := await process.read(pipe):
            await self._show(process, pipe, lines.add(data))
        await self._show(process, pipe, lines.end())

    async def _show(self, process: Process, pipe: IO[bytes], lines: bytes) -> None:
        if pipe is process.stderr and lines:
            process.keep(lines)
        try:
            await self._output.show(process.name, lines)
        except OSError as error:
            error.add_note("stdout cannot be written to")
            self._decide(error)

    async def _end_in_order(self) -> None:
        first, *others = self._stages
        if isinstance(self._cause, (Process, OSError)):
            await self._end(self._all, signal.SIGTERM)
            return
        if isinstance(self._cause, signal.Signals):
            await self._end(first, self._cause)
        for stage in others:
            await self._end(stage, signal.SIGTERM)

    async def _end(self, processes: list[Process], number: signal.Signals) -> None:
        _send(_running(processes), number)
        with anyio.move_on_after(self._grace_secs):
            await self._until_cleared(processes)
        late = [each for each in processes if not each.is_cleared]
        if late:
            names = ", ".join(each.name for each in late)
            self._say(f"{names}: not ended {self._grace_secs:g} s after {number.name}; killed")
            _send(late, signal.SIGKILL)
            await self._until_cleared(processes)

    async def _listen(self, received: AsyncIterator[signal.Signals]) -> None:
        async for number in received:
            cause = self._cause
            if cause is FINISHED:
                self._cause = number
                self._hurry.cancel()
            elif cause is None:
                self._decide(number)
                self._say(
                    f"{number.name}; all end in order, another one after {_SAME_SIGNAL_SECS:g} s "
                    "kills them"
                )
            elif now() - self._decided_at >= _SAME_SIGNAL_SECS:
                self._hurry.cancel()
            elif isinstance(cause, Process) and cause.status in (-number, 128 + number):
                self._cause = number  # the process got it a moment before, and may have handled it

    async def _draw(self) -> None:
        while self._output.has_progress:
            await self._output.draw()
            await anyio.sleep(_DRAW_EVERY_SECS)

    def _progress(self) -> str:
        alive, num_tasks = len(_running(self._all)), len(self._cluster.tasks)
        return f"{alive} of {num_tasks} processes, {now() - self._start_time:.0f} s"

    @property
    def _all(self) -> list[Process]:
        return [process for stage in self._stages for process in stage]

    def _decide(self, cause: Cause) -> None:
        """Set the cause of the end, unless there is one: later failures follow from the first."""
        if self._cause is None:
            self._cause, self._decided_at = cause, now()
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until_cleared(self, processes: list[Process]) -> None:
        await self._until(lambda: all(each.is_cleared for each in processes))

    async def _until_shown(self) -> None:
        """Until all have ended, and what they wrote was shown."""
        await self._until(lambda: all(each.stdout.closed for each in self._all))

    async def _until(self, fact: Callable[[], bool]) -> None:
        while not fact():
            await self._changed.wait()

    def _say(self, text: str, last_lines: bytes = b"") -> None:
        self._output.say(f"{self._prog}: {text}\n".encode() + last_lines)


def _numbers() -> list[signal.Signals]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    return numbers


def _running(processes: Iterable[Process]) -> list[Process]:
    return [process for process in processes if process.status is None]


def _send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        process.signal(number)


def _exit_code(cause: Cause | None, say: Callable[[str, bytes], None]) -> int:
    """The exit code; writes the cause, and raises an error of the launcher itself."""
    if isinstance(cause, OSError):
        raise OSError(f"{cause.__notes__[-1]} ({cause})") from cause
    if isinstance(cause, signal.Signals):
        say("interrupted" if cause is signal.SIGINT else f"ended by {cause.name}", b"")
        return 128 + cause
    if not isinstance(cause, Process):
        return 0
    status = cause.status
    assert status is not None
    how = f"exit code {status}" if status > 0 else f"signal {_name(-status)}"
    last = "its stderr ended so:" if cause.last_lines else "it wrote nothing to stderr"
    lines = b"\n".join(cause.last_lines)
    say(f"error: {cause.name} (process {cause.pid}) ended with {how}; {last}", lines)
    return status if status > 0 else 128 - status


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
