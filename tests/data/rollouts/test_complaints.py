"""What users of asynchronous learners complain of, each as a test."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asynchooks import FeedHook, GlobalStep, InputError, MonitoredSession
from asynchooks.data import Rollout, WhenStale, repeat, rollouts, shielded

from .learning import Learner, Sandboxes, known, on_engines


class GenerationError(Exception):
    pass


@on_engines
def test_no_prompt_is_skipped_after_a_restore(backend: Any) -> None:
    def stage_of(learner: Learner, slow: set[int]) -> Any:
        async def answer(item: int) -> int:
            await learner.sleep(100.0 if item in slow else 0.1)
            return item

        return rollouts(
            answer, range(12), 2, concurrency=6, max_staleness=2, when_stale=WhenStale.ACCEPT
        )

    learner = Learner(backend)
    position = learner.run(lambda: learner.train(stage_of(learner, {0, 3}), last_step=3))
    assert learner.items == [[1, 2], [4, 5], [6, 7]]
    assert (position["place"], position["beyond"]) == (0, [1, 2, 4, 5, 6, 7])

    again = Learner(backend, begin=3)
    stage = stage_of(again, set())
    stage.load_state_dict(position)
    again.run(lambda: again.train(stage))
    assert again.items == [[0, 3], [8, 9], [10, 11]]


@on_engines
def test_what_was_begun_or_ready_at_a_kill_begins_again_in_order(backend: Any) -> None:
    learner, begun = Learner(backend), list[int]()
    position: list[Any] = []

    async def answer(item: int) -> int:
        begun.append(item)
        await learner.sleep(0.1)
        return item

    async def main() -> None:
        stage = rollouts(answer, range(20), 3, concurrency=9, max_staleness=5)
        feed = FeedHook(stage, "groups")
        await learner.train(feed, last_step=1)
        position.append(feed.state_dict())

    learner.run(main)
    assert begun == [*range(12)]  # nine, and three more when the first batch had left
    assert position[0]["place"] == 3

    again = Learner(backend, begin=1)
    learner, begun = again, []
    stage = rollouts(answer, range(20), 3, concurrency=9, max_staleness=5)
    stage.load_state_dict(position[0])
    again.run(lambda: again.train(stage))
    assert begun == [*range(3, 20)]
    assert [item for batch in again.items for item in batch] == [*range(3, 20)]


@on_engines
def test_a_dropped_group_does_not_pin_the_cursor(backend: Any) -> None:
    def stage_of(learner: Learner, begun: list[int]) -> Any:
        async def answer(item: int) -> int:
            begun.append(item)
            await learner.sleep(1e6 if item == 1 else 0.1)
            return item

        return rollouts(
            answer, range(20), 2, concurrency=6, max_staleness=2, when_stale=WhenStale.DROP
        )

    learner = Learner(backend)
    stage = stage_of(learner, [])
    position = learner.run(lambda: learner.train(stage, last_step=6))
    assert known(stage).num_dropped == 1
    assert position["place"] == 13  # 0 and 2 to 12 are trained with, and 1 is finished
    assert position["beyond"] == []
    assert learner.now < 10

    again, begun = Learner(backend, begin=6), list[int]()
    stage = stage_of(again, begun)
    stage.load_state_dict(position)
    again.run(lambda: again.train(stage))
    assert begun == [*range(13, 20)]
    assert known(stage).num_dropped == 1  # counted on


@on_engines
@pytest.mark.parametrize("begin", [0, 1000])
def test_the_bound_does_not_inflate_after_a_restore(backend: Any, begin: int) -> None:
    """An allowance that is computed from the step alone lets everything begin at once."""
    most: list[int] = []

    def stage_of(learner: Learner) -> Any:
        async def answer(item: int) -> int:
            if not learner.batches:
                most.append(item)
            await learner.sleep(0.1)
            return item

        return rollouts(answer, range(200), 2, concurrency=100, max_staleness=3)

    learner = Learner(backend, begin=begin)
    stage = stage_of(learner)
    if begin:
        before = Learner(backend, begin=begin - 20)
        stage.load_state_dict(before.run(lambda: before.train(stage_of(before), begin)))
        most.clear()
    learner.run(lambda: learner.train(stage, last_step=begin + 10))
    assert len(most) == (3 + 1) * 2
    assert max(age for ages in learner.ages for age in ages) <= 3
    assert learner.batches[-1][0].version >= begin + 9 - 3


@on_engines
def test_the_bound_holds_where_the_step_is_restored_after_the_first_batch(backend: Any) -> None:
    learner = Learner(backend)
    version = GlobalStep(0)

    async def answer(item: int) -> int:
        await learner.sleep(0.1)
        return item

    async def main() -> None:
        stage = rollouts(answer, range(100), 2, concurrency=20, max_staleness=2, version=version)
        async with stage:
            first = await anext(stage)
            assert first[0].version == 0
            version.publish(1000)  # that of a checkpoint
            ages = []
            for step in range(1000, 1010):
                batch = await anext(stage)
                ages.append(max(each.staleness for each in batch))
                version.publish(step + 1)
            assert max(ages) <= 2
            assert batch[0].version + batch[0].staleness == 1009

    learner.run(main)


@on_engines
def test_a_version_is_read_before_generation_not_after_it(backend: Any) -> None:
    learner = Learner(backend)
    seen: dict[int, tuple[int, int]] = {}

    async def answer(item: int) -> int:
        at_begin = learner.step.value
        await learner.sleep(2.5 if item % 3 == 0 else 0.2)
        seen[item] = at_begin, learner.step.value
        return item

    stage = rollouts(answer, range(40), 2, concurrency=8, max_staleness=5)
    learner.run(lambda: learner.train(stage))
    versions = {each.item: each.version for batch in learner.batches for each in batch}
    assert versions == {item: begin for item, (begin, _) in seen.items()}
    assert any(begin < end for begin, end in seen.values())


@on_engines
@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_worker_that_dies_on_its_first_call_ends_training_at_once(
    backend: Any, is_at_once: bool
) -> None:
    learner = Learner(backend)
    error = GenerationError("no engine")

    async def answer(item: Any) -> Any:
        if not is_at_once:
            await learner.sleep(2.0)
        if item == 1:
            raise error
        await learner.sleep(1e6)
        return item

    async def main() -> None:
        stage = rollouts(answer, ["a", 1, "c", "d"], 2, concurrency=4, max_staleness=1)
        with pytest.raises(GenerationError) as caught:
            await learner.train(stage)
        assert caught.value is error
        assert "in rollouts, at item 1: 1" in error.__notes__
        assert learner.now == (0.0 if is_at_once else 2.0)

    learner.run(main)
    assert learner.batches == []


@on_engines
@pytest.mark.parametrize("num_items", [7, 8, 1])
def test_data_that_run_out_within_a_batch_make_a_smaller_one(backend: Any, num_items: int) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(float(item % 3))
        return item

    stage = rollouts(answer, range(num_items), 4, concurrency=8, max_staleness=1)
    position = learner.run(lambda: learner.train(stage))
    assert [len(batch) for batch in learner.batches] == {7: [4, 3], 8: [4, 4], 1: [1]}[num_items]
    assert position["place"] == num_items


@on_engines
def test_the_last_batch_is_smaller_where_some_are_refused(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        await learner.sleep(float(item % 3))
        return item

    stage = rollouts(
        answer, range(20), 4, concurrency=8, max_staleness=9, accept=lambda result: result % 2 == 0
    )
    learner.run(lambda: learner.train(stage))
    assert [len(batch) for batch in learner.batches] == [4, 4, 2]
    assert known(stage).num_refused == 10


@on_engines
def test_an_error_says_that_all_results_were_refused(backend: Any) -> None:
    learner = Learner(backend)

    async def main() -> None:
        stage = rollouts(
            learner.answer, range(5), 2, concurrency=2, max_staleness=1, accept=lambda result: False
        )
        with pytest.raises(InputError, match="none of its 5 items was of use: 5 refused"):
            await learner.train(stage)

    learner.run(main)


@on_engines
def test_an_error_says_that_there_are_no_data(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        return item

    async def main() -> None:
        with pytest.raises(InputError, match="has no items"):
            await learner.train(rollouts(answer, (), 2, concurrency=2, max_staleness=1))

    learner.run(main)


@on_engines
def test_the_log_says_that_a_learner_starves_as_all_results_are_refused(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(backend)

    async def main() -> None:
        stage = rollouts(
            learner.answer, range(1000), 2, concurrency=4, max_staleness=1,
            accept=lambda result: result > 100,
        )  # fmt: skip
        await learner.train(stage, last_step=2)

    learner.run(main)
    told = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert len(told) == 1
    assert "The last 64 results" in told[0]


@on_engines
def test_it_says_nothing_where_some_are_of_use(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(backend)

    stage = rollouts(
        learner.answer,
        range(600),
        2,
        concurrency=4,
        max_staleness=1,
        accept=lambda item: item % 3 == 0,
    )
    learner.run(lambda: learner.train(stage))
    assert known(stage).num_refused == 400
    assert caplog.records == []


# Sandboxes, and the end


def stage_with_sandboxes(
    learner: Learner, boxes: Sandboxes, when_stale: WhenStale, error_at: float = 1e9
) -> Any:
    rng = random.Random(1)

    async def answer(item: int) -> int:
        async with shielded(boxes.sandbox()) as box:
            await learner.sleep(rng.lognormvariate(0, 1.5))
            if learner.now > error_at:
                raise GenerationError(box)
            return item

    return rollouts(answer, range(10**6), 8, concurrency=50, max_staleness=3, when_stale=when_stale)


@on_engines
@pytest.mark.parametrize("when_stale", [WhenStale.WAIT, WhenStale.DROP])
@pytest.mark.parametrize("why", ["stop", "cancel", "error of a rollout", "error of the step"])
@pytest.mark.parametrize("end_at", [0.5, 3.3, 9.1])
def test_no_sandbox_is_left_behind(
    backend: Any, when_stale: WhenStale, why: str, end_at: float
) -> None:
    learner = Learner(backend)
    rng = random.Random(end_at)
    boxes = Sandboxes(learner, lambda: rng.uniform(0.2, 2.0))
    num_open_at: list[int] = []

    async def main() -> None:
        error_at = end_at if why == "error of a rollout" else 1e9
        stage = stage_with_sandboxes(learner, boxes, when_stale, error_at)
        caught: list[BaseException] = []
        sessions: list[MonitoredSession] = []

        async def work() -> None:
            try:
                hooks = [FeedHook(stage, "groups")]
                async with MonitoredSession(hooks, learner.creator) as session:
                    sessions.append(session)
                    while not session.should_stop():
                        await session.run("loss")
            except GenerationError as error:
                caught.append(error)

        task = learner.simulation.start(work)
        await learner.sleep(end_at)
        num_open_at.append(len(boxes.open))
        if why == "stop":
            sessions[0].request_stop()
        elif why == "cancel":
            task.cancel()
        elif why == "error of the step":
            learner.error = GenerationError("step")
        begin = learner.now
        assert await task.wait(begin + 100)
        assert bool(caught) == why.startswith("error")
        assert boxes.open == set()
        # the step under way, 1 s; then the service's own time: at most 2 s and 0.3 s
        late = 20.0 if why.startswith("error") else 1.0 + 2.0 + 0.3
        assert learner.now - begin <= late

    learner.run(main)
    assert num_open_at[0] > 3
    assert boxes.num_created == boxes.num_deleted


@on_engines
def test_a_stop_with_50_sandboxes_under_way_takes_what_deleting_one_takes(backend: Any) -> None:
    learner = Learner(backend, train_secs=0.01)
    boxes = Sandboxes(learner, lambda: 0.0, delete_secs=0.25)
    took: list[float] = []

    async def answer(item: int) -> int:
        async with shielded(boxes.sandbox()):
            await learner.sleep(0.1 if item < 8 else 1e6)
        return item

    async def main() -> None:
        stage = rollouts(answer, range(100), 8, concurrency=58, max_staleness=9)
        async with MonitoredSession([FeedHook(stage, "groups")], learner.creator) as session:
            await session.run("loss")
            await learner.sleep(1.0)
            assert len(boxes.open) == 58
            begin = learner.now
        took.append(learner.now - begin)

    learner.run(main)
    assert boxes.open == set()
    assert took == [0.25]  # that of the service


@on_engines
def test_a_plain_clean_up_is_cancelled_once_as_in_plain_asyncio(backend: Any) -> None:
    """Without `shielded` what is created and yielded is deleted, too: it is cancelled once."""
    learner = Learner(backend)
    boxes = Sandboxes(learner, lambda: 0.0, delete_secs=0.5)

    async def answer(item: int) -> int:
        async with boxes.sandbox():
            await learner.sleep(1e6 if item >= 2 else 1.0)
        return item

    stage = rollouts(answer, range(100), 2, concurrency=20, max_staleness=9)
    learner.run(lambda: learner.train(stage, last_step=1))
    assert (boxes.num_created, boxes.num_deleted) == (20, 20)


@on_engines
def test_a_clean_up_that_hangs_is_ended_after_30_secs(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(backend)
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

    stage = rollouts(answer, range(3), 2, concurrency=3, max_staleness=1)
    learner.run(lambda: learner.train(stage, last_step=1))
    assert ended == [1.5 + 30.0]
    assert any(
        "item 2" in each.getMessage() and "30 s" in each.getMessage() for each in caplog.records
    )


@pytest.mark.parametrize("backend", ["asyncio"])  # there alone a cancellation may be kept
def test_a_dropped_item_that_minds_no_cancellation_is_not_given_out(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        try:
            await learner.sleep(6.0 if item == 0 else 0.1 if item < 10 else 1e6)
        except BaseException:  # it goes on, whatever is asked of it
            if item != 0:
                raise
        return item

    stage = rollouts(
        answer, range(20), 2, concurrency=5, max_staleness=1, when_stale=WhenStale.DROP
    )
    learner.run(lambda: learner.train(stage, last_step=4))
    assert known(stage).num_dropped == 1
    assert 0 not in [item for items in learner.items for item in items]
    assert learner.now < 5


@on_engines
def test_a_dropped_prompt_comes_back_in_the_next_pass(backend: Any) -> None:
    learner = Learner(backend)
    num_calls = 0

    async def answer(item: int) -> int:
        nonlocal num_calls
        num_calls += item == 0
        await learner.sleep(100.0 if item == 0 and num_calls == 1 else 0.1)
        return item

    stage = rollouts(
        answer, repeat(range(10), 2), 2, concurrency=4, max_staleness=1, when_stale=WhenStale.DROP
    )
    learner.run(lambda: learner.train(stage))
    trained = sorted(item for items in learner.items for item in items)
    assert trained == sorted([*range(1, 10), *range(10)])
    assert known(stage).num_dropped == 1


@on_engines
def test_places_identify_items_over_passes(backend: Any) -> None:
    learner = Learner(backend)

    async def answer(item: int) -> int:
        return item

    learner.run(
        lambda: learner.train(
            rollouts(answer, repeat(range(3), 2), 2, concurrency=2, max_staleness=1)
        )
    )
    flat: list[Rollout] = [each for batch in learner.batches for each in batch]
    assert [(each.item, each.place) for each in flat] == [(n % 3, n) for n in range(6)]
