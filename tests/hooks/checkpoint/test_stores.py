"""CheckpointSaverHook with object stores: resuming, going on, refusing."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import CheckpointError, CheckpointSaverHook
from asynchooks.checkpoints import CheckpointStore, ObjectStore

from ..savers import Held

obstore = pytest.importorskip("obstore")

pytestmark = pytest.mark.anyio


@pytest.fixture
def client() -> Any:
    return obstore.store.MemoryStore()


async def train(client: Any, num_runs: int, **options: Any) -> int:
    """Train a new model on; returns the step where it began."""
    held = Held(client, save_steps=4, **options)
    async with held.session as session:
        begun: int = session.global_step.value
        assert held.cell.value == begun
        await held.run(num_runs)
    return begun


@pytest.mark.parametrize("background", [False, True])
async def test_a_training_resumes_from_a_store(client: Any, background: bool) -> None:
    begun = [await train(client, 5, background=background) for _ in range(3)]
    assert begun == [0, 5, 10]
    steps = [each.step for each in CheckpointStore(client).checkpoints()]
    assert steps == [5, 8, 10, 12, 15]


async def test_an_upload_that_fails_stops_training_and_leaves_the_older_ones(client: Any) -> None:
    class Unreachable(ObjectStore):
        is_down = False

        def put_file(self, key: str, path: str) -> None:
            if self.is_down:
                raise CheckpointError("the store cannot be reached")
            super().put_file(key, path)

    store: Any = Unreachable(client)
    held = Held(store, save_steps=4)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        async with held.session as session:
            await held.run(4)
            await held.wait_idle()
            store.is_down = True
            while not session.should_stop():
                await held.run(1)
                await held.wait_idle()
    assert [each.step for each in CheckpointStore(client).checkpoints()] == [0, 4]


async def test_a_cancelled_training_gives_the_store_back(client: Any) -> None:
    held = Held(client, save_steps=4)
    with anyio.CancelScope() as scope:
        async with held.session:
            await held.run(6)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert await train(client, 1) == 4


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("s3://b/r?sig=1", "credentials belong"),
        ("s4://b/run", "'s4://b/run' is no address.*plain path"),
        ("file:///here", "plain path"),
    ],
)
def test_wrong_places_are_refused(address: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CheckpointSaverHook(address, save_steps=1)
