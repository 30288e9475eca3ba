"""rollouts under FeedHook, session.batches and the other hooks of input; its statistics."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks._step.gate import Gate
from asynchooks.data import Rollout, WhenStale, rollouts

from ...hooks.inputs import SHORT_SECS
from ...hooks.training import run_session
from ...hooks.virtual_time import Writer, on_trampoline, pause
from .learning import Learner, known, on_engines, saved


class Model:
    """The places that it was trained with, and the ages; it is lost at some steps, once each."""

    def __init__(self, lost_at: tuple[int, ...] = (), *, is_fed: bool = True) -> None:
        self.is_fed = is_fed  # a loop keeps the batch that it has in hand when the model goes back
        self.places: list[int] = []
        self.ages: list[int] = []
        self.num_steps = 0
        self.lost_at = list(lost_at)

    async def step(self, groups: list[Rollout]) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        if self.num_steps in self.lost_at:
            self.lost_at.remove(self.num_steps)
            raise PreemptionError("the machine went away")
        for each in groups:
            assert each.version + each.staleness == self.num_steps or not self.is_fed
        self.places += [each.place for each in groups]
        self.ages += [each.staleness for each in groups]
        self.num_steps += 1
        return {"loss": 0.0}

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"places": self.places, "ages": self.ages, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places, self.ages = list(state["places"]), list(state["ages"])
        self.num_steps = state["num_steps"]


async def answer(item: int) -> int:
    for _ in range(1 + item * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return item


def stage_of(num_items: int, **changes: Any) -> Any:
    arguments = {"concurrency": 9, "max_staleness": 3, **changes}
    return rollouts(answer, range(num_items), 2, **arguments)


def finished_at(position: Any) -> set[int]:
    """The places that do not begin again."""
    place = position["place"]
    return {*range(place), *(place + each for each in position["beyond"])}


def saving(path: Path, model: Model) -> CheckpointSaverHook:
    return CheckpointSaverHook(path, save_steps=5, saver=StateDictSaver(model=model))


@pytest.mark.anyio
@pytest.mark.parametrize("lost_at", [(0,), (3,), (7,), (3, 7, 8, 19)])
async def test_a_lost_session_goes_back_with_its_rollouts(
    tmp_path: Path, lost_at: tuple[int, ...]
) -> None:
    model, stage = Model(lost_at), stage_of(50, accept=lambda item: item % 5 > 0)
    hooks = [FeedHook(stage, "groups"), saving(tmp_path, model)]
    with anyio.fail_after(SHORT_SECS):
        async with MonitoredSession(hooks, model.creator) as session:
            while not session.should_stop():
                await session.run("loss")
    assert sorted(model.places) == [place for place in range(50) if place % 5]
    assert max(model.ages) <= 3
    counts = known(stage)
    assert counts.num_refused == 10
    assert (counts.num_dropped, counts.num_failures, counts.num_under_way) == (0, 0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("lost_at", [(3,), (7,), (3, 7, 8, 19)])
async def test_a_loop_goes_back_with_its_rollouts(tmp_path: Path, lost_at: tuple[int, ...]) -> None:
    model, stage = Model(lost_at, is_fed=False), stage_of(50)
    hooks: list[Any] = [InputPositionHook(stage), saving(tmp_path, model)]
    with anyio.fail_after(SHORT_SECS):
        async with MonitoredSession(hooks, model.creator) as session:
            async for groups in session.batches(stage):
                await session.run("loss", {"groups": groups})
                # also where the stage has not gone back yet
                assert finished_at(saved(hooks[0])) == set(model.places)
    assert sorted(model.places) == [*range(50)]
    assert max(model.ages) <= 3


@pytest.mark.anyio
async def test_a_model_goes_back_again_while_its_rollouts_are_just_going_back(
    tmp_path: Path,
) -> None:
    closing, may_close, hangs = anyio.Event(), anyio.Event(), [7]

    async def answer(item: int) -> int:
        if item in hangs:
            hangs.remove(item)
            try:
                await anyio.sleep_forever()
            finally:
                closing.set()
                with anyio.CancelScope(shield=True):
                    await may_close.wait()
        return item

    async def lose_again(other: MonitoredSession) -> None:
        await closing.wait()
        model.lost_at = [1]
        await other.run("loss", {"groups": []})
        may_close.set()

    model = Model((1,), is_fed=False)
    stage = rollouts(answer, range(8), 1, concurrency=9, max_staleness=9)
    creator = SharedSessionCreator(model.creator)
    hooks = [InputPositionHook(stage), saving(tmp_path, model)]
    with anyio.fail_after(SHORT_SECS):
        async with (
            MonitoredSession(hooks, creator) as session,
            MonitoredSession([], creator) as other,
            anyio.create_task_group() as group,
        ):
            group.start_soon(lose_again, other)
            async for groups in session.batches(stage):
                await session.run("loss", {"groups": groups})
    assert sorted(model.places) == [*range(8)]


@pytest.mark.anyio
async def test_a_resumed_session_goes_on_with_what_was_not_trained_with(tmp_path: Path) -> None:
    seen: list[int] = []
    for last_step in (4, 11, 13, None):
        model = Model()
        hooks: list[Any] = [FeedHook(stage_of(60), "groups"), saving(tmp_path, model)]
        if last_step is not None:
            hooks.append(StopAtStepHook(last_step=last_step))
        async with MonitoredSession(hooks, model.creator) as session:
            assert model.places == seen
            while not session.should_stop():
                await session.run("loss")
        seen = model.places
        assert max(model.ages) <= 3
        assert model.num_steps == (last_step or 30)
    assert sorted(seen) == [*range(60)]


@pytest.mark.anyio
async def test_a_loop_over_its_batches_counts_an_item_as_used_behind_its_run() -> None:
    model, stage = Model(), stage_of(12, max_staleness=0)
    position = InputPositionHook(stage)
    async with MonitoredSession([position], model.creator) as session:
        async for groups in session.batches(stage):
            assert saved(position)["place"] == groups[0].place
            await session.run("loss", {"groups": groups})
            assert saved(position)["place"] == groups[-1].place + 1
            if model.num_steps == 4:
                break
    assert saved(position)["place"] == 8
    again, stage = Model(), stage_of(12, max_staleness=0)
    stage.load_state_dict(saved(position))
    async with MonitoredSession([], again.creator) as session:
        async for groups in session.batches(stage):
            await session.run("loss", {"groups": groups})
    assert again.places == [8, 9, 10, 11]


@pytest.mark.anyio
async def test_a_bare_loop_has_a_version_that_counts_batches() -> None:
    async with stage_of(12, concurrency=2, max_staleness=0) as stage:
        found = [
            [(each.place, each.version, each.staleness) for each in groups]
            async for groups in stage
        ]
    assert found == [[(2 * n, n, 0), (2 * n + 1, n, 0)] for n in range(6)]


@pytest.mark.anyio
async def test_three_learners_share_a_stage_and_a_checkpoint(tmp_path: Path) -> None:
    model = Model()

    async def step(groups: list[Rollout]) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        model.places += [each.place for each in groups]
        model.num_steps += 1
        return {}

    for num_items in (30, 60):
        stage = stage_of(num_items)
        model = Model()
        creator = SharedSessionCreator(FunctionSessionCreator(step))

        async def work(
            place: int, model: Model = model, stage: Any = stage, creator: Any = creator
        ) -> None:
            hooks: list[Any] = [FeedHook(stage, "groups")]
            if place == 0:
                hooks.append(saving(tmp_path, model))
            async with MonitoredSession(hooks, creator) as session:
                while not session.should_stop():
                    await session.run([])

        with anyio.fail_after(SHORT_SECS):
            async with anyio.create_task_group() as group:
                for place in range(3):
                    group.start_soon(work, place)
        assert sorted(model.places) == [*range(num_items)]


def test_the_share_of_waiting_is_that_of_generation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def slow(item: int) -> int:
        await pause(1.0)
        return item

    async def step(groups: list[Rollout]) -> dict[str, float]:
        await pause(3.0)
        return {}

    stage = rollouts(slow, range(42), 2, concurrency=2, max_staleness=0)
    writer: Any = Writer()
    hooks = [FeedHook(stage, "groups"), DataWaitHook(stage, 5, summary_writer=writer)]
    on_trampoline(lambda engine: run_session(hooks, FunctionSessionCreator(step)))
    assert [value for _, value, _ in writer.written] == [0.25] * 4
    assert any("data wait: 25.0 % of the time" in each.getMessage() for each in caplog.records)
    seen = known(stage)
    assert (seen.open_secs, seen.calls_share, seen.consumer_share) == (84.0, 0.25, 0.75)


# statistics


@on_engines
def test_what_is_under_way_and_ready_is_counted(backend: Any) -> None:
    learner = Learner(backend)

    async def timed(item: int) -> int:
        await learner.sleep(1.0 + item)
        return item

    async def main() -> None:
        stage = rollouts(timed, range(6), 2, concurrency=5, max_staleness=9)
        before = known(stage)
        assert (before.num_under_way, before.num_ready, before.staleness) == (0, 0, {})
        assert math.isnan(before.mean_staleness)
        async with stage:
            first = await anext(stage)
            assert [each.item for each in first] == [0, 1]
            now = known(stage)
            assert (now.num_under_way, now.num_ready, now.num_items) == (4, 0, 1)
            await learner.sleep(1.5)  # until 3.5
            now = known(stage)
            assert (now.num_under_way, now.num_ready) == (3, 1)
            assert (now.num_buffered, now.buffer_size) == (4, 5)
            assert now.stage == "rollouts"
            assert now.sources[0].num_items == 6
            async for _ in stage:
                pass
            now = known(stage)
            assert (now.num_under_way, now.num_ready, now.num_items) == (0, 0, 3)
            assert now.staleness == {0: 2, 1: 2, 2: 2}
            assert now.mean_staleness == 1.0

    learner.run(main)


@on_engines
def test_what_is_not_trained_with_is_counted_over_restored_runs(backend: Any) -> None:
    error = OSError("engine")

    def stage_for(learner: Learner) -> Any:
        async def flaky(item: int) -> int:
            await learner.sleep(50.0 if item % 10 == 7 else 1.0)
            if item % 10 == 3:
                raise error
            return item

        return rollouts(
            flaky, range(40), 2, concurrency=6, max_staleness=2, when_stale=WhenStale.DROP,
            accept=lambda item: item % 10 != 5, max_failures=3,
        )  # fmt: skip

    position, trained = None, list[int]()
    for last_step in (5, 9, None):
        learner = Learner(backend, begin=len(trained) // 2)
        stage = stage_for(learner)
        if position is not None:
            stage.load_state_dict(position)
        # as they were saved, before anything happens
        before = known(stage)
        position = learner.run(lambda: learner.train(stage, last_step))  # noqa: B023
        now = known(stage)
        trained += [item for items in learner.items for item in items]
        assert now.num_refused >= before.num_refused
        assert sum(now.staleness.values()) == sum(len(batch) for batch in learner.batches)
    assert (now.num_refused, now.num_failures, now.num_dropped) == (4, 4, 4)
    assert sorted(trained) == [item for item in range(40) if item % 10 not in (3, 5, 7)]


@pytest.mark.anyio
async def test_another_thread_may_ask_while_it_works() -> None:
    stage = stage_of(400)
    model, seen = Model(), list[Any]()
    hooks = [FeedHook(stage, "groups")]
    async with MonitoredSession(hooks, model.creator) as session:
        while not session.should_stop():
            await session.run("loss")
            seen.append(await anyio.to_thread.run_sync(known, stage))
            json.dumps(dict(seen[-1].staleness))
    counts = [sum(each.staleness.values()) for each in seen]
    assert counts == sorted(counts)
    assert counts[-1] == 400


@on_engines
def test_its_text_has_the_counts_of_items(backend: Any) -> None:
    learner = Learner(backend)

    async def timed(item: int) -> int:
        await learner.sleep(1.0)
        return item

    async def main() -> None:
        stage = rollouts(
            timed, range(10), 2, concurrency=4, max_staleness=1, accept=lambda item: item != 3
        )
        await learner.train(stage)
        [_, first, second] = str(stage.statistics()).splitlines()
        assert first.split()[:2] == ["rollouts", "5"]
        assert "1 refused; by staleness 0: " in first
        assert second.split()[:2] == ["sequence", "10"]

    learner.run(main)


def test_a_version_of_its_own_may_be_published_by_another_thread() -> None:
    version = GlobalStep()

    async def main() -> None:
        async with rollouts(
            answer, range(40), 2, concurrency=4, max_staleness=1, version=version
        ) as stage:
            step, ages = 0, list[int]()
            async for groups in stage:
                ages += [each.staleness for each in groups]
                step += 1
                await anyio.to_thread.run_sync(version.publish, step)
            assert step == 20
            assert max(ages) <= 1

    for backend in ("asyncio", "trio"):
        version.restart(0)
        anyio.run(main, backend=backend)


@on_engines
def test_a_version_that_is_published_between_the_look_and_the_wait_is_seen(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, version = Learner(backend), GlobalStep()
    watch = Gate.watch

    def watch_late(gate: Gate, slot: Any, step: float) -> Any:
        if known(stage).num_items > version.value:  # as another thread would
            version.publish(version.value + 1)
        return watch(gate, slot, step)

    async def timed(item: int) -> int:
        await learner.sleep(1.0)
        return item

    monkeypatch.setattr(Gate, "watch", watch_late)
    stage = rollouts(timed, range(9), 1, concurrency=1, max_staleness=0, version=version)
    learner.run(lambda: learner.train(stage))
    assert learner.items == [[item] for item in range(9)]


def test_finished_places_and_batches_are_forgotten() -> None:
    learner = Learner("turbo")

    async def timed(item: int) -> int:
        await learner.sleep(1.0 + item % 3)
        return item

    stage: Any = rollouts(timed, range(2000), 2, concurrency=8, max_staleness=2)
    learner.run(lambda: learner.train(stage))
    # a position that grew with the run would be as long in every checkpoint
    assert len(json.dumps(stage.state_dict())) < 300
    assert stage.state_dict()["place"] > 1000
