"""FeedHook's after_epoch: once for each pass, between the steps, also in several lives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    InputStateError,
    PreemptionError,
    StopAtStepHook,
)
from asynchooks.data import Stage, batch, interleave, prefetch, repeat, shuffle, take

from ..support.faults import FaultError
from .inputs import Diary, saving
from .training import run_session

Make = Callable[[], Stage[Any]]


class Epochs(Diary):
    """A model that also remembers, by negative numbers, the ends of its passes."""

    def end_epoch(self, session: Any, epoch: int) -> None:
        self.items.append(-1 - epoch)


class AsyncEpochs(Epochs):
    async def end_epoch(self, session: Any, epoch: int) -> None:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        self.items.append(-1 - epoch)


async def train(
    source: Any, path: Path | None = None, last: int = 999, *, model: Epochs | None = None
) -> list[int]:
    model = model or Epochs()
    hooks: list[Any] = [FeedHook(source, "x", after_epoch=model.end_epoch)]
    hooks += [StopAtStepHook(last_step=last)]
    hooks += [] if path is None else [saving(path, model, every=2)]
    await run_session(hooks, model.creator)
    return model.items


def by_epoch(epoch: int) -> list[int]:
    return [10 * epoch, 10 * epoch + 1]


SOURCES: list[tuple[Make, list[int]]] = [
    (lambda: prefetch(batch(repeat([1, 2, 3], 2), 2), 1), [1, 2, -1, 3, 1, 2, 3, -2]),
    (lambda: take(repeat([1, 2]), 3), [1, 2, -1, 1, -2]),
    (lambda: prefetch([1, 2], 1), [1, 2, -1]),
    (lambda: prefetch(repeat(batch(by_epoch, 1), 2), 4), [0, 1, -1, 10, 11, -2]),
    (lambda: repeat(repeat(by_epoch, 2), 2), [0, 1, 10, 11, -1, 0, 1, 10, 11, -2]),
    (lambda: prefetch(shuffle(repeat(range(3), 2), 2, seed=1), 3), []),  # in some order
]


@pytest.mark.parametrize("place", range(len(SOURCES)))
async def test_it_is_called_behind_the_last_item_of_each_pass_also_in_several_lives(
    place: int, tmp_path: Path
) -> None:
    make, whole = SOURCES[place]
    if not whole:
        whole = await train(make())
        assert (whole[3], whole[7]) == (-1, -2), "by count"
    assert await train(make(), model=AsyncEpochs()) == whole, make()
    for last in range(1, len(whole) - 1):
        path = tmp_path / str(last)
        await train(make(), path, last)
        assert await train(make(), path) == whole, (last, make())
    assert await train(make(), path) == whole, "the data had ended"


@pytest.mark.parametrize("calls", [(6, 9), (4, 7)])
async def test_a_model_that_goes_back_ends_its_passes_again(
    calls: tuple[int, ...], tmp_path: Path
) -> None:
    model = Epochs({call: PreemptionError("lost") for call in calls})
    items = await train(prefetch(repeat(by_epoch, 4), 2), tmp_path, model=model)
    assert items == [0, 1, -1, 10, 11, -2, 20, 21, -3, 30, 31, -4]


@pytest.mark.parametrize("error", [FaultError("it failed"), StopIteration("its data")])
async def test_its_error_leaves_the_run_and_is_no_end_of_data(error: Exception) -> None:
    def end_epoch(session: Any, epoch: int) -> None:
        raise error

    model = Epochs()
    hook = FeedHook(repeat([1], 2), "x", after_epoch=end_epoch)
    with pytest.raises((FaultError, RuntimeError), match="it failed|after_epoch of FeedHook let"):
        await run_session([hook], model.creator)
    assert model.items == [1]


async def test_a_source_of_mixed_passes_is_refused() -> None:
    with pytest.raises(InputStateError, match="interleave.* mixes items of several passes"):
        await train(interleave([[1], [2]]))
