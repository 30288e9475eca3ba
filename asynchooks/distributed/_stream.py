"""The one connection of a process to a host, and its reconnection.

All but `open`, `aclose` and `kick` runs on the event loop of Dask's client or worker, or on one
that was made for it. The link makes the messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from contextlib import suppress
from typing import Any

import distributed
from distributed.comm import connect
from distributed.core import send_recv
from distributed.protocol import pickle

from .._engine.current import current_engine, now
from .._errors import StepSourceLostError, StepUnreachableError
from .._step.remote import SourceState
from .._version import __version__
from ._dask_plugin import StepPlugin
from ._link import Link
from ._loop import DaskLoop
from ._messages import FOLLOW

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.02, 1.0
_FIRST_TRY_SECS = 0.5
"""How long Dask may try to connect again, the first time; twice as long each further time.

Where nothing listens it tries for all that time, and whether the host is gone for good is only
checked between two tries: with the ten seconds of a long heartbeat its end was noticed that late.
"""
_HEARTBEATS = 3
"""In the time after which a silent host counts as lost."""
_LONGEST_HEARTBEAT_SECS = 10.0
_CLOSE_SECS = 2.0


class Place:
    """A Dask server that hosts a training: the scheduler, reached by a client or an address alone.

    Args:
        owner: a `distributed.Client` or `distributed.Worker`, or None.
    """

    counts = True
    """Whether its host counts runs, and holds no parameters."""
    role = "Dask scheduler"
    error: type[Exception] = ConnectionError
    """Where nothing answers in time."""
    remedy = "start one with `dask scheduler`, or give the address that it prints when it starts"

    def __init__(self, owner: Any, address: str) -> None:
        self._owner = owner
        self.address = address
        self.what = f"the {self.role} at {address}"

    def check_client(self) -> None:
        """Raise ConnectionAbortedError if the client was closed, or gave up reconnecting."""
        owner = self._owner
        if isinstance(owner, distributed.Client) and owner.status in ("closed", "closing"):
            raise ConnectionAbortedError(f"{self.what} is lost: its Dask client is closed")

    async def check_lost(self, secs: float) -> None:
        """Raise ConnectionError if it will not answer any more, after so many seconds without it.

        It ends soon, also where nothing answers.
        """

    async def connect(self, timeout_secs: float) -> Any:
        owner = self._owner
        if owner is None:
            arguments = distributed.Security().get_connection_args("client")
        else:
            arguments = owner.connection_args
        try:
            return await connect(self.address, timeout=timeout_secs, **arguments)
        # a malformed address; the others where another program answers, whose bytes Dask takes for
        # lengths
        except (ValueError, MemoryError, struct.error) as error:
            raise ConnectionError(repr(error)) from error
        except TypeError:  # raised by Dask
            if arguments.get("ssl_context") is not None or not self.address.startswith("tls:"):
                raise
            raise ConnectionError(
                f"there are no certificates for {self.address}; give a Client that has them "
                "(security=...), or set distributed.comm.tls in Dask's configuration"
            ) from None

    def refusal(self, welcome: Any, cause: Exception | None) -> Exception:
        """The error where a server answers that has no host."""
        return RuntimeError(
            f"{self.what} has no plugin of asynchooks, and took none: "
            f"{cause!r}, it answered {welcome!r}. Install asynchooks where the scheduler runs; "
            "where it takes no plugins from clients, start it with `dask scheduler --preload "
            "asynchooks.distributed._dask_plugin`"
        )


class Stream:
    """Connects, sends and receives for one link. What makes it opens and closes it, once.

    Args:
        link: what is sent, and what becomes of the news.
        loop: of the connection.
        training: its name at the place.
        heartbeat_secs: of silence after which the host counts as lost; several heartbeats are sent
            meanwhile.
        lease_secs: of silence after which this process has left, for the host; it may have its own.
    """

    def __init__(
        self,
        link: Link,
        loop: DaskLoop,
        place: Place,
        training: str,
        heartbeat_secs: float = 3.0,
        lease_secs: float = 30.0,
    ) -> None:
        self._link, self._loop, self._place = link, loop, place
        link.kick = self.kick
        self._training = training
        self._heartbeat_secs = heartbeat_secs
        self._lease_secs = lease_secs
        self._kicked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.comm: Any = None  # the connection, while there is one
        self.welcome: Any = None
        """What the host said of itself."""
        self._num_silent = 0  # heartbeats since the last news

    # From any event loop, or any thread

    async def open(self, timeout_secs: float) -> None:
        """Join the training.

        Raises:
            ConnectionError: nothing answers in time.
            RuntimeError: there is no host, or one of another version.
        """
        self._link.step.feed_from(self._link)
        try:
            await self._loop.run(self._begin, timeout_secs)
        except BaseException as error:  # a cancellation may come just when it has begun
            await self.aclose(repr(error))
            raise

    async def aclose(self, reason: str) -> None:
        """Leave the training, within two seconds; afterwards the link is closed for this reason."""
        try:
            with current_engine().shielded(2 * _CLOSE_SECS), suppress(ConnectionError):
                await self._loop.run(self._end, reason)
        finally:
            self._link.set_state(SourceState.CLOSED, reason)
            self._loop.end()

    def kick(self) -> None:
        """Check for a message to send."""
        if self._kicked.is_set():
            return
        if self._loop.is_here:
            self._kicked.set()
        else:
            self._loop.soon(self._kicked.set)

    # On its own event loop

    async def _begin(self, timeout_secs: float) -> None:
        try:
            async with asyncio.timeout(timeout_secs if timeout_secs < math.inf else None):
                # sooner, so that the error is Dask's, with the cause
                comm = await self._join(0.9 * min(timeout_secs, 3600.0))
        except (TimeoutError, OSError) as error:
            if isinstance(error, StepSourceLostError):
                raise
            reason: BaseException = error
            while isinstance(reason.__cause__, Exception):  # of Dask's attempts the last one
                reason = reason.__cause__
            place = self._place
            raise place.error(
                f"no {place.role} answers at {place.address or repr('')} within {timeout_secs:g} s "
                f"({reason!r}); {place.remedy}"
            ) from error
        self._task = asyncio.create_task(self._serve_until_end(comm), name="asynchooks-dask")

    async def _end(self, reason: str) -> None:
        """Send the last calls, if the host answers, and leave."""
        task, link = self._task, self._link
        if task is None:
            return
        if link.state is SourceState.LIVE and not task.done():
            try:
                async with asyncio.timeout(_CLOSE_SECS):
                    await link.call("bye")  # answered after all that came before
            except (TimeoutError, StepSourceLostError, StepUnreachableError):
                logger.warning("%s has not taken all steps", self._place.what)
        link.set_state(SourceState.CLOSED, reason)
        task.cancel()
        await asyncio.wait([task])

    async def _join(self, timeout_secs: float) -> Any:
        """A connection over which the host has told what is new."""
        comm = await self._place.connect(timeout_secs)
        try:
            cause = None
            if self._place.counts:
                try:  # as a client brings a plugin: the scheduler may be a new one
                    await send_recv(
                        comm,
                        op="register_scheduler_plugin",
                        plugin=pickle.dumps(StepPlugin()),
                        name=StepPlugin.name,
                        idempotent=True,
                    )
                except OSError:
                    raise
                except Exception as error:  # of any kind; it may have the plugin anyway
                    cause = error
            hello = {
                "op": FOLLOW,
                "training": self._training,
                "counts": self._place.counts,
                "version": __version__,
                "uid": self._link.uid,
                "lease_secs": self._lease_secs,
                "message": tuple(self._link.hello()),
            }
            await comm.write(hello)
            welcome = await comm.read()
            if not isinstance(welcome, dict) or welcome.get("is_gone", "version" not in welcome):
                raise self._place.refusal(welcome, cause) from cause
            if welcome["version"] != __version__:
                raise RuntimeError(
                    f"{self._place.what} runs asynchooks "
                    f"{welcome['version']}, this process {__version__}; install the same version "
                    "in both places and start it again"
                )
            self.welcome, lease_secs = welcome["welcome"], welcome["lease_secs"]
            if lease_secs is not None:
                self._lease_secs = lease_secs
                self._heartbeat_secs = max(1.0, min(lease_secs / 2, _LONGEST_HEARTBEAT_SECS))
            self._receive(welcome)
        except BaseException:
            comm.abort()
            raise
        return comm

    async def _serve_until_end(self, comm: Any) -> None:
        """Send and receive over one connection after the other."""
        link = self._link
        try:
            while True:
                comm = await self._reconnect(await self._serve(comm))
        except asyncio.CancelledError:
            # unless `aclose` did it: a synchronous client ended its event loop
            link.set_state(SourceState.CLOSED, "its Dask client is closed")
            raise
        except Exception as error:  # the host is gone, or a defect: no task may wait for ever
            if not isinstance(error, ConnectionError):
                logger.exception("The connection to %s failed", self._place.what)
            link.set_state(SourceState.CLOSED, str(error) or repr(error))

    async def _serve(self, comm: Any) -> str:
        """Send and receive over a connection; returns why it ended."""
        self.comm = comm
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(comm))
                while True:
                    self._receive(await comm.read())
        except* OSError as ended:
            reason = repr(ended.exceptions[0])
        finally:
            comm.abort()
        return reason

    async def _reconnect(self, reason: str) -> Any:
        """The next connection; raises ConnectionError if there will be none."""
        pause, lost_at, place = _FIRST_PAUSE_SECS, now(), self._place
        try_secs = _FIRST_TRY_SECS
        while True:
            place.check_client()
            self._link.set_state(SourceState.LOST, f"{place.what}: {reason}")
            await place.check_lost(now() - lost_at)
            try:
                async with asyncio.timeout(max(self._heartbeat_secs, 1.0)):
                    return await self._join(min(try_secs, self._heartbeat_secs))
            except StepSourceLostError:  # the server is there, without a host
                raise
            except (OSError, TimeoutError) as error:
                reason = repr(error)
            await asyncio.sleep(pause)
            pause, try_secs = min(2 * pause, _LONGEST_PAUSE_SECS), 2 * try_secs

    async def _send(self, comm: Any) -> None:
        """Send what is due, and heartbeats; a silent host is noticed by counting these.

        A clock would not do: a process that was stopped itself cannot know how long the host was
        silent.
        """
        link, place = self._link, self._place
        secs = min(self._heartbeat_secs / _HEARTBEATS, self._lease_secs / (_HEARTBEATS + 1))
        beat_at = now() + secs
        while True:
            self._kicked.clear()
            message = link.next_message()
            if message is not None:
                await comm.write(tuple(message))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(link.look_at, beat_at) - now())):
                    await self._kicked.wait()
            if now() < beat_at:
                continue
            place.check_client()
            self._num_silent += 1
            if self._num_silent * secs > self._heartbeat_secs:
                reason = f"{place.what} is silent for {self._heartbeat_secs:g} s"
                link.set_state(SourceState.LOST, reason)
            link.is_heartbeat_due, beat_at = True, now() + secs

    def _receive(self, news: Any) -> None:
        self._num_silent = 0
        self._link.receive(news)
        self._kicked.set()
