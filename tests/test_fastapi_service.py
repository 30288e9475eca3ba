"""The example of a FastAPI service, as a process: events, a stop, and an end by SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynchooks.checkpoints import CheckpointDirectory

from .support.examples import load, start_example

for module in ("fastapi", "uvicorn"):
    pytest.importorskip(module)
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.faults

Statuses = Iterator[dict[str, Any]]


class Service:
    """The example's process, which serves and trains into a directory, or a temporary one."""

    def __init__(self, directory: Path, *options: object) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url, self.directory = f"http://127.0.0.1:{port}", directory
        self.process = start_example("fastapi_service.py", "--port", port, *options)

    def wait_until_up(self) -> None:
        while True:  # until the test's own timeout
            try:
                self.get("/status")
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.05)
            else:
                return

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path).raise_for_status().json()

    def post(self, path: str) -> Any:
        return httpx.post(self.url + path, timeout=30).raise_for_status().json()

    @contextmanager
    def stream(self) -> Iterator[Statuses]:
        """The statuses that a browser would be given."""
        with httpx.stream("GET", f"{self.url}/events", timeout=30) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            yield (
                json.loads(line.removeprefix("data: "), parse_constant=pytest.fail)
                for line in response.iter_lines()
                if line.startswith("data: ")
            )

    def until_step(self, step: int) -> None:
        with self.stream() as statuses:
            while next(statuses)["step"] < step:
                pass

    def last_status(self) -> dict[str, Any]:
        """At the end of the training."""
        with self.stream() as statuses:
            return list(statuses)[-1]

    def saved_step(self) -> int:
        newest = CheckpointDirectory(self.directory).newest_intact()
        assert newest is not None
        return newest.step

    def check_ended_by(self, number: signal.Signals) -> None:
        _, log = self.process.communicate()
        assert self.process.returncode == 128 + number, log
        assert "Traceback" not in log


@contextmanager
def serving(directory: Path, *options: object) -> Iterator[Service]:
    service = Service(directory, *options)
    try:
        service.wait_until_up()
        yield service
    finally:
        service.process.kill()
        service.process.communicate()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path, "--directory", tmp_path) as found:
        yield found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_training_open_streams_and_the_server(
    service: Service, number: signal.Signals
) -> None:
    service.post("/start")
    with service.stream() as statuses, service.stream() as others:
        seen = [next(statuses) for _ in range(4)]
        next(others)
        service.process.send_signal(number)
        seen += statuses
        last_of_others = list(others)[-1]
    service.check_ended_by(number)
    steps = [each["step"] for each in seen]
    assert steps == sorted(steps)
    assert seen[1]["metrics"]["loss"] > 0
    assert seen[-1] == last_of_others
    assert seen[-1]["phase"] == "closed"
    assert seen[-1]["stop_reason"] == f"PreemptionHook: the server got {number.name}"
    assert service.saved_step() == steps[-1] >= steps[0]


def test_a_signal_without_a_training_ends_the_server_and_its_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(tmp_path) as service:
        assert len(list(tmp_path.iterdir())) == 1
        assert service.last_status()["phase"] == "new"
        service.process.send_signal(signal.SIGTERM)
        service.check_ended_by(signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_training_is_started_stopped_gone_on_with_and_cancelled(service: Service) -> None:
    assert "EventSource" in httpx.get(service.url).text
    assert service.get("/status")["phase"] == "new"
    directory = CheckpointDirectory(service.directory)
    directory.open()  # a training that cannot start leaves the server up
    assert httpx.post(f"{service.url}/start", timeout=30).status_code == 500
    assert service.get("/status")["error"].startswith("CheckpointInUseError")
    directory.close()

    assert service.post("/start")["phase"] == "open"
    assert httpx.post(f"{service.url}/start").status_code == 409
    service.until_step(20)
    assert service.post("/stop")["should_stop"]
    stopped = service.last_status()
    assert (stopped["phase"], stopped["error"]) == ("closed", None)
    assert stopped["stop_reason"] == "session.request_stop: POST /stop"
    assert service.saved_step() == stopped["step"]
    assert [row["step"] for row in service.get("/history")][:3] == [1, 10, 20]

    assert service.post("/start")["step"] >= stopped["step"]
    service.until_step(stopped["step"] + 20)
    service.post("/cancel")
    cancelled = service.last_status()
    assert cancelled["phase"] == "closed"
    assert service.saved_step() == stopped["step"], "a cancelled training saves nothing"
    steps = [row["step"] for row in service.get("/history")]
    assert steps == sorted(set(steps))
    assert steps[-1] > stopped["step"]
    assert service.post("/start")["step"] < cancelled["step"]


def test_a_loss_that_is_not_finite_is_none_in_json(tmp_path: Path) -> None:
    trainer = load("fastapi_service").Trainer(str(tmp_path))
    rows = [{"step": 1.0, "loss": loss} for loss in (float("nan"), float("inf"), 0.5)]
    trainer.history = SimpleNamespace(rows=rows)
    assert [row["loss"] for row in trainer.rows()] == [None, None, 0.5]
