"""Grain's loaders and datasets as the input, resumed from their own state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import InputStateError, PreemptionError
from asynchooks.data import Stage, batch, prefetch

from ..support.threads import threads_left
from .trainings import trained_in_lives, trained_with

grain = pytest.importorskip("grain.python")
pytestmark = [
    pytest.mark.anyio,
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


every_kind = pytest.mark.parametrize("make", [loader, map_dataset, iter_dataset])


def expected(make: Callable[[], Any]) -> list[int]:
    return [int(part) for each in make() for part in each]


@every_kind
async def test_it_is_fed_in_its_order(make: Callable[[], Any]) -> None:
    diary = await trained_with(make())
    assert diary.items == expected(make)
    assert sorted(diary.items) == [i * i for i in range(30)]
    assert not threads_left()


@every_kind
async def test_a_resumed_training_goes_on_from_its_own_state(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    source = prefetch(make(), 2)
    diary = await trained_in_lives(lambda size: prefetch(make(), size), tmp_path, 0, 3, 3, 7, 99)
    assert diary.items == expected(make)
    await trained_with(source, last=2)
    assert "state" in source.state_dict(), "it is not counted"


@every_kind
async def test_it_goes_back_with_the_model(make: Callable[[], Any], tmp_path: Path) -> None:
    errors = {3: PreemptionError("lost"), 8: PreemptionError("lost")}
    diary = await trained_with(prefetch(make(), 3), tmp_path, errors=errors)
    assert diary.items == expected(make)


async def test_stages_around_it_resume_too(tmp_path: Path) -> None:
    def make(size: int) -> Stage[Any]:
        return prefetch(batch(map_dataset(), 2), size)

    diary = await trained_in_lives(make, tmp_path, 2, 5, 99)
    assert diary.items == expected(map_dataset)


async def test_its_state_is_refused_by_what_has_none() -> None:
    source = prefetch(map(int, range(5)), 1)
    source.load_state_dict({"stage": "iterable", "state": {"next_index": 3}})
    with pytest.raises(InputStateError, match="has no state of its own, and the saved position is"):
        await trained_with(source)
