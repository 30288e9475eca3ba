"""Several CheckpointSaverHooks of one model: the newest of their checkpoints is restored."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    EarlyStoppingHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.simulation import Simulation

from ...checkpoints.stores import opened, steps_in
from ...support.moments import NOW
from ..savers import metrics_of
from ..training import run_session

EVERY = {"often": 5, "rare": 20}
ORDERS = [["often", "rare"], ["rare", "often"]]
BOTH_ORDERS = pytest.mark.parametrize("order", ORDERS)
Hooks = Sequence[SessionRunHook]


class PowerLostError(Exception):
    """Ends a training of which nothing is saved then."""


class Training(SessionRunHook):
    """One process's training, whose weight is the number of its steps.

    It notes the steps that raw sessions have begun at, with the model's by then.
    """

    def __init__(self, path: Path, what: str = "", at: int = 0) -> None:
        self.path, self.what, self.at = path, what, at
        self.model = {"w": np.zeros(1, int)}
        self.began: list[tuple[int, int]] = []
        self.newest = 0  # the step of the newest checkpoint as the session was lost

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.began.append((session.global_step.value, int(self.model["w"][0])))

    def step(self) -> dict[str, float]:
        self.model["w"] += 1
        count = int(self.model["w"][0])
        what, self.what = (self.what, "") if count == self.at else ("", self.what)
        if what == "no power":
            raise PowerLostError
        if what == "loss":
            self.newest = max(each for name in EVERY for each in steps_in(self.path / name))
            raise PreemptionError("the machine is gone")
        return {"loss": np.nan if what == "NaN" else 1 / count}

    def saver(self, name: str, saver: Any = None, **options: Any) -> CheckpointSaverHook:
        saver = saver or StateDictSaver(model=self.model)
        options = {"save_steps": EVERY[name], **options}
        return CheckpointSaverHook(self.path / name, saver=saver, **options)

    def savers(self, names: Sequence[str], **options: Any) -> list[SessionRunHook]:
        return [self.saver(name, **options) for name in names]

    async def run(self, hooks: Hooks, last_step: int, creator: Any = None) -> int:
        """Train until the end, or until power is lost; returns the step where it began last."""
        creator = creator or self.step
        hooks = [*hooks, self, StopAtStepHook(last_step=last_step)]
        with suppress(PowerLostError):
            await run_session(hooks, creator, recovery=NOW)
        assert all(step == of_model for step, of_model in self.began)
        return self.began[-1][0]


@BOTH_ORDERS
async def test_a_session_goes_on_from_the_newest_checkpoint_of_its_savers_and_its_states(
    tmp_path: Path, order: Sequence[str]
) -> None:
    for names, begun in ((order[::-1], 0), (order, 30)):
        training = Training(tmp_path, "" if begun else "no power", 33)
        stopping = EarlyStoppingHook("loss", patience=500)
        assert await training.run([*training.savers(names), stopping], 40) == begun
    assert stopping.best_step == 40
    assert (steps_in(tmp_path / "often")[-1], steps_in(tmp_path / "rare")[-1]) == (40, 40)


@BOTH_ORDERS
@pytest.mark.parametrize("what", ["loss", "NaN"])
async def test_a_lost_session_and_a_rollback_go_to_the_newest_good_checkpoint_of_all(
    tmp_path: Path, what: str, order: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, what, 28)
    hooks = [NanTensorHook("loss", max_rollbacks=2), *training.savers(order)]
    assert await training.run(hooks, 45) == 25
    assert len(training.began) == 2
    if what == "NaN":
        assert re.search(r"back to \S*often\S*-25", caplog.text)


async def test_bad_checkpoints_are_moved_aside_in_the_directories_of_all_savers(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path, "NaN", 3)
    hooks = [NanTensorHook("loss", max_rollbacks=1), *training.savers(ORDERS[0], save_steps=1)]
    assert await training.run(hooks, 4) == 1  # that of step 2 may have been bad already
    for name in EVERY:
        rejected = [each.name for each in (tmp_path / name).glob("*.rejected-*")]
        assert [each.partition(".rejected")[0] for each in rejected] == ["model.ckpt-2"]


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("names", "damaged", "begun"),
    [
        (["often"], [], 20),  # there is nothing in the directory of the other
        (["often", "rare"], [5, 10, 15, 20], 20),  # of rare
        (["often", "rare"], [0, 5, 10, 15, 20], 20),  # none is left in the directory of often
    ],
)
async def test_what_one_directory_lacks_hides_no_checkpoint_of_another(
    tmp_path: Path, names: Sequence[str], damaged: Sequence[int], begun: int, order: Sequence[str]
) -> None:
    training = Training(tmp_path, "no power", 23)
    await training.run(training.savers(names), 1000)
    for step in damaged:
        (tmp_path / f"often/model.ckpt-{step}/manifest.json").write_bytes(b"damage")
    training = Training(tmp_path)
    assert await training.run(training.savers(order), 25) == begun


async def test_a_metric_is_kept_where_the_step_of_its_checkpoint_is_saved_again(
    tmp_path: Path,
) -> None:
    for what in ("no power", ""):
        training = Training(tmp_path, what, 13)
        best = training.saver("rare", save_steps=5, metric="loss")
        await training.run([training.saver("often"), best], 14)
    assert metrics_of(tmp_path / "rare")[10] == pytest.approx(0.1)


def test_savers_in_the_sessions_of_two_workers_restore_the_newest(tmp_path: Path) -> None:
    async def train(training: Training, last_step: int) -> None:
        async def step() -> dict[str, float]:
            await anyio.sleep(1)  # the workers take turns
            return training.step()

        creator = SharedSessionCreator(step)
        async with anyio.create_task_group() as workers:
            for name in EVERY:
                saver = training.saver(name, save_secs=EVERY[name], save_steps=None)
                workers.start_soon(training.run, [saver], last_step, creator)

    training = Training(tmp_path, "loss", 28)
    Simulation(seed=0).run(train, training, 40)
    assert training.newest > 20
    assert training.began[2:] == [(training.newest, training.newest)] * 2
    training = Training(tmp_path)
    Simulation(seed=0).run(train, training, 41)
    assert training.began == [(40, 40)] * 2


async def test_two_savers_of_one_model_are_refused(tmp_path: Path) -> None:
    """Also where one of them holds all that the other one does."""
    training = Training(tmp_path)
    whole = StateDictSaver(model=training.model, extra={"e": np.zeros(1)})
    hooks = [training.saver("often"), training.saver("rare", whole)]
    with pytest.raises(CheckpointError, match="are written by savers of different objects"):
        await training.run(hooks, 60)
    assert steps_in(tmp_path / "often") == steps_in(tmp_path / "rare") == []


async def test_two_sessions_with_savers_are_refused_where_their_hooks_have_states(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path)
    creator = SharedSessionCreator(training.step)
    async with MonitoredSession([training.saver("often")], creator):
        hooks = [training.saver("rare"), EarlyStoppingHook("loss", patience=500)]
        with pytest.raises(CheckpointError, match="to one session"):
            await training.run(hooks, 60, creator)
    assert steps_in(tmp_path / "rare") == []


async def test_which_of_two_branches_is_newer_is_not_guessed(tmp_path: Path) -> None:
    def save(name: str, step: int, seconds: float) -> None:
        saver = StateDictSaver(model={"w": np.full(1, step)})
        with opened(tmp_path / name) as directory:
            directory.save(step, saver.save, seconds=seconds)

    save("often", 100, seconds=60)
    save("rare", 200, seconds=50)  # by a faster machine, since
    training = Training(tmp_path)
    match = r"newest is not known: \S*often\S*-100 was .* 60\.0 s .*rare\S*-200 after 50\.0 s"
    with pytest.raises(CheckpointError, match=match):
        await training.run(training.savers(ORDERS[0]), 300)
    assert int(training.model["w"][0]) == 0
    save("often", 250, seconds=70)
    assert await training.run(training.savers(ORDERS[0]), 251) == 250


@pytest.mark.parametrize("alone", EVERY)
async def test_a_training_that_went_on_with_one_of_them_is_the_newest(
    alone: str, tmp_path: Path
) -> None:
    """Also where its steps took less time than the other's last save of the step before."""
    begun = []
    for names, last_step in ((ORDERS[0], 20), ([alone], 22), (ORDERS[0], 23)):
        training = Training(tmp_path)
        begun.append(await training.run(training.savers(names), last_step))
    assert begun == [0, 20, 22]
