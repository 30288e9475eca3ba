"""The learner of a remote trainer: steps are made once and in order, whatever fails in between."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    StopAtStepHook,
)
from asynchooks.data import prefetch

from ..support.examples import load

NUM_STEPS, SAVE_STEPS = 8, 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("remote_trainer")


class Reply:
    def __init__(self, trainer: Trainer, item: int) -> None:
        self.trainer, self.item = trainer, item
        self.error: Exception | None = None

    async def result_async(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        while self in self.trainer.queue:
            self.trainer.compute()
        if self.error is not None:
            raise self.error
        return {"loss": float(self.item)}


class Trainer:
    """Client and service in one: the model is what it was trained with.

    Args:
        failing: the number of the request that fails, from 1.
        error: that it fails with. With a PreemptionError all that it holds is lost.
    """

    def __init__(self, failing: int = 0, error: Exception | None = None) -> None:
        self.failing, self.error = failing, error
        self.items: list[int] = []
        self.queue: list[Reply] = []
        self.log: list[str] = []
        self.num_computed = 0
        self.saved: dict[str, list[int]] = {}

    async def forward_backward_async(self, x: int, y: int) -> Reply:
        self.log.append(f"S{x}")
        self.queue.append(Reply(self, x))
        return self.queue[-1]

    async def optim_step_async(self, rate: float) -> Reply:
        return Reply(self, 0)

    def compute(self) -> None:
        reply = self.queue.pop(0)
        self.num_computed += 1
        if self.num_computed != self.failing:
            self.log.append(f"R{reply.item}")
            self.items.append(reply.item)
            return
        lost = [reply]
        if isinstance(self.error, PreemptionError):
            lost += self.queue
            self.queue, self.items = [], [-1]
        for each in lost:
            each.error = self.error

    def save(self, path: str) -> None:
        assert not self.queue
        Path(path).write_text(json.dumps(self.items))
        self.saved[Path(path).name] = list(self.items)

    def restore(self, path: str) -> None:
        self.items = json.loads(Path(path).read_text())


async def train(
    example: ModuleType, trainer: Trainer, depth: int, directory: Path | None = None
) -> tuple[list[int], int]:
    """Returns the steps of the outputs that runs have returned, and of the last ones."""
    learner = example.Learner(trainer, depth)
    source = prefetch([(i, i) for i in range(100)], 2)
    hooks = [learner, FeedHook(source, ["x", "y"]), StopAtStepHook(last_step=NUM_STEPS)]
    if directory is not None:
        drain = example.DrainFirst(learner)
        saving = CheckpointSaverHook(directory, None, SAVE_STEPS, trainer, listeners=[drain])
        hooks.append(saving)
    steps, recovery = [], Recovery(first_pause_secs=0.0)
    async with MonitoredSession(hooks, learner.step, recovery=recovery) as session:
        while not session.should_stop():
            steps.append(await session.run("of_step"))
    return steps, learner.last["of_step"]


@pytest.mark.parametrize(
    ("depth", "begin", "steps"),
    [
        (1, "S0 R0 S1 R1 S2 R2", [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, "S0 R0 S1 S2 R1 S3 R2", [1, 1, 2, 3, 4, 5, 6, 7]),
        (3, "S0 R0 S1 S2 S3 R1 S4 R2", [1, 1, 1, 2, 3, 4, 5, 6]),
    ],
)
async def test_a_step_is_submitted_before_the_outputs_of_earlier_ones(
    example: ModuleType, depth: int, begin: str, steps: list[int], tmp_path: Path
) -> None:
    trainer = Trainer()
    assert await train(example, trainer, depth) == (steps, NUM_STEPS)
    assert " ".join(trainer.log).startswith(begin)
    assert trainer.items == list(range(NUM_STEPS))
    assert not trainer.queue

    trainer = Trainer()  # each checkpoint holds the model of its step
    await train(example, trainer, depth, tmp_path)
    assert trainer.saved == {f"model.ckpt-{step}": list(range(step)) for step in (0, 3, 6, 8)}


@pytest.mark.parametrize("number", range(1, NUM_STEPS + 1))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "error", [PreemptionError("the trainer was lost"), ValueError("diverged")], ids=type
)
async def test_what_a_lost_trainer_held_is_restored_and_the_rest_submitted_again(
    example: ModuleType, depth: int, number: int, error: Exception, tmp_path: Path
) -> None:
    """By the session; after another error by the next one, which goes on from the checkpoint."""
    trainer = Trainer(number, error)
    is_last = number > NUM_STEPS + 1 - depth  # its outputs come when training ends
    if is_last or not isinstance(error, PreemptionError):
        with pytest.raises(type(error), match=str(error)):
            await train(example, trainer, depth, tmp_path)
    trainer.queue.clear()
    _, last = await train(example, trainer, depth, tmp_path)
    assert last == NUM_STEPS
    assert trainer.items == list(range(NUM_STEPS))
