"""The end of rollouts, however it comes: sources are closed, and no task, thread or box is left."""

from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import shielded

from ...support.afterwards import nothing_left
from ...support.helpers import turns
from ..sources import Source
from .learning import GenerationError, Learner, Sandboxes, log_of, made


def boxes_in_turns() -> Sandboxes:
    """Their creation and deletion take a few turns of the event loop."""
    return Sandboxes(lambda secs: turns(3), lambda: 0.0)


@pytest.mark.parametrize("why", ["data", "left", "error", "error of accept", "cancel"])
@pytest.mark.parametrize("kind", ["items", "items_in_thread", "items_in_group"])
async def test_the_source_is_closed_and_nothing_is_left(kind: str, why: str) -> None:
    boxes, source = boxes_in_turns(), Source(40)

    async def answer(item: int) -> int:
        async with shielded(boxes.sandbox()):
            await turns(1 + item % 4)
            if why == "error" and item == 11:
                raise GenerationError
        return item

    def accept(item: int) -> bool:
        if why == "error of accept" and item == 11:
            raise GenerationError
        return True

    async def read(stage: Any) -> None:
        num_batches = 0
        async with stage:
            async for _ in stage:
                num_batches += 1
                if num_batches == 3 and why == "left":
                    break
                if num_batches == 3 and why == "cancel":
                    scope.cancel()

    async with nothing_left():
        items = getattr(source, kind)()
        stage = made(answer, items, concurrency=6, max_staleness=2, accept=accept)
        with anyio.CancelScope() as scope:
            if why.startswith("error"):
                with pytest.raises(GenerationError):
                    await read(stage)
            else:
                await read(stage)
        assert source.is_closed
        assert boxes.open == set()
        assert boxes.num_created >= 6


def test_a_stage_that_nothing_is_asked_of_begins_no_call(learner: Learner) -> None:
    begun: list[int] = []

    async def answer(item: int) -> int:
        begun.append(item)
        return item

    async def main() -> None:
        async with made(answer) as stage:
            await learner.sleep(10.0)
            assert begun == []
            await anext(stage)
            assert begun == [0, 1, 2, 3]

    learner.run(main)


@pytest.mark.parametrize("is_shielded", [True, False])
def test_a_stop_with_50_sandboxes_under_way_takes_what_deleting_one_takes(
    learner: Learner, is_shielded: bool
) -> None:
    """Also where what is plainly created and yielded is deleted: it is cancelled once."""
    learner.train_secs = 0.01
    boxes = Sandboxes(learner.sleep, lambda: 0.0)

    async def answer(item: int) -> int:
        async with shielded(boxes.sandbox()) if is_shielded else boxes.sandbox():
            await learner.sleep(0.1 if item < 8 else 1e6)
        return item

    async def main() -> None:
        stage = made(answer, range(100), 8, concurrency=58, max_staleness=9)
        async with MonitoredSession([FeedHook(stage, "groups")], learner.creator) as session:
            await session.run("loss")
            await learner.sleep(1.0)
            assert len(boxes.open) == 58
            begin = learner.now
        assert learner.now - begin == 0.25  # that of the service
        assert boxes.open == set()

    learner.run(main)


def test_a_clean_up_that_hangs_is_ended_after_30_secs(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []

    async def answer(item: int) -> int:
        try:
            await learner.sleep(1e6 if item == 2 else 0.5)
        finally:
            if item == 2:
                try:
                    await learner.sleep(1e6)
                finally:
                    ended.append(learner.now)
        return item

    learner.train_with(made(answer, range(3), concurrency=3), last_step=1)
    assert ended == [1.5 + 30.0]
    [text] = log_of(caplog, "item 2")
    assert "30 s" in text


# Cancellations that meet those of a call's own


def test_a_timeout_within_a_shield_does_not_use_up_the_cancellation(learner: Learner) -> None:
    """The call is cancelled behind its shield, not left to go on for its 30 s."""
    ends: list[float] = []

    async def answer(item: int) -> int:
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(3.0):
                await anyio.sleep(50.0)
            await anyio.sleep(20.0)
        except anyio.get_cancelled_exc_class():
            ends.append(learner.now)
            raise
        raise AssertionError("it went on")

    async def main() -> None:
        async with made(answer, range(4), concurrency=2) as source:
            with anyio.move_on_after(1.0):
                await anext(source)

    learner.run(main)
    assert ends == [3.0] * 2


async def test_what_a_call_sets_in_its_context_is_not_seen_by_the_next() -> None:
    tag: ContextVar[int] = ContextVar("tag", default=-1)

    async def answer(item: int) -> int:
        before = tag.get()
        tag.set(item)
        await turns()
        assert tag.get() == item
        return before

    async with made(answer, range(12), concurrency=2, max_staleness=0) as source:
        assert {each.result async for batch in source for each in batch} == {-1}
