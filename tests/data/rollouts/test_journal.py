"""rollouts with a journal: what was made outlives the run, in order, bit for bit, within the bound.

A life that begins at the position of an earlier one's begin stands for what follows a crash behind
which no step counts.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    Restart,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import ObjectStore
from asynchooks.data import WhenStale, run_once

from ...hooks.event_files import largest_file
from ...support.helpers import settle
from .learning import GenerationError, Learner, log_of, made, same, saved


class Life:
    """A run of a training of 9 items, which makes two parts of each.

    Args:
        fn: called with this life and an item.
        position: where it goes on.
        options: of `rollouts`, apart from those of most lives.
    """

    def __init__(
        self, backend: str, journal: Any, fn: Any, position: Any = None, **options: Any
    ) -> None:
        self.made: dict[Any, str] = {}
        self.group: Any = None  # of tasks beside the calls
        self.learner = Learner(backend, position["batches"] if position else 0)
        self.sleep = self.learner.sleep
        options = {"max_staleness": 4, "journal": journal, **options}
        self.stage = made(partial(fn, self), **options)
        if position:
            self.stage.load_state_dict(position)
        self.begin = saved(self.stage)

    def train(self, last_step: int | None = None) -> Life:
        self.end = self.learner.train_with(self.stage, last_step)
        return self

    async def make(self, item: Any, turn: int) -> str:
        assert (item, turn) not in self.made, "it was made twice"
        await self.sleep(1.0)
        self.made[item, turn] = os.urandom(4).hex()
        return self.made[item, turn]

    @property
    def trained(self) -> dict[int, Any]:
        """By place, in the order of batches."""
        return {each.place: each for batch in self.learner.batches for each in batch}

    @property
    def results(self) -> dict[int, Any]:
        return {place: each.result for place, each in self.trained.items()}

    @property
    def known(self) -> Any:
        return self.stage.statistics()


async def answer(life: Life, item: Any) -> Any:
    return [await run_once(f"turn {turn}", life.make, item, turn) for turn in range(2)]


async def fail_late(life: Life, item: Any) -> Any:
    await answer(life, item)
    raise GenerationError


@pytest.fixture
def live(anyio_backend: str) -> Callable[..., Life]:
    return lambda journal, fn=answer, **options: Life(anyio_backend, journal, fn, **options)


@pytest.fixture(params=["directory", "local store", "store in memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "directory":
        return tmp_path / "journal"
    stores = pytest.importorskip("obstore.store")
    if request.param == "local store":
        return stores.LocalStore(tmp_path / "journal", mkdir=True)
    return stores.MemoryStore()


def test_results_that_no_step_counts_come_first_as_they_were_and_are_not_made_again(
    live: Any, place: Any
) -> None:
    first = live(place).train(4)
    again = live(place, position=first.begin).train()
    assert list(again.trained) == list(range(9))
    assert [again.trained[at] for at in range(8)] == [first.trained[at] for at in range(8)]
    assert not first.made.keys() & again.made.keys()
    assert 8 <= again.known.num_recovered <= 9
    assert "recovered" in str(again.known)


def test_what_is_left_of_steps_that_count_comes_first(live: Any, place: Any) -> None:
    first = live(place).train(2)
    again = live(place, position=first.end, batch_size=3, concurrency=3).train()
    assert list(again.trained) == list(range(4, 9))
    assert not first.made.keys() & again.made.keys()


def test_results_are_used_while_calls_for_items_before_them_go_on(
    live: Any, tmp_path: Path
) -> None:
    async def begin_slowly(life: Life, item: int) -> Any:
        await life.sleep(99.0 if item < 4 else 0.0)
        return await answer(life, item)

    first = live(tmp_path, begin_slowly, concurrency=8).train(2)
    again = live(tmp_path, begin_slowly, concurrency=2, position=first.begin).train(2)
    assert list(again.trained) == [4, 5, 6, 7]
    assert again.learner.now == 2.0


@pytest.mark.parametrize("when_stale", WhenStale)
def test_results_that_are_too_old_are_made_again_dropped_or_used(
    live: Any, tmp_path: Path, when_stale: WhenStale
) -> None:
    options = {"source": range(8), "when_stale": when_stale}
    first = live(tmp_path, concurrency=8, **options).train(1)
    again = live(tmp_path, max_staleness=0, position=first.end, **options).train()
    known, old, ages = again.known, set(range(2, 8)), set(again.known.staleness)
    counts = known.num_recovered, known.num_outdated, known.num_dropped
    if when_stale is WhenStale.WAIT:
        assert (counts, ages) == ((0, 6, 0), {0})
        assert {item for item, _ in again.made} == old
    elif when_stale is WhenStale.DROP:
        assert (counts, ages, again.made) == ((0, 0, 6), set(), {})
    else:
        assert (counts, ages, again.made) == ((6, 0, 0), {1, 2, 3}, {})


def test_parts_are_not_made_again_after_a_crash(live: Any, place: Any) -> None:
    first = live(place, fail_late)
    first.learner.failure_with(first.stage)
    assert len(first.made) == 8
    again = live(place, position=first.begin).train()
    assert not first.made.keys() & again.made.keys()
    for item in range(4):
        assert again.results[item] == [first.made[item, 0], first.made[item, 1]]


def test_younger_results_do_not_take_the_place_of_a_call_with_older_parts(
    live: Any, tmp_path: Path
) -> None:
    async def take_long(life: Life, item: int) -> Any:
        parts = [await run_once("turn 0", life.make, item, 0)]
        await life.sleep(9.0 if item == 0 else 0.0)
        return [*parts, await run_once("turn 1", life.make, item, 1)]

    async def fail_with_the_sixth(life: Life, item: int) -> Any:
        if item == 5:
            await life.sleep(4.0)
            raise GenerationError
        return await take_long(life, item)

    first = live(tmp_path, take_long, max_staleness=1).train(1)
    second = live(tmp_path, fail_with_the_sixth, max_staleness=1, position=first.end)
    second.learner.failure_with(second.stage)
    third = live(tmp_path, take_long, max_staleness=1, position=first.end).train()
    assert list(third.trained)[:4] == [0, 3, 4, 5]
    assert not (first.made.keys() | second.made.keys()) & third.made.keys()


def test_a_call_with_parts_of_a_later_step_does_not_wait_where_the_learner_waits_for_it(
    live: Any, tmp_path: Path
) -> None:
    async def fail_with_the_last(life: Life, item: int) -> Any:
        if item < 12:
            return await answer(life, item)
        await run_once("turn 0", life.make, item, 0)
        await life.sleep(1.0)
        raise GenerationError

    options = {"source": range(21), "when_stale": WhenStale.DROP}
    first = live(
        tmp_path, fail_with_the_last, batch_size=6, concurrency=6, max_staleness=0, **options
    )
    first.learner.failure_with(first.stage)
    # three of its batches make one step: these parts are of step 2, and needed in step 1
    again = live(
        tmp_path, batch_size=3, concurrency=9, max_staleness=2, position=first.begin, **options
    )

    def learn(**batches: Any) -> dict[str, float]:
        again.learner.batches.extend(batches.values())
        return {}

    async def train() -> None:
        hooks = [FeedHook(again.stage, f"batch_{number}") for number in range(3)]
        async with MonitoredSession(hooks, FunctionSessionCreator(learn)) as session:
            while not session.should_stop():
                await session.run([])

    again.learner.run(train)
    assert len(again.trained) + again.known.num_dropped == 21
    assert not first.made.keys() & again.made.keys()


def test_parts_are_not_made_again_after_a_failure(live: Any, tmp_path: Path) -> None:
    failed = set[int]()

    async def fail_once(life: Life, item: int) -> Any:
        if item in failed:
            return await answer(life, item)
        failed.add(item)
        await life.sleep(3.0 if item == 3 else 0.0)
        return await fail_late(life, item)

    life = live(tmp_path, fail_once, restart=Restart(max_attempts=1)).train()
    assert life.results == {at: [life.made[at, 0], life.made[at, 1]] for at in range(9)}
    assert life.known.num_retried == 9
    its = life.trained[3]  # it is as old as its parts
    assert (its.version, its.staleness) == (0, list(life.trained).index(3) // 2)


def test_a_part_that_has_failed_may_be_tried_again_and_one_in_a_group_is_kept(
    live: Any, tmp_path: Path
) -> None:
    async def fail() -> None:
        raise GenerationError

    async def try_and_group(life: Life, item: int) -> None:
        with pytest.raises(GenerationError):
            await run_once("turn 0", fail)
        async with anyio.create_task_group() as group:
            for turn in range(2):
                group.start_soon(run_once, f"turn {turn}", life.make, item, turn)
        raise GenerationError

    first = live(tmp_path, try_and_group)
    first.learner.failure_with(first.stage)
    again = live(tmp_path, position=first.begin).train()
    assert len(first.made) == 8
    assert not first.made.keys() & again.made.keys()


def test_a_part_that_ends_behind_its_call_does_not_replace_the_result(
    live: Any, tmp_path: Path
) -> None:
    async def leave_a_part(life: Life, item: int) -> Any:
        made = await life.make(item, 0)
        life.group.start_soon(run_once, "turn 1", life.make, item, 1)
        return made

    async def train(life: Life) -> None:
        async with anyio.create_task_group() as life.group:
            await life.learner.train(life.stage, 4)

    first = live(tmp_path, leave_a_part)
    first.learner.run(partial(train, first))
    again = live(tmp_path, position=first.begin).train(4)
    assert again.results == {at: first.made[at, 0] for at in range(8)}


def test_two_parts_of_one_name_are_an_error(live: Any, tmp_path: Path) -> None:
    async def name_twice(_: Life, item: int) -> None:
        await run_once("same", same, item)
        await run_once("same", same, item)

    life = live(tmp_path, name_twice)
    with pytest.raises(ValueError, match="has had a part of the name 'same'; give each"):
        life.train()


async def test_outside_of_a_journal_a_part_is_just_awaited() -> None:
    assert [await run_once("same", same, number) for number in range(2)] == [0, 1]
    with pytest.raises(TypeError, match="a text that names the part"):
        await run_once(1, same, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("secs", [0.0, 99.0])
def test_parts_of_a_call_that_is_made_again_for_its_age_replace_older_results_and_parts(
    live: Any, tmp_path: Path, secs: float
) -> None:
    async def go_on(life: Life, item: int) -> Any:
        made = await answer(life, item)
        await life.sleep(secs if item > 1 else 0.0)
        return made

    async def fail_early(life: Life, item: int) -> None:
        await run_once("turn 0", life.make, item, 0)
        raise GenerationError

    first = live(tmp_path, go_on, concurrency=8).train(1)
    options = {"max_staleness": 0, "position": first.end}
    second = live(tmp_path, fail_early, **options)
    second.learner.failure_with(second.stage)
    assert second.made.keys() == {(2, 0), (3, 0)}
    third = live(tmp_path, **options).train()
    assert not second.made.keys() & third.made.keys()
    assert third.results[2] == [second.made[2, 0], third.made[2, 1]]


def test_what_a_loop_keeps_while_the_model_goes_back_is_not_given_up(
    live: Any, tmp_path: Path
) -> None:
    options = {"batch_size": 1, "max_staleness": 1, "when_stale": WhenStale.DROP}
    life = live(tmp_path / "journal", concurrency=2, **options)
    learner, has_failed = life.learner, list[int]()

    async def learn(groups: Any) -> dict[str, float]:
        if learner.step.value == 5 and not has_failed:
            has_failed.append(groups[0].place)
            raise PreemptionError
        return await learner.learn(groups)  # type: ignore[no-any-return]

    async def train(creator: Any, *hooks: Any) -> None:
        async with MonitoredSession(hooks, creator) as session:
            async for groups in session.batches(life.stage):
                await life.sleep(99.0 if groups[0].place == 0 else 0.0)
                await session.run("loss", {"groups": groups})

    async def train_both() -> None:
        creator = SharedSessionCreator(FunctionSessionCreator(learn, global_step=learner.step))
        saver = StateDictSaver(model={"w": np.zeros(1)})
        saving = CheckpointSaverHook(tmp_path / "model", save_steps=4, saver=saver)
        async with anyio.create_task_group() as group:
            group.start_soon(train, creator)
            group.start_soon(train, creator, InputPositionHook(life.stage), saving)

    learner.run(train_both)
    assert has_failed
    assert 0 in life.trained
    assert len(life.trained) + life.known.num_dropped == 9


@pytest.mark.parametrize("is_written", [True, False])
def test_a_checkpoint_cuts_the_journal_once_it_is_written(
    live: Any, place: Any, tmp_path: Path, is_written: bool
) -> None:
    first, model = live(place), tmp_path / "model"

    async def train() -> None:
        saver = StateDictSaver(model={"w": np.zeros(1)})
        saving = CheckpointSaverHook(model, save_steps=3, saver=saver)
        hooks = [FeedHook(first.stage, "groups"), saving, StopAtStepHook(last_step=3)]
        async with MonitoredSession(hooks, first.learner.creator) as session:
            while not session.should_stop():
                if session.global_step.value == 2 and not is_written:
                    rmtree(model)
                await session.run("loss")

    if is_written:
        first.learner.run(train)
    else:
        with pytest.raises(CheckpointError):
            first.learner.run(train)
    again = live(place, position=first.begin).train()
    made_again = {item for item, _ in first.made.keys() & again.made.keys()}
    assert made_again == (set(range(6)) if is_written else set())
    assert again.known.num_recovered >= (0 if is_written else 6)


class WatchedStore(ObjectStore):
    """A store that keeps to the order of what is done to segments, and may take long for it."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.verbs: list[str] = []
        self.is_cut, self.may_go_on = threading.Event(), threading.Event()

    def create(self, key: str, content: bytes) -> bool:
        if key.endswith(".journal"):
            self.verbs.append("create")
        return super().create(key, content)

    def delete(self, key: str) -> None:
        if key.endswith(".journal"):
            self.is_cut.set()
            self.may_go_on.wait(10.0)
            self.verbs.append("delete")
        super().delete(key)


