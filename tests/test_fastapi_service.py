"""The example of a FastAPI service, as a process: events, a stop, and an end by SIGTERM."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks.checkpoints import CheckpointDirectory

for module in ("fastapi", "uvicorn"):
    pytest.importorskip(module)
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent
START_SECS, END_SECS = 60.0, 10.0


class Service:
    """The example's process, which serves and trains into a directory."""

    def __init__(self, directory: Path, *, is_temporary: bool = False) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.directory = directory
        self.process = subprocess.Popen(
            [
                sys.executable, str(ROOT / "examples" / "fastapi_service.py"), "--port", str(port),
                *([] if is_temporary else ["--directory", str(directory)]),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory.parent)},
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def wait_until_up(self) -> None:
        until = time.monotonic() + START_SECS
        while True:
            try:
                httpx.get(f"{self.url}/status")
            except httpx.TransportError:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < until, "it does not answer"
                time.sleep(0.05)
            else:
                return

    def log(self) -> str:
        return self.process.communicate(timeout=END_SECS)[1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path / "checkpoints")
    try:
        service.wait_until_up()
        yield service
    finally:
        service.close()


def values_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_sigterm_ends_open_streams_and_training_before_the_server(service: Service) -> None:
    with httpx.stream("GET", f"{service.url}/events?every=5", timeout=30) as response:
        lines = response.iter_lines()
        values = values_of(lines)
        seen = [next(values) for _ in range(3)]
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    log = service.log()

    assert time.monotonic() - began < END_SECS
    steps = [each["step"] for each in seen]
    assert steps == sorted(set(steps))
    assert all(each["loss"] > 0 for each in seen)
    assert "event: end" in rest
    assert service.process.returncode == 128 + signal.SIGTERM, log
    ended = next(line for line in log.splitlines() if line.startswith("training ended at step "))
    assert ended.endswith(": PreemptionHook: the server got SIGTERM")
    newest = CheckpointDirectory(service.directory).newest_intact()
    assert newest is not None
    assert newest.step == int(ended.split()[4].removesuffix(":")) >= steps[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_a_traceback_and_its_temporary_directory(
    number: signal.Signals, tmp_path: Path
) -> None:
    service = Service(tmp_path / "unused", is_temporary=True)
    try:
        service.wait_until_up()
        assert len(list(tmp_path.iterdir())) == 1
        service.process.send_signal(number)
        log = service.log()
    finally:
        service.close()
    assert service.process.returncode == 128 + number, log
    assert "Traceback" not in log
    assert f"PreemptionHook: the server got {number.name}" in log
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_none_in_json(
    loss: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("fastapi_service")

    async def step(model: Any) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": loss}

    async def main() -> tuple[dict[str, Any], str]:
        training = example.Training(str(tmp_path))
        async with anyio.create_task_group() as group:
            await group.start(training.run)
            event = await anext(training.events(5))
            status = training.status()
            training.session.request_stop("seen")
        return status, event

    monkeypatch.setattr(example.Model, "step", step)
    status, event = anyio.run(main)
    assert status["loss"] is None
    assert status["step"] >= 5
    values = json.loads(event.removeprefix("data: "), parse_constant=pytest.fail)
    assert values["loss"] is None


def test_a_stop_over_http_ends_training_and_leaves_the_server_up(service: Service) -> None:
    assert "EventSource" in httpx.get(service.url).text
    assert httpx.get(f"{service.url}/status").json()["is_training"]
    assert httpx.get(f"{service.url}/events?every=0").status_code == 422

    httpx.post(f"{service.url}/stop").raise_for_status()

    status = httpx.get(f"{service.url}/status").json()
    assert not status["is_training"]
    assert status["stop_reason"] == "session.request_stop: POST /stop"
    assert status["error"] is None
    # a stream that begins now ends at once
    assert "event: end" in httpx.get(f"{service.url}/events?every=1000000").text
