"""examples/async_grpo.py learns, survives kills and signals, and fails at once when it has to."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

ROOT = Path(__file__).parent.parent.parent
LEAST_ACCURACY = 0.95


def start(*args: str) -> subprocess.Popen[str]:
    """The example; its log comes with what it prints, in order."""
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "examples/async_grpo.py"), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*args: str) -> str:
    process = start(*args)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


def run_until(step: int, number: signal.Signals, delay_secs: float, *args: str) -> tuple[str, int]:
    """What it prints, and its exit code; the signal comes after the save of a step."""
    process = start(*args)
    assert process.stdout is not None
    with process:
        printed = []
        for line in process.stdout:
            printed.append(line)
            saved = re.match(r"Saving checkpoints for (\d+)", line)
            if saved is not None and int(saved[1]) >= step:
                break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_secs)  # somewhere in the next steps, or within the save
        process.send_signal(number)
        printed += process.stdout
    return "".join(printed), process.returncode


def accuracy(printed: str) -> float:
    found = re.search(r"^held-out accuracy ([\d.]+) on 500 prompts$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


def ages(printed: str) -> dict[int, int]:
    """How many groups were trained on at each staleness."""
    found = re.search(r"^groups: (.*); \d+ refused", printed, re.MULTILINE)
    assert found is not None, printed
    return {int(age): int(num) for num, age in re.findall(r"(\d+) of age (\d+)", found[1])}


def first_step(printed: str) -> int:
    found = re.search(r"^training begins at step (\d+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return int(found[1])


@pytest.mark.parametrize(
    ("policy", "backend"),
    [("wait", "asyncio"), ("accept", "trio"), ("drop", "asyncio")],
)
def test_it_learns_from_rewards_alone(policy: str, backend: str, tmp_path: Path) -> None:
    printed = run(str(tmp_path), "--when-stale", policy, "--backend", backend)
    assert first_step(printed) == 0
    assert accuracy(printed) >= LEAST_ACCURACY
    num_by_age = ages(printed)
    assert sum(num_by_age.values()) == 400 * 8
    assert (max(num_by_age) > 2) == (policy == "accept")
    lost = re.search(r"; (\d+) refused, (\d+) dropped$", printed, re.MULTILINE)
    assert lost is not None, printed
    assert int(lost[1]) > 0
    assert (int(lost[2]) > 0) == (policy == "drop")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_learns_although_it_is_killed_at_random_moments(backend: str, tmp_path: Path) -> None:
    options = (str(tmp_path), "--backend", backend)
    rng, begins = random.Random(backend), [0]
    for saved_step in (50, 150, 250):
        printed, code = run_until(saved_step, signal.SIGKILL, rng.uniform(0, 1.5), *options)
        assert code == -signal.SIGKILL
        assert first_step(printed) >= begins[-1]
        begins.append(first_step(printed))
    printed = run(*options)
    assert 200 <= first_step(printed) < 400  # at the least the save before the last one
    assert accuracy(printed) >= LEAST_ACCURACY
    assert max(ages(printed)) <= 2


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        # 1: Python forgets that it was a signal in what torch.optim does at exit
        (signal.SIGINT, {1, -signal.SIGINT}),
        (signal.SIGTERM, {128 + signal.SIGTERM}),
    ],
)
def test_a_signal_saves_the_step_and_the_next_run_goes_on_from_it(
    number: signal.Signals, codes: set[int], tmp_path: Path
) -> None:
    printed, code = run_until(50, number, 0.3, str(tmp_path))
    assert code in codes, printed
    assert "held-out accuracy" not in printed
    last_saved = int(re.findall(r"^Saving checkpoints for (\d+)", printed, re.MULTILINE)[-1])
    assert last_saved > 50
    printed = run(str(tmp_path), "--last-step", str(last_saved + 5))
    assert first_step(printed) == last_saved
    assert sum(ages(printed).values()) == 5 * 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_error_of_the_environment_leaves_as_itself(backend: str, tmp_path: Path) -> None:
    process = start(str(tmp_path), "--crash", "--backend", backend)
    printed, _ = process.communicate()
    assert process.returncode == 1
    assert "\nConnectionError: the environment is gone\n" in printed
    assert re.search(r"^in rollouts, at item \d+: \(\d, \d, \d\)$", printed, re.MULTILINE)
    assert "ExceptionGroup" not in printed
    assert "held-out accuracy" not in printed
