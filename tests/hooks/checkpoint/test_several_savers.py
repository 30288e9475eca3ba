"""Several CheckpointSaverHooks of one model: the newest of their checkpoints is restored."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    EarlyStoppingHook,
    FunctionSessionCreator,
    MonitoredSession,
    NanTensorHook,
    PreemptionError,
    Recovery,
    Retention,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.simulation import Simulation

from ..forwarding import ForwardsAll, Wrap, bare

pytestmark = pytest.mark.anyio

ORDERS = [("often", "rare"), ("rare", "often")]
EVERY = {"often": 5, "rare": 100}


class PowerLostError(Exception):
    pass


class Began(SessionRunHook):
    """The steps that raw sessions have begun at, and the model's by then."""

    def __init__(self, model: Mapping[str, np.ndarray]) -> None:
        self.model = model
        self.steps: list[int] = []
        self.models: list[int] = []

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.steps.append(session.global_step.value)
        self.models.append(int(self.model["w"][0]))


class Training:
    """One process's training, whose weight is the number of its steps."""

    def __init__(self, path: Path, *, fails_at: int = 0, lost_at: int = 0, nan_at: int = 0) -> None:
        self.path = path
        self.model = {"w": np.zeros(1, int)}
        self.extra = {"e": np.zeros(1, int)}
        self.began = Began(self.model)
        self.newest = 0  # the step of the newest checkpoint as the session was lost
        self.at = {"fails": fails_at, "lost": lost_at, "nan": nan_at}

    def step(self) -> dict[str, float]:
        self.model["w"] += 1
        self.extra["e"] += 10
        at = int(self.model["w"][0])
        if at == self.at["fails"]:
            raise PowerLostError
        if at == self.at["lost"]:
            self.at["lost"] = 0
            self.newest = max(each for name in EVERY for each in steps_in(self.path / name))
            raise PreemptionError("the machine is gone")
        if at == self.at["nan"]:
            self.at["nan"] = 0
            return {"loss": np.nan}
        return {"loss": 1 / at}

    def saver(self, name: str, saver: Any = None, **options: Any) -> CheckpointSaverHook:
        saver = saver or StateDictSaver(model=self.model)
        options = {"save_steps": EVERY[name], **options}
        return CheckpointSaverHook(self.path / name, saver=saver, **options)

    async def run(
        self,
        hooks: Sequence[SessionRunHook],
        last_step: int,
        creator: SessionCreator | None = None,
    ) -> None:
        creator = creator or FunctionSessionCreator(self.step)
        hooks = [*hooks, self.began, StopAtStepHook(last_step=last_step)]
        recovery = Recovery(first_pause_secs=0)
        async with MonitoredSession(hooks, creator, recovery=recovery) as session:
            while not session.should_stop():
                await session.run([])


async def train_until_power_is_lost(path: Path, order: Sequence[str], step: int = 153) -> None:
    training = Training(path, fails_at=step)
    with pytest.raises(PowerLostError):
        await training.run([training.saver(name) for name in order], 1000)


def damage(path: Path) -> None:
    for each in path.glob("model.ckpt-*/manifest.json"):
        each.write_bytes(b"damage")


def steps_in(path: Path) -> list[int]:
    return [each.step for each in CheckpointDirectory(path).checkpoints()]


@pytest.mark.parametrize("wrap", [bare, ForwardsAll])
@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
async def test_a_session_goes_on_from_the_newest_checkpoint_of_its_savers(
    tmp_path: Path, first: Sequence[str], second: Sequence[str], wrap: Wrap
) -> None:
    await train_until_power_is_lost(tmp_path, first)
    training = Training(tmp_path)
    await training.run([wrap(training.saver(name)) for name in second], 160)
    assert (training.began.steps, training.began.models) == ([150], [150])
    assert (steps_in(tmp_path / "often")[-1], steps_in(tmp_path / "rare")[-1]) == (160, 160)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_lost_session_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, order: Sequence[str]
) -> None:
    training = Training(tmp_path, lost_at=38)
    await training.run([training.saver(name) for name in order], 60)
    assert (training.began.steps, training.began.models) == ([0, 35], [0, 35])


@pytest.mark.parametrize("order", ORDERS)
async def test_a_rollback_goes_to_the_newest_good_checkpoint_of_all(
    tmp_path: Path, order: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, nan_at=38)
    hooks = [NanTensorHook("loss", max_rollbacks=2), *(training.saver(name) for name in order)]
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await training.run(hooks, 60)
    assert (training.began.steps, training.began.models) == ([0, 35], [0, 35])
    assert re.search(r"back to \S*often\S*-35", caplog.text)


