"""The waits of workers in other processes, as tasks beside their parameter server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .._engine import current_engine
from .._errors import StopTraining
from ..protocols import ParameterServer
from ._clients import ServedProcess, Wait
from ._messages import Ending


class HostWaits:
    """Runs the waits of a `Host`, which makes it.

    Args:
        tell: is called when one has ended that somebody waits for.
    """

    def __init__(self, server: ParameterServer, tell: Callable[[], object]) -> None:
        self._server = server
        self._tell = tell
        self.num_under_way = 0

    async def begin(self, process: ServedProcess, wait: Wait) -> Ending | None:
        """The ending of a wait, if it ends at once."""
        server = self._server
        if not (server._waits_before if wait.is_begin else server._waits_after):
            return Ending(wait.number, await self._end_of(wait))
        process.waits[wait.number] = wait
        self.restart(process, wait)
        await current_engine().checkpoint()  # it has ended by then, unless something is to come
        if not wait.is_done:
            wait.is_awaited = True
            return None
        process.waits.pop(wait.number, None)
        return Ending(wait.number, wait.error)

    def restart(self, process: ServedProcess, wait: Wait) -> None:
        wait.task = current_engine().start(self._wait, process, wait)

    async def _wait(self, process: ServedProcess, wait: Wait) -> None:
        turn = wait.round
        self.num_under_way += 1
        try:
            error = await self._end_of(wait)
        finally:
            self.num_under_way -= 1
        if wait.round != turn:  # nobody waits for it, or another task of it is under way
            return
        wait.error, wait.is_done = error, True
        if wait.is_awaited:
            process.end(wait)
            self._tell()

    async def _end_of(self, wait: Wait) -> Exception | None:
        verb: Callable[[int], Awaitable[None]]
        verb = self._server.begin_step if wait.is_begin else self._server.end_step
        try:
            await verb(wait.worker)
        except StopTraining as stop:
            return StopTraining(*stop.args)  # without its traceback, which holds frames
        except Exception as error:  # the protocol's own: the worker is to hear of it
            return error
        return None
