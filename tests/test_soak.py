"""The soak in small: nothing of ours is left behind, and nothing of ours adds up."""

import gc

import pytest

from .soak import items, open_function, openings, steps
from .support.afterwards import nothing_left
from .support.readings import objects_grow


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("what", ["steps", "openings", "items"])
async def test_it_leaves_nothing_and_adds_up_to_nothing(what: str, times: int) -> None:
    """From half of the way to its end nothing was added; threads may be about to end."""
    gc.collect()
    gc.freeze()  # else most of the time goes into counting what TensorFlow and pytest hold
    async with nothing_left():
        if what == "steps":
            readings = await steps(5_000 * times, save_steps=500)
        elif what == "openings":
            readings = await openings(80 * times, open_function())
        else:
            readings = await items(50_000 * times)
    half, whole = readings[-3], readings[-1]
    assert (whole.descriptors, whole.tasks) == (half.descriptors, half.tasks)
    if what == "items":  # buffers of 64 and 4 are filled more or less when it is looked
        assert abs(whole.ours - half.ours) < 100
        assert abs(whole.objects - half.objects) < 300
    else:
        assert whole.ours == half.ours
        assert not objects_grow(readings[1:])
