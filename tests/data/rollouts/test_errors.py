"""Errors of calls: retries, the budget of failures, and how they leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, MonitoredSession, Restart, StopTraining
from asynchooks.data import WhenStale

from ...support.faults import Halt
from ..sources import on_asyncio
from .learning import GenerationError, Learner, log_of, made


@pytest.mark.parametrize(("depth", "num"), [(1, 1), (2, 1), (1, 2)])
def test_an_error_that_is_alone_in_its_group_leaves_alone(
    learner: Learner, depth: int, num: int
) -> None:
    error = GenerationError()

    async def fail(depth: int) -> None:
        if depth == 0:
            raise error
        async with anyio.create_task_group() as group:
            for _ in range(num):
                group.start_soon(fail, depth - 1)
            group.start_soon(anyio.sleep, 5)

    async def answer(item: int) -> int:
        await anyio.sleep(1)
        if item == 2:
            await fail(depth)
        return item

    left = learner.failure_with(made(answer, concurrency=2))
    if num == 1:
        assert left is error
    else:
        assert isinstance(left, ExceptionGroup)
        assert len(left.exceptions) == num
    assert "in rollouts, at item 2: 2" in left.__notes__
    assert learner.items == [[0, 1]]


@pytest.mark.parametrize(("train_secs", "end"), [(0.5, 4.0), (100.0, 101.0)])
@pytest.mark.parametrize("fails", ["call", "accept"])
def test_an_error_cancels_all_other_calls_at_once_and_ends_training(
    learner: Learner, fails: str, train_secs: float, end: float
) -> None:
    """Before time goes on, or behind the step that is under way."""
    learner.train_secs = train_secs
    error, cancelled = GenerationError(), list[float]()

    async def answer(item: int) -> int:
        try:
            await learner.sleep(1.0 if item < 2 else 4.0 if item == 5 else 1e6)
        except BaseException:
            cancelled.append(learner.now)
            raise
        if item == 5 and fails == "call":
            raise error
        return item

    def accept(item: int) -> bool:
        if item == 5:
            raise error
        return True

    stage = made(answer, range(99), concurrency=8, max_staleness=9, accept=accept)
    assert learner.failure_with(stage) is error
    assert "in rollouts, at item 5: 5" in error.__notes__
    assert (learner.now, learner.items) == (end, [[0, 1]])
    assert cancelled == [4.0] * 7


@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_so_many_items_in_a_row_may_fail_and_the_next_one_ends_training(
    learner: Learner, max_failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    errors = {item: GenerationError(item) for item in range(20)}

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        # so many in a row, one that succeeds, and one more than so many
        if 2 <= item < 2 + max_failures or item > 2 + max_failures:
            raise errors[item]
        return item

    stage = made(answer, range(20), 1, concurrency=1, max_staleness=0, max_failures=max_failures)
    last = 3 + 2 * max_failures
    assert learner.failure_with(stage) is errors[last]
    assert learner.items == [[0], [1], [2 + max_failures]]
    assert stage.statistics().num_failures == 2 * max_failures
    assert f"in rollouts, at item {last}: {last}" in errors[last].__notes__
    assert len(log_of(caplog, "is left out, failure")) == 2 * max_failures


@pytest.mark.parametrize("max_attempts", [3, 2])
def test_a_failed_call_is_made_again_after_its_pauses_with_a_stamp_of_its_own(
    learner: Learner, max_attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[float] = []

    async def answer(item: int) -> int:
        if item == 0:
            begun.append(learner.now)
        await learner.sleep(1.0)
        if item == 0 and len(begun) < 4:
            raise GenerationError(len(begun))
        return item

    restart = Restart(max_attempts=max_attempts, first_pause_secs=2.0)
    stage = made(answer, range(40), concurrency=8, max_staleness=5, restart=restart)
    if max_attempts == 2:  # it fails once more than it is made again
        assert learner.failure_with(stage).args == (3,)
        return
    learner.train_with(stage)
    assert begun == [0.0, 1.0, 4.0, 9.0]  # at once, then after 2 and 4 s
    found = stage.statistics()
    assert (found.num_retried, found.num_failures) == (3, 0)
    [again] = [each for batch in learner.batches for each in batch if each.item == 0]
    # so many steps of the learner had ended when the last call began
    assert 0 < again.version <= begun[-1]
    assert log_of(caplog) == []


def test_an_item_dropped_in_the_pause_before_its_retry_is_not_called_again(
    learner: Learner,
) -> None:
    calls: list[int] = []

    async def answer(item: int) -> int:
        calls.append(item)
        await learner.sleep(0.1)
        if item == 0:
            raise GenerationError
        return item

    restart = Restart(max_attempts=5, first_pause_secs=10.0)
    stage = made(answer, range(30), when_stale=WhenStale.DROP, restart=restart)
    learner.train_with(stage)
    assert calls.count(0) == 2  # it is made again at once, then after a pause
    assert stage.statistics().num_dropped == 1
    assert learner.flat == [*range(1, 30)]


@pytest.mark.parametrize("secs", [0.0, 1.0])
@pytest.mark.parametrize(
    "error", [Halt, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration]
)
def test_an_exit_leaves_as_itself_and_no_end_passes_for_that_of_the_data(
    learner: Learner, error: type[BaseException], secs: float
) -> None:
    raised = error()

    async def answer(item: int) -> int:
        if secs:
            await learner.sleep(secs)
        if item == 1:
            raise raised
        return item

    is_end = issubclass(error, Exception)
    left = learner.failure_with(made(answer, max_staleness=0, max_failures=0 if is_end else 5))
    if is_end or error is GeneratorExit:
        assert left is raised or isinstance(left, RuntimeError)
        assert not is_end or left is not raised
    else:
        assert left is raised
    assert error is GeneratorExit or "in rollouts, at item 1: 1" in left.__notes__
    assert learner.batches == []


def test_a_stop_that_a_call_raises_ends_training(learner: Learner) -> None:
    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item == 3:
            raise StopTraining("the budget is spent")
        return item

    learner.train_with(made(answer, concurrency=2, max_failures=3))
    assert learner.items == [[0, 1]]


def test_a_wait_of_a_call_that_ends_by_the_stop_is_no_failure(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    sessions: list[MonitoredSession] = []

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item >= 2:
            await sessions[0].global_step.wait_for(100)
        return item

    async def main() -> None:
        stage = made(
            answer,
            range(20),
            concurrency=6,
            max_staleness=3,
            max_failures=2,
            restart=Restart(max_attempts=3),
        )
        feed = FeedHook(stage, "groups")
        async with MonitoredSession([feed], learner.creator) as session:
            sessions.append(session)
            await session.run("loss")
            session.request_stop("enough")
            await learner.sleep(5.0)
        found = stage.statistics()
        assert (found.num_failures, found.num_retried) == (0, 0)
        assert feed.state_dict()["place"] == 2

    learner.run(main)
    assert log_of(caplog) == []


def test_an_error_of_the_source_comes_after_all_results(learner: Learner) -> None:
    error = GenerationError("of the source")

    async def source() -> AsyncIterator[int]:
        for item in range(5):
            yield item
        raise error

    async def answer(item: int) -> int:
        await learner.sleep(1.0 + item)
        return item

    stage = made(answer, source(), concurrency=8, max_staleness=9)
    assert learner.failure_with(stage) is error
    assert learner.items == [[0, 1], [2, 3], [4]]


@on_asyncio
@pytest.mark.parametrize("max_failures", [0, 1])
def test_a_cancelled_error_of_a_call_counts_as_its_failure(
    learner: Learner, max_failures: int
) -> None:
    """An engine's client aborts a request: what it awaited was cancelled, not the call."""

    async def answer(item: int) -> int:
        if item == 3:
            aborted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            aborted.cancel()
            await aborted
        return item

    stage = made(answer, range(8), max_failures=max_failures)
    if max_failures:
        learner.train_with(stage)
        assert learner.flat == [0, 1, 2, 4, 5, 6, 7]
        assert stage.statistics().num_failures == 1
    else:
        error = learner.failure_with(stage)
        assert "rollouts called what raised CancelledError" in str(error)
        assert "in rollouts, at item 3: 3" in error.__notes__
