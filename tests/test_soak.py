"""The soak in small: nothing of ours is left behind, and nothing of ours adds up."""

from __future__ import annotations

import gc

import pytest

from .soak import items, open_function, openings, steps
from .support.afterwards import nothing_left
from .support.faults import LOOPS
from .support.readings import Reading, is_growing

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]


@pytest.fixture(autouse=True)
def _only_what_is_new_is_counted() -> None:
    """Else most of the time goes into counting what TensorFlow and pytest hold."""
    gc.collect()
    gc.freeze()


def check_flat(readings: list[Reading]) -> None:
    """From half of the way to its end nothing was added; threads may be about to end."""
    half, whole = readings[-3], readings[-1]
    assert whole.ours == half.ours
    assert whole.descriptors == half.descriptors
    assert whole.tasks == half.tasks
    assert not is_growing(readings[1:], "objects")


async def test_steps_with_all_hooks_leave_nothing_and_add_up_to_nothing() -> None:
    async with nothing_left():
        readings = await steps(20_000, save_steps=1000)
    check_flat(readings)


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_openings_with_all_hooks_leave_nothing_and_add_up_to_nothing() -> None:
    async with nothing_left():
        readings = await openings(300, open_function())
    check_flat(readings)


async def test_items_of_input_leave_nothing_and_add_up_to_nothing() -> None:
    async with nothing_left():
        readings = await items(200_000)
    half, whole = readings[-3], readings[-1]
    assert (whole.descriptors, whole.tasks) == (half.descriptors, half.tasks)
    # buffers are filled more or less when it is looked
    assert abs(whole.ours - half.ours) < 20
    assert abs(whole.objects - half.objects) < 300


def reading(done: int, ours: int, rss_bytes: int) -> Reading:
    return Reading(done, rss_bytes, 0, 0, ours, 0, 0, 0)


def test_what_rises_from_each_reading_to_the_next_is_growing() -> None:
    readings = [reading(1, 5, 0), reading(2, 6, 0), reading(3, 7, 0)]
    assert is_growing(readings, "ours")
    assert not is_growing([*readings, reading(4, 6, 0)], "ours")
    assert not is_growing([*readings, reading(4, 7, 0)], "ours")


def test_a_rise_within_the_noise_is_none() -> None:
    mebibytes = [64 << 20, 66 << 20, 67 << 20, 69 << 20]
    readings = [reading(n, 0, each) for n, each in enumerate(mebibytes)]
    assert is_growing(readings, "rss_bytes")
    assert not is_growing(readings[:3], "rss_bytes")