def test_results_are_flushed_while_a_cut_of_many_segments_goes_on(
    live: Any, tmp_path: Path
) -> None:
    store = WatchedStore(pytest.importorskip("obstore.store").MemoryStore())
    first = live(store).train(1)
    [(key, _)] = [each for each in store.list() if each.key.endswith(".journal")]
    content = store.get(key)
    assert content is not None
    for number in range(2, 40):
        store.put(f"{number:010}.journal", content)

    async def wait_for_cut(life: Life, item: int) -> Any:
        store.is_cut.wait(10.0)
        made = await answer(life, item)
        if item == 8:
            store.may_go_on.set()
        return made

    store.verbs.clear()
    second = live(store, wait_for_cut, position=first.end)

    async def train() -> None:
        saver = StateDictSaver(model={"w": np.zeros(1)})
        saving = CheckpointSaverHook(tmp_path, save_steps=99, saver=saver)
        hooks = [FeedHook(second.stage, "groups"), saving]
        async with MonitoredSession(hooks, second.learner.creator) as session:
            while not session.should_stop():
                await session.run("loss")

    second.learner.run(train)
    begin = store.verbs.index("delete")
    assert "create" in store.verbs[begin : begin + 39]


@pytest.mark.parametrize("spoil", ["cut", "flip"])
def test_of_a_spoiled_segment_what_is_before_is_used(
    live: Any, tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = live(tmp_path / "whole").train(2)
    [segment] = (tmp_path / "whole").glob("*.journal")
    content, found = segment.read_bytes(), list[int]()
    step = len(content) // 12
    for at in [0, 30, *range(step, len(content) - 1, step), len(content) - 1]:
        spoiled = tmp_path / str(at) / segment.name
        spoiled.parent.mkdir()
        end = b"" if spoil == "cut" else bytes([content[at] ^ 4]) + content[at + 1 :]
        spoiled.write_bytes(content[:at] + end)
        again = live(spoiled.parent, position=first.begin).train(2)
        known = first.made | again.made
        assert again.results == {at: [known[at, 0], known[at, 1]] for at in range(4)}
        found.append(sum(result == first.results[at] for at, result in again.results.items()))
    assert found == sorted(found)
    assert set(found) == set(range(5))
    assert spoil == "flip" or not log_of(caplog)


@pytest.mark.parametrize("end", [bytes(12), b"\1" * 8 + bytes(4), b"\1" + bytes(99), b"\1" * 9])
def test_what_a_torn_frame_leaves_behind_the_last_one_is_left_out(
    live: Any, tmp_path: Path, end: bytes
) -> None:
    first = live(tmp_path).train(2)
    [segment] = tmp_path.glob("*.journal")
    segment.write_bytes(segment.read_bytes() + end)
    again = live(tmp_path, position=first.begin).train(2)
    assert again.results == first.results


def test_a_full_disk_stops_nothing_is_said_once_and_later_results_are_kept(
    live: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def clean_up(life: Life, item: int) -> Any:
        if item == 6:
            full.close()
        return await answer(life, item)

    with ExitStack() as full:
        full.enter_context(largest_file(400))
        first = live(tmp_path, clean_up).train()
    assert len(first.trained) == 9
    [warning] = log_of(caplog)
    assert "cannot be written: [Errno 27] File too large. Training goes on" in warning
    assert len(list(tmp_path.glob("*.journal"))) == 1
    again = live(tmp_path, position=first.begin).train()
    kept = {at for at in range(9) if again.results[at] == first.results[at]}
    assert kept > {7, 8}
    assert len(kept) < 9


@pytest.mark.parametrize("num_bytes", [130, 300, 600])
def test_a_cut_that_a_full_disk_ends_in_the_middle_loses_nothing(
    live: Any, tmp_path: Path, num_bytes: int
) -> None:
    place = tmp_path / "journal"
    first = live(place).train(2)
    second = live(place, position=first.begin)

    async def train() -> None:
        saver = StateDictSaver(model={"w": np.zeros(1)})
        saving = CheckpointSaverHook(tmp_path / "model", save_steps=1, saver=saver)
        hooks = [FeedHook(second.stage, "groups"), saving]
        async with MonitoredSession(hooks, second.learner.creator) as session:
            await session.run("loss")  # what it has used is to be cut, while the session ends
            full.enter_context(largest_file(num_bytes))
            raise GenerationError

    with ExitStack() as full, pytest.raises(GenerationError):
        second.learner.run(train)
    third = live(place, position=first.begin).train()
    assert not first.made.keys() & third.made.keys()


@pytest.mark.parametrize("what", ["part 'turn'", "result"])
def test_what_pickle_refuses_ends_training_at_once(live: Any, tmp_path: Path, what: str) -> None:
    async def give(life: Life, item: int) -> Any:
        made = life.made[item, 0] = "made"
        return await run_once("turn", same, lambda: made) if what != "result" else lambda: made

    life = live(tmp_path, give, restart=Restart(max_attempts=3), max_failures=9, concurrency=2)
    left = life.learner.failure_with(life.stage)
    assert isinstance(left, TypeError)
    assert str(left).startswith(f"the {what} is ")
    assert "or leave out journal=" in str(left)
    assert left.__notes__[0] == "in rollouts, at item 0: 0"
    assert (life.known.num_retried, life.known.num_failures) == (0, 0)


def test_the_journal_of_another_training_is_removed_with_a_warning(
    live: Any, place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live(place).train(2)
    second = live(place).train(2)
    assert len(log_of(caplog, "held the journal of another training, which is removed")) == 1
    third = live(place, position=second.begin).train(2)
    assert third.results == second.results
    assert len(log_of(caplog)) == 1


def test_two_runs_cannot_use_one_journal(live: Any, place: Any) -> None:
    other = live(place)

    async def open_other(_: Life, item: int) -> None:
        with pytest.raises(CheckpointInUseError, match="this process uses it already"):
            await other.learner.train(other.stage)

    assert len(live(place, open_other, concurrency=2).train(1).trained) == 2
    assert len(live(place).train(1).trained) == 2


async def test_a_stage_that_is_cancelled_while_it_opens_its_journal_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(journal=tmp_path) as stage:
        await anext(stage)
    is_reading, may_end = threading.Event(), threading.Event()

    def hold_up(record: logging.LogRecord) -> bool:
        is_reading.set()
        return may_end.wait(10.0) and "another training" in record.msg

    monkeypatch.setattr(logging.getLogger("asynchooks"), "filters", [hold_up])
    async with made(journal=tmp_path) as stage:
        async with anyio.create_task_group() as group:
            group.start_soon(anext, stage)
            await anyio.to_thread.run_sync(is_reading.wait)
            group.cancel_scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(stage.aclose)
            await settle()
            may_end.set()
    async with made(journal=tmp_path) as stage:
        assert len(await anext(stage)) == 2


def test_a_function_may_change_its_item_and_results_of_other_items_are_not_used(
    live: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def change(life: Life, item: dict[str, int]) -> Any:
        number, item["seen"] = item["number"], 1
        return await answer(life, number)

    def items(first: int) -> list[dict[str, int]]:
        return [{"number": number} for number in range(first, first + 9)]

    first = live(tmp_path, change, source=items(0)).train(2)
    again = live(tmp_path, change, source=items(0), position=first.begin).train(2)
    assert again.results == first.results
    assert not log_of(caplog)
    other = live(tmp_path, change, source=items(50), position=first.begin).train(2)
    assert {number for number, _ in other.made} >= {50, 51, 52, 53}
    assert "is of another item than {'number': 50}" in log_of(caplog)[0]


class Gone:
    """A class that the next program lacks."""


@pytest.mark.parametrize("is_part", [True, False])
def test_what_cannot_be_read_any_more_is_made_again(
    live: Any,
    tmp_path: Path,
    is_part: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def give(life: Life, item: int) -> Any:
        if not is_part:
            return Gone()
        await run_once("turn 0", same, Gone())
        raise GenerationError

    first = live(tmp_path, give, max_failures=9)
    first.learner.failure_with(first.stage) if is_part else first.train(1)
    monkeypatch.delattr(f"{__name__}.Gone")
    again = live(tmp_path, position=first.begin).train(1)
    assert again.results[0] == [again.made[0, 0], again.made[0, 1]]
    assert log_of(caplog, "cannot be read: AttributeError")


class Pair(NamedTuple):
    ids: Any
    score: float


@dataclass
class Sample:
    tokens: Any
    more: list[Any] = field(default_factory=list)


def arrays() -> list[Any]:
    big = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = np.array([np.nan, -0.0, np.inf])
    return [big, big.T, big[::2, 1::2], odd, np.float16(0.1), np.zeros((0, 3)), np.array(True)]


def tensors() -> list[Any]:
    torch = pytest.importorskip("torch")
    big = torch.arange(24.0).reshape(4, 6)
    halves = big.to(torch.bfloat16)
    views = [big, big.T, big[::2, 1::2], big[0, 0], big[:1].expand(3, 6), halves, halves[1::2, 2]]
    more = [big > 3, torch.zeros(0, 2), big.clone().requires_grad_(), torch.nn.Parameter(big)]
    return [*views, *more, halves[0, 0], torch.complex(big, big).conj(), big.to(torch.int64)]


def is_same(one: Any, other: Any) -> bool:
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Sample):
        return is_same([one.tokens, one.more], [other.tokens, other.more])
    if not hasattr(one, "dtype"):
        return bool(one == other)
    same_form = (one.dtype, one.shape) == (other.dtype, other.shape)
    if hasattr(one, "requires_grad"):
        same_form = same_form and one.requires_grad == other.requires_grad
        return same_form and bool((one == other).all())
    return same_form and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("values", [arrays, tensors])
def test_results_and_parts_come_back_as_they_were(live: Any, tmp_path: Path, values: Any) -> None:
    made = [Pair(values(), 0.1), Sample(values(), [None, "text", {"key": b"bytes"}])]

    async def give(_: Life, item: int) -> Any:
        part = await run_once("part", same, made)
        if item == 1:
            raise GenerationError
        return part

    first = live(tmp_path, give, batch_size=1, concurrency=2)
    first.learner.failure_with(first.stage)

    async def take(_: Life, item: int) -> Any:
        return await run_once("part", pytest.fail, "it is made again")

    again = live(tmp_path, take, source=range(2), batch_size=1, position=first.begin).train()
    assert again.known.num_recovered == 1
    assert all(is_same(made, again.results[item]) for item in range(2))


@pytest.mark.parametrize("has_journal", [True, False])
def test_without_a_journal_there_is_no_thread_and_no_file(
    live: Any, tmp_path: Path, has_journal: bool
) -> None:
    threads = set[str]()

    async def look(life: Life, item: int) -> Any:
        threads.update(each.name for each in threading.enumerate())
        return await answer(life, item)

    live(tmp_path if has_journal else None, look).train()
    assert ("asynchooks-journal" in threads) is has_journal
    assert bool(list(tmp_path.iterdir())) is has_journal
