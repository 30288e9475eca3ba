"""Items that go back into a pipeline that the program opened: their places, and its end."""

from __future__ import annotations

import contextlib

import pytest

from asynchooks import FeedHook, MonitoredSession, SharedSessionCreator
from asynchooks.data import batch, prefetch

from ..data.sources import Source
from ..support.afterwards import nothing_left
from .inputs import Diary, until_stopped

pytestmark = pytest.mark.anyio


class FaultError(Exception):
    """What is made to happen."""


async def test_the_programs_block_closes_what_was_read_ahead_for_a_next_session() -> None:
    source, diary = Source(None), Diary()
    async with nothing_left():
        async with batch(source.items(), 1) as stage:
            for _ in range(2):
                async with MonitoredSession([FeedHook(stage, "x")], diary.creator) as session:
                    await session.run([])
            assert not source.is_closed
        assert source.is_closed
    assert diary.items == [0, 1]


async def test_an_item_that_was_given_back_and_read_by_the_program_counts_as_used() -> None:
    diary = Diary({3: FaultError()})
    async with prefetch(range(9), 2) as source:
        with contextlib.suppress(FaultError):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
        assert await anext(source) == 2
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            await session.run([])
            assert source.state_dict() == {"stage": "sequence", "items": 4}
    assert diary.items == [0, 1, 3]


async def test_an_item_that_was_given_back_behind_used_ones_is_not_lost_by_the_next_session() -> (
    None
):
    diary = Diary({1: FaultError(), 4: FaultError()})
    creator = SharedSessionCreator(diary.creator)
    expected = {"stage": "sequence", "items": 0, "used_beyond": [1, 2]}
    async with prefetch(range(9), 3) as source:
        async with (
            MonitoredSession([FeedHook(source, "x")], creator) as fails,
            MonitoredSession([FeedHook(source, "x")], creator) as session,
        ):
            with pytest.raises(FaultError):
                await fails.run([])  # it has item 0 in hand
            await session.run([])
            await session.run([])
            assert source.state_dict() == expected
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            with pytest.raises(FaultError):
                await session.run([])
            assert source.state_dict() == expected
            await session.run([])
            assert source.state_dict() == {"stage": "sequence", "items": 3}
    assert diary.items == [1, 2, 0]


async def test_a_session_goes_on_with_a_source_that_the_program_has_let_go_of() -> None:
    source, diary = Source(6), Diary()
    async with nothing_left():
        stage = batch(source.items(), 1)
        async with MonitoredSession([FeedHook(stage, "x")], diary.creator) as session:
            async with stage:
                await session.run([])
            await until_stopped(session)
    assert diary.items == [0, 1, 2, 3, 4, 5]
    assert source.is_closed
