"""The one connection of a process to its training at a Dask scheduler, and how it comes back.

Everything here runs on the event loop of Dask's client. What is said is the source's matter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from contextlib import suppress
from typing import Any

from .._engine import now
from .._errors import StepUnreachableError
from .._step_source import SourceState
from .._version import version
from ._actions import Action
from ._dask_place import Place
from ._dask_plugin import FOLLOW, STATISTICS
from ._dask_source import DaskSource
from ._training import message_of

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.02, 1.0
_BEATS = 3
"""Heartbeats in the time within which silence counts as loss."""


class DaskStream:
    """Connects, speaks and listens for one source. Its `DaskCluster` makes, opens and closes it."""

    def __init__(
        self, place: Place, training: str, heartbeat_secs: float, lease_secs: float
    ) -> None:
        self._place = place
        self._training = training
        self._beat_secs = heartbeat_secs / _BEATS
        self._heartbeat_secs = heartbeat_secs
        self._lease_secs = lease_secs
        self._source: DaskSource
        self._kicked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.comm: Any = None  # the connection, while there is one
        self._num_silent = 0
        self._state: SourceState | None = None
        self._is_beat_due = False

    def kick(self) -> None:
        """Look for something to say; from any thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            running: Any = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            self._kicked.set()
        elif not self._kicked.is_set():
            with suppress(RuntimeError):  # the loop has ended, and everything with it
                loop.call_soon_threadsafe(self._kicked.set)

    async def open(self, source: DaskSource, timeout_secs: float) -> None:
        """Join the training.

        Raises:
            ConnectionError: nobody answers there in time.
            RuntimeError: the scheduler has no plugin of ours, or that of another version.
        """
        self._source = source
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_secs):
                # sooner, so that it is Dask which says why
                comm = await self._join(0.9 * timeout_secs, comes_back=False)
        # the latter three where something else answers, whose words Dask takes for lengths
        except (TimeoutError, OSError, MemoryError, ValueError, struct.error) as error:
            reason: BaseException = error
            while isinstance(reason.__cause__, Exception):  # of Dask's tries it is the last
                reason = reason.__cause__
            raise ConnectionError(
                f"no Dask scheduler answers at {self._place.address or repr('')} within "
                f"{timeout_secs:g} s ({reason!r}); start one with `dask scheduler`, or give the "
                "address that it prints when it starts"
            ) from error
        self._task = asyncio.create_task(self._serve_until_end(comm), name="asynchooks-dask")

    async def close(self, timeout_secs: float) -> None:
        """Say what is left to be said, as far as anybody listens, and leave."""
        task = self._task
        if task is not None:
            if self._state is SourceState.LIVE and not task.done():
                try:
                    async with asyncio.timeout(timeout_secs):
                        await self._source.do(Action())  # answered after all that came before
                except (TimeoutError, StepUnreachableError):
                    logger.warning("%s has not taken all steps", self._place.address)
            self._set_state(SourceState.CLOSED, "")
            task.cancel()
            await asyncio.wait([task])

    async def statistics(self) -> Any:
        comm = await self._place.connect(self._heartbeat_secs)
        try:
            await comm.write({"op": STATISTICS, "training": self._training, "close": True})
            return await comm.read()
        finally:
            comm.abort()

    async def _join(self, timeout_secs: float, *, comes_back: bool) -> Any:
        comm = await self._place.connect(timeout_secs)
        try:
            # registering may take a client of our own, and most schedulers are those that they were
            welcome, refusal = await self._greet(comm) if comes_back else None, None
            if not _is_welcome(welcome):
                try:
                    await self._place.register(timeout_secs)
                except OSError:
                    raise
                except Exception as error:  # whatever it says; it may have it all the same
                    refusal = error
                welcome = await self._greet(comm)
            self._check(welcome, refusal)
            self._hear(welcome)
            again = self._source.last_request()
            if again is not None:
                await comm.write(message_of(again))
        except BaseException:
            comm.abort()
            raise
        return comm

    async def _greet(self, comm: Any) -> Any:
        hello = {
            "op": FOLLOW, "training": self._training, "version": version(),
            "uid": self._source.uid, "beat_secs": self._beat_secs,
            "lease_secs": self._lease_secs, "request": message_of(self._source.greeting()),
        }  # fmt: skip
        await comm.write(hello)
        return await comm.read()

    def _check(self, welcome: Any, refusal: Exception | None) -> None:
        where = f"the Dask scheduler at {self._place.address}"
        if not _is_welcome(welcome):
            raise RuntimeError(
                f"{where} has no plugin of asynchooks, and took none: {refusal!r}, it answered "
                f"{welcome!r}. Install asynchooks where the scheduler runs; where it takes no "
                "plugins from clients, start it with `dask scheduler --preload "
                "asynchooks.distributed._dask_plugin`"
            ) from refusal
        if welcome["version"] != version():
            raise RuntimeError(
                f"{where} runs asynchooks {welcome['version']}, this process {version()}; "
                "install the same version in both places and start the scheduler again"
            )

    async def _serve_until_end(self, comm: Any) -> None:
        try:
            await self._serve(comm)
        except asyncio.CancelledError:  # unless we close: a synchronous client took its loop along
            self._set_state(SourceState.CLOSED, "its Dask client is closed")
            raise
        except Exception as error:  # a defect, and nobody shall wait for ever because of it
            logger.exception("The connection to %s failed", self._place.address)
            self._set_state(SourceState.CLOSED, repr(error))

    async def _serve(self, comm: Any) -> None:
        """Speak and listen until the end, over one connection after the other."""
        while True:
            self.comm = comm
            reason = "the connection ended"
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._beat())
                    group.create_task(self._speak(comm))
                    self._kicked.set()
                    while True:
                        self._hear(await comm.read())
            except* (OSError, _Closed) as ended:
                reason = repr(ended.exceptions[0])
            finally:
                comm.abort()
            comm = await self._come_back(reason)
            if comm is None:
                return

    async def _come_back(self, reason: str) -> Any:
        pause = _FIRST_PAUSE_SECS
        while not self._place.is_closed:
            self._set_state(SourceState.LOST, f"{self._place.address}: {reason}")
            try:
                async with asyncio.timeout(max(self._heartbeat_secs, 1.0)):
                    return await self._join(self._heartbeat_secs, comes_back=True)
            except (OSError, TimeoutError) as error:
                reason = repr(error)
            except Exception as error:
                logger.exception("The scheduler at %s refuses us", self._place.address)
                self._set_state(SourceState.CLOSED, repr(error))
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        self._set_state(SourceState.CLOSED, f"its Dask client is closed ({reason})")
        return None

    async def _speak(self, comm: Any) -> None:
        while True:
            self._kicked.clear()
            request = self._source.next_request(is_beat=self._is_beat_due)
            if request is not None:
                self._is_beat_due = False
                await comm.write(message_of(request))
            until = self._source.look_at
            if until == math.inf:
                await self._kicked.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - now())):
                    await self._kicked.wait()

    async def _beat(self) -> None:
        """Notice a silent scheduler, by beats and not by a clock: who was stopped himself cannot
        know how long the other one was silent.
        """
        self._num_silent = 0
        while True:
            await asyncio.sleep(self._beat_secs)
            if self._place.is_closed:
                raise _Closed("closed")
            self._num_silent += 1
            if self._num_silent > _BEATS:
                reason = f"{self._place.address} is silent for {self._heartbeat_secs:g} s"
                self._set_state(SourceState.LOST, reason)
            self._is_beat_due = True
            self._kicked.set()

    def _hear(self, news: Any) -> None:
        self._num_silent = 0
        self._source.hear(news)
        self._set_state(SourceState.LIVE, "")
        self._kicked.set()

    def _set_state(self, state: SourceState, reason: str) -> None:
        if state is not self._state and self._state is not SourceState.CLOSED:
            self._state = state
            self._source.set_state(state, reason)


def _is_welcome(answer: Any) -> bool:
    return isinstance(answer, dict) and "version" in answer


class _Closed(Exception):  # noqa: N818 - it only ends a connection
    pass
