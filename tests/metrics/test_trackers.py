"""The sinks of trackers beside the trackers' own libraries, in processes of their own, offline."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
OFFLINE: dict[str, dict[str, Any]] = {
    "wandb": {"project": "p", "mode": "offline"},
    "mlflow": {"experiment_name": "e", "tracking_uri": "sqlite:///mlflow.db"},
}
BACKENDS = {"wandb": "asyncio", "mlflow": "trio"}
"""Of the sessions: what differs between them is before the sink's thread."""
NEEDS = {"wandb": "wandb", "mlflow": "alembic"}  # for a database of its own
SAVED, KILLED, LAST_STEP = 20, 26, 40
MANY_STEPS = 40_000
MOST_MIB = 16
"""What the peak of memory may grow by in 20,000 steps."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(100)]


def needs(tracker: str) -> pytest.MarkDecorator:
    is_missing = any(find_spec(each) is None for each in {tracker, NEEDS[tracker]})
    return pytest.mark.skipif(is_missing, reason=f"{tracker} is not installed")


TRACKERS = [pytest.param(tracker, marks=needs(tracker)) for tracker in OFFLINE]


def environment(home: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
        "HOME": str(home),
        "WANDB_SILENT": "true",
        "WANDB_API_KEY": "0" * 40,
        "PYTHONPATH": str(ROOT),
    }


class Program:
    """A process that trains in a directory of its own."""

    def __init__(self, home: Path, tracker: str, *several: dict[str, Any]) -> None:
        self._home = home
        command = ["tests.metrics.tracked", BACKENDS[tracker], tracker, json.dumps(several)]
        # into files: a stopped process of W&B holds a pipe open for ever
        with (home / "out").open("w") as out, (home / "err").open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=home, env=environment(home), stdout=out,
                stderr=err,
            )  # fmt: skip

    def wait(self, secs: float) -> int:
        """Wait for its end, which must come within so many seconds; returns its exit status."""
        try:
            return self._process.wait(secs)
        finally:
            self._process.kill()
            self._process.wait()
            kill_wandb(self._process.pid)

    @property
    def log(self) -> str:
        return (self._home / "err").read_text()

    @property
    def results(self) -> list[dict[str, Any]]:
        lines = (self._home / "out").read_text().splitlines()
        results: list[dict[str, Any]] = next(
            json.loads(line) for line in lines if line.startswith("[{")
        )
        return results


def kill_wandb(parent: int) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if "wandb-core" in words[0] and str(parent) in words:
            os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of MLflow, which takes seconds to make one."""
    home = tmp_path_factory.mktemp("mlflow")
    runs_of(home, "mlflow")
    return home / "mlflow.db"


