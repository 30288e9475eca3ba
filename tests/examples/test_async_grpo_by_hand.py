"""The learner by hand: it keeps the promises that its header names, as its lines are published."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.examples import EXAMPLES, ended, found, load, number, start_example

pytestmark = pytest.mark.faults

torch = pytest.importorskip("torch")

NAME = "async_grpo_by_hand"
LEARNT = r"^held-out accuracy ([\d.]+) on 500 prompts$"
BEGUN = r"^training begins at step (\d+)$"

AUDITED = """
import asyncio, argparse, sys
directory, last_step = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, {folder!r})
import async_grpo_by_hand as by_hand

by_hand.SAVE_STEPS = 7

class Audited(by_hand.Learner):
    async def run_step(self, batch):
        with open(directory + ".log", "a") as log:  # one write a line: a kill does not tear it
            log.write(f"{{self.step}}: {{[rollout.place for rollout in batch]}}\\n")
        await super().run_step(batch)

by_hand.Learner = Audited
arguments = argparse.Namespace(directory=directory, calls=1e9, last_step=last_step)
asyncio.run(by_hand.main(arguments))
"""


@pytest.fixture
def by_hand() -> Iterator[ModuleType]:
    num_threads = torch.get_num_threads()
    try:
        yield load(NAME)
    finally:
        del sys.modules[NAME]
        torch.set_num_threads(num_threads)


def run(*args: object) -> str:
    return ended(start_example(f"{NAME}.py", *args))


def newest_step(directory: Path) -> int:
    return max((int(path.stem) for path in directory.glob("*.ckpt")), default=-1)


def started_until(logged: str, directory: Path) -> subprocess.Popen[str]:
    """A process that trains, and has logged a line that begins so."""
    process = start_example(f"{NAME}.py", directory)
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while not lines[-1].startswith(logged):
        assert lines[-1], (lines, process.communicate())
        lines.append(process.stderr.readline())
    return process


def test_it_learns_from_rewards_with_no_group_older_than_two_steps(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert number(BEGUN, printed) == 0
    assert number(LEARNT, printed) >= 0.95
    assert set(re.findall(r"of age (\d+)", printed)) == {"0", "1", "2"}
    again = run(tmp_path)
    assert number(BEGUN, again) == 400
    assert number(LEARNT, again) >= 0.95


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_saves_the_step_and_leaves(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = started_until("step 100: accuracy", tmp_path)  # steps have gone on meanwhile
    process.send_signal(sent)
    process.send_signal(sent)  # one that comes with it is the same
    assert "held-out" not in ended(process, code)
    step = newest_step(tmp_path)
    assert step > 50
    assert step % 50
    assert number(BEGUN, run(tmp_path, "--last-step", step + 1)) == step


def test_a_failing_environment_ends_training_by_its_error_and_it_goes_on_later(
    tmp_path: Path,
) -> None:
    process = start_example(f"{NAME}.py", tmp_path, "--crash", stderr=subprocess.STDOUT)
    printed = ended(process, code=1)
    found(r"^ConnectionError: the environment is gone\nin the rollout at place \d+: ", printed)
    assert "Group" not in printed.rpartition("Traceback")[0]  # no exception group
    assert number(BEGUN, run(tmp_path, "--last-step", 60)) == 50


def state_of(by_hand: ModuleType, directory: Path) -> Any:
    checkpoints = by_hand.Checkpoints(str(directory))
    try:
        return checkpoints.newest_intact()
    finally:
        checkpoints.close()


def check_each_once(state: Any, places_of_step: dict[int, list[int]], last_step: int) -> None:
    """Each prompt up to the last step was trained on, or refused, once."""
    assert sorted(places_of_step) == list(range(last_step))
    trained = Counter(place for places in places_of_step.values() for place in places)
    finished = {*range(state["prompts"]["frontier"]), *state["prompts"]["beyond"]}
    assert set(trained.values()) == {1}
    assert len(trained) == 8 * last_step
    assert set(trained) <= finished
    assert len(finished) - len(trained) == state["num_refused"]


def test_each_prompt_is_used_or_refused_once_after_kills(
    tmp_path: Path, by_hand: ModuleType
) -> None:
    rng, last_step, directory = random.Random(5), 60, tmp_path / "run"
    program = AUDITED.format(folder=str(EXAMPLES))
    command = [sys.executable, "-c", program, str(directory), str(last_step)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"training begins at step")
            time.sleep(rng.uniform(0.2, 1.5))
            process.kill()
    subprocess.run(command, check=True, capture_output=True)
    places_of_step = {}
    for line in (tmp_path / "run.log").read_text().splitlines():
        step, places = line.split(": ", 1)  # a later life repeats what was not saved
        places_of_step[int(step)] = [int(place) for place in re.findall(r"\d+", places)]
    check_each_once(state_of(by_hand, directory), places_of_step, last_step)


def test_an_epoch_has_each_prompt_once_in_an_order_of_its_own(by_hand: ModuleType) -> None:
    prompts = by_hand.Prompts()
    for _ in range(2):
        epoch = [prompts.take()[1] for _ in by_hand.TRAINING]
        assert sorted(epoch) == sorted(by_hand.TRAINING)
        assert epoch != by_hand.TRAINING


def test_two_processes_do_not_train_in_one_directory(tmp_path: Path, by_hand: ModuleType) -> None:
    first = by_hand.Checkpoints(str(tmp_path))
    with pytest.raises(RuntimeError, match=f"another process trains in {tmp_path}"):
        by_hand.Checkpoints(str(tmp_path))
    first.close()
    by_hand.Checkpoints(str(tmp_path)).close()


def test_a_damaged_checkpoint_is_passed_over_and_five_are_kept(
    tmp_path: Path, by_hand: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = by_hand.Checkpoints(str(tmp_path))
    assert checkpoints.newest_intact() is None
    for step in range(0, 80, 10):
        checkpoints.write(step, {"step": step})
    (tmp_path / "80.tmp").write_bytes(b"unfinished")
    checkpoints.close()
    content = bytearray((tmp_path / "70.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "70.ckpt").write_bytes(content)
    checkpoints = by_hand.Checkpoints(str(tmp_path))
    assert checkpoints.newest_intact() == {"step": 60}
    assert "The checkpoint of step 70 is damaged" in caplog.text
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["30.ckpt", "40.ckpt", "50.ckpt", "60.ckpt", "70.ckpt", "lock"]
    for step in range(30, 80, 10):
        (tmp_path / f"{step}.ckpt").write_bytes(b"")
    with pytest.raises(RuntimeError, match="none of the checkpoints .* is intact"):
        checkpoints.newest_intact()
    checkpoints.close()


class Pretended:
    """A model with nothing to learn: groups that take their time, and are refused at times."""

    def __init__(self, by_hand: ModuleType, rng: random.Random) -> None:
        self.by_hand, self.rng = by_hand, rng
        self.policy = torch.nn.Linear(1, 1)
        self.adam = torch.optim.Adam(self.policy.parameters())

    async def answer(self, prompt: tuple[int, ...]) -> Any:
        await asyncio.sleep(0.0005 * self.rng.lognormvariate(0, 1.5))
        rewards = torch.tensor([0.0, float(self.rng.random() < 0.8)])
        return self.by_hand.Group(None, None, rewards)

    def learn(self, prompts: Any, groups: Any) -> float:
        assert len(prompts) == len(groups) == self.by_hand.GROUPS
        return 0.0

    async def evaluate(self) -> float:
        await asyncio.sleep(0.01)
        return 0.5


@pytest.mark.parametrize(("concurrency", "seed"), [(16, 0), (40, 1), (40, 2)])
def test_no_group_is_older_than_two_steps_and_none_is_lost_in_lives_that_are_cut_off(
    concurrency: int,
    seed: int,
    tmp_path: Path,
    by_hand: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "SAVE_STEPS": 7,
        "EVALUATION_STEPS": 10,
        "CONCURRENCY": concurrency,
    }.items():
        monkeypatch.setattr(by_hand, name, value)
    rng, last_step = random.Random(seed), 150
    places_of_step: dict[int, list[int]] = {}

    class Audited(by_hand.Learner):  # type: ignore[misc,name-defined]
        async def run_step(self, batch: Any) -> None:
            places_of_step[self.step] = [rollout.place for rollout in batch]
            await super().run_step(batch)
            assert max(self.ages) <= 2

    async def life(secs: float) -> Any:
        checkpoints = by_hand.Checkpoints(str(tmp_path))
        learner = Audited(Pretended(by_hand, rng), checkpoints, last_step)
        learner.restore()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await learner.train()
        finally:
            checkpoints.close()
        assert not learner.under_way.keys() & asyncio.all_tasks()
        return learner.step

    for num_lives in itertools.count():
        assert num_lives <= 100, "it stands still"
        if asyncio.run(life(rng.uniform(0.05, 0.6))) == last_step:
            break
    state = state_of(by_hand, tmp_path)
    assert state["step"] == last_step
    assert state["num_refused"] > 0
    check_each_once(state, places_of_step, last_step)


@pytest.mark.parametrize("failing", ["evaluate", "write", "answer"])
def test_an_error_beside_the_steps_ends_training(
    failing: str,
    tmp_path: Path,
    by_hand: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, checkpoints = Pretended(by_hand, random.Random(1)), by_hand.Checkpoints(str(tmp_path))
    learner = by_hand.Learner(model, checkpoints, last_step=10**6)

    async def fail(*_: object) -> None:
        raise OSError(f"of {failing}")

    def fail_to_write(step: int, state: Any) -> None:
        raise OSError("of write")

    if failing == "write":
        monkeypatch.setattr(checkpoints, "write", fail_to_write)
    else:
        monkeypatch.setattr(model, failing, fail)
    with pytest.raises(OSError, match=f"of {failing}"):
        asyncio.run(learner.train())
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert caplog.text.count("Another error") == (15 if failing == "answer" else 0)
    assert learner.step - (100 if failing == "evaluate" else 0) in (0, 1)
    checkpoints.close()
