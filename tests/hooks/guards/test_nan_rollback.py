"""NanTensorHook beside a CheckpointSaverHook: which checkpoints stay, and going back to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    PreemptionError,
    Recovery,
    StopAtStepHook,
)

from ..preemptions import saving

pytestmark = pytest.mark.anyio
NAN = math.nan


class Weights:
    """A model whose loss is that of the weights before the step; a step may break them.

    Args:
        breaks: the steps whose update makes the weights NaN, each as often as it is listed.
        odd: the steps whose loss alone is NaN, as if its data were, in the order of their coming.
    """

    def __init__(self, *breaks: int, odd: tuple[int, ...] = ()) -> None:
        self.weight, self.count = 1.0, 0
        self.breaks, self.odd = list(breaks), list(odd)
        self.restored: list[int] = []

    def step(self) -> dict[str, float]:
        loss = self.weight
        self.count += 1
        if self.odd and self.count == self.odd[0]:
            self.odd.pop(0)
            loss = NAN
        self.weight += 1.0
        if self.count in self.breaks:
            self.breaks.remove(self.count)
            self.weight = NAN
        return {"loss": loss}

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.weight, self.count = state["weight"], state["count"]
        self.restored.append(self.count)


async def train(
    directory: Path,
    model: Weights,
    *,
    save_steps: int = 1,
    last_step: int = 10,
    saver_first: bool = False,
    recovery: Recovery | None = None,
    background: bool = False,
    **options: Any,
) -> MonitoredSession:
    hooks: list[Any] = [
        NanTensorHook("loss", **options),
        saving(directory, model, save_steps, background=background),
        StopAtStepHook(last_step=last_step),
    ]
    if saver_first:
        hooks.reverse()
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step), recovery=recovery)
    async with session:
        while not session.should_stop():
            await session.run([])
    return session


def steps_in(directory: Path) -> tuple[list[int], list[int]]:
    """(Steps that may be chosen, steps that were moved aside)."""
    names = [path.name.removeprefix("model.ckpt-") for path in directory.glob("model.ckpt-*")]
    rejected = [int(name.partition(".")[0]) for name in names if "rejected" in name]
    return sorted(int(name) for name in names if name.isdecimal()), sorted(rejected)


@pytest.mark.parametrize(("saver_first", "background"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("save_steps", "kept", "aside"),
    [(1, [1, 2, 3, 4], [5]), (5, [0], [5]), (3, [0, 3], [])],
)
async def test_the_checkpoint_of_weights_that_are_nan_is_moved_aside(
    tmp_path: Path,
    save_steps: int,
    kept: list[int],
    aside: list[int],
    saver_first: bool,
    background: bool,
) -> None:
    """Step 5 breaks the weights; its loss is a number, that of step 6 is not."""
    with pytest.raises(NanLossDuringTrainingError) as caught:
        options: Any = {"saver_first": saver_first, "background": background}
        await train(tmp_path, Weights(5), save_steps=save_steps, **options)
    kept_now, aside_now = steps_in(tmp_path)
    assert (kept_now[-len(kept) :], aside_now) == (kept, aside)
    good = str(tmp_path / f"model.ckpt-{kept[-1]}")
    assert caught.value.checkpoint == good
    assert str(caught.value) == (
        "NaN loss during training: the loss 'loss' is NaN at step 6. The last good checkpoint is "
        f"{good}: the next session goes on from there"
    )
    model = Weights()
    await train(tmp_path, model, save_steps=save_steps)
    assert model.restored == [kept[-1]]
    assert (model.count, model.weight) == (10, 11.0)


async def test_nan_in_the_first_run_leaves_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NanLossDuringTrainingError, match="NaN loss") as caught:
        await train(tmp_path, Weights(odd=(1,)))
    assert str(caught.value) == "NaN loss during training: the loss 'loss' is NaN at step 1."
    assert caught.value.checkpoint is None
    assert steps_in(tmp_path) == ([0], [])


async def test_without_a_saver_the_error_names_no_checkpoint() -> None:
    model = Weights(2)
    hooks = [NanTensorHook("loss")]
    with pytest.raises(NanLossDuringTrainingError, match="NaN loss") as caught:
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            for _ in range(3):
                await session.run([])
    assert caught.value.checkpoint is None


@pytest.mark.parametrize("save_steps", [1, 3])
async def test_training_goes_back_and_ends_well_when_the_noise_is_another(
    tmp_path: Path, save_steps: int
) -> None:
    model = Weights(5, 8)
    session = await train(tmp_path, model, save_steps=save_steps, max_rollbacks=2)
    assert session.global_step.value == model.count == 10
    assert model.weight == 11.0
    # of step 5 it is known only in run 6 that it is bad: 4 is the last good one, and 7
    assert model.restored == [4 // save_steps * save_steps, 7 // save_steps * save_steps]


@pytest.mark.parametrize("num", [1, 2])
async def test_training_goes_back_so_many_times_and_then_fails(tmp_path: Path, num: int) -> None:
    model = Weights(*[5] * 9)
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is") as caught:
        await train(tmp_path, model, max_rollbacks=num)
    assert model.restored == [4] * num
    assert caught.value.checkpoint == str(tmp_path / "model.ckpt-4")
    assert steps_in(tmp_path)[1] == [5] * (num + 1)


async def test_rollbacks_are_counted_across_sessions(tmp_path: Path) -> None:
    """The first goes back once and ends; that is in the checkpoints that it then makes."""
    await train(tmp_path, Weights(3), max_rollbacks=1, last_step=6)
    model = Weights(8)
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is"):
        await train(tmp_path, model, max_rollbacks=1)
    assert model.restored == [6]


@pytest.mark.parametrize("fails", [True, False])
async def test_rollbacks_need_a_saver(fails: bool) -> None:
    hook = NanTensorHook("loss", fails, max_rollbacks=2)
    message = r"NanTensorHook\(max_rollbacks=2\) has no checkpoints to go back to: give the sess"
    with pytest.raises(RuntimeError, match=message):
        async with MonitoredSession([hook], FunctionSessionCreator(Weights().step)):
            pass


async def test_a_session_that_was_lost_in_between_knows_of_no_good_step(tmp_path: Path) -> None:
    model = Weights(odd=(5,))
    has_been_lost: list[bool] = []

    def step() -> dict[str, float]:
        if model.count == 4 and not has_been_lost:
            has_been_lost.append(True)
            raise PreemptionError("lost")
        return model.step()

    hooks = [NanTensorHook("loss"), saving(tmp_path, model, 1)]
    with pytest.raises(NanLossDuringTrainingError):
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while True:
                await session.run([])
    assert model.restored == [4]


async def test_rollbacks_come_before_a_stop_that_is_no_error(tmp_path: Path) -> None:
    model = Weights(5)
    await train(tmp_path, model, fail_on_nan_loss=False, max_rollbacks=1)
    assert (model.count, model.restored, model.weight) == (10, [4], 11.0)


@pytest.mark.parametrize("save_steps", [1, 100])
async def test_a_stop_that_is_no_error_leaves_a_good_checkpoint_as_the_newest(
    tmp_path: Path, save_steps: int
) -> None:
    await train(tmp_path, Weights(5), fail_on_nan_loss=False, save_steps=save_steps)
    model = Weights()
    await train(tmp_path, model)
    assert model.restored[0] in (0, 4)
    assert model.weight == 11.0


async def test_a_session_that_begins_with_weights_that_are_nan_moves_them_aside(
    tmp_path: Path,
) -> None:
    """Step 5 breaks the weights, and is the last one: its loss is a number, so they are saved."""
    await train(tmp_path, Weights(5), last_step=5)
    with pytest.raises(NanLossDuringTrainingError):
        await train(tmp_path, Weights())
    assert steps_in(tmp_path) == ([1, 2, 3, 4], [5])


async def test_all_rollbacks_are_tried_if_the_first_run_after_one_is_nan(tmp_path: Path) -> None:
    """The data of step 6 are odd, and then those of step 5; the weights never are."""
    model = Weights(odd=(6, 5))
    await train(tmp_path, model, max_rollbacks=3)
    assert model.weight == 11.0


async def test_where_nothing_is_recovered_the_error_is_still_that_of_the_loss(
    tmp_path: Path,
) -> None:
    with pytest.raises(NanLossDuringTrainingError):
        await train(tmp_path, Weights(5), max_rollbacks=1, recovery=Recovery(max_attempts=0))
