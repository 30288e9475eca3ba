"""session.batches: errors of the source, and where a loop may not be begun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynchooks import InputError, MonitoredSession

from ..hooks.inputs import Counted, Diary

pytestmark = pytest.mark.anyio


async def test_errors_of_the_source_leave_the_loop_as_themselves() -> None:
    failure = ZeroDivisionError("in the source")
    source, diary = Counted(2, failure), Diary()
    with pytest.raises(ZeroDivisionError) as caught:
        async with MonitoredSession([], diary.creator) as session:
            async for item in session.batches(source):
                await session.run([], {"x": item})
    assert caught.value is failure
    assert diary.items == [0, 1]
    assert source.log == ["open", "closed"]


async def test_an_error_in_closing_the_source_leaves_or_is_noted() -> None:
    def fails() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        async with MonitoredSession([], Diary().creator) as session:
            await anext(session.batches(fails()))
    with pytest.raises(KeyError) as caught:
        async with MonitoredSession([], Diary().creator) as session:
            await anext(session.batches(fails()))
            raise KeyError("first")
    assert caught.value.__notes__ == ["then, closing the input: OSError('cannot close')"]


async def test_an_empty_source_is_an_error() -> None:
    async with MonitoredSession([], Diary().creator) as session:
        with pytest.raises(InputError, match="a list of 0 has no items"):
            await anext(session.batches([]))


async def test_it_needs_an_open_session() -> None:
    session = MonitoredSession([], Diary().creator)
    with pytest.raises(RuntimeError, match=r"batches\(\) before the session was opened"):
        session.batches([1])
    async with session:
        for nonsense in (5, "text", None, {"a": 1}):
            with pytest.raises(TypeError, match="give a stage, an iterable or async iterable"):
                session.batches(nonsense)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"batches\(\) after the session was closed"):
        session.batches([1])
