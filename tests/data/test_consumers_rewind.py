"""Consumers of a pipeline that goes back: who waits, or has an item in hand, meanwhile."""

from __future__ import annotations

import weakref

import anyio
import pytest

from asynchooks.data import _stage, prefetch, shuffle
from asynchooks.data._consumers import Consumer, Consumers, CurrentRun, consumers_of

from ..hooks.inputs import FromFunction, gated
from ..support.helpers import settle

pytestmark = pytest.mark.anyio


class EndedRun(CurrentRun):
    """In a thread, and its task has not come back."""

    def has_ended(self) -> bool:
        return True


async def test_what_comes_for_whoever_waits_while_the_pipeline_goes_back_is_not_given_out() -> None:
    gate = anyio.Event()
    consumers = consumers_of(prefetch(FromFunction(lambda: gated(range(5), {2: gate})), 1))
    trains, waits = consumers.join(CurrentRun(None)), consumers.join(CurrentRun(None))
    got: list[int] = []

    async def wait() -> None:
        got.append(await waits.take(None))

    assert await trains.take(None) == 0
    trains.use()
    saved = consumers.state_dict()
    assert await trains.take(None) == 1
    trains.use()
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await settle()
        consumers.load_state_dict(saved)  # another worker has lost the session
        gate.set()
    waits.use()
    for _ in range(3):
        got.append(await trains.take(None))
        trains.use()
    with pytest.raises(StopAsyncIteration):
        await trains.take(None)
    assert got == [1, 2, 3, 4]
    assert consumers.state_dict()["items"] == 5
    await trains.leave()
    await waits.leave()


def drawn_from(num_items: int) -> tuple[Consumers, Consumer, Consumer]:
    """With two who draw: a hook, and a loop over `session.batches`."""
    consumers = consumers_of(prefetch(range(num_items), 2))
    hook, batches = (
        consumers.join(CurrentRun(None)),
        consumers.join(CurrentRun(None), weakref.ref(consumers)),
    )
    return consumers, hook, batches


async def use_next(consumer: Consumer, count: int) -> list[int]:
    got = []
    for _ in range(count):
        got.append(await consumer.take(None))
        consumer.use()
    return got


@pytest.mark.parametrize("is_drawn_from", [False, True])
async def test_a_run_that_ends_after_the_way_back_has_used_nothing(is_drawn_from: bool) -> None:
    consumers, late, other = drawn_from(6)
    await use_next(other, 1)
    saved = consumers.state_dict()
    await use_next(other, 1)
    assert await late.take(None) == 2
    consumers.load_state_dict(saved)
    got = await use_next(other, 1) if is_drawn_from else []
    late.use()
    assert consumers.state_dict()["items"] == 1 + len(got)
    assert "used_beyond" not in consumers.state_dict()
    assert got + await use_next(late, 5 - len(got)) == [1, 2, 3, 4, 5]
    await late.leave()
    await other.leave()


async def test_an_item_given_back_after_the_way_back_is_not_given_out_once_more() -> None:
    consumers, late, other = drawn_from(4)
    await use_next(other, 1)
    saved = consumers.state_dict()
    assert await late.take(None) == 1
    await use_next(other, 1)
    consumers.load_state_dict(saved)
    assert await use_next(other, 1) == [1]
    late.give_back()
    assert await use_next(other, 2) == [2, 3]
    with pytest.raises(StopAsyncIteration):
        await other.take(None)
    await late.leave()
    await other.leave()


async def test_before_the_next_draw_the_position_is_that_to_which_it_goes_back() -> None:
    consumers, hook, batches = drawn_from(8)
    assert await batches.take(None) == 0
    await use_next(hook, 1)
    saved = consumers.state_dict()
    assert saved == {"stage": "sequence", "items": 0, "used_beyond": [1]}
    assert await use_next(hook, 2) == [2, 3]
    consumers.load_state_dict(saved)
    assert consumers.state_dict() == saved
    batches.use()  # its run was made again
    assert consumers.state_dict() == {**saved, "used_beyond": [0, 1]}
    assert await use_next(hook, 6) == [2, 3, 4, 5, 6, 7]
    assert consumers.state_dict() == {"stage": "sequence", "items": 8}
    await hook.leave()
    await batches.leave()