@pytest.fixture
def home(tracker: str, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if tracker == "mlflow":
        shutil.copy(request.getfixturevalue("empty_database"), tmp_path)
    return tmp_path


def runs_of(home: Path, tracker: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.metrics.read_back", tracker],
        cwd=home, env=environment(home), capture_output=True, text=True, check=True,
    )  # fmt: skip
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return runs


def steps_of(run: dict[str, Any], name: str = "loss") -> list[int]:
    for step, each, value in run["points"]:
        assert each != name or value == pytest.approx(1 / step)
    return [step for step, each, _ in run["points"] if each == name]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_killed_training_goes_on_with_the_same_run_and_no_point_twice(
    tracker: str, home: Path
) -> None:
    arguments = {"options": OFFLINE[tracker], "last_step": LAST_STEP, "save": True}
    killed = {**arguments, "flush_at": [SAVED - 5, KILLED], "kill_at": KILLED}
    program = Program(home, tracker, killed)
    assert program.wait(60) == -signal.SIGKILL, program.log
    [run] = runs_of(home, tracker)
    assert steps_of(run) == list(range(1, KILLED + 1))
    assert run["status"] in ("RUNNING", "")

    program = Program(home, tracker, arguments)
    assert program.wait(60) == 0, program.log
    assert [each["step"] for each in program.results] == [LAST_STEP]
    assert [each["dropped"] for each in program.results] == [0]
    runs = runs_of(home, tracker)
    assert {each["run"] for each in runs} == {run["run"]}
    assert runs[-1]["status"] in ("FINISHED", "")
    if tracker == "wandb":  # a second file of the run, of which its server takes what is new
        [before, after] = runs
        assert steps_of(before) == list(range(1, KILLED + 1))
        assert steps_of(after) == list(range(SAVED - 4, LAST_STEP + 1))
    else:
        [whole] = runs
        assert steps_of(whole) == list(range(1, LAST_STEP + 1))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_two_sessions_of_a_process_have_a_run_each_and_finish_it_after_an_error_too(
    tracker: str, home: Path
) -> None:
    names = {"mlflow": "run_name"}
    several: list[dict[str, Any]] = [
        {"options": {**OFFLINE[tracker], names.get(tracker, "name"): name}, "flush_at": [10]}
        for name in ("a", "b")
    ]
    several[0] |= {"last_step": 20}
    several[1] |= {"last_step": 50, "fail_at": 30}
    program = Program(home, tracker, *several)
    assert program.wait(60) == 0, program.log
    assert [each["dropped"] for each in program.results] == [0, 0]
    runs = runs_of(home, tracker)
    assert sorted(map(steps_of, runs), key=len) == [list(range(1, 21)), list(range(1, 31))]
    assert {each["status"] for each in runs} <= {"FINISHED", ""}


GIVEN = {
    "wandb": """
import wandb
run = wandb.init(project="p", mode="offline", settings={"console": "off"})
sink, is_open, finish = WandbSink(run=run), lambda: not run._is_finished, run.finish
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
run = mlflow.start_run()
sink, finish = MlflowSink(run_id=run.info.run_id), mlflow.end_run
is_open = lambda: mlflow.get_run(run.info.run_id).info.status == "RUNNING"
""",
}
WRITES = """
import threading
from asynchooks.metrics import Histogram, MlflowSink, Point, Resume, WandbSink
{given}
def write():
    sink.open(Resume(0, None))
    spread = Histogram.of([0.0, 1.0, 1.0, 5.0])
    sink.write(Point(1, 1e9, {{"loss": 1.0, "spread/of weights:0": spread}}))
    sink.write(Point(2, 1e9, {{"loss": 0.5, "none": float("nan")}}))
    sink.flush()
    sink.write(Point(2, 1e9, {{"evaluation": 7.0, "loss": 9.0}}))
    sink.write(Point(3, 1e9, {{"loss": 1 / 3}}))
    sink.write(Point(4, 1e9, {{"loss": 0.25}}))
    sink.write(Point(1, 1e9, {{"late": 8.0}}))
    sink.flush()
    sink.rewind(4)
    sink.write(Point(1, 1e9, {{"later": 7.0}}))
    sink.flush()
    sink.rewind(1)
    for step in (2, 3, 4, 5):
        sink.write(Point(step, 1e9, {{"loss": 1 / step}}))
    sink.flush()
    sink.close()
writer = threading.Thread(target=write)
writer.start()
writer.join()
assert is_open()
finish()
"""


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_that_is_given_stays_open_and_has_each_value_once(tracker: str, home: Path) -> None:
    script = WRITES.format(given=GIVEN[tracker])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=home, timeout=60, capture_output=True, text=True,
        env={**environment(home), "WANDB_SILENT": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "less than the current step" not in done.stderr  # W&B's warning of steps that go back
    [run] = runs_of(home, tracker)
    assert steps_of(run) == [1, 2, 3, 4, 5]
    found = {name: (step, value) for step, name, value in run["points"] if name != "loss"}
    assert (found.pop("late"), found.pop("later")) == ((1, 8.0), (1, 7.0))
    others = {name: value for name, (_, value) in found.items()}
    assert others.pop("evaluation") == 7.0
    assert math.isnan(float(others.pop("none")))
    assert_histogram(tracker, others)


def assert_histogram(tracker: str, values: dict[str, Any]) -> None:
    """Of the numbers 0, 1, 1 and 5, in 30 bins."""
    name = "spread/of weights:0"
    if tracker == "mlflow":
        assert values == {f"{name}/min": 0.0, f"{name}/mean": 1.75, f"{name}/max": 5.0}
        return
    counts, edges = values.pop(f"{name}/values"), values.pop(f"{name}/bins")
    assert (sum(counts), max(counts), len(counts)) == (4, 2, 30)
    assert (edges[0], edges[-1], len(edges)) == (0.0, 5.0, 31)


def check_that_it_was_stuck(program: Program, exit_secs: float, log: str) -> None:
    """It trains to its end, drops what it cannot write, says so, and ends."""
    assert program.wait(30 + exit_secs) == 0, program.log
    [result] = program.results
    assert result["step"] == MANY_STEPS
    assert result["stuck"] != []
    assert result["dropped"] > MANY_STEPS // 2
    assert result["close_secs"] < 10
    assert log in program.log


STUCK: dict[str, Any] = {"last_step": MANY_STEPS, "grace_secs": 1}


@needs("wandb")
def test_training_and_the_process_end_while_the_process_of_wandb_is_stopped(
    tmp_path: Path,
) -> None:
    arguments = {**STUCK, "options": OFFLINE["wandb"], "flush_at": [10], "stop_at": 10}
    program = Program(tmp_path, "wandb", arguments)
    check_that_it_was_stuck(program, 5, "did not take its last points in time")
    assert program.results[0]["growth"] < MOST_MIB


@contextmanager
def silent_server() -> Iterator[tuple[str, threading.Event]]:
    """A server that accepts connections and answers nothing: its address, and when one came."""
    accepted, connections = threading.Event(), []

    def accept() -> None:
        while True:
            try:
                connections.append(server.accept()[0])
            except OSError:
                return
            accepted.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", accepted
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for each in connections:
        each.close()


SERVERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "wandb": lambda url: {"settings": {"base_url": url}},
    "mlflow": lambda url: {"tracking_uri": url},
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_training_and_the_process_end_while_the_server_answers_nothing(
    tracker: str, home: Path
) -> None:
    with silent_server() as (url, accepted):
        program = Program(home, tracker, {**STUCK, "options": SERVERS[tracker](url)})
        check_that_it_was_stuck(program, 5, "did not take its last points in time")
        assert accepted.is_set()
