"""examples/async_grpo.py learns, survives kills and signals, and fails at once when it has to."""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from ..support.code_lines import num_code_lines
from ..support.examples import EXAMPLES, ROOT, ended, found, number, start_example

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
pytest.importorskip("torch")

LEARNT = r"^held-out accuracy ([\d.]+) on 500 prompts$"
BEGUN = r"^training begins at step (\d+)$"
SAVING = re.compile(r"^Saving checkpoints for (\d+)", re.MULTILINE)


def start(*args: object) -> subprocess.Popen[str]:
    """The example; its log comes with what it prints, in order."""
    return start_example("async_grpo.py", *args, stderr=subprocess.STDOUT)


def ages(printed: str) -> dict[int, int]:
    """How many groups were trained on at each staleness."""
    groups = found(r"^groups: (.*); \d+ refused", printed)[1]
    return {int(age): int(num) for num, age in re.findall(r"(\d+) of age (\d+)", groups)}


@pytest.mark.parametrize(("policy", "backend"), [("accept", "trio"), ("drop", "asyncio")])
def test_it_learns_from_rewards_alone(policy: str, backend: str, tmp_path: Path) -> None:
    printed = ended(start(tmp_path, "--when-stale", policy, "--backend", backend))
    assert number(LEARNT, printed) >= 0.95
    num_by_age = ages(printed)
    assert sum(num_by_age.values()) == 400 * 8
    assert (max(num_by_age) > 2) == (policy == "accept")
    lost = found(r"; (\d+) refused, (\d+) dropped, \d+ from the journal$", printed)
    assert int(lost[1]) > 0
    assert (int(lost[2]) > 0) == (policy == "drop")


@pytest.mark.parametrize(
    ("backend", "stop", "codes"),
    [
        # 1: Python forgets that it was a signal in what torch.optim does at exit
        ("asyncio", signal.SIGINT, {1, -signal.SIGINT}),
        ("trio", signal.SIGTERM, {128 + signal.SIGTERM}),
    ],
)
def test_it_learns_although_its_environment_breaks_and_it_is_stopped_and_killed(
    backend: str, stop: signal.Signals, codes: set[int], tmp_path: Path
) -> None:
    options = (tmp_path, "--backend", backend)
    printed = ended(start(*options, "--crash"), code=1)
    assert "\nConnectionError: the environment is gone\n" in printed
    found(r"^in rollouts, at item \d+: \(\d, \d, \d\)$", printed)
    assert "ExceptionGroup" not in printed
    assert number(BEGUN, printed) == 0

    begin = max(map(int, SAVING.findall(printed)))
    for sent, least in ((stop, begin + 50), (signal.SIGKILL, 250)):
        with start(*options) as process:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                saved = SAVING.match(line)
                if saved is not None and int(saved[1]) >= least:
                    process.send_signal(sent)
                    least = 10**6
        assert process.returncode in (codes if sent is stop else {-signal.SIGKILL}), printed
        assert number(BEGUN, printed) == begin
        assert "held-out accuracy" not in printed
        begin = int(SAVING.findall(printed)[-1])
    printed = ended(start(*options))
    assert number(BEGUN, printed) in (begin, begin - 50)  # it was killed as it began to save
    assert number(LEARNT, printed) >= 0.95
    assert max(ages(printed)) <= 2


def test_a_page_counts_the_lines_of_this_learner_and_of_the_one_by_hand() -> None:
    page = (ROOT / "docs/explanation/asynchronous-rl.md").read_text(encoding="utf-8")
    files = [EXAMPLES / name for name in ("async_grpo_by_hand.py", "async_grpo.py")]
    by_hand, ours = map(num_code_lines, files)
    assert f"{by_hand} lines of code in place of {ours}" in page
