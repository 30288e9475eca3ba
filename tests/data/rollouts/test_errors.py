"""Errors of calls: retries, the budget of failures, and how they leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, MonitoredSession, Restart, StopTraining
from asynchooks.data import WhenStale, rollouts

from .learning import Learner, known, log_of, on_engines, on_loops


class GenerationError(Exception):
    pass


class Halt(BaseException):
    """An error that no `except Exception` catches."""


def raised_by(learner: Learner, stage: Any) -> BaseException:
    """What training ended by."""
    try:
        learner.run(lambda: learner.train(stage))
    except BaseException as error:
        return error
    pytest.fail("training has ended cleanly")


@on_loops
@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_that_is_alone_in_its_group_leaves_alone(backend: Any, depth: int) -> None:
    learner, error = Learner(backend), GenerationError()

    async def fail(depth: int) -> None:
        if depth == 0:
            raise error
        async with anyio.create_task_group() as group:
            group.start_soon(fail, depth - 1)
            group.start_soon(anyio.sleep, 5)

    async def answer(item: int) -> int:
        await anyio.sleep(1)
        if item == 2:
            await fail(depth)
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=1)
    assert raised_by(learner, stage) is error
    assert "in rollouts, at item 2: 2" in error.__notes__
    assert learner.items == [[0, 1]]


@on_loops
def test_a_group_of_two_errors_leaves_whole(backend: Any) -> None:
    learner = Learner(backend)

    async def fail() -> None:
        raise GenerationError

    async def answer(item: int) -> int:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            group.start_soon(fail)
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=1)
    error = raised_by(learner, stage)
    assert isinstance(error, ExceptionGroup)
    assert len(error.exceptions) == 2
    assert "in rollouts, at item 0: 0" in error.__notes__


@on_engines
def test_an_error_ends_training_before_time_goes_on(backend: Any) -> None:
    learner, error = Learner(backend), GenerationError()
    cleaned: list[int] = []

    async def answer(item: int) -> int:
        try:
            await learner.sleep(4.5 if item == 5 else 0.5 if item < 4 else 1e6)
            if item == 5:
                raise error
        finally:
            cleaned.append(item)
        return item

    stage = rollouts(answer, range(99), 2, concurrency=12, max_staleness=9)
    assert raised_by(learner, stage) is error
    assert learner.now == 4.5
    assert sorted(cleaned) == [*range(16)]


@on_engines
def test_an_error_cancels_the_other_calls_at_once_also_while_a_step_is_under_way(
    backend: Any,
) -> None:
    learner, error = Learner(backend, train_secs=100.0), GenerationError()
    cancelled: list[float] = []

    async def answer(item: int) -> int:
        try:
            await learner.sleep(1.0 if item < 2 else 4.0 if item == 5 else 1e6)
        except BaseException:
            cancelled.append(learner.now)
            raise
        if item == 5:
            raise error
        return item

    stage = rollouts(answer, range(99), 2, concurrency=8, max_staleness=9)
    assert raised_by(learner, stage) is error
    assert cancelled == [4.0] * 7
    assert learner.now == 101.0


@on_engines
@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_so_many_items_in_a_row_may_fail_and_the_next_one_ends_training(
    backend: Any, max_failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(backend)
    errors = {item: GenerationError(item) for item in range(20)}

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        # so many in a row, one that succeeds, and one more than so many
        if 2 <= item < 2 + max_failures or item > 2 + max_failures:
            raise errors[item]
        return item

    stage = rollouts(
        answer, range(20), 1, concurrency=1, max_staleness=0, max_failures=max_failures
    )
    last = errors[3 + 2 * max_failures]
    assert raised_by(learner, stage) is last
    assert learner.items == [[0], [1], [2 + max_failures]]
    assert known(stage).num_failures == 2 * max_failures
    item = 3 + 2 * max_failures
    assert f"in rollouts, at item {item}: {item}" in last.__notes__
    left_out = [text for text in log_of(caplog) if "is left out, failure" in text]
    assert len(left_out) == 2 * max_failures


@on_engines
def test_a_refused_result_is_no_failure(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item % 2:
            raise GenerationError(item)
        return item

    stage = rollouts(
        answer, range(40), 2, concurrency=2, max_staleness=0, max_failures=1,
        accept=lambda result: result % 4 == 0,
    )  # fmt: skip
    learner.run(lambda: learner.train(stage))
    assert (known(stage).num_failures, known(stage).num_refused) == (20, 10)


@on_engines
def test_a_failed_call_is_made_again_after_its_pauses_with_a_stamp_of_its_own(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner, begun = Learner(backend, train_secs=1.0), list[tuple[int, float]]()

    async def answer(item: int) -> int:
        begun.append((item, learner.now))
        await learner.sleep(1.0)
        if item == 0 and len([each for each, _ in begun if each == 0]) < 4:
            raise GenerationError
        return item

    stage = rollouts(
        answer, range(40), 2, concurrency=8, max_staleness=5,
        restart=Restart(max_attempts=3, first_pause_secs=2.0),
    )  # fmt: skip
    learner.run(lambda: learner.train(stage))
    times = [now for item, now in begun if item == 0]
    assert times == [0.0, 1.0, 4.0, 9.0]  # at once, then after 2 and 4 s
    assert (known(stage).num_retried, known(stage).num_failures) == (3, 0)
    [again] = [each for batch in learner.batches for each in batch if each.item == 0]
    # so many steps of the learner had ended when the last call began
    assert 0 < again.version <= times[-1]
    assert again.staleness <= 5
    assert log_of(caplog) == []


@on_engines
def test_a_call_that_fails_once_more_than_it_is_made_again_ends_training(backend: Any) -> None:
    learner, num_calls = Learner(backend), 0
    errors: list[GenerationError] = []

    async def answer(item: int) -> int:
        nonlocal num_calls
        num_calls += 1
        await learner.sleep(1.0)
        errors.append(GenerationError(num_calls))
        raise errors[-1]

    stage = rollouts(
        answer, range(9), 1, concurrency=1, max_staleness=0,
        restart=Restart(max_attempts=2, first_pause_secs=0.1),
    )  # fmt: skip
    assert raised_by(learner, stage) is errors[2]
    assert num_calls == 3


@on_engines
def test_an_item_dropped_in_the_pause_before_its_retry_is_not_called_again(backend: Any) -> None:
    learner, calls = Learner(backend), list[int]()

    async def answer(item: int) -> int:
        calls.append(item)
        await learner.sleep(0.1)
        if item == 0:
            raise GenerationError
        return item

    stage = rollouts(
        answer, range(30), 2, concurrency=4, max_staleness=1, when_stale=WhenStale.DROP,
        restart=Restart(max_attempts=5, first_pause_secs=10.0),
    )  # fmt: skip
    learner.run(lambda: learner.train(stage))
    assert calls.count(0) == 2  # it is made again at once, then after a pause
    assert known(stage).num_dropped == 1
    assert 0 not in [item for items in learner.items for item in items]


@on_engines
@pytest.mark.parametrize("seed", range(6))
def test_an_item_may_be_dropped_as_its_pause_ends(backend: Any, seed: int) -> None:
    learner = Learner(backend, seed=seed, shuffle_ties=True)

    async def answer(item: int) -> int:
        await learner.sleep(0.5)
        if item == 0:
            raise GenerationError
        return item

    stage = rollouts(
        answer, range(30), 2, concurrency=4, max_staleness=1, when_stale=WhenStale.DROP,
        restart=Restart(max_attempts=9, first_pause_secs=0.5, longest_pause_secs=0.5),
    )  # fmt: skip
    learner.run(lambda: learner.train(stage))
    assert known(stage).num_dropped == 1
    assert sorted(item for items in learner.items for item in items) == [*range(1, 30)]


@on_engines
def test_what_accept_raises_is_an_error_of_its_item(backend: Any) -> None:
    learner, error = Learner(backend), GenerationError()

    def accept(result: int) -> bool:
        if result == 4:
            raise error
        return True

    stage = rollouts(learner.answer, range(9), 2, concurrency=2, max_staleness=0, accept=accept)
    assert raised_by(learner, stage) is error
    assert learner.items == [[0, 1], [2, 3]]
    assert "in rollouts, at item 4: 4" in error.__notes__


@on_engines
@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("error", [Halt, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exit_leaves_as_itself_and_names_the_item(
    backend: Any, error: type[BaseException], is_at_once: bool
) -> None:
    learner, raised = Learner(backend), error()

    async def answer(item: int) -> int:
        if not is_at_once:
            await learner.sleep(1.0)
        if item == 1:
            raise raised
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=0, max_failures=5)
    left = raised_by(learner, stage)
    if error is GeneratorExit:  # it would pass for the end of a coroutine that is thrown away
        assert left is raised or left.__cause__ is raised
    else:
        assert left is raised
        assert "in rollouts, at item 1: 1" in raised.__notes__
    assert learner.batches == []


@on_engines
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_the_end_of_an_iterator_does_not_pass_for_the_end_of_the_data(
    backend: Any, error: type[Exception]
) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item == 3:
            raise error
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=0)
    left = raised_by(learner, stage)
    assert isinstance(left, RuntimeError)
    assert "in rollouts, at item 3: 3" in left.__notes__
    assert learner.items == [[0, 1]]


@on_engines
def test_a_stop_that_a_call_raises_ends_training(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item == 3:
            raise StopTraining("the budget is spent")
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=0)
    learner.run(lambda: learner.train(stage))
    assert learner.items == [[0, 1]]


@on_engines
def test_a_wait_of_a_call_that_ends_by_the_stop_is_no_failure(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(backend)
    sessions: list[MonitoredSession] = []

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item >= 2:
            await sessions[0].global_step.wait_for(100)
        return item

    async def main() -> None:
        stage = rollouts(
            answer, range(20), 2, concurrency=6, max_staleness=3, max_failures=2,
            restart=Restart(max_attempts=3),
        )  # fmt: skip
        feed = FeedHook(stage, "groups")
        async with MonitoredSession([feed], learner.creator) as session:
            sessions.append(session)
            await session.run("loss")
            session.request_stop("enough")
            await learner.sleep(5.0)
        assert (known(stage).num_failures, known(stage).num_retried) == (0, 0)
        assert feed.state_dict()["place"] == 2

    learner.run(main)
    assert [each for each in log_of(caplog) if "Stop requested" not in each] == []


async def failing_source(error: Exception) -> AsyncIterator[int]:
    for item in range(5):
        yield item
    raise error


@on_engines
def test_an_error_of_the_source_comes_after_all_results(backend: Any) -> None:
    learner, error = Learner(backend), GenerationError("of the source")

    async def answer(item: int) -> int:
        await learner.sleep(1.0 + item)
        return item

    stage = rollouts(answer, failing_source(error), 2, concurrency=8, max_staleness=9)
    assert raised_by(learner, stage) is error
    assert learner.items == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("backend", ["asyncio"])
def test_a_task_that_is_cancelled_from_outside_ends_training(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(1.0)
        if item == 3:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await learner.sleep(1.0)
        return item

    stage = rollouts(answer, range(9), 2, concurrency=2, max_staleness=0)
    with pytest.raises(RuntimeError, match="was cancelled from outside"):
        learner.run(lambda: learner.train(stage))
    assert learner.items == [[0, 1]]


@on_engines
def test_cancelling_a_learner_that_waits_loses_no_result(backend: Any) -> None:
    learner = Learner(backend)

    got: list[Any] = []

    async def main() -> None:
        stage = rollouts(learner.answer, range(12), 2, concurrency=4, max_staleness=1)

        async def take() -> None:
            while True:
                got.append(await anext(stage))

        async with stage:
            for tenth in range(1, 45):
                task = learner.simulation.start(take)
                await learner.sleep(tenth / 100)
                task.cancel()
                await task.wait()
            assert [[each.item for each in batch] for batch in got] == [
                [item, item + 1] for item in range(0, 12, 2)
            ]

    with pytest.raises(StopAsyncIteration):  # at last
        learner.run(main)
