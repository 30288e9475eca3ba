"""A pipeline that the program opens: sessions one after the other, and reading it besides."""

from __future__ import annotations

import pytest

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import batch, prefetch

from .inputs import Diary, until_stopped

pytestmark = pytest.mark.anyio


class FaultError(Exception):
    """What is made to happen."""


async def test_a_second_session_goes_on_behind_the_first() -> None:
    diary = Diary()
    async with prefetch(range(6), 2) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await session.run([])
                await session.run([])
        assert source.state_dict() == {"stage": "sequence", "items": 4}
        assert [item async for item in source] == [4, 5]
    assert diary.items == [0, 1, 2, 3]


async def test_a_session_goes_on_behind_what_was_looked_at() -> None:
    diary = Diary()
    async with prefetch(range(4), 2) as source:
        assert await anext(source) == 0
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            await session.run([])
            assert source.state_dict() == {"stage": "sequence", "items": 2}
            await until_stopped(session)
    assert diary.items == [1, 2, 3]


async def test_an_item_that_a_session_gave_back_costs_the_next_session_none() -> None:
    diary = Diary({3: FaultError()})
    async with prefetch(range(8), 3) as source:
        with pytest.raises(FaultError):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
        async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
            for _ in range(5):
                await session.run([])
    assert diary.items == [0, 1, 2, 3, 4, 5, 6]


async def test_an_item_that_a_session_gave_back_is_read_as_itself() -> None:
    diary = Diary({2: FaultError()})
    async with prefetch(range(4), 3) as source:
        with pytest.raises(FaultError):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
        assert [item async for item in source] == [1, 2, 3]


async def test_a_session_on_a_source_that_has_ended_ends_cleanly() -> None:
    diary = Diary()
    async with prefetch(range(3), 2) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await until_stopped(session)
    assert diary.items == [0, 1, 2]


async def test_what_was_read_ahead_of_a_stage_without_tasks_is_not_lost() -> None:
    diary = Diary()
    async with batch(range(8), 1) as source:
        for _ in range(2):
            async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
                await session.run([])
                await session.run([])
    assert diary.items == [0, 1, 2, 3]


async def test_the_position_before_the_first_draw_is_behind_what_was_looked_at() -> None:
    async with prefetch(range(4), 2) as source:
        await anext(source)
        async with MonitoredSession([FeedHook(source, "x")], Diary().creator):
            assert source.state_dict() == {"stage": "sequence", "items": 1}
