"""FeedHook's after_epoch: once for each pass, between the steps, also in several lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.data import Stage, batch, interleave, prefetch, repeat, shuffle, take

from ..support.faults import FaultError
from .inputs import Diary

pytestmark = pytest.mark.anyio

Make = Callable[[], Stage[Any]]


class Epochs(Diary):
    """A model that also remembers, by negative numbers, the ends of its passes."""

    def end_epoch(self, session: Any, epoch: int) -> None:
        self.items.append(-1 - epoch)


class AsyncEpochs(Epochs):
    async def end_epoch(self, session: Any, epoch: int) -> None:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        assert session.global_step.value == sum(each >= 0 for each in self.items)
        self.items.append(-1 - epoch)


async def train(
    model: Epochs, source: Any, path: Path | None = None, last: int = 999, every: int = 999
) -> list[int]:
    hooks: list[Any] = [
        FeedHook(source, "x", after_epoch=model.end_epoch), StopAtStepHook(last_step=last)
    ]  # fmt: skip
    if path is not None:
        saver = StateDictSaver(model=model)
        hooks.append(CheckpointSaverHook(str(path), save_steps=every, saver=saver))
    async with MonitoredSession(hooks, model.creator) as session:
        while not session.should_stop():
            await session.run([])
    return model.items


SOURCES: list[tuple[Make, list[int]]] = [
    (lambda: repeat([1, 2], 2), [1, 2, -1, 1, 2, -2]),
    (lambda: prefetch(repeat([1, 2], 2), 4), [1, 2, -1, 1, 2, -2]),
    (lambda: repeat(prefetch(iter_of(1, 2), 2), 2), [1, 2, -1, 1, 2, -2]),
    (lambda: prefetch(batch(repeat([1, 2, 3], 2), 2), 1), [1, 2, -1, 3, 1, 2, 3, -2]),
    (lambda: batch(repeat([1, 2, 3], 1), 2), [1, 2, 3, -1]),
    (lambda: repeat(batch([1, 2, 3], 2), 2), [1, 2, 3, -1, 1, 2, 3, -2]),
    (lambda: take(repeat([1, 2]), 3), [1, 2, -1, 1, -2]),
    (lambda: repeat(repeat([1], 2), 2), [1, 1, -1, 1, 1, -2]),
    (lambda: prefetch([1, 2], 1), [1, 2, -1]),
]


def iter_of(*items: int) -> Any:
    return lambda: iter(items)


@pytest.mark.parametrize("model", [Epochs, AsyncEpochs])
async def test_it_is_called_behind_the_last_item_of_each_pass(model: type[Epochs]) -> None:
    for make, expected in SOURCES:
        if model is AsyncEpochs and "batch" in repr(make()):
            continue  # it counts steps
        assert await train(model(), make()) == expected, make()


@pytest.mark.parametrize("place", range(len(SOURCES)))
async def test_in_any_two_lives_it_is_called_as_often_as_in_one(place: int, tmp_path: Path) -> None:
    make, whole = SOURCES[place]
    for last in range(1, 8):
        path = tmp_path / str(last)
        await train(Epochs(), make(), path, last)
        assert await train(Epochs(), make(), path) == whole, (last, make())
        assert await train(Epochs(), make(), path) == whole, "the data had ended"


async def test_shuffled_passes_end_at_the_same_items_in_each_life(tmp_path: Path) -> None:
    def make() -> Stage[Any]:
        return prefetch(shuffle(repeat(range(5), 3), 4, seed=1), 3)

    whole = await train(Epochs(), make())
    assert [place for place, item in enumerate(whole) if item < 0] == [5, 11, 17]
    for last in random.Random(0).sample(range(1, 15), 6):
        await train(Epochs(), make(), tmp_path / str(last), last)
        assert await train(Epochs(), make(), tmp_path / str(last)) == whole


async def test_a_model_that_goes_back_ends_its_passes_again(tmp_path: Path) -> None:
    model = Epochs({6: PreemptionError("lost"), 9: PreemptionError("lost")})
    items = await train(model, prefetch(repeat([1, 2, 3], 3), 2), tmp_path, every=2)
    assert items == [1, 2, 3, -1, 1, 2, 3, -2, 1, 2, 3, -3]


@pytest.mark.parametrize("num_workers", [1, 4])
async def test_workers_call_it_once_for_each_pass_while_no_step_runs(num_workers: int) -> None:
    in_step, ended, given = 0, [], []

    async def step(x: int) -> dict[str, Any]:
        nonlocal in_step
        in_step += 1
        for _ in range(x % 3):
            await anyio.lowlevel.checkpoint()
        given.append(x)
        in_step -= 1
        return {}

    async def end_epoch(session: Any, epoch: int) -> None:
        await anyio.lowlevel.checkpoint()
        assert in_step == 0
        ended.append(epoch)

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers)
    source = prefetch(repeat(range(10), 5), 4)

    async def work() -> None:
        hooks = [FeedHook(source, "x", after_epoch=end_epoch)]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as workers:
        for _ in range(num_workers):
            workers.start_soon(work)
    assert ended == list(range(5))
    assert sorted(given) == sorted(5 * list(range(10)))


@pytest.mark.parametrize("error", [FaultError("it failed"), StopIteration("its data")])
async def test_its_error_leaves_the_run_and_is_no_end_of_data(error: Exception) -> None:
    model = Epochs()

    def end_epoch(session: Any, epoch: int) -> None:
        raise error

    with pytest.raises((FaultError, RuntimeError), match="it failed|after_epoch of FeedHook let"):
        async with MonitoredSession(
            [FeedHook(repeat([1], 2), "x", after_epoch=end_epoch)], model.creator
        ) as session:
            while not session.should_stop():
                await session.run([])
    assert model.items == [1]


async def test_a_source_of_mixed_passes_and_what_is_no_function_are_refused() -> None:
    with pytest.raises(InputStateError, match="interleave.* mixes items of several passes"):
        await train(Epochs(), interleave([[1], [2]]))
    with pytest.raises(TypeError, match="after_epoch is 3; give a function of the session and"):
        FeedHook([1], after_epoch=3)  # type: ignore[arg-type]


async def test_a_function_may_take_the_number_of_its_pass(tmp_path: Path) -> None:
    calls: list[int] = []

    def items(epoch: int) -> list[int]:
        calls.append(epoch)
        return [10 * epoch, 10 * epoch + 1]

    def make() -> Stage[Any]:
        return prefetch(repeat(batch(items, 1), 3), 4)

    whole = await train(Epochs(), make())
    assert whole == [0, 1, -1, 10, 11, -2, 20, 21, -3]
    assert calls == [0, 1, 2]
    for last in range(1, 6):
        await train(Epochs(), make(), tmp_path / str(last), last)
        assert await train(Epochs(), make(), tmp_path / str(last)) == whole
    lost = Epochs({4: PreemptionError("lost"), 7: PreemptionError("lost")})
    assert await train(lost, make(), tmp_path / "lost", every=2) == whole
    nested = await train(Epochs(), repeat(repeat(items, 2), 2))
    assert nested == [0, 1, 10, 11, -1, 0, 1, 10, 11, -2]


async def test_a_function_is_given_no_number_that_it_does_not_ask_for() -> None:
    for make in (lambda: [1], lambda items=(1,): list(items), lambda *items: [1]):
        assert await train(Epochs(), repeat(make, 2)) == [1, -1, 1, -2]
