"""The one connection of a process to its training at a Dask scheduler, and its reconnection.

Everything here runs on the event loop of Dask's client. The source makes the requests.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import struct
from contextlib import suppress
from typing import Any

import distributed
from distributed.comm import connect

from ..._engine.current import now
from ..._errors import StepUnreachableError
from ..._step.remote import SourceState
from ..._version import __version__
from .._dask_plugin import FOLLOW, STATISTICS, StepPlugin
from ._loop import running_loop
from ._source import Action, DaskSource
from ._training import message_of

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.02, 1.0
_HEARTBEATS = 3
"""Heartbeats in the time after which a silent scheduler counts as lost."""


class Scheduler:
    """A scheduler, to connect to and to put the plugin on: by a client, or an address alone."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self.address = address

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed, or gave up reconnecting."""
        return self._client is not None and self._client.status in ("closed", "closing")

    async def connect(self, timeout_secs: float) -> Any:
        if self._client is None:
            arguments = distributed.Security().get_connection_args("client")
        else:
            arguments = self._client.security.get_connection_args("client")
        try:
            return await connect(self.address, timeout=timeout_secs, **arguments)
        except ValueError as error:  # a malformed address
            raise ConnectionError(str(error)) from error
        except TypeError:  # raised by Dask
            if arguments.get("ssl_context") is not None or not self.address.startswith("tls:"):
                raise
            raise ConnectionError(
                f"there are no certificates for {self.address}; give a Client that has them "
                "(security=...), or set distributed.comm.tls in Dask's configuration"
            ) from None

    async def register(self, timeout_secs: float) -> None:
        if self._client is not None:
            await _awaited(self._client.register_plugin(StepPlugin()))
            return
        async with distributed.Client(
            self.address, asynchronous=True, set_as_default=False, timeout=timeout_secs
        ) as client:
            await _awaited(client.register_plugin(StepPlugin()))


class DaskStream:
    """Connects, sends and receives for one source. Its `DaskCluster` makes, opens and closes it."""

    def __init__(
        self, scheduler: Scheduler, training: str, heartbeat_secs: float, lease_secs: float
    ) -> None:
        self._scheduler = scheduler
        self._training = training
        self._interval_secs = heartbeat_secs / _HEARTBEATS
        self._heartbeat_secs = heartbeat_secs
        self._lease_secs = lease_secs
        self._source: DaskSource
        self._kicked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.comm: Any = None  # the connection, while there is one
        self._num_silent = 0
        self._state: SourceState | None = None
        self._is_heartbeat_due = False

    def kick(self) -> None:
        """Check for a request to send; from any thread."""
        loop = self._loop
        if loop is None or self._kicked.is_set():
            return
        if running_loop() is loop:
            self._kicked.set()
        else:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._kicked.set)

    async def open(self, source: DaskSource, timeout_secs: float) -> None:
        """Join the training.

        Raises:
            ConnectionError: no scheduler answers in time.
            RuntimeError: the scheduler has no plugin of asynchooks, or that of another version.
        """
        self._source = source
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_secs):
                # sooner, so that the error is Dask's, with the cause
                comm = await self._join(0.9 * timeout_secs, is_reconnect=False)
        # the latter three where another program answers, whose bytes Dask takes for lengths
        except (TimeoutError, OSError, MemoryError, ValueError, struct.error) as error:
            reason: BaseException = error
            while isinstance(reason.__cause__, Exception):  # of Dask's attempts the last one
                reason = reason.__cause__
            raise ConnectionError(
                f"no Dask scheduler answers at {self._scheduler.address or repr('')} within "
                f"{timeout_secs:g} s ({reason!r}); start one with `dask scheduler`, or give the "
                "address that it prints when it starts"
            ) from error
        self._task = asyncio.create_task(self._serve_until_end(comm), name="asynchooks-dask")

    async def close(self, timeout_secs: float) -> None:
        """Send the last actions, if the scheduler answers, and leave."""
        task = self._task
        if task is None:
            return
        if self._state is SourceState.LIVE and not task.done():
            try:
                async with asyncio.timeout(timeout_secs):
                    await self._source.do(Action())  # answered after all that came before
            except (TimeoutError, StepUnreachableError):
                logger.warning("%s has not taken all steps", self._scheduler.address)
        self._set_state(SourceState.CLOSED, "")
        task.cancel()
        await asyncio.wait([task])

    async def statistics(self) -> Any:
        comm = await self._scheduler.connect(self._heartbeat_secs)
        try:
            await comm.write({"op": STATISTICS, "training": self._training, "close": True})
            return await comm.read()
        finally:
            comm.abort()

    async def _join(self, timeout_secs: float, *, is_reconnect: bool) -> Any:
        comm = await self._scheduler.connect(timeout_secs)
        try:
            # registering may take a client of its own, and most schedulers still have the plugin
            welcome, refusal = await self._send_hello(comm) if is_reconnect else None, None
            if not _is_welcome(welcome):
                try:
                    await self._scheduler.register(timeout_secs)
                except OSError:
                    raise
                except Exception as error:  # of any kind; the scheduler may have the plugin anyway
                    refusal = error
                welcome = await self._send_hello(comm)
            self._check(welcome, refusal)
            self._receive(welcome)
            repeated = self._source.last_request()
            if repeated is not None:
                await comm.write(message_of(repeated))
        except BaseException:
            comm.abort()
            raise
        return comm

    async def _send_hello(self, comm: Any) -> Any:
        await comm.write(
            {
                "op": FOLLOW,
                "training": self._training,
                "version": __version__,
                "uid": self._source.uid,
                "interval_secs": self._interval_secs,
                "lease_secs": self._lease_secs,
                "request": message_of(self._source.first_request()),
            }
        )
        return await comm.read()

    def _check(self, welcome: Any, refusal: Exception | None) -> None:
        where = f"the Dask scheduler at {self._scheduler.address}"
        if not _is_welcome(welcome):
            raise RuntimeError(
                f"{where} has no plugin of asynchooks, and took none: {refusal!r}, it answered "
                f"{welcome!r}. Install asynchooks where the scheduler runs; where it takes no "
                "plugins from clients, start it with `dask scheduler --preload "
                "asynchooks.distributed._dask_plugin`"
            ) from refusal
        if welcome["version"] != __version__:
            raise RuntimeError(
                f"{where} runs asynchooks {welcome['version']}, this process {__version__}; "
                "install the same version in both places and start the scheduler again"
            )

    async def _serve_until_end(self, comm: Any) -> None:
        """Send and receive over one connection after the other."""
        try:
            while comm is not None:
                comm = await self._reconnect(await self._serve(comm))
        except asyncio.CancelledError:
            # unless `close` did it: a synchronous client ended its event loop
            self._set_state(SourceState.CLOSED, "its Dask client is closed")
            raise
        except Exception as error:  # the plugin is refused, or a defect: no task may wait for ever
            logger.exception("The connection to %s failed", self._scheduler.address)
            self._set_state(SourceState.CLOSED, repr(error))

    async def _serve(self, comm: Any) -> str:
        """Send and receive over a connection; returns why it ended."""
        self.comm = comm
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_heartbeats())
                group.create_task(self._send(comm))
                self._kicked.set()
                while True:
                    self._receive(await comm.read())
        except* OSError as ended:
            reason = repr(ended.exceptions[0])
        finally:
            comm.abort()
        return reason

    async def _reconnect(self, reason: str) -> Any:
        """The next connection; None if the client is closed."""
        pause = _FIRST_PAUSE_SECS
        while not self._scheduler.is_closed:
            self._set_state(SourceState.LOST, f"{self._scheduler.address}: {reason}")
            try:
                async with asyncio.timeout(max(self._heartbeat_secs, 1.0)):
                    return await self._join(self._heartbeat_secs, is_reconnect=True)
            except (OSError, TimeoutError) as error:
                reason = repr(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        self._set_state(SourceState.CLOSED, f"its Dask client is closed ({reason})")
        return None

    async def _send(self, comm: Any) -> None:
        while True:
            self._kicked.clear()
            request = self._source.next_request(is_heartbeat=self._is_heartbeat_due)
            if request is not None:
                self._is_heartbeat_due = False
                await comm.write(message_of(request))
            until = self._source.look_at
            if until == math.inf:
                await self._kicked.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - now())):
                    await self._kicked.wait()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and detect a silent scheduler by counting them, not by a clock.

        A process that was stopped itself cannot know how long the scheduler was silent.
        """
        self._num_silent = 0
        while True:
            await asyncio.sleep(self._interval_secs)
            if self._scheduler.is_closed:
                raise ConnectionAbortedError("the Dask client is closed")
            self._num_silent += 1
            if self._num_silent > _HEARTBEATS:
                reason = f"{self._scheduler.address} is silent for {self._heartbeat_secs:g} s"
                self._set_state(SourceState.LOST, reason)
            self._is_heartbeat_due = True
            self._kicked.set()

    def _receive(self, news: Any) -> None:
        self._num_silent = 0
        self._source.receive(news)
        self._set_state(SourceState.LIVE, "")
        self._kicked.set()

    def _set_state(self, state: SourceState, reason: str) -> None:
        if state is not self._state and self._state is not SourceState.CLOSED:
            self._state = state
            self._source.set_state(state, reason)


def _is_welcome(answer: Any) -> bool:
    return isinstance(answer, dict) and "version" in answer


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
