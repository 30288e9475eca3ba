"""session.batches: what ends the loop, several loops over one source, and errors."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from asynchooks import (
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import batch, prefetch

from ..hooks.inputs import Counted, Diary, gated
from ..support.threads import threads_left


async def train(session: MonitoredSession, source: Any, until: int | None = None) -> None:
    """Run a step with each item, up to the last or that one."""
    async for item in session.batches(source):
        await session.run([], {"x": item})
        if item == until:
            break


@pytest.mark.parametrize(
    "make",
    [
        lambda: [0, 1, 2],
        lambda: iter(range(3)),
        lambda: prefetch(range(3), 5),
        lambda: batch(range(3), 1),
        lambda: gated(range(3), {}),
        lambda: lambda: gated(range(3), {}),
    ],
)
async def test_a_loop_ends_with_its_source(make: Callable[[], Any]) -> None:
    diary, source = Diary(), make()
    async with MonitoredSession([], diary.creator) as session:
        await train(session, source)
        if isinstance(source, list):  # which is read from its start again
            await train(session, source, 0)
            diary.items.pop()
        assert not session.should_stop()
    assert diary.items == [0, 1, 2]
    assert not threads_left()


async def test_a_loop_ends_at_the_limit_and_what_is_left_is_there_for_others() -> None:
    diary, source = Diary(), prefetch(range(9), 3)
    creator = SharedSessionCreator(diary.creator)
    async with MonitoredSession([], creator) as other:
        batches = other.batches(source)
        async with MonitoredSession([StopAtStepHook(last_step=4)], creator) as session:
            mine = session.batches(source)
            for _ in range(3):
                await session.run([], {"x": await anext(mine)})
            refused = await anext(mine)
            await other.run([], {"x": 99})
            await session.run([], {"x": refused})
        other.global_step.raise_limit(100)
        async for item in batches:
            await other.run([], {"x": item})
    assert diary.items == [0, 1, 2, 99, *range(3, 9)]


@pytest.mark.parametrize("how", ["break", "error", "end", "never begun", "aclose"])
async def test_the_source_is_closed_at_the_end_of_the_session(how: str) -> None:
    source = Counted()
    with pytest.raises(KeyError) if how == "error" else nullcontext():
        async with MonitoredSession([], Diary().creator) as session:
            batches = session.batches(source)
            if how != "never begun":
                async for _ in batches:
                    if how == "error":
                        raise KeyError
                    if how != "end":
                        break
                if how == "aclose":
                    for _ in range(2):
                        await batches.aclose()
                assert source.log == (["open"] if how == "break" else ["open", "closed"])
    assert source.log == ([] if how == "never begun" else ["open", "closed"])
    assert [item async for item in batches] == [], "after the session it has ended"


async def test_loops_one_after_the_other_go_on_with_the_source_and_what_no_run_has_used() -> None:
    source, diary = prefetch(range(7), 2), Diary()
    hook = InputPositionHook(source)
    async with MonitoredSession([hook], diary.creator) as session:
        async for _ in session.batches(source):
            break
        for last in (2, 4, None):
            await train(session, source, last)
        assert hook.state_dict()["items"] == 7
    assert diary.items == list(range(7))


@pytest.mark.parametrize("body_fails", [False, True])
async def test_an_error_in_closing_the_source_leaves_or_is_noted(body_fails: bool) -> None:
    def fails() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("cannot close")

    with pytest.raises(KeyError if body_fails else OSError) as caught:
        async with MonitoredSession([], Diary().creator) as session:
            await anext(session.batches(fails()))
            if body_fails:
                raise KeyError("first")
    if body_fails:
        assert caught.value.__notes__ == ["then, closing the input: OSError('cannot close')"]
