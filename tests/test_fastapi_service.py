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
from contextlib import contextmanager
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


@contextmanager
def stream(service: Service) -> Iterator[Iterator[dict[str, Any]]]:
    """The statuses that a browser would be given."""
    with httpx.stream("GET", f"{service.url}/events", timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (
            json.loads(line.removeprefix("data: "), parse_constant=pytest.fail)
            for line in response.iter_lines()
            if line.startswith("data: ")
        )


def get(service: Service, path: str) -> Any:
    return httpx.get(service.url + path).raise_for_status().json()


def post(service: Service, path: str) -> Any:
    return httpx.post(service.url + path, timeout=30).raise_for_status().json()


def ended(service: Service) -> dict[str, Any]:
    """The last status of the training."""
    with stream(service) as statuses:
        return list(statuses)[-1]


def saved_step(service: Service) -> int:
    newest = CheckpointDirectory(service.directory).newest_intact()
    assert newest is not None
    return newest.step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_training_open_streams_and_the_server(
    service: Service, number: signal.Signals
) -> None:
    post(service, "/start")
    with stream(service) as statuses, stream(service) as others:
        seen = [next(statuses) for _ in range(4)]
        next(others)
        began = time.monotonic()
        service.process.send_signal(number)
        seen += statuses
        last_of_others = list(others)[-1]
    log = service.log()

    assert time.monotonic() - began < END_SECS
    assert service.process.returncode == 128 + number, log
    assert "Traceback" not in log
    steps = [each["step"] for each in seen]
    assert steps == sorted(steps)
    assert seen[1]["metrics"]["loss"] > 0
    last = seen[-1]
    assert last == last_of_others
    assert last["phase"] == "closed"
    assert last["stop_reason"] == f"PreemptionHook: the server got {number.name}"
    assert saved_step(service) == last["step"] >= steps[0]


def test_a_signal_without_a_training_ends_the_server_and_its_temporary_directory(
    tmp_path: Path,
) -> None:
    service = Service(tmp_path / "unused", is_temporary=True)
    try:
        service.wait_until_up()
        assert len(list(tmp_path.iterdir())) == 1
        assert ended(service)["phase"] == "new"
        service.process.send_signal(signal.SIGTERM)
        log = service.log()
    finally:
        service.close()
    assert service.process.returncode == 128 + signal.SIGTERM, log
    assert "Traceback" not in log
    assert list(tmp_path.iterdir()) == []


def test_a_training_is_started_stopped_gone_on_with_and_cancelled(service: Service) -> None:
    assert "EventSource" in httpx.get(service.url).text
    assert get(service, "/status")["phase"] == "new"
    assert post(service, "/start")["phase"] == "open"
    assert httpx.post(f"{service.url}/start").status_code == 409
    with stream(service) as statuses:
        while next(statuses)["step"] < 20:
            pass

    assert post(service, "/stop")["should_stop"]
    stopped = ended(service)
    assert stopped["phase"] == "closed"
    assert stopped["stop_reason"] == "session.request_stop: POST /stop"
    assert stopped["error"] is None
    assert saved_step(service) == stopped["step"]
    assert [row["step"] for row in get(service, "/history")][:3] == [1, 10, 20]

    assert post(service, "/start")["step"] >= stopped["step"]
    with stream(service) as statuses:
        while next(statuses)["step"] < stopped["step"] + 20:
            pass
    post(service, "/cancel")
    cancelled = ended(service)
    assert cancelled["phase"] == "closed"
    assert saved_step(service) == stopped["step"], "a cancelled training saves nothing"
    steps = [row["step"] for row in get(service, "/history")]
    assert steps == sorted(set(steps))
    assert steps[-1] > stopped["step"]

    assert post(service, "/start")["step"] < cancelled["step"]


def test_a_training_that_cannot_start_leaves_the_server_up(service: Service) -> None:
    directory = CheckpointDirectory(service.directory)
    directory.open()
    try:
        assert httpx.post(f"{service.url}/start", timeout=30).status_code == 500
        assert get(service, "/status")["error"].startswith("CheckpointInUseError")
    finally:
        directory.close()
    assert post(service, "/start")["phase"] == "open"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_none_in_json(
    loss: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("fastapi_service")

    async def step(model: Any) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": loss}

    async def main() -> tuple[list[str], Any]:
        trainer = example.Trainer(str(tmp_path))
        async with anyio.create_task_group() as group:
            assert await trainer.start(group)
            await trainer.session.global_step.wait_for(10)
            trainer.session.request_stop("seen")
            events = [each async for each in trainer.events()]
        return events, trainer.rows()

    monkeypatch.setattr(example.Model, "step", step)
    events, rows = anyio.run(main)
    last = json.loads(events[-1].removeprefix("data: "), parse_constant=pytest.fail)
    assert last["metrics"]["loss"] is None
    assert {row["loss"] for row in rows} == {None}
