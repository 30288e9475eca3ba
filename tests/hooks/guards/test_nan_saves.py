"""NanTensorHook beside a CheckpointSaverHook: what is not saved, also by another worker."""

from __future__ import annotations

import logging
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
    SharedSessionCreator,
)

from ..preemptions import saving
from .test_nan_rollback import Weights, steps_in, train

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("background", [False, True])
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


@pytest.mark.parametrize("background", [False, True])
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


async def test_a_model_that_was_restored_meanwhile_is_saved_again(tmp_path: Path) -> None:
    """The first worker opens late, and brings the model back to a checkpoint."""
    await train(tmp_path, Weights(), last_step=3)
    pair = Pair(tmp_path, save_steps=1, fails=False)
    pair.model.breaks = [2]
    async with MonitoredSession(pair.looks, pair.shared) as b:
        for _ in range(3):
            await b.run([])
        assert b.should_stop()
        async with MonitoredSession(pair.saves, pair.shared) as a:
            await a.run([])
    assert steps_in(tmp_path) == ([0, 1, 2, 3, 4], [])


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
