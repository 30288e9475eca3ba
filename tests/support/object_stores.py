"""Real object stores on loopback, and a proxy that loses, delays and refuses requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

BUCKET = "checkpoints"
# the account that Azurite's makers publish for it
_AZURITE_ACCOUNT = "devstoreaccount1"
_AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


class StoreServer(NamedTuple):
    """A server of objects; `environment` has the credentials and the address for `url`."""

    port: int
    url: str
    kind: str

    def environment(self, port: int | None = None) -> Mapping[str, str]:
        """For a client that reaches it by this port, its own or a proxy's."""
        address = f"http://127.0.0.1:{port or self.port}"
        if self.kind == "azurite":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": _AZURITE_ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _AZURITE_KEY,
                "AZURE_ENDPOINT": f"{address}/{_AZURITE_ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
            }
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "S3RVER",
            "AWS_SECRET_ACCESS_KEY": "S3RVER",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@contextmanager
def _running(command: list[str], port: int, cwd: Path) -> Iterator[None]:
    with open(cwd / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=cwd)
    try:
        until = time.monotonic() + 60.0
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((cwd / "server.log").read_text())
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def moto(directory: Path) -> Iterator[StoreServer]:
    """S3 in memory, by moto; it keeps conditions."""
    pytest.importorskip("moto.server")
    port = _free_port()
    code = "from moto.server import main; main()"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port, directory):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield StoreServer(port, f"s3://{BUCKET}", "moto")


def _program(name: str) -> str:
    found = shutil.which(
        name, path=os.environ.get("NODE_BIN", "") + os.pathsep + os.environ["PATH"]
    )
    if found is None:
        pytest.skip(f"{name} is not installed (npm install {name}, and its folder in NODE_BIN)")
    return found


@contextmanager
def azurite(directory: Path) -> Iterator[StoreServer]:
    """Azure's blobs, by Azurite; it keeps conditions."""
    port, program = _free_port(), _program("azurite-blob")
    command = [
        program, "--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1",
        "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry",
    ]  # fmt: skip
    with _running(command, port, directory):
        server = StoreServer(port, f"az://{BUCKET}", "azurite")
        _make_container(server)
        yield server


def _make_container(server: StoreServer) -> None:
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    headers = f"x-ms-date:{date}\nx-ms-version:{version}\n"
    signed = "PUT\n\n\n\n\n\n\n\n\n\n\n\n" + headers + resource
    key = base64.b64decode(_AZURITE_KEY)
    signature = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/{_AZURITE_ACCOUNT}/{BUCKET}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {_AZURITE_ACCOUNT}:{signature}",
        },
    )
    urllib.request.urlopen(request).close()


SERVERS = {"moto": moto, "azurite": azurite}


class Proxy:
    """Passes on HTTP requests on loopback, and spoils a share of them.

    Args:
        target: the port of the server.
        spoils: the share of requests that fail, in each of four ways in turn: 503 in place of an
            answer, a connection cut before the request is passed on, an answer that is lost, and a
            delay of up to 0.2 s.
        bytes_per_sec: of all requests together; None: as fast as they come.
    """

    def __init__(
        self, target: int, *, spoils: float = 0.0, seed: int = 0, bytes_per_sec: float | None = None
    ) -> None:
        self._target = target
        self._spoils = spoils
        self._rng = random.Random(seed)
        self._bytes_per_sec = bytes_per_sec
        self.counts = dict.fromkeys(("passed", "error", "cut", "lost", "delayed"), 0)
        self.is_down = False
        self.port = 0
        self._is_ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._line: asyncio.Lock
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._is_ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._line = asyncio.Lock()
        async with await asyncio.start_server(
            self._connected, "127.0.0.1", 0, limit=1 << 26
        ) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._is_ready.set()
            await self._stop.wait()
            server.close()
            own = {asyncio.current_task()}
            while others := asyncio.all_tasks() - own:  # a connection may have come meanwhile
                for each in others:
                    each.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0.01)  # what was closed is let go in the next turns of the loop

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self.is_down and await self._answer(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled is it at the proxy's end only, and asyncio would print that
        finally:
            await _closed(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; returns whether the connection goes on."""
        request = await self._message(reader, self._bytes_per_sec)
        fate = "passed"
        if self._rng.random() < self._spoils:
            fate = self._rng.choice(["error", "cut", "lost", "delayed"])
        self.counts[fate] += 1
        if fate == "cut" or self.is_down:
            return False
        if fate == "error":
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return True
        if fate == "delayed":
            await asyncio.sleep(0.2 * self._rng.random())
        there, back = await asyncio.open_connection("127.0.0.1", self._target, limit=1 << 26)
        try:
            back.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            await back.drain()
            answer = await there.read()
        finally:
            await _closed(back)
        if fate == "lost":
            return False
        writer.write(answer)
        await writer.drain()
        return False

    async def _message(self, reader: asyncio.StreamReader, bytes_per_sec: float | None) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        sizes = [
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ]
        if b"100-continue" in head.lower():
            raise OSError("no request of obstore waits for that")
        body = b""
        for size in sizes[:1]:
            while len(body) < size:
                part = await reader.readexactly(min(1 << 18, size - len(body)))
                body += part
                if bytes_per_sec is not None:
                    async with self._line:  # one after the other, as on a line
                        await asyncio.sleep(len(part) / bytes_per_sec)
        return head + body


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextmanager
def slow_line(target: int, bytes_per_sec: float) -> Iterator[int]:
    """The port of a proxy in a process of its own, through which requests come so fast."""
    command = [sys.executable, "-m", __name__, str(target), str(bytes_per_sec)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


if __name__ == "__main__":
    with Proxy(int(sys.argv[1]), bytes_per_sec=float(sys.argv[2])) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
