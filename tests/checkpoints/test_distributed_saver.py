"""DistributedCheckpointSaver: the same bits, copies, what does not fit, and several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    FunctionSessionCreator,
    StopAtStepHook,
)

from ..hooks.training import run_session
from .ranks import run_ranks
from .stores import leaves, names_in

torch = pytest.importorskip("torch")
from asynchooks.checkpoints import DistributedCheckpointSaver  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Training:
    """A module with buffers, an optimizer and a scheduler."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.saver = DistributedCheckpointSaver(
            module=self.module, optimizer=self.optimizer, scheduler=self.scheduler
        )

    def step(self) -> dict[str, float]:
        x = torch.linspace(-1, 1, 24).reshape(8, 3) + self.scheduler.last_epoch
        loss = self.module(x).square().mean() + self.module[0](x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": loss.item()}

    def state(self) -> Any:
        parts = (self.module, self.optimizer, self.scheduler)
        return leaves([each.state_dict() for each in parts])


@pytest.mark.parametrize("num_steps", [0, 3])
def test_what_was_saved_comes_back_with_the_same_bits(tmp_path: Path, num_steps: int) -> None:
    first = Training()
    for _ in range(num_steps):
        first.step()
    before = first.state()
    first.saver.save(str(tmp_path / "a"))
    assert first.state() == before, "a save changes nothing"
    second = Training(seed=1)
    second.step()
    second.saver.restore(str(tmp_path / "a"))
    assert second.state() == before
    assert first.step() == second.step()
    assert first.state() == second.state()


def test_a_snapshot_is_a_copy_and_two_of_them_are_apart(tmp_path: Path) -> None:
    training, states, writes = Training(), [], []
    for _ in range(2):
        training.step()
        states.append(training.state())
        writes.append(training.saver.snapshot())
    training.step()
    for num, write in enumerate(writes):
        write(str(tmp_path / str(num)))
    training.saver.snapshot()(str(tmp_path / "later"))  # in memory that was used
    for num, state in enumerate(states):
        restored = Training(seed=9)
        restored.saver.restore(str(tmp_path / str(num)))
        assert restored.state() == state


def test_a_state_that_does_not_fit_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    training, other = Training(), Training(width=5)
    training.saver.save(str(tmp_path / "a"))
    before = other.state()
    match = r"weight: the checkpoint holds \S+ of shape \(4, 3\), here is \S+ of shape \(5, 3\)"
    with pytest.raises(CheckpointError, match=match):
        other.saver.restore(str(tmp_path / "a"))
    assert other.state() == before


def test_what_cannot_be_written_or_read_is_an_error_of_the_disk_or_damage(tmp_path: Path) -> None:
    saver = Training().saver
    (tmp_path / "file").touch()
    with pytest.raises((OSError, CheckpointError)):
        saver.save(str(tmp_path / "file" / "a"))
    with pytest.raises(FileNotFoundError):
        saver.restore(str(tmp_path / "b"))
    saver.save(str(tmp_path / "a"))
    (part,) = (tmp_path / "a").glob("*.distcp")
    part.unlink()
    with pytest.raises((OSError, CheckpointError)):
        saver.restore(str(tmp_path / "a"))
    (tmp_path / "a" / ".metadata").write_bytes(b"junk")
    with pytest.raises(DamagedCheckpointError, match="is no checkpoint of torch"):
        saver.restore(str(tmp_path / "a"))


def test_wrong_objects_are_refused() -> None:
    training = Training()
    with pytest.raises(ValueError, match=r"no torch\.nn\.Module among them"):
        DistributedCheckpointSaver(optimizer=training.optimizer)
    with pytest.raises(ValueError, match="in none of the modules"):
        DistributedCheckpointSaver(module=Training().module, optimizer=training.optimizer)
    with pytest.raises(TypeError, match="other is 3"):
        DistributedCheckpointSaver(module=training.module, other=3)


@pytest.mark.anyio
@pytest.mark.parametrize("background", [False, True])
async def test_a_session_resumes_with_the_same_bits(tmp_path: Path, background: bool) -> None:
    whole, part, rest = Training(), Training(), Training(seed=3)
    for each, name, last_step in ((whole, "whole", 9), (part, "parts", 5), (rest, "parts", 9)):
        options: Any = {"save_steps": 3, "background": background}
        saver = CheckpointSaverHook(tmp_path / name, saver=each.saver, **options)
        hooks = [saver, StopAtStepHook(last_step=last_step)]
        await run_session(hooks, FunctionSessionCreator(each.step))
    assert rest.state() == whole.state()


PROGRAM = """
from torch.nn.parallel import DistributedDataParallel
from asynchooks.data import shuffle

async def train(path, last_step, breaks=False):
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    seen = {"items": torch.zeros(100)}

    def step(item):
        seen["items"][item] += 1
        optimizer.zero_grad()
        loss = module(torch.full((4, 3), float(item) / 50)).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    saver = DistributedCheckpointSaver(module=module, optimizer=optimizer, seen=seen)
    if breaks:
        write = saver._others.save
        def save(path):
            if rank == 1 and seen["items"].sum() > 6:
                raise OSError("no space on rank 1")
            write(path)
        saver._others.save = save
        saver = type("Plain", (), {"save": saver.save, "restore": saver.restore,
                                   "ranks": saver.ranks})()
    hook = CheckpointSaverHook(path, save_steps=3, saver=saver, background=not breaks,
                               retention=Retention(max_to_keep=2))
    source = FeedHook(shuffle(range(rank * 50, rank * 50 + 50), 16, seed=rank), "item")
    hooks = [source, hook, StopAtStepHook(last_step=last_step)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        first = session.global_step.value
        while not session.should_stop():
            await session.run("loss")
    total = module.module.weight.double().sum().item().hex()
    items = seen["items"].nonzero().flatten().tolist()
    print(first, total, max(seen["items"].tolist()), items)

anyio.run(train, args[0] + "/whole", 12)
anyio.run(train, args[0] + "/parts", 7)
anyio.run(train, args[0] + "/parts", 12)
try:
    anyio.run(train, args[0] + "/breaks", 12, True)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.faults
def test_two_ranks_resume_together_each_with_its_own_items_and_what_fails_on_one_is_saved_on_none(
    tmp_path: Path,
) -> None:
    for whole, part, resumed, failed in run_ranks(PROGRAM, 2, tmp_path):
        assert [each.split()[0] for each in (whole, part, resumed)] == ["0", "0", "7"]
        assert resumed.split()[1:] == whole.split()[1:]
        assert failed.startswith("CheckpointError")
        assert "rank 1: " in failed
        assert "no space on rank 1" in failed
    files = os.listdir(tmp_path / "parts" / "model.ckpt-12")
    assert {"hooks.json", "model.ckpt-12.rank1.hooks.json", "manifest.json"} <= set(files)
    assert names_in(tmp_path / "breaks") == ["model.ckpt-3", "model.ckpt-6"]


def test_a_copy_is_made_although_pytorch_has_closed_what_makes_it(tmp_path: Path) -> None:
    training, states = Training(), []
    for num in range(3):
        training.step()
        states.append(training.state())
        training.saver.snapshot()(str(tmp_path / str(num)))
        for stager in training.saver._stagers:  # private: PyTorch 2.11 closes them with each copy
            stager.close()
    for num in range(3):
        training.saver.restore(str(tmp_path / str(num)))
        assert training.state() == states[num]
