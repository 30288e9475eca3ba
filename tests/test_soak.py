"""The soak in small: nothing of ours is left behind, and nothing of ours adds up."""

from __future__ import annotations

import gc

import pytest

from .soak import items, open_function, openings, steps
from .support.afterwards import nothing_left
from .support.readings import Reading, is_growing

pytestmark = pytest.mark.anyio


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["steps", "openings", "items"])
async def test_it_leaves_nothing_and_adds_up_to_nothing(what: str) -> None:
    """From half of the way to its end nothing was added; threads may be about to end."""
    gc.collect()
    gc.freeze()  # else most of the time goes into counting what TensorFlow and pytest hold
    async with nothing_left():
        if what == "steps":
            readings = await steps(10_000, save_steps=500)
        elif what == "openings":
            readings = await openings(150, open_function())
        else:
            readings = await items(100_000)
    half, whole = readings[-3], readings[-1]
    assert (whole.descriptors, whole.tasks) == (half.descriptors, half.tasks)
    if what == "items":  # buffers of 64 and 4 are filled more or less when it is looked
        assert abs(whole.ours - half.ours) < 100
        assert abs(whole.objects - half.objects) < 300
    else:
        assert whole.ours == half.ours
        assert not is_growing(readings[1:], "objects")


@pytest.mark.parametrize(
    ("row", "values", "grows"),
    [
        ("ours", [5, 6, 7], True),
        ("ours", [5, 6, 7, 6], False),
        ("ours", [5, 6, 7, 7], False),
        ("rss_bytes", [64 << 20, 66 << 20, 67 << 20, 69 << 20], True),
        ("rss_bytes", [64 << 20, 66 << 20, 67 << 20], False),
    ],
)
def test_what_rises_from_each_reading_to_the_next_beyond_the_noise_is_growing(
    row: str, values: list[int], grows: bool
) -> None:
    none = Reading(0, 0, 0, 0, 0, 0, 0, 0)
    assert is_growing([none._replace(**{row: value}) for value in values], row) is grows