@pytest.mark.parametrize("order", ORDERS)
async def test_bad_checkpoints_are_moved_aside_in_the_directories_of_all_savers(
    tmp_path: Path, order: Sequence[str]
) -> None:
    training = Training(tmp_path)
    losses = iter([1.0, 1.0, np.nan])
    step = lambda: {**training.step(), "loss": next(losses, 1.0)}  # noqa: E731
    savers = [training.saver(name, save_steps=1) for name in order]
    hooks = [NanTensorHook("loss", max_rollbacks=1), *savers]
    await training.run(hooks, 4, FunctionSessionCreator(step))
    assert training.began.steps == [0, 1]  # that of step 2 may have been bad already
    for name in order:
        rejected = [each.name for each in (tmp_path / name).glob("*.rejected-*")]
        assert [each.partition(".rejected")[0] for each in rejected] == ["model.ckpt-2"]


@pytest.mark.parametrize("order", ORDERS)
async def test_an_empty_directory_hides_no_checkpoint_of_another_saver(
    tmp_path: Path, order: Sequence[str]
) -> None:
    await train_until_power_is_lost(tmp_path, ["often"])
    training = Training(tmp_path)
    await training.run([training.saver(name) for name in order], 160)
    assert training.began.steps == [150]
    assert steps_in(tmp_path / "rare") == [150, 160]


@pytest.mark.parametrize("order", ORDERS)
async def test_where_the_newest_is_damaged_the_next_newest_of_all_is_restored(
    tmp_path: Path, order: Sequence[str]
) -> None:
    await train_until_power_is_lost(tmp_path, order, 103)
    for step in (85, 90, 95, 100):
        (tmp_path / "often" / f"model.ckpt-{step}" / "manifest.json").write_bytes(b"damage")
    training = Training(tmp_path)
    await training.run([training.saver(name) for name in order], 105)
    assert (training.began.steps, training.began.models) == ([100], [100])


