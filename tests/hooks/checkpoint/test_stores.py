"""CheckpointSaverHook with object stores: resuming, going on, refusing."""

from __future__ import annotations

import logging
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
from asynchooks.checkpoints import CheckpointStore, ObjectStore
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


async def test_an_upload_that_fails_stops_training_and_leaves_the_older_ones(client: Any) -> None:
    store = Unreachable(client)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        await Training().run(40, store, [GoesDown(store)])
    assert max(each.step for each in CheckpointStore(client).checkpoints()) < 13


async def test_the_retention_and_the_best_hold_in_a_store(client: Any) -> None:
    losses = iter([0.5, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    options: dict[str, Any] = {
        "retention": Retention(max_to_keep=2, keep_best=1, mode="min"),
        "metric": lambda: next(losses),
        "background": False,
    }
    await Training().run(20, client, **options)
    assert [each.step for each in CheckpointStore(client).checkpoints()] == [4, 16, 20]


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
        ({"checkpoint_dir": "s3://b/r?sig=1"}, ValueError, "credentials belong"),
        ({"checkpoint_dir": "s4://b/run"}, ValueError, "'s4://b/run' is no address.*plain path"),
        ({"checkpoint_dir": "file:///here"}, ValueError, "plain path"),
        ({"checkpoint_dir": "hdfs://b/r"}, ValueError, "with s3, gs, az"),
    ],
)
async def test_wrong_places_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        CheckpointSaverHook(save_steps=1, **options)
