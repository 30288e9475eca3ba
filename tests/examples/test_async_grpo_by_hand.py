"""The learner by hand: it keeps the promises that its header names, as its lines are published."""

import asyncio
import gc
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..support.examples import EXAMPLES, found, load, number, start_example

pytestmark = pytest.mark.faults

torch = pytest.importorskip("torch")

NAME = "async_grpo_by_hand"
MAIN = 'if __name__ == "__main__":'
AUDITED = f"""
SAVE_STEPS = 7

class Audited(Learner):
    async def run_step(self, batch):
        places, ages = [each.place for each in batch], [self.step - each.version for each in batch]
        print(f"trains {{self.step}}: {{places}} {{ages}}", flush=True)
        await super().run_step(batch)

Learner = Audited

{MAIN}"""


@pytest.fixture
def by_hand() -> Iterator[ModuleType]:
    num_threads = torch.get_num_threads()
    try:
        yield load(NAME)
    finally:
        del sys.modules[NAME]
        torch.set_num_threads(num_threads)


@pytest.mark.timeout(300)
def test_one_training_that_is_ended_in_every_way_learns_from_each_prompt_once(
    tmp_path: Path, by_hand: ModuleType
) -> None:
    """By an error of the environment, both signals, twice each, and a kill."""
    program, directory = tmp_path / "audited.py", tmp_path / "run"
    source = (EXAMPLES / f"{NAME}.py").read_text()
    program.write_text(source.replace(MAIN, AUDITED))
    begun, last, places = [], [], dict[int, list[int]]()
    for until, sent, code in (
        (None, None, 1), (100, signal.SIGTERM, 143), (180, signal.SIGINT, 130),
        (260, signal.SIGKILL, -signal.SIGKILL), (None, None, 0),
    ):  # fmt: skip
        options = ["--crash"] if code == 1 else []
        start = start_example(str(program), directory, *options, stderr=subprocess.STDOUT)
        with start as process:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if sent is not None and line.startswith(f"trains {until}:"):
                    process.send_signal(sent)
                    process.send_signal(sent)  # one that comes with it is the same
        assert process.returncode == code, printed
        assert ("held-out" in printed) == (code == 0)
        begun.append(number(r"^training begins at step (\d+)$", printed))
        for step, of_step, ages in re.findall(r"^trains (\d+): \[(.*)\] \[(.*)\]", printed, re.M):
            # a later life repeats what was not saved
            places[int(step)] = [int(place) for place in of_step.split(", ")]
            assert set(ages.split(", ")) <= {"0", "1", "2"}
        last.append(int(step))
        if code == 1:
            found(r"^ConnectionError: the environment is gone\nin the rollout at place \d", printed)
            assert "Group" not in printed.rpartition("Traceback")[0]  # no exception group
    assert begun[0] == 0
    assert begun[1] > 0
    assert begun[2:4] == [last[1] + 1, last[2] + 1]  # a signal saves the step
    assert last[3] - 15 < begun[4] <= last[3]
    assert number(r"^held-out accuracy ([\d.]+) on 500 prompts$", printed) >= 0.95

    checkpoints = by_hand.Checkpoints(str(directory))
    state = checkpoints.newest_intact()
    checkpoints.close()
    assert state["step"] == last[4] + 1 == 400
    assert sorted(places) == list(range(400))
    trained = Counter(place for of_step in places.values() for place in of_step)
    finished = {*range(state["prompts"]["frontier"]), *state["prompts"]["beyond"]}
    assert set(trained.values()) == {1}
    assert len(trained) == 8 * 400
    assert set(trained) <= finished
    assert len(finished) - len(trained) == state["num_refused"] > 0


def test_an_epoch_has_each_prompt_once_in_an_order_of_its_own(by_hand: ModuleType) -> None:
    prompts = by_hand.Prompts()
    for _ in range(2):
        epoch = [prompts.take()[1] for _ in by_hand.TRAINING]
        assert sorted(epoch) == sorted(by_hand.TRAINING)
        assert epoch != by_hand.TRAINING


def test_a_damaged_checkpoint_is_passed_over_five_are_kept_and_another_process_refused(
    tmp_path: Path, by_hand: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = by_hand.Checkpoints(str(tmp_path))
    with pytest.raises(RuntimeError, match=f"another process trains in {tmp_path}"):
        by_hand.Checkpoints(str(tmp_path))
    assert checkpoints.newest_intact() is None
    for step in range(0, 80, 10):
        checkpoints.write(step, {"step": step})
    (tmp_path / "80.tmp").touch()  # as a process that was killed leaves it
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
    """A model with nothing to learn."""

    def __init__(self, by_hand: ModuleType) -> None:
        self.group = by_hand.Group(None, None, torch.tensor([0.0, 1.0]))
        self.policy = torch.nn.Linear(1, 1)
        self.adam = torch.optim.Adam(self.policy.parameters())

    async def answer(self, prompt: tuple[int, ...]) -> Any:
        await asyncio.sleep(0)
        return self.group

    def learn(self, prompts: Any, groups: Any) -> float:
        return 0.0

    async def evaluate(self) -> float:
        return 0.5


@pytest.mark.parametrize("failing", ["evaluate", "write", "answer"])
def test_an_error_beside_the_steps_ends_training(
    failing: str,
    tmp_path: Path,
    by_hand: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, checkpoints = Pretended(by_hand), by_hand.Checkpoints(str(tmp_path))
    learner = by_hand.Learner(model, checkpoints, last_step=10**6)

    def fail(*_: object) -> None:
        raise OSError(f"of {failing}")

    async def fail_async(*_: object) -> None:
        fail()

    if failing == "write":
        monkeypatch.setattr(checkpoints, "write", fail)
    else:
        monkeypatch.setattr(model, failing, fail_async)
    with pytest.raises(OSError, match=f"of {failing}"):
        asyncio.run(learner.train())
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert caplog.text.count("Another error") == (15 if failing == "answer" else 0)
    assert learner.step - (100 if failing == "evaluate" else 0) in (0, 1)
    checkpoints.close()
