"""Consumers: what workers do with the items of one stage, and what a session may draw from."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    DataWaitHook,
    FeedHook,
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
)
from asynchooks.data import batch, prefetch, take

from ..hooks.inputs import Diary, gated
from ..hooks.training import Calls
from ..support.faults import FaultError
from ..support.helpers import in_task
from .sources import read_all


async def test_an_item_that_was_not_used_goes_at_once_to_a_worker_that_waits() -> None:
    source, diary = prefetch(gated([7, 8], {8: anyio.Event()}), 2), Diary()
    creator, may_fail = SharedSessionCreator(diary.creator), anyio.Event()

    async def hold(_: Any) -> None:
        await may_fail.wait()
        raise FaultError

    async def fail() -> None:
        hooks = [FeedHook(source, "x"), Calls(before_run=hold)]
        async with MonitoredSession(hooks, creator) as session:
            with pytest.raises(FaultError):
                await session.run([])

    async with MonitoredSession([FeedHook(source, "x")], creator) as other:
        async with in_task(fail), in_task(other.run, []):
            assert diary.items == []
            may_fail.set()
    assert diary.items == [7]


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
