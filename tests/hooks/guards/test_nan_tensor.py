"""NanTensorHook on step functions: what counts as NaN, what is saved then, and going back."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ..preemptions import saving

pytestmark = pytest.mark.anyio
NAN = math.nan
BACKGROUND = pytest.mark.parametrize("background", [False, True])


def session_of(hooks: list[Any], *losses: Any) -> MonitoredSession:
    """A session whose n-th run gives the n-th loss."""
    rest = iter(losses)
    return MonitoredSession(hooks, FunctionSessionCreator(lambda: {"loss": next(rest)}))


NANS = [
    NAN, np.float16("nan"), np.float32("nan"), np.float64("nan"), np.array(np.nan),
    np.array([np.nan], np.float32), np.array([[np.nan]]), complex("nan"), complex(0, NAN),
    np.complex64(complex("nan")),
]  # fmt: skip
NUMBERS = [
    0.0, 7, np.float32(1.5), np.array(1.5), np.array([1.5]), math.inf, -math.inf,
    np.float32("inf"), np.array(-np.inf), complex(1, 2), complex(math.inf, 0), np.int64(3),
]  # fmt: skip
NO_SCALARS = [
    None, "0.5", [0.5], (0.5,), {"a": 0.5}, {0.5}, b"0.5", object, [], np.zeros(2), np.zeros(0),
    np.array([np.nan, np.nan]), np.zeros((1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("loss", NANS, ids=repr)
async def test_nan_fails_the_training(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = RecordingHook("other")
    with pytest.raises(
        NanLossDuringTrainingError,
        match="NaN loss during training: the loss 'loss' is NaN at step 2",
    ) as caught:
        async with session_of([NanTensorHook("loss"), other], 0.5, loss) as session:
            assert await session.run("loss") == 0.5
            await session.run([])
    assert caught.value.__notes__ == ["in after_run of NanTensorHook"]
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.checkpoint is None  # without a CheckpointSaverHook
    assert other.errors == [caught.value]
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert messages == [(logging.ERROR, "Model diverged with loss = NaN.")]


@pytest.mark.parametrize("loss", NANS, ids=repr)
async def test_nan_only_stops_the_training_if_it_is_not_to_fail(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[str, str]] = []
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False), RecordingHook("other", log)]
    async with session_of(hooks, 0.5, loss, 0.5) as session:
        await session.run([])
        assert not session.should_stop()
        await session.run([])
        assert session.should_stop()
        assert str(session.stop_reason).endswith("the loss 'loss' is NaN at step 2")
    assert log[-2:] == [("other", "after_run"), ("other", "end")]
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert messages == [(logging.WARNING, "Model diverged with loss = NaN.")]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("loss", NUMBERS, ids=repr)
async def test_numbers_and_infinity_pass(loss: Any, fails: bool) -> None:
    async with session_of([NanTensorHook("loss", fail_on_nan_loss=fails)], loss) as session:
        assert await session.run("loss") is loss
        assert not session.should_stop()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("loss", NO_SCALARS, ids=repr)
async def test_what_is_no_scalar_is_an_error(loss: Any, fails: bool) -> None:
    shown = re.escape(
        f"an array of shape {loss.shape} and {loss.dtype}" if isinstance(loss, np.ndarray) else ""
    )
    message = f"the loss 'loss' is {shown or '.*'}; give one number, on a graph"
    with pytest.raises(ValueError, match=message):
        async with session_of([NanTensorHook("loss", fail_on_nan_loss=fails)], loss) as session:
            await session.run([])


async def test_an_output_that_is_missing_fails_the_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among") as raised:
        async with session_of([NanTensorHook("missing")], 0.5) as session:
            await session.run([])
    assert raised.value.__notes__ == ["fetched in before_run of NanTensorHook, as the loss"]


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
    directory: Path, model: Weights, *, save_steps: int = 1, last_step: int = 10, order: int = 1,
    recovery: Recovery | None = None, background: bool = False, **options: Any,
) -> MonitoredSession:  # fmt: skip
    """Train with a NanTensorHook with these options, and a saver hook behind it."""
    saver = saving(directory, model, save_steps, background=background)
    hooks = [NanTensorHook("loss", **options), saver, StopAtStepHook(last_step=last_step)]
    creator = FunctionSessionCreator(model.step)
    async with MonitoredSession(hooks[::order], creator, recovery=recovery) as session:
        while not session.should_stop():
            await session.run([])
    return session


def steps_in(directory: Path) -> tuple[list[int], list[int]]:
    """(Steps that may be chosen, steps that were moved aside)."""
    names = [path.name.removeprefix("model.ckpt-") for path in directory.glob("model.ckpt-*")]
    rejected = [int(name.partition(".")[0]) for name in names if "rejected" in name]
    return sorted(int(name) for name in names if name.isdecimal()), sorted(rejected)


@pytest.mark.parametrize(("order", "background"), [(1, False), (-1, True)])
@pytest.mark.parametrize(
    ("save_steps", "kept", "aside"),
    [(1, [1, 2, 3, 4], [5]), (5, [0], [5]), (3, [0, 3], [])],
)
async def test_the_checkpoint_of_weights_that_are_nan_is_moved_aside(
    tmp_path: Path, save_steps: int, kept: list[int], aside: list[int], order: int,
    background: bool,
) -> None:  # fmt: skip
    """Step 5 breaks the weights; its loss is a number, that of step 6 is not."""
    with pytest.raises(NanLossDuringTrainingError) as caught:
        options: Any = {"order": order, "background": background}
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


async def test_a_rollback_warns_of_nothing_but_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(tmp_path, Weights(5), max_rollbacks=2)
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    diverged, rejected, lost = messages
    assert diverged == "Model diverged with loss = NaN."
    assert rejected.startswith(f"{tmp_path / 'model.ckpt-5'} is rejected")
    back_to = tmp_path / "model.ckpt-4"
    assert f"the loss 'loss' is NaN at step 6: back to {back_to}, rollback 1 of 2" in lost


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


@BACKGROUND
@pytest.mark.parametrize("save_steps", [1, 100])
async def test_a_new_model_whose_first_loss_is_nan_is_not_saved(
    tmp_path: Path, save_steps: int, background: bool
) -> None:
    options: Any = {"save_steps": save_steps, "background": background}
    await train(tmp_path, Weights(1, odd=(1,)), fail_on_nan_loss=False, **options)
    assert steps_in(tmp_path) == ([0], [])
    model = Weights()
    await train(tmp_path, model)
    assert (model.restored, model.weight) == ([0], 11.0)


async def test_rollbacks_are_bounded_although_checkpoints_are_saved_between_them(
    tmp_path: Path,
) -> None:
    """The second goes back to a checkpoint that knows of the first only."""
    model = Weights(3, *[6] * 5)
    with pytest.raises(NanLossDuringTrainingError, match="The last good checkpoint is"):
        await train(tmp_path, model, max_rollbacks=2)
    assert model.restored == [2, 5]


class Pair:
    """Two workers on one model; only the first saves it, and breaks it in step 5."""

    def __init__(self, path: Path, *, save_steps: int, fails: bool = True, **options: Any) -> None:
        self.model = Weights(5)
        self.shared = SharedSessionCreator(FunctionSessionCreator(self.step), num_workers=2)
        self.saves = [saving(path, self.model, save_steps, **options), NanTensorHook("loss")]
        self.looks = [NanTensorHook("loss", fail_on_nan_loss=fails)]
        self.is_lost = False

    def step(self) -> dict[str, float]:
        if self.is_lost:
            self.is_lost = False
            raise PreemptionError("lost")
        return self.model.step()

    async def see_nan(self, a: MonitoredSession, b: MonitoredSession) -> None:
        """Three steps of the first, one of the other, the bad one, and the other one sees it."""
        for worker in (a, a, a, b, a, b):
            await worker.run([])

    async def run(self, error: Exception | None) -> None:
        async with MonitoredSession(self.saves, self.shared) as a:
            with pytest.raises(NanLossDuringTrainingError):
                async with MonitoredSession(self.looks, self.shared) as b:
                    await self.see_nan(a, b)
            assert a.should_stop()
            if error is not None:
                raise error


@BACKGROUND
@pytest.mark.parametrize(
    ("save_steps", "kept", "aside"), [(1, [0, 1, 2, 3], [5]), (5, [0], [5]), (100, [0], [])]
)
async def test_what_another_worker_has_seen_to_be_nan_is_neither_saved_nor_kept(
    tmp_path: Path, save_steps: int, kept: list[int], aside: list[int], background: bool
) -> None:
    for name, error in (("end", None), ("error", KeyError("mine"))):
        pair = Pair(tmp_path / name, save_steps=save_steps, background=background)
        try:
            await pair.run(error)
        except KeyError:
            assert error is not None
        assert math.isnan(pair.model.weight)
        assert steps_in(tmp_path / name) == (kept, aside)


async def test_a_worker_that_goes_on_saves_no_more_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(tmp_path, save_steps=2, fails=False)
    async with MonitoredSession(pair.saves[:1], pair.shared) as a:
        async with MonitoredSession(pair.looks, pair.shared) as b:
            await pair.see_nan(a, b)
            assert b.should_stop()
        assert not a.should_stop()
        caplog.clear()
        for _ in range(4):
            await a.run([])
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warnings == [f"Step {n} is not saved: from 4 on the loss was NaN" for n in (7, 9)]
    assert steps_in(tmp_path) == ([0, 2], [5])


async def test_a_lost_session_goes_on_from_what_no_worker_has_seen_to_be_nan(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path, save_steps=1, fails=False)
    async with MonitoredSession(pair.saves[:1], pair.shared) as a:
        async with MonitoredSession(pair.looks, pair.shared) as b:
            await pair.see_nan(a, b)
        pair.is_lost = True
        await a.run([])
        assert (pair.model.restored, pair.model.weight) == ([3], 5.0)
    assert steps_in(tmp_path) == ([0, 1, 2, 3, 4], [5])
