"""CheckpointSaverHook: savers that are missing, failed saves, and a cancellation during a save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import asynchooks
from asynchooks import CheckpointSaverListener

from .models import ChiefSessionCreator, Moments, counting_model, monitored
from .test_checkpoint_saver import saved_steps, saver_of

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
CheckpointSaverHook = asynchooks.CheckpointSaverHook


class FailsOnce(CheckpointSaverListener):
    """Raises at its n-th call of one moment."""

    def __init__(self, moment: str, nth: int) -> None:
        self._moment = moment
        self._left = nth
        self.steps: list[tuple[str, int]] = []

    async def before_save(self, session: Any, global_step_value: int) -> None:
        self._play("before_save", global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        self._play("after_save", global_step_value)

    def _play(self, moment: str, step: int) -> None:
        self.steps.append((moment, step))
        self._left -= moment == self._moment
        if self._left == 0 and moment == self._moment:
            raise ZeroDivisionError(moment)


async def test_a_save_that_fails_before_it_is_written_is_due_again(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("before_save", 2)
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[listener]
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(ZeroDivisionError, match="before_save") as caught:
            await session.run(model.train_op)
        assert caught.value.__notes__ == [
            "in the listener's FailsOnce.before_save",
            "in after_run of CheckpointSaverHook",
        ]
        assert saved_steps(tmp_path) == [0]
        await session.run(model.train_op)
        assert saved_steps(tmp_path) == [0, 3], "at the next run, not two steps later"
    assert saved_steps(tmp_path) == [0, 3]


class FailingSaver:
    """A saver whose n-th save fails before it writes anything."""

    def __init__(self, saver: Any, nth: int) -> None:
        self._saver = saver
        self._left = nth

    @property
    def saver_def(self) -> Any:
        return self._saver.saver_def

    def save(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")
        return self._saver.save(*args, **options)


async def test_a_save_that_the_saver_fails_is_due_again(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("nothing", 0)
    hook = CheckpointSaverHook(
        str(tmp_path),
        save_steps=2,
        saver=FailingSaver(saver_of(model), 2),
        listeners=[listener],
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="the disk is full") as caught:
            await session.run(model.train_op)
        assert "in after_run of CheckpointSaverHook" in caught.value.__notes__
        await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 3]
    before, after = "before_save", "after_save"
    assert listener.steps == [(before, 0), (after, 0), (before, 2), (before, 3), (after, 3)]


async def test_a_step_that_was_not_saved_when_it_was_due_is_saved_at_the_end(
    tmp_path: Path,
) -> None:
    model = counting_model()
    saver = FailingSaver(saver_of(model), 2)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 2]


async def test_a_step_counts_as_saved_when_only_after_save_fails(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("after_save", 2)
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[listener]
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(ZeroDivisionError, match="after_save"):
            await session.run(model.train_op)
        await session.run(model.train_op)
        assert saved_steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    ("nth", "moment", "steps"), [(1, "after_create_session", []), (2, "end", [0])]
)
async def test_a_failed_save_names_hook_and_moment(
    nth: int, moment: str, steps: list[int], tmp_path: Path
) -> None:
    model = counting_model()
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=9, saver=FailingSaver(saver_of(model), nth)
    )
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        async with monitored(model.graph, [hook]) as session:
            await session.run(model.train_op)
    assert f"in {moment} of CheckpointSaverHook" in caught.value.__notes__
    assert saved_steps(tmp_path) == steps


async def test_a_save_that_failed_delays_no_worker(tmp_path: Path) -> None:
    model = counting_model()
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2, saver=FailingSaver(saver_of(model), 2))
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            await session.run(model.train_op)
        assert not session.global_step.statistics().is_exclusive


async def test_a_directory_below_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = str(tmp_path / "file" / "model")
    model = counting_model()
    hook = CheckpointSaverHook(directory, save_steps=1, saver=saver_of(model))
    with pytest.raises(tf.errors.OpError) as caught:
        await monitored(model.graph, [hook]).__aenter__()
    notes = "\n".join(caught.value.__notes__)
    assert repr(directory) in notes
    assert "in begin of CheckpointSaverHook" in notes


@pytest.mark.parametrize("num_savers", [0, 2])
async def test_the_collection_must_hold_one_saver(num_savers: int, tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(num_savers):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        scaffold = v1.train.Scaffold(saver=v1.train.Saver())
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    with pytest.raises(RuntimeError, match=f"SAVERS holds {num_savers} savers, expected one"):
        await monitored(model.graph, [hook], ChiefSessionCreator(scaffold)).__aenter__()


class Blocks(CheckpointSaverListener):
    """Blocks a thread at one moment of the save of step 1 until it is let go on."""

    def __init__(self, moment: str, saver: Any) -> None:
        self._moment = moment
        self._saver = saver
        self.started, self.released = threading.Event(), threading.Event()

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("after_save", global_step_value)

    @property
    def saver_def(self) -> Any:
        return self._saver.saver_def

    def save(self, *args: Any, global_step: int, **options: Any) -> Any:
        self._play("save", global_step)
        return self._saver.save(*args, global_step=global_step, **options)

    def _play(self, moment: str, step: int) -> None:
        if moment == self._moment and step == 1:
            self.started.set()
            assert self.released.wait(timeout=60)


@pytest.mark.parametrize(
    ("moment", "steps"), [("before_save", [0]), ("save", [0, 1]), ("after_save", [0, 1])]
)
async def test_a_cancellation_waits_for_what_is_under_way_and_then_leaves(
    moment: str, steps: list[int], tmp_path: Path
) -> None:
    model = counting_model()
    blocks = Blocks(moment, saver_of(model))
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1, saver=blocks, listeners=[blocks])
    log: list[str] = []
    look = Moments(after_run=lambda *_: log.append("after_run of the next hook"))

    async def train() -> None:
        try:
            async with monitored(model.graph, [hook, look]) as session:
                await session.run(model.train_op)
                log.append("the run returned")
        finally:
            log.append(f"left, released: {blocks.released.is_set()}")

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await anyio.to_thread.run_sync(blocks.started.wait)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert log == []
            blocks.released.set()
    assert log == ["left, released: True"]
    assert saved_steps(tmp_path) == steps


async def test_a_coroutine_listener_in_tensorflow_s_hook_is_refused(tmp_path: Path) -> None:
    """It would never be awaited, and the coroutine, which is true, would end training."""
    listeners = [CheckpointSaverListener()]
    hook = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=listeners)
    with pytest.raises(TypeError, match="coroutine listener .* give both to asynchooks.Checkpoint"):
        monitored(counting_model().graph, [hook])