@pytest.mark.parametrize("uses_at_once", [True, False])
async def test_what_a_loop_has_in_hand_comes_once_wherever_the_pipeline_goes_back_to(
    uses_at_once: bool,
) -> None:
    consumers, hook, batches = drawn_from(8)
    await use_next(hook, 2)
    saved = consumers.state_dict()
    await use_next(hook, 2)
    assert await batches.take(None) == 4
    consumers.load_state_dict(saved)
    if uses_at_once:
        batches.use()
        assert consumers.state_dict() == {"stage": "sequence", "items": 2, "used_beyond": [2]}
    assert await use_next(hook, 3) == [2, 3, 5]
    if not uses_at_once:
        assert consumers.state_dict() == {"stage": "sequence", "items": 4, "used_beyond": [1]}
        assert await batches.take(None) == 4
        batches.use()
    assert consumers.state_dict() == {"stage": "sequence", "items": 6}
    assert await use_next(hook, 2) == [6, 7]
    await hook.leave()
    await batches.leave()


@pytest.mark.parametrize("is_drawn_from", [False, True])
async def test_what_a_loop_gives_back_after_the_way_back_comes_once_more(
    is_drawn_from: bool,
) -> None:
    consumers, hook, batches = drawn_from(6)
    await use_next(hook, 1)
    saved = consumers.state_dict()
    await use_next(hook, 2)
    assert await batches.take(None) == 3
    consumers.load_state_dict(saved)
    if is_drawn_from:
        assert await use_next(hook, 1) == [1]
    batches.give_back()  # the loop was left
    assert await use_next(hook, 4 if is_drawn_from else 5) == [1, 2, 3, 4, 5][is_drawn_from:]
    assert consumers.state_dict() == {"stage": "sequence", "items": 6}
    await hook.leave()
    await batches.leave()


async def test_a_second_way_back_forgets_what_was_made_again_after_the_first() -> None:
    consumers, hook, batches = drawn_from(8)
    await use_next(hook, 2)
    saved = consumers.state_dict()
    await use_next(hook, 2)
    assert await batches.take(None) == 4
    consumers.load_state_dict(saved)
    batches.use()
    consumers.load_state_dict(saved)
    assert consumers.state_dict() == saved
    assert await use_next(hook, 6) == [2, 3, 4, 5, 6, 7]
    await hook.leave()
    await batches.leave()


async def test_places_of_returned_items_are_forgotten_on_the_way_back() -> None:
    consumers, hook, other = drawn_from(8)
    await use_next(hook, 1)
    saved = consumers.state_dict()
    await use_next(hook, 2)
    await other.take(None)
    other.give_back()
    consumers.load_state_dict(saved)
    for number in range(1, 5):
        assert await use_next(hook, 1) == [number]
        assert consumers.state_dict() == {"stage": "sequence", "items": number + 1}
    await hook.leave()
    await other.leave()


async def test_a_run_that_has_ended_before_the_way_back_is_not_in_the_position_behind_it() -> None:
    consumers, _, other = drawn_from(8)
    late = consumers.join(EndedRun(None))
    await use_next(other, 1)
    saved = consumers.state_dict()
    await use_next(other, 2)
    assert await late.take(None) == 3
    assert consumers.state_dict() == {"stage": "sequence", "items": 4}
    consumers.load_state_dict(saved)
    await use_next(other, 1)
    assert consumers.state_dict() == {"stage": "sequence", "items": 2}
    await late.leave()
    await other.leave()


async def test_what_a_loop_has_from_before_an_earlier_way_back_stands_for_no_item() -> None:
    consumers, hook, batches = drawn_from(9)
    await use_next(hook, 3)
    assert await batches.take(None) == 3
    consumers.load_state_dict({"stage": "sequence", "items": 1})  # of a checkpoint long ago
    await use_next(hook, 1)
    saved = consumers.state_dict()
    await use_next(hook, 1)
    consumers.load_state_dict(saved)
    batches.use()
    assert consumers.state_dict() == saved == {"stage": "sequence", "items": 2}
    assert await use_next(hook, 7) == [2, 3, 4, 5, 6, 7, 8]
    await hook.leave()
    await batches.leave()


async def test_a_pipeline_that_went_back_remembers_no_more_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_stage, "TRIM_EVERY", 8)
    consumers = consumers_of(shuffle(range(200), 4, 1))
    hook = consumers.join(CurrentRun(None))
    await use_next(hook, 1)
    saved = consumers.state_dict()
    for _ in range(2):
        for _ in range(100):
            await use_next(hook, 1)
            assert len(consumers.stage._log) <= 8 + 4  # type: ignore[attr-defined]
        consumers.load_state_dict(saved)
    await hook.leave()
