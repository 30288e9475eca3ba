"""DistributedCheckpointSaver in one process: the same bits, copies, and what does not fit."""

from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointError,
    DamagedCheckpointError,
)

from .stores import leaves

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


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_snapshot_is_a_copy_and_two_of_them_are_apart(tmp_path: Path, is_closed: bool) -> None:
    training, states, writes = Training(), [], []
    for _ in range(2):
        training.step()
        states.append(training.state())
        writes.append(training.saver.snapshot())
    assert training.state() == states[-1], "a copy changes nothing"
    training.step()
    for num, write in enumerate(writes):
        write(str(tmp_path / str(num)))
    if is_closed:
        for stager in training.saver._stagers:  # private: PyTorch 2.11 closes them with each copy
            stager.close()
    states.append(training.state())
    training.saver.snapshot()(str(tmp_path / "2"))  # in memory that was used
    for num, state in enumerate(states):
        restored = Training(seed=9)
        restored.saver.restore(str(tmp_path / str(num)))
        assert restored.state() == state


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
