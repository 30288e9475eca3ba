"""session.batches: several loops over one source, in one session and in several."""

from __future__ import annotations

import gc
from contextlib import aclosing

import pytest

from asynchooks import InputPositionHook, MonitoredSession, SharedSessionCreator
from asynchooks.data import prefetch

from ..hooks.inputs import Counted, Diary

pytestmark = pytest.mark.anyio


async def test_a_loop_that_was_closed_early_is_closed_once() -> None:
    source = Counted()
    async with MonitoredSession([], Diary().creator) as session:
        batches = session.batches(source)
        assert await anext(batches) == 0
        await batches.aclose()
        assert source.log == ["open", "closed"]
        await batches.aclose()
    assert source.log == ["open", "closed"]


async def test_a_loop_that_is_left_early_lets_go_of_its_source_where_it_is_told_to() -> None:
    source, diary = Counted(), Diary()
    async with MonitoredSession([], diary.creator) as session:
        async with aclosing(session.batches(source)) as batches:
            async for item in batches:
                await session.run([], {"x": item})
                if item == 2:
                    break
            assert source.log == ["open"]
        assert source.log == ["open", "closed"]
    assert diary.items == [0, 1, 2]


async def test_what_a_session_took_out_stays_its_own_when_another_begins_a_loop() -> None:
    source = prefetch(range(5), 2)
    creator = SharedSessionCreator(Diary().creator)
    hook = InputPositionHook(source)
    async with MonitoredSession([hook], creator) as a, MonitoredSession([], creator) as b:
        item = await anext(a.batches(source))  # it keeps no iterator
        gc.collect()
        assert await anext(b.batches(source)) == 1
        await a.run([], {"x": item})
        assert hook.state_dict() == {"stage": "sequence", "items": 1}


async def test_a_second_loop_leaves_the_first_its_item() -> None:
    source, diary = prefetch(range(4), 2), Diary()
    async with MonitoredSession([], diary.creator) as session:
        first, second = session.batches(source), session.batches(source)
        item = await anext(first)
        third = session.batches(source)
        await session.run([], {"x": await anext(third)})
        await session.run([], {"x": await anext(second)})
        await session.run([], {"x": item})
        assert [each async for each in first] == [3]
    assert diary.items == [1, 2, 0]
