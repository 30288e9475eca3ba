"""Grain's loaders and datasets as the input, resumed from their own state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import PreemptionError
from asynchooks.data import batch, prefetch

from ..hooks.inputs import trained_in_lives, trained_with
from ..support.threads import threads_left

grain = pytest.importorskip("grain.python")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Grain's own, of which there are many
]


class Squares:
    """A source of records."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return index * index

    def __repr__(self) -> str:
        return "Squares()"  # without an address: it is in the loader's state


def loader() -> Any:
    sampler = grain.IndexSampler(30, grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    return grain.DataLoader(
        data_source=Squares(), sampler=sampler, operations=[grain.Batch(2)], worker_count=0
    )


def map_dataset() -> Any:
    return grain.MapDataset.source(Squares()).shuffle(seed=5).batch(2)


def iter_dataset() -> Any:
    return map_dataset().to_iter_dataset()


@pytest.mark.parametrize("make", [loader, map_dataset, iter_dataset])
async def test_it_is_fed_in_its_order_resumes_from_its_own_state_and_goes_back_with_the_model(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    expected = [int(part) for each in make() for part in each]
    assert (await trained_with(make())).items == expected
    assert sorted(expected) == [i * i for i in range(30)]
    assert not threads_left()
    stages = lambda size: prefetch(batch(make(), 2), size)  # noqa: E731
    assert (await trained_in_lives(stages, tmp_path / "lives", 0, 2, 5, 99)).items == expected
    source = prefetch(make(), 2)
    await trained_with(source, last=2)
    assert "state" in source.state_dict(), "it is not counted"
    errors = {3: PreemptionError("lost"), 8: PreemptionError("lost")}
    lost = await trained_with(prefetch(make(), 3), tmp_path / "c", errors=errors)
    assert lost.items == expected
