"""The learner by hand: it keeps the promises that its header names, as its lines are published."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.code_lines import num_code_lines

pytestmark = pytest.mark.faults

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo_by_hand.py"

AUDITED = """
import asyncio, argparse, importlib.util, sys
sys.path.insert(0, {folder!r})
import async_grpo_by_hand as by_hand

by_hand.SAVE_STEPS = 7

class Audited(by_hand.Learner):
    async def run_step(self, batch):
        with open({log!r}, "a") as log:  # one write a line: a kill does not tear it
            log.write(f"{{self.step}}: {{[rollout.place for rollout in batch]}}\\n")
        await super().run_step(batch)

by_hand.Learner = Audited
arguments = argparse.Namespace(directory={directory!r}, calls=1e9, last_step={last_step})
asyncio.run(by_hand.main(arguments))
"""


@pytest.fixture
def by_hand() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("async_grpo_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    num_threads = torch.get_num_threads()
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]
        torch.set_num_threads(num_threads)


def command(*args: object) -> list[str]:
    return [sys.executable, str(EXAMPLE), *map(str, args)]


def ended(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, check=False)


def is_learned(done: subprocess.CompletedProcess[str]) -> bool:
    accuracy = re.search(r"held-out accuracy ([\d.]+) on 500 prompts", done.stdout)
    assert accuracy is not None, done.stdout + done.stderr
    return float(accuracy[1]) >= 0.95


def first_step(printed: str) -> int:
    found = re.match(r"training begins at step (\d+)\n", printed)
    assert found is not None, printed
    return int(found[1])


def newest_step(directory: Path) -> int:
    return max((int(path.stem) for path in directory.glob("*.ckpt")), default=-1)


def started_until(logged: str, directory: Path) -> subprocess.Popen[str]:
    """A process that trains, and has logged a line that begins so."""
    process = subprocess.Popen(
        command(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while not lines[-1].startswith(logged):
        assert lines[-1], (lines, process.communicate())
        lines.append(process.stderr.readline())
    return process


def test_it_learns_from_rewards_with_no_group_older_than_two_steps(tmp_path: Path) -> None:
    done = ended(tmp_path)
    assert done.returncode == 0, done.stderr
    assert first_step(done.stdout) == 0
    assert is_learned(done)
    assert set(re.findall(r"of age (\d+)", done.stdout)) == {"0", "1", "2"}
    assert re.search(r"step 300: accuracy = [\d.]+", done.stderr)
    again = ended(tmp_path)
    assert first_step(again.stdout) == 400
    assert is_learned(again)


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    process = started_until("step 200: reward", tmp_path)  # a save waits for the one before it
    process.kill()
    process.communicate()
    step = newest_step(tmp_path)
    done = ended(tmp_path)
    assert first_step(done.stdout) == step
    assert 100 <= step < 400
    assert is_learned(done)


def test_each_prompt_is_used_or_refused_once_in_an_epoch_after_four_kills(
    tmp_path: Path, by_hand: ModuleType
) -> None:
    log, rng, last_step = tmp_path / "log", random.Random(5), 100
    program = AUDITED.format(
        folder=str(EXAMPLE.parent), log=str(log), directory=str(tmp_path / "run"),
        last_step=last_step,
    )  # fmt: skip
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        begun = process.stdout.readline()
        assert begun.startswith(b"training begins at step"), begun
        time.sleep(rng.uniform(0.2, 2.0))
        process.kill()
        process.communicate()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

    places_of_step: dict[int, list[int]] = {}
    for line in log.read_text().splitlines():  # a later life repeats what was not saved
        step, places = line.split(": ", 1)
        places_of_step[int(step)] = [int(place) for place in re.findall(r"\d+", places)]
    assert sorted(places_of_step) == list(range(last_step))
    trained = Counter(place for places in places_of_step.values() for place in places)
    assert set(trained.values()) == {1}
    state = state_of(by_hand, tmp_path / "run")
    frontier, beyond = state["prompts"]["frontier"], state["prompts"]["beyond"]
    refused = {*range(frontier), *beyond} - set(trained)
    assert set(trained) <= {*range(frontier), *beyond}
    assert len(refused) == state["num_refused"]
    prompts = by_hand.Prompts()
    for _ in range(2):
        epoch = [prompts.take()[1] for _ in by_hand.TRAINING]
        assert sorted(epoch) == sorted(by_hand.TRAINING)
        assert epoch != by_hand.TRAINING


def state_of(by_hand: ModuleType, directory: Path) -> Any:
    checkpoints = by_hand.Checkpoints(str(directory))
    try:
        return checkpoints.newest_intact()
    finally:
        checkpoints.close()


def test_a_failing_environment_ends_training_by_its_error_and_it_goes_on_later(
    tmp_path: Path,
) -> None:
    before = time.monotonic()
    done = ended(tmp_path, "--crash")
    assert time.monotonic() - before < 30
    assert done.returncode == 1
    assert re.search(
        r"\nConnectionError: the environment is gone\nin the rollout at place \d+: \(.*\)\n$",
        done.stderr,
    )
    assert "Group" not in done.stderr.rpartition("Traceback")[0]  # no exception group
    again = ended(tmp_path, "--last-step", 60)
    assert first_step(again.stdout) == 50
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_saves_the_step_and_leaves(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = started_until("step 100: accuracy", tmp_path)  # steps have gone on meanwhile
    process.send_signal(number)
    process.send_signal(number)  # one that comes with it is the same
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert "held-out" not in printed
    step = newest_step(tmp_path)
    assert step > 50
    assert step % 50
    done = ended(tmp_path, "--last-step", step + 1)
    assert first_step(done.stdout) == step


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("concurrency", [16, 40])
def test_no_group_is_older_than_two_steps_and_none_is_lost_in_lives_that_are_cut_off(
    concurrency: int,
    seed: int,
    tmp_path: Path,
    by_hand: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_hand, "SAVE_STEPS", 7)
    monkeypatch.setattr(by_hand, "EVALUATION_STEPS", 10)
    monkeypatch.setattr(by_hand, "CONCURRENCY", concurrency)
    rng, last_step = random.Random(seed), 300
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
            async with asyncio.timeout(secs):
                await learner.train()
        except TimeoutError:
            pass
        finally:
            checkpoints.close()
        assert not learner.under_way.keys() & asyncio.all_tasks()
        return learner

    num_lives, learner = 0, None
    while learner is None or learner.step < last_step:
        num_lives += 1
        assert num_lives <= 100, "it stands still"
        learner = asyncio.run(life(rng.uniform(0.05, 0.6)))
    state = state_of(by_hand, tmp_path)
    assert state["step"] == last_step
    trained = Counter(place for places in places_of_step.values() for place in places)
    finished = {*range(state["prompts"]["frontier"]), *state["prompts"]["beyond"]}
    assert set(trained.values()) == {1}
    assert len(trained) == 8 * last_step
    assert set(trained) <= finished
    assert len(finished) - len(trained) == state["num_refused"] > 0


def test_a_batch_waits_for_older_groups_that_later_batches_would_have_no_room_for(
    tmp_path: Path, by_hand: ModuleType
) -> None:
    checkpoints = by_hand.Checkpoints(str(tmp_path))

    def learner_with(num_old_under_way: int, num_old_ready: int, num_new_ready: int) -> Any:
        learner = by_hand.Learner(None, checkpoints, last_step=9)
        learner.step, places = 1, itertools.count()
        old = [by_hand.Rollout(next(places), (), 0) for _ in range(num_old_under_way)]
        learner.under_way = dict(enumerate(old))
        learner.ready = [by_hand.Rollout(next(places), (), 1) for _ in range(num_new_ready)]
        learner.ready += [by_hand.Rollout(next(places), (), 0) for _ in range(num_old_ready)]
        return learner

    # two batches may still use version 0, this one and the next
    assert len(learner_with(8, 0, 8).take_batch()) == 8
    assert learner_with(9, 0, 8).take_batch() == []
    assert learner_with(9, 0, 12).take_batch() == []
    batch = learner_with(8, 1, 12).take_batch()
    assert [rollout.version for rollout in batch] == [0] + [1] * 7
    assert learner_with(0, 7, 0).take_batch() == []
    checkpoints.close()


@pytest.mark.parametrize("failing", ["evaluation", "write", "rollouts"])
def test_an_error_beside_the_steps_ends_training(
    failing: str,
    tmp_path: Path,
    by_hand: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, checkpoints = Pretended(by_hand, random.Random(1)), by_hand.Checkpoints(str(tmp_path))
    learner = by_hand.Learner(model, checkpoints, last_step=10**6)

    async def evaluate() -> float:
        raise OSError("of the evaluation")

    def write(step: int, state: Any) -> None:
        raise OSError("of the write")

    async def answer(prompt: tuple[int, ...]) -> None:
        raise OSError("of the rollouts")

    if failing == "evaluation":
        monkeypatch.setattr(model, "evaluate", evaluate)
    elif failing == "write":
        monkeypatch.setattr(checkpoints, "write", write)
    else:
        monkeypatch.setattr(model, "answer", answer)
    with pytest.raises(OSError, match=f"of the {failing}"):
        asyncio.run(learner.train())
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert caplog.text.count("Another error") == (15 if failing == "rollouts" else 0)
    assert learner.step - (100 if failing == "evaluation" else 0) in (0, 1)
    checkpoints.close()


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
    assert 250 < num_code_lines(EXAMPLE) < 400
