"""examples/async_grpo.py learns, survives kills and signals, and fails at once when it has to."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..support.code_lines import num_code_lines
from ..support.examples import EXAMPLES, ROOT, ended, found, number, start_example

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
pytest.importorskip("torch")

LEARNT = r"^held-out accuracy ([\d.]+) on 500 prompts$"
BEGUN = r"^training begins at step (\d+)$"


def start(*args: object) -> subprocess.Popen[str]:
    """The example; its log comes with what it prints, in order."""
    return start_example("async_grpo.py", *args, stderr=subprocess.STDOUT)


def run_until(step: int, sent: signal.Signals, secs: float, *args: object) -> tuple[str, int]:
    """What it prints, and its exit code; the signal comes a while after the save of a step."""
    with start(*args) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            saved = re.match(r"Saving checkpoints for (\d+)", line)
            if saved is not None and int(saved[1]) >= step:
                break
        time.sleep(secs)  # somewhere in the next steps, or within the save
        process.send_signal(sent)
        printed += process.stdout
    return "".join(printed), process.returncode


def ages(printed: str) -> dict[int, int]:
    """How many groups were trained on at each staleness."""
    groups = found(r"^groups: (.*); \d+ refused", printed)[1]
    return {int(age): int(num) for num, age in re.findall(r"(\d+) of age (\d+)", groups)}


@pytest.mark.parametrize(
    ("policy", "backend"), [("wait", "asyncio"), ("accept", "trio"), ("drop", "asyncio")]
)
def test_it_learns_from_rewards_alone(policy: str, backend: str, tmp_path: Path) -> None:
    printed = ended(start(tmp_path, "--when-stale", policy, "--backend", backend))
    assert number(BEGUN, printed) == 0
    assert number(LEARNT, printed) >= 0.95
    num_by_age = ages(printed)
    assert sum(num_by_age.values()) == 400 * 8
    assert (max(num_by_age) > 2) == (policy == "accept")
    lost = found(r"; (\d+) refused, (\d+) dropped$", printed)
    assert int(lost[1]) > 0
    assert (int(lost[2]) > 0) == (policy == "drop")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_learns_although_it_is_killed_at_random_moments(backend: str, tmp_path: Path) -> None:
    options, rng, begin = (tmp_path, "--backend", backend), random.Random(backend), 0.0
    for saved_step in (50, 250):
        printed, code = run_until(saved_step, signal.SIGKILL, rng.uniform(0, 1.5), *options)
        assert code == -signal.SIGKILL
        assert number(BEGUN, printed) >= begin
        begin = number(BEGUN, printed)
    printed = ended(start(*options))
    assert 200 <= number(BEGUN, printed) < 400  # at the least the save before the last one
    assert number(LEARNT, printed) >= 0.95
    assert max(ages(printed)) <= 2


@pytest.mark.parametrize(
    ("sent", "codes"),
    [
        # 1: Python forgets that it was a signal in what torch.optim does at exit
        (signal.SIGINT, {1, -signal.SIGINT}),
        (signal.SIGTERM, {128 + signal.SIGTERM}),
    ],
)
def test_a_signal_saves_the_step_and_the_next_run_goes_on_from_it(
    sent: signal.Signals, codes: set[int], tmp_path: Path
) -> None:
    printed, code = run_until(50, sent, 0.3, tmp_path)
    assert code in codes, printed
    assert "held-out accuracy" not in printed
    last_saved = int(re.findall(r"^Saving checkpoints for (\d+)", printed, re.MULTILINE)[-1])
    assert last_saved > 50
    printed = ended(start(tmp_path, "--last-step", last_saved + 5))
    assert number(BEGUN, printed) == last_saved
    assert sum(ages(printed).values()) == 5 * 8


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_error_of_the_environment_leaves_as_itself(backend: str, tmp_path: Path) -> None:
    printed = ended(start(tmp_path, "--crash", "--backend", backend), code=1)
    assert "\nConnectionError: the environment is gone\n" in printed
    found(r"^in rollouts, at item \d+: \(\d, \d, \d\)$", printed)
    assert "ExceptionGroup" not in printed
    assert "held-out accuracy" not in printed


def test_a_page_counts_the_lines_of_this_learner_and_of_the_one_by_hand() -> None:
    page = (ROOT / "docs/explanation/asynchronous-rl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(async_\w+\.py)`\].*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    files = [EXAMPLES / name for name in ("async_grpo.py", "async_grpo_by_hand.py")]
    assert rows == [
        (each.name, str(len(each.read_text().splitlines())), str(num_code_lines(each)))
        for each in files
    ]


def test_code_lines_are_those_without_blank_ones_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        '"""A docstring\n\nof three lines."""\n'
        "import os  # counts\n\n# does not\n"
        "def f(\n    x,\n):\n"  # 3
        '    """Not."""\n'
        "    text = '''two\nlines'''\n"  # 2
        "    return text\n"
    )
    assert num_code_lines(file) == 7
