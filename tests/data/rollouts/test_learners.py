"""rollouts under learners: positions, versions, what is said and counted."""

import math
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    GlobalStep,
    InputError,
    StopAtStepHook,
)
from asynchooks._engine.base import Slot
from asynchooks.data import Rollout, WhenStale

from ...hooks.training import run_session
from ...support.helpers import settle, turns
from .learning import Learner, log_of, made


def test_what_was_begun_or_ready_begins_again_after_a_restore_in_order(learner: Learner) -> None:
    begun, slow = list[int](), {0, 3}

    async def answer(item: int) -> int:
        begun.append(item)
        await learner.sleep(100.0 if item in slow else 0.1)
        return item

    def make() -> Any:
        return made(answer, range(12), concurrency=6, max_staleness=2, when_stale=WhenStale.ACCEPT)

    position = learner.train_with(make(), last_step=3)
    assert learner.items == [[1, 2], [4, 5], [6, 7]]
    assert (position["place"], position["beyond"]) == (0, [1, 2, 4, 5, 6, 7])
    begun.clear()
    slow.clear()
    stage = make()
    learner = learner.again(position, stage)
    learner.train_with(stage)
    assert begun == [0, 3, 8, 9, 10, 11]
    assert learner.items == [[0, 3], [8, 9], [10, 11]]


