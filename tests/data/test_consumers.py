"""Consumers: what workers do with the items of one stage, and what a session may draw from."""

from typing import Any

import pytest

from asynchooks import (
    DataWaitHook,
    InputPositionHook,
)
from asynchooks.data import batch, prefetch, take

from .sources import read_all


@pytest.mark.parametrize("make", [lambda: take(range(6), 9), lambda: prefetch(range(6), 2)])
@pytest.mark.parametrize("beyond", [[0, 2, 3], [1, 4, 5]])
async def test_a_plain_loop_leaves_out_what_was_used_before(make: Any, beyond: list[int]) -> None:
    stage = make()
    stage.load_state_dict({**make().state_dict(), "beyond": beyond})
    assert await read_all(stage) == [each for each in range(6) if each not in beyond]


@pytest.mark.parametrize("hook", [DataWaitHook, InputPositionHook])
def test_a_stage_within_the_pipeline_is_not_what_a_session_draws_from(hook: Any) -> None:
    inner = batch(range(9), 2)
    hook(prefetch(inner, 2))
    with pytest.raises(ValueError, match="which another stage reads, .* give the last stage"):
        hook(inner)
    with pytest.raises(TypeError, match="give the stage that the session reads"):
        hook([1])
