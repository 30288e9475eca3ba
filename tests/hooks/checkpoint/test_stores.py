"""CheckpointSaverHook with object stores and mirrors: resuming, going on, refusing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunHook,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory, CheckpointStore, ObjectStore
from asynchooks.data import shuffle

obstore = pytest.importorskip("obstore")

pytestmark = pytest.mark.anyio


@pytest.fixture
def client() -> Any:
    return obstore.store.MemoryStore()


class Training:
    """A model whose bits depend on the order of all items."""

    def __init__(self) -> None:
        self.weights = np.zeros(5)

    def step(self, item: int) -> dict[str, float]:
        self.weights[:] = np.sin(self.weights + item + np.arange(5))
        return {"loss": float(self.weights[0])}

    async def run(
        self, last_step: int, place: Any, more: Iterable[SessionRunHook] = (), **options: Any
    ) -> int:
        """Train, and return the step at which it began."""
        options = {"save_steps": 4, "background": True} | options
        saver = CheckpointSaverHook(
            place, saver=StateDictSaver(model={"w": self.weights}), **options
        )
        source = FeedHook(shuffle(range(1000), 32, seed=3), "item")
        hooks = [source, saver, *more, StopAtStepHook(last_step=last_step)]
        async with MonitoredSession(hooks, FunctionSessionCreator(self.step)) as session:
            first: int = session.global_step.value
            while not session.should_stop():
                await session.run("loss")
        return first


async def whole(last_step: int, path: Path) -> bytes:
    training = Training()
    await training.run(last_step, path / "whole")
    return training.weights.tobytes()


@pytest.mark.parametrize("background", [False, True])
async def test_a_training_resumes_from_a_store_with_the_same_bits(
    client: Any, background: bool, tmp_path: Path
) -> None:
    first, second = Training(), Training()
    assert await first.run(10, client, background=background) == 0
    assert await second.run(23, client, background=background) == 10
    assert second.weights.tobytes() == await whole(23, tmp_path)


async def test_a_mirror_resumes_where_the_directory_is_gone_or_older(
    client: Any, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    await Training().run(10, here, mirror=client)
    assert await Training().run(17, there, mirror=client) == 10
    assert await Training().run(20, here, mirror=client) == 17  # its own newest is of step 10
    shutil.rmtree(here)
    last = Training()
    assert await last.run(23, here, mirror=client) == 20
    assert last.weights.tobytes() == await whole(23, tmp_path)
    for place in (CheckpointDirectory(here), CheckpointStore(client)):
        newest = place.newest_intact()
        assert newest is not None
        assert newest.step == 23


class Unreachable(ObjectStore):
    """A store that loses its connection after a while."""

    is_down = False

    def put_file(self, key: str, path: str) -> None:
        if self.is_down:
            raise CheckpointError("the store cannot be reached")
        super().put_file(key, path)


class GoesDown(SessionRunHook):
    def __init__(self, store: Unreachable) -> None:
        self._store = store

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self._store.is_down = run_context.global_step.value >= 6


async def test_a_mirror_that_cannot_be_reached_stops_nothing_and_catches_up(
    client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Unreachable(client)
    await Training().run(13, tmp_path / "here", [GoesDown(store)], mirror=store)
    assert "are not copied to MemoryStore://" in caplog.text
    here, there = CheckpointDirectory(tmp_path / "here"), CheckpointStore(client)
    assert [each.step for each in here.checkpoints()][-1] == 13
    assert max((each.step for each in there.checkpoints()), default=0) < 13
    store.is_down = False
    assert await Training().run(14, tmp_path / "here", mirror=store) == 13
    steps = [each.step for each in here.checkpoints()]
    assert [each.step for each in there.checkpoints()] == steps


async def test_an_upload_that_fails_stops_training_and_leaves_the_older_ones(client: Any) -> None:
    store = Unreachable(client)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        await Training().run(40, store, [GoesDown(store)])
    assert max(each.step for each in CheckpointStore(client).checkpoints()) < 13


async def test_a_mirror_of_another_training_is_refused(client: Any, tmp_path: Path) -> None:
    await Training().run(10, tmp_path / "a", mirror=client)
    await Training().run(7, tmp_path / "b")
    with pytest.raises(CheckpointError, match="has checkpoints of another training"):
        await Training().run(20, tmp_path / "b", mirror=client)
    assert await Training().run(8, tmp_path / "b") == 7


async def test_the_retention_and_the_best_hold_in_both_places(client: Any, tmp_path: Path) -> None:
    losses = iter([0.5, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    options: dict[str, Any] = {
        "retention": Retention(max_to_keep=2, keep_best=1, mode="min"),
        "metric": lambda: next(losses),
        "background": False,
    }
    await Training().run(20, tmp_path / "here", mirror=client, **options)
    steps = [each.step for each in CheckpointDirectory(tmp_path / "here").checkpoints()]
    assert steps == [4, 16, 20]
    assert [each.step for each in CheckpointStore(client).checkpoints()] == steps


async def test_a_second_session_with_the_store_is_refused(client: Any) -> None:
    entered, refused = anyio.Event(), anyio.Event()

    class Waits(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            entered.set()
            await refused.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(Training().run, 8, client, [Waits()])
        await entered.wait()
        with pytest.raises(CheckpointInUseError, match="this process uses it already"):
            await Training().run(8, client)
        refused.set()
    assert await Training().run(9, client) == 8


async def test_a_cancelled_training_gives_the_store_back(client: Any) -> None:
    class Cancels(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step.value == 6:
                scope.cancel()

    with anyio.CancelScope() as scope:
        await Training().run(20, client, [Cancels()])
    assert scope.cancelled_caught
    assert await Training().run(20, client) >= 4


async def test_the_log_names_the_store(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    await Training().run(4, client)
    await Training().run(8, client)
    assert "Resuming from step 4 of MemoryStore:///0000000002/model.ckpt-4." in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"checkpoint_dir": "s3://b/run", "mirror": "s3://b/run"},
            ValueError,
            "or the store alone",
        ),
        ({"checkpoint_dir": "here", "mirror": "there"}, TypeError, "mirror is 'there'"),
        ({"checkpoint_dir": "here", "mirror": 3}, TypeError, "mirror is 3"),
        ({"checkpoint_dir": "s3://b/r?sig=1"}, ValueError, "credentials belong"),
        ({"checkpoint_dir": "s4://b/run"}, ValueError, "'s4://b/run' is no address.*plain path"),
        ({"checkpoint_dir": "file:///here"}, ValueError, "plain path"),
        ({"checkpoint_dir": "here", "mirror": "hdfs://b/r"}, ValueError, "with s3, gs, az"),
    ],
)
async def test_wrong_places_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        CheckpointSaverHook(save_steps=1, **options)
