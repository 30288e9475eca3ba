"""NanTensorHook on step functions: what counts as NaN, what is saved then, and going back."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    PreemptionError,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ...support.hook_models import Losses, Weights
from ..preemptions import saving
from ..training import run_session

NAN = math.nan


def session_of(hooks: list[Any], *losses: Any) -> MonitoredSession:
    """A session whose n-th run gives the n-th loss."""
    return MonitoredSession(hooks, Losses(*losses).step)


@pytest.mark.parametrize(
    "loss", [NAN, np.float16("nan"), np.array([[np.nan]], np.float32), complex(0, NAN)], ids=repr
)
@pytest.mark.parametrize("fails", [True, False])
async def test_nan_fails_the_training_or_only_stops_it(
    loss: Any, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = RecordingHook("other")
    session = session_of([NanTensorHook("loss", fails), other], 0.5, loss)
    with suppress(NanLossDuringTrainingError):
        async with session:
            assert await session.run("loss") == 0.5
            assert not session.should_stop()
            await session.run([])
            assert not fails
    assert other.log[-1] == ("other", "on_error" if fails else "end")
    assert "the loss 'loss' is NaN at step 2" in str(session.stop_reason)
    assert [each.levelname for each in caplog.records] == ["ERROR" if fails else "WARNING"]


async def test_numbers_and_infinity_pass() -> None:
    numbers = [7, np.float32("inf"), np.array([1.5]), complex(math.inf, 0)]
    async with session_of([NanTensorHook("loss")], *numbers) as session:
        assert [await session.run("loss") for _ in numbers] == numbers
        assert not session.should_stop()


@pytest.mark.parametrize("loss", [None, [0.5], np.zeros(2), np.zeros(0)], ids=repr)
async def test_what_is_no_scalar_is_an_error(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"the loss 'loss' is .*; give one number"):
        async with session_of([NanTensorHook("loss", fail_on_nan_loss=False)], loss) as session:
            await session.run([])


async def train(
    directory: Path, breaks: tuple[int, ...] = (), odd: tuple[int, ...] = (), *,
    save_steps: int = 1, background: bool = False, last_step: int = 10, order: int = 1,
    **options: Any,
) -> tuple[Weights, Any]:  # fmt: skip
    """With a NanTensorHook with these options, and a saver; returns the model, and the error."""
    model, error = Weights(*breaks, odd=odd), None
    saver = saving(directory, model, save_steps, background=background)
    hooks = [NanTensorHook("loss", **options), saver, StopAtStepHook(last_step=last_step)]
    try:
        await run_session(hooks[::order], model.step)
    except NanLossDuringTrainingError as caught:
        error = caught
    return model, error


def steps_in(directory: Path) -> tuple[list[int], list[int]]:
    """(The last five steps that may be chosen, steps that were moved aside)."""
    names = [path.name.removeprefix("model.ckpt-") for path in directory.glob("model.ckpt-*")]
    rejected = [int(name.partition(".")[0]) for name in names if "rejected" in name]
    return sorted(int(name) for name in names if name.isdecimal())[-5:], sorted(rejected)


@pytest.mark.parametrize(
    ("options", "kept", "aside"),
    [
        ({"save_steps": 1}, [1, 2, 3, 4], [5]),
        ({"save_steps": 5, "background": True, "order": -1}, [0], [5]),
        ({"save_steps": 3, "background": True}, [0, 3], []),
    ],
)
async def test_the_checkpoint_of_weights_that_are_nan_is_moved_aside(
    tmp_path: Path, options: Any, kept: list[int], aside: list[int]
) -> None:
    """Step 5 breaks the weights; its loss is a number, that of step 6 is not."""
    _, error = await train(tmp_path, (5,), **options)
    assert "NaN at step 6. The last good checkpoint is" in str(error)
    assert error.checkpoint == str(tmp_path / f"model.ckpt-{kept[-1]}")
    assert steps_in(tmp_path) == (kept, aside)
    model, error = await train(tmp_path, **options)
    assert (model.restored, model.weight, error) == ([kept[-1]], 11.0, None)


# the life is that of the model that comes last; one before it leaves its checkpoints
LIVES: dict[str, tuple[list[dict[str, Any]], list[int], int | str | None]] = {
    # of step 5 it is known only in run 6 that it is bad: 4 is the last good one, and 7
    "goes back and ends well": ([{"breaks": (5, 8), "max_rollbacks": 2}], [4, 7], "ends"),
    "goes back so many times": ([{"breaks": [5] * 9, "max_rollbacks": 2}], [4, 4], 4),
    "though it is saved between": ([{"breaks": [3, *[6] * 5], "max_rollbacks": 2}], [2, 5], 5),
    "rollbacks of all sessions count": (
        [
            {"breaks": (3,), "max_rollbacks": 1, "last_step": 6},
            {"breaks": (8,), "max_rollbacks": 1},
        ],
        [6], 7,
    ),
    "rollbacks come before a stop": (
        [{"breaks": (5,), "fail_on_nan_loss": False, "max_rollbacks": 1}], [4], "ends",
    ),
    "a stop saves no bad one": (
        [{"breaks": (5,), "fail_on_nan_loss": False, "save_steps": 3}, {}], [3], "ends",
    ),
    "nor the first": (
        [{"breaks": (1,), "odd": (1,), "fail_on_nan_loss": False}, {}], [0], "ends",
    ),
    "the first run leaves what there is": ([{"odd": (1,)}], [], None),
    # its loss is a number, so the weights that the last step breaks are saved
    "it begins with weights that are NaN": ([{"breaks": (5,), "last_step": 5}, {}], [5], 4),
    # the data of step 6 are odd, and then those of step 5; the weights never are
    "the first run after a rollback": ([{"odd": (6, 5), "max_rollbacks": 3}], [4, 3], "ends"),
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
async def test_training_goes_on_from_the_last_good_checkpoint(life: str, tmp_path: Path) -> None:
    lives, restored, good = LIVES[life]
    for options in lives:
        model, error = await train(tmp_path, **options)
    assert model.restored == restored
    if good == "ends":
        assert (error, model.count, model.weight) == (None, 10, 11.0)
    else:
        expected = None if good is None else str(tmp_path / f"model.ckpt-{good}")
        assert error.checkpoint == expected
        assert ("The last good checkpoint is" in str(error)) is (good is not None)
        assert good is None or max(steps_in(tmp_path)[0]) == good


async def test_rollbacks_need_a_saver() -> None:
    with pytest.raises(RuntimeError, match="give the session a CheckpointSaverHook"):
        await run_session([NanTensorHook("loss", max_rollbacks=2)])


async def test_a_session_that_was_lost_in_between_knows_of_no_good_step(tmp_path: Path) -> None:
    model, losses = Weights(odd=(5,)), [PreemptionError("lost")]

    def step() -> dict[str, float]:
        if model.count == 4 and losses:
            raise losses.pop()
        return model.step()

    with pytest.raises(NanLossDuringTrainingError):
        await run_session([NanTensorHook("loss"), saving(tmp_path, model, 1)], step)
    assert model.restored == [4]


async def see_nan(a: MonitoredSession, shared: SharedSessionCreator, *, fails: bool) -> None:
    """Three steps of one worker, one of another, a bad one, and the other one sees it."""
    async with MonitoredSession([NanTensorHook("loss", fails)], shared) as b:
        for worker in (a, a, a, b, a, b):
            await worker.run([])


async def test_a_worker_that_goes_on_saves_no_more_until_it_is_lost_and_goes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def step() -> dict[str, float]:
        if losses and model.count == 10:
            raise losses.pop()
        return model.step()

    model, losses = Weights(5), [PreemptionError("lost")]
    shared = SharedSessionCreator(step, num_workers=2)
    async with MonitoredSession([saving(tmp_path, model, 2)], shared) as a:
        await see_nan(a, shared, fails=False)
        assert not a.should_stop()
        for _ in range(4):
            await a.run([])
        for step_ in (7, 9):
            assert f"Step {step_} is not saved: from 4 on the loss was NaN" in caplog.text
        await a.run([])
        assert (model.restored, model.weight) == ([2], 4.0)
    assert steps_in(tmp_path) == ([0, 2, 3], [5])
