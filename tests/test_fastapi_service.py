"""The example of a FastAPI service, as a process: events, a stop, and an end by a signal."""

import json
import signal
import socket
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

Statuses = Iterator[dict[str, Any]]


class Service:
    """The example's process, which serves and trains into a directory, or a temporary one."""

    def __init__(self, *options: object) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = start_example("fastapi_service.py", "--port", port, *options)
        assert self.process.stderr is not None
        assert any("Uvicorn running" in line for line in self.process.stderr), "it has ended"

    def call(self, method: str, path: str, code: int = 200) -> Any:
        answer = httpx.request(method, self.url + path, timeout=30)
        assert answer.status_code == code
        return answer.json() if code == 200 else None

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

    def check_ended_by(self, number: signal.Signals) -> None:
        _, log = self.process.communicate()
        assert self.process.returncode == 128 + number, log
        assert "Traceback" not in log.rpartition("CheckpointInUseError")[2]


@contextmanager
def serving(*options: object) -> Iterator[Service]:
    service = Service(*options)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.communicate()


@pytest.mark.faults
def test_a_signal_without_a_training_ends_the_server_and_its_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as service:
        assert len(list(tmp_path.iterdir())) == 1
        assert service.last_status()["phase"] == "new"
        service.process.send_signal(signal.SIGINT)
        service.check_ended_by(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_a_training_is_started_stopped_gone_on_with_cancelled_and_ended_by_a_signal(
    tmp_path: Path,
) -> None:
    def saved_step() -> int:
        newest = CheckpointDirectory(tmp_path).newest_intact()
        assert newest is not None
        return newest.step

    with serving("--directory", tmp_path) as service:
        assert "EventSource" in httpx.get(service.url).text
        assert service.call("GET", "/status")["phase"] == "new"
        directory = CheckpointDirectory(tmp_path)
        directory.open()  # a training that cannot start leaves the server up
        service.call("POST", "/start", 500)
        assert service.call("GET", "/status")["error"].startswith("CheckpointInUseError")
        directory.close()

        assert service.call("POST", "/start")["phase"] == "open"
        service.call("POST", "/start", 409)
        service.until_step(20)
        assert service.call("POST", "/stop")["should_stop"]
        stopped = service.last_status()
        assert (stopped["phase"], stopped["error"]) == ("closed", None)
        assert stopped["stop_reason"] == "session.request_stop: POST /stop"
        assert saved_step() == stopped["step"]
        assert [row["step"] for row in service.call("GET", "/history")][:3] == [1, 10, 20]

        assert service.call("POST", "/start")["step"] >= stopped["step"]
        service.until_step(stopped["step"] + 20)
        service.call("POST", "/cancel")
        cancelled = service.last_status()
        assert cancelled["phase"] == "closed"
        assert saved_step() == stopped["step"], "a cancelled training saves nothing"
        steps = [row["step"] for row in service.call("GET", "/history")]
        assert steps == sorted(set(steps))
        assert steps[-1] > stopped["step"]

        assert service.call("POST", "/start")["step"] < cancelled["step"]
        with service.stream() as statuses, service.stream() as others:
            seen = [next(statuses) for _ in range(4)]
            next(others)
            service.process.send_signal(signal.SIGTERM)
            seen += statuses
            assert list(others)[-1] == seen[-1]
        service.check_ended_by(signal.SIGTERM)
    steps = [each["step"] for each in seen]
    assert steps == sorted(steps)
    assert seen[1]["metrics"]["loss"] > 0
    assert seen[-1]["phase"] == "closed"
    assert seen[-1]["stop_reason"] == "PreemptionHook: the server got SIGTERM"
    assert saved_step() == steps[-1]


def test_a_loss_that_is_not_finite_is_none_in_json(tmp_path: Path) -> None:
    trainer = load("fastapi_service").Trainer(str(tmp_path))
    rows = [{"step": 1.0, "loss": loss} for loss in (float("nan"), float("inf"), 0.5)]
    trainer.history = SimpleNamespace(rows=rows)
    assert [row["loss"] for row in trainer.rows()] == [None, None, 0.5]
