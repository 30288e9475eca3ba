"""The sinks of trackers beside the trackers' own libraries, in processes of their own, offline."""

import json
import math
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .readers import steps_shown

ROOT = Path(__file__).parent.parent.parent
OFFLINE: dict[str, dict[str, Any]] = {
    "wandb": {"project": "p", "mode": "offline"},
    "mlflow": {"experiment_name": "e", "tracking_uri": "sqlite:///mlflow.db"},
}
BACKENDS = {"wandb": "asyncio", "mlflow": "trio"}
"""Of the sessions: what differs between them is before the sink's thread."""
NEEDS = {"wandb": "wandb", "mlflow": "alembic"}  # for a database of its own

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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


def run_program(home: Path, tracker: str, *several: dict[str, Any]) -> tuple[int, str, Any]:
    """Train in a process of its own; returns its exit status, its log, and its results."""
    command = ["tests.metrics.tracked", BACKENDS[tracker], tracker, json.dumps(several)]
    # into files: W&B's process has a pipe open for longer
    with (home / "out").open("w") as out, (home / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=home,
            env=environment(home),
            stdout=out,
            stderr=log,
            timeout=120,
            check=False,
        )
    lines = (home / "out").read_text().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("[{")]
    return done.returncode, (home / "log").read_text(), results[0] if results else None


def runs_of(home: Path, tracker: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.metrics.read_back", tracker],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return runs


def steps_of(run: dict[str, Any], name: str = "loss") -> list[int]:
    for step, each, value in run["points"]:
        assert each != name or value == pytest.approx(1 / step)
    return [step for step, each, _ in run["points"] if each == name]


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
def test_each_point_is_once_in_its_run_over_kills_errors_sessions_side_by_side_and_rewinds(
    tracker: str, tmp_path: Path
) -> None:
    options, name = OFFLINE[tracker], {"mlflow": "run_name"}.get(tracker, "name")
    arguments = {"options": options, "last_step": 40, "save": True}
    killed = {**arguments, "flush_at": 15, "kill_at": 26}
    status, log, _ = run_program(tmp_path, tracker, killed)
    assert status == -signal.SIGKILL, log
    fails = {"options": {**options, name: "b"}, "last_step": 50, "flush_at": 10, "fail_at": 30}
    status, log, results = run_program(tmp_path, tracker, {**arguments, "flush_at": 36}, fails)
    assert status == 0, log
    assert [(each["step"], each["dropped"]) for each in results] == [(40, 0), (30, 0)]
    assert not results[0]["has_tensorflow"]
    assert steps_shown(tmp_path / "logs") == list(range(1, 41))

    # a run that is given stays open, in whichever order points come and are taken back
    script = WRITES.format(given=GIVEN[tracker])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        timeout=120,
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "WANDB_SILENT": "false"},
    )
    assert done.returncode == 0, done.stderr
    assert "less than the current step" not in done.stderr  # W&B's warning of steps that go back

    runs = {steps_of(run)[-1]: run for run in runs_of(tmp_path, tracker)}
    if tracker == "wandb":  # a second file of the run, of which its server takes what is new
        before, first = runs.pop(26), 16
        assert before["run"] == runs[40]["run"]
        assert steps_of(before) == list(range(1, 27))
    else:
        first = 1
    assert {last: steps_of(run) for last, run in runs.items()} == {
        last: list(range(begin, last + 1)) for last, begin in ((5, 1), (30, 1), (40, first))
    }
    assert {each["status"] for each in runs.values()} == {"FINISHED"}
    found = {name: (step, value) for step, name, value in runs[5]["points"] if name != "loss"}
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


SERVERS: dict[str, dict[str, Any]] = {
    "wandb": {"settings": {"base_url": "URL"}},
    "mlflow": {"tracking_uri": "URL"},
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_training_and_the_process_end_while_the_server_answers_nothing(
    tracker: str, tmp_path: Path
) -> None:
    arguments = {"last_step": 2_000, "grace_secs": 1, "options": SERVERS[tracker]}
    status, log, [result] = run_program(tmp_path, tracker, {**arguments, "is_silent": True})
    assert status == 0, log
    assert (result["step"], result["dropped"]) == (2_000, 2_000)
    assert result["stuck"] != []
    assert result["close_secs"] < 10
    assert "did not take its last points in time" in log
