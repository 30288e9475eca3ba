"""The soak in small, on TensorFlow's graphs: a new one for each session."""

from __future__ import annotations

import gc

import pytest

from ..soak import open_tensorflow, openings
from ..support.afterwards import nothing_left

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_openings_leave_nothing_and_add_up_to_nothing() -> None:
    open_one = open_tensorflow()
    for _ in range(2):  # TensorFlow starts its pools of threads, and keeps them
        await open_one()
    gc.collect()
    gc.freeze()  # else most of the time goes into counting what TensorFlow holds
    try:
        async with nothing_left():
            readings = await openings(10, open_one)
    finally:
        gc.unfreeze()
    half, whole = readings[-3], readings[-1]
    assert whole.ours <= half.ours
    assert (whole.descriptors, whole.tasks) == (half.descriptors, half.tasks)