@pytest.mark.parametrize("order", ORDERS)
async def test_a_directory_with_damage_alone_does_not_end_what_another_can_restore(
    tmp_path: Path, order: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    await train_until_power_is_lost(tmp_path, order, 103)
    damage(tmp_path / "often")
    training = Training(tmp_path)
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await training.run([training.saver(each) for each in order], 103)
    assert training.began.steps == [100]
    assert "the checkpoints of another hook are used" in caplog.text


@pytest.mark.parametrize("order", ORDERS)
async def test_damage_in_all_directories_is_refused(tmp_path: Path, order: Sequence[str]) -> None:
    await train_until_power_is_lost(tmp_path, order, 103)
    damage(tmp_path / "often")
    damage(tmp_path / "rare")
    training = Training(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        await training.run([training.saver(each) for each in order], 103)


async def test_a_metric_is_kept_where_the_step_of_its_checkpoint_is_saved_again(
    tmp_path: Path,
) -> None:
    def savers(training: Training) -> list[SessionRunHook]:
        best = training.saver("rare", save_steps=5, metric="loss", retention=Retention(keep_best=1))
        return [training.saver("often"), best]

    training = Training(tmp_path, fails_at=13)
    with pytest.raises(PowerLostError):
        await training.run(savers(training), 100)
    training = Training(tmp_path)
    await training.run(savers(training), 12)
    there = CheckpointDirectory(tmp_path / "rare").checkpoints()
    metrics = {each.step: each.metric for each in there}
    assert metrics[10] == pytest.approx(0.1)


async def test_states_of_hooks_are_those_of_the_checkpoint_that_is_restored(tmp_path: Path) -> None:
    bests = []
    for last_step, fails_at in ((1000, 153), (160, 0)):
        training = Training(tmp_path, fails_at=fails_at)
        stopping = EarlyStoppingHook("loss", patience=500)
        look = Look(lambda stopping=stopping: bests.append(stopping.best_step))  # type: ignore[misc]
        hooks = [training.saver("rare"), training.saver("often"), stopping, look]
        if fails_at:
            with pytest.raises(PowerLostError):
                await training.run(hooks, last_step)
        else:
            await training.run(hooks, last_step)
    assert bests == [None, 150]


class Look(SessionRunHook):
    def __init__(self, fn: Callable[[], object]) -> None:
        self.fn = fn

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.fn()


@pytest.mark.parametrize("order", ORDERS)
def test_savers_in_the_sessions_of_two_workers_restore_the_newest(
    tmp_path: Path, order: Sequence[str]
) -> None:
    async def train(training: Training, last_step: int) -> None:
        async def step() -> dict[str, float]:
            await anyio.sleep(1)  # the workers take turns
            return training.step()

        creator = SharedSessionCreator(FunctionSessionCreator(step))
        async with anyio.create_task_group() as workers:
            for name in order:
                saver = training.saver(name, save_secs=EVERY[name], save_steps=None)
                workers.start_soon(training.run, [saver], last_step, creator)

    training = Training(tmp_path, lost_at=38)
    Simulation(seed=0).run(train, training, 60)
    assert training.newest > 30
    assert training.began.steps[2:] == training.began.models[2:] == [training.newest] * 2
    training = Training(tmp_path)
    Simulation(seed=0).run(train, training, 61)
    assert training.began.models == [60, 60]


class OwnSaver:
    """A saver of the user's own, that does not say what it saves."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def save(self, path: str) -> None:
        Path(path).write_text(str(int(self.array[0])))

    def restore(self, path: str) -> None:
        self.array[:] = int(Path(path).read_text())


@pytest.mark.parametrize("order", ORDERS)
async def test_one_saver_of_the_users_in_two_hooks_restores_the_newest(
    tmp_path: Path, order: Sequence[str]
) -> None:
    for fails_at in (153, 0):
        training = Training(tmp_path, fails_at=fails_at)
        saver = OwnSaver(training.model["w"])
        hooks = [training.saver(name, saver) for name in order]
        if fails_at:
            with pytest.raises(PowerLostError):
                await training.run(hooks, 1000)
        else:
            await training.run(hooks, 160)
            assert (training.began.steps, training.began.models) == ([150], [150])


@pytest.mark.parametrize("is_first", [False, True])
async def test_two_savers_of_one_model_are_refused(tmp_path: Path, is_first: bool) -> None:
    """Also where one of them holds all that the other one does."""
    training = Training(tmp_path)
    whole = StateDictSaver(model=training.model, extra=training.extra)
    hooks = [training.saver("often"), training.saver("rare", whole)]
    with pytest.raises(
        CheckpointError, match=r"\S* and \S* are written by savers of different objects"
    ):
        await training.run(hooks if is_first else hooks[::-1], 160)
    assert steps_in(tmp_path / "often") == steps_in(tmp_path / "rare") == []


async def test_two_sessions_with_savers_are_refused_where_their_hooks_have_states(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path)
    creator = SharedSessionCreator(FunctionSessionCreator(training.step))
    async with MonitoredSession([training.saver("often")], creator):
        hooks = [training.saver("rare"), EarlyStoppingHook("loss", patience=500)]
        with pytest.raises(CheckpointError, match="to one session"):
            await training.run(hooks, 160, creator)
    assert steps_in(tmp_path / "rare") == []


@pytest.mark.parametrize("order", ORDERS)
async def test_which_of_two_branches_is_newer_is_not_guessed(
    tmp_path: Path, order: Sequence[str]
) -> None:
    def save(name: str, step: int, seconds: float) -> None:
        directory = CheckpointDirectory(tmp_path / name)
        directory.open()
        saver = StateDictSaver(model={"w": np.full(1, step)})
        directory.save(step, saver.save, seconds=seconds)
        directory.close()

    save("often", 100, seconds=60)
    save("rare", 200, seconds=50)  # by a faster machine, since
    training = Training(tmp_path)
    match = r"newest is not known: \S*often\S*-100 was saved after 60\.0 s of training, and "
    with pytest.raises(CheckpointError, match=match + r"\S*rare\S*-200 after 50\.0 s"):
        await training.run([training.saver(name) for name in order], 300)
    assert int(training.model["w"][0]) == 0
    save("often", 250, seconds=70)
    await training.run([training.saver(name) for name in order], 251)
    assert training.began.steps == [250]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("alone", EVERY)
async def test_a_training_that_went_on_with_one_of_them_is_the_newest(
    alone: str, order: Sequence[str], tmp_path: Path
) -> None:
    """Also where its steps took less time than the other's last save of the step before."""
    training = Training(tmp_path)
    await training.run([training.saver(name) for name in order], 100)
    training = Training(tmp_path)
    await training.run([training.saver(alone)], 102)
    training = Training(tmp_path)
    await training.run([training.saver(name) for name in order], 103)
    assert (training.began.steps, training.began.models) == ([102], [102])


def test_in_virtual_time_the_newest_is_restored_too(tmp_path: Path) -> None:
    def run(training: Training, order: Sequence[str], last_step: int) -> None:
        async def step() -> dict[str, float]:
            await anyio.sleep(1)
            return training.step()

        hooks = [training.saver(name) for name in order]
        Simulation(seed=0).run(training.run, hooks, last_step, FunctionSessionCreator(step))

    training = Training(tmp_path, lost_at=38)
    run(training, ["rare", "often"], 60)
    assert training.began.steps == [0, 35]
    training = Training(tmp_path)
    run(training, ["rare", "often"], 61)
    assert training.began.steps == [60]