async def test_several_batches_may_make_one_step() -> None:
    """Gradients of two batches are accumulated: the global step moves with each second run."""
    trained: list[int] = []

    def step(groups: list[Rollout]) -> dict[str, int]:
        trained.extend(each.item for each in groups)
        assert all(each.staleness <= 1 for each in groups)
        return {"global_step": len(trained) // 4}

    session = await run_session([FeedHook(made(source=range(40)), "groups")], step)
    assert sorted(trained) == list(range(40))
    assert session.global_step.value == 10


async def test_an_open_stage_serves_one_training_after_the_other_and_a_bare_loop() -> None:
    seen: list[Rollout] = []

    def step(groups: list[Rollout]) -> dict[str, int]:
        seen.extend(groups)
        return {}

    async with made(source=range(1000), max_staleness=0) as stage:
        for _ in range(3):
            await run_session([FeedHook(stage, "groups"), StopAtStepHook(last_step=5)], step)
        for _ in range(3):
            seen += await anext(stage)
    assert [each.place for each in seen] == list(range(36))
    async with made(max_staleness=0) as stage:  # alone its version counts batches
        found = [(each.version, each.staleness) async for batch in stage for each in batch]
    assert found == [(n // 2, 0) for n in range(9)]


async def test_a_batch_that_was_not_taken_has_not_been_trained_on() -> None:
    """Its reader is cancelled as it is put together."""
    scope, weights, seen = anyio.CancelScope(), [0], dict[int, int]()

    async def answer(item: int) -> int:
        seen[item] = weights[0]
        await turns()
        return item

    def accept(item: int) -> bool:
        if item == 1:
            scope.cancel()
        return True

    options: Any = {"concurrency": 2, "max_staleness": 0, "accept": accept}
    async with made(answer, range(8), **options) as stage:
        with scope:
            await anext(stage)
        assert scope.cancelled_caught
        for weights[0] in range(3):
            batch = await anext(stage)
            await settle()  # calls begin
            assert [seen[each.item] for each in batch] == [weights[0]] * 2


# What it says and counts


@pytest.mark.parametrize(
    ("num", "says"), [(5, "none of its 5 items was of use: 5 refused"), (0, "has no items")]
)
def test_an_error_says_that_all_results_were_refused_or_there_are_no_data(
    learner: Learner, num: int, says: str
) -> None:
    error = learner.failure_with(made(source=range(num), accept=lambda result: False))
    assert isinstance(error, InputError)
    assert says in str(error)


@pytest.mark.parametrize(("first", "num_told"), [(100, 1), (0, 0)])
def test_the_log_says_that_a_learner_starves_as_all_results_are_refused(
    learner: Learner, first: int, num_told: int, caplog: pytest.LogCaptureFixture
) -> None:
    stage = made(learner.answer, range(1000), accept=lambda item: item > first and item % 3 == 0)
    learner.train_with(stage, last_step=40)
    assert len(log_of(caplog, "The last 64 results")) == num_told


def test_what_is_under_way_and_ready_is_counted(learner: Learner) -> None:
    async def timed(item: int) -> int:
        await learner.sleep(1.0 + item)
        return item

    async def main() -> None:
        stage = made(timed, range(6), concurrency=5, max_staleness=9)
        assert math.isnan(stage.statistics().mean_staleness)
        async with stage:
            await anext(stage)
            await learner.sleep(1.5)  # until 3.5
            now = stage.statistics()
            assert (now.num_under_way, now.num_ready, now.num_items) == (3, 1, 1)
            assert (now.num_buffered, now.buffer_size) == (4, 5)
            async for _ in stage:
                pass
        now = stage.statistics()
        assert (now.staleness, now.mean_staleness) == ({0: 2, 1: 2, 2: 2}, 1.0)

    learner.run(main)


def test_its_text_has_the_counts_of_items(learner: Learner) -> None:
    stage = made(learner.answer, range(10), accept=lambda item: item != 3)
    learner.train_with(stage)
    [_, first, second] = str(stage.statistics()).splitlines()
    assert first.split()[:2] == ["rollouts", "5"]
    assert "1 refused; by staleness 0: " in first
    assert second.split()[:2] == ["sequence", "10"]


# A version that the program publishes


async def test_threads_may_publish_a_version_and_ask_for_statistics() -> None:
    version, ages = GlobalStep(), list[int]()
    async with made(source=range(40), version=version) as stage:
        async for groups in stage:
            ages += [each.staleness for each in groups]
            found = await anyio.to_thread.run_sync(stage.statistics)
            assert sum(found.staleness.values()) == len(ages)
            await anyio.to_thread.run_sync(version.publish, len(ages) // 2)
    assert len(ages) == 40
    assert max(ages) <= 1


def test_a_published_version_may_jump_ahead_and_go_back(learner: Learner) -> None:
    version, ages = GlobalStep(100), list[int]()
    moves = [lambda: version.publish(500), lambda: version.restart(3), lambda: version.publish(4)]

    async def main() -> None:
        async with made(source=range(6), version=version) as stage:
            async for groups in stage:
                ages.extend(each.staleness for each in groups)
                moves.pop(0)()

    learner.run(main)
    assert (len(ages), min(ages), max(ages)) == (6, 0, 1)


def test_a_version_that_is_published_between_the_look_and_the_wait_is_seen(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No public call of ours comes between the two, and a thread rarely does."""
    version = GlobalStep()

    def slot_late(*args: Any) -> Slot:
        if stage.statistics().num_items > version.value:  # as another thread would
            version.publish(version.value + 1)
        return Slot(*args)

    monkeypatch.setattr("asynchooks.data._rollout_stage.Slot", slot_late)
    stage = made(learner.answer, range(9), 1, concurrency=1, max_staleness=0, version=version)
    learner.train_with(stage)
    assert learner.flat == [*range(9)]


def test_the_log_says_what_to_do_where_no_version_is_published_and_nothing_is_lost(
    learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    version = GlobalStep()

    async def publish_at_last() -> None:
        await learner.sleep(60.0)
        version.publish(2)
        await learner.sleep(60.0)
        version.publish(100)

    async def main() -> None:
        learner.simulation.start(publish_at_last)
        await learner.train(made(source=range(12), version=version))

    learner.run(main)
    assert learner.flat == [*range(12)]
    texts = log_of(caplog, "Publish the step")
    assert len(texts) == 2, "once for each version"
    assert "that was published is 0, the learner is 2 steps ahead" in texts[0]
    assert "version.publish(step), at least once in max_staleness + 1 steps" in texts[0]
