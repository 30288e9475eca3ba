"""Real schedulers, and the event loops of other processes, for tests of what crosses them."""

import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

ROOT = Path(__file__).parent.parent.parent
PORT = 8786
_hosts = itertools.count(1)


def own_host() -> str:
    """A loopback address that no other program uses: a port there is free, and stays so.

    At 127.0.0.1 any connection may take the port of a server that is started again, and one that
    is tried again and again may connect to itself. The ports of outgoing ones are not taken here.
    """
    number = os.getpid() % 65_536
    return f"127.{next(_hosts)}.{number // 256}.{number % 256}"


class Scheduler:
    """A Dask scheduler in a process of its own; it listens on loopback only.

    Args:
        variables: more of its environment.
        before: lines of Python that run before it.
    """

    def __init__(self, variables: Mapping[str, str], before: str = "") -> None:
        self.host = own_host()
        self.address = f"tcp://{self.host}:{PORT}"
        self._variables = variables
        self._before = before
        self.start()

    def start(self) -> None:
        """At the address that it had before."""
        code = f"{self._before}\nfrom distributed.cli.dask_scheduler import main; main()"
        command = [
            sys.executable, "-c", code, "--host", self.host, "--port", str(PORT),
            "--dashboard-address", f"{self.host}:0", "--no-show",
        ]  # fmt: skip
        # its log is not read: a pipe that is full would stop it
        self._process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env={**os.environ, **self._variables}
        )
        until = time.monotonic() + 30.0
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(ConnectionError):
                socket.create_connection((self.host, PORT)).close()
                return
            time.sleep(0.02)
        raise RuntimeError(f"the scheduler does not listen: {self._process.poll()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


@contextmanager
def a_scheduler(*, before: str = "", **variables: str) -> Iterator[Scheduler]:
    scheduler = Scheduler(variables, before)
    try:
        yield scheduler
    finally:
        scheduler.kill()


@contextmanager
def a_worker(scheduler: Scheduler) -> Iterator[None]:
    """A Dask worker in a process of its own, which its scheduler may not know yet."""
    command = [
        sys.executable, "-m", "distributed.cli.dask_worker", scheduler.address,
        "--host", scheduler.host, "--no-nanny", "--no-dashboard",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def a_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield pool


async def elsewhere(
    pool: ProcessPoolExecutor, backend: str, fn: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Await `fn(*args)` on an event loop of another process."""
    future = pool.submit(_run, backend, fn, args)
    return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)


def _run(backend: str, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
    return anyio.run(fn, *args, backend=backend)


async def gathered(*calls: Awaitable[Any]) -> list[Any]:
    """What they return, in their order."""
    found: list[Any] = [None] * len(calls)

    async def put(place: int, call: Awaitable[Any]) -> None:
        found[place] = await call

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(put, place, call)
    return found
